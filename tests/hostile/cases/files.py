"""Files that are no checkpoints, and things that are no files."""

from __future__ import annotations

import os
import pickle
import shutil
from collections.abc import Iterator
from pathlib import Path

from tests.hostile.cases.build import Build, written
from tests.truth import FIXTURES


def cases() -> Iterator[tuple[str, Build]]:
    contents = {
        "empty": b"", "one byte": b"P", "zeros": bytes(4096), "text": b"buy milk\n", "HTML": b"<html><b>404</b></html>",
        "git-lfs": b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 5\n", "GGUF": b"GGUF" + bytes(60),
        "HDF5": b"\x89HDF\r\n\x1a\n" + bytes(60), "gzip of nothing": b"\x1f\x8b\x08", "xz of nothing": b"\xfd7zXZ\0",
        "zstd of nothing": b"\x28\xb5\x2f\xfd", "lz4 of nothing": b"\x04\x22\x4d\x18", "bzip2 of nothing": b"BZh9",
        "a lone pickle": pickle.dumps({"a": 1}), "legacy magic alone": pickle.dumps(0x1950A86A20F9469CFC6C, 2),
    }  # fmt: skip
    for name, data in contents.items():
        yield f"file: {name}", _file(data)
    yield "file: a folder", lambda folder: _made(folder / "x.pt")
    yield "file: an empty folder of a rank", lambda folder: _made(folder / "rank0.pt")
    yield "file: a FIFO", _fifo
    yield "file: a FIFO among ranks", _fifo_among_ranks
    yield "file: nothing there", lambda folder: folder / "x.pt"
    yield "file: a link in a circle", _circle
    yield "file: a gzip bomb", _gzip_bomb


def _file(data: bytes) -> Build:
    return lambda folder: written(folder / "x.pt", data)


def _made(folder: Path) -> Path:
    folder.mkdir()
    return folder


def _fifo(folder: Path) -> Path:
    os.mkfifo(folder / "x.pt")
    return folder / "x.pt"


def _fifo_among_ranks(folder: Path) -> Path:
    shutil.copy(FIXTURES / "torch2.4.1-fsdp2-w3" / "rank0.pt", folder)
    os.mkfifo(folder / "rank1.pt")
    return folder / "rank0.pt"


def _circle(folder: Path) -> Path:
    (folder / "x.pt").symlink_to(folder / "x.pt")
    return folder / "x.pt"


def _gzip_bomb(folder: Path) -> Path:
    import gzip

    with gzip.open(folder / "x.pt.gz", "wb") as file:
        file.write(b"PK\3\4")
        for _ in range(64):
            file.write(bytes(1 << 20))
    return folder / "x.pt.gz"
