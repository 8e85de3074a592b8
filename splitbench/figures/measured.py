# SPDX-License-Identifier: Apache-2.0
"""The tables as figures need them: a layout's cells pooled, invalid ones kept apart, failures left out."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, cast

import numpy as np
import pandas as pd

from splitbench.errors import UserError
from splitbench.figures.ecdf import Floats
from splitbench.serving.plan import Budget, Kind
from splitbench.statistics.clusters import Clustered, clustered
from splitbench.statistics.pools import Pools
from splitbench.tables import dataset

Metric = Literal["itl_ms", "ttft_ms", "second_token_ms", "e2e_ms", "handoff_gap_ms"]
KINDS: tuple[Kind, ...] = ("aggregated", "replicas", "pd")
KIND_WORDS: dict[Kind, str] = {"aggregated": "aggregated", "replicas": "replicas", "pd": "PD"}

CELL_COLUMNS = (
    "cell_id",
    "layout",
    "kind",
    "first_token",
    "budget_kind",
    "budget",
    "share",
    "workload",
    "concurrency",
    "restart",
    "repeat",
    "verdict",
)
CHECK_COLUMNS = ("cell_id", "check", "outcome", "reason")


@dataclass(frozen=True)
class Layout:
    """What of a layout a figure tells apart; `first_token` is None where only one engine could make it.

    `share` says how engines share accelerators ("mps 50+50", "time-sliced"); None where they do not.
    """

    name: str
    kind: Kind
    budget: str
    first_token: str | None
    share: str | None = None

    @property
    def occupies(self) -> str:
        """The budget, and how it is shared: what is printed; layouts are grouped by `budget`."""
        return f"{self.budget}, {self.share}" if self.share else self.budget

    @property
    def words(self) -> str:
        """Name, kind, budget and share, as panel titles and legends print them."""
        return f"{self.name} ({KIND_WORDS[self.kind]}, {self.occupies})"

    @property
    def first_from_prefiller(self) -> bool:
        """True where TTFT leaves out the KV move and the decoder (so it compares with no other kind)."""
        return self.first_token == "prefiller"


@dataclass(frozen=True)
class Sample:
    """Latencies of one layout at one concurrency, pooled over restarts and repeats.

    Args:
        values: ms, ascending, finite; of successful requests only.
        parts: the same per cell, in the order of `cells`.
        requests: how many successful requests the values come from: the independent unit.
        reasons: why the cells are invalid; empty where they are valid.
    """

    layout: Layout
    concurrency: int
    metric: Metric
    values: Floats
    parts: tuple[Floats, ...]
    requests: int
    cells: tuple[str, ...]
    reasons: tuple[str, ...] = ()

    @property
    def valid(self) -> bool:
        return not self.reasons


@dataclass(frozen=True)
class Tokens:
    """Token rows of one cell: request number, position (1 is the gap to the second token), ITL in ms."""

    request: np.ndarray
    position: np.ndarray
    itl_ms: Floats


def _worst(outcomes: pd.Series) -> str:
    return max((str(outcome) for outcome in outcomes), key=("ok", "warn", "invalid").index)


def _joined(arrays: list[Floats]) -> Floats:
    return np.concatenate(arrays) if arrays else np.empty(0)


class Measured:
    """Cells, their requests and checks, and on demand their tokens.

    Args:
        cells: one row per cell, at least `CELL_COLUMNS`.
        requests: one row per request.
        tokens: gives the token rows of a cell, those of failed requests left out.
        checks: one row per check of a cell: why it is invalid, and its verdict where its row has none.
        telemetry: gives what was watched during a cell.
        itls: gives the ITLs alone, where that is quicker than whole token rows.
    """

    def __init__(
        self,
        cells: pd.DataFrame,
        requests: pd.DataFrame,
        tokens: Callable[[str], Tokens],
        checks: pd.DataFrame | None = None,
        telemetry: Callable[[str], pd.DataFrame] | None = None,
        itls: Callable[[str], Floats] | None = None,
    ) -> None:
        missing = [name for name in CELL_COLUMNS if name not in cells.columns]
        if missing:
            raise UserError(
                f"the cells table lacks {', '.join(missing)}",
                where="cells",
                mend="make the tables again with this version",
            )
        self.cells = cells.sort_values(["workload", "layout", "concurrency", "restart", "repeat", "cell_id"])
        self.cells = self.cells.reset_index(drop=True)
        self.checks = pd.DataFrame(columns=list(CHECK_COLUMNS)) if checks is None else checks
        if not self.checks.empty:
            worst = self.checks.groupby(self.checks["cell_id"].astype(str))["outcome"].agg(_worst)
            self.cells["verdict"] = self.cells["verdict"].fillna(self.cells["cell_id"].map(worst))
        self._requests = {
            str(key): rows for key, rows in requests.groupby("cell_id", sort=False, observed=True)
        }
        self._no_requests = requests.iloc[:0]
        self._tokens = tokens
        self._telemetry = telemetry
        self._itls = itls

    @classmethod
    def from_frames(
        cls,
        cells: pd.DataFrame,
        requests: pd.DataFrame,
        tokens: pd.DataFrame,
        checks: pd.DataFrame | None = None,
        telemetry: Callable[[str], pd.DataFrame] | None = None,
    ) -> Measured:
        """From whole tables in memory; token rows of a cell need not be neighbours."""
        tokens = tokens[tokens["ok"].to_numpy(dtype=bool)]
        codes, names = pd.factorize(tokens["cell_id"])
        if codes.size and np.any(np.diff(codes) < 0):
            order = np.argsort(codes, kind="stable")
            tokens, codes = tokens.iloc[order], codes[order]
        bounds = np.searchsorted(codes, np.arange(len(names) + 1))
        columns = (
            tokens["request"].to_numpy(),
            tokens["position"].to_numpy(),
            tokens["itl_ms"].to_numpy(dtype=np.float64),
        )
        spans = {str(name): slice(bounds[i], bounds[i + 1]) for i, name in enumerate(names)}
        empty = slice(0, 0)

        def of_cell(cell_id: str) -> Tokens:
            span = spans.get(cell_id, empty)
            return Tokens(*(column[span] for column in columns))

        return cls(cells, requests, of_cell, checks, telemetry)

    @classmethod
    def from_folders(cls, folders: Iterable[Path]) -> Measured:
        """From the Parquet parts in cells' folders; a cell's token rows are read when a figure asks for them.

        Raises:
            UserError: a folder has no part of the cells or the requests table.
        """
        parts = sorted(set(folders))
        if not parts:
            raise UserError("no cell to draw", where="cells", mend="measure at least one cell")
        cells = dataset.cells(parts).to_pandas()
        places = dict(zip(cells["cell_id"], parts, strict=True))

        def of_cell(cell_id: str) -> Tokens:
            columns = ["request", "position", "itl_ms"]
            batches = list(dataset.tokens([places[cell_id]], columns))
            return Tokens(*(_joined([batch.column(i).to_numpy() for batch in batches]) for i in range(3)))

        checks = dataset.open_table(parts, "checks").to_table(columns=list(CHECK_COLUMNS))

        def samples_of(cell_id: str) -> pd.DataFrame:
            return dataset.open_table([places[cell_id]], "telemetry").to_table().to_pandas()

        requests = dataset.requests(parts).to_pandas()
        return cls(
            cells,
            requests,
            of_cell,
            checks.to_pandas(),
            samples_of,
            lambda cell_id: dataset.itl_values([places[cell_id]]),
        )

    def only(self, cell_ids: Iterable[str]) -> Measured:
        """The same tables with some cells: what a figure is drawn again from."""
        rest = copy.copy(self)
        rest.cells = self.cells[self.cells["cell_id"].isin(set(cell_ids))].reset_index(drop=True)
        return rest

    def requests(self, cell_id: str) -> pd.DataFrame:
        """Request rows of a cell, failed ones too."""
        return self._requests.get(cell_id, self._no_requests)

    def tokens(self, cell_id: str) -> Tokens:
        """Token rows of a cell's successful requests."""
        return self._tokens(cell_id)

    def telemetry(self, cell_id: str) -> pd.DataFrame:
        """Samples of what was watched during a cell (time_s, source, metric, value); empty where nothing was."""
        if self._telemetry is None:
            return pd.DataFrame({"time_s": [], "source": [], "metric": [], "value": []})
        return self._telemetry(cell_id)

    def pools(self, workload: str) -> Pools:
        """The cells of a workload as verdicts and claims compare them."""
        rows = self.cells[self.cells["workload"] == workload].astype(object)
        records = rows.where(rows.notna(), None).to_dict("records")
        return Pools(
            ({str(key): value for key, value in record.items()} for record in records),
            lambda ids, metric: self.units(ids, cast(Metric, metric)),
        )

    def reasons(self, cell_id: str) -> list[tuple[str, str, str]]:
        """Check, outcome (`invalid` before `warn`) and reason, of the checks that a cell did not pass."""
        rows = self.checks[(self.checks["cell_id"] == cell_id) & (self.checks["outcome"] != "ok")]
        rows = rows.sort_values(["outcome", "check"])
        return [
            (str(row["check"]), str(row["outcome"]), str(row["reason"] or ""))
            for row in rows.to_dict("records")
        ]

    def values(self, cell_id: str, metric: Metric) -> tuple[Floats, int]:
        """A cell's latencies in ms, ascending and finite, and the number of its successful requests."""
        rows = self.requests(cell_id)
        rows = rows[rows["ok"].to_numpy(dtype=bool)]
        if metric != "itl_ms":
            found = rows[metric].to_numpy(dtype=np.float64)
        else:
            found = self._itls(cell_id) if self._itls else self.tokens(cell_id).itl_ms
        found = found[np.isfinite(found)]
        return np.sort(found), len(rows)

    def units(self, cell_ids: Sequence[str], metric: Metric) -> Clustered:
        """A latency of cells of one layout, workload and load, with the units that vary independently.

        Units are server starts where there are two or more, else runs, else requests.
        """
        chosen = self.cells.set_index("cell_id").loc[list(cell_ids)]
        restarts = [int(value) for value in chosen["restart"]]
        if len(set(restarts)) < 2 and len(cell_ids) < 2:
            return self._by_request(cell_ids[0], metric)
        level = "restart" if len(set(restarts)) > 1 else "run"
        parts = [self.values(cell_id, metric) for cell_id in cell_ids]
        names = restarts if level == "restart" else list(range(len(parts)))
        labels = np.repeat(np.array(names, dtype=np.int64), [values.size for values, _ in parts])
        return clustered(
            np.concatenate([values for values, _ in parts]), labels, level, sum(count for _, count in parts)
        )

    def _by_request(self, cell_id: str, metric: Metric) -> Clustered:
        if metric == "itl_ms":
            tokens = self.tokens(cell_id)
            finite = np.isfinite(tokens.itl_ms)
            _, count = self.values(cell_id, "ttft_ms")
            return clustered(tokens.itl_ms[finite], tokens.request[finite].astype(np.int64), "request", count)
        values, count = self.values(cell_id, metric)
        return clustered(values, np.arange(values.size, dtype=np.int64), "request", count)

    @property
    def workloads(self) -> list[str]:
        return sorted(str(name) for name in self.cells["workload"].unique())

    def layouts(self, workload: str, names: Sequence[str] = ()) -> list[Layout]:
        """Layouts with cells of a workload: in the asked order, or aggregated first and small budgets first.

        Raises:
            UserError: the workload or an asked layout has no cell.
        """
        rows = self.cells[self.cells["workload"] == workload]
        if rows.empty:
            raise UserError(
                f"no cell of workload '{workload}'; there are: {', '.join(self.workloads) or 'none'}",
                where="figures: workload",
                mend="name one of these or measure it",
            )
        found: dict[str, tuple[tuple[int, int, str], Layout]] = {}
        for row in rows.drop_duplicates("layout").to_dict("records"):
            kind = cast(Kind, row["kind"])
            first = row["first_token"]
            layout = Layout(
                name=str(row["layout"]),
                kind=kind,
                budget=str(Budget(kind=row["budget_kind"], count=int(row["budget"]))),
                first_token=first if isinstance(first, str) else None,
                share=share if isinstance(share := row.get("share"), str) else None,
            )
            found[layout.name] = ((KINDS.index(kind), int(row["budget"]), layout.name), layout)
        absent = [name for name in names if name not in found]
        if absent:
            raise UserError(
                f"no cell of layout {', '.join(absent)} with workload '{workload}'",
                where="figures: layouts",
                mend=f"choose among {', '.join(found)}",
            )
        if names:
            return [found[name][1] for name in names]
        return [layout for _, layout in sorted(found.values(), key=lambda pair: pair[0])]

    def concurrencies(self, workload: str, layouts: Sequence[Layout]) -> dict[str, list[int]]:
        """Per layout, the concurrencies that it has cells at (closed loop only), ascending."""
        rows = self.cells[self.cells["workload"] == workload]
        rows = rows[rows["concurrency"].notna()]
        return {
            layout.name: sorted(
                {int(value) for value in rows.loc[rows["layout"] == layout.name, "concurrency"]}
            )
            for layout in layouts
        }

    def highest_shared(self, workload: str, layouts: Sequence[Layout], *, valid: bool = False) -> int:
        """The highest concurrency that every layout has cells at; with `valid`, valid cells if there are any.

        Raises:
            UserError: there is none.
        """
        source = self
        if valid:
            source = copy.copy(self)
            source.cells = self.cells[self.cells["verdict"] != "invalid"]
        sets = [set(values) for values in source.concurrencies(workload, layouts).values()]
        shared = set.intersection(*sets) if sets else set()
        if valid and not shared:
            return self.highest_shared(workload, layouts)
        if not shared:
            raise UserError(
                f"the layouts of workload '{workload}' share no concurrency",
                where="figures: concurrency",
                mend="measure one concurrency with all of them, or name fewer layouts",
            )
        return max(shared)

    def samples(self, workload: str, layout: Layout, concurrency: int, metric: Metric) -> list[Sample]:
        """The valid cells pooled, then the invalid ones pooled; either may be absent.

        Cells without a single latency (all requests failed, or a file with totals only) give an invalid
        sample without values.
        """
        rows = self.cells[
            (self.cells["workload"] == workload)
            & (self.cells["layout"] == layout.name)
            & (self.cells["concurrency"] == concurrency)
        ]
        pools: dict[bool, list[tuple[str, Floats, int, str]]] = {True: [], False: []}
        for row in rows.to_dict("records"):
            values, count = self.values(str(row["cell_id"]), metric)
            reason = ""
            if row["verdict"] == "invalid":
                failed = [
                    check for check, outcome, _ in self.reasons(str(row["cell_id"])) if outcome == "invalid"
                ]
                reason = ", ".join(failed) or "a check failed"
            elif not values.size:
                reason = "no latencies in the file"
            pools[not reason].append((str(row["cell_id"]), values, count, reason))
        return [
            Sample(
                layout=layout,
                concurrency=concurrency,
                metric=metric,
                values=pool[0][1] if len(pool) == 1 else np.sort(np.concatenate([part[1] for part in pool])),
                parts=tuple(part[1] for part in pool),
                requests=sum(part[2] for part in pool),
                cells=tuple(part[0] for part in pool),
                reasons=tuple(dict.fromkeys(part[3] for part in pool if part[3])),
            )
            for pool in pools.values()
            if pool
        ]
