"""Archives and pickles as torch would never write them."""

from __future__ import annotations

import pickle
import struct
import tarfile
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from ckptools.errors import CkptoolsError
from ckptools.files.opening import LEGACY_MAGIC
from ckptools.model.cover import cover_problem
from ckptools.model.tree import tensors_in
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


def stream(data: bytes, *storages: bytes, keys: Sequence[str] | None = None, back: bytes = b"") -> bytes:
    """What torch wrote before 1.6, with `data` as the object's pickle and storages of 4-byte elements."""
    system = {"protocol_version": 1001, "little_endian": True, "type_sizes": {"short": 2, "int": 4, "long": 4}}
    head = b"".join(pickle.dumps(value, 2) for value in (LEGACY_MAGIC, 1001, system))
    listed = [str(i) for i in range(len(storages))] if keys is None else list(keys)
    raw = b"".join((len(s) // 4).to_bytes(8, "little") + s for s in storages)
    return head + data + pickle.dumps(listed, 2) + raw + back


def in_stream(path: Path, data: bytes, *storages: bytes) -> Path:
    """A file of before torch 1.6 whose object's pickle is `data`, with storages `0`, `1` …"""
    path.write_bytes(stream(data, *storages))
    return path


def in_tar(path: Path, data: bytes, *storages: bytes) -> Path:
    """A tar whose only member is the archive that `with_pickle` makes."""
    inside = with_pickle(path.with_name("composer_states.pt"), data, *storages)
    with tarfile.open(path, "w") as tar:
        tar.add(inside, arcname="composer_states.pt")
    inside.unlink()
    return path


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


def contradiction(path: Path) -> str:
    """Read a file with a tensor that contradicts itself: the line that the tensor has, which holds nothing."""
    (tensor,) = (t for _, t in tensors_in(reader.read(path).tree) if t.contradictions)
    ((_, told),) = tensor.contradictions
    assert told.isprintable() and len(told) < 500, told
    problem = cover_problem(tensor, "w")
    assert problem is not None and problem.code == "CK104" and problem.message == told
    return told
