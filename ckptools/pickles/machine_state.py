"""The state of an unpickling and its limits: the stack, the memo, names, storages and budgets, as opcodes change them.

Everything that a machine calls on the way takes a `MachineState`; only `machine` knows how the opcodes are run.
"""

from __future__ import annotations

import re
import struct
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from datetime import date
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from ckptools.model.checkpoint import Said
from ckptools.model.regions import Ints
from ckptools.model.shards import Shard
from ckptools.model.tree import Global, NumpyScalar, Opaque, describe_for_error
from ckptools.pickles.objects import PlaceBatch, PlacementRecord, ShardRecord, Storage

if TYPE_CHECKING:
    from ckptools.model.tensor import Tensor
    from ckptools.pickles.objects import Claim, Mesh


# -- what the pickles of one checkpoint's ranks repeat, recognised by its bytes: shard records, tuples of ints, arrays
# Every rank file lists the shards of all ranks for every ShardedTensor. Apart from the rank's own shard, which has its
# place elsewhere in the pickle, the files of neighbouring ranks spell those lists byte for byte alike, memo numbers
# included. So what the reader of shard lists has matched once need only be compared afterwards, which costs a
# hundredth.
#
# The same bytes mean the same only where the words in them have the same memo numbers. Those are what the pattern of a
# record is made from, so what was learned with one pattern is for pickles that have the same.
#
# Where ranks gather their random states, every file has those of all: of 256 ranks 65,536 states of 625 ints and as
# many arrays of 2.5 kB, of which 256 differ. Only immutable values are shared: tuples of ints, and bytes.


NUMBERS = 10
"""Memo entries that a record makes: of them the first is the record itself."""

MAX_KEPT = 128 << 20
"""Bytes of pickle that are remembered per checkpoint; others are read as if they were new."""

MAX_RECORDS = 1 << 20
"""Distinct records that are remembered from one file to the next."""

MAX_OVERLAP = 4
"""Chains that are searched for one memo number: usually two, before and behind a rank's own place in a list."""


class Stretch(NamedTuple):
    """Records that follow each other in a pickle, whose memo numbers follow each other too.

    Attributes:
        first: memo number of the first record.
        records: the records.
        end: where the last of them ends in the pickle.
    """

    first: int
    records: Sequence[ShardRecord]
    end: int

    @property
    def past(self) -> int:
        """One more than the last memo number."""
        return self.first + NUMBERS * len(self.records)


class _Chain:
    """Records of one list with memo numbers in a row, and how they are spelled."""

    __slots__ = ("ends", "first", "records", "spelled")

    def __init__(self, first: int) -> None:
        self.first = first
        self.records: list[ShardRecord] = []
        self.spelled = bytearray()
        self.ends = [0]

    @property
    def past(self) -> int:
        return self.first + NUMBERS * len(self.records)


class RepeatedRecords:
    """The records that the pickles of one checkpoint's ranks repeat; one is handed from file to file.

    Args:
        limit: bytes of pickle that are remembered; 0 for a file that is read alone.

    Attributes:
        records: records that were matched, by the bytes of offsets, sizes and rank.
        layouts: what DTensors of one layout have in common.
        values: what else they repeat, byte for byte.
        learned: bytes of pickle that are remembered, and that were too many to be.
    """

    def __init__(self, limit: int = MAX_KEPT) -> None:
        self.limit = limit
        self.records: dict[tuple[bytes, bytes, bytes], ShardRecord] = {}
        self._by_value: dict[tuple[Ints, Ints, int | None], ShardRecord] = {}
        self.layouts: dict[Any, Any] = {}
        self._lists: dict[tuple[int, ...], tuple[Shard, ...]] = {}
        self.values = RepeatedValues(limit)
        self.learned = 0
        self._by_pattern: dict[bytes, list[_Chain]] = {}
        self._chains: list[_Chain] = []

    def begin(self, pattern: bytes) -> None:
        """Begin a pickle in which a record has this pattern: only what was learned with the same one is recognised."""
        self._chains = self._by_pattern.setdefault(pattern, [])
        if len(self._by_value) > MAX_RECORDS:
            self.records, self._by_value, self._lists = {}, {}, {}

    @property
    def knows_some(self) -> bool:
        """Whether anything was learned that a pickle of this pattern may spell."""
        return bool(self._chains)

    def record(self, offsets: Ints, sizes: Ints, rank: int | None) -> ShardRecord:
        """The one record of these offsets, sizes and rank."""
        found = self._by_value.get((offsets, sizes, rank))
        if found is None:
            found = self._by_value[offsets, sizes, rank] = ShardRecord(offsets, sizes, rank)
        return found

    def shard_list(self, shards: list[Shard]) -> tuple[Shard, ...]:
        """The one tuple of these shards, each of which is that of a record."""
        return self._lists.setdefault(tuple(map(id, shards)), tuple(shards))

    def find(self, data: bytes, start: int) -> Stretch | None:
        """The longest known part that a pickle spells from `start`; None where nothing is known."""
        if not self._chains:
            return None
        number = _number_at(data, start)
        for chain in self._near(number):
            index, rest = divmod(number - chain.first, NUMBERS)
            if rest or index >= len(chain.records):
                continue
            found = _same(chain, index, data, start)
            if found > index:
                return Stretch(number, chain.records[index:found], start + chain.ends[found] - chain.ends[index])
        return None

    def learn(self, part: Stretch, data: bytes, start: int, ends: Sequence[int]) -> None:
        """Remember a part that a pickle spells from `start`, and whose records end at `ends`."""
        self.learned += part.end - start
        if self.learned > self.limit:
            return
        chain = next((c for c in self._near(part.first) if c.past == part.first), None)
        if chain is None:
            chain = _Chain(part.first)
            self._chains.insert(bisect_right(self._chains, part.first, key=_first), chain)
        shift = chain.ends[-1] - start
        chain.records += part.records
        chain.spelled += data[start : part.end]
        chain.ends += [end + shift for end in ends]

    def _near(self, number: int) -> list[_Chain]:
        """The chains that may hold a memo number, or end before it."""
        place = bisect_right(self._chains, number, key=_first)
        return self._chains[max(0, place - MAX_OVERLAP) : place]


