# SPDX-License-Identifier: Apache-2.0
"""Ways to damage what is sound: bytes, JSON values, lines of text."""

from __future__ import annotations

import copy
from typing import Any

from hypothesis import strategies as st

WORSE = st.one_of(
    st.none(),
    st.booleans(),
    st.sampled_from([0, -1, 1, 2**31, 2**63, 2**64, 10**400, -(10**30)]),
    st.sampled_from([float("nan"), float("inf"), -float("inf"), 1e308, -0.0, 5e-324]),
    st.sampled_from(
        ["", "x", "1", "nan", "a\nb", "\x1b[31m", "\ud800", "語", "../x", "2024-99-99T99:99:99Z"]
    ),
    st.sampled_from([[], {}, [[]], [{}], {"a": 1}, [None], ["x"], [1, [2]]]),
)


def places_of(value: Any, at: tuple[Any, ...] = (), most: int = 4) -> list[tuple[Any, ...]]:
    """Paths to the values inside JSON data; of a list the first few."""
    found = [at]
    if isinstance(value, dict):
        for key, item in value.items():
            found += places_of(item, (*at, key), most)
    elif isinstance(value, list):
        for index, item in enumerate(value[:most]):
            found += places_of(item, (*at, index), most)
    return found


@st.composite
def bent_json(draw: st.DrawFn, sound: Any) -> Any:
    """JSON data with one to three values replaced, removed, doubled or put elsewhere."""
    value = copy.deepcopy(sound)
    for _ in range(draw(st.integers(1, 3))):
        place = draw(st.sampled_from(places_of(value)))
        if not place:
            value = draw(WORSE) if draw(st.integers(0, 9)) == 0 else value
            continue
        parent = value
        for key in place[:-1]:
            parent = parent[key]
        match draw(st.sampled_from(["replace", "replace", "remove", "double"])):
            case "replace":
                parent[place[-1]] = draw(WORSE)
            case "remove":
                del parent[place[-1]]
            case _ if isinstance(parent, list):
                parent.append(parent[place[-1]])
            case _:
                parent[draw(st.sampled_from(["x", "", "errors", "\ud800"]))] = parent[place[-1]]
        if not isinstance(value, dict | list):
            return value
    return value


@st.composite
def bent_bytes(draw: st.DrawFn, sound: bytes) -> bytes:
    """Bytes that are cut, changed at a few places, or have others put in."""
    data = bytearray(sound)
    for _ in range(draw(st.integers(1, 4))):
        at = draw(st.integers(0, max(0, len(data) - 1)))
        match draw(st.sampled_from(["flip", "flip", "cut", "insert", "drop", "repeat"])):
            case "flip" if data:
                data[at] = draw(st.integers(0, 255))
            case "cut":
                del data[at:]
            case "insert":
                data[at:at] = draw(
                    st.binary(max_size=8) | st.sampled_from([b"\0" * 64, b"[" * 200, b'"', b"}", b"\xff"])
                )
            case "drop":
                del data[at : at + draw(st.integers(1, 64))]
            case _:
                data[at:at] = data[at : at + draw(st.integers(1, 64))]
    return bytes(data)


HOSTILE_TEXT = [
    *("\x1b[2J", "\0", "\r", "\ud800", "[" * 5000, "(" * 5000, "9" * 5000, "a" * 50_000, " " * 20_000),
    *("{" * 500, '"' * 500, "\\" * 500, ":" * 2000, "=" * 2000, "'" * 500, "x=" * 3000, "-" * 5000),
    *("٣٣", "²", "1e999", "nan", "-0", "0x", "２０２４", "99:99:99", "9999-99-99 99:99:99,999"),
]


@st.composite
def bent_text(draw: st.DrawFn, sound: str) -> str:
    """Text whose lines are doubled, cut, joined, or hold what patterns stumble over."""
    text = sound
    for _ in range(draw(st.integers(1, 4))):
        at = draw(st.integers(0, len(text)))
        match draw(st.sampled_from(["put", "put", "cut", "drop", "swap", "digits"])):
            case "put":
                text = text[:at] + draw(st.sampled_from(HOSTILE_TEXT) | st.text(max_size=10)) + text[at:]
            case "cut":
                text = text[:at]
            case "drop":
                text = text[:at] + text[at + draw(st.integers(1, 200)) :]
            case "swap":
                lines = text.splitlines(keepends=True)
                text = "".join(draw(st.permutations(lines))) if 0 < len(lines) < 40 else text + text[at:]
            case _:
                digit = draw(st.sampled_from("0123456789"))
                text = text.replace(digit, draw(st.sampled_from(["", "-", "9" * 30, "٣", "x", ".", "e"])))
    return text[:400_000]
