"""Search for the rename that fixes most: try every rule that names suggest, and count the shapes that then agree.

If two rules fix the same number but give a name of the model different tensors, neither is chosen and both are shown.
Renames without evidence in names come last and are marked as assumed: shifted layer numbers, shapes alone, the order.
"""

from __future__ import annotations

import json
import os
import re
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Literal, NamedTuple

from ckptools.errors import OutputExistsError, ReadError
from ckptools.files.opening import read_json
from ckptools.files.partial_files import PartialFiles
from ckptools.model.records import displayed
from ckptools.model.tree import describe_for_error
from ckptools.text import plural
from ckptools.torch_engine.module_shapes import NamedShape, StateDictShapes

# -- a JSON of old name to new, as `match --write-map` writes and `consolidate --map` reads it -------------------------
#     {"schema": "ckptools/map/1", "map": {"module.emb.weight": "emb.weight"}}
#
# A JSON of old name to new without a schema is read as well.


SCHEMA = "ckptools/map/1"


def read_map(path: Path) -> dict[str, str]:
    """Read the new names by the old ones.

    Raises:
        ReadError: it cannot be read, or is not such a JSON.
    """
    content = read_json(path)
    # One name `map` that is mapped like the others says nothing of a schema.
    stated = isinstance(content, dict) and isinstance(content.get("map"), dict)
    if stated and (content.get("schema") != SCHEMA or len(content) != 2):
        schema = describe_for_error(content.get("schema"))
        raise ReadError(path, f"expected `schema` {SCHEMA} and `map`, and nothing else; found schema {schema}")
    found = content["map"] if stated else content
    if not isinstance(found, dict) or not found:
        raise ReadError(path, f"expected a JSON object of old name to new, found {describe_for_error(found)}")
    for old, new in found.items():
        if not isinstance(new, str) or not new:
            text = f"expected a new name for {describe_for_error(old)}, found {describe_for_error(new)}"
            raise ReadError(path, text)
    return dict(found)


def write_map(path: Path, names: Mapping[str, str]) -> None:
    """Write new names by the old ones; an existing file is left unchanged.

    Raises:
        OutputExistsError: the file exists.
        WriteError: it cannot be written; no partial file is left.
    """
    if os.path.lexists(path):
        raise OutputExistsError(path, "is already there; give the map another name")
    with PartialFiles() as files:
        files.add_text(path, json.dumps({"schema": SCHEMA, "map": dict(names)}, indent=1) + "\n")
        files.publish()


# -- renames -----------------------------------------------------------------------------------------------------------


def replaced_prefix(name: str, old: str, new: str) -> str:
    """Replace the prefix `old` of a name by `new`; both are empty or end with a dot."""
    return new + name[len(old) :] if name.startswith(old) else name


def replaced_module(name: str, old: str, new: str) -> str:
    """Replace the module `old` at the start of a name, or the name itself, by `new`."""
    return new + name[len(old) :] if name == old or name.startswith(f"{old}.") else name


def without_components(name: str, gone: Collection[str]) -> str:
    """Remove some components from a name."""
    return ".".join([part for part in name.split(".") if part not in gone])


# -- rules that may turn names of a checkpoint into names of a model, suggested by pairs of similar names --------------
# No wrapper names are built in: any text before or between the components that both sides share is found.


MOST_ALIKE = 4
"""A name is compared with at most this many similar names of the other side."""

MOST_TRIED = 6
"""At most this many rules of a kind are tried, the most frequently suggested first."""

MAX_ASKED = 2_000
"""At most this many names, evenly spread, suggest rules; rare rules are suggested once the others fit."""

MAX_COMPONENTS = 64
"""Names with more components are skipped: each component is tried separately."""


RenameKind = Literal["prefix", "component", "wrapper", "offset", "shape", "order"]


@displayed
class Rename(NamedTuple):
    """One rule that turns names of the checkpoint into names of the model. It is a guess, never applied by itself.

    Attributes:
        kind: `prefix` (`old` at the beginning becomes `new`), `component` (`old` between dots becomes `new`; or each
            component of `old` is removed), `wrapper` (the model also has the components of `new`), `offset` (the
            numbers after `old` are all shifted by the same amount), `shape` (only one name on each side has the shape),
            `order` (shapes agree one after the other, in the order of the module).
        old: the replaced text; "" if text is only added.
        new: its replacement; "" if text is only removed.
        fixes: number of names of the model that gain a tensor of the right shape.
        example: a name of the checkpoint, and its new name.
        offset: the shift of the numbers, for the kind `offset`.
        fit: number of selected names of the model that then have a tensor of their shape.
        assumed: whether shapes, or an order, are the only evidence.
    """

    kind: RenameKind
    old: str
    new: str
    fixes: int = 0
    changes: int = 0
    example: tuple[str, str] = ("", "")
    offset: int = 0
    fit: int = 0
    assumed: bool = False


