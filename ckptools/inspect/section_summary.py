"""Sections in short, for the record of `inspect`: a few words for each, and rows for optimizers and schedulers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from datetime import timedelta
from itertools import islice
from typing import Any, NamedTuple

from ckptools.display.lines import key_name, value_text
from ckptools.model.checkpoint import Checkpoint
from ckptools.model.tensor import Tensor
from ckptools.model.tree import KeyPath, nodes_in, tensors_in, walk
from ckptools.model.values import NumpyArray, scalar
from ckptools.text import plural
from ckptools.training_state.generators import generator_of, is_gathered, stream_of
from ckptools.training_state.moments import moments_of
from ckptools.training_state.optimizer_names import group_ids
from ckptools.training_state.optimizers import Optimizer, ParamGroup, nested, optimizers_of
from ckptools.training_state.section_size import SectionSize, storage_identity
from ckptools.training_state.sections import Section, schedulers_of, sections_of_kind
from ckptools.training_state.steps import COUNTERS, EPOCH_COUNTERS, learning_rates

MAX_WORDS = 8
"""At most this many names or values in a cell."""


def section_summary(ck: Checkpoint, section: Section, size: SectionSize) -> str:
    """Summarize a section in a few words that depend on its kind."""
    summary = {"model": _model, "optimizer": _optimizer, "scheduler": _scheduler, "rng": _rng}.get(section.kind)
    words = summary(ck, section) if summary else _values(section.value)
    foreign = f"foreign: {_some(size.opaque)}" if size.opaque and section.value.__class__.__name__ != "Opaque" else ""
    return "; ".join(part for part in (words, *_quantized(ck, size), foreign) if part)


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


def _quantized(ck: Checkpoint, size: SectionSize) -> list[str]:
    """The quantized weights, and what of them is not counted or can be written."""
    known = {scheme.words: ": --dequantize writes their values" * scheme.dequantized for scheme in ck.quantized}
    parts = [
        f"{plural(count, 'weight')} in codes of {words}{known[words]}"
        for words, count in size.quantized.items()
        if words in known  # the class of a tensor stands with its layout
    ]
    return parts + ([f"params without {plural(size.uncounted, 'weight')} in packed codes"] if size.uncounted else [])


def _optimizer(ck: Checkpoint, section: Section) -> str:
    state = nested(section.value)["state"]
    words = f"{_some(_slots(state))} of {plural(len(state), 'parameter')}" if state else "no state yet"
    return words + _pieces_of_one_rank(ck, section)


def _slots(state: Mapping[Any, Any]) -> Iterable[Any]:
    """Names of the state that some parameter has, such as `exp_avg`, in the order of the file."""
    return dict.fromkeys(slot for entry in state.values() if isinstance(entry, Mapping) for slot in entry)


def _pieces_of_one_rank(ck: Checkpoint, section: Section) -> str:
    """Say that pieces of flattened parameters are known only for the ranks that were read."""
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
    if is_gathered(section.value):
        return f"{plural(len(section.value), 'rank')}: {streams}"
    ranks = {s.rank for _, t in tensors_in(section.value) for s in t.shards if s.rank is not None}
    if len(ck.files) == 1 or not ranks:
        return streams
    if len(ranks) > 1:
        return f"{plural(len(ranks), 'rank')}: {streams}"
    return f"rank {min(ranks)} only, others not read: {streams}"


def _streams(section: Section) -> Iterable[str]:
    """The generators with a state in a section: by its form or the first known word on its path, else torch's."""
    seen: set[KeyPath] = set()
    for path, node in nodes_in(section.value, (Tensor, NumpyArray, Mapping, list, tuple)):
        if any(path[:n] in seen for n in range(len(path))):
            continue
        if stream := generator_of(node):
            seen.add(path)
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


class GroupRow(NamedTuple):
    """One param group: its hyperparameters, without the list of parameters.

    Attributes:
        tensors: number of parameters in it; None if the file does not list them.
        params: their total number of elements; None if it is unknown for one of them.
        names: their fqns, `?3` if only the number is known.
    """

    values: Mapping[str, Any]
    tensors: int | None
    params: int | None
    names: tuple[str, ...]


class OptimizerRow(NamedTuple):
    """One optimizer.

    Attributes:
        name: class name, or the key if the file has no class.
        parameters: how many have state.
        slots: names of the state per parameter, such as `exp_avg`.
        named_by: `fqn`, `order`, `shape` or `none`: how parameters got their names.
        assumed: number of names that are right only if the groups list parameters in the order of the module.
        note: a line about the naming; empty if the file has the names.
    """

    name: str
    section: str
    parameters: int
    slots: tuple[str, ...]
    named_by: str
    assumed: int
    unnamed: int
    note: str
    groups: tuple[GroupRow, ...]


class SchedulerRow(NamedTuple):
    """One scheduler; `agrees` is None if its learning rates cannot be compared with those of the param groups."""

    name: str
    section: str
    state: Any
    agrees: bool | None


def optimizer_rows(ck: Checkpoint) -> tuple[OptimizerRow, ...]:
    """A row for each optimizer."""
    return tuple(_optimizer_row(ck, optimizer) for optimizer in optimizers_of(ck).values())


def _optimizer_row(ck: Checkpoint, optimizer: Optimizer) -> OptimizerRow:
    section = next(s for s in sections_of_kind(ck, "optimizer") if s.path == optimizer.path)
    listed = [bool(ids) or not optimizer.state for ids in group_ids(nested(section.value))]
    sizes = _sizes(ck, optimizer)
    rows = tuple(_group_row(g, sizes, known) for g, known in zip(optimizer.param_groups, listed, strict=False))
    naming = optimizer.naming
    return OptimizerRow(
        name=optimizer.name,
        section=section.name,
        parameters=len(optimizer.state),
        slots=tuple(map(str, _slots(optimizer.state))),
        named_by=naming.by,
        assumed=len(naming.assumed),
        unnamed=len(naming.unnamed),
        note=naming.note,
        groups=rows,
    )


def _group_row(group: ParamGroup, sizes: Mapping[str, int], listed: bool) -> GroupRow:
    values = {key: value for key, value in group.items() if key != "params"}
    if not listed:
        return GroupRow(values, None, None, ())
    known = [sizes[name] for name in group.names if name in sizes]
    params = sum(known) if len(known) == len(group.names) else None
    return GroupRow(values, len(group.names), params, group.names)


def _sizes(ck: Checkpoint, optimizer: Optimizer) -> dict[str, int]:
    """Number of elements of each parameter by its name in the groups: of the model's tensor, else of its moments.

    The size of a flattened parameter cannot be known from a piece of it.
    """
    sizes: dict[str, int] = {}
    for key, entry in optimizer.state.items():
        moments = moments_of(entry)
        if moments and moments[0].kind != "flat_pieces":
            sizes[key if isinstance(key, str) else f"?{key}"] = moments[0].numel
    for section in sections_of_kind(ck, "model"):
        pairs = section.value.items() if isinstance(section.value, Mapping) else ()
        sizes.update({k: t.numel for k, t in pairs if isinstance(t, Tensor) and t.kind != "flat_pieces"})
    return sizes


def scheduler_rows(ck: Checkpoint) -> tuple[SchedulerRow, ...]:
    """A row for each scheduler."""
    rows = zip(sections_of_kind(ck, "scheduler"), schedulers_of(ck), learning_rates(ck), strict=True)
    return tuple(SchedulerRow(name, s.name, s.value, rates.agree if rates else None) for s, name, rates in rows)
