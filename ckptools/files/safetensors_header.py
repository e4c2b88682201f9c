"""The header of a safetensors file: the byte range of each tensor, checked as strictly as by the format's own library.

A file is a little-endian u64 with the header's length, the header (one JSON object that begins with `{`, may be
padded with blanks), then the data. The header maps a tensor's name to `dtype`, `shape` and `data_offsets`, which count
from the end of the header; in order of their offsets the tensors follow each other without holes and end with the
file. Beside them `__metadata__` maps strings to strings. Tensors of sub-byte dtypes end at a byte. Source: the format's
README and its Rust implementation; the tests compare what is accepted with safetensors 0.8.0.

Refused here and accepted there, on purpose: a duplicate name or field (the library takes the last, another reader may
take the first), fields other than the three of a tensor, a blank before the `{`, an entry in the form of a list, and
dtypes that torch has no name for (F6_E2M3, F6_E3M2, an odd number of F4 in the last dimension).
"""

from __future__ import annotations

import json
import re
import struct
from dataclasses import dataclass
from operator import itemgetter
from typing import Any

from ckptools.dtypes import ITEMSIZE, SAFETENSORS
from ckptools.errors import ReadError, ReadErrorKind
from ckptools.files.opening import File, Window
from ckptools.model.regions import Ints, contiguous_strides
from ckptools.model.shards import Source
from ckptools.model.tree import describe_for_error

MAX_HEADER = 100_000_000
"""Bytes; the format's own library refuses a longer header."""

MAX_VALUES = 12_000_000
"""Objects, lists and values in a header, about ten per tensor: with real names, more do not fit into `MAX_HEADER`."""

MAX_U64 = (1 << 64) - 1
FIELDS = ("dtype", "shape", "data_offsets")
FIELD_NAMES = frozenset(FIELDS)
SIGN = re.compile(rb"[\[,:\s]-")
METADATA = "__metadata__"
FLOAT4 = "float4_e2m1fn_x2"
TORCH_NAMES = {spelled: name for name, spelled in SAFETENSORS.items()} | {"F4": FLOAT4}
BITS = {spelled: 8 * ITEMSIZE[name] for spelled, name in TORCH_NAMES.items()} | {"F4": 4}
UNKNOWN_TO_TORCH = ("F6_E2M3", "F6_E3M2")


@dataclass(frozen=True, slots=True)
class HeaderEntry:
    """One tensor of a header.

    Attributes:
        dtype: torch's name.
        shape: as in torch; two F4 are one element.
        start: byte offset of its first byte in the file.
        end: one past its last byte.
    """

    dtype: str
    shape: Ints
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class Header:
    """The header of a safetensors file.

    Attributes:
        tensors: by name, in the header's order.
        metadata: of `__metadata__`; empty when there is none.
        size: bytes before the data: the length, the JSON and its padding.
    """

    tensors: dict[str, HeaderEntry]
    metadata: dict[str, str]
    size: int


def read_header(file: File | Window) -> Header:
    """Read and check the header of a safetensors file, or of a part of a file that is one.

    Raises:
        ReadError: the file is damaged, cut short, or not a safetensors file.
    """
    data = _header_bytes(file)
    size = 8 + len(data)
    try:
        found = _parsed(data)
        metadata = _metadata(found.pop(METADATA, None))
        spelled = [(name, *_fields(name, entry)) for name, entry in found.items()]
        _check_contiguous(spelled, file.size - size)
        at = file.start + size
        tensors = {name: _entry(name, dtype, shape, at + start, at + end) for name, dtype, shape, start, end in spelled}
    except HeaderError as error:
        raise ReadError(file.path, f"safetensors header: {error}", error.kind) from error
    return Header(tensors, metadata, size)


def source_of(file: File | Window, name: str, entry: HeaderEntry) -> Source:
    """The place of a tensor's elements in the file."""
    span = (entry.start, entry.end - entry.start)
    return Source(file.path, entry.start, entry.dtype, entry.shape, contiguous_strides(entry.shape), name, span)


class HeaderError(ValueError):
    """The fault of a header, without the file's name; `kind` as in `ReadError`."""

    kind: ReadErrorKind = "damaged"


class ShortError(HeaderError):
    """The file ends before the header's last tensor."""

    kind: ReadErrorKind = "cut"


def _header_bytes(file: File | Window) -> bytes:
    if file.size < 8:
        raise ReadError(file.path, f"is cut short: {file.size} bytes, and a safetensors file begins with 8", "cut")
    (length,) = struct.unpack("<Q", file.read(0, 8))
    if length > MAX_HEADER:
        raise ReadError(
            file.path, f"says that its header has {length} bytes, at most {MAX_HEADER}; no safetensors file"
        )
    if 8 + length > file.size:
        raise ReadError(file.path, f"is cut short: {file.size} bytes, and its header alone ends at {8 + length}", "cut")
    return file.read(8, length)


