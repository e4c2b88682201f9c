"""Processes that read files ahead of their use, and return the structures in the order of the given files.

They are started as commands, not forked and not by `multiprocessing`: a fork of a process with threads (a notebook,
torch) may hang, and `multiprocessing` runs the user's script again unless it has a guard. If a process cannot
answer, the caller reads the file itself, and gets the same error as without processes.

A process reads paths from stdin, and answers each with the file's structure on stdout. A path behind a NUL is the path
of a pattern; for files that match a pattern, the answer is columns: the byte offsets of zip entries, and their
checksums.

A file may be malicious, so its answers are not trusted either: only names in `RECORDS` are accepted, each of
them plain data, and nothing is looked up or imported.

Values that the files of all ranks share are sent once, and by number from then on: shard lists of all ranks
(`model.shards.ShardList`); random states, because a file may have those of all ranks: tuples of many ints, or many
bytes, that the reader has seen before (`pickles.machine_state`); and names.
"""

from __future__ import annotations

import io
import os
import pickle
import struct
import sys
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import fields
from datetime import date, datetime, time, timedelta, timezone
from operator import attrgetter
from pathlib import Path
from queue import SimpleQueue
from threading import Thread
from typing import IO, Any

from ckptools.errors import CkptoolsError
from ckptools.files.opening import COMPRESSIONS, content_of, head_at, path_of
from ckptools.files.remote.path import RemotePath, needs_query
from ckptools.model.provenance import Said
from ckptools.model.regions import Box
from ckptools.model.shards import Coding, Encoded, Item, ScaleCoding, Shard, ShardList, Source
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
)
from ckptools.pickles.alike import Alike, Own
from ckptools.pickles.archive import FetchAhead
from ckptools.pickles.machine import gc_paused
from ckptools.pickles.machine_state import RepeatedRecords
from ckptools.pickles.objects import Storage
from ckptools.pickles.reader import AlikeFiles, Saved
from ckptools.training_state import modules
from ckptools.training_state.modules import ModuleState

GREETING = b"ckptools reads\n"
"""First line of output, by which the parent recognises the program."""

LENGTH = struct.Struct("<Q")
"""Length prefix of every path and every answer."""

COMPARE_WITH = "\0"
"""Precedes the path of a pattern for all following files; it has no answer."""

NO_ANSWER = LENGTH.pack(0)
"""The file could not be read here; the parent reads it, and gets the error, if there is one."""

AHEAD = 3
"""Files that are requested from each process in advance; bounds the answers in memory."""

AHEAD_IN_STORES = 16
"""Remote files that are requested from each process in advance; a process fetches them together."""

PIPE = 1 << 20
"""Bytes of answers in a process's pipe before it waits."""

RUN = "import sys; sys.path += sys.argv[1:]; from ckptools.formats import reader_processes; reader_processes.main()"
"""Python's own modules come first, so that no file beside a checkpoint or a script shadows one of them."""


def started(paths: Sequence[Path], count: int, alike: AlikeFiles) -> ReaderProcesses | None:
    """Start reader processes for these files.

    None if this Python is embedded in a program and cannot be started again.

    Raises:
        OSError: the system cannot start them.
    """
    if not sys.executable or getattr(sys, "frozen", False):
        return None
    return ReaderProcesses([path for path in paths if not needs_query(path)], count, alike)


class ReaderProcesses:
    """Processes that read the files of one checkpoint."""

    def __init__(self, paths: Sequence[Path], count: int, alike: AlikeFiles) -> None:
        self._waiting = deque(paths)
        self._asked: deque[tuple[Path, _ReaderProcess]] = deque()
        self._answers: dict[Path, Saved | None] = {}
        self._processes: list[_ReaderProcess] = []
        self._left = set(paths)
        same: dict[Any, Any] = {}
        self._alike = alike
        try:
            for _ in range(count):
                self._processes.append(_ReaderProcess(Receiver(same, alike)))
                for first in alike.firsts:
                    self._processes[-1].compare_with(first)
            far = any(isinstance(path, RemotePath) for path in paths)
            for process in self._processes * (AHEAD_IN_STORES if far else AHEAD):
                self._ask(process)
        except BaseException:
            self.close()
            raise

    def take(self, path: Path) -> Saved | None:
        """The structure of one of the files, once; None for other files, and if no process could read it."""
        if path not in self._left:
            return None
        self._left.remove(path)
        while path not in self._answers:
            asked, process = self._asked.popleft()
            self._answers[asked] = process.answer(asked)
            self._learn(asked)
            self._ask(process)
        return self._answers.pop(path)

    def _learn(self, path: Path) -> None:
        """Let all processes compare later files with another interpreted one, after two similar files matched none."""
        saved = self._answers[path]
        if saved is None or isinstance(saved.content, Alike):
            return
        if (other := self._alike.missed(saved)) is not None:
            for process in self._processes:
                process.compare_with(other)

    def close(self) -> None:
        """Stop the processes."""
        for process in self._processes:
            process.end()

    def _ask(self, process: _ReaderProcess) -> None:
        if self._waiting:
            path = self._waiting.popleft()
            process.ask(path)
            self._asked.append((path, process))


