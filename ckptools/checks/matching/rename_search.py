"""The rename that fixes most: every rule that names suggest is tried, and counted by the shapes that then agree.

One that fixes as many as another, and gives a name of the model another tensor, is not chosen: both are told. What
names do not suggest is looked for last: numbers of layers that have moved, shapes alone, the order. That is assumed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from ckptools.checks.matching.layer_offsets import moved_layers
from ckptools.checks.matching.rename_rules import applied, suggested
from ckptools.model.matching import NamedShape, Rename, StateDictShapes

MAX_RENAMES = 4
"""Rules behind each other, as of a module in two wrappers and under another name."""

BY_NAME = ("prefix", "component", "wrapper")
KINDS = (*BY_NAME, "offset", "shape", "order")


@dataclass(frozen=True)
class FoundRenames:
    """What was found.

    Attributes:
        names: every name of the checkpoint, with the one that it has after the renames.
        steps: the renames, in the order in which they act.
        alternatives: those that fix as many as each other, after these.
        fit: names of the model that have a tensor of their shape without a rename, and after each step.
        assumed: names of the checkpoint that an assumed rename changes.
    """

    names: Mapping[str, str]
    steps: tuple[Rename, ...]
    alternatives: tuple[Rename, ...]
    fit: tuple[Collection[str], ...]
    assumed: Collection[str]


class _Tried(NamedTuple):
    """A rule that was tried: what becomes of every name, which names of the model fit then, and how many are there."""

    rule: Rename
    names: Mapping[str, str]
    fit: Mapping[str, str]
    present: int

    @property
    def worth(self) -> tuple[int, int]:
        return len(self.fit), self.present


def find_renames(saved: StateDictShapes, model: StateDictShapes) -> FoundRenames:
    """Find the renames after which most names of the model have their tensor, with its shape.

    Args:
        saved: what the checkpoint holds.
        model: what the model expects.
    """
    now = _tried(Rename("prefix", "", ""), {name: name for name in saved.tensors}, saved, model)
    steps: list[Rename] = []
    fit, assumed, best = [now.fit.keys()], set[str](), list[_Tried]()
    while len(steps) < MAX_RENAMES:
        by_name = not steps or steps[-1].kind in BY_NAME
        best = (_by_name(now, saved, model) if by_name else []) or _by_shapes(now, saved, model)
        if len(best) != 1:
            break
        steps.append(_told(best[0], now))
        if steps[-1].assumed:
            assumed |= {old for old, new in now.names.items() if best[0].names[old] != new}
        now = best[0]
        fit.append(now.fit.keys())
    alternatives = tuple(_told(one, now) for one in best) if len(best) > 1 else ()
    return FoundRenames(now.names, tuple(steps), alternatives, tuple(fit), assumed)


def _by_name(now: _Tried, saved: StateDictShapes, model: StateDictShapes) -> list[_Tried]:
    """The rule that fixes most; several where they contradict each other, none where no rule fixes anything."""
    names = set(now.names.values())
    here, there = names - model.tensors.keys(), model.tensors.keys() - names
    rules = suggested(here, there) if here and there else []
    return _undisputed(_better((_after(now, applied(r, names, model.tensors), r, saved, model) for r in rules), now))


def _by_shapes(now: _Tried, saved: StateDictShapes, model: StateDictShapes) -> list[_Tried]:
    """The pairs, if any, that names do not suggest, of the kind that fixes most."""
    kinds = [*_moved(now, saved, model), *_by_shape(now, saved, model)]
    return _better((_after(now, pairs, rule, saved, model) for rule, pairs in kinds), now)[:1]


def _better(tried: Iterable[_Tried], now: _Tried) -> list[_Tried]:
    """Those that fix something and let no two names become one, the best first."""
    found = [one for one in tried if len(one.fit) > len(now.fit) and len(set(one.names.values())) == len(now.names)]
    return sorted(found, key=_preference)


def _preference(one: _Tried) -> tuple[tuple[int, ...], int, int, str]:
    """The most worth first; of equals the plainest kind, and the shortest."""
    rule = one.rule
    return tuple(-n for n in one.worth), KINDS.index(rule.kind), len(rule.old) + len(rule.new), rule.old


def _undisputed(better: list[_Tried]) -> list[_Tried]:
    """The first; with all that are worth as much, where one of these gives a name another tensor than it does."""
    equals = [one for one in better if one.worth == better[0].worth]
    different = [one for n, one in enumerate(equals) if not any(one.fit == before.fit for before in equals[:n])]
    disputed = any(_contradict(better[0].fit, one.fit) for one in different)
    return different if disputed else better[:1]


def _contradict(one: Mapping[str, str], other: Mapping[str, str]) -> bool:
    """Whether two answers give a name of the model two tensors, or a tensor two names."""
    there = {name: new for new, name in other.items()}
    return any(other.get(new, name) != name or there.get(name, new) != new for new, name in one.items())


def _after(
    now: _Tried, pairs: Mapping[str, str], rule: Rename, saved: StateDictShapes, model: StateDictShapes
) -> _Tried:
    return _tried(rule, {name: pairs.get(new, new) for name, new in now.names.items()}, saved, model)


def _tried(rule: Rename, names: Mapping[str, str], saved: StateDictShapes, model: StateDictShapes) -> _Tried:
    present = [(name, new) for name, new in names.items() if new in model.tensors]
    fit = {new: name for name, new in present if shapes_agree(saved.tensors[name], model.tensors[new])}
    return _Tried(rule, names, fit, len(present))


def shapes_agree(one: NamedShape, other: NamedShape) -> bool:
    """Whether two shapes are known and the same; or both are known to be no tensor."""
    return one.shape == other.shape and not one.note and not other.note


def _told(one: _Tried, before: _Tried) -> Rename:
    changed = [(old, one.names[old]) for old, new in before.names.items() if one.names[old] != new]
    fixes = len(one.fit.keys() - before.fit.keys())
    # Of a single tensor under another name the shape is the only sign; a wrapper around it is a sign of its own.
    assumed = one.rule.kind not in BY_NAME or bool(one.rule.old and one.rule.new and fixes == 1)
    example = next(iter(changed), ("", ""))
    return one.rule._replace(fixes=fixes, changes=len(changed), example=example, assumed=assumed)


# -- by shapes ----------------------------------------------------------------------------------------------------


def _moved(now: _Tried, saved: StateDictShapes, model: StateDictShapes) -> Iterable[tuple[Rename, Mapping[str, str]]]:
    """Layers whose numbers have all moved by as much, and fit there one and all."""
    mine = {new: saved.tensors[name] for name, new in now.names.items()}
    for rule, pairs in moved_layers(mine, model.tensors):
        if all(shapes_agree(mine[old], model.tensors[new]) for old, new in pairs.items()):
            yield rule, pairs


def _by_shape(
    now: _Tried, saved: StateDictShapes, model: StateDictShapes
) -> Iterable[tuple[Rename, Mapping[str, str]]]:
    """Pairs of names that both sides lack: one after the other, in module order; or of a shape that no others have."""
    wanted, taken = model.tensors, set(now.names.values())
    here = {new: saved.tensors[name] for name, new in now.names.items() if new not in wanted}
    there = {name: shape for name, shape in wanted.items() if name not in taken}
    if saved.ordered and model.ordered and _in_step(here, there):
        yield Rename("order", "", ""), dict(zip(here, there, strict=True))
    mine, theirs = _only_one(here), _only_one(there)
    pairs = {mine[key]: theirs[key] for key in mine.keys() & theirs.keys()}
    pairs = {old: new for old, new in pairs.items() if _numbers(old) == _numbers(new)}
    if pairs:
        yield Rename("shape", "", ""), pairs


def _in_step(here: Mapping[str, NamedShape], there: Mapping[str, NamedShape]) -> bool:
    """Whether two lists of names agree one after the other: in shape, and in the numbers in the names."""
    if not here or len(here) != len(there):
        return False
    pairs = zip(here.items(), there.items(), strict=True)
    return all(a.shape is not None and shapes_agree(a, b) and _numbers(m) == _numbers(n) for (m, a), (n, b) in pairs)


def _numbers(name: str) -> list[str]:
    return [part for part in name.split(".") if part.isdecimal()]


def _only_one(names: Mapping[str, NamedShape]) -> dict[tuple[object, str], str]:
    """The names that are the only one of their shape, by that and their last component."""
    counts = Counter(one.shape for one in names.values())
    alone = {name: one for name, one in names.items() if one.shape and counts[one.shape] == 1 and not one.note}
    return {(one.shape, name.rpartition(".")[2]): name for name, one in alone.items()}
