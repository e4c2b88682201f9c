"""Archives and pickles as torch would never write them."""

from __future__ import annotations

import struct
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from ckptools.errors import CkptoolsError
from ckptools.pickles import reader


@dataclass
class Member:
    """A record of a hand-written archive; what is None follows from the data."""

    name: bytes
    data: bytes = b""
    local_name: bytes | None = None
    flags: int = 0
    local_flags: int | None = None
    method: int = 0
    crc: int | None = None
    size: int | None = None
    packed: int | None = None
    local_size: int | None = None
    header: int | None = None
    extra: bytes = b""

    def local(self) -> bytes:
        name = self.name if self.local_name is None else self.local_name
        flags = self.flags if self.local_flags is None else self.local_flags
        size = len(self.data) if self.local_size is None else self.local_size
        crc = zlib.crc32(self.data)
        head = struct.pack("<4s5H3L2H", b"PK\3\4", 20, flags, self.method, 0, 0, crc, size, size, len(name), 0)
        return head + name + self.data

    def central(self, at: int) -> bytes:
        size = len(self.data) if self.size is None else self.size
        packed = size if self.packed is None else self.packed
        crc = zlib.crc32(self.data) if self.crc is None else self.crc
        header = at if self.header is None else self.header
        numbers = (20, 20, self.flags, self.method, 0, 0, crc, packed, size, len(self.name), len(self.extra))
        return struct.pack("<4s6H3L5H2L", b"PK\1\2", *numbers, 0, 0, 0, 0, header) + self.name + self.extra


def archive(path: Path, members: Sequence[Member], front: bytes = b"", back: bytes = b"", count: int = -1) -> Path:
    """Write a zip of `members`, with bytes in front of it and behind."""
    body, directory = front, b""
    for member in members:
        directory += member.central(len(body))
        body += member.local()
    n = len(members) if count < 0 else count
    end = struct.pack("<4s4H2LH", b"PK\5\6", 0, 0, n, n, len(directory), len(body), 0)
    path.write_bytes(body + directory + end + back)
    return path


def members_of(tree: object, path: Path) -> list[Member]:
    """The records of what torch.save makes of `tree`."""
    import zipfile

    torch.save(tree, path)
    with zipfile.ZipFile(path) as zipped:
        return [Member(info.filename.encode(), zipped.read(info)) for info in zipped.infolist()]


def with_pickle(path: Path, data: bytes, *storages: bytes) -> Path:
    """An archive whose data.pkl is `data`, with records `data/0`, `data/1` …"""
    records = [Member(f"a/data/{i}".encode(), s) for i, s in enumerate(storages)]
    return archive(path, [Member(b"a/data.pkl", data), *records])


def storage(key: str = "0", numel: int = 4, kind: str = "FloatStorage") -> bytes:
    """Opcodes that push a storage."""
    pid = b"(" + text("storage") + f"ctorch\n{kind}\n".encode() + text(key) + text("cpu") + number(numel) + b"t"
    return pid + b"Q"


def text(value: str) -> bytes:
    data = value.encode("utf-8", "surrogatepass")
    return b"X" + len(data).to_bytes(4, "little") + data


def number(value: int) -> bytes:
    data = value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True)
    return b"\x8b" + len(data).to_bytes(4, "little") + data


def numbers(values: Sequence[int]) -> bytes:
    return b"(" + b"".join(map(number, values)) + b"t"


def tensor(size: Sequence[int] = (4,), stride: Sequence[int] = (1,), offset: int = 0, of: bytes | None = None) -> bytes:
    """Opcodes that push a tensor, whatever its numbers are."""
    view = number(offset) + numbers(size) + numbers(stride) + b"\x89"
    return b"ctorch._utils\n_rebuild_tensor_v2\n(" + (of or storage()) + view + b"ccollections\nOrderedDict\n)RtR"


def one_line(path: Path) -> str:
    """Read a file that must be refused, in one clear line that begins with its name."""
    try:
        reader.read(path)
    except CkptoolsError as error:
        told = str(error)
        assert told.startswith(f"{path}: ")
        assert "\n" not in told and told.isprintable() and len(told) < 500 + len(str(path)), told
        return told.removeprefix(f"{path}: ")
    raise AssertionError("it was accepted")
