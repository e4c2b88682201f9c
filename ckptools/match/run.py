"""`match`: compare the names and shapes in a checkpoint and in a model, and group the differences."""

from __future__ import annotations

import sys
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any

from ckptools.dtypes import short
from ckptools.errors import UsageError
from ckptools.formats.open import with_all_ranks
from ckptools.keys import entries
from ckptools.keys.entries import Branch, Selection, label_text
from ckptools.keys.expected_names import can_be_like, saved_shapes, shapes_expected
from ckptools.keys.renames import codes_are_converted, find_renames, shapes_agree
from ckptools.match.record import Match, MatchGroup, MatchRow
from ckptools.match.resume import resume_rows, torch_row
from ckptools.model.checkpoint import Checkpoint
from ckptools.model.records import Rows, grouped
from ckptools.model.regions import Ints
from ckptools.model.tensor import CODES
from ckptools.rules.verdict import verdict_of
from ckptools.text import few, plural, shape
from ckptools.torch_engine.module_shapes import Loading, NamedShape, StateDictShapes
from ckptools.training_state.models import models_of, names_in_file, note_on_choice, put_together

VOCABULARY_WORDS = ("emb", "vocab", "wte", "tok", "head", "output", "proj_out", "word")
"""Words in the names of tensors with a row for each token."""

MOST = 6
"""At most this many lines per status and explanation; with more, the ends of names are dropped."""

STATUSES = ("shape", "unknown", "missing", "tied", "unexpected", "converted", "ignored")


def match(
    checkpoint: Checkpoint | str | Path,
    to: Any,
    selection: Selection | None = None,
    optimizer: bool = False,
    world_size: int | None = None,
) -> Match:
    """Compare names and shapes of a checkpoint's model with another model's; reads no values.

    The selection restricts the names on both sides, and chooses the model section if there are several. With
    `optimizer` or `world_size`, also answer whether a run resumes with that optimizer or on so many ranks.

    Raises:
        ReadError: one of the two cannot be read, or has no model.
        UsageError: one of the two has several models; or no name is selected.
    """
    whole = with_all_ranks(checkpoint)
    chosen = selection or Selection()
    saved = saved_shapes(whole, chosen.section)
    links = bool(whole.options and whole.options.follow_symlinks)
    named = chosen.section not in ("", "model")  # by the user: the section of one model
    model = shapes_expected(to, chosen.section, links, () if named else names_in_file(whole))
    note = "" if named else note_on_choice(whole)
    together = whole if named else put_together(whole, model.tensors)
    if together is not whole:
        sections = few([one.section.name for one in models_of(whole)])
        note = f"model: the state dict that holds {sections}, as a whole"
        whole, saved = together, saved_shapes(together)
    found = compared(replace(saved, ranks=len(whole.ranks)), model, verdict_of(whole).whole, chosen)
    found = replace(found, chosen=note)
    config = (whole.path if whole.path.is_dir() else whole.path.parent) / "config.json"
    saved_as = model.published() if found.apart and model.published is not None and can_be_like(config) else None
    if saved_as and None not in saved_as.values():
        found = replace(found, like=str(config))
    if not optimizer and world_size is None:
        # If torch is imported, it probably made the model, and would load the files into it.
        row = torch_row(whole) if "torch" in sys.modules else None
        return replace(found, resume=Rows([row])) if row is not None and row.verdict != "fits" else found
    names = {name: found.fix.get(name, found.assumed.get(name, name)) for name in saved.tensors}
    rows = resume_rows(whole, found.rows, names, optimizer, model.optimizer, world_size)
    return replace(found, resume=Rows(rows))


def compared(saved: StateDictShapes, model: StateDictShapes, whole: bool | None, selection: Selection) -> Match:
    """Compare two lists of names and shapes, and find renames that make more of them agree.

    If a model of transformers lacks names, they are compared both directly and as `from_pretrained` converts them; the
    result is that of the way the model would be loaded.
    """
    loading = model.loading(saved.tensors) if model.loading is not None and not _plain(saved, model) else None
    if loading is not None and (loading.not_judged or not model.converts):
        found = _compared(saved, model, whole, selection, Loading())
        if loading.not_judged:
            why = f"what transformers makes of them while loading is not judged: {loading.not_judged}"
            return replace(found, not_compared=(*found.not_compared, why))
        other = (
            found if found.loads else _compared(saved, replace(model, ties_optional=True), whole, selection, loading)
        )
        # If nothing is converted, the names that are absent are tied ones, and their rows say so.
        converts = other.loads and not found.loads and loading.converted
        return replace(found, apart=loading.apart) if converts else found
    return _compared(saved, model, whole, selection, loading or Loading())


