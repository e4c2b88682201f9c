"""All nodes, or all ranks, must have been given the same options: else they would wait for each other in vain."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from ckptools.errors import UsageError
from ckptools.training import options as choices
from ckptools.training.options import CreateOptions

if TYPE_CHECKING:
    from ckptools.cluster.rendezvous import Meeting

# What may differ: a folder may be mounted elsewhere, and nodes have their own ranks and counts.
_OWN = ("out", "launch")


def agree(meeting: Meeting, options: CreateOptions, nproc: int) -> tuple[int, ...]:
    """Compare the options of all members of a meeting.

    Args:
        meeting: of nodes or of ranks.
        options: of this member.
        nproc: ranks that it starts, or is.

    Returns:
        `nproc` of each member, by number.

    Raises:
        UsageError: options differ, or make another world size than was asked for.
    """
    mine = {"nproc": nproc, "options": _flat(json.loads(choices.to_json(options)))}
    said = [json.loads(text) for text in meeting.gather("options", json.dumps(mine))]
    for number, other in enumerate(said):
        _compare(said[0]["options"], other["options"], meeting.call(0), meeting.call(number))
    counts = tuple(each["nproc"] for each in said)
    if options.world_size not in (None, sum(counts)):
        listed = " + ".join(map(str, counts)) + (f" = {sum(counts)}" if len(counts) > 1 else "")
        raise UsageError(
            None, f"--world-size is {options.world_size}, but the nodes start {listed} ranks; leave one of them out"
        )
    return counts


def _flat(options: dict[str, Any]) -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name, value in options.items():
        if name not in _OWN:
            flat.update(value if isinstance(value, dict) else {name: value})
    return flat


def _compare(first: dict[str, Any], other: dict[str, Any], first_name: str, other_name: str) -> None:
    different = [name for name in first if first[name] != other.get(name)]
    if different:
        name = different[0]
        flag = name.replace("_", "-")
        text = f"--{flag} is {first[name]} on {first_name}, but {other.get(name)} on {other_name}; give all the same"
        raise UsageError(None, text)