def suggested(here: Collection[str], there: Collection[str]) -> list[Rename]:
    """Suggest rules that turn names that only the checkpoint has into names that only the model has."""
    mine = {name: parts for name in here if len(parts := name.split(".")) <= MAX_COMPONENTS}
    theirs = {name: parts for name in there if len(parts := name.split(".")) <= MAX_COMPONENTS}
    some = _some(mine)
    added = (Rename("wrapper", "", rule.old) for rule in _gone(_some(theirs), mine))
    kinds = (_prefixes(some, theirs), _gone(some, theirs), _replaced(some, theirs), added)
    return [rule for kind in kinds for rule, _ in Counter(kind).most_common(MOST_TRIED)]


def applied(rule: Rename, names: Collection[str], wanted: Collection[str]) -> dict[str, str]:
    """Every name that a rule by name changes, with its new name; `wanted` are names of the model, for its wrappers."""
    if rule.kind == "wrapper":
        gone = rule.new.split(".")
        bare = {without_components(name, gone): name for name in wanted if any(part in name for part in gone)}
        made = {name: bare[name] for name in names if name in bare}
    elif rule.kind == "prefix":
        made = {name: replaced_prefix(name, rule.old, rule.new) for name in names if name.startswith(rule.old)}
    elif rule.new:
        parts = {name: name.split(".") for name in names if rule.old in name}
        made = {n: ".".join([rule.new if part == rule.old else part for part in of]) for n, of in parts.items()}
    else:
        gone = rule.old.split(".")
        made = {name: without_components(name, gone) for name in names if any(part in name for part in gone)}
    return {old: new for old, new in made.items() if old != new}


Split = Mapping[str, Sequence[str]]
"""Names with their components."""