def _first(chain: _Chain) -> int:
    return chain.first


def _number_at(data: bytes, start: int) -> int:
    """The memo number of the record that begins at `start`: behind the fetch of its class, `)`, NEWOBJ and LONG_BINPUT.

    Source: the opcodes of protocol 2, which torch.save writes.
    """
    at = start + (5 if data[start : start + 1] == b"h" else 8)
    return int.from_bytes(data[at : at + 4], "little")


def _same(chain: _Chain, index: int, data: bytes, start: int) -> int:
    """One more than the last record of a chain, from `index` on, up to which a pickle spells the same from `start`."""

    def differs(count: int) -> bool:
        end = chain.ends[count]
        return data[start : start + end - begin] != chain.spelled[begin:end]

    begin, last = chain.ends[index], len(chain.records)
    if not differs(last):
        return last
    if differs(index + 1):
        return index
    return bisect_left(range(index + 1, last), True, key=differs) + index


# -- large values ------------------------------------------------------------------------------------------------------


MAX_VALUES_KEPT = 64 << 20
"""Bytes of pickle whose values are remembered of one checkpoint; what goes beyond is made anew."""

HEAD = 32
"""Bytes by which a tuple is found before it is compared."""

MIN_BYTES = 256
"""Shorter bytes cost more to remember than to hold again."""


class RepeatedValues:
    """The values that are shared; one is handed from file to file.

    Args:
        limit: bytes of pickle that are remembered; 0 for a file that is read alone.
    """

    def __init__(self, limit: int = MAX_VALUES_KEPT) -> None:
        self._left = limit
        self._tuples: dict[tuple[bytes, int], tuple[int, ...]] = {}
        self._by_head: dict[bytes, bytes] = {}
        self._bytes: dict[bytes, bytes] = {}

    def tuple_at(self, data: bytes, at: int) -> bytes | None:
        """The bytes of a known tuple that a pickle spells at `at`, up to its TUPLE; None where there is none."""
        spelled = self._by_head.get(data[at : at + HEAD])
        return spelled if spelled is not None and data.startswith(spelled, at) else None

    def of_tuple(self, spelled: bytes, times: int) -> tuple[int, ...]:
        """The tuple of ints that a run and its TUPLE spell; `times` counts how often this file has spelled it.

        No two places in one file share one: trees are judged by how much of them is shared (`model.tree`), and
        the pickle shares nothing here.
        """
        known = self._tuples.get((spelled, times))
        if known is None:
            known = ints_of_run(spelled[:-1])
            if self._room(spelled):
                self._tuples[spelled, times] = known
                self._by_head[spelled[:HEAD]] = spelled
        return known

    def of_bytes(self, data: bytes) -> bytes:
        """The one object for these bytes."""
        known = self._bytes.get(data, data) if len(data) >= MIN_BYTES else data
        if known is data and len(data) >= MIN_BYTES and self._room(data):
            self._bytes[data] = data
        return known

    def _room(self, spelled: bytes) -> bool:
        self._left -= len(spelled)
        return self._left >= 0


