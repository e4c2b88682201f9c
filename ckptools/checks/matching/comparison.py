"""Every name of a model beside the one of the checkpoint, and what explains a shape that differs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from ckptools.checks.matching.rename_search import shapes_agree
from ckptools.model.matching import MatchRow, NamedShape, StateDictShapes
from ckptools.model.regions import Ints
from ckptools.text import plural

VOCABULARY_WORDS = ("emb", "vocab", "wte", "tok", "head", "output", "proj_out", "word")
"""What is in the names of tensors with a row for each token."""

NOTHING = NamedShape(None)


def rows_of(saved: StateDictShapes, model: StateDictShapes, names: Mapping[str, str]) -> Iterator[MatchRow]:
    """A row for every name of the model, in its order, then for those that only the checkpoint has.

    Args:
        saved: what the checkpoint holds.
        model: what the model expects.
        names: what every name of the checkpoint is called after the renames.
    """
    source = {new: old for old, new in names.items()}
    for name, wanted in model.tensors.items():
        old = source.get(name)
        yield _absent(name, wanted, source) if old is None else _beside(name, wanted, old, saved.tensors[old])
    for old, new in names.items():
        if new not in model.tensors:
            yield _too_many(old, saved.tensors[old])


def _absent(name: str, wanted: NamedShape, source: Mapping[str, str]) -> MatchRow:
    if wanted.tied in source:
        note = f"tied to {wanted.tied}, which is there; strict loading wants both"
        return MatchRow("tied", name, None, wanted.shape, None, wanted.dtype, "", "tied", note)
    return MatchRow("missing", name, None, wanted.shape, None, wanted.dtype, "")


def _too_many(name: str, found: NamedShape) -> MatchRow:
    note = f"tied to {found.tied}: the same values under a second name" if found.tied else ""
    reason = "tied" if found.tied else ""
    return MatchRow("unexpected", None, name, None, found.shape, "", found.dtype, reason, note)


def _beside(name: str, wanted: NamedShape, old: str, found: NamedShape) -> MatchRow:
    known = MatchRow("same", name, old, wanted.shape, found.shape, wanted.dtype, found.dtype)
    if shapes_agree(found, wanted):
        return known if name == old else known._replace(status="renamed")
    if found.note or wanted.note or None in (found.shape, wanted.shape):
        return known._replace(status="unknown", note=_why_unknown(found, wanted))
    reason, note = _explained(name, found.shape or (), wanted.shape or ())
    return known._replace(status="shape", reason=reason, note=note)


def _why_unknown(found: NamedShape, wanted: NamedShape) -> str:
    if found.note or wanted.note:
        return found.note or f"in the model: {wanted.note}"
    return "a tensor in the model only" if found.shape is None else "a tensor in the checkpoint only"


def _explained(name: str, found: Ints, wanted: Ints) -> tuple[str, str]:
    """What a difference in shape looks like, in a word and in words; nothing where it looks like nothing known."""
    if _is_padded(name, found, wanted):
        rows = plural(abs(wanted[0] - found[0]), "row")
        return "padded", f"{rows} {'short' if found[0] < wanted[0] else 'over'}: padded vocabulary?"
    if len(found) == 2 and found == wanted[::-1]:
        return "transposed", "transposed"
    if _numel(found) == _numel(wanted):
        return "reshaped", "as many elements, of another shape"
    return "", ""


def _is_padded(name: str, found: Ints, wanted: Ints) -> bool:
    two = len(found) == len(wanted) == 2 and found[1] == wanted[1]
    return two and any(word in name.lower() for word in VOCABULARY_WORDS)


def _numel(shape: Ints) -> int:
    count = 1
    for n in shape:
        count *= n
    return count