def _some(names: Split) -> Split:
    step = -(-len(names) // MAX_ASKED) or 1
    return {name: names[name] for name in islice(names, 0, None, step)}


def _prefixes(mine: Split, theirs: Split) -> Iterator[Rename]:
    """Suggest prefixes: the texts before the longest end that a name shares with a name of the other side.

    If both have a text there, the end must have two components or more: `weight` alone proves nothing.
    """
    ends: dict[str, list[str]] = {}
    for name, parts in theirs.items():
        for end in _ends(parts):
            ends.setdefault(end, []).append(name)
    for name, parts in mine.items():
        longest = next((end for end in _ends(parts) if end in ends), "")
        for other in islice(ends.get(longest, ()), MOST_ALIKE):
            old, new = name[: len(name) - len(longest)], other[: len(other) - len(longest)]
            if not (old and new) or ("." in longest and not _only_numbers_differ(old, new)):
                yield Rename("prefix", old, new)


def _ends(parts: Sequence[str]) -> Iterator[str]:
    """The ends of a name at its dots, the longest first."""
    return (".".join(parts[n:]) for n in range(len(parts)))


def _only_numbers_differ(old: str, new: str) -> bool:
    """Whether two texts are the same except for numbers: another layer is another tensor, not another name."""
    return ["" if p.isdecimal() else p for p in old.split(".")] == ["" if p.isdecimal() else p for p in new.split(".")]


def _gone(mine: Split, theirs: Split) -> Iterator[Rename]:
    """Suggest components whose removal gives a name of the other side: one component, or all that no name there has."""
    known = {part for parts in theirs.values() for part in parts}
    for parts in mine.values():
        words = {part for part in parts if not part.isdecimal()}
        for gone in {*((word,) for word in words), tuple(sorted(words - known))}:
            if gone and ".".join([part for part in parts if part not in gone]) in theirs:
                yield Rename("component", ".".join(gone), "")


def _replaced(mine: Split, theirs: Split) -> Iterator[Rename]:
    """Suggest components that replace another one while all others of the name stay the same."""
    places: dict[tuple[int, str], list[str]] = {}
    for parts in theirs.values():
        for n, part in enumerate(parts):
            places.setdefault((n, _without(parts, n)), []).append(part)
    for parts in mine.values():
        for n, old in enumerate(parts):
            for new in islice(places.get((n, _without(parts, n)), ()), MOST_ALIKE):
                if not old.isdecimal() and not new.isdecimal():
                    yield Rename("component", old, new)


def _without(parts: Sequence[str], n: int) -> str:
    return ".".join((*parts[:n], *parts[n + 1 :]))


def rename_words(rename: Rename) -> str:
    """Describe a rename in words."""
    old, new = rename.old, rename.new
    if rename.kind == "prefix":
        if old and new:
            return f"prefix {old!r} is {new!r}"
        return f"drop prefix {old!r}" if old else f"add prefix {new!r}"
    if rename.kind == "component":
        return f"{old!r} between dots is {new!r}" if new else f"drop {_components(old)} between dots"
    if rename.kind == "wrapper":
        return f"add {_components(new)} where the model has it"
    if rename.kind == "offset":
        way = "higher" if rename.offset > 0 else "lower"
        return f"numbers {f'behind {old!r}' if old else 'in front'} are {abs(rename.offset)} {way}"
    count = plural(rename.changes, "name")
    if rename.kind == "shape":
        return f"{count} by shape alone, which only one on each side has"
    return f"{count} one after the other, in the order of the modules, as shapes agree"


def _components(text: str) -> str:
    return " and ".join(map(repr, text.split(".")))


# -- the search --------------------------------------------------------------------------------------------------------


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
    better = _better(tried, now, len(model.tensors))
    equals = [one for one in better if one.worth == better[0].worth]
    different = [one for n, one in enumerate(equals) if not any(one.fit == before.fit for before in equals[:n])]
    disputed = any(_contradict(better[0].fit, one.fit) for one in different)
    return different if disputed else better[:1]


def _by_shapes(now: _Tried, saved: StateDictShapes, model: StateDictShapes) -> list[_Tried]:
    """The pairs without evidence in names, if any, of the kind that fixes most."""
    mine = {new: saved.tensors[name] for name, new in now.names.items()}
    kinds = [*_moved(mine, model.tensors), *_by_shape(mine, model.tensors, saved.ordered and model.ordered)]
    return _better((_tried(now.names, pairs, rule, saved, model) for rule, pairs in kinds), now, len(model.tensors))[:1]


def _better(tried: Iterable[_Tried], now: _Tried, wanted: int) -> list[_Tried]:
    """The rules that fix a name, merge no two names and keep the numbers of layers, the best first.

    `wanted` is the number of names of the model.
    """
    found = [one for one in tried if len(one.fit) > len(now.fit) and len(set(one.names.values())) == len(now.names)]
    return sorted((one for one in found if not _moves_few_layers(one, now, wanted)), key=_preference)


def _moves_few_layers(one: _Tried, now: _Tried, wanted: int) -> bool:
    """Whether a rule by name gives names another layer's number, without making the majority of either side fit.

    Layers are alike, so an equal shape is no evidence: `a.0.` as `b.1.c.` always fits. The number of a wrapper (`0.` of
    a Sequential) disappears from most names at once.
    """
    if one.rule.kind not in BY_NAME:
        return False
    moved = {name for name, new in one.names.items() if _is_another_layer(now.names[name], new)}
    return bool(moved) and len(moved & set(one.fit.values())) * 2 <= min(len(one.names), wanted)


def _is_another_layer(old: str, new: str) -> bool:
    """Whether a new name has other numbers between its dots, or differs only in digits."""
    return _numbers(old) != _numbers(new) or (old != new and _DIGITS.sub("", old) == _DIGITS.sub("", new))


_DIGITS = re.compile(r"\d+")


def _preference(one: _Tried) -> tuple[tuple[int, ...], int, int, str]:
    """Sort key: the greatest worth, then the simplest kind, then the shortest rule."""
    rule = one.rule
    return tuple(-n for n in one.worth), KINDS.index(rule.kind), len(rule.old) + len(rule.new), rule.old


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
    """Apply a rule that turns each new name of `pairs` into another, and count the names that then fit the model."""
    names = {name: pairs.get(new, new) for name, new in before.items()}
    present = [(name, new) for name, new in names.items() if new in model.tensors]
    fit = {new: name for name, new in present if shapes_agree(saved.tensors[name], model.tensors[new])}
    return _Tried(rule, names, fit, len(present))


def shapes_agree(one: NamedShape, other: NamedShape) -> bool:
    """Whether two shapes are known and equal, or both known not to be tensors; False if codes would be converted."""
    return one.shape == other.shape and not one.note and not other.note and not codes_are_converted(one, other)


def codes_are_converted(found: NamedShape, wanted: NamedShape) -> bool:
    """Whether a part of a quantized weight would be converted to another dtype, as if it were a value."""
    return found.coded is not None and wanted.dtype not in ("", found.dtype)


def _counted(one: _Tried, before: _Tried) -> Rename:
    changed = [(old, one.names[old]) for old, new in before.names.items() if one.names[old] != new]
    fixes = len(one.fit.keys() - before.fit.keys())
    # For a single tensor under another name the shape is the only evidence; a wrapper around it is evidence of its own.
    assumed = one.rule.kind not in BY_NAME or bool(one.rule.old and one.rule.new and fixes == 1)
    example = next(iter(changed), ("", ""))
    return one.rule._replace(fixes=fixes, changes=len(changed), example=example, assumed=assumed)


def _by_shape(
    mine: Mapping[str, NamedShape], model: Mapping[str, NamedShape], ordered: bool
) -> Iterator[tuple[Rename, Mapping[str, str]]]:
    """Pair the remaining names of both sides: in module order, or by a shape that no other tensor has."""
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
    """Whether two lists of names agree position by position: in shape, and in the numbers in the names."""
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
