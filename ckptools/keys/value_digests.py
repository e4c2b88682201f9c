"""Digest plain values, equal on every machine, and describe them in a few words.

Every value has two digests. The first is of its worth: a list equals a tuple and 5.0 equals 5, because formats differ
in which of them they keep; a timedelta equals its seconds, as a `.pt` for plain `torch.load` has it; keys have no
order. The second is of the exact value, with the classes of containers and numbers and the order of keys. In both, NaN
is compared by its bits, and -0.0 is not 0.0. Neither depends on the protocol or the memo of a pickle.
"""

from __future__ import annotations

import math
import struct
from _compat_pickle import IMPORT_MAPPING, NAME_MAPPING
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from datetime import timedelta
from functools import lru_cache
from hashlib import blake2b
from itertools import chain
from typing import Any

from ckptools.errors import CkptoolsError, ReadError
from ckptools.files.opening import OpenFiles
from ckptools.keys.entries import LONG, brief_args, children_inside, is_plain
from ckptools.model.cover import cover_problem
from ckptools.model.shards import Shard
from ckptools.model.tensor import Tensor
from ckptools.model.tree import (
    Cycle,
    Device,
    Global,
    Lost,
    NumpyArray,
    NumpyDtype,
    NumpyScalar,
    Opaque,
    Size,
    TorchName,
    plain,
    scalar,
)
from ckptools.tensor_io.fetch_ahead import Part, parts_of_all
from ckptools.tensor_io.stream import shard_bytes, tensor_bytes
from ckptools.text import CUT, MAX_BITS, clip, common_prefix, few, plural, shape, told_apart

MAX_ITEMS = 4_000_000
"""Values visited inside one value, not counting long runs of one class; a shared value counts once."""

MAX_TEXT = 60
MAX_SMALL = 1 << 20
"""Larger tensors outside of models and optimizers are not read and compared as values."""

