"""The state of an unpickling and its limits: the stack, the memo, names, storages and budgets, as opcodes change them.

Everything that a machine calls on the way takes a `MachineState`; only `machine` knows how the opcodes are run.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import date
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from ckptools.model.provenance import Said
from ckptools.model.values import Global, NumpyScalar, Opaque, describe_for_error
from ckptools.pickles.objects import PlaceBatch, PlacementRecord, ShardRecord, Storage
from ckptools.pickles.repeated import RepeatedRecords

if TYPE_CHECKING:
    from ckptools.model.tensor import Tensor
    from ckptools.pickles.classes.device_mesh import Claim, Mesh

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


# -- the state --------------------------------------------------------------------------------------------------------


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

    def fetch(self, number: int, at: int) -> int:
        """Push what a skipped record gave the memo number `number`; return where to go on."""

    def skip(self, start: int, at: int) -> int:
        """Read what begins at `start`, where the trigger has just been fetched; return where to go on."""

    def has_unresolved_records(self, tree: Any) -> bool:
        """Whether a skipped record stands in an unexpected place."""


Reader = Callable[["MachineState", bool], Runs]
"""Makes what reads runs for a machine; False to read none."""


class MachineState:
    """The state of a machine that interprets one pickle.

    Attributes:
        data: the pickle.
        stack: values under construction above the last mark.
        marks: the stacks below each mark, the outermost first.
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
        self.stack: list[Any] = []
        self.marks: list[list[Any]] = []
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

    def check_sizes(self) -> None:
        """Refuse a pickle whose stack or memo has outgrown its budget; asked once per block of opcodes."""
        if len(self.stack) > MAX_STACK:
            raise PickleError(f"more than {MAX_STACK} values on the pickle's stack")
        if len(self.memo) > MAX_MEMO:
            raise PickleError(f"more than {MAX_MEMO} memo entries")

    def pop(self) -> Any:
        """Take the top of the stack."""
        return self.stack.pop()

    def pop_mark(self) -> list[Any]:
        """Take everything above the last mark."""
        items, self.stack = self.stack, self.marks.pop()
        return items

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

    def put(self, index: int) -> None:
        """Give the top of the stack a number."""
        if index < self.next_number:
            self.runs.stop()
        else:
            self.next_number = index + 1
        self.memo[index] = self.stack[-1]

    def get(self, index: int) -> Any:
        """Return what has the number `index`."""
        if index not in self.memo and self.runs.runs:
            raise UnusualError("a number that may be of a skipped record")
        return self.memo[index]

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
