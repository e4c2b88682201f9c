"""What a reading process runs: it is asked for paths on stdin and answers each with the file's structure on stdout."""

from __future__ import annotations

import os
import struct
import sys
from pathlib import Path
from queue import SimpleQueue
from threading import Thread
from typing import IO

from ckptools.errors import CkptoolsError
from ckptools.files.file_type import COMPRESSIONS, content_of, head_of
from ckptools.files.location import path_of
from ckptools.files.opening import File
from ckptools.formats.shared.reader_processes.messages import Sender
from ckptools.pickles.fetch_ahead import FetchAhead
from ckptools.pickles.loading import gc_paused
from ckptools.pickles.repeated_records import RepeatedRecords
from ckptools.training_state import modules

GREETING = b"ckptools reads\n"
"""Comes first, so that the asking process knows whom it has started."""

LENGTH = struct.Struct("<Q")
"""Stands before every path and every answer: its bytes."""

NO_ANSWER = LENGTH.pack(0)
"""The file could not be read here; who asked reads it, and meets the error, if there is one, where it belongs."""


def main() -> None:
    """Answer until nobody asks any more."""
    out = sys.stdout.buffer
    out.write(GREETING)
    out.flush()
    paths: SimpleQueue[Path] = SimpleQueue()
    ahead = FetchAhead()
    Thread(target=_listen, args=(sys.stdin.buffer, paths, ahead), daemon=True).start()
    sender, repeated = Sender(), RepeatedRecords()
    while True:
        with gc_paused():
            path = paths.get()
            ahead.wait(path)
            out.write(_answer(path, sender, repeated))
        out.flush()


def _listen(asked: IO[bytes], paths: SimpleQueue[Path], ahead: FetchAhead) -> None:
    """Pass on the paths that are asked for; end the process with whoever asks, even in the middle of a long file."""
    while head := asked.read(LENGTH.size):
        path = path_of(os.fsdecode(asked.read(*LENGTH.unpack(head))))
        ahead.add([path])
        paths.put(path)
    os._exit(0)  # from a thread there is no other way; nothing is open for writing, no temporary file was made


def _answer(path: Path, sender: Sender, repeated: RepeatedRecords) -> bytes:
    try:
        if _compressed(path):  # its tensors will lie in a temporary file, which must belong to who asks
            return NO_ANSWER
        saved = modules.read_file(path, repeated)
    except (CkptoolsError, OSError, MemoryError, RecursionError):
        return NO_ANSWER
    data = sender.encode(saved)
    return LENGTH.pack(len(data)) + data


def _compressed(path: Path) -> bool:
    with File(path) as file:
        return content_of(head_of(file)) in COMPRESSIONS.values()


def read_exactly(file: IO[bytes], length: int) -> bytes:
    """So many bytes.

    Raises:
        EOFError: there are fewer.
    """
    data = file.read(length)
    if len(data) < length:
        raise EOFError
    return data