NUMPY_DTYPES = {
    "f8": "float64", "f4": "float32", "f2": "float16", "i8": "int64", "i4": "int32", "i2": "int16", "i1": "int8",
    "u8": "uint64", "u4": "uint32", "u2": "uint16", "u1": "uint8", "b1": "bool", "c8": "complex64", "c16": "complex128",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Content:
    """The value at a key in a form that can be compared.

    Attributes:
        digest: digest of the value's worth; "" if unknown.
        text: the value in a few words.
        problem: why the value is unknown.
        value: the value itself; None in a file of digests.
        exact: its class and the digest of the exact value: `list 5f…`; "" where that is not compared.
    """

    digest: str
    text: str
    problem: str = ""
    value: Any = field(default=None, compare=False, repr=False)
    exact: str = ""

    @property
    def fingerprint(self) -> str:
        """The first digits of the digest, by which users distinguish states."""
        return self.digest[:8]

    @property
    def kind(self) -> str:
        """The class of the value, as Python names it."""
        return self.exact.rpartition(" ")[0]


def content_of(
    value: Any, files: OpenFiles, rank: int | None = None, most: int = MAX_SMALL, whole: bool = False
) -> Content:
    """Digest and describe a plain value, or a small tensor.

    A tensor that each rank has for itself is read on `rank`; a tensor of more than `most` bytes is not read. The
    values in a foreign object have keys of their own, so its digest covers only its class and its number of parts,
    unless it is digested as a `whole`.
    """
    text = clip(text_of(value), MAX_TEXT)
    try:
        if not whole and isinstance(value, Opaque) and children_inside(value):
            loose, exact = _shell(value)
        else:
            loose, exact = digests_of(value, lambda tensor: _tensor(tensor, files, rank, most))
        if isinstance(value, Tensor) and (own := _own(value, rank)):
            value = replace(value, shards=tuple(own))
        digest = _hashed(loose).hex()
        very_same = digest if exact == loose else _hashed(exact).hex()
        return Content(digest, text, "", value, f"{kind_of(value)} {very_same}")
    except CkptoolsError as error:
        return Content("", text, error.reason)


def _hashed(token: bytes) -> bytes:
    return blake2b(token, digest_size=16).digest()


def joined(contents: list[Content]) -> Content:
    """Combine the pieces of a value, such as the pieces of a generator's state, into one."""
    problem = next((c.problem for c in contents if c.problem), "")
    if problem:
        return Content("", "unknown", problem)
    digest = _hashed("".join(c.digest for c in contents).encode()).hex()
    exact = _hashed("".join(c.exact for c in contents).encode()).hex()
    return Content(digest, f"fingerprint {digest[:8]}", exact=f"state {exact}")


# -- digests of nested values ------------------------------------------------------------------------------------------


Pair = tuple[bytes, bytes]
"""The digests of a value, as bytes: of its worth, and of the exact value."""

Tensors = Callable[[Tensor], Pair]


class _Open:
    """A container whose items are being digested.

    Attributes:
        left: the remaining items; for a dict, keys and values alternate.
        level: number of containers around it.
        lowest: the lowest level of a container that an item refers back to.
    """

    __slots__ = ("_exact", "_loose", "_met", "left", "level", "lowest", "node")

    def __init__(self, node: Any, level: int) -> None:
        self.node = node
        self.level = self.lowest = level
        loose, exact, self.left = _inside(node)
        self._loose, self._exact = blake2b(loose, digest_size=16), blake2b(exact, digest_size=16)
        self._met: list[Pair] = []

    def add(self, pair: Pair) -> None:
        if isinstance(self.node, (Mapping, set, frozenset)) or is_node(self.node):
            self._met.append(pair)
        else:
            self._loose.update(pair[0])
            self._exact.update(pair[1])

    def closed(self) -> Pair:
        """The digests, after the last item."""
        loose, exact = [pair[0] for pair in self._met], [pair[1] for pair in self._met]
        if isinstance(self.node, Mapping):
            pairs = sorted(zip(loose[::2], loose[1::2], strict=True))
            loose = [part for pair in pairs if pair[0] for part in pair]
        elif isinstance(self.node, (set, frozenset)):
            loose, exact = sorted(loose), sorted(exact)
        self._loose.update(b"".join(loose))
        self._exact.update(b"".join(exact))
        return loose[0] if is_node(self.node) else b"#" + self._loose.digest(), b"#" + self._exact.digest()


def digests_of(value: Any, tensors: Tensors) -> Pair:
    """Digest a value and all values in it. A shared value is visited once.

    A container inside itself is digested as the number of containers between the two.

    Raises:
        ReadError: it has too many values, or a value that could not be read; or any error of `tensors`.
    """
    pair = _simple(value, tensors)
    if pair is not None:
        return pair
    stack = [_Open(value, 0)]
    inside, done, count = {id(value): stack[0]}, dict[int, Pair](), 0
    kept: list[Any] = []  # keeps the objects alive, so that no id is reused
    while True:
        top = stack[-1]
        for node in top.left:
            count += 1
            if count > MAX_ITEMS:
                raise ReadError(None, f"holds more than {MAX_ITEMS} values")
            pair = _simple(node, tensors) or done.get(id(node))
            if pair is None and id(node) in inside:
                level = inside[id(node)].level
                top.lowest = min(top.lowest, level)
                pair = (b"^%d;" % (top.level - level),) * 2
            if pair is None:
                stack.append(_Open(node, len(stack)))
                inside[id(node)] = stack[-1]
                break
            top.add(pair)
        else:
            pair = stack.pop().closed()
            del inside[id(top.node)]
            kept.append(top.node)
            if top.lowest == top.level:
                done[id(top.node)] = pair
            if not stack:
                return pair
            stack[-1].lowest = min(stack[-1].lowest, top.lowest)
            stack[-1].add(pair)


_ATTRIBUTES = object()
"""Stands as a key before the attributes of an OrderedDict, which do not count in its worth."""


def is_node(value: Any) -> bool:
    """Whether a foreign object only wraps a value, as a node of OmegaConf does."""
    return isinstance(value, Opaque) and plain(value) is not value


def _inside(node: Any) -> tuple[bytes, bytes, Iterator[Any]]:
    """The tags of a container for both digests, and its items."""
    if isinstance(node, (list, tuple)):
        return b"[%d;" % len(node), _tagged(b"C", f"{kind_of(node)} {len(node)}"), _items(node)
    if isinstance(node, (set, frozenset)):
        return b"S%d;" % len(node), _tagged(b"C", f"{kind_of(node)} {len(node)}"), iter(node)
    if isinstance(node, Mapping):
        attributes = [_ATTRIBUTES, [*vars(node).items()]] if isinstance(node, OrderedDict) and vars(node) else []
        items = chain(chain.from_iterable(node.items()), attributes)
        return b"{%d;" % len(node), _tagged(b"C", f"{kind_of(node)} {len(node)}"), items
    if isinstance(node, NumpyArray):
        stated = _tagged(b"A", f"{node.dtype} {node.shape} {node.fortran_order}")
        return stated, stated + node.cls.encode("utf-8", "surrogatepass"), iter(node.objects)
    if isinstance(node, (NumpyScalar, NumpyDtype)):
        kind = _tagged(b"R", type(node).__name__)
        return kind, kind, iter([node.record, node.data if isinstance(node, NumpyScalar) else None])
    name = _tagged(b"O", canonical(node.name))
    if is_node(node):
        rest = {key: value for key, value in node.state.items() if key not in ("_val", "_parent")}
        return name, name, iter([plain(node), rest])
    return name, name, iter([node.args, node.state, node.items, node.pairs, node.keywords])


RUN = 1 << 12
"""Values of a long sequence that are digested at a time."""


class _ValueRun:
    """Several plain values of a sequence, digested as one."""

    __slots__ = ("values",)

    def __init__(self, values: Any) -> None:
        self.values = values


def _items(node: Any) -> Iterator[Any]:
    """The items of a sequence; numbers and texts of a long one come many at a time."""
    if len(node) < RUN or not set(map(type, node)) <= SCALARS.keys():
        return iter(node)
    return (_ValueRun(node[start : start + RUN]) for start in range(0, len(node), RUN))


# -- one value ---------------------------------------------------------------------------------------------------------


def _simple(value: Any, tensors: Tensors) -> Pair | None:
    """The digests of a value without parts; None for a container."""
    make = SCALARS.get(type(value))
    if make is not None:
        return make(value)
    if isinstance(value, (list, tuple, set, frozenset, Mapping)):
        return None
    if isinstance(value, Tensor):
        return tensors(value)
    if isinstance(value, NumpyArray):
        return None if value.objects else _array(value)
    if isinstance(value, (NumpyScalar, NumpyDtype)) and value.record:
        return None
    if isinstance(value, NumpyScalar):
        number = scalar(value)
        exact = _tagged(b"n", value.dtype) + _data(b"b", value.data)
        return exact if number is value else SCALARS[type(number)](number)[0], exact
    if isinstance(value, Lost):
        if isinstance(value, Cycle):
            return _both(_tagged(b"^", f"{value.name} {value.levels}"))
        raise ReadError(None, "could not be read; verify says why" if value.name == "lost" else value.name)
    if isinstance(value, Opaque):
        return None
    if isinstance(value, _ValueRun):
        pairs = [SCALARS[type(one)](one) for one in value.values]
        return b"".join([pair[0] for pair in pairs]), b"".join([pair[1] for pair in pairs])
    if value is _ATTRIBUTES:
        return b"", b"@"
    if isinstance(value, Global):
        return _both(_tagged(b"o", canonical(value.dotted)))
    if isinstance(value, (TorchName, Device, NumpyDtype)):
        return _both(_tagged(b"o", str(value)))
    return _tagged(b"o", str(value)), _tagged(b"p", f"{type(value).__name__} {value!r}")


def _both(token: bytes) -> Pair:
    return token, token


def _tagged(tag: bytes, text: str) -> bytes:
    return _data(tag, text.encode("utf-8", "surrogatepass"))


def _data(tag: bytes, data: bytes) -> bytes:
    return tag + b"%d;" % len(data) + data


def _int(value: int) -> Pair:
    if -(1 << 63) <= value < 1 << 63:
        token = b"i" + value.to_bytes(8, "little", signed=True)
    else:
        token = _data(b"I", value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True))
    return token, token


