"""What the model of a checkpoint holds: names and shapes, no values."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ckptools.contents.entries import entries_of
from ckptools.errors import ReadError, UsageError
from ckptools.model.checkpoint import Checkpoint
from ckptools.model.matching import NamedShape, StateDictShapes
from ckptools.model.tensor import Tensor
from ckptools.training_state.module_order import believed
from ckptools.training_state.sections import Section, sections_of, sections_of_kind, storage_identity

NO_VALUES = "has no values"


def saved_shapes(ck: Checkpoint, section: str = "", told_by: str = "") -> StateDictShapes:
    """The names of the model of a checkpoint, as every command has them, with their shapes.

    Args:
        ck: the checkpoint, all ranks read.
        section: name of the model's section, where there are several; "" for the only one.
        told_by: what to call it; "" for its path.

    Raises:
        ReadError: it holds no model.
        UsageError: it holds several, of which none was chosen.
    """
    model = _model(ck, section)
    names = {entry.path: entry.name for entry in entries_of(ck) if entry.kind == "model"}
    alone = len(sections_of_kind(ck, "model")) == 1
    found = {names.get((*model.path, key), str(key)) if alone else str(key): v for key, v in model.value.items()}
    order = believed(ck.module_order, model.value)
    return StateDictShapes(told_by or str(ck.path), _shapes(found), order.kept)


def _model(ck: Checkpoint, section: str) -> Section:
    """The section that is meant."""
    models = sections_of_kind(ck, "model")
    wanted = [s for s in models if section == s.name] or [s for s in models if section in ("", s.kind)]
    if len(wanted) == 1:
        return wanted[0]
    if not models:
        here = ", ".join(sorted({s.kind for s in sections_of(ck)})) or "nothing"
        raise ReadError(ck.path, f"holds no model to compare; it holds {here}")
    names = ", ".join(s.name for s in models)
    if not wanted:
        raise UsageError(ck.path, f"--section {section}: is no model; there is {names}")
    raise UsageError(ck.path, f"holds {len(models)} models: {names}; choose one with --section")


def _shapes(values: Mapping[str, Any]) -> dict[str, NamedShape]:
    """Shape by name; a tied name has that of the first one with the same bytes."""
    first: dict[Any, str] = {}
    found: dict[str, NamedShape] = {}
    for name, value in values.items():
        found[name] = _shape(value)
        identity = storage_identity(value) if isinstance(value, Tensor) else None
        if identity is not None and first.setdefault(identity, name) != name:
            found[name] = found[name]._replace(tied=first[identity])
    return found


def _shape(value: Any) -> NamedShape:
    """What is known of one value; something that is no tensor, such as a module's extra state, has no shape."""
    if not isinstance(value, Tensor):
        return NamedShape(None)
    if value.kind == "meta":
        return NamedShape(value.shape, value.dtype, note=value.note or NO_VALUES)
    return NamedShape(value.shape, value.dtype, note=value.note)
