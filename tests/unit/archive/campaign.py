# SPDX-License-Identifier: Apache-2.0
"""Damage to an archive at random places: flipped bits anywhere, and single numbers forged under right digests.

    python -m tests.unit.archive.campaign ARCHIVE --flips 400 --forgeries 200 --seed 1

prints what was not noticed or not named; exit code 1 if there is any.
"""

from __future__ import annotations

import argparse
import gzip
import json
import random
import re
import sys
import tempfile
import zipfile
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from splitbench.archive.bag import PAYLOAD, pack, write_tags
from splitbench.archive.verify import DIRECTORY_ENTRY_BYTES, unpacked, verify
from splitbench.errors import UserError


def named(path: Path) -> list[str]:
    """Names in what verify finds; an archive that it refuses as a whole gives the refusal's text."""
    try:
        return [name for name, _ in verify(path).differs]
    except UserError as error:
        return [str(error)]


def members(path: Path) -> tuple[list[tuple[int, int, str]], int]:
    """Spans of an archive's bytes (first, behind the last, name): members and directory entries; the end's offset."""
    with zipfile.ZipFile(path) as archive:
        infos = sorted(archive.infolist(), key=lambda info: info.header_offset)
        starts = [info.header_offset for info in infos] + [archive.start_dir]
        spans = [(a, b, info.filename) for a, b, info in zip(starts, starts[1:], infos, strict=False)]
        entry = archive.start_dir
        for info in infos:
            end = entry + DIRECTORY_ENTRY_BYTES + len(info.filename.encode()) + len(info.extra)
            spans.append((entry, end, info.filename))
            entry = end
    return spans, entry


def flips(archive: Path, count: int, rng: random.Random) -> Iterator[str]:
    """Flip one bit, `count` times; a line for every time that was not noticed, or whose file was not named."""
    data = archive.read_bytes()
    spans, end = members(archive)
    with tempfile.TemporaryDirectory() as scratch:
        path = Path(scratch) / archive.name
        for _ in range(count):
            at, bit = rng.randrange(len(data)), 1 << rng.randrange(8)
            damaged = bytearray(data)
            damaged[at] ^= bit
            path.write_bytes(damaged)
            found = named(path)
            name = next((name for first, last, name in spans if first <= at < last), "")
            short = name.partition("/")[2]
            if not found:
                yield f"byte {at} ^ {bit:#x} in {short or 'the end record'}: not noticed"
            elif at < end and not any(short in one or name in one for one in found):
                yield f"byte {at} ^ {bit:#x} in {short}: found {found[:3]}"


Forge = Callable[[Path, random.Random], str]
"""Changes one number of a file; says which."""


def _digit(text: str, at: int, rng: random.Random) -> str:
    other = rng.choice([digit for digit in "0123456789" if digit != text[at]])
    return text[:at] + other + text[at + 1 :]


def forge_report(path: Path, rng: random.Random) -> str:
    """One digit that a reader sees."""
    page = path.read_text(encoding="utf-8")
    body = page.index("<main>")
    places = [
        match.start() + at
        for match in re.finditer(r">([^<]*\d[^<]*)<", page[body:])
        for at, letter in enumerate(match[0])
        if letter.isdigit()
    ]
    at = body + rng.choice(places)
    path.write_text(_digit(page, at, rng), encoding="utf-8")
    return page[max(body, at - 20) : at + 20]


def forge_json(path: Path, rng: random.Random) -> str:
    """One number of a JSON file."""
    packed = path.suffix == ".gz"
    text = gzip.decompress(path.read_bytes()).decode() if packed else path.read_text(encoding="utf-8")
    whole = json.loads(text)
    leaves: list[tuple[Any, Any, str]] = []

    def walk(part: Any, where: str) -> None:
        for key, value in part.items() if isinstance(part, dict) else enumerate(part):
            if isinstance(value, dict | list):
                walk(value, f"{where}.{key}")
            elif isinstance(value, int | float) and not isinstance(value, bool):
                leaves.append((part, key, f"{where}.{key}"))

    walk(whole, "")
    if not leaves:
        raise LookupError
    part, key, where = rng.choice(leaves)
    part[key] = part[key] + 1 if isinstance(part[key], int) else part[key] * 1.001 + 1e-3
    out = json.dumps(whole).encode()
    path.write_bytes(gzip.compress(out, mtime=0) if packed else out)
    return where


