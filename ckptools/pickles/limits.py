"""Limits of what a pickle may ask for, and the errors that say it is beyond them, cut short, or no pickle at all."""

from __future__ import annotations

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
"""Tuples of ints can be chosen to collide; of so many the worst takes a few seconds."""

SAFE_INT = 2**61 - 1
"""Python hashes an int modulo this: larger ones can be chosen to collide, so they do not become dict keys."""

FREE_WORK = 1_000_000
WORK_PER_BYTE = 2
"""Elements that calls may go through: no more than the pickle can have spelled out for them, with some room."""

MAX_NDIM = 64
"""Dimensions of a tensor or array; numpy and torch stop here too."""


class PickleError(ValueError):
    """The stream is no pickle that torch.save writes, or asks for more than the budgets allow."""


class CutError(PickleError):
    """The bytes end before the pickle does; where it is the front of a larger file, more of that may help."""


class UnusualError(ValueError):
    """A pickle does something with a skipped record that only reading it opcode by opcode gets right."""