def _float(value: float) -> Pair:
    exact = b"f" + struct.pack("<d", value)
    whole = value.is_integer() and (value or math.copysign(1, value) > 0)
    return _int(int(value))[0] if whole else exact, exact


def _timedelta(value: timedelta) -> Pair:
    return _float(value.total_seconds())[0], _tagged(b"d", f"{value.days} {value.seconds} {value.microseconds}")


SCALARS: dict[type, Callable[[Any], Pair]] = {
    type(None): lambda v: _both(b"N;"),
    bool: lambda v: _both(b"T;" if v else b"F;"),
    int: _int,
    float: _float,
    str: lambda v: _both(_tagged(b"s", v)),
    bytes: lambda v: _both(_data(b"b", v)),
    bytearray: lambda v: (_data(b"b", bytes(v)), _data(b"B", bytes(v))),
    complex: lambda v: _both(b"z" + struct.pack("<dd", v.real, v.imag)),
    timedelta: _timedelta,
}
"""Functions that digest values of Python's own types, each with a letter of its own."""


def _array(value: NumpyArray) -> Pair:
    """Digest an array like a tensor of the same values; a column-major or big-endian one only as itself."""
    dtype = value.dtype if value.dtype[:1] == ">" else NUMPY_DTYPES.get(value.dtype.lstrip("<|="), value.dtype)
    order = "F" if value.fortran_order and len(value.shape) > 1 else ""
    data = bytes(value.data)
    exact = _tagged(b"a", f"{value.cls} {value.dtype}{order} {list(value.shape)}") + _data(b"b", data)
    return _tagged(b"t", f"{dtype}{order} {list(value.shape)}") + data, exact


