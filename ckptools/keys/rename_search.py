"""Search for the rename that fixes most: try every rule that names suggest, and count the shapes that then agree.

If two rules fix the same number but give a name of the model different tensors, neither is chosen and both are shown.
Renames without evidence in names come last and are marked as assumed: shifted layer numbers, shapes alone, the order.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import NamedTuple

from ckptools.keys.rename_rules import Rename, applied, suggested
from ckptools.torch_engine.module_shapes import NamedShape, StateDictShapes

MAX_RENAMES = 4
"""At most this many rules in a row, as for a module in two wrappers and under another name."""

BY_NAME = ("prefix", "component", "wrapper")
KINDS = (*BY_NAME, "offset", "shape", "order")


class FoundRenames(NamedTuple):
    """The result of a search for renames.

    Attributes:
        names: every name of the checkpoint, with its name after the renames.
        alternatives: renames after these that fix the same number of names.
        fit: names of the model that have a tensor of their shape without a rename, and after each step.
        assumed: names of the checkpoint that an assumed rename changes.
    """

    names: Mapping[str, str]
    steps: tuple[Rename, ...]
    alternatives: tuple[Rename, ...]
    fit: tuple[Collection[str], ...]
    assumed: Collection[str]


class _Tried(NamedTuple):
    """A rule that was tried: the new names, the names of the model that then fit, and the number present."""

    rule: Rename
    names: Mapping[str, str]
    fit: Mapping[str, str]
    present: int

    @property
    def worth(self) -> tuple[int, int]:
        return len(self.fit), self.present


def find_renames(saved: StateDictShapes, model: StateDictShapes) -> FoundRenames:
    """Find the renames after which most names of the model have a tensor of their shape."""
    now = _tried({name: name for name in saved.tensors}, {}, Rename("prefix", "", ""), saved, model)
    steps: list[Rename] = []
    fit, assumed, best = [now.fit.keys()], set[str](), list[_Tried]()
    while len(steps) < MAX_RENAMES:
        by_name = not steps or steps[-1].kind in BY_NAME
        best = (_by_name(now, saved, model) if by_name else []) or _by_shapes(now, saved, model)
        if len(best) != 1:
            break
        steps.append(_counted(best[0], now))
        if steps[-1].assumed:
            assumed |= {old for old, new in now.names.items() if best[0].names[old] != new}
        now = best[0]
        fit.append(now.fit.keys())
    alternatives = tuple(_counted(one, now) for one in best) if len(best) > 1 else ()
    return FoundRenames(now.names, tuple(steps), alternatives, tuple(fit), assumed)


def _by_name(now: _Tried, saved: StateDictShapes, model: StateDictShapes) -> list[_Tried]:
    """The rule that fixes most; several if they contradict each other, none if no rule fixes anything."""
    names = set(now.names.values())
    here, there = names - model.tensors.keys(), model.tensors.keys() - names
    rules = suggested(here, there) if here and there else []
    tried = (_tried(now.names, applied(r, names, model.tensors), r, saved, model) for r in rules)
    return _undisputed(_better(tried, now, len(model.tensors)))


def _by_shapes(now: _Tried, saved: StateDictShapes, model: StateDictShapes) -> list[_Tried]:
    """The pairs without evidence in names, if any, of the kind that fixes most."""
    mine = {new: saved.tensors[name] for name, new in now.names.items()}
    kinds = [*_moved(mine, model.tensors), *_by_shape(mine, model.tensors, saved.ordered and model.ordered)]
    return _better((_tried(now.names, pairs, rule, saved, model) for rule, pairs in kinds), now, len(model.tensors))[:1]


def _better(tried: Iterable[_Tried], now: _Tried, wanted: int) -> list[_Tried]:
    """The rules that fix something, merge no two names and leave layers their numbers, the best first.

    `wanted` is the number of names of the model.
    """
    found = [one for one in tried if len(one.fit) > len(now.fit) and len(set(one.names.values())) == len(now.names)]
    return sorted((one for one in found if not _moves_few_layers(one, now, wanted)), key=_preference)


def _moves_few_layers(one: _Tried, now: _Tried, wanted: int) -> bool:
    """Whether a rule by name gives names another layer's number, and makes no majority of either side fit by it.

    Layers are alike, so a shape is no evidence for it: `a.0.` as `b.1.c.` fits whatever both layers have. A number that
    only stands for a wrapper (`0.` of a Sequential) goes from most names at once.
    """
    if one.rule.kind not in BY_NAME:
        return False
    moved = {name for name, new in one.names.items() if _is_another_layer(now.names[name], new)}
    return bool(moved) and len(moved & set(one.fit.values())) * 2 <= min(len(one.names), wanted)


def _is_another_layer(old: str, new: str) -> bool:
    """Whether a new name has other numbers between its dots, or differs in nothing but digits."""
    return _numbers(old) != _numbers(new) or (old != new and _DIGITS.sub("", old) == _DIGITS.sub("", new))


_DIGITS = re.compile(r"\d+")


def _preference(one: _Tried) -> tuple[tuple[int, ...], int, int, str]:
    """Sort key: the greatest worth, then the simplest kind, then the shortest rule."""
    rule = one.rule
    return tuple(-n for n in one.worth), KINDS.index(rule.kind), len(rule.old) + len(rule.new), rule.old


def _undisputed(better: list[_Tried]) -> list[_Tried]:
    """The first rule; with all of equal worth if one of them contradicts it."""
    equals = [one for one in better if one.worth == better[0].worth]
    different = [one for n, one in enumerate(equals) if not any(one.fit == before.fit for before in equals[:n])]
    disputed = any(_contradict(better[0].fit, one.fit) for one in different)
    return different if disputed else better[:1]


def _contradict(one: Mapping[str, str], other: Mapping[str, str]) -> bool:
    """Whether two results give a name of the model two tensors, or a tensor two names."""
    there = {name: new for new, name in other.items()}
    return any(other.get(new, name) != name or there.get(name, new) != new for new, name in one.items())


def _tried(
    before: Mapping[str, str],
    pairs: Mapping[str, str],
    rule: Rename,
    saved: StateDictShapes,
    model: StateDictShapes,
) -> _Tried:
    """Try a rule that turns each new name of `pairs` into another."""
    names = {name: pairs.get(new, new) for name, new in before.items()}
    present = [(name, new) for name, new in names.items() if new in model.tensors]
    fit = {new: name for name, new in present if shapes_agree(saved.tensors[name], model.tensors[new])}
    return _Tried(rule, names, fit, len(present))


def shapes_agree(one: NamedShape, other: NamedShape) -> bool:
    """Whether two shapes are known and the same, or both are known to be no tensor; and no codes would be converted."""
    return one.shape == other.shape and not one.note and not other.note and not codes_are_converted(one, other)


def codes_are_converted(found: NamedShape, wanted: NamedShape) -> bool:
    """Whether a part of a quantized weight would be loaded into another dtype, as if it were a value."""
    return found.coded is not None and wanted.dtype not in ("", found.dtype)


def _counted(one: _Tried, before: _Tried) -> Rename:
    changed = [(old, one.names[old]) for old, new in before.names.items() if one.names[old] != new]
    fixes = len(one.fit.keys() - before.fit.keys())
    # Of a single tensor under another name the shape is the only sign; a wrapper around it is a sign of its own.
    assumed = one.rule.kind not in BY_NAME or bool(one.rule.old and one.rule.new and fixes == 1)
    example = next(iter(changed), ("", ""))
    return one.rule._replace(fixes=fixes, changes=len(changed), example=example, assumed=assumed)


def _by_shape(
    mine: Mapping[str, NamedShape], model: Mapping[str, NamedShape], ordered: bool
) -> Iterator[tuple[Rename, Mapping[str, str]]]:
    """Pair the remaining names of both sides: in module order, or by a shape that no others have."""
    here = {name: shape for name, shape in mine.items() if name not in model}
    there = {name: shape for name, shape in model.items() if name not in mine}
    if ordered and _in_step(here, there):
        yield Rename("order", "", ""), dict(zip(here, there, strict=True))
    left, right = _only_one(here), _only_one(there)
    pairs = {left[key]: right[key] for key in left.keys() & right.keys()}
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
    """Names with a unique shape and last component."""
    counts = Counter(one.shape for one in names.values())
    alone = {name: one for name, one in names.items() if one.shape and counts[one.shape] == 1 and not one.note}
    return {(one.shape, name.rpartition(".")[2]): name for name, one in alone.items()}


MAX_DIGITS = 9
"""At most this many digits in a layer's number."""


