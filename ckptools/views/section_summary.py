"""A section in a few words: how many tensors are sharded, which slots an optimizer has, how far a counter is."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from datetime import timedelta
from itertools import islice
from typing import Any

from ckptools.model.checkpoint import Checkpoint
from ckptools.model.tensor import Tensor
from ckptools.model.tree import KeyPath, nodes_in, tensors_in, walk
from ckptools.model.values import NumpyArray, scalar
from ckptools.text import plural
from ckptools.training_state.sections import Section, SectionSize, generator_of, storage_identity, stream_of
from ckptools.training_state.steps import COUNTERS, EPOCH_COUNTERS
from ckptools.views.value_text import key_name, value_text

MAX_WORDS = 8
"""Names or values that a cell shows."""


def section_summary(ck: Checkpoint, section: Section, size: SectionSize) -> str:
    """What is inside a section, in a few words that depend on its kind.

    Args:
        ck: the checkpoint that the section is of.
        section: the section.
        size: its tensors, as they were counted.
    """
    tell = {"model": _model, "optimizer": _optimizer, "scheduler": _scheduler, "rng": _rng}.get(section.kind)
    words = tell(ck, section) if tell else _values(section.value)
    foreign = f"foreign: {_some(size.opaque)}" if size.opaque and section.value.__class__.__name__ != "Opaque" else ""
    return "; ".join(part for part in (words, foreign) if part)


def _some(words: Iterable[Any]) -> str:
    every = list(words)
    more = [f"{len(every) - MAX_WORDS} more"] if len(every) > MAX_WORDS else []
    return ", ".join([*map(str, every[:MAX_WORDS]), *more])


def _model(ck: Checkpoint, section: Section) -> str:
    tensors = [t for _, t in tensors_in(section.value)]
    sharded = sum(t.sharded for t in tensors)
    identities = [i for i in map(storage_identity, tensors) if i is not None]
    tied = len(identities) - len(set(identities))
    parts = [f"{sharded} sharded, {len(tensors) - sharded} whole"] if sharded else []
    parts += [f"{tied} tied to another"] if tied else []
    others = len(section.value) - len(tensors) if isinstance(section.value, Mapping) else 0
    parts += [f"{plural(others, 'value')} beside the tensors"] if others > 0 else []
    return ", ".join(parts) + _pieces_of_one_rank(ck, section)


def _optimizer(ck: Checkpoint, section: Section) -> str:
    from ckptools.training_state.optimizers import nested

    state = nested(section.value)["state"]
    slots = {slot: None for entry in state.values() if isinstance(entry, Mapping) for slot in entry}
    words = f"{_some(slots)} of {plural(len(state), 'parameter')}" if state else "no state yet"
    return words + _pieces_of_one_rank(ck, section)


def _pieces_of_one_rank(ck: Checkpoint, section: Section) -> str:
    """Pieces of flattened parameters are told of those ranks alone that were read."""
    pieces = any(t.kind == "flat_pieces" for _, t in tensors_in(section.value))
    ranks = sorted({f.rank for f in ck.files if f.status == "read" and f.rank is not None})
    return f"; pieces of rank {ranks[0]} only" if pieces and not ck.all_ranks and len(ranks) == 1 else ""


def _scheduler(ck: Checkpoint, section: Section) -> str:
    value = section.value
    epoch = [f"last_epoch {value_text(value['last_epoch'])}"] if "last_epoch" in value else []
    last = value.get("_last_lr")
    rates = [f"lr {', '.join(map(value_text, last[:4]))}"] if isinstance(last, (list, tuple)) and last else []
    return ", ".join(epoch + rates) or _values(value)


def _rng(ck: Checkpoint, section: Section) -> str:
    streams = _some(dict.fromkeys(_streams(section)))
    per_rank = section.value if isinstance(section.value, (list, tuple)) else ()
    if len(per_rank) > 1 and all(isinstance(v, Mapping) for v in per_rank):
        return f"{plural(len(per_rank), 'rank')}: {streams}"
    ranks = {s.rank for _, t in tensors_in(section.value) for s in t.shards if s.rank is not None}
    if len(ck.files) == 1 or not ranks:
        return streams
    if len(ranks) > 1:
        return f"{plural(len(ranks), 'rank')}: {streams}"
    return f"rank {min(ranks)} only, others not read: {streams}"


def _streams(section: Section) -> Iterable[str]:
    """Which generators have a state in here: by its form, or the first known word on its path; else it is torch's."""
    told: set[KeyPath] = set()
    for path, node in nodes_in(section.value, (Tensor, NumpyArray, Mapping, list, tuple)):
        if any(path[:n] in told for n in range(len(path))):
            continue
        if stream := generator_of(node):
            told.add(path)
            yield stream
        elif isinstance(node, (Tensor, NumpyArray)) or (
            not isinstance(node, Mapping) and any(isinstance(v, int) for v in node[:2])
        ):
            known = stream_of((*path, *section.path[-1:])) or ("torch" if isinstance(node, Tensor) else "")
            yield from [known] if known else []


def _values(value: Any) -> str:
    """A few plain values, counters first: `batch 5, epoch 0`; of deeper trees the keys."""
    if not isinstance(value, (Mapping, list, tuple)) or not value:
        return value_text(value, 60)
    found: dict[str, str] = {}
    for path, leaf in islice(walk(value), 2000):
        leaf = scalar(leaf)
        if 0 < len(path) <= 2 and isinstance(leaf, (int, float, str, timedelta)) and not isinstance(path[-1], int):
            found.setdefault(key_name(path[-1]), f"{key_name(path[-1])} {value_text(leaf, 24)}")
    order = {name: n for n, name in enumerate((*COUNTERS, *EPOCH_COUNTERS))}
    names = sorted(found, key=lambda name: order.get(name, len(order)))
    if names:
        return ", ".join([found[n] for n in names[:4]] + ([f"{len(names) - 4} more"] if len(names) > 4 else []))
    return _some(map(key_name, value)) if isinstance(value, Mapping) else plural(len(value), "item")
