"""The state of an unpickling and its limits: the stack, the memo, names, storages and budgets, as opcodes change them.

Every function that a machine calls takes a `MachineState`; only `machine` runs opcodes.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Callable, Container, Sequence
from datetime import date
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ckptools.model.provenance import Said
from ckptools.model.regions import Box, Ints
from ckptools.model.shards import Shard
from ckptools.model.tree import Global, NumpyScalar, Opaque, describe_for_error
from ckptools.pickles.objects import Storage

if TYPE_CHECKING:
    from ckptools.model.tensor import Tensor
    from ckptools.pickles.objects import Claim, Mesh


# -- values that the pickles of one checkpoint's ranks repeat: shard records, tuples of ints, arrays -------------------
# Every rank file lists the shards of all ranks for every ShardedTensor, so that all files contain the same list.
#
# If ranks gather their random states, every file has those of all ranks: for 256 ranks 65,536 states of 625 ints and as
# many arrays of 2.5 kB, of which 256 are distinct. Only immutable values are shared: tuples of ints, and bytes.


MAX_VALUES_KEPT = 128 << 20
"""Bytes of pickle whose values are cached for one checkpoint; values beyond are made anew."""

MAX_ROWS_KEPT = 64 << 20
"""Bytes of records that are recognised when repeated; others are read as if they were new."""

MAX_RECORDS = 1 << 20
"""Distinct shards that are cached from one file to the next."""


class RepeatedRecords:
    """A cache of values that the pickles of one checkpoint's ranks repeat; it is passed from file to file.

    Args:
        limit: bytes of values that are cached; 0 for a file that is read alone.

    Attributes:
        rows: known records of each kind, by their bytes and the words in them (`batches`).
        layouts: data that DTensors of one layout share.
        values: other repeated values, by their bytes.
    """

    def __init__(self, limit: int = MAX_VALUES_KEPT) -> None:
        self.rows: dict[Any, dict[Any, Any]] = {}
        self.room = MAX_ROWS_KEPT
        self._shards: dict[tuple[Ints, Ints, int | None], Shard] = {}
        self.layouts: dict[Any, Any] = {}
        self._lists: dict[tuple[int, ...], tuple[Shard, ...]] = {}
        self.values = RepeatedValues(limit)

    def has_room(self, nbytes: int) -> bool:
        """Whether `nbytes` more of records fit into the cache; reserves their room."""
        self.room -= nbytes
        return self.room >= 0

    def shard(self, offsets: Ints, sizes: Ints, rank: int | None) -> Shard:
        """The one shared shard without a source, with these offsets, sizes and rank."""
        found = self._shards.get((offsets, sizes, rank))
        if found is None:
            if len(self._shards) >= MAX_RECORDS:
                self._shards, self._lists = {}, {}
            found = self._shards[offsets, sizes, rank] = Shard(Box(offsets, sizes), rank, None)
        return found

    def shard_list(self, shards: list[Shard]) -> tuple[Shard, ...]:
        """The one shared tuple of these shards."""
        return self._lists.setdefault(tuple(map(id, shards)), tuple(shards))


# -- large values ------------------------------------------------------------------------------------------------------


HEAD = 32
"""Bytes by which a tuple is looked up before it is compared in full."""

MIN_BYTES = 256
"""Shorter bytes cost more to look up than to hold twice."""


class RepeatedValues:
    """A cache of repeated tuples and bytes; it is passed from file to file.

    Args:
        limit: bytes of pickle that are cached; 0 for a file that is read alone.
    """

    def __init__(self, limit: int = MAX_VALUES_KEPT) -> None:
        self._left = limit
        self._tuples: dict[tuple[bytes, int], tuple[int, ...]] = {}
        self._by_head: dict[bytes, bytes] = {}
        self._bytes: dict[bytes, bytes] = {}

    def tuple_at(self, data: bytes, at: int) -> bytes | None:
        """The bytes of a known tuple at `at` in a pickle, up to its TUPLE; None if there is none."""
        spelled = self._by_head.get(data[at : at + HEAD])
        return spelled if spelled is not None and data.startswith(spelled, at) else None

    def of_tuple(self, spelled: bytes, times: int) -> tuple[int, ...]:
        """The tuple of ints that a run and its TUPLE make; `times` counts its occurrences in this file.

        No two places in one file share a tuple: tree limits count how much of a tree is shared (`model.tree`), and the
        pickle shares nothing here.
        """
        known = self._tuples.get((spelled, times))
        if known is None:
            known = ints_of_run(spelled[:-1])
            if self._room(spelled):
                self._tuples[spelled, times] = known
                self._by_head[spelled[:HEAD]] = spelled
        return known

    def of_bytes(self, data: bytes) -> bytes:
        """The one shared object for these bytes."""
        known = self._bytes.get(data, data) if len(data) >= MIN_BYTES else data
        if known is data and len(data) >= MIN_BYTES and self._room(data):
            self._bytes[data] = data
        return known

    def _room(self, spelled: bytes) -> bool:
        self._left -= len(spelled)
        return self._left >= 0


# -- consecutive ints --------------------------------------------------------------------------------------------------

# Every rank file of a job that gathers its random states holds those of all ranks, each with 624 numbers of Python's
# generator: for 256 ranks 160,000 opcodes, half of the pickle. An int means the same at any place, takes no memo number
# and refers to nothing, so one regular expression recognises a run of them and `struct` decodes it. A tuple of just
# such a run is one object for all ranks' files that contain it.
#
# This changes only the speed of reading. Ints of other widths, short runs, and runs that begin with a small int, as
# sizes do, are left to the handlers of single opcodes. Source: Lib/pickletools.py (BININT1, BININT2, BININT, LONG1,
# TUPLE).

MIN_RUN = 8
"""Shorter runs are not worth it."""

MAX_RUN = 1000
"""Ints between two checks of the machine's budgets; Python's own pickles end their batches here too."""

BEGIN_RUNS = b"J\x8a"
"""Opcodes of the ints behind which a run is searched."""

RUN = re.compile(rb"(?:J.{4}|\x8a\x05.{4}\0|\x8a\x08.{8}|K.|M..){%d,%d}" % (MIN_RUN, MAX_RUN), re.DOTALL)

_INT = re.compile(rb"([JKM]|\x8a[\x05\x08])(?:(?<=J).{4}|(?<=\x05).{5}|(?<=\x08).{8}|(?<=K).|(?<=M)..)", re.DOTALL)
"""One int of a run, as its opcode; LONG1 with its length."""

_FORMS = ((b"\x8a\x05", b"xxLx"), (b"\x8a\x08", b"xxq"), (b"K", b"xB"), (b"M", b"xH"), (b"J", b"xi"))
"""The `struct` form of each opcode. A LONG1 of 5 bytes whose last byte is zero is an unsigned int of 32 bits."""


_WORDS = re.compile(rb"(?:J...[\0-\x7f]|\x8a\x05....\0)*", re.DOTALL)
"""A run of unsigned 32-bit ints, as in random states."""

_WORD = re.compile(rb"(?:J|\x8a\x05)(....)\0?", re.DOTALL)
"""One of these ints; it must be followed by another opcode, so that a zero byte is its own."""


def ints_of_run(spelled: bytes) -> tuple[int, ...]:
    """The ints that a run of opcodes pushes."""
    found = _WORDS.match(spelled)
    end = found.end() if found else 0
    words, others = _WORD.findall(spelled, 0, end), spelled[end:]
    form = b"".join(_INT.findall(others))
    for opcode, of_struct in _FORMS:
        form = form.replace(opcode, of_struct)
    return struct.unpack(f"<{len(words)}I", b"".join(words)) + struct.unpack(b"<" + form, others)


# -- budgets, and the errors of a machine ------------------------------------------------------------------------------


MAX_OPCODES = 50_000_000
BLOCK = 1000
"""Opcodes between two checks of the sizes of stack and memo."""

MAX_STACK = 4_000_000
MAX_MEMO = 8_000_000
MAX_INT_BYTES = 1024
"""Larger ints are described: Python refuses to print them."""

MAX_INT_DIGITS = 2400
MAX_FLAT_KEY = 64
MAX_TUPLE_KEYS = 10_000
"""Tuples of ints can be chosen to collide; with this many the worst case takes a few seconds."""

SAFE_INT = 2**61 - 1
"""Python hashes an int modulo this: larger ones can be chosen to collide, so they do not become dict keys."""

FREE_WORK = 1_000_000
WORK_PER_BYTE = 2
"""Elements that calls may process per byte of pickle: what the pickle can have written for them, with some room."""


class PickleError(ValueError):
    """The stream is not a pickle of torch.save, or exceeds the budgets."""


class CutError(PickleError):
    """The bytes end before the pickle does; if they are the front of a larger file, more bytes may help."""


class UnusualError(ValueError):
    """A pickle uses a skipped record in a way that requires reading it opcode by opcode."""


# -- the state ---------------------------------------------------------------------------------------------------------


HARMLESS_KEYS = (str, bytes, bool, float, type(None), date)

Locate = Callable[[Storage], tuple[Path, int, str, int] | None]


class MachineState:
    """The state of a machine that interprets one pickle.

    Attributes:
        data: the pickle.
        memo: memo entries by number.
        globals: every name that the pickle mentions, in order of first use.
        next_number: one more than the highest memo number; picklers count upwards.
        storages: every storage that it mentions, by key.
        claims: `(rank, world size)` as stated by sharded tensors in it; the rank may be None.
        modules: whether an object has the state of an `nn.Module`.
        meshes: device meshes that may be slices of larger ones.
        repeated: values that this pickle shares with those of other ranks.
        fast: whether runs and batches are used.
        skipped: opcodes of ints that were read in runs.
        tuples_met: how often each tuple of ints occurred, by its bytes.
        flat: these tuples, by their `id`: walks need not visit each int.
        work: remaining number of elements that calls may process: a call may name a big list again and again.
        tuple_keys: number of tuples that are dict keys.
        locate: returns the place of a storage's bytes: `(file, byte offset, name of the zip entry, CRC-32)`, None if
            the file is cut before them. It is None for a pickle without storages.
        by_column: names of the classes whose records are read in batches, because their columns are used.
        breaks: offsets of opcodes that are not read together with others, in order.
        stopped_at: offset behind STOP; None before STOP.
    """

    breaks: Sequence[int] = ()

    def __init__(
        self, data: bytes, locate: Locate | None, fast: bool, by_column: Container[str], repeated: RepeatedRecords
    ) -> None:
        self.data = data
        self.repeated = repeated
        self.locate = locate
        self.by_column = by_column
        self._start(fast)

    def _start(self, fast: bool) -> None:
        self.memo: dict[int, Any] = {}
        self.next_number = 0
        self.globals: dict[tuple[str, str], Global] = {}
        self.storages: dict[str, Storage] = {}
        self.loose_storages = 0
        self.claims: set[Claim] = set()
        self.modules = False
        self.provenance: Said | None = None
        self.cut = False
        self.meshes: set[Mesh] = set()
        self.read_meshes: dict[int, tuple[Any, Mesh]] = {}
        self.fast = fast
        self.skipped = 0
        self.tuples_met: dict[bytes, int] = {}
        self.flat: dict[int, tuple[int, ...]] = {}
        self.work = FREE_WORK + WORK_PER_BYTE * len(self.data)
        self.tuple_keys = 0
        self.stopped_at: int | None = None

    def check_opcodes(self, handled: int) -> None:
        """Refuse a pickle of too many opcodes, whether read one by one or together."""
        if handled + self.skipped >= MAX_OPCODES:
            raise PickleError(f"more than {MAX_OPCODES} opcodes")

    def check_sizes(self, stacked: int) -> None:
        """Refuse a pickle whose stack or memo has outgrown its budget; called once per block of opcodes."""
        if stacked > MAX_STACK:
            raise PickleError(f"more than {MAX_STACK} values on the pickle's stack")
        if len(self.memo) > MAX_MEMO:
            raise PickleError(f"more than {MAX_MEMO} memo entries")

    def take(self, at: int, length: int) -> bytes:
        """Return `length` bytes at `at`."""
        self.check(at, length)
        return self.data[at : at + length]

    def check(self, at: int, length: int) -> None:
        """Refuse a length that runs past the end."""
        if at + length > len(self.data):
            raise CutError(f"a length of {length} where {max(len(self.data) - at, 0)} bytes remain")

    def spend(self, elements: int) -> None:
        """Charge the budget for a call that processes a number of elements.

        Raises:
            PickleError: calls have processed more than the pickle can mean.
        """
        self.work -= elements
        if self.work < 0:
            raise PickleError("its calls unfold to far more than the pickle holds")

    def line(self, at: int) -> tuple[str, int]:
        """Return the text up to the next newline, and the offset behind it."""
        end = self.newline(at)
        return self.data[at:end].decode("utf-8"), end + 1

    def newline(self, at: int) -> int:
        """The offset of the next newline."""
        end = self.data.find(b"\n", at)
        if end < 0:
            raise CutError("a text argument without an end")
        return end

    def key(self, key: Any) -> Any:
        """Return `key`, or a stand-in, so that hashing is cheap and collisions cannot be forced.

        Containers that share structure take forever to hash, and big ints can be made to collide; such keys do not
        occur in real checkpoints and are kept by identity.
        """
        if _flat(key):
            return key
        if isinstance(key, tuple) and len(key) <= MAX_FLAT_KEY and all(map(_flat, key)):
            self.tuple_keys += 1
            if self.tuple_keys <= MAX_TUPLE_KEYS:
                return key
        if isinstance(key, (Global, Opaque, NumpyScalar)):
            return key
        odd = _OddKey(f"a {type(key).__name__} used as a key")
        odd.state = key
        return odd

    def name(self, module: str, name: str) -> Global:
        """Return the one `Global` for a name."""
        found = self.globals.get((module, name))
        if found is None:
            found = self.globals[module, name] = Global(module, name)
            self.meet(found)
        return found

    def meet(self, name: Global) -> None:
        """Note a name that the pickle mentions for the first time."""

    def without_slots(self, value: Any) -> Any:
        """Fill the placeholders (slots) in a value; only `alike` makes values with slots."""
        return value

    def placed(self, tensor: Tensor, local: Tensor, mesh: Any, placements: tuple[Any, ...]) -> Tensor:
        """The DTensor of a local tensor, as it goes into the tree."""
        return tensor

    def persistent(self, pid: Any) -> Any:
        """Return the storage that a persistent id describes."""
        storage = Storage.from_pid(pid)
        self.loose_storages += 1
        known = self.storages.setdefault(storage.key, storage)
        if known.dtype == storage.dtype and known.numel == storage.numel:
            return known
        if known.numel or storage.numel:  # torch gives all storages without bytes one key, whatever their dtypes
            raise PickleError(f"storage {describe_for_error(storage.key)} is described in two ways")
        return storage


class _OddKey(Opaque):
    """Stands in for a dict key that is not hashed. Keys are printed often, so its text is made once."""

    __slots__ = ("_text",)

    def __repr__(self) -> str:
        if not hasattr(self, "_text"):
            self._text = super().__repr__()
        return self._text


def _flat(key: Any) -> bool:
    return isinstance(key, HARMLESS_KEYS) or (isinstance(key, int) and abs(key) < SAFE_INT)
