# SPDX-License-Identifier: Apache-2.0
"""Every text of the page in English and Japanese; captions and reasons of checks are translated in `japanese`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from splitbench.report import japanese
from splitbench.wording import Language

_EN = {
    "question": "Does prefill-decode (PD) disaggregation pay off for this traffic on this machine?",
    "counts": "{cells} cells ({layouts} layouts on {workloads} workloads)",
    "report_by": "report by splitbench {version}",
    "invalid": "{invalid} of {cells} cells {are} invalid",
    "invalid_more": "and left out of every statement below; the figures draw them ticked, the table hatched, "
    "with the check that failed.",
    "unchecked": "{unchecked} of {cells} cells {were} never checked",
    "unchecked_more": "nothing vouches for their numbers.",
    "kind_aggregated": "aggregated",
    "kind_replicas": "replicas",
    "kind_pd": "PD",
    "outcome_ok": "ok",
    "outcome_warn": "warn",
    "outcome_invalid": "invalid",
    "is": "is",
    "are": "are",
    "was": "was",
    "were": "were",
    "verdict": "Verdict",
    "no_pair": "No budget holds a PD layout and another one, so there is nothing to compare.",
    "within": "Workload {workload}, {budget}",
    "against": "{layout} against {reference}",
    "at_load": "at c={load}",
    "slo_line": "SLO: {slo}; margin: {margin} %",
    "no_slo": "none is set, so the highest shared load decides",
    "keeps": "Keeps the SLO up to",
    "none": "no measured load",
    "upto": "c={load}",
    "break_even": "Break-even",
    "break_even_at": "{name}: {lower} is better below c={at}{ends}{reading}",
    "break_even_none": "{name}: {lower} is better at every shared load{reading}",
    "break_even_input": "Break-even along the input length",
    "input_at": "{name}, {layout} against {reference} at c={load}: {lower} is better below {at} input tokens"
    "{ends}{reading}",
    "input_none": "{name}, {layout} against {reference} at c={load}: {lower} is better at every input length{reading}",
    "reading": " (a reading of too few requests)",
    "next": "To decide",
    "asymmetry": "Not alike",
    "left_out": "Invalid cells left out",
    "differences": "All differences",
    "load": "Load",
    "latency": "Latency",
    "change": "Change",
    "interval": "95 % interval",
    "requests": "Requests",
    "finding": "Finding",
    "findings_better": "better",
    "findings_worse": "worse",
    "findings_same": "same",
    "findings_unclear": "unclear",
    "claims": "Claims",
    "claims_note": "Each claim is judged by 95 % intervals. Where these do not decide, the page says what the samples' "
    "own values would say.",
    "reads_reproduced": "the values alone agree",
    "reads_contradicted": "the values alone disagree",
    "reads_not decidable": "no values",
    "evidence": "Evidence",
    "test": "Test",
    "value": "Value",
    "outcome": "Outcome",
    "mixed_content": "TTFTs of these layouts differ in content: the first token comes from the prefiller in one only.",
    "seen": "What was seen",
    "no_growth": "No budget holds cells at two concurrencies, so there is no growth with load to state.",
    "workload": "Workload {workload}",
    "lead": "From c={low} to c={high} within {budget}, the {name} of",
    "grew": "grew from {low} ms{low_ends} to {high} ms{high_ends}",
    "fell": "fell from {low} ms{low_ends} to {high} ms{high_ends}",
    "stayed": "stayed from {low} ms{low_ends} to {high} ms{high_ends}",
    "no_comparison": "cannot be compared: {why}",
    "no_value": "no value above zero",
    "no_valid_at": "no valid cell at c={load} ({reasons})",
    "not_at": "not measured at c={load}",
    "terms": "ITL is the time between two tokens of one answer, TTFT the time to its first token; P99 is the value "
    "that 99 % stay at or below; c is the number of requests in flight. A closed loop at fixed c is a stress "
    "test, not a picture of user traffic.",
    "support_few": "P{percentile} needs {needs} requests; the smallest sample here has {least}, so these are readings "
    "of small samples, not supported estimates",
    "support_starts": "brackets are 95 % intervals over {starts} server starts",
    "support_one_start": "brackets, where any, are 95 % intervals over {unit} of one server start: how starts differ "
    "is not in them",
    "unit_runs": "runs",
    "unit_requests": "requests",
    "support_repeats": "a verdict asks for at least {needed} repeats, there {are} {repeats}",
    "support_left_out": "Left out: {lacking}.",
    "slo": "Highest load within {slo}",
    "slo_name": "{layout}, workload {workload}",
    "slo_load": "concurrency {load}",
    "slo_none": "none",
    "slo_note": "The highest measured concurrency up to which every valid cell stayed within, by the sample's own "
    "percentile: a reading where the sample is too small for that percentile.",
    "slo_at": "{limits} at P{percentile}",
    "and": " and ",
    "figures": "Figures",
    "lineage": "Lineage",
    "figure_lineage": "drawn by splitbench {version} from {cells} cells; data sha256",
    "figure_files": "The data, the sidecar and the picture as PDF, PNG and SVG are beside this page under the same "
    "name.",
    "figure_rerun": "Draw it again:",
    "cells": "Cells",
    "cells_note": "Latencies in ms. ≥ marks a percentile that the number of requests cannot support: the true one may "
    "be higher, and n says how many requests there are and are needed. ITLs are counted by request too, "
    "since those of one request are not independent. Brackets are 95 % intervals over the requests of the cell.",
    "cells_mixed": "TTFT is not comparable between all layouts here (some send the first token from the prefiller); "
    "the time to second token is.",
    "layout_load": "Layout, load",
    "run": "Run",
    "answered": "Answered",
    "checks": "Checks",
    "every_check": "Every check of every cell",
    "cell": "Cell",
    "cells_of": "Cells of workload {workload}",
    "checks_by_cell": "Checks by cell",
    "setup": "What ran",
    "stack": "Stack",
    "machine": "Machine",
    "layout": "Layout {layout}",
    "connector": "KV connector {connector};",
    "first_token": "first token from the {first};",
    "commands": "Commands",
    "facts": "What the engines said of themselves",
    "rerun": "How to run it again",
    "rerun_all": "Everything that is missing or outdated",
    "rerun_dry": "What would run, without running it",
    "rerun_cost": "What is left to measure, and what it costs",
    "digests": "Digests of what this page rests on",
    "digests_note": "Every figure's sidecar names its cells with their digests; every cell's folder holds the slice of "
    "the config that it was measured with.",
}

_JA = {
    "question": "このマシンとこの負荷で、プリフィルとデコードの分離 (PD) に見合う効果はあるか。",
    "counts": "セル {cells} 件 (構成 {layouts}、ワークロード {workloads})",
    "report_by": "splitbench {version} によるレポート",
    "invalid": "{cells} 件中 {invalid} 件のセルが無効",
    "invalid_more": "以下のどの記述にも使っていない。"
    "図では目盛り付きの線、表では斜線で示し、不合格のチェックを併記する。",
    "unchecked": "{cells} 件中 {unchecked} 件のセルが未検査",
    "unchecked_more": "数値を保証するものがない。",
    "kind_aggregated": "集約",
    "kind_replicas": "複製",
    "kind_pd": "PD",
    "outcome_ok": "合格",
    "outcome_warn": "注意",
    "outcome_invalid": "無効",
    "is": "",
    "are": "",
    "was": "",
    "were": "",
    "verdict": "判定",
    "no_pair": "同じ予算に PD とそれ以外の構成がそろっていないため、比較できない。",
    "within": "ワークロード {workload}、{budget}",
    "against": "{layout} と {reference} の比較",
    "at_load": "c={load}",
    "slo_line": "SLO: {slo}、許容差: {margin} %",
    "no_slo": "未設定のため、共通する最大の負荷で判定",
    "keeps": "SLO を守る最大の負荷",
    "none": "なし",
    "upto": "c={load}",
    "break_even": "損益分岐",
    "break_even_at": "{name}: c={at}{ends} より下では {lower} が良い{reading}",
    "break_even_none": "{name}: 共通するすべての負荷で {lower} が良い{reading}",
    "break_even_input": "入力長に沿った損益分岐",
    "input_at": "{name}、{layout} と {reference}、c={load}: 入力 {at} トークン{ends} "
    "より下では {lower} が良い{reading}",
    "input_none": "{name}、{layout} と {reference}、c={load}: すべての入力長で {lower} が良い{reading}",
    "reading": " (リクエスト不足のため参考値)",
    "next": "判定に必要なこと",
    "asymmetry": "条件の違い",
    "left_out": "除外した無効なセル",
    "differences": "すべての差",
    "load": "負荷",
    "latency": "遅延",
    "change": "変化",
    "interval": "95 % 区間",
    "requests": "リクエスト",
    "finding": "所見",
    "findings_better": "良い",
    "findings_worse": "悪い",
    "findings_same": "同等",
    "findings_unclear": "不明",
    "claims": "主張の検証",
    "claims_note": "各主張は 95 % 区間で判定する。区間で決まらないときは、標本の値だけならどうなるかを併記する。",
    "reads_reproduced": "値だけなら一致",
    "reads_contradicted": "値だけなら不一致",
    "reads_not decidable": "値なし",
    "evidence": "根拠",
    "test": "検証",
    "value": "値",
    "outcome": "結果",
    "mixed_content": "これらの構成の TTFT は内容が異なる: 片方だけがプリフィル側から最初のトークンを返す。",
    "seen": "観測されたこと",
    "no_growth": "2 つの同時実行数がそろった予算がないため、負荷による変化は述べられない。",
    "workload": "ワークロード {workload}",
    "lead": "{budget}、c={low} から c={high} での {name}",
    "grew": "{low} ms{low_ends} から {high} ms{high_ends} に増加",
    "fell": "{low} ms{low_ends} から {high} ms{high_ends} に減少",
    "stayed": "{low} ms{low_ends} のまま ({high} ms{high_ends})",
    "no_comparison": "比較できない: {why}",
    "no_value": "正の値がない",
    "no_valid_at": "c={load} に有効なセルがない ({reasons})",
    "not_at": "c={load} は未測定",
    "terms": "ITL は 1 つの応答の隣り合うトークンの間隔、TTFT は最初のトークンまでの時間、"
    "P99 は 99 % がそれ以下となる値、"
    "c は処理中のリクエスト数である。c を固定した閉ループは負荷試験であり、利用者のトラフィックそのものではない。",
    "support_few": "P{percentile} には {needs} リクエストが必要だが、最小の標本は {least} のため、"
    "推定ではなく参考値である",
    "support_starts": "角括弧はサーバー起動 {starts} 回にわたる 95 % 区間",
    "support_one_start": "角括弧があれば、1 回のサーバー起動の{unit}にわたる 95 % 区間で、起動ごとの差は含まない",
    "unit_runs": "測定",
    "unit_requests": "リクエスト",
    "support_repeats": "判定には {needed} 回以上の測定が必要で、今は {repeats} 回",
    "support_left_out": "除外: {lacking}。",
    "slo": "{slo} を守る最大の負荷",
    "slo_name": "{layout}、ワークロード {workload}",
    "slo_load": "同時実行数 {load}",
    "slo_none": "なし",
    "slo_note": "有効なセルがすべて上限内に収まった最大の同時実行数。標本自身のパーセンタイルによる。"
    "標本が小さいときは参考値である。",
    "slo_at": "{limits} (P{percentile})",
    "and": "、",
    "figures": "図",
    "lineage": "来歴",
    "figure_lineage": "splitbench {version} が {cells} 件のセルから作図。データの sha256",
    "figure_files": "データ、付随情報、PDF・PNG・SVG は同じ名前でこのページの隣にある。",
    "figure_rerun": "描き直す:",
    "cells": "セル",
    "cells_note": "遅延は ms。≥ はリクエスト数が足りず支えられないパーセンタイルで、真の値はもっと大きいことがある。"
    "n は今の数と必要な数。同じリクエストの ITL は独立でないため、ITL もリクエスト数で数える。"
    "角括弧はセル内のリクエストにわたる 95 % 区間。",
    "cells_mixed": "ここでは TTFT を全構成の間で比べられない (最初のトークンをプリフィル側が返す構成がある)。"
    "2 トークン目までの時間は比べられる。",
    "layout_load": "構成、負荷",
    "run": "回",
    "answered": "応答",
    "checks": "チェック",
    "every_check": "全セルの全チェック",
    "cell": "セル",
    "cells_of": "ワークロード {workload} のセル",
    "checks_by_cell": "セルごとのチェック",
    "setup": "実行環境",
    "stack": "ソフトウェア",
    "machine": "マシン",
    "layout": "構成 {layout}",
    "connector": "KV コネクタ {connector}、",
    "first_token": "最初のトークンは {first} から、",
    "commands": "コマンド",
    "facts": "エンジン自身が述べたこと",
    "rerun": "再実行の方法",
    "rerun_all": "足りないもの、古くなったものすべて",
    "rerun_dry": "実行せずに、何が実行されるかを見る",
    "rerun_cost": "残りの測定とその費用",
    "digests": "このページが拠るもののダイジェスト",
    "digests_note": "各図の付随情報はセルとそのダイジェストを、各セルのフォルダーは測定時の設定を持つ。",
}

WORDS: Mapping[Language, Mapping[str, str]] = {"en": _EN, "ja": _JA}

# What a figure shows: titles in the pictures are in English.
FIGURES: Mapping[str, str] = {
    "itl_by_concurrency": "ITL の累積分布 (構成ごと、同時実行数別)",
    "itl_of_layouts": "ITL の累積分布 (構成の比較)",
    "ttft_of_layouts": "TTFT の累積分布 (構成の比較)",
    "second_token_of_layouts": "2 トークン目までの時間の累積分布 (構成の比較)",
    "itl_tail_by_concurrency": "ITL のテール (構成ごと、同時実行数別)",
    "itl_tail_of_layouts": "ITL のテール (構成の比較)",
    "handoff_gap_by_concurrency": "プリフィルからデコードへの引き渡しの間隔",
    "itl_against_concurrency": "同時実行数に対する ITL",
    "ttft_against_concurrency": "同時実行数に対する TTFT",
    "interference": "ITL の突出と他のリクエストのプリフィル",
    "goodput": "同時実行数に対するグッドプット (SLO を守るリクエストの処理量)",
    "cost": "同時実行数に対する 100 万出力トークンの費用",
    "throughput_interactivity": "処理量と応答の速さの関係",
    "variance_split": "ばらつきの内訳 (起動、測定、リクエスト)",
    "break_even": "PD による変化と損益分岐",
    "telemetry": "測定中のエンジンとマシンの状態",
}


class Words:
    """Texts of one language: `words("cells")`, `words("lead", low=1, ...)`."""

    def __init__(self, language: Language) -> None:
        self.language: Language = language
        self._texts = WORDS[language]

    def __call__(self, key: str, **facts: Any) -> str:
        text = self._texts[key]
        return text.format(**facts) if facts else text

    def caption(self, text: str) -> str:
        """A figure's caption in this language."""
        return text if self.language == "en" else japanese.caption(text)

    def reason(self, text: str) -> str:
        """A check's reason in this language."""
        return text if self.language == "en" else japanese.reason(text)

    def budget(self, text: str) -> str:
        """`4 GPUs`, `2 cores` in this language."""
        if self.language == "en":
            return text
        count, _, noun = text.partition(" ")
        return f"{count} {'コア' if noun.startswith('core') else 'GPU'}"