class _ReaderProcess:
    """One reader process; after its first fault it does not answer any more."""

    def __init__(self, receiver: Receiver) -> None:
        import subprocess  # the processes themselves do not need it, and it takes 4 ms

        self._receiver = receiver
        self._greeted = self._gone = False
        # A session of its own: an interrupt from the terminal is for the process that the user sees.
        flags = ["-I", "-S", "-X", f"utf8={sys.flags.utf8_mode}", *(["-B"] if sys.dont_write_bytecode else [])]
        here = str(Path(__file__).resolve().parents[2])  # the folder that contains the package
        self._process = subprocess.Popen(
            [sys.executable, *flags, "-c", RUN, here, *filter(None, sys.path)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
            pipesize=PIPE,
        )

    def compare_with(self, path: Path) -> None:
        self.ask(f"{COMPARE_WITH}{path}")

    def ask(self, path: Path | str) -> None:
        if self._gone:
            return
        name = os.fsencode(str(path))
        try:
            assert self._process.stdin is not None
            self._process.stdin.write(LENGTH.pack(len(name)) + name)
            self._process.stdin.flush()
        except OSError:
            self.end()

    def answer(self, path: Path) -> Saved | None:
        if self._gone:
            return None
        with suppress(Exception):
            data = self._receive()
            if not data:
                return None
            saved = self._receiver.decode(data)
            if saved.path == path:
                return saved
        self.end()
        return None

    def _receive(self) -> bytes:
        out = self._process.stdout
        assert out is not None
        if not self._greeted and _read_exactly(out, len(GREETING)) != GREETING:
            raise EOFError
        self._greeted = True
        return _read_exactly(out, *LENGTH.unpack(_read_exactly(out, LENGTH.size)))

    def end(self) -> None:
        self._gone = True
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            with suppress(OSError):  # it had not taken a request
                pipe.close()


def _read_exactly(file: IO[bytes], length: int) -> bytes:
    """Read `length` bytes; fewer are an EOFError."""
    data = file.read(length)
    if len(data) < length:
        raise EOFError
    return data


# -- inside a process --------------------------------------------------------------------------------------------------


def main() -> None:
    """Answer until stdin is closed."""
    out = sys.stdout.buffer
    out.write(GREETING)
    out.flush()
    paths: SimpleQueue[tuple[Path, bool]] = SimpleQueue()
    ahead = FetchAhead()
    asked = sys.stdin.buffer
    alike = AlikeFiles(None)
    Thread(target=_listen, args=(asked, paths, ahead), daemon=True).start()
    sender, repeated = Sender(), RepeatedRecords()
    while True:
        with gc_paused():
            path, answers = paths.get()
            if not answers:
                alike.firsts.append(path)
                continue
            ahead.reach(path)
            out.write(_answer(path, sender, repeated, alike))
        out.flush()


def _listen(asked: IO[bytes], paths: SimpleQueue[tuple[Path, bool]], ahead: FetchAhead) -> None:
    """Pass on requested paths; end the process when stdin is closed, even in the middle of a long file."""
    while head := asked.read(LENGTH.size):
        name = os.fsdecode(asked.read(*LENGTH.unpack(head)))
        path, answers = path_of(name.removeprefix(COMPARE_WITH)), not name.startswith(COMPARE_WITH)
        if answers:
            ahead.add([path])
        paths.put((path, answers))
    os._exit(0)  # the only way to exit from a thread; nothing is open for writing, no temporary file was made


def _answer(path: Path, sender: Sender, repeated: RepeatedRecords, alike: AlikeFiles) -> bytes:
    try:
        if content_of(head_at(path)) in COMPRESSIONS.values():
            return NO_ANSWER  # its tensors will lie in a temporary file, which must belong to the parent process
        saved = alike.read(path) or modules.read_file(path, repeated)
    except (CkptoolsError, OSError, MemoryError, RecursionError):
        return NO_ANSWER
    data = sender.encode(saved)
    return LENGTH.pack(len(data)) + data


# -- answers: a file's structure as a pickle ---------------------------------------------------------------------------

MANY = 256
"""Tuples of ints, or bytes, of at least this length are sent once."""

MANY_SHARDS = 9
"""Tuples of shards of at least this length are sent once."""

MANY_CHARACTERS = 6
"""Texts of at least this length are sent once."""

MAX_SENT = 1 << 24
"""Limit of cached values; later values are sent each time."""

OVERHEAD = 32
"""Cost of caching one value, beside its length."""

TUPLES = (Box, Coding, Encoded, Item, Own, Said, ScaleCoding, Shard, Source, Saved)
"""Records that are sent as a call with their fields, the fastest way."""

RECORDS = (
    *(Tensor, Box, Coding, Encoded, Item, Own, Said, ScaleCoding, Shard, ShardList, Source, Saved),
    *(ModuleState, Storage),
    *(Cycle, Device, Global, Lost, Opaque, Size, TorchName),
    *(NumpyArray, NumpyDtype, NumpyScalar),
    *(Counter, OrderedDict, defaultdict, date, datetime, time, timedelta, timezone, type(Path()), RemotePath),
    *(dict, list, set, int, float, complex, range, slice),  # factories of a defaultdict, and values pickled as calls
)

NAMES: dict[tuple[str, str], Callable[..., Any]] = {(c.__module__, c.__qualname__): c for c in RECORDS}

_LEAST: dict[Any, int] = {str: MANY_CHARACTERS, tuple: MANY_SHARDS, bytes: MANY}
"""Minimal length of a value that is sent once."""

_tensor = attrgetter(*(field.name for field in fields(Tensor) if field.init and field.name != "origin"))
_shard_list = attrgetter("listed", "start", "stop", "own")


class Sender:
    """Encodes answers, in the reader process."""

    def __init__(self) -> None:
        self._out = io.BytesIO()
        self._pickler = _Pickler(self._out, protocol=5)
        self._pickler.dispatch_table = {
            **dict.fromkeys(TUPLES, lambda record: (type(record), tuple(record))),
            Tensor: lambda tensor: (Tensor, _tensor(tensor)),
            ShardList: lambda shards: (ShardList, _shard_list(shards)),
        }

    def encode(self, saved: Saved) -> bytes:
        """The structure of one file; for a file that matches a pattern, only the differences."""
        if isinstance(saved.content, Alike):
            saved = saved._replace(tree=saved.content.own, names=())
        self._out.seek(0)
        self._out.truncate()
        self._pickler.clear_memo()
        self._pickler.dump(saved)
        return self._out.getvalue()


class _Pickler(pickle.Pickler):
    """Sends a value by its number when it occurs again.

    A number is assigned before the content of a value is sent, but valid only after it. Lists of shards may contain
    values with numbers, so they have numbers of their own, below 0.
    """

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._numbers: dict[int, int] = {}
        self._leaves: list[Any] = []  # keeps the objects alive, so that no id is reused
        self._lists: list[Any] = []
        self._left = MAX_SENT

    def persistent_id(self, value: Any) -> Any:
        """The message for a value: its number, or the value itself the first time; None for a small one."""
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
    """Decodes the answers of one process; large values that equal another process's become one shared object."""

    def __init__(self, same: dict[Any, Any], alike: AlikeFiles | None = None) -> None:
        self._same, self._alike = same, alike or AlikeFiles(None)
        self._leaves: list[Any] = []
        self._lists: list[Any] = []

    def decode(self, data: bytes) -> Saved:
        """The structure of one file; any exception if the answer is malformed."""
        saved = _Unpickler(io.BytesIO(data), self._value).load()
        if not isinstance(saved, Saved):
            raise pickle.UnpicklingError("an answer that is no file's structure")
        return self._alike.received(saved) if isinstance(saved.content, Own) else saved

    def _value(self, item: Any) -> Any:
        """The shared object for a value that was sent itself or by its number."""
        if type(item) is int:
            return self._leaves[item] if item >= 0 else self._lists[~item]
        known = self._lists if type(item) is tuple and type(item[0]) is Shard else self._leaves
        known.append(self._same.setdefault(item, item))
        return known[-1]


class _Unpickler(pickle.Unpickler):
    """Accepts only the names of known records."""

    def __init__(self, file: io.BytesIO, value: Callable[[Any], Any]) -> None:
        super().__init__(file)
        self._value = value

    def persistent_load(self, item: Any) -> Any:
        return self._value(item)

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in NAMES:
            raise pickle.UnpicklingError("a name that does not belong into an answer")
        return NAMES[module, name]