def _tensor(tensor: Tensor, files: OpenFiles, rank: int | None, most: int) -> Pair:
    if tensor.nbytes > most:
        raise ReadError(None, f"a tensor of {tensor.nbytes} bytes outside of model and optimizer")
    own = _own(tensor, rank)
    problem = None if own else cover_problem(tensor, "")
    if problem is not None:
        raise ReadError(None, problem.message)
    parts = [shard_bytes(own[0], files)] if own else map(bytes, tensor_bytes(once(tensor), tensor.dtype, files))
    token = _tagged(b"t", f"{tensor.dtype} {list(tensor.shape)}") + b"".join(parts)
    return token, _tagged(b"T", traits_of(tensor)) + token


def traits_of(tensor: Tensor) -> str:
    """A tensor's properties other than its values: `Parameter, requires_grad`, and attributes saved with it."""
    words = ["Parameter"] if tensor.parameter else []
    words += ["requires_grad"] if tensor.requires_grad else []
    if tensor.attributes:
        exact = digests_of(tensor.attributes, lambda inner: _both(_tagged(b"t", f"{inner.dtype} {inner.shape}")))[1]
        names = few(list(map(str, tensor.attributes)))
        words.append(f"attributes {clip(names, MAX_TEXT)} ({_hashed(exact).hex()[:8]})")
    return ", ".join(words)


def _shell(node: Opaque) -> Pair:
    """Digest a foreign object by its class and the structure of its parts, which are compared by themselves."""
    parts = node.state if isinstance(node.state, tuple) else (node.state,)
    state = [f"{type(part).__name__} {len(part) if isinstance(part, dict) else ''}" for part in parts[:2]]
    keywords = list(map(str, node.keywords)) if isinstance(node.keywords, dict) else type(node.keywords).__name__
    counts = len(node.args) if isinstance(node.args, tuple) else -1, len(node.items), len(node.pairs)
    return _both(_tagged(b"O", f"{canonical(node.name)} {counts} {keywords} {state}"))


UNREAD = "?"
"""Prefix of the digest of an unknown value."""


def digest_of(value: Any, exact: bool = True) -> str:
    """Digest a value; a tensor in it by its stated facts.

    For a value that could not be read, or is too large, it is `UNREAD` and a digest of its class.

    Args:
        value: any value.
        exact: whether to digest the exact value, not its worth.
    """

    def stated(tensor: Tensor) -> Pair:
        return _both(_tagged(b"t", f"{tensor.dtype} {tensor.shape} {traits_of(tensor)}"))

    try:
        return _hashed(digests_of(value, stated)[exact]).hex()
    except ReadError:
        return UNREAD + _hashed(_tagged(b"?", kind_of(value))).hex()


@lru_cache(maxsize=4096)
def canonical(dotted: str) -> str:
    """Normalise a dotted name to Python 3: `builtins.slice` for protocol 2's `__builtin__.slice`."""
    module, _, name = dotted.rpartition(".")
    module, name = NAME_MAPPING.get((module, name), (IMPORT_MAPPING.get(module, module), name))
    return f"{module}.{name}" if module else name


def kind_of(value: Any) -> str:
    """The class of a value, as Python names it."""
    if isinstance(value, NumpyArray):
        return value.cls or "numpy.ndarray"
    if isinstance(value, NumpyScalar):
        return f"numpy {value.dtype}"
    if isinstance(value, defaultdict):
        return f"defaultdict({getattr(value.default_factory, '__name__', 'None')})"
    if isinstance(value, Opaque):
        return canonical(value.name)
    if isinstance(value, Tensor):
        return ", ".join(filter(None, ("tensor", traits_of(value))))
    if isinstance(value, (Size, Device, TorchName)):
        return f"torch.{ {Size: 'Size', Device: 'device'}.get(type(value), 'name') }"
    return type(value).__name__


def _own(tensor: Tensor, rank: int | None) -> list[Shard]:
    """The shards of a tensor that a rank has in full; empty without a rank."""
    return [s for s in tensor.found if rank is not None and s.rank == rank and s.box.sizes == tensor.shape]


def parts_of_value(value: Any, rank: int | None = None, most: int = MAX_SMALL) -> list[Part]:
    """The parts of files that `content_of` reads for a tensor; empty for any other value."""
    if not isinstance(value, Tensor) or value.nbytes > most:
        return []
    return parts_of_all(_own(value, rank)[:1] or once(value).shards)