# -- ints that follow each other ---------------------------------------------------------------------------------------

# Every rank file of a job that gathers its random states holds those of all ranks, and each has 624 numbers of Python's
# generator: of 256 ranks 160,000 opcodes, half of the pickle. An int means the same wherever it stands, takes no memo
# number and refers to nothing, so one regular expression recognises a run of them and `struct` decodes it. A tuple that
# is nothing but such a run is one object for all ranks' files that spell it alike.
#
# This changes how fast a pickle is read and nothing else. Ints of other widths, runs of a few, and those that begin
# with a small int, as sizes do, are left to the handlers of single opcodes. Source: Lib/pickletools.py (BININT1,
# BININT2, BININT, LONG1, TUPLE).

MIN_RUN = 8
"""Ints that are worth it."""

MAX_RUN = 1000
"""Ints between two looks at the machine's budgets; a pickle of Python's ends its batches here too."""

RUN = re.compile(rb"(?:J.{4}|\x8a\x05.{4}\0|\x8a\x08.{8}|K.|M..){%d,%d}" % (MIN_RUN, MAX_RUN), re.DOTALL)

_INT = re.compile(rb"([JKM]|\x8a[\x05\x08])(?:(?<=J).{4}|(?<=\x05).{5}|(?<=\x08).{8}|(?<=K).|(?<=M)..)", re.DOTALL)
"""One int of a run, as its opcode; LONG1 with its length."""

_FORMS = ((b"\x8a\x05", b"xxLx"), (b"\x8a\x08", b"xxq"), (b"K", b"xB"), (b"M", b"xH"), (b"J", b"xi"))
"""The `struct` form of each. A LONG1 of 5 bytes whose last is zero holds 32 bits without a sign."""


_WORDS = re.compile(rb"(?:J...[\0-\x7f]|\x8a\x05....\0)*", re.DOTALL)
"""Ints of 32 bits without a sign, of which random states are made."""

_WORD = re.compile(rb"(?:J|\x8a\x05)(....)\0?", re.DOTALL)
"""One of those; behind it is another opcode, so that no zero byte is but its own."""


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
"""Opcodes between two looks at the sizes of stack and memo."""

MAX_STACK = 4_000_000
MAX_MEMO = 8_000_000
MAX_INT_BYTES = 1024
"""Larger ints are described: Python refuses to print them."""

MAX_INT_DIGITS = 2400
MAX_FLAT_KEY = 64
MAX_TUPLE_KEYS = 10_000
"""Tuples of ints can be chosen to collide; of this many the worst takes a few seconds."""

SAFE_INT = 2**61 - 1
"""Python hashes an int modulo this: larger ones can be chosen to collide, so they do not become dict keys."""

FREE_WORK = 1_000_000
WORK_PER_BYTE = 2
"""Elements that calls may go through: no more than the pickle can have spelled out for them, with some room."""


class PickleError(ValueError):
    """The stream is no pickle that torch.save writes, or asks for more than the budgets allow."""


class CutError(PickleError):
    """The bytes end before the pickle does; where it is the front of a larger file, more of that may help."""


class UnusualError(ValueError):
    """A pickle does something with a skipped record that only reading it opcode by opcode gets right."""


# -- the state ---------------------------------------------------------------------------------------------------------


HARMLESS_KEYS = (str, bytes, bool, float, type(None), date)

Locate = Callable[[Storage], tuple[Path, int, str, int] | None]


class Runs(Protocol):
    """Reads what repeats itself in a pickle without interpreting every opcode of it.

    Attributes:
        trigger: the class whose fetch from the memo begins what repeats itself; None while nothing can begin.
    """

    trigger: Global | None

    @property
    def runs(self) -> object:
        """The batches that were read; false for none."""

    def meet(self, name: Global) -> None:
        """Take note of a class that the pickle names for the first time."""

    def stop(self) -> None:
        """Read nothing in runs from here on."""

    def uncounted(self) -> int:
        """The number of memo entries that are not kept."""

    def fetch(self, number: int, at: int) -> tuple[Sequence[Any], int]:
        """What a skipped record gave the memo number `number`, and where to go on."""

    def skip(self, start: int) -> tuple[Sequence[Any], int] | None:
        """What to push for what begins at `start` with a fetch of the trigger, and where to go on; None for nothing."""

    def has_unresolved_records(self, tree: Any) -> bool:
        """Whether a skipped record stands in an unexpected place."""


Reader = Callable[["MachineState", bool], Runs]
"""Makes what reads runs for a machine; False to read none."""


