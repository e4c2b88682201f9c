"""What bytes hold that are a pickle themselves, such as the data loader's state in a folder of torchtitan."""

from __future__ import annotations

from itertools import islice
from pathlib import Path
from typing import Any

from ckptools.contents.leaves import is_plain, is_run, leaves_of
from ckptools.errors import CkptoolsError
from ckptools.model.tree import fqn_of
from ckptools.model.values import scalar
from ckptools.text import clip, plural

MAX_BYTES = 1 << 20
"""Longer ones are not looked into."""

MOST = 12
"""Values that are told."""


def pickled_text(data: bytes | bytearray) -> str:
    """The values in bytes that are a pickle, such as `step 2, epoch 0`; "" where they are none. Nothing of it is run.

    Source: torchtitan/components/dataloader.py, `ParallelAwareDataloader.state_dict`.
    """
    if not (2 < len(data) <= MAX_BYTES and data[:1] == b"\x80" and data[-1:] == b"."):
        return ""
    from ckptools.pickles.loading import load_checked
    from ckptools.pickles.machine import Machine

    try:
        machine = Machine(bytes(data))
        tree = load_checked(machine, Path(), "a value")
    except CkptoolsError:
        return ""
    if machine.stopped_at != len(data):
        return ""
    told = [_told(fqn_of(path), value) for path, value in islice(leaves_of(tree), MOST + 1)]
    return ", ".join(told[:MOST]) + (" and more" if len(told) > MOST else "")


def _told(name: str, value: Any) -> str:
    value = scalar(value)
    if isinstance(value, (list, tuple)) and is_run(value) and len(value) > MOST:
        shown = plural(len(value), "value")
    else:
        brief = is_plain(value) or is_run(value)
        shown = clip(repr(value), 40) if brief else clip(getattr(value, "name", type(value).__name__), 40)
    return f"{clip(name, 60)} {shown}".strip()