NUMBERS = {"float32": "<f", "float64": "<d", "int32": "<i", "int64": "<q"}
"""Dtypes of step counters, with their `struct` codes."""


def is_number(value: Any) -> bool:
    """Whether a value is a tensor of one element of a common dtype, such as a step counter."""
    return isinstance(value, Tensor) and value.numel == 1 and value.dtype in NUMBERS


def number_in(tensor: Tensor, files: OpenFiles) -> Any:
    """The one element of a tensor of a common dtype, such as a step counter; any other tensor unchanged.

    Raises:
        ReadError: its file cannot be read.
    """
    if not is_number(tensor) or cover_problem(tensor, "") is not None:
        return tensor
    copies = {shard_bytes(shard, files) for shard in tensor.found if shard.box.numel}
    return struct.unpack(NUMBERS[tensor.dtype], copies.pop())[0] if len(copies) == 1 else tensor


def once(tensor: Tensor) -> Tensor:
    """The tensor with one shard per distinct box."""
    return replace(tensor, shards=tuple({s.box: s for s in reversed(tensor.found)}.values()))


# -- values in a few words ---------------------------------------------------------------------------------------------


MAX_BYTES = 16
"""At most this many bytes are shown in full."""


def text_of(value: Any) -> str:
    """A value in full if it is short, else a description."""
    value = scalar(value)
    if isinstance(value, (list, tuple)):
        if len(value) > LONG or not all(map(is_plain, value)):
            return plural(len(value), "value")
        return f"[{', '.join(map(text_of, value))}]"
    if isinstance(value, (set, frozenset)) and 0 < len(value) <= LONG and all(map(is_plain, value)):
        return f"{{{', '.join(sorted(map(text_of, value)))}}}"
    if isinstance(value, (Tensor, NumpyArray)):
        return f"{value.dtype} {shape(value.shape)}"
    if isinstance(value, NumpyScalar):
        import numpy as np

        try:
            return str(np.frombuffer(value.data, np.dtype(value.dtype))[0])
        except (TypeError, ValueError, IndexError):
            return text_of(value.data)
    if isinstance(value, Opaque):
        args = ", ".join(map(text_of, brief_args(value)))
        name = canonical(value.name)[:MAX_TEXT]
        return f"{name}({args})" if args else f"<{name}>"
    if isinstance(value, int) and value.bit_length() > MAX_BITS:
        return f"an integer of {value.bit_length()} bits"
    if isinstance(value, (bytes, bytearray)):
        return repr(bytes(value)) if 0 < len(value) <= MAX_BYTES else plural(len(value), "byte")
    if isinstance(value, (Mapping, set, frozenset)):
        return "{}" if not value else plural(len(value), "value")
    if isinstance(value, str):
        return repr(value[:MAX_TEXT])
    if isinstance(value, float) and value.is_integer() and value and abs(value) < 1e15:
        return str(int(value))
    return canonical(value.dotted) if isinstance(value, Global) else str(value)


CONTEXT = 12
"""Characters shown before the first difference of two texts; a quarter of it if some must be escaped."""


def apart(x: Any, y: Any) -> tuple[str, str]:
    """Describe two different values in a few words each, so that the descriptions differ."""
    if isinstance(x, (str, bytes, bytearray)) and type(x) is type(y) and max(len(x), len(y)) > MAX_BYTES:
        texts = _windows(x, y)
    else:
        texts = told_apart([text_of(x), text_of(y)], MAX_TEXT)
    if texts[0] == texts[1]:
        kinds = [kind_of(x), kind_of(y)]
        said = [f"0x{struct.pack('>d', v).hex()}" for v in (x, y)] if type(x) is type(y) is float else kinds
        said = said if said[0] != said[1] else [digest_of(v)[:8] for v in (x, y)]
        texts = [f"{clip(text, MAX_TEXT)} ({word})" for text, word in zip(texts, said, strict=True)]
    return texts[0], texts[1]


def _windows(x: Any, y: Any) -> list[str]:
    """Two texts, or two byte strings, from shortly before their first difference on."""
    at = common_prefix(x, y)
    before = x[max(at - CONTEXT, 0) : at]
    start = at - (len(before) if isinstance(x, str) and before.isprintable() else len(before) // 4)
    start = 0 if isinstance(x, str) and max(map(len, (repr(x[:MAX_TEXT]), repr(y[:MAX_TEXT])))) < MAX_TEXT else start
    cut = [v[start : start + MAX_TEXT] for v in (x, y)]
    shown = [repr(v if isinstance(v, str) else bytes(v)) for v in cut]
    return [clip(CUT * bool(start) + text, MAX_TEXT) for text in shown]
