"""Plain values as a digest, the same wherever it is taken, and as a few words.

A list is as good as a tuple and 5.0 as 5, for formats differ in which of them they keep; a timedelta is its seconds, as
a `.pt` for plain `torch.load` has it. NaN is what its bits are, and -0.0 is not 0.0.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from datetime import timedelta
from hashlib import blake2b
from typing import Any

from ckptools.errors import CkptoolsError, ReadError
from ckptools.files.opening import OpenFiles
from ckptools.keys.rank_leaves import LONG, is_brief, is_plain
from ckptools.model.cover import cover_problem
from ckptools.model.tensor import Shard, Tensor
from ckptools.model.values import Global, Lost, NumpyArray, Opaque, scalar
from ckptools.tensor_io.fetch_ahead import Part, parts_of_all
from ckptools.tensor_io.stream import shard_bytes, tensor_bytes
from ckptools.text import MAX_BITS, clip, plural, shape

MAX_ITEMS = 4_000_000
"""Items of one value that are looked at; containers can be shared, so a small file may unfold to more."""

MAX_TEXT = 60
MAX_SMALL = 1 << 20
"""Bytes of a tensor outside of models and optimizers that is compared as a value."""

NUMPY_DTYPES = {
    "f8": "float64", "f4": "float32", "f2": "float16", "i8": "int64", "i4": "int32", "i2": "int16", "i1": "int8",
    "u8": "uint64", "u4": "uint32", "u2": "uint16", "u1": "uint8", "b1": "bool", "c8": "complex64", "c16": "complex128",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Content:
    """The value at a key in a form that can be compared.

    Attributes:
        digest: of the value; "" where it is unknown.
        text: the value in a few words.
        problem: why the value is unknown.
        value: a list or array whose items may be looked at; None of anything else, and of a file of digests.
    """

    digest: str
    text: str
    problem: str = ""
    value: Any = field(default=None, compare=False, repr=False)

    @property
    def fingerprint(self) -> str:
        """The first digits of the digest, by which people distinguish states."""
        return self.digest[:8]


def content_of(value: Any, files: OpenFiles, rank: int | None = None, most: int = MAX_SMALL) -> Content:
    """Digest and describe a plain value, or a small tensor.

    A tensor that each rank has for itself is read of one `rank`; one of more than `most` bytes is not read.
    """
    text = clip(text_of(value), MAX_TEXT)
    digest = blake2b(digest_size=16)
    try:
        for piece in _pieces(value, files, rank, most):
            digest.update(piece)
    except CkptoolsError as error:
        return Content("", text, error.reason)
    return Content(digest.hexdigest(), text, "", value if isinstance(value, (list, tuple, NumpyArray)) else None)


def joined(contents: list[Content]) -> Content:
    """Combine several values into one, as one state of a generator has several pieces."""
    problem = next((c.problem for c in contents if c.problem), "")
    digest = blake2b("".join(c.digest for c in contents).encode(), digest_size=16).hexdigest()
    return Content("", "unknown", problem) if problem else Content(digest, f"fingerprint {digest[:8]}")


def _pieces(value: Any, files: OpenFiles, rank: int | None, most: int) -> Iterator[bytes]:
    stack, left = [value], MAX_ITEMS
    while stack:
        node = scalar(stack.pop())
        left -= 1
        if left < 0:
            raise ReadError(None, f"holds more than {MAX_ITEMS} values")
        if isinstance(node, (list, tuple)):
            yield b"[%d" % len(node)
            stack += reversed(node)
        elif isinstance(node, Mapping):
            keys = sorted(node, key=lambda k: (type(k).__name__, str(k)))
            yield b"{%d" % len(node)
            stack += [part for key in reversed(keys) for part in (node[key], key)]
        elif isinstance(node, Tensor):
            yield from _tensor(node, files, rank, most)
        elif isinstance(node, Opaque):
            yield _opaque(node)
            stack += reversed(node.args) if is_brief(node) else []
        else:
            yield scalar_bytes(node)


def _opaque(node: Opaque) -> bytes:
    if isinstance(node, Lost):
        raise ReadError(None, "could not be read; verify says why" if node.name == "lost" else node.name)
    return _tagged(b"O", node.name)


def scalar_bytes(value: Any) -> bytes:
    """One value as bytes, each kind with a letter of its own."""
    if value is None or isinstance(value, bool):
        return _tagged(b"c", str(value))
    if isinstance(value, timedelta):
        value = value.total_seconds()
    if isinstance(value, float) and value.is_integer() and (value or math.copysign(1, value) > 0):
        value = int(value)
    if isinstance(value, int):
        return b"i" + value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True) + b";"
    if isinstance(value, float):
        return b"f" + struct.pack("<d", value)
    if isinstance(value, (set, frozenset)):
        return b"S%d" % len(value) + b"".join(sorted(scalar_bytes(scalar(v)) for v in value))
    if isinstance(value, NumpyArray):
        return _array(value)
    if isinstance(value, (bytes, bytearray)):
        return b"b%d;" % len(value) + bytes(value)
    return _tagged(b"s" if isinstance(value, str) else b"o", value.dotted if isinstance(value, Global) else str(value))


def _tagged(tag: bytes, text: str) -> bytes:
    data = text.encode("utf-8", "surrogatepass")
    return tag + b"%d;" % len(data) + data


def _array(value: NumpyArray) -> bytes:
    """An array as a tensor of the same values is; one that is column-major or big-endian only as itself."""
    dtype = value.dtype if value.dtype[:1] == ">" else NUMPY_DTYPES.get(value.dtype.lstrip("<|="), value.dtype)
    order = "F" if value.fortran_order and len(value.shape) > 1 else ""
    return _tagged(b"t", f"{dtype}{order} {list(value.shape)}") + bytes(value.data)


def _tensor(tensor: Tensor, files: OpenFiles, rank: int | None, most: int) -> Iterator[bytes]:
    if tensor.nbytes > most:
        raise ReadError(None, f"a tensor of {tensor.nbytes} bytes outside of model and optimizer")
    yield _tagged(b"t", f"{tensor.dtype} {list(tensor.shape)}")
    own = _own(tensor, rank)
    if own:
        yield shard_bytes(own[0], files)
        return
    problem = cover_problem(tensor, "")
    if problem is not None:
        raise ReadError(None, problem.message)
    yield from map(bytes, tensor_bytes(once(tensor), tensor.dtype, files))


def _own(tensor: Tensor, rank: int | None) -> list[Shard]:
    """The shards of a tensor that a rank has whole, for itself; empty without a rank."""
    return [s for s in tensor.found if rank is not None and s.rank == rank and s.box.sizes == tensor.shape]


def parts_of_value(value: Any, rank: int | None = None, most: int = MAX_SMALL) -> list[Part]:
    """The parts that `content_of` reads for a value that is a tensor itself; empty for any other."""
    if not isinstance(value, Tensor) or value.nbytes > most:
        return []
    return parts_of_all(_own(value, rank)[:1] or once(value).shards)


NUMBERS = {"float32": "<f", "float64": "<d", "int32": "<i", "int64": "<q"}
"""Dtypes of step counters, as `struct` has them."""


def is_number(value: Any) -> bool:
    """Whether a value is a tensor of one element of a common dtype, such as a step counter."""
    return isinstance(value, Tensor) and value.numel == 1 and value.dtype in NUMBERS


def number_in(tensor: Tensor, files: OpenFiles) -> Any:
    """The one element of a tensor of a common dtype, such as a step counter; any other tensor itself.

    Raises:
        ReadError: its file cannot be read.
    """
    if not is_number(tensor) or cover_problem(tensor, "") is not None:
        return tensor
    copies = {shard_bytes(shard, files) for shard in tensor.found if shard.box.numel}
    return struct.unpack(NUMBERS[tensor.dtype], copies.pop())[0] if len(copies) == 1 else tensor


def once(tensor: Tensor) -> Tensor:
    """The tensor with one shard per region."""
    return replace(tensor, shards=tuple({s.box: s for s in reversed(tensor.found)}.values()))


# -- a few words -------------------------------------------------------------------------------------------------


def text_of(value: Any) -> str:
    """A value with every digit where it is short, else what it is."""
    value = scalar(value)
    if isinstance(value, (list, tuple)):
        if len(value) > LONG or not all(map(is_plain, value)):
            return plural(len(value), "value")
        return f"[{', '.join(map(text_of, value))}]"
    if isinstance(value, (Tensor, NumpyArray)):
        return f"{value.dtype} {shape(value.shape)}"
    if isinstance(value, Opaque):
        return f"<{value.name[:MAX_TEXT]}>"
    if isinstance(value, int) and value.bit_length() > MAX_BITS:
        return f"an integer of {value.bit_length()} bits"
    if isinstance(value, (bytes, bytearray)):
        return plural(len(value), "byte")
    if isinstance(value, (Mapping, set, frozenset)):
        return "{}" if not value else plural(len(value), "value")
    if isinstance(value, str):
        return repr(value[:MAX_TEXT])
    if isinstance(value, float) and value.is_integer() and value and abs(value) < 1e15:
        return str(int(value))
    return value.dotted if isinstance(value, Global) else str(value)
