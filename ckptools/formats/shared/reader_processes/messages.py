"""What a reading process answers: a file's structure as a pickle in which only ckptools' own records can occur.

The process has read a file that a stranger may have made, so what comes from it is not trusted either: of the names in
an answer only those in `RECORDS` are known, each of them plain data, and nothing is looked up or imported.

What the files of all ranks have in common is sent once and told by its number from then on: the shards of all ranks,
which the tensors of a rank file list (`model.tensor.ShardList`), and random states, of which a file may have those of
all ranks, so a tuple of many ints, or many bytes, that the reader has met again (`pickles.repeated_values`); names too.
"""

from __future__ import annotations

import io
import pickle
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable
from datetime import date, datetime, timedelta
from operator import attrgetter
from pathlib import Path
from typing import Any

from ckptools.files.remote_path import RemotePath
from ckptools.model.provenance import Said
from ckptools.model.regions import Box
from ckptools.model.tensor import Coding, Encoded, Item, Shard, ShardList, Source, Tensor
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

MANY = 256
"""Ints or bytes that are sent once."""

MANY_SHARDS = 9
"""Shards of a tuple that is sent once."""

MANY_CHARACTERS = 6
"""Of a text that is sent once."""

MAX_SENT = 1 << 24
"""Of these, all that is remembered; what comes after is sent wherever it occurs."""

OVERHEAD = 32
"""What remembering one counts for beside them."""

TUPLES = (Box, Coding, Encoded, Item, Said, Shard, Source, Saved)
"""Records that are sent as a call with their fields, which is the fastest there is."""

RECORDS = (
    *(Tensor, Box, Coding, Encoded, Item, Said, Shard, ShardList, Source, Saved, ModuleState, Storage),
    *(Cycle, Device, Global, Lost, NumpyArray, NumpyDtype, NumpyScalar, Opaque, Size, TorchName),
    *(Counter, OrderedDict, defaultdict, date, datetime, timedelta, type(Path()), RemotePath),
    *(dict, list, set, int, float, complex),  # what a defaultdict makes, and complex numbers
)

NAMES: dict[tuple[str, str], Callable[..., Any]] = {(c.__module__, c.__qualname__): c for c in RECORDS}

_LEAST: dict[Any, int] = {str: MANY_CHARACTERS, tuple: MANY_SHARDS, bytes: MANY}
"""How long a value is that may be sent once."""

_tensor = attrgetter(*Tensor.__slots__)
_shard_list = attrgetter("listed", "start", "stop", "own")


class Sender:
    """Makes answers, in the process that reads."""

    def __init__(self) -> None:
        self._out = io.BytesIO()
        self._pickler = _Pickler(self._out, protocol=5)
        self._pickler.dispatch_table = {
            **dict.fromkeys(TUPLES, lambda record: (type(record), tuple(record))),
            Tensor: lambda tensor: (Tensor, _tensor(tensor)),
            ShardList: lambda shards: (ShardList, _shard_list(shards)),
        }

    def encode(self, saved: Saved) -> bytes:
        """The structure of one file."""
        self._out.seek(0)
        self._out.truncate()
        self._pickler.clear_memo()
        self._pickler.dump(saved)
        return self._out.getvalue()


class _Pickler(pickle.Pickler):
    """Tells a value by its number wherever it occurs again.

    A number is given before what is in a value is sent, and understood after it. So lists of shards, in which others
    may be that are told so, have numbers of their own, below 0.
    """

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._numbers: dict[int, int] = {}
        self._leaves: list[Any] = []  # an id is that of one object only as long as this is there
        self._lists: list[Any] = []
        self._left = MAX_SENT

    def persistent_id(self, value: Any) -> Any:
        """What stands for a value: its number, or the value itself the first time; None for a small one."""
        kind = type(value)
        if kind not in _LEAST or len(value) < _LEAST[kind]:
            return None
        number = self._numbers.get(id(value))
        if number is not None:
            return number
        cost = len(value) + OVERHEAD
        if self._left < cost or (kind is tuple and not _sent_once(value)):
            return None
        self._left -= cost
        is_list = kind is tuple and type(value[0]) is Shard
        known = self._lists if is_list else self._leaves
        self._numbers[id(value)] = ~len(known) if is_list else len(known)
        known.append(value)
        return value


def _sent_once(value: tuple[Any, ...]) -> bool:
    kinds = set(map(type, value))
    return kinds == {Shard} or (kinds == {int} and len(value) >= MANY)


class Receiver:
    """Understands the answers of one process.

    Args:
        same: the large values that other processes have sent, by themselves: equal ones become one object.
    """

    def __init__(self, same: dict[Any, Any]) -> None:
        self._same = same
        self._leaves: list[Any] = []
        self._lists: list[Any] = []

    def decode(self, data: bytes) -> Saved:
        """The structure of one file.

        Raises:
            Exception: the answer is no such thing; whatever then goes wrong in it.
        """
        saved = _Unpickler(io.BytesIO(data), self._value).load()
        if not isinstance(saved, Saved):
            raise pickle.UnpicklingError("an answer that is no file's structure")
        return saved

    def _value(self, told: Any) -> Any:
        """The one object for a value that is told by itself or by its number."""
        if type(told) is int:
            return self._leaves[told] if told >= 0 else self._lists[~told]
        known = self._lists if type(told) is tuple and type(told[0]) is Shard else self._leaves
        known.append(self._same.setdefault(told, told))
        return known[-1]


class _Unpickler(pickle.Unpickler):
    """Knows some names and looks for no others."""

    def __init__(self, file: io.BytesIO, value: Callable[[Any], Any]) -> None:
        super().__init__(file)
        self._value = value

    def persistent_load(self, told: Any) -> Any:
        """The large value that is told by its number, or by itself the first time."""
        return self._value(told)

    def find_class(self, module: str, name: str) -> Any:
        """What an answer means by a name.

        Raises:
            UnpicklingError: it may not occur.
        """
        if (module, name) not in NAMES:
            raise pickle.UnpicklingError("a name that does not belong into an answer")
        return NAMES[module, name]
