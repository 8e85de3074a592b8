# SPDX-License-Identifier: Apache-2.0
"""Captions and reasons of checks in Japanese.

Figures and parts are made once, whatever the page's language, and hold English sentences. Here each sentence
has its pattern, `{name}` for what varies and `[s]` for an optional letter, and its Japanese form. What has no
pattern stays as it was written: a reader then sees English, never a wrong sentence.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from functools import cache
from typing import Any

_METRICS = {
    "ITL": "ITL",
    "TTFT": "TTFT",
    "time to second token": "2 トークン目までの時間",
    "end-to-end latency": "全体の応答時間",
    "hand-off gap": "引き渡しの間隔",
    "Goodput": "グッドプット",
    "Cost of a million output tokens": "100 万出力トークンの費用",
}

_CAPTIONS = (
    (
        "Cumulative distribution of {metric}, workload {workload}: one panel per layout, same axes, one line per "
        "concurrency c (requests in flight).",
        "{metric} の累積分布、ワークロード {workload}。構成ごとに 1 枚、軸は共通、同時実行数 c "
        "(処理中のリクエスト数) ごとに 1 本の線。",
    ),
    (
        "Share of values above x (logarithmic) of {metric}, workload {workload}: one panel per layout, same axes, "
        "one line per concurrency c (requests in flight).",
        "{metric} が x を超える割合 (対数)、ワークロード {workload}。構成ごとに 1 枚、軸は共通、同時実行数 c "
        "(処理中のリクエスト数) ごとに 1 本の線。",
    ),
    (
        "Cumulative distribution of {metric}, workload {workload}, at concurrency {c}; colour is the budget, "
        "line style the kind.",
        "同時実行数 {c} での {metric} の累積分布、ワークロード {workload}。色は予算、線種は構成の種類。",
    ),
    (
        "Share of values above x (logarithmic) of {metric}, workload {workload}, at concurrency {c}; colour is the "
        "budget, line style the kind.",
        "同時実行数 {c} で {metric} が x を超える割合 (対数)、ワークロード {workload}。色は予算、"
        "線種は構成の種類。",
    ),
    (
        "In {layouts} the prefiller sends the first token: its TTFT leaves out the KV move and the decoder's queue.",
        "{layouts} ではプリフィル側が最初のトークンを返すため、TTFT に KV の移動とデコード側の待ちが"
        "入らない。",
    ),
    (
        "Compare by the time to second token, which has the same content everywhere.",
        "どの構成でも内容が同じ 2 トークン目までの時間で比べること。",
    ),
    (
        "n = {n} successful requests per line ({itls} ITLs), from {cells} cell[s] each.",
        "n は 1 本の線につき成功した {n} リクエスト (ITL {itls} 個)、セル数は線ごとに {cells}。",
    ),
    (
        "n = {n} successful requests per line, from {cells} cell[s] each.",
        "n は 1 本の線につき成功した {n} リクエスト、セル数は線ごとに {cells}。",
    ),
    (
        "One repeat: no interval between repeats can be given.",
        "測定が 1 回のため、測定間の区間は示せない。",
    ),
    (
        "Invalid, shown ticked or not at all, and no result: {named}.",
        "無効で結果ではないもの (目盛り付きの線で示すか、示さない): {named}。",
    ),
    (
        "The x axis ends at {end} ms: up to {share} of a line ({which}) lies beyond.",
        "x 軸は {end} ms まで。その先に最大で線の {share} ({which}) がある。",
    ),
    ("Up to {share} of a line lies below {begin} ms.", "最大で線の {share} が {begin} ms より下にある。"),
    (
        "Points are exact quantiles of all ITLs; what supports them is the number of requests.",
        "点は全 ITL の正確な分位点で、その裏付けとなるのはリクエスト数である。",
    ),
    (
        "TTFTs of these layouts differ in content, so the time to second token is shown.",
        "これらの構成では TTFT の内容が異なるため、2 トークン目までの時間を示す。",
    ),
    (
        "Bars are 95 % intervals over server starts, else runs, else requests.",
        "縦棒はサーバー起動、なければ測定、なければリクエストにわたる 95 % 区間。",
    ),
    (
        "Bars are 95 % intervals over server starts, else runs; one of these gives none.",
        "縦棒はサーバー起動、なければ測定にわたる 95 % 区間。1 回だけでは区間がない。",
    ),
    (
        "Bars are 95 % intervals, upright over server starts or runs, level over these or requests.",
        "棒は 95 % 区間で、縦はサーバー起動または測定、横はそれらまたはリクエストにわたる。",
    ),
    (
        "One cell per layout in time, workload {workload}, concurrency {c}.",
        "構成ごとに 1 つのセルの時間経過、ワークロード {workload}、同時実行数 {c}。",
    ),
    (
        "Above, every ITL at the moment its token came; spikes, in colour, are {times} times the cell's median or "
        "more.",
        "上はトークンが届いた時刻に置いた全 ITL。色付きの突出はセルの中央値の {times} 倍以上。",
    ),
    (
        "Below, each request: dark while it waits for its first token (queue and prefill), light while it decodes.",
        "下は各リクエスト。濃い部分は最初のトークン待ち (待ち行列とプリフィル)、薄い部分はデコード中。",
    ),
    ("{layout}: none of {n} ITLs is a spike.", "{layout}: ITL {n} 個に突出はない。"),
    (
        "{layout}: {share} % of {n} ITLs are spikes; {beside} % of them while another request waited for its first "
        "token (of the other ITLs, {usual} %).",
        "{layout}: ITL {n} 個の {share} % が突出で、その {beside} % は他のリクエストが最初のトークンを"
        "待つ間に起きた (ほかの ITL では {usual} %)。",
    ),
    (
        "{what} against concurrency, workload {workload}; it counts requests that keep the SLO ({slo}), and every "
        "accelerator of the layout.",
        "同時実行数に対する{what}、ワークロード {workload}。SLO ({slo}) を守るリクエストだけを数え、"
        "構成のアクセラレーターはすべて数える。",
    ),
    (
        "{what} against concurrency, workload {workload}; it counts all answered requests, since no SLO is set, and "
        "every accelerator of the layout.",
        "同時実行数に対する{what}、ワークロード {workload}。SLO がないため応答のあった全リクエストを数え、"
        "構成のアクセラレーターもすべて数える。",
    ),
    (
        "{n} points have no finite cost, since no request kept the SLO.",
        "SLO を守ったリクエストがなく、費用が有限でない点が {n} 個ある。",
    ),
    (
        "P{p} {metric} against concurrency, workload {workload}.",
        "同時実行数に対する {metric} の P{p}、ワークロード {workload}。",
    ),
    (
        "Output tokens per second and accelerator against tokens per second of one user (1,000 over the median ITL "
        "in ms), workload {workload}; a line runs through the concurrencies between its ends.",
        "1 利用者の毎秒トークン数 (1,000 を ITL の中央値 ms で割ったもの) に対する、アクセラレーター当たり"
        "毎秒の出力トークン数、ワークロード {workload}。線は両端の間の同時実行数をつなぐ。",
    ),
    (
        "Variance of three latencies at concurrency {c}, workload {workload}, parted by a nested analysis of "
        "variance ({told}).",
        "同時実行数 {c} での 3 つの遅延の分散を入れ子の分散分析で分けたもの、ワークロード {workload} "
        "({told})。",
    ),
    (
        "Hatched: not to be told apart with one start or one run per start; it is then part of the level below.",
        "斜線は、起動または起動ごとの測定が 1 回のため区別できない部分で、下の段に含まれる。",
    ),
    (
        "No valid latencies of single requests at c={c}, workload {workload}.",
        "c={c} に有効なリクエストごとの遅延がない、ワークロード {workload}。",
    ),
    (
        "Relative change of {what} from the reference to PD at equal budget, workload {workload}; below zero PD is "
        "better.",
        "同じ予算で基準から PD への {what} の相対変化、ワークロード {workload}。0 より下なら PD が良い。",
    ),
    (
        "{metric}, {layout} against {reference}: no load with valid cells of both.",
        "{metric}、{layout} と {reference}: 両方に有効なセルがある負荷がない。",
    ),
    (
        "{metric}, {layout} against {reference}: {lower} is better at every measured load.",
        "{metric}、{layout} と {reference}: 測定したすべての負荷で {lower} が良い。",
    ),
    (
        "{metric}, {layout} against {reference}: {lower} is better below c={c} (a reading of too few requests).",
        "{metric}、{layout} と {reference}: c={c} より下では {lower} が良い (リクエスト不足のため参考値)。",
    ),
    (
        "{metric}, {layout} against {reference}: {lower} is better below c={c}.",
        "{metric}、{layout} と {reference}: c={c} より下では {lower} が良い。",
    ),
    (
        "What was watched during one cell of each layout, workload {workload}, concurrency {c} (samples: {counts}).",
        "構成ごとに 1 つのセルの間に観測したもの、ワークロード {workload}、同時実行数 {c} "
        "(標本数: {counts})。",
    ),
    ("Columns have the same axes.", "左右の列の軸は共通。"),
    ("Not shown: {metrics}.", "示していないもの: {metrics}。"),
    (
        "Nothing was watched during the cells of workload {workload} at c={c}.",
        "ワークロード {workload}、c={c} のセルの間には何も観測していない。",
    ),
)

_REASONS = (
    ("all {n} requests completed", "全 {n} リクエストが完了"),
    ("{failed} of {n} requests failed: {why}", "{n} リクエスト中 {failed} 件が失敗: {why}"),
    ("{sent} of {n} requests were sent", "{n} リクエスト中 {sent} 件だけを送信"),
    ("no request succeeded, so no length is known", "成功したリクエストがなく、長さが分からない"),
    ("no request succeeded, so no gap is known", "成功したリクエストがなく、間隔が分からない"),
    ("all lengths as asked", "すべての長さが指定どおり"),
    (
        "{wrong} of {n} requests made another number of tokens than {asked}",
        "{n} リクエスト中 {wrong} 件の出力が {asked} トークンでない",
    ),
    ("inputs are off by up to {off} % (limit {limit} %)", "入力長のずれが最大 {off} % (上限 {limit} %)"),
    ("inputs are off by up to {off} %", "入力長のずれが最大 {off} %"),
    ("{n} prompts or answers are empty", "プロンプトまたは応答の {n} 件が空"),
    ("inputs of {a} to {b} tokens, outputs of {c} to {d}", "入力 {a}～{b} トークン、出力 {c}～{d} トークン"),
    (
        "{share} % of requests have chunks with several tokens",
        "リクエストの {share} % に複数トークンのチャンクがある",
    ),
    ("{share} % of ITLs are below {limit} ms", "ITL の {share} % が {limit} ms 未満"),
    ("{n} warm-up requests for {c} in flight", "処理中 {c} 件に対しウォームアップが {n} 件"),
    ("warm-up prompts are among the measured ones", "ウォームアップのプロンプトが測定にも使われている"),
    ("{n} requests that are not measured", "測定しないリクエストが {n} 件"),
    (
        "an engine does not count prefix-cache hits, so freshness is not proven",
        "プレフィックスキャッシュの命中を数えないエンジンがあり、新しい計算だと示せない",
    ),
    (
        "{share} % of prompt tokens came from the prefix cache",
        "プロンプトの {share} % がプレフィックスキャッシュから",
    ),
    (
        "the client states no start times, so the load is not proven",
        "クライアントの記録に開始時刻がなく、負荷を示せない",
    ),
    ("the rate was ramped, so there is no steady one", "到着率を変化させたため、定常の値がない"),
    ("all requests were sent at once, as asked", "指定どおり全リクエストを一度に送信"),
    (
        "engines served {served} requests, the client sent {sent}: somebody else was there",
        "エンジンは {served} 件を処理、クライアントは {sent} 件を送信: ほかの利用者がいた",
    ),
    (
        "{n} requests at a cap of {cap}: never a second round, so nothing is steady",
        "上限 {cap} に対し {n} リクエスト: 2 巡目がなく、定常にならない",
    ),
    ("all requests began at once: no steady window", "全リクエストが同時に始まり、定常の区間がない"),
    (
        "{mean} requests in flight of {cap} in the steady window ({seconds} s)",
        "定常区間 ({seconds} 秒) で処理中 {mean} 件 (上限 {cap})",
    ),
    ("too few requests to know their rate", "到着率を知るにはリクエストが少なすぎる"),
    ("{achieved} requests/s of {offered} offered", "毎秒 {achieved} リクエスト (指定 {offered})"),
    ("the client was not watched", "クライアントを観測していない"),
    (
        "the client kept a core busy to {share} % (limit {limit} %)",
        "クライアントがコアを {share} % 使った (上限 {limit} %)",
    ),
    ("its event loop is {late} ms late in the median", "イベントループの遅れが中央値で {late} ms"),
    ("its event loop is {late} ms late at P99", "イベントループの遅れが P99 で {late} ms"),
    (
        "ITLs (median {median} ms) are near the client's own {floor} ms",
        "ITL (中央値 {median} ms) がクライアント自身の {floor} ms に近い",
    ),
    (
        "{share} % of a core, event loop {late} ms late at P99",
        "コアの {share} %、イベントループの遅れは P99 で {late} ms",
    ),
    ("event loop {late} ms late at P99", "イベントループの遅れは P99 で {late} ms"),
    ("{share} % of a core", "コアの {share} %"),
    ("the machine was not watched", "マシンを観測していない"),
    (
        "the hypervisor took {share} % of the processors away",
        "ハイパーバイザーがプロセッサーの {share} % を奪った",
    ),
    ("other processes used {share} % of a core", "ほかのプロセスがコアの {share} % を使った"),
    ("nobody else there, nothing throttled", "ほかの利用者なし、速度低下なし"),
    (
        "the GPUs were not watched (nvidia-ml-py is not there)",
        "GPU を観測していない (nvidia-ml-py がない)",
    ),
    (
        "{gpu} was throttled ({why}) in {hits} of {n} samples",
        "{gpu} の速度低下 ({why}) が {n} 標本中 {hits} 回",
    ),
    (
        "clocks were held down by the power limit in {share} % of samples",
        "標本の {share} % で電力上限によりクロックが抑えられた",
    ),
    (
        "{n} requests were preempted and computed again",
        "{n} リクエストがプリエンプトされ、計算し直された",
    ),
    ("no engine's log was kept", "エンジンのログが残っていない"),
    ("nothing known in the logs of {n} engines", "{n} エンジンのログに既知の問題なし"),
    ("and {n} more", "ほか {n} 件"),
    (
        "{n} requests over all repeats; {lacking}: printed as a lower bound only",
        "全測定で {n} リクエスト。必要数 {lacking}: 下限としてのみ示す",
    ),
    (
        "{n} requests are enough for every percentile asked",
        "{n} リクエストは指定した全パーセンタイルに足りる",
    ),
    (
        "a decoder does not count loaded tokens, so nothing proves that KV moved",
        "読み込んだトークンを数えないデコーダーがあり、KV が移動したと示せない",
    ),
    (
        "no decoder's log was kept, so nothing proves that KV moved",
        "デコーダーのログがなく、KV が移動したと示せない",
    ),
    (
        "decoders hit {hits} prompt tokens but loaded only {moved}: a hit is not a load",
        "デコーダーは {hits} トークンに命中したが、読み込みは {moved} だけ: 命中は読み込みではない",
    ),
    (
        "decoders hit {hits} prompt tokens but retrieved only {moved}: a hit is not a load",
        "デコーダーは {hits} トークンに命中したが、取得は {moved} だけ: 命中は取得ではない",
    ),
    (
        "decoders loaded only {share} % of the prompt tokens",
        "デコーダーが読み込んだのはプロンプトの {share} % だけ",
    ),
    (
        "decoders retrieved only {share} % of the prompt tokens",
        "デコーダーが取得したのはプロンプトの {share} % だけ",
    ),
    (
        "{moved} tokens count as loaded, but NIXL moved no byte",
        "{moved} トークンが読み込み済みとされるが、NIXL は 1 バイトも運んでいない",
    ),
    ("{n} transfers failed", "{n} 回の転送が失敗"),
    (
        "decoders loaded {moved} of {n} prompt tokens, computed {computed}",
        "デコーダーはプロンプト {n} トークン中 {moved} を読み込み、{computed} を計算",
    ),
    (
        "decoders retrieved {moved} of {n} prompt tokens",
        "デコーダーはプロンプト {n} トークン中 {moved} を取得",
    ),
    ("the session was not asked before it was measured", "測定前に応答を確かめていない"),
    (
        "the model's answer does not depend on the prompt's first token, so equal answers prove nothing",
        "モデルの応答がプロンプトの先頭によらず、同じ応答でも何も示せない",
    ),
    (
        "answers agree to {share} % with those of an engine that computed the prompts itself; it agrees with itself "
        "to {own} %",
        "自分でプロンプトを計算したエンジンとの応答の一致は {share} %、そのエンジン自身との一致は {own} %",
    ),
    (
        "answers agree to {share} % with those of an engine that computed the prompts itself",
        "自分でプロンプトを計算したエンジンとの応答の一致は {share} %",
    ),
    (
        "UCX did not say which transport it took (UCX_LOG_LEVEL=info does)",
        "UCX が使った経路を記録していない (UCX_LOG_LEVEL=info で記録される)",
    ),
    ("{seen}; the layout states none", "{seen} (構成に指定なし)"),
    ("UCX took {strange}; the layout states {stated}", "UCX が {strange} を使った (構成の指定は {stated})"),
    ("{seen}, as the layout states", "{seen} (構成の指定どおり)"),
    (
        "made in environment {one}, {n} of {all} cells in {other}",
        "環境 {one} で測定、{all} 件中 {n} 件は {other}",
    ),
)
_SMALL = (
    (r"(?<=\d) to (?=\d)", "～"),
    (r" at c=(?=\d)", " c="),
    (r"(P[\d.]+) needs (?=\d)", r"\1 は "),
    (r"(\d+) starts, (\d+) runs", r"起動 \1 回、測定 \2 回"),
    (r"own (P\d+ ITL)", r"各リクエストの \1"),
)
_SPLIT = re.compile(r"; (?=\S)")


@cache
def _compiled(pairs: tuple[tuple[str, str], ...], end: str) -> list[tuple[re.Pattern[str], str]]:
    """English patterns, those that say most first; what varies never runs over an end."""
    varies = rf"(?P<\\1>(?:(?!{re.escape(end)}).)+?)"
    made = []
    for english, japanese in sorted(pairs, key=lambda pair: -len(re.sub(r"\{\w+\}", "", pair[0]))):
        pattern = re.escape(english).replace(r"\[s\]", "s?")
        pattern = re.sub(r"\\\{(\w+)\\\}", lambda name: varies.replace(r"\\1", name[1]), pattern)
        made.append((re.compile(pattern), japanese))
    return made


def _filled(japanese: str, found: dict[str, Any]) -> str:
    for name in ("metric", "what"):
        if name in found:
            found[name] = _METRICS.get(found[name], found[name])
    return japanese.format(**found)


def _smoothed(text: str) -> str:
    """Short words inside of what varies: `12 to 96`, `agg at c=2`, `P99 needs 368`."""
    for pattern, japanese in _SMALL:
        text = re.sub(pattern, japanese, text)
    return text


def caption(english: str) -> str:
    """A figure's caption, sentence by sentence."""
    at, said = 0, []
    while at < len(english):
        for pattern, japanese in _compiled(_CAPTIONS, ". "):
            match = pattern.match(english, at)
            if match is not None and english[match.end() : match.end() + 1] in ("", " "):
                said.append(_smoothed(_filled(japanese, match.groupdict())))
                at = match.end() + 1
                break
        else:
            end = english.find(". ", at)
            end = len(english) if end < 0 else end + 1
            said.append(english[at:end])
            at = end + 1
    return " ".join(said).replace("。 ", "。")


def reason(english: str) -> str:
    """Why a check came out as it did: as a whole, else each of its parts between semicolons."""
    whole = _whole(english)
    return whole if whole is not None else "、".join(_parts(_SPLIT.split(english)))


def _whole(english: str) -> str | None:
    for pattern, japanese in _compiled(_REASONS, "; "):
        match = pattern.fullmatch(english)
        if match is not None:
            return _smoothed(_filled(japanese, match.groupdict()))
    return None


def _parts(parts: Iterable[str]) -> list[str]:
    return [_whole(part) or part for part in parts]
