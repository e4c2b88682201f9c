"""What a reading process answers: a file's structure as a pickle in which only ckptools' own records can occur.

The process has read a file that a stranger may have made, so what comes from it is not trusted either: of the names in
an answer only those in `RECORDS` are known, each of them plain data, and nothing is looked up or imported.

The tensors of a rank file list the shards of all ranks. Such a list is sent once; where the next file's has the same
shards but for a few, those few are sent. Random states, of which a file may have those of all ranks, are sent once too:
a tuple of many ints, or many bytes, that the reader has met again (`pickles.repeated_values`) is told by its number.
"""

from __future__ import annotations

import io
import pickle
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable
from datetime import date, datetime, timedelta
from itertools import compress, count
from operator import attrgetter, is_not
from pathlib import Path
from typing import Any, NamedTuple

from ckptools.files.remote_path import RemotePath
from ckptools.model.regions import Box, Ints
from ckptools.model.tensor import Item, Shard, Source, Tensor
from ckptools.model.values import (
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
)
from ckptools.pickles.objects import Storage
from ckptools.pickles.reader import Saved
from ckptools.training_state.modules import ModuleState

Shards = tuple[Shard, ...]

FEW = 8
"""Shards of a list that is sent in full wherever it occurs; of a longer one, as a fraction, those that may differ."""

MANY = 256
"""Ints or bytes that are sent once."""

MAX_SENT = 1 << 24
"""Of these, all that is remembered; what comes after is sent wherever it occurs."""


class ShardList(NamedTuple):
    """A tensor's shards, all of them.

    Attributes:
        shape: of the tensor.
        shards: its shards.
    """

    shape: Ints
    shards: Shards


class ChangedShardList(NamedTuple):
    """A tensor's shards, told by those that differ from the last list in full of the same shape and length.

    Attributes:
        shape: of the tensor.
        length: how many shards.
        changed: those that differ, with their places.
    """

    shape: Ints
    length: int
    changed: tuple[tuple[int, Shard], ...]


TUPLES = (Box, Item, Shard, Source, Saved, ShardList, ChangedShardList)
"""Records that are sent as a call with their fields, which is the fastest there is."""

RECORDS = (
    *(Tensor, Box, Item, Shard, Source, Saved, ModuleState, Storage),
    *(Cycle, Device, Global, Lost, NumpyArray, NumpyDtype, NumpyScalar, Opaque, Size, TorchName),
    *(Counter, OrderedDict, defaultdict, date, datetime, timedelta, type(Path()), RemotePath),
    *(dict, list, set, int, float, complex),  # what a defaultdict makes, and complex numbers
)

NAMES: dict[tuple[str, str], Callable[..., Any]] = {(c.__module__, c.__qualname__): c for c in RECORDS}

_fields = attrgetter(*(name for name in Tensor.__slots__ if name != "shards"))
_order = tuple(name for name in Tensor.__slots__ if name != "shards").index("dtype") + 1


class Sender:
    """Makes answers, in the process that reads."""

    def __init__(self) -> None:
        self._lists: dict[tuple[Ints, int], Shards] = {}
        self._out = io.BytesIO()
        self._pickler = _Pickler(self._out, protocol=5)
        self._pickler.dispatch_table = {**dict.fromkeys(TUPLES, _as_call), Tensor: self._tensor}

    def encode(self, saved: Saved) -> bytes:
        """The structure of one file."""
        self._out.seek(0)
        self._out.truncate()
        self._pickler.clear_memo()
        self._pickler.dump(saved)
        return self._out.getvalue()

    def _tensor(self, tensor: Tensor) -> tuple[Any, ...]:
        fields = _fields(tensor)
        return Tensor, (*fields[:_order], self._shards(tensor.shape, tensor.shards), *fields[_order:])

    def _shards(self, shape: Ints, shards: Shards) -> Shards | ShardList | ChangedShardList:
        if len(shards) <= FEW:
            return shards
        known = self._lists.get((shape, len(shards)))
        if known is not None:
            places = list(compress(count(), map(is_not, shards, known)))
            if len(places) <= len(shards) // FEW:
                return ChangedShardList(shape, len(shards), tuple([(place, shards[place]) for place in places]))
        self._lists[shape, len(shards)] = shards
        return ShardList(shape, shards)


class _Pickler(pickle.Pickler):
    """Tells a large value by its number wherever it occurs again."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._numbers: dict[int, int] = {}
        self._sent: list[Any] = []  # an id is that of one object only as long as this is there
        self._left = MAX_SENT

    def persistent_id(self, value: Any) -> Any:
        """What stands for a value: its number, or the value itself the first time; None for a small one."""
        if type(value) not in (tuple, bytes) or len(value) < MANY:
            return None
        number = self._numbers.get(id(value))
        if number is not None:
            return number
        if self._left < len(value) or (type(value) is tuple and set(map(type, value)) != {int}):
            return None
        self._left -= len(value)
        self._numbers[id(value)] = len(self._sent)
        self._sent.append(value)
        return value


def _as_call(record: Any) -> tuple[Any, ...]:
    return type(record), tuple(record)


class Receiver:
    """Understands the answers of one process.

    Args:
        same: the shards and large values that other processes have sent, by themselves: equal ones become one object.
    """

    def __init__(self, same: dict[Any, Any]) -> None:
        self._lists: dict[tuple[Ints, int], Shards] = {}
        self._same = same
        self._values: list[Any] = []
        self._names = NAMES | {
            (ShardList.__module__, ShardList.__qualname__): self._list,
            (ChangedShardList.__module__, ChangedShardList.__qualname__): self._changed,
        }

    def decode(self, data: bytes) -> Saved:
        """The structure of one file.

        Raises:
            Exception: the answer is no such thing; whatever then goes wrong in it.
        """
        saved = _Unpickler(io.BytesIO(data), self._names, self._value).load()
        if not isinstance(saved, Saved):
            raise pickle.UnpicklingError("an answer that is no file's structure")
        return saved

    def _list(self, shape: Ints, shards: Shards) -> Shards:
        found = tuple(self._same.setdefault(shard, shard) for shard in shards)
        self._lists[shape, len(found)] = found
        return found

    def _changed(self, shape: Ints, length: int, changed: tuple[tuple[int, Shard], ...]) -> Shards:
        shards = list(self._lists[shape, length])
        for place, shard in changed:
            shards[place] = shard
        return tuple(shards)

    def _value(self, told: Any) -> Any:
        """The one object for a large value."""
        if type(told) is int:
            return self._values[told]
        self._values.append(self._same.setdefault(told, told))
        return self._values[-1]


class _Unpickler(pickle.Unpickler):
    """Knows some names and looks for no others."""

    def __init__(
        self, file: io.BytesIO, names: dict[tuple[str, str], Callable[..., Any]], value: Callable[[Any], Any]
    ) -> None:
        super().__init__(file)
        self._names, self._value = names, value

    def persistent_load(self, told: Any) -> Any:
        """The large value that is told by its number, or by itself the first time."""
        return self._value(told)

    def find_class(self, module: str, name: str) -> Any:
        """What an answer means by a name.

        Raises:
            UnpicklingError: it may not occur.
        """
        if (module, name) not in self._names:
            raise pickle.UnpicklingError("a name that does not belong into an answer")
        return self._names[module, name]
