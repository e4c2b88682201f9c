"""The record of the source inside an output, and the JSON beside an output that lists left-out names.

The record has the source's name, but neither its folder nor a time, so that the same source gives the same bytes.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from ckptools._version import __version__
from ckptools.consolidate.writers.layout import OutputContents
from ckptools.model.checkpoint import Checkpoint
from ckptools.model.problems import Code
from ckptools.model.provenance import OTHER, Filled, LeftOut, Origin, Provenance
from ckptools.model.regions import Box
from ckptools.model.tree import tensors_in
from ckptools.text import KeyPath, few, fqn_of, plural
from ckptools.training_state.sections import sections_of_kind

CODES = frozenset(code.code for code in Code)
"""Codes of problems: they are the keys of left-out values without a name."""

NOT_SAVED = (Code.FILLED, Code.NEVER_WRITTEN)
"""Problems of filled-in tensors, which the record lists by name anyway."""

NameOf = Callable[[KeyPath], str]


def record_of(
    selection: OutputContents, left_out: Mapping[KeyPath, str] | None = None, name_of: NameOf = fqn_of
) -> Provenance | None:
    """Make the record of an output; None if the user does not want a record.

    `left_out` has the key paths that the format cannot store, with the reason. `name_of` maps a key path of the
    selection to its name in the output.
    """
    source = selection.source
    if not selection.with_record:
        return None
    before = source.provenance
    gone = {**selection.left_out, **(left_out or {})}
    names = {path: "" if len(path) == 1 and path[0] in CODES else name_of(path) for path in gone}
    named = [LeftOut(names[path], why, path in selection.lost) for path, why in gone.items()]
    named += [LeftOut(problem.tensor or "", problem.message, True) for problem in selection.passed_over]
    of_base = [origin_of(selection.base)] if selection.base is not None else []
    # The source may be an output itself, with names that were left out of it.
    never_there = [one for one in before.left_out if not one.lost] if before else []
    return Provenance(
        version=__version__,
        part=_part(selection),
        sources=(origin_of(source), *of_base, *(before.sources if before else ())),
        filled=tuple(_filled(selection, name_of)),
        left_out=(*(one._replace(why=_without_folder(one.why, source)) for one in named), *never_there),
        more_filled=before.more_filled if before else 0,
        more_lost=before.more_lost if before else 0,
        unsure=tuple(_without_folder(problem.message, source) for problem in selection.unsure),
    )


def _part(selection: OutputContents) -> str:
    """The part of the source that an output holds; of a source with several models, also the name of the model."""
    names = [section.name for section, _ in selection.places if section.kind == "model"]
    which = selection.part == "model" and len(sections_of_kind(selection.source, "model")) > 1 and len(names) == 1
    return f"model {names[0]}" if which else selection.part


def origin_of(checkpoint: Checkpoint) -> Origin:
    """Name, format, step and world size of a checkpoint, as an output made of it states them."""
    step = checkpoint.step.value if checkpoint.step.agree and type(checkpoint.step.value) is int else None
    return Origin(checkpoint.name, checkpoint.format, step, checkpoint.world_size.exact)


def why_not_saved(filled: Filled) -> str:
    """Why a tensor with filled-in values is left out."""
    of = f"{filled.elements} of {plural(filled.numel, 'element')} are"
    if filled.fill == OTHER:
        return f"{of} those of another save, {filled.origin}"
    return f"{of} {'zeros' if filled.fill == 'zero' else 'NaN'} that no rank saved"


def note_on_carried(selection: OutputContents) -> list[str]:
    """Note the tensors whose values were filled in when the source was written, and are written unchanged."""
    names = [fqn_of(path) for path in selection.carried if path not in selection.left_out]
    return [f"with values that no rank saved, as they are in the source: {few(names, 3)}"] if names else []


def _filled(selection: OutputContents, name_of: NameOf) -> Iterator[Filled]:
    """Yield the tensors with filled-in values, whether filled in now or when the source was written."""
    written = dict(tensors_in(selection.tree))
    for path, boxes in selection.missing.items():
        if selection.filled and path not in selection.left_out and path in written:
            elements = sum(box.numel for box in boxes)
            yield Filled(name_of(path), selection.filled, elements, written[path].numel)
    for path, boxes in selection.borrowed.items():
        if path not in selection.left_out and path in written:
            elements = sum(box.numel for box in boxes)
            yield Filled(name_of(path), OTHER, elements, written[path].numel, selection.borrowed_from)
    for path, earlier in selection.carried.items():
        if path not in selection.left_out:
            yield earlier._replace(name=name_of(path))


def _without_folder(why: str, source: Checkpoint) -> str:
    """Remove the folders of the source from the paths in a reason."""
    folders = {str(path.parent) for path in (source.path, source.path.absolute(), *(f.path for f in source.files))}
    for folder in sorted(folders, key=len, reverse=True):
        # The folder `a` must not match the end of `data/` in `data/7`.
        why = re.sub(rf"(?<![\w./-]){re.escape(folder)}/", "", why) if folder not in ("", ".", "/") else why
    return why


# -- left-out names, beside the output ---------------------------------------------------------------------------------


def left_out_json(selection: OutputContents, name_of: NameOf) -> str:
    """List left-out values with key path, name and reason, and every hole with its fill value, if any.

    Holes that were filled when the source was written are listed too, without their regions.
    """
    left_out, filled, written = selection.left_out, selection.filled, dict(tensors_in(selection.tree))

    def named(path: KeyPath) -> dict[str, Any]:
        return {"path": [str(k) for k in path], "name": name_of(path)}

    def hole(path: KeyPath, fill: str | None, boxes: Iterable[Box], **more: object) -> dict[str, Any]:
        regions = [{"offsets": list(box.offsets), "sizes": list(box.sizes)} for box in boxes]
        return {**named(path), "filled_with": fill, **more, "regions": regions}

    rows = [{**named(path), "why": why, "lost": path in selection.lost} for path, why in left_out.items()]
    rows += [{"path": [], "name": p.tensor or "", "why": p.message, "lost": True} for p in selection.passed_over]
    holes = []
    for path, boxes in selection.missing.items():
        numel = {"numel": written[path].numel} if path in written else {}
        holes.append(hole(path, filled if filled and path not in left_out else None, boxes, **numel))
    for path, boxes in selection.borrowed.items():
        if path not in left_out and path in written:
            holes.append(hole(path, OTHER, boxes, origin=selection.borrowed_from, numel=written[path].numel))
    for path, one in selection.carried.items():
        if path not in left_out:
            origin = {"origin": one.origin} if one.origin else {}
            holes.append(hole(path, one.fill, (), numel=one.numel, elements=one.elements) | origin)
    made = {"schema": "ckptools/left-out/1", "left_out": rows, "missing": holes}
    if selection.unsure:
        made["unsure"] = [{"why": problem.message} for problem in selection.unsure]
    return json.dumps(made, indent=2) + "\n"
