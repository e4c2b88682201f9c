"""Shapes told from outside: `--shapes FROM` for checkpoints that hold flattened parameters and not their shapes.

FROM is a JSON that maps names to shapes, or another checkpoint: its model's names, shapes and ties are taken,
no values. An order is taken only from where it is the module's: a torch.save file whose state dict lists its modules in
that order (`ckptools.training_state.module_order`), a JSON, which is written in the order that its author means.

    {"emb.weight": [33, 17], "head.weight": "emb.weight"}

A name instead of a shape says that the parameter is tied to that one. Such a JSON is made where the model is:
`json.dump({k: list(v.shape) for k, v in model.named_parameters()}, file)`. In Python it may be the model itself.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from ckptools.errors import ReadError, UsageError
from ckptools.files.json_file import read_json
from ckptools.model.checkpoint import Checkpoint, ModuleOrder
from ckptools.model.regions import Ints
from ckptools.model.tensor import Tensor
from ckptools.model.values import describe_for_error
from ckptools.training_state.module_order import AS_WRITTEN, BY_UNIT, believed
from ckptools.training_state.sections import sections_of_kind, storage_identity

MAX_DIMS = 64
MAX_SIZE = (1 << 63) - 1


@dataclass(frozen=True)
class Shapes:
    """Shapes, ties and order of a model's parameters, from outside of the checkpoint.

    Attributes:
        source: what tells them, for messages.
        shapes: by name.
        tied: names that are another parameter under a second name, with the first.
        order: whether the names are in the order of the module.
    """

    source: str
    shapes: Mapping[str, Ints]
    tied: Mapping[str, str]
    order: ModuleOrder

    @property
    def ordered(self) -> bool:
        """Whether the names are in the order of the module."""
        return self.order.kept


class Module(Protocol):
    """What is asked of a module: `torch.nn.Module` has it."""

    def named_parameters(self) -> Iterable[tuple[str, Any]]:
        """Names and parameters, in the order in which the module has them, each parameter once."""


ShapesFrom = str | Path | Module
"""What may tell shapes: a path, or a module before anything wrapped it."""


def from_python(module: Module) -> Shapes:
    """The shapes of a module's parameters; those of a tied one under its first name."""
    found = {name: tuple(parameter.shape) for name, parameter in module.named_parameters()}
    return Shapes(f"the {type(module).__name__}", found, {}, AS_WRITTEN)


def from_checkpoint(checkpoint: Checkpoint, path: Path) -> Shapes:
    """The shapes of the model of a checkpoint, which was opened at `path`.

    Raises:
        UsageError: it holds no model, several, or one whose shapes are not known either.
    """
    models = sections_of_kind(checkpoint, "model")
    if len(models) != 1:
        raise UsageError(path, f"holds {len(models)} models; --shapes needs something that holds one")
    tensors = {k: t for k, t in models[0].value.items() if isinstance(t, Tensor)}
    whole = {k: t for k, t in tensors.items() if not t.note or t.kind == "meta"}
    if any(t.kind == "flat_pieces" and t.note for t in tensors.values()):
        raise UsageError(path, "tells no shapes either; --shapes needs a checkpoint with whole tensors, or a JSON")
    pieces = any(t.kind == "flat_pieces" for t in whole.values())
    order = BY_UNIT if pieces else believed(checkpoint.module_order, models[0].value)
    return Shapes(str(path), {k: t.shape for k, t in whole.items()}, ties(whole), order)


def ties(tensors: Mapping[str, Tensor]) -> dict[str, str]:
    """Tied names: those with the bytes of an earlier name, which they map to."""
    first: dict[Any, str] = {}
    tied: dict[str, str] = {}
    for name, tensor in tensors.items():
        identity = storage_identity(tensor)
        if identity is not None and first.setdefault(identity, name) != name:
            tied[name] = first[identity]
    return tied


def from_json(path: Path) -> Shapes:
    """The shapes that a JSON tells.

    Raises:
        ReadError: it is no JSON of name to shape.
    """
    found = read_json(path)
    if not isinstance(found, dict) or not found:
        raise ReadError(
            path, f"no JSON of name to shape: expected an object of names, found {describe_for_error(found)}"
        )
    shapes: dict[str, Ints] = {}
    tied: dict[str, str] = {}
    for name, value in found.items():
        if isinstance(value, str) and value in shapes:
            tied[name] = tied.get(value, value)
            shapes[name] = shapes[value]
        elif is_shape(value):
            shapes[name] = tuple(value)
        else:
            raise ReadError(
                path,
                f"{describe_for_error(name)}: expected a list of sizes, "
                f"or the earlier name that it is tied to; found {describe_for_error(value)}",
            )
    return Shapes(str(path), shapes, tied, AS_WRITTEN)


def is_shape(value: Any) -> bool:
    """Whether a value of a JSON is a list of sizes."""
    return (
        isinstance(value, list) and len(value) <= MAX_DIMS and all(type(n) is int and 0 <= n <= MAX_SIZE for n in value)
    )