def forge_csv(path: Path, rng: random.Random) -> str:
    """One number of a figure's data."""
    lines = [line.split(",") for line in path.read_text(encoding="utf-8").splitlines()]
    places = [
        (row, at)
        for row, fields in enumerate(lines)
        if row
        for at, field in enumerate(fields)
        if re.fullmatch(r"-?\d+\.\d+(e-?\d+)?", field)
    ]
    if not places:
        raise LookupError
    row, at = rng.choice(places)
    lines[row][at] = repr(float(lines[row][at]) * 1.001 + 1e-3)
    path.write_text("\n".join(",".join(fields) for fields in lines) + "\n", encoding="utf-8")
    return f"line {row + 1}, {lines[0][at]}"


def forge_parquet(path: Path, rng: random.Random) -> str:
    """One number of a table."""
    table = pq.read_table(path)
    numeric = [
        name
        for name in table.column_names
        if (
            pa.types.is_floating(table.schema.field(name).type)
            or pa.types.is_integer(table.schema.field(name).type)
        )
        and table.num_rows > table[name].null_count
    ]
    if not numeric:
        raise LookupError
    name = rng.choice(numeric)
    field, values = table.schema.field(name), table[name].to_pylist()
    row = rng.choice([row for row, value in enumerate(values) if value is not None and value == value])
    values[row] = values[row] + 1 if isinstance(values[row], int) else values[row] * 1.001 + 1e-3
    column = pa.array(values, field.type)
    pq.write_table(table.set_column(table.column_names.index(name), field, column), path)
    return f"{name}, row {row}"


FORGERIES: tuple[tuple[str, Forge], ...] = (
    ("results/*/report.html", forge_report),
    ("results/*/statistics.json", forge_json),
    ("results/*/figures/*.csv", forge_csv),
    ("results/*/parts/**/*.parquet", forge_parquet),
    ("results/*/parts/**/checks.json", forge_json),
    ("results/*/tables/*.parquet", forge_parquet),
    ("results/*/plans/*.json", forge_json),
    ("results/*/cells/**/bench.json.gz", forge_json),
)


def forgeries(archive: Path, count: int, rng: random.Random) -> Iterator[tuple[str, str]]:
    """Forge one number and make all digests right again, `count` times.

    Yields:
        the file, and what went wrong: empty where it was found and named.
    """
    with unpacked(archive) as (bag, _), tempfile.TemporaryDirectory() as scratch:
        path = Path(scratch) / archive.name
        lines = (bag / "bag-info.txt").read_text(encoding="utf-8").splitlines()
        info = dict(line.split(": ", 1) for line in lines if not line.startswith("Payload-Oxum"))
        done = 0
        while done < count:
            pattern, forge = FORGERIES[done % len(FORGERIES)]
            file = rng.choice(sorted((bag / PAYLOAD).glob(pattern)))
            name = file.relative_to(bag / PAYLOAD).as_posix()
            before = file.read_bytes()
            try:
                what = forge(file, rng)
            except LookupError:  # a table without rows
                continue
            done += 1
            write_tags(bag, info)
            pack(bag, bag.name, path)
            found = named(path)
            file.write_bytes(before)
            right = any(name.removesuffix(".gz") in one for one in found)
            yield name, "" if right else f"{name} ({what}): found {found[:3]}"


def main() -> int:
    """Run the campaign."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("archive", type=Path)
    parser.add_argument("--flips", type=int, default=400)
    parser.add_argument("--forgeries", type=int, default=200)
    parser.add_argument("--seed", type=int, default=1)
    given = parser.parse_args()
    rng = random.Random(given.seed)
    lost = list(flips(given.archive, given.flips, rng))
    kinds: Counter[str] = Counter()
    for name, wrong in forgeries(given.archive, given.forgeries, rng):
        kinds[name.rpartition("/")[2]] += 1
        lost += [wrong] if wrong else []
    for line in lost:
        print(line)
    print(
        f"{given.flips} flips, {sum(kinds.values())} forgeries ({dict(kinds)}): {len(lost)} not found or not named"
    )
    return 1 if lost else 0


if __name__ == "__main__":
    sys.exit(main())