def _plain(saved: StateDictShapes, model: StateDictShapes) -> bool:
    """Whether names and shapes are equal, so that nothing has to be converted."""
    shapes = saved.tensors
    return shapes.keys() == model.tensors.keys() and all(shapes_agree(shapes[n], t) for n, t in model.tensors.items())


def _compared(
    saved: StateDictShapes, model: StateDictShapes, whole: bool | None, selection: Selection, loading: Loading
) -> Match:
    seen = _as_converted(saved, model, loading)
    found = find_renames(seen, model)
    every = [_of_loading(row, saved, loading) for row in _rows(seen, model, found.names)]
    every += [_left_out(name, saved.tensors[name]) for name in loading.ignored]
    rows = [row for row in every if selection.takes(*_names(row), *loading.converted.get(row.name or "", ()))]
    rows = _as_slices(rows, saved.ranks)
    if not rows:
        raise UsageError(None, f"no name of {saved.given_by} or {model.given_by} matches {selection.words}")
    names = {row.name for row in rows if row.name is not None}
    fit = [len(names.intersection(some)) for some in found.fit]
    fine = ("same", "converted", "ignored", *(["tied"] if model.ties_optional else []))
    made = [row for row in rows if row.status == "converted"]
    gone = sum(len(loading.converted.get(row.name or "", ())) for row in made if row.checkpoint_name is None)
    return Match(
        path=saved.given_by,
        to=model.given_by,
        loads=whole is not False and all(row.status in fine for row in rows),
        whole=whole,
        model_names=len(names),
        checkpoint_names=sum(row.checkpoint_name is not None for row in rows) + gone,
        same=fit[0] - len(made),
        renamed=fit[-1] - fit[0],
        renames=tuple(step._replace(fit=count) for step, count in zip(found.steps, fit[1:], strict=True)),
        alternatives=found.alternatives,
        groups=Rows(_groups_of(rows)),
        rows=Rows(rows),
        fix={old: new for old, new in found.names.items() if old != new and old not in found.assumed},
        assumed={old: new for old, new in found.names.items() if old in found.assumed},
        converted=len(made),
        while_loading=loading.words if made or loading.ignored else "",
        not_compared=tuple(_not_compared(every, rows, selection)),
    )


def _not_compared(every: Sequence[MatchRow], rows: Sequence[MatchRow], selection: Selection) -> Iterator[str]:
    """List the names that were not selected, and the names without shape or dtype on one side."""
    if len(rows) < len(every):
        yield f"{len(every) - len(rows)} of {plural(len(every), 'name')}, which {selection.words} leaves out"
    same = [row for row in rows if row.status in ("same", "renamed")]
    if without := sum(row.model_shape is None for row in same):
        yield f"{plural(without, 'name')} with no tensor: there on both sides, and nothing but the name was compared"
    if without := sum(not (row.model_dtype and row.checkpoint_dtype) for row in same if row.model_shape is not None):
        yield f"dtypes of {plural(without, 'name')}, which one side does not state"


# -- names that transformers converts while loading --------------------------------------------------------------------


def _as_converted(saved: StateDictShapes, model: StateDictShapes, loading: Loading) -> StateDictShapes:
    """Convert names and shapes of a checkpoint as transformers does while loading; unused names stay."""
    if not (loading.converted or loading.ignored or loading.made):
        return saved
    gone = {old for olds in loading.converted.values() for old in olds} | loading.ignored
    made = {
        name: model.tensors[name]._replace(shape=loading.shapes.get(name, model.tensors[name].shape), tied="")
        for name in loading.made
        if name in model.tensors and (name not in saved.tensors or name in loading.converted)
    }
    return replace(saved, tensors={**{n: t for n, t in saved.tensors.items() if n not in gone}, **made})


def _of_loading(row: MatchRow, saved: StateDictShapes, loading: Loading) -> MatchRow:
    """Adapt the row of a name that transformers makes from other names, or cannot make."""
    name = row.name or ""
    if name in loading.failed:
        return row._replace(status="unknown", note=f"transformers cannot make it: {loading.failed[name]}")
    olds = loading.converted.get(name)
    if olds is None and (name not in loading.made or name in saved.tensors):
        return row
    only = olds[0] if olds is not None and len(olds) == 1 else None
    found = saved.tensors[only] if only is not None else None
    dtype = found.dtype if found is not None else ""
    row = row._replace(checkpoint_name=only, checkpoint_dtype=dtype)
    if row.status != "same":
        return row._replace(note=f"{row.note or 'made while loading'}, of {plural(len(olds or ()), 'tensor')}")
    note = f"made of {plural(len(olds), 'tensor')} while loading" if olds else "split off another tensor while loading"
    return row._replace(status="converted", note=note if only is None else "renamed while loading")


