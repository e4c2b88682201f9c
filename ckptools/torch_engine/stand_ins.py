"""Functions that take the place of Python's own while the torch loader reads a file that is not trusted.

Each does only what a checkpoint needs, and refuses by name whatever else a file asks of it.
"""

from __future__ import annotations

from typing import Any


class Refused(Exception):  # noqa: N818 - load_shard makes it a ForeignClassError
    """A file asks an allowed function for more than it may do; the text names what."""


def only_process_group_state(owner: Any, name: Any) -> type:
    """`getattr`, for the one nested class that protocol 2 cannot name otherwise."""
    from torch.distributed._shard.sharded_tensor.api import ShardedTensor

    if owner is ShardedTensor and name == "ProcessGroupState":
        return ShardedTensor.ProcessGroupState
    raise Refused(f"builtins.getattr(…, {name!r:.60})")


def only_empty_bytes(*args: Any) -> bytes:
    """`bytes()`, which is how protocol 2 spells `b""`; of a number it would be that much memory."""
    if args:
        raise Refused("builtins.bytes with arguments")
    return b""


def plain_dict(*_: Any) -> dict[Any, Any]:
    """`defaultdict`, which torch's loader cannot fill, without its default."""
    return {}
