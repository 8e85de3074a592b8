# SPDX-License-Identifier: Apache-2.0
"""Read shared objects just far enough to make them smaller for one GPU.

CUDA code lies in a shared object as "fat binaries": a container header, then one entry per architecture and kind. An
entry that the GPU at hand never loads is overwritten with zeros, which compress to nothing; sizes and offsets stay, so
that everything else in the file stays right. Layout as in NVIDIA's public `fatbinary` headers: container magic
0xBA55ED50, then version (u16), header size (u16), payload size (u64); entry: kind (u16: 1 PTX, 2 machine code), version
(u16), header size (u32), payload size (u64), and the architecture (u32) 28 bytes after the entry's begin.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_CONTAINER = struct.Struct("<IHHQ")
_CONTAINER_MAGIC = 0xBA55ED50
_ENTRY = struct.Struct("<HHIQ")
_SMALLEST_ENTRY = 64
_ARCHITECTURE_AT = 28
PTX, MACHINE_CODE = 1, 2


@dataclass(frozen=True)
class Entry:
    """One piece of GPU code: its payload's place in the file, what it is and for which architecture (90: sm_90)."""

    begin: int
    end: int
    kind: int
    architecture: int

    @property
    def size(self) -> int:
        return self.end - self.begin


def fat_binaries(data: bytes | bytearray) -> Iterator[list[Entry]]:
    """The containers in a file, each as the list of its entries; what only looks like one is passed over."""
    marker = _CONTAINER_MAGIC.to_bytes(4, "little")
    position = 0
    while (position := data.find(marker, position)) >= 0:
        entries, end = _container(data, position)
        if not entries:
            position += 4
            continue
        yield entries
        position = end


def _container(data: bytes | bytearray, begin: int) -> tuple[list[Entry], int]:
    if begin + _CONTAINER.size > len(data):
        return [], begin
    _, version, header, payload = _CONTAINER.unpack_from(data, begin)
    end = begin + header + payload
    if version != 1 or header != _CONTAINER.size or end > len(data):
        return [], begin
    entries = []
    position = begin + header
    while position + _SMALLEST_ENTRY <= end:
        kind, _, entry_header, size = _ENTRY.unpack_from(data, position)
        code = position + entry_header
        if entry_header < _SMALLEST_ENTRY or code + size > end:
            break  # not an entry: leave the rest alone
        (architecture,) = struct.unpack_from("<I", data, position + _ARCHITECTURE_AT)
        entries.append(Entry(code, code + size, kind, architecture))
        position = code + size
    return entries, end


@dataclass(frozen=True)
class Slimmed:
    """Bytes of GPU code that were kept and blanked."""

    kept: int
    blanked: int


def keep_architecture(path: Path, architecture: int, *, largest_ptx: int | None = None) -> Slimmed:
    """Blank the GPU code in a shared object that a GPU of `architecture` (90 for sm_90) never loads.

    Where a container has machine code for it, that is kept. Otherwise the driver would compile the newest PTX that is
    not newer than the GPU: that is kept, unless it is larger than `largest_ptx` bytes. Kernels whose code is gone fail
    when they are launched, so whoever blanks PTX must know that they are not used.
    """
    data = bytearray(path.read_bytes())
    kept = blanked = 0
    for entries in fat_binaries(data):
        chosen = _loaded_by(entries, architecture, largest_ptx)
        for entry in entries:
            if entry in chosen:
                kept += entry.size
            else:
                data[entry.begin : entry.end] = bytes(entry.size)
                blanked += entry.size
    if blanked:
        path.write_bytes(data)
    return Slimmed(kept, blanked)


def _loaded_by(entries: list[Entry], architecture: int, largest_ptx: int | None) -> set[Entry]:
    machine = {e for e in entries if e.kind == MACHINE_CODE and e.architecture == architecture}
    if machine:
        return machine
    texts = [e for e in entries if e.kind == PTX and e.architecture <= architecture]
    newest = max((e.architecture for e in texts), default=None)
    return {e for e in texts if e.architecture == newest and (largest_ptx is None or e.size <= largest_ptx)}


_ELF_HEADER = struct.Struct("<16sHHIQQQIHHHHHH")
_SECTION = struct.Struct("<IIQQQQIIQQ")
_DYNAMIC = struct.Struct("<qQ")
_SHT_DYNAMIC = 6
_DT_NEEDED = 1


def needed_libraries(path: Path) -> list[str]:
    """Names of the shared objects that one asks the loader for (DT_NEEDED); empty for other files. 64-bit ELF."""
    data = path.read_bytes()
    if data[:6] != b"\x7fELF\x02\x01":
        return []
    header = _ELF_HEADER.unpack_from(data)
    table, entry_size, count = header[6], header[11], header[12]
    sections = [_SECTION.unpack_from(data, table + index * entry_size) for index in range(count)]
    names = []
    for section in sections:
        if section[1] != _SHT_DYNAMIC:
            continue
        offset, size, strings = section[4], section[5], sections[section[6]][4]
        for tag, value in _DYNAMIC.iter_unpack(data[offset : offset + size - size % _DYNAMIC.size]):
            if tag == _DT_NEEDED:
                start = strings + value
                names.append(data[start : data.index(b"\0", start)].decode())
    return names
