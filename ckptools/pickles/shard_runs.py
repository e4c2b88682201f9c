"""The shard list of a ShardedTensor, read in runs.

Every ShardedTensor in every rank file lists the shards of all ranks: about 115 bytes and 40 opcodes a shard, so
that one file of a 256-rank job holds tens of thousands of records that look alike. Once the machine has met one
record, the memo says which number each of its words has, and a regular expression made from those numbers matches
the others at C speed. A matched record becomes a `ShardRecord`; what its opcodes would have put into the memo is
made only if something asks for it, by interpreting the skipped bytes after all. So this changes how fast a pickle
is read and nothing else; a file that looks different is read opcode by opcode.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from ckptools.values import Global

if TYPE_CHECKING:
    from ckptools.pickles.machine import Machine

RECORD_CLASS = "ShardMetadata"
PLACEMENT_CLASS = "_remote_device"
WORDS = ("shard_offsets", "shard_sizes", "placement", "_worker_name", "_rank", "_device")

PUT = rb"(?:q.|r.{4})"
INT = rb"(?:K.|M..|J.{4}|\x8a[\x00-\x08].{0,8}?)"
INTS = rb"(?:" + INT + rb"a|\((?:" + INT + rb")+e|)"
TEXT = rb"(?:N|h.|j.{4}|X.{4}[\w:/.-]{1,64}?" + PUT + rb")"


class ShardRecord:
    """One shard of a ShardedTensor's list.

    Attributes:
        offsets: first index per dimension.
        sizes: extent per dimension.
        rank: rank within the tensor's process group.
    """

    __slots__ = ("offsets", "rank", "sizes")

    def __init__(self, offsets: tuple[int, ...], sizes: tuple[int, ...], rank: int) -> None:
        self.offsets = offsets
        self.sizes = sizes
        self.rank = rank


class Placement:
    """The `_remote_device` of a record; ChunkShardingSpec lists the same objects again.

    Attributes:
        rank: rank within the tensor's process group.
    """

    __slots__ = ("rank",)

    def __init__(self, rank: int) -> None:
        self.rank = rank


class RunReader:
    """Skips runs of shard records for one machine.

    Attributes:
        trigger: the class whose fetch from the memo begins a record.
    """

    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        self.trigger: Global | None = None
        self.skipped: list[tuple[int, int]] = []
        self.pattern: re.Pattern[bytes] | None = None

    def skip(self, start: int, at: int) -> int:
        """Read the records from `start`, where the class has just been fetched; return where to go on.

        The opcodes would leave one value per record on the stack; so does this.
        """
        if self.pattern is None:
            self.pattern = _learn(self.machine.memo)
        if self.pattern is None:
            return at
        end, records = start, []
        while found := self.pattern.match(self.machine.data, end):
            offsets, sizes, number, rank_code = found.groups()
            rank = _ints(rank_code)[0]
            records.append(ShardRecord(_ints(offsets), _ints(sizes), rank))
            self.machine.memo[int.from_bytes(number[1:], "little")] = Placement(rank)
            end = found.end()
        if not records:
            return at
        self.machine.pop()
        self.machine.stack.extend(records)
        self.skipped.append((start, end))
        return end

    def recover(self) -> None:
        """Make the memo entries of all skipped records, by interpreting them."""
        spans, self.skipped = self.skipped, []
        trigger, self.trigger = self.trigger, None
        for start, end in spans:
            stack, self.machine.stack = self.machine.stack, []
            self.machine.interpret(start, end)
            self.machine.stack = stack
        self.trigger = trigger


def _learn(memo: dict[int, Any]) -> re.Pattern[bytes] | None:
    """Make the pattern of a record from the memo numbers of its words; None before a record has been met."""
    gets: dict[str, bytes] = {}
    for number, value in memo.items():
        if isinstance(value, str) and value in WORDS:
            gets.setdefault(value, _get(number))
        elif isinstance(value, Global) and value.name in (RECORD_CLASS, PLACEMENT_CLASS, "device"):
            gets.setdefault(value.name, _get(number))
    if len(gets) < len(WORDS) + 3:
        return None
    new = rb"\)\x81" + PUT
    placement = (
        gets[PLACEMENT_CLASS] + rb"\)\x81(" + PUT + rb")\}" + PUT + rb"\("
        + gets["_worker_name"] + TEXT + gets["_rank"] + rb"(" + INT + rb")"
        + gets["_device"] + gets["device"] + TEXT + rb"(?:\x85|" + INT + rb"\x86)" + PUT + rb"R" + PUT + rb"ub"
    )  # fmt: skip
    record = (
        gets[RECORD_CLASS] + new + rb"N\}" + PUT + rb"\("
        + gets["shard_offsets"] + rb"\]" + PUT + rb"(" + INTS + rb")"
        + gets["shard_sizes"] + rb"\]" + PUT + rb"(" + INTS + rb")"
        + gets["placement"] + placement + rb"u\x86" + PUT + rb"b"
    )  # fmt: skip
    return re.compile(record, re.DOTALL)


def _get(number: int) -> bytes:
    """The opcode that fetches a memo entry, as a pattern."""
    wide = b"j" + number.to_bytes(4, "little")
    return re.escape(b"h" + bytes([number])) if number < 256 else re.escape(wide)


def _ints(data: bytes) -> tuple[int, ...]:
    """The ints of a list body or a single int opcode."""
    values: list[int] = []
    at, end = 0, len(data)
    while at < end:
        code = data[at]
        if code == 0x4B:  # K: one byte
            values.append(data[at + 1])
            at += 2
        elif code in _WIDTHS:
            width = _WIDTHS[code]
            values.append(int.from_bytes(data[at + 1 : at + 1 + width], "little", signed=code == 0x4A))
            at += 1 + width
        elif code == 0x8A:  # LONG1: its own length
            width = data[at + 1]
            values.append(int.from_bytes(data[at + 2 : at + 2 + width], "little", signed=True))
            at += 2 + width
        else:  # a mark, an append
            at += 1
    return tuple(values)


_WIDTHS = {0x4D: 2, 0x4A: 4}
