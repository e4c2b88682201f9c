"""The record that an output carries: what it was made of, and which of its values no file held.

It has the name of the source, never its folder, and no time: the same source gives the same bytes.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping

from ckptools._version import __version__
from ckptools.consolidate.selection import Selection
from ckptools.model.checkpoint import Checkpoint
from ckptools.model.problems import Code, Problem
from ckptools.model.provenance import Filled, LeftOut, Origin, Provenance
from ckptools.model.tree import KeyPath, fqn_of, tensors_in
from ckptools.text import few, plural

CODES = frozenset(code.code for code in Code)
"""Keys of what is left out and has no name."""

NOT_SAVED = (Code.FILLED, Code.NEVER_WRITTEN)
"""Problems of tensors that are carried on by their names."""

NameOf = Callable[[KeyPath], str]


def record_of(
    selection: Selection, left_out: Mapping[KeyPath, str] | None = None, name_of: NameOf = fqn_of
) -> Provenance | None:
    """The record of an output; None where none is wanted.

    Args:
        selection: what is written.
        left_out: what of it the format has no place for: why.
        name_of: what the output calls what is at a key path of the selection.
    """
    source = selection.source
    if source is None or not selection.told:
        return None
    before = source.provenance
    step = source.step.value if source.step.agree and type(source.step.value) is int else None
    origin = Origin(source.name, source.format, step, source.world_size.exact)
    gone = {**selection.left_out, **(left_out or {})}
    named = [LeftOut(_name(path, name_of), why, path in selection.lost) for path, why in gone.items()]
    named += map(_passed_over, selection.passed_over)
    return Provenance(
        version=__version__,
        part=selection.part,
        sources=(origin, *(before.sources if before else ())),
        filled=tuple(_filled(selection, name_of)),
        left_out=(*(one._replace(why=_without_folder(one.why, source)) for one in named), *_never_there(before)),
        more_filled=before.more_filled if before else 0,
        more_lost=before.more_lost if before else 0,
    )


def why_not_saved(filled: Filled) -> str:
    """Why a tensor is left out that has values which nobody saved."""
    fill = "zeros" if filled.fill == "zero" else "NaN"
    return f"{filled.elements} of {plural(filled.numel, 'element')} are {fill} that nobody saved"


def note_on_carried(selection: Selection) -> list[str]:
    """The note on values of the source that nobody saved, and that are written as they are."""
    names = [fqn_of(path) for path in selection.carried if path not in selection.left_out]
    return [f"with values that nobody saved, as they are in the source: {few(names, 3)}"] if names else []


def record_text(
    selection: Selection, left_out: Mapping[KeyPath, str] | None = None, name_of: NameOf = fqn_of
) -> str | None:
    """The JSON of `record_of`; None where no record is wanted."""
    record = record_of(selection, left_out, name_of)
    return None if record is None else record.to_json()


def _name(path: KeyPath, name_of: NameOf) -> str:
    return "" if len(path) == 1 and path[0] in CODES else name_of(path)


def _filled(selection: Selection, name_of: NameOf) -> Iterator[Filled]:
    """Tensors that are written with values that no file held: now, or when the source was written."""
    written = dict(tensors_in(selection.tree))
    for path, boxes in selection.missing.items():
        if selection.filled and path not in selection.left_out and path in written:
            elements = sum(box.numel for box in boxes)
            yield Filled(name_of(path), selection.filled, elements, written[path].numel)
    for path, earlier in selection.carried.items():
        if path not in selection.left_out:
            yield earlier._replace(name=name_of(path))


def _never_there(before: Provenance | None) -> list[LeftOut]:
    """What the source itself had no place for, as the output of an output has not either."""
    return [one for one in before.left_out if not one.lost] if before else []


def _without_folder(why: str, source: Checkpoint) -> str:
    """A reason without the folders that lead to the source."""
    folders = {str(path.parent) for path in (source.path, source.path.absolute(), *(f.path for f in source.files))}
    for folder in sorted(folders, key=len, reverse=True):
        # `data/7` is no file in a folder `a`.
        why = re.sub(rf"(?<![\w./-]){re.escape(folder)}/", "", why) if folder not in ("", ".", "/") else why
    return why


def _passed_over(problem: Problem) -> LeftOut:
    return LeftOut(problem.tensor or "", problem.message, True)
