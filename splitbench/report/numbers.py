# SPDX-License-Identifier: Apache-2.0
"""Ids of the numbers on a page: each names what its number is about, and `splitbench trace ID` leads on from there.

An id is made of what the number is about (this cell's P99 of the ITL), never of its value or place on the page: it
stays the same when the page is written anew, in the other language, or with further sections.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from html.parser import HTMLParser
from typing import Any

from markupsafe import Markup

from splitbench.files import digest

ID = re.compile(r"n-[0-9a-f]{10}")
_VOID = frozenset({"area", "base", "br", "col", "hr", "img", "input", "link", "meta", "source", "wbr"})


def number_id(of: Sequence[Any]) -> str:
    """The id of the number that is about `of`, as in `["cell", CELL, "itl_ms", "p99"]`."""
    return f"n-{digest(list(of))[:10]}"


class Numbers:
    """Attributes for the elements of one page; the first element with an id can be linked to."""

    def __init__(self) -> None:
        self._seen: set[str] = set()

    def __call__(self, of: Iterable[Any], title: bool = True, link: bool = True) -> Markup:
        """` data-number="ID" data-of="..."` for what `of` says.

        Args:
            of: what the element is about.
            title: show the id where the pointer rests; not for elements with a title of their own.
            link: make it a target of links; not for elements with an id of their own.
        """
        parts = list(of)
        name = number_id(parts)
        anchor = f' id="{name}"' if link and name not in self._seen else ""
        self._seen |= {name} if link else set()
        shown = f' title="{name}"' if title else ""
        text = json.dumps(parts, ensure_ascii=False, separators=(",", ":"))
        return Markup(f'{anchor}{shown} data-number="{name}" data-of="{{}}"').format(text)


@dataclass(frozen=True)
class Stated:
    """What a page states under one id: what it is about, and the text of the first element with that id."""

    of: tuple[Any, ...]
    text: str


def numbers_of(page: str) -> dict[str, Stated]:
    """The ids of a page; empty for pages of versions that gave none."""
    reader = _Reader()
    reader.feed(page)
    return reader.found


def texts_of(page: str) -> Iterator[tuple[str, tuple[str, ...], str | None]]:
    """Every piece of text with the tags around it, outermost first, and the id of the nearest element that has one."""
    reader = _Reader()
    reader.feed(page)
    yield from reader.texts


class _Reader(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.found: dict[str, Stated] = {}
        self.texts: list[tuple[str, tuple[str, ...], str | None]] = []
        self._open: list[tuple[str, str | None, tuple[Any, ...], list[str]]] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag in _VOID:
            return
        given = dict(attrs)
        of: tuple[Any, ...] = ()
        if given.get("data-of"):
            of = tuple(json.loads(given["data-of"] or "[]"))
        self._open.append((tag, given.get("data-number"), of, []))

    def handle_endtag(self, tag: str) -> None:
        while self._open:
            name, number, of, words = self._open.pop()
            text = " ".join(words)
            if number and number not in self.found:
                self.found[number] = Stated(of, " ".join(text.split()))
            if self._open:
                self._open[-1][3].append(text)
            if name == tag:
                return

    def handle_data(self, data: str) -> None:
        if not self._open or not data.strip():
            return
        tags = tuple(entry[0] for entry in self._open)
        number = next((entry[1] for entry in reversed(self._open) if entry[1]), None)
        self.texts.append((" ".join(data.split()), tags, number))
        self._open[-1][3].append(data)