class MachineState:
    """The state of a machine that interprets one pickle.

    Attributes:
        data: the pickle.
        memo: what the pickle has given a number.
        globals: every name that the pickle mentions, in order of first use.
        next_number: one more than the highest number given; picklers count upwards.
        storages: every storage that it mentions, by key.
        claims: `(rank, world size)` that sharded tensors in it say they were saved with; the rank may be None.
        modules: whether an object has the state of an `nn.Module`.
        meshes: device meshes that may be slices of larger ones.
        repeated: what the pickles of other ranks have in common with this one.
        fast: whether anything is read in runs.
        runs: reads what repeats itself: the shard lists of ShardedTensors, or the entries of DCP metadata.
        skipped: opcodes of ints that were read in runs.
        tuples_met: how often tuples of ints were met, by how they are spelled.
        flat: these tuples, by their `id`: walks need not look at each int.
        work: how many more elements calls may go through: a call may name a big list again and again.
        tuple_keys: tuples that are keys.
        locate: returns where a storage's bytes are: `(file, byte offset, record name, CRC-32)`, None where the
            file is cut short before them. None when it has none.
        reader: makes what reads runs.
        stopped_at: offset behind STOP; None while it was not met.
    """

    def __init__(
        self, data: bytes, locate: Locate | None, fast: bool, reader: Reader, repeated: RepeatedRecords
    ) -> None:
        self.data = data
        self.repeated = repeated
        self.locate = locate
        self.reader = reader
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
        self.runs: Runs = self.reader(self, fast)
        self.skipped = 0
        self.tuples_met: dict[bytes, int] = {}
        self.flat: dict[int, tuple[int, ...]] = {}
        self.work = FREE_WORK + WORK_PER_BYTE * len(self.data)
        self.tuple_keys = 0
        self.stopped_at: int | None = None

    def check_opcodes(self, handled: int) -> None:
        """Refuse a pickle of too many opcodes, those that were handled one by one and the others."""
        if handled + self.skipped >= MAX_OPCODES:
            raise PickleError(f"more than {MAX_OPCODES} opcodes")

    def check_sizes(self, stacked: int) -> None:
        """Refuse a pickle whose stack or memo has outgrown its budget; asked once per block of opcodes."""
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
        """Account for a call that goes through a number of elements.

        Raises:
            PickleError: calls have gone through more than the pickle can mean.
        """
        self.work -= elements
        if self.work < 0:
            raise PickleError("its calls unfold to far more than the pickle holds")

    def line(self, at: int) -> tuple[str, int]:
        """Return the text up to the next newline, and where to go on."""
        end = self.newline(at)
        return self.data[at:end].decode("utf-8"), end + 1

    def newline(self, at: int) -> int:
        """Return where the next newline is."""
        end = self.data.find(b"\n", at)
        if end < 0:
            raise CutError("a text argument without an end")
        return end

    def key(self, key: Any) -> Any:
        """Return `key`, or an object that stands for it, such that hashing it costs little and cannot be made to.

        Containers that share structure take forever to hash, and big ints can be made to collide; such keys do not
        occur in real checkpoints and are kept by identity.
        """
        if _flat(key):
            return key
        if isinstance(key, tuple) and len(key) <= MAX_FLAT_KEY and all(map(_flat, key)):
            self.tuple_keys += 1
            if self.tuple_keys <= MAX_TUPLE_KEYS:
                return key
        if isinstance(key, (Global, Opaque, NumpyScalar, ShardRecord, PlacementRecord, PlaceBatch)):
            return key
        odd = _OddKey(f"a {type(key).__name__} used as a key")
        odd.state = key
        return odd

    def name(self, module: str, name: str) -> Global:
        """Return the one `Global` for a name."""
        found = self.globals.get((module, name))
        if found is None:
            found = self.globals[module, name] = Global(module, name)
            self.runs.meet(found)
        return found

    def without_slots(self, value: Any) -> Any:
        """The value with what belongs into its slots; only `slots` makes some."""
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
        if known.numel or storage.numel:  # torch gives storages without bytes, whatever their dtypes, one key
            raise PickleError(f"storage {describe_for_error(storage.key)} is described in two ways")
        return storage


class _OddKey(Opaque):
    """Stands for a dict key that is not hashed. Keys are printed often, so its text is made once."""

    __slots__ = ("_text",)

    def __repr__(self) -> str:
        if not hasattr(self, "_text"):
            self._text = super().__repr__()
        return self._text


def _flat(key: Any) -> bool:
    return isinstance(key, HARMLESS_KEYS) or (isinstance(key, int) and abs(key) < SAFE_INT)