def _moved(
    here: Mapping[str, NamedShape], there: Mapping[str, NamedShape]
) -> Iterator[tuple[Rename, Mapping[str, str]]]:
    """Modules whose numbered children have all shifted by the same amount and then all fit, with their new names.

    Both sides must have the same number of children, with the same names below each; otherwise the pairs are ambiguous.
    """
    mine, theirs = _children(here), _children(there)
    for module, numbered in mine.items():
        numbers, others = sorted(numbered), sorted(theirs.get(module, ()))
        if len(numbers) != len(others) or numbers == others:
            continue
        offset = others[0] - numbers[0]
        if all(numbered[n] == theirs[module].get(n + offset) for n in numbers):
            pairs = {f"{module}{n}.{end}": f"{module}{n + offset}.{end}" for n in numbers for end in numbered[n]}
            if all(shapes_agree(here[old], there[new]) for old, new in pairs.items()):
                yield Rename("offset", module, module, offset=offset), pairs


def _children(names: Collection[str]) -> dict[str, dict[int, set[str]]]:
    """The numbers below each module, such as `layers.`, each with the ends of the names below it."""
    found: dict[str, dict[int, set[str]]] = {}
    for name in names:
        at = 0
        for part in name.split(".")[:-1]:
            if part.isascii() and part.isdecimal() and len(part) <= MAX_DIGITS and str(int(part)) == part:
                end = name[at + len(part) + 1 :]
                found.setdefault(name[:at], {}).setdefault(int(part), set()).add(end)
            at += len(part) + 1
    return found
