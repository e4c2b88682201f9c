"""Zip archives that a second reader would read otherwise."""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

from tests.hostile.cases.build import BIG, Build, written
from tests.pickles.forge import Member, archive, members_of

TREE = {"w": torch.arange(6.0).reshape(2, 3), "step": 3}


def cases() -> Iterator[tuple[str, Build]]:
    for percent in (0, 1, 10, 50, 90, 99):
        yield f"archive cut at {percent} %", _cut(percent)
    changes: dict[str, Callable[[list[Member]], None]] = {
        "duplicate data.pkl": lambda m: m.append(m[0]),
        "duplicate storage": lambda m: m.append(next(x for x in m if b"data/0" in x.name)),
        "two roots": lambda m: m.append(Member(b"other/data.pkl", b"N.")),
        "name with ..": lambda m: m.append(Member(b"x/../../etc/passwd", b"x")),
        "absolute name": lambda m: m.append(Member(b"/etc/passwd", b"x")),
        "name with a newline": lambda m: m.append(Member(b"x/data/1\nerror: all is well", b"x")),
        "name with NUL": lambda m: m.append(Member(b"x/data/\0", b"x")),
        "name that is no UTF-8": lambda m: m.append(Member(b"x/data/\xff", b"x")),
        "wrong CRC of the pickle": lambda m: setattr(m[0], "crc", 1),
        "declared size of 2^40": lambda m: setattr(m[1], "size", 0xFFFFFFFF),
        "size beyond the file": lambda m: setattr(m[1], "size", 1 << 30),
        "header beyond the file": lambda m: setattr(m[1], "header", 1 << 30),
        "overlapping records": lambda m: setattr(m[1], "header", 0),
        "compressed record": lambda m: setattr(m[0], "method", 8),
        "encrypted record": lambda m: setattr(m[0], "flags", 1),
        "local name that differs": lambda m: setattr(m[0], "local_name", b"x/data.pkx"),
        "local size that differs": lambda m: setattr(m[0], "local_size", 1),
        "no data.pkl": lambda m: m.__delitem__(0),
        "TorchScript": lambda m: m.append(Member(m[0].name.replace(b"data.pkl", b"constants.pkl"), b"N.")),
    }  # fmt: skip
    for name, change in changes.items():
        yield f"archive: {name}", _changed(change)
    for name, front, back in (
        ("bytes in front", b"#!/bin/sh\n", b""),
        ("bytes behind", b"", b"PK" * 100),
        ("a shell script around", b"MZ", b"exit"),
    ):
        yield f"archive: {name}", _around(front, back)
    for count in (0, 1, 65_535):
        yield f"archive: entry count {count}", _counted(count)
    for name, patch in WIDE.items():
        yield f"archive: {name}", _zip64(patch)
    yield "archive: a bit of a storage that flipped", _flipped
    yield "archive of deflated bombs", _deflated


def _cut(percent: int) -> Build:
    def build(folder: Path) -> Path:
        torch.save(TREE, folder / "x.pt")
        data = (folder / "x.pt").read_bytes()
        return written(folder / "x.pt", data[: len(data) * percent // 100])

    return build


def _changed(change: Callable[[list[Member]], None]) -> Build:
    def build(folder: Path) -> Path:
        members = members_of(TREE, folder / "x.pt")
        change(members)
        return archive(folder / "x.pt", members)

    return build


def _around(front: bytes, back: bytes) -> Build:
    return lambda folder: archive(folder / "x.pt", members_of(TREE, folder / "x.pt"), front, back)


def _counted(count: int) -> Build:
    return lambda folder: archive(folder / "x.pt", members_of(TREE, folder / "x.pt"), count=count)


WIDE: dict[str, tuple[bytes, int, bytes]] = {
    "zip64 directory offset of 2^62": (b"PK\6\6", 48, struct.pack("<Q", BIG)),
    "zip64 directory offset that wraps": (b"PK\6\6", 48, struct.pack("<Q", (1 << 64) - 1)),
    "zip64 directory of 2^62 bytes": (b"PK\6\6", 40, struct.pack("<Q", BIG)),
    "zip64 entry count of 2^62": (b"PK\6\6", 32, struct.pack("<Q", BIG)),
    "zip64 entry count of 0": (b"PK\6\6", 32, bytes(8)),
    "zip64 end without its signature": (b"PK\6\6", 0, b"PK\6\0"),
    "zip64 locator that points behind the file": (b"PK\6\7", 8, struct.pack("<Q", BIG)),
    "zip64 locator that points to the front": (b"PK\6\7", 8, bytes(8)),
}
"""What is changed in one of the two zip64 records that torch writes at the end: signature, offset in it, bytes."""


def _zip64(patch: tuple[bytes, int, bytes]) -> Build:
    signature, offset, new = patch

    def build(folder: Path) -> Path:
        torch.save(TREE, folder / "x.pt")
        data = bytearray((folder / "x.pt").read_bytes())
        narrow = data.rindex(b"PK\5\6")
        # The narrow fields give way to the wide ones, so that it is the wide ones that must be right.
        data[narrow + 8 : narrow + 20] = b"\xff" * 12
        at = data.rindex(signature) + offset
        data[at : at + len(new)] = new
        return written(folder / "x.pt", bytes(data))

    return build


def _flipped(folder: Path) -> Path:
    torch.save(TREE, folder / "x.pt")
    data = bytearray((folder / "x.pt").read_bytes())
    data[data.index(struct.pack("<6f", *range(6)))] ^= 1
    return written(folder / "x.pt", bytes(data))


def _deflated(folder: Path) -> Path:
    import zipfile

    with zipfile.ZipFile(folder / "x.pt", "w", zipfile.ZIP_DEFLATED) as zipped:
        zipped.writestr("x/data.pkl", b"\x80\x02N." + bytes(64 << 20))
    return folder / "x.pt"
