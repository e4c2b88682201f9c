"""The members of a tar: where each regular file in it begins and ends. Only headers are read, nothing is extracted.

Layout of headers: POSIX.1-2001 (pax), and GNU tar's long names and base-256 sizes, which Python's tarfile writes too.
"""

from __future__ import annotations

from typing import NamedTuple

from ckptools.errors import ReadError
from ckptools.files.opening import File
from ckptools.model.values import describe_for_error

BLOCK = 512
MAX_MEMBERS = 100_000
MAX_EXTENSION = 1 << 16
"""Bytes of a long name or a pax header; both hold a path and a few numbers."""


class Member(NamedTuple):
    """A regular file in a tar.

    Attributes:
        name: as the tar spells it, without `./` in front.
        start: byte offset of its content.
        size: bytes.
    """

    name: str
    start: int
    size: int


def members(file: File) -> dict[str, Member]:
    """The regular files in a tar, by name.

    Raises:
        ReadError: it is cut or damaged, or holds links, devices, sparse files, or names that lead elsewhere.
    """
    found: dict[str, Member] = {}
    at, long_name, pax = 0, "", dict[str, str]()
    for _ in range(MAX_MEMBERS):
        if at + BLOCK > file.size:
            raise ReadError(file.path, f"is cut short: {file.size} bytes, and the tar does not end there", "cut")
        header = file.read(at, BLOCK)
        if not any(header):
            return found
        _check_sum(file, header, at)
        size, kind, start = _size(file, header, pax), header[156:157], at + BLOCK
        if start + size > file.size:
            raise ReadError(
                file.path, f"is cut short: {file.size} bytes, and a member of the tar ends at {start + size}", "cut"
            )
        at = start + -(-size // BLOCK) * BLOCK
        if kind in b"Lxg":
            extension = _extension(file, start, size)
            if kind == b"L":
                long_name = extension.rstrip(b"\0").decode("utf-8", "replace")
            elif kind == b"x":
                pax = _pax(file, extension)
            continue
        if kind in b"0\0007":
            name = _checked_name(file, pax.get("path") or long_name or _name(header))
            if name in found:
                raise ReadError(file.path, f"holds two members called {describe_for_error(name)}")
            if any(key.startswith("GNU.sparse") for key in pax):
                raise ReadError(file.path, f"holds {describe_for_error(name)} as a sparse file; unpack it first")
            found[name] = Member(name, start, size)
        elif kind != b"5":
            what = {b"1": "a link", b"2": "a link", b"S": "a sparse file"}.get(
                kind, f"a member of type {describe_for_error(kind)}"
            )
            raise ReadError(file.path, f"a tar that holds {what}; checkpoints are regular files")
        long_name, pax = "", {}
    raise ReadError(file.path, f"a tar of more than {MAX_MEMBERS} members")


def _check_sum(file: File, header: bytes, at: int) -> None:
    """The sum of the header's bytes, with its own field taken for spaces."""
    stated = _octal(header[148:156])
    if stated != sum(header[:148]) + 8 * ord(" ") + sum(header[156:]):
        raise ReadError(file.path, f"the tar's header at byte {at} is damaged")


def _octal(field: bytes) -> int:
    digits = field.split(b"\0")[0].strip()
    return int(digits, 8) if digits and all(d in b"01234567" for d in digits) else 0


def _size(file: File, header: bytes, pax: dict[str, str]) -> int:
    if "size" in pax and header[156:157] not in b"Lxg":
        if not pax["size"].isdecimal() or len(pax["size"]) > 20:
            raise ReadError(file.path, f"a member of the tar has {describe_for_error(pax['size'])} bytes")
        return int(pax["size"])
    field = header[124:136]
    # GNU's base-256 form of a number that has no room: the first bit says so.
    return int.from_bytes(field[1:], "big") if field[0] == 0x80 else _octal(field)


def _extension(file: File, start: int, size: int) -> bytes:
    if size > MAX_EXTENSION:
        raise ReadError(file.path, f"a header of the tar has {size} bytes; at most {MAX_EXTENSION} are read")
    return file.read(start, size)


def _pax(file: File, data: bytes) -> dict[str, str]:
    """Records of `length key=value` and a newline; the length counts itself."""
    found: dict[str, str] = {}
    while data:
        length, _, _ = data.partition(b" ")
        if not length.isdigit() or len(length) > 9 or not len(length) + 1 < int(length) <= len(data):
            raise ReadError(file.path, "a pax header of the tar is damaged")
        key, _, value = data[len(length) + 1 : int(length) - 1].partition(b"=")
        found[key.decode("utf-8", "replace")] = value.decode("utf-8", "replace")
        data = data[int(length) :]
    return found


def _name(header: bytes) -> str:
    name, prefix = (field.split(b"\0")[0].decode("utf-8", "replace") for field in (header[:100], header[345:500]))
    return f"{prefix}/{name}" if prefix and header[257:263] == b"ustar\0" else name


def _checked_name(file: File, name: str) -> str:
    plain = name.removeprefix("./")
    if not plain or "\0" in plain or plain.startswith("/") or not {"", ".", ".."}.isdisjoint(plain.split("/")):
        raise ReadError(
            file.path, f"a member of the tar is called {describe_for_error(name)}, which is no plain relative name"
        )
    return plain
