# SPDX-License-Identifier: Apache-2.0
"""What a `vllm bench serve` result means, for every shape that its versions and options write."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from splitbench.tables import numbers
from splitbench.tables.numbers import Floats, Ints
from splitbench.tables.scan import Source, Span, decode, scan_objects

CLIENT = "vllm bench serve"
SGLANG = "sglang bench_serving"
_SGLANG_KEYS = frozenset({"total_output_tokens_retokenized", "accept_length", "mean_e2e_latency_ms"})

_NUMBER_KEYS = ("ttfts", "latencies", "start_times", "queue_times", "input_lens", "output_lens")
_PER_REQUEST = (*_NUMBER_KEYS, "itls", "errors")
_UNREAD = ("generated_texts",)
"""Not carried into the tables: the answers stay in the source file, whose sha256 is recorded."""
MARKS = frozenset({"ttfts", "itls", "num_prompts", "completed", "request_throughput", "total_output_tokens"})
_OWN_COLUMN = frozenset(
    {"num_prompts", "request_rate", "burstiness", "max_concurrency", "duration", "completed", "failed"}
    | {"total_input_tokens", "total_output_tokens"}
)


@dataclass
class Result:
    """One result of the client.

    Attributes:
        source: the file.
        number: place of the result in the file, from 1.
        scalars: every top-level value that is not one entry per request, by key; NaN and infinities included.
        arrays: one double per request, by key, for the keys that the file has.
        errors: one text per request; None if the file has none.
        itls_span: where the ITLs are; None if the file has none.
    """

    source: Source
    number: int
    scalars: dict[str, Any]
    arrays: dict[str, Floats]
    errors: list[str] | None
    itls_span: Span | None

    @property
    def detailed(self) -> bool:
        """Whether there is one entry per request."""
        return bool(self.arrays) or self.errors is not None or self.itls_span is not None

    @property
    def requests(self) -> int:
        """Number of requests with an entry of their own."""
        if self.arrays:
            return len(next(iter(self.arrays.values())))
        return len(self.errors) if self.errors is not None else 0

    def itls(self) -> Iterator[tuple[Floats, Ints]]:
        """ITLs in seconds, some requests at a time: values laid end to end, and how many each request has."""
        if self.itls_span is not None:
            yield from numbers.number_lists(self.source, self.itls_span, "itls")

    def ok(self) -> np.ndarray[Any, np.dtype[np.bool_]]:
        """Which requests were answered.

        The client counts a request as failed if its error text says so, or if no first token came: then TTFT
            is 0.0,
        with an error text that may be empty.
        """
        good = np.ones(self.requests, dtype=np.bool_)
        if self.errors is not None:
            good &= np.array([text == "" for text in self.errors], dtype=np.bool_)
        if "ttfts" in self.arrays:
            good &= self.arrays["ttfts"] != 0.0
        elif "output_lens" in self.arrays:
            good &= self.arrays["output_lens"] != 0
        return good


def read_results(source: Source) -> list[Result]:
    """Every result in a file: one, or several if it was appended to (JSON Lines).

    Raises:
        UserError: empty, cut, no JSON, another tool's, or arrays that disagree in length.
    """
    return [_result(source, spans, n) for n, spans in enumerate(scan_objects(source), start=1)]


def _result(source: Source, spans: dict[str, Span], number: int) -> Result:
    if not MARKS & spans.keys():
        keys = ", ".join(sorted(spans)[:4]) or "no key at all"
        raise source.error(
            f"no result of {CLIENT}: none of {', '.join(sorted(MARKS))} found, but {keys}",
            mend="for another tool's file use `splitbench import`",
        )
    arrays = {
        key: numbers.number_list(source, spans[key], key)
        for key in _NUMBER_KEYS
        if key in spans and not _is_null(source, spans[key])
    }
    has_errors = "errors" in spans and not _is_null(source, spans["errors"])
    errors = numbers.text_list(source, spans["errors"], "errors") if has_errors else None
    itls = spans.get("itls")
    if itls is not None and _is_null(source, itls):
        itls = None
    scalars = {k: decode(source, s) for k, s in spans.items() if k not in _PER_REQUEST and k not in _UNREAD}
    result = Result(source, number, scalars, arrays, errors, itls)
    _reject_ragged(result)
    return result


def _is_null(source: Source, span: Span) -> bool:
    return span[1] - span[0] == 4 and bytes(source.data[span[0] : span[1]]) == b"null"


def _reject_ragged(result: Result) -> None:
    lengths = {key: len(values) for key, values in result.arrays.items()}
    if result.errors is not None:
        lengths["errors"] = len(result.errors)
    if len(set(lengths.values())) > 1:
        if result.itls_span is not None:
            lengths["itls"] = numbers.count_lists(result.source, result.itls_span, "itls")
        # Name the odd one out beside one of the majority.
        common = max(lengths.values(), key=list(lengths.values()).count)
        odd = next(key for key, n in lengths.items() if n != common)
        usual = next(key for key in ("itls", *lengths) if lengths.get(key) == common)
        raise ragged(result.source, odd, lengths[odd], usual, common)


def ragged(source: Source, key: str, length: int, other: str, other_length: int) -> Exception:
    """The error of arrays that should have one entry per request and do not."""
    return source.error(
        f"arrays of different length: {key} ({length}) and {other} ({other_length}); "
        "each should have one entry per request",
        mend="run the cell again",
    )


def number_or_none(value: Any) -> float | None:
    """A number, also where it is written as text ("inf"); None for anything else."""
    if isinstance(value, bool) or value is None:
        return None
    try:
        return float(value)
    except (TypeError, ValueError, OverflowError):
        return None


def count_or_none(value: Any) -> int | None:
    """A whole number; None for anything else, NaN and infinities included."""
    number = number_or_none(value)
    return int(number) if number is not None and math.isfinite(number) else None


def cell_facts(result: Result) -> dict[str, Any]:
    """The columns of the cells row that the file itself states; the caller's identity goes before these."""
    scalars = result.scalars
    rate = number_or_none(scalars.get("request_rate"))
    facts: dict[str, Any] = {
        "client": SGLANG if _SGLANG_KEYS & scalars.keys() else CLIENT,
        "input_tokens_asked": count_or_none(scalars.get("random_input_len")),
        "output_tokens_asked": count_or_none(scalars.get("random_output_len")),
        "concurrency": count_or_none(scalars.get("max_concurrency")),
        "request_rate": rate if rate is not None and math.isfinite(rate) else None,
        "burstiness": number_or_none(scalars.get("burstiness")),
        "duration_s": number_or_none(scalars.get("duration")),
        "requests_asked": count_or_none(scalars.get("num_prompts")),
        "requests_completed": count_or_none(scalars.get("completed")),
        "requests_failed": count_or_none(scalars.get("failed")),
        "input_tokens_total": count_or_none(scalars.get("total_input_tokens")),
        "output_tokens_total": count_or_none(scalars.get("total_output_tokens")),
        "detailed": result.detailed,
    }
    summary: dict[str, float] = {}
    other: dict[str, str] = {}
    for key, value in scalars.items():
        # Older clients wrote the goodput under a key with a colon.
        name = "request_goodput" if key == "request_goodput:" else key
        number = number_or_none(value) if not isinstance(value, str) else None
        if key in _OWN_COLUMN and (number is not None or key == "request_rate" or value is None):
            continue
        if number is not None:
            summary[name] = number
        elif value is not None:
            other[name] = value if isinstance(value, str) else json.dumps(value)
    facts["client_summary"] = summary
    facts["client_other"] = other
    return facts
