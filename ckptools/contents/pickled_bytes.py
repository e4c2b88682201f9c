"""What bytes in a checkpoint hold that `pickle.dumps` or `torch.save` wrote: a loader's place, a module's extra state.

Transformer Engine keeps the scales and amax histories of FP8 so: `_extra_state` is an `io.BytesIO` with a torch.save
archive, in later versions a tensor of the bytes of a pickle.
Sources: torch/nn/modules/module.py (`get_extra_state`); Transformer Engine, pytorch/module/base.py.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

from ckptools.errors import CkptoolsError
from ckptools.keys.entries import Entry
from ckptools.keys.rank_leaves import is_plain, is_run, leaves_of
from ckptools.model.tensor import Tensor
from ckptools.model.tree import KeyPath, fqn_of
from ckptools.model.values import Opaque, scalar
from ckptools.text import clip, plural

MAX_BYTES = 1 << 20
"""Longer bytes are not parsed."""

EXTRA_STATE = "_extra_state"
"""What the name of a module's extra state ends with."""

BYTES_IO = "_io.BytesIO"

MOST = 12
"""At most this many values of pickled bytes are shown in a line."""


def pickled_text(data: bytes | bytearray) -> str:
    """The values in pickled bytes, such as `step 2, epoch 0`; "" for other bytes. No code in it is run.

    Source: torchtitan/components/dataloader.py, `ParallelAwareDataloader.state_dict`.
    """
    if not (2 < len(data) <= MAX_BYTES and data[:1] == b"\x80" and data[-1:] == b"."):
        return ""
    from ckptools.pickles.machine import Machine
    from ckptools.pickles.saved_bytes import load_all

    try:
        tree = load_all(Machine(bytes(data)), Path())
    except CkptoolsError:
        return ""
    shown = [_brief(fqn_of(path), value) for path, value in islice(leaves_of(tree), MOST + 1)]
    return ", ".join(shown[:MOST]) + (" and more" if len(shown) > MOST else "")


def _brief(name: str, value: Any) -> str:
    value = scalar(value)
    if isinstance(value, (list, tuple)) and is_run(value) and len(value) > MOST:
        shown = plural(len(value), "value")
    else:
        brief = is_plain(value) or is_run(value)
        shown = clip(repr(value), 40) if brief else clip(getattr(value, "name", type(value).__name__), 40)
    return f"{clip(name, 60)} {shown}".strip()


# -- each value for itself --------------------------------------------------------------------------------------------


MAX_INSIDE = 1000
"""At most this many values of one extra state have rows of their own."""

MAX_TOTAL = 64 << 20
"""Bytes of extra states that are looked into at once."""


def with_inside(entries: Iterable[Entry], original: Path) -> Iterator[tuple[Entry, bool]]:
    """The entries, behind each extra state the values in it, and whether an entry is such a value.

    An extra state is an `io.BytesIO`, whose own fields are left out then, or a tensor of bytes of that name. Errors
    about what is in them name `original`.
    """
    above: KeyPath = ()
    left = MAX_TOTAL
    for entry in entries:
        if above and entry.path[: len(above)] == above:
            continue
        yield entry, False
        data = _saved_in(entry) if left > 0 else None
        left -= len(data or b"")
        inside = [] if data is None else _inside(entry, data, original)
        above = entry.path if inside else ()
        yield from ((found, True) for found in inside)


def _inside(entry: Entry, data: bytes, original: Path) -> list[Entry]:
    from ckptools.pickles.saved_bytes import tree_in

    found = islice(leaves_of(tree_in(data, original)), MAX_INSIDE)
    below = (entry._replace(name=fqn_of((entry.name, *path)), parameter="", value=value) for path, value in found)
    return [inside for inside in below if inside.name != entry.name]


def _saved_in(entry: Entry) -> bytes | None:
    """The bytes of an extra state; None for another value, and where they cannot be read."""
    value = entry.value
    if isinstance(value, Opaque) and value.name == BYTES_IO:
        data = value.state[0] if isinstance(value.state, tuple) and value.state else None
        return data if isinstance(data, bytes) and len(data) <= MAX_BYTES else None
    named = bool(entry.path) and str(entry.path[-1]).endswith(EXTRA_STATE)
    if not named or not isinstance(value, Tensor) or value.dtype != "uint8" or not 0 < value.numel <= MAX_BYTES:
        return None
    from ckptools.tensor_io.read import to_numpy  # needs numpy

    try:
        return bytes(to_numpy(value))
    except CkptoolsError:
        return None
