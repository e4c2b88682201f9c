"""Items: archives of one tensor each, packed into larger files. Opened when their bytes are wanted.

Source: torch/distributed/checkpoint/filesystem.py (`_write_item` calls torch.save on a contiguous tensor of its own).
"""

from __future__ import annotations

from dataclasses import replace

from ckptools.errors import ReadError
from ckptools.files import File, Window
from ckptools.model import Item, Shard, Source, Tensor
from ckptools.pickles.reader import read_archive


def opened(shard: Shard) -> Shard:
    """The shard with its source, read from its item where that is not known yet.

    Raises:
        ReadError: the item is damaged, or holds something else than its checkpoint says.
    """
    if shard.source is not None or shard.item is None:
        return shard
    with File(shard.item.path) as file:
        return replace(shard, source=locate(file, shard.item))


def locate(file: File, item: Item) -> Source:
    """Where the tensor of an item lies.

    Args:
        file: the item's file, open.
        item: which part of it, and what it must hold.

    Raises:
        ReadError: the item is damaged, or holds something else than its checkpoint says.
    """
    _, tree = read_archive(Window(file, item.offset, item.length))
    sources = [s.source for s in tree.shards] if isinstance(tree, Tensor) else []
    found = sources[0] if len(sources) == 1 else None
    if found is None or (found.dtype, found.shape) != (item.dtype, item.shape):
        held = f"{found.dtype} {list(found.shape)}" if found else type(tree).__name__
        text = f"item at byte {item.offset}: expected {item.dtype} {list(item.shape)}, found {held}; damaged or stale"
        raise ReadError(file.path, text)
    return found
