"""A pickle machine to which a global is only ever a name.

It interprets the opcodes itself, so nothing that a pickle names is imported or called, and every length is
compared with the bytes that remain before anything is allocated. Where a pickle would call something, `rebuild`
decides: a known harmless shape is built by our own code, anything else becomes an `Opaque`.

Work and memory are linear in the size of the pickle, and the budgets below bound the rest. Opcodes are those of
protocols 0 to 5; source: Lib/pickletools.py.
"""

from __future__ import annotations

import struct
from itertools import count, repeat
from typing import Any

from ckptools.pickles import object_opcodes, tensors  # noqa: F401 - they register opcodes, and what tensors are
from ckptools.pickles.limits import BLOCK, CutError, PickleError, UnusualError
from ckptools.pickles.machine_state import Locate, MachineState, Reader
from ckptools.pickles.opcodes import DISPATCH, Stop
from ckptools.pickles.repeated_records import RepeatedRecords
from ckptools.pickles.shard_runs import RunReader


class Machine(MachineState):
    """Interprets one pickle."""

    def __init__(
        self,
        data: bytes,
        locate: Locate | None = None,
        fast: bool = True,
        reader: Reader = RunReader,
        repeated: RepeatedRecords | None = None,
    ) -> None:
        super().__init__(data, locate, fast, reader, repeated or RepeatedRecords(limit=0))

    def load(self, at: int = 0) -> Any:
        """Interpret the pickle that begins at `at` up to its STOP and return what it describes.

        Raises:
            PickleError: the stream is cut, malformed or beyond the budgets.
        """
        try:
            tree = self._load(at)
            if not self.runs.has_unresolved_records(tree):
                return tree
        except (PickleError, UnusualError):
            if not self.runs.runs:
                raise
        # Something that only the opcodes themselves tell: once more, skipping nothing.
        self._start(fast=False)
        return self._load(at)

    def _load(self, at: int) -> Any:
        data, dispatch = self.data, DISPATCH
        try:
            for handled in count(BLOCK, BLOCK):
                for _ in repeat(None, BLOCK):
                    at = dispatch[data[at]](self, at + 1)
                self.check_sizes()
                self.check_opcodes(handled)
        except Stop as stop:
            self.stopped_at = stop.at
        except (IndexError, KeyError, struct.error) as error:
            if at >= len(data):
                raise CutError("the pickle ends without STOP") from error
            if at + 1 == len(data) or isinstance(error, struct.error):
                raise CutError(f"malformed pickle near byte {at}") from error
            raise PickleError(f"malformed pickle near byte {at}") from error
        except (PickleError, UnusualError):
            raise
        except (ValueError, TypeError, AttributeError, ArithmeticError) as error:
            raise PickleError(f"{_line(error)} (pickle byte {at})") from error
        if not self.stack:
            raise PickleError("the pickle ends with nothing on its stack")
        return self.pop()


def _line(error: Exception) -> str:
    """What Python says of a value that does not fit; not when it repeats what the file chose at length."""
    text = str(error)
    return text if text.isprintable() and len(text) < 200 else f"malformed: {type(error).__name__}"