def _left_out(name: str, found: NamedShape) -> MatchRow:
    return MatchRow("ignored", None, name, None, found.shape, "", found.dtype, "", "transformers leaves it out")


def _names(row: MatchRow) -> list[str]:
    return [name for name in (row.name, row.checkpoint_name) if name is not None]


def _rows(saved: StateDictShapes, model: StateDictShapes, names: Mapping[str, str]) -> Iterator[MatchRow]:
    """Make a row for every name of the model, in its order, then for names that only the checkpoint has.

    `names` maps every name of the checkpoint to its name after the renames.
    """
    source = {new: old for old, new in names.items()}
    coded = {
        one.coded.weight: one for one in saved.tensors.values() if one.coded is not None and one.coded.part == CODES
    }
    for name, wanted in model.tensors.items():
        old = source.get(name)
        yield (
            _absent(name, wanted, source, coded.get(name))
            if old is None
            else _beside(name, wanted, old, saved.tensors[old])
        )
    for old, new in names.items():
        if new not in model.tensors:
            found = saved.tensors[old]
            note = f"tied to {found.tied}: the same values under a second name" if found.tied else ""
            reason = "tied" if found.tied else ""
            if found.coded is not None:
                reason, note = "quantized", found.coded.words
            yield MatchRow("unexpected", None, old, None, found.shape, "", found.dtype, reason, note)


def _absent(name: str, wanted: NamedShape, source: Mapping[str, str], codes: NamedShape | None) -> MatchRow:
    if wanted.tied in source:
        note = f"tied to {wanted.tied}, which is there; strict loading wants both"
        return MatchRow("tied", name, None, wanted.shape, None, wanted.dtype, "", "tied", note)
    if codes is not None and codes.coded is not None:
        reason, note = "quantized", f"here as {codes.coded.words}, {short(codes.dtype)}"
        return MatchRow("missing", name, None, wanted.shape, None, wanted.dtype, "", reason, note)
    return MatchRow("missing", name, None, wanted.shape, None, wanted.dtype, "")


def _beside(name: str, wanted: NamedShape, old: str, found: NamedShape) -> MatchRow:
    known = MatchRow("same", name, old, wanted.shape, found.shape, wanted.dtype, found.dtype)
    if found.coded is not None and codes_are_converted(found, wanted):
        return known._replace(status="unknown", reason="quantized", note=f"{found.coded.words}; no value to convert")
    if shapes_agree(found, wanted):
        return known if name == old else known._replace(status="renamed")
    if found.note or wanted.note or None in (found.shape, wanted.shape):
        return known._replace(status="unknown", note=_why_unknown(found, wanted))
    if found.coded is not None and wanted.coded is None:
        return known._replace(status="shape", reason="quantized", note=f"{found.coded.words}, packed")
    reason, note = _explained(name, found.shape or (), wanted.shape or ())
    return known._replace(status="shape", reason=reason, note=note)


def _why_unknown(found: NamedShape, wanted: NamedShape) -> str:
    if found.note or wanted.note:
        return found.note or f"in the model: {wanted.note}"
    return "a tensor in the model only" if found.shape is None else "a tensor in the checkpoint only"


def _as_slices(rows: list[MatchRow], ranks: int) -> list[MatchRow]:
    """If all differing shapes are first slices of `torch.chunk` over the ranks, explain them so."""
    if ranks < 2:  # a file without a rank has no slices
        return rows
    dims = {i: _cut_along(row, ranks) for i, row in enumerate(rows) if row.status == "shape"}
    if not dims or None in dims.values():
        return rows
    named = {0: "rows", 1: "columns"}
    for i, dim in dims.items():
        note = f"1/{ranks} of the {named.get(dim or 0, 'elements')} on each of {ranks} ranks: slices along dim {dim}"
        rows[i] = rows[i]._replace(reason="slices", note=note)
    return rows


