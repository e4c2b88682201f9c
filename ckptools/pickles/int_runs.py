"""Ints that follow each other, read in runs.

Every rank file of a job that gathers its random states holds those of all ranks, and each has 624 numbers of Python's
generator: of 256 ranks 160,000 opcodes, half of the pickle. An int means the same wherever it stands, takes no memo
number and refers to nothing, so one regular expression recognises a run of them and `struct` decodes it. A tuple that
is nothing but such a run is one object for all ranks' files that spell it alike.

This changes how fast a pickle is read and nothing else. Ints of other widths, runs of a few, and those that begin with
a small int, as sizes do, are left to the handlers of single opcodes. Source: Lib/pickletools.py (BININT1, BININT2,
BININT, LONG1, TUPLE).
"""

from __future__ import annotations

import re
import struct

MIN_RUN = 8
"""Ints that are worth it."""

MAX_RUN = 1000
"""Ints between two looks at the machine's budgets; a pickle of Python's ends its batches here too."""

RUN = re.compile(rb"(?:J.{4}|\x8a\x05.{4}\0|\x8a\x08.{8}|K.|M..){%d,%d}" % (MIN_RUN, MAX_RUN), re.DOTALL)

_INT = re.compile(rb"([JKM]|\x8a[\x05\x08])(?:(?<=J).{4}|(?<=\x05).{5}|(?<=\x08).{8}|(?<=K).|(?<=M)..)", re.DOTALL)
"""One int of a run, as its opcode; LONG1 with its length."""

_FORMS = ((b"\x8a\x05", b"xxLx"), (b"\x8a\x08", b"xxq"), (b"K", b"xB"), (b"M", b"xH"), (b"J", b"xi"))
"""How `struct` spells each. A LONG1 of 5 bytes whose last is zero holds 32 bits without a sign."""


def ints_of_run(spelled: bytes) -> tuple[int, ...]:
    """The ints that a run of opcodes pushes."""
    form = b"".join(_INT.findall(spelled))
    for opcode, of_struct in _FORMS:
        form = form.replace(opcode, of_struct)
    return struct.unpack(b"<" + form, spelled)