def _parsed(data: bytes) -> dict[str, Any]:
    if data[:1] != b"{":
        raise HeaderError(
            f"begins with {describe_for_error(data[:1])}, not with an object; no safetensors file, or damaged"
        )
    if sum(map(data.count, (b"{", b"[", b","))) > MAX_VALUES:
        raise HeaderError(f"more than {MAX_VALUES} values")
    # Python reads -0 as 0. Calling a function for each number takes half of the time, so only texts with a sign are
    # Python reads -0 as 0. A call for each number takes half of the time, so texts without a sign skip it.
    number = _integer if SIGN.search(data) else None
    try:
        text = data.decode("utf-8")
        found = json.loads(
            text, object_pairs_hook=_object, parse_int=number, parse_float=_fraction, parse_constant=_fraction
        )
    except UnicodeDecodeError as error:
        raise HeaderError(f"byte {8 + error.start} of the file is not UTF-8; damaged") from error
    except json.JSONDecodeError as error:
        raise HeaderError(f"{error.msg.lower()} at character {error.pos}; damaged") from error
    except RecursionError as error:
        raise HeaderError("nested too deep") from error
    except HeaderError:
        raise
    except ValueError as error:  # int() refuses more than a few thousand digits
        raise HeaderError("a number of thousands of digits, which is no size") from error
    if not isinstance(found, dict):
        raise HeaderError("is no object")
    return found


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object with distinct names that are Unicode text."""
    found = dict(pairs)
    if len(found) != len(pairs):
        raise HeaderError(f"{describe_for_error(_repeated(pairs))} twice in one object")
    for name in found:
        _check_text(name)
    return found


def _repeated(pairs: list[tuple[str, Any]]) -> str:
    seen: set[str] = set()
    return next(name for name, _ in pairs if name in seen or seen.add(name))  # type: ignore[func-returns-value]


def _check_text(text: str) -> None:
    """Refuse an unpaired surrogate, which JSON can express and UTF-8 cannot."""
    if not text.isascii() and any("\ud800" <= c <= "\udfff" for c in text):
        raise HeaderError(f"{describe_for_error(text)} is not Unicode text")


def _integer(text: str) -> int:
    """Parse a number that the library accepts as a u64."""
    if len(text) > 20 or text[0] == "-" or int(text) > MAX_U64:
        raise HeaderError(f"the number {text[:24]}, which is no size")
    return int(text)


def _fraction(text: str) -> float:
    raise HeaderError(f"the number {text[:24]}, which is no size")


def _metadata(found: Any) -> dict[str, str]:
    if found is None:
        return {}
    if not isinstance(found, dict):
        raise HeaderError(f"{METADATA} is {describe_for_error(found)}, not an object")
    for name, value in found.items():
        if not isinstance(value, str):
            raise HeaderError(f"{METADATA}: {describe_for_error(name)} is {describe_for_error(value)}, not a string")
        _check_text(value)
    return found


def _fields(name: str, entry: Any) -> tuple[str, list[int], int, int]:
    """The dtype in the file's spelling, the shape and the offsets of one entry, each of the right type."""
    if not isinstance(entry, dict) or entry.keys() != FIELD_NAMES:
        fields = describe_for_error(list(entry)) if isinstance(entry, dict) else describe_for_error(entry)
        raise HeaderError(f"{describe_for_error(name)}: expected an object of {', '.join(FIELDS)}, found {fields}")
    dtype, shape, offsets = (entry[field] for field in FIELDS)
    if not isinstance(dtype, str) or dtype not in BITS:
        known = ", which torch has no name for" if dtype in UNKNOWN_TO_TORCH else ", which is unknown"
        raise HeaderError(f"{describe_for_error(name)}: dtype {describe_for_error(dtype)}{known}")
    if not _sizes(shape) or not _sizes(offsets) or len(offsets) != 2:
        raise HeaderError(
            f"{describe_for_error(name)}: shape {describe_for_error(shape)}, "
            f"data_offsets {describe_for_error(offsets)}; expected lists of sizes"
        )
    return dtype, shape, offsets[0], offsets[1]


def _sizes(value: Any) -> bool:
    """Whether a value is a list of numbers that the library accepts as u64, each checked by itself."""
    return isinstance(value, list) and set(map(type, value)) <= {int} and _between(value)


def _between(sizes: list[int]) -> bool:
    return not sizes or (min(sizes) >= 0 and max(sizes) <= MAX_U64)


Spelled = tuple[str, str, list[int], int, int]


def _check_contiguous(entries: list[Spelled], available: int) -> None:
    """Refuse holes, overlaps, lengths that contradict the shape, and data that does not end with the file."""
    at = 0
    for name, dtype, shape, start, end in sorted(entries, key=itemgetter(3, 4)):
        if start != at or end < start:
            raise HeaderError(
                f"{describe_for_error(name)}: data_offsets [{start}, {end}], expected to begin at {at}; damaged"
            )
        expected = _nbytes(name, dtype, shape)
        if end - start != expected:
            raise HeaderError(
                f"{describe_for_error(name)}: {end - start} bytes for {dtype} "
                f"{describe_for_error(shape)}, which takes {expected}"
            )
        at = end
    if at != available:
        text = f"its tensors have {at} bytes, and the file {available} behind the header"
        raise ShortError(f"{text}; cut short") if available < at else HeaderError(f"{text}; bytes were added")


def _nbytes(name: str, dtype: str, shape: list[int]) -> int:
    """Bytes of a tensor; as in the library, no intermediate product may exceed 64 bits, not even one that ends as 0."""
    n = 1
    for size in shape:
        n *= size
        if n > MAX_U64:
            break
    bits = n * BITS[dtype]
    if bits > MAX_U64:
        raise HeaderError(f"{describe_for_error(name)}: shape {describe_for_error(shape)} has more than 2^64 bits")
    if bits % 8:
        raise HeaderError(f"{describe_for_error(name)}: {dtype} {describe_for_error(shape)} does not end at a byte")
    return bits // 8


def _entry(name: str, dtype: str, shape: list[int], start: int, end: int) -> HeaderEntry:
    if dtype == "F4":
        if not shape or shape[-1] % 2:
            raise HeaderError(
                f"{describe_for_error(name)}: F4 {describe_for_error(shape)}; "
                f"torch holds pairs, and the last dimension is odd"
            )
        shape = [*shape[:-1], shape[-1] // 2]
    return HeaderEntry(TORCH_NAMES[dtype], tuple(shape), start, end)