def _cut_along(row: MatchRow, ranks: int) -> int | None:
    """Find the one dimension in which the model's size, divided by the ranks, is the checkpoint's; None without."""
    found, wanted = row.checkpoint_shape or (), row.model_shape or ()
    odd = [dim for dim, (a, b) in enumerate(zip(found, wanted, strict=False)) if a != b]
    cut = len(found) == len(wanted) and len(odd) == 1 and found[odd[0]] == -(-wanted[odd[0]] // ranks)
    return odd[0] if cut else None


def _explained(name: str, found: Ints, wanted: Ints) -> tuple[str, str]:
    """Explain a difference in shape, in a word and in a sentence; two empty texts if no cause is known."""
    one_size = len(found) == len(wanted) == 2 and found[1] == wanted[1]
    if one_size and any(word in name.lower() for word in VOCABULARY_WORDS):
        rows = plural(abs(wanted[0] - found[0]), "row")
        return "padded", f"{rows} {'short' if found[0] < wanted[0] else 'over'}: padded vocabulary?"
    if len(found) == 2 and found == wanted[::-1]:
        return "transposed", "transposed"
    if prod(found) == prod(wanted):
        return "reshaped", "as many elements, of another shape"
    return "", ""


# -- fold names that differ --------------------------------------------------------------------------------------------


def _groups_of(rows: Sequence[MatchRow]) -> list[MatchGroup]:
    """Fold the rows that differ: by status, then by explanation; rows whose dtypes differ come last."""
    found = [g for s in STATUSES for g in _groups(s, [r for r in rows if r.status == s], _shapes)]
    return [*found, *_groups("dtype", [r for r in rows if r.dtype_differs], _dtypes)]


Facts = tuple[str, str, str]
"""Shape or dtype in the checkpoint, the same in the model, and the explanation of the difference."""


def _shapes(row: MatchRow) -> Facts:
    here, there = ("" if sizes is None else shape(sizes) for sizes in (row.checkpoint_shape, row.model_shape))
    return here, there, row.note


def _dtypes(row: MatchRow) -> Facts:
    return short(row.checkpoint_dtype), short(row.model_dtype), "converted when it is loaded"


def _groups(status: str, rows: Sequence[MatchRow], facts: Callable[[MatchRow], Facts]) -> Iterator[MatchGroup]:
    """Group rows with equal shapes or dtypes, folded by name; a shape known on one side only does not split a group."""
    split = status in ("shape", "dtype")
    for key, some in grouped(rows, lambda row: facts(row) if split else ("", "", facts(row)[2])).items():
        for names, members in fold([_names(row)[0] for row in some], [facts(row) for row in some]):
            pairs = {facts(some[n])[:2] for n in members}
            checkpoint, model = pairs.pop() if len(pairs) == 1 else key[:2]
            yield MatchGroup(status, names, len(members), checkpoint, model, key[2])


def fold(names: Sequence[str], kinds: Sequence[Hashable] = ()) -> list[tuple[str, list[int]]]:
    """Fold similar names into patterns, each with the indices of its names.

    Names with the same continuation are folded as in `tree`: first only names of one kind, such as one shape; if too
    many lines are left, all names; if there are still too many, the ends of names are dropped. `kinds` has the kind of
    each.
    """
    apart, alike = _tree(names, kinds or [0] * len(names)), _tree(names, [0] * len(names))
    tries = [(apart, _depth(apart)), *((alike, depth) for depth in range(_depth(alike), 0, -1))]
    found: list[tuple[str, list[int]]] = []
    for tree, depth in tries:
        found = [(names[m[0]] if len(m) == 1 else text, m) for text, m in _lines(tree, "", depth)]
        if len(found) <= MOST:
            break
    return found


def _tree(names: Sequence[str], kinds: Sequence[Hashable]) -> list[Branch[int]]:
    items = entries.tree_of((name, n) for n, name in enumerate(names))
    return entries.fold(items, kinds.__getitem__, kinds.__getitem__, lambda _: True)


def _depth(branches: Iterable[Branch[int]]) -> int:
    return max((1 + _depth(branch.children) for branch in branches), default=0)


def _lines(branches: Iterable[Branch[int]], before: str, depth: int) -> Iterator[tuple[str, list[int]]]:
    """Yield a line for each branch that is a name; at the last level, one line for all names below it."""
    for branch in branches:
        text = before + label_text(branch.labels)
        if depth == 1 and branch.children:
            yield f"{text}.*", list(_items(branch))
            continue
        if branch.items:
            yield text, branch.items
        yield from _lines(branch.children, f"{text}.", depth - 1)


def _items(branch: Branch[int]) -> Iterator[int]:
    yield from branch.items
    for child in branch.children:
        yield from _items(child)
