"""What `match` found: which names and shapes of a checkpoint a model expects, and what would make them so."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from ckptools.model.records import displayed
from ckptools.model.regions import Ints
from ckptools.model.rows import Rows

MatchStatus = Literal["same", "renamed", "tied", "shape", "unknown", "missing", "unexpected"]
RenameKind = Literal["prefix", "component", "wrapper", "offset", "shape", "order"]


class NamedShape(NamedTuple):
    """What is known of one name of a state dict.

    Attributes:
        shape: sizes; None where nothing tells, or where it is no tensor.
        dtype: torch's name; "" where nothing tells.
        tied: an earlier name that has the same values, such as `emb.weight` of `head.weight`; "" for none.
        note: why it cannot be compared or loaded; "" where it can.
    """

    shape: Ints | None
    dtype: str = ""
    tied: str = ""
    note: str = ""


@dataclass(frozen=True)
class StateDictShapes:
    """The names of a state dict with their shapes: what a checkpoint holds, or what a model expects.

    Attributes:
        told_by: what tells them, for people.
        tensors: shape by name, in the order in which it has them.
        ordered: whether that is the order of the module.
        ties_optional: whether a name may be absent whose values come with another, as when transformers loads.
    """

    told_by: str
    tensors: Mapping[str, NamedShape] = field(repr=False)
    ordered: bool = False
    ties_optional: bool = False


@displayed
class Rename(NamedTuple):
    """One rule by which names of the checkpoint become those of the model. It is a guess until somebody uses it.

    Attributes:
        kind: `prefix` (`old` at the beginning becomes `new`), `component` (`old` between dots becomes `new`; or each
            component of `old` goes), `wrapper` (the model has the components of `new` as well), `offset` (the numbers
            behind `old` are all higher or lower by as much), `shape` (only one name on each side has the shape),
            `order` (shapes agree one after the other, in the order of the module).
        old: what is replaced; "" where something is added.
        new: by what; "" where it goes.
        fixes: how many names of the model have their tensor by this one, with the right shape, and had none before.
        changes: how many names of the checkpoint it changes.
        example: a name of the checkpoint, and what it becomes.
        offset: what is added to the numbers, where that is the kind.
        fit: how many names of the model have a tensor of their shape then, of those that were asked for.
        assumed: whether shapes, or an order, are the only sign of it.
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


@displayed
class MatchRow(NamedTuple):
    """One name of the model, or of the checkpoint where the model has none for it.

    Attributes:
        status: `same` (name and shape), `renamed` (so after the renames), `tied` (absent, and its values come with
            another name), `shape` (differs), `unknown` (nothing tells the shape, or it cannot be loaded), `missing`
            (in the model only), `unexpected` (in the checkpoint only).
        name: the model's; None for `unexpected`.
        checkpoint_name: the checkpoint's; None for `missing` and `tied`.
        model_shape: sizes in the model.
        checkpoint_shape: sizes in the checkpoint.
        model_dtype: dtype in the model; "" where nothing tells.
        checkpoint_dtype: dtype in the checkpoint.
        reason: `padded`, `transposed`, `reshaped` or `tied`, where one of these explains it; else "".
        note: that in words.
    """

    status: MatchStatus
    name: str | None
    checkpoint_name: str | None
    model_shape: Ints | None
    checkpoint_shape: Ints | None
    model_dtype: str
    checkpoint_dtype: str
    reason: str = ""
    note: str = ""

    @property
    def dtype_differs(self) -> bool:
        """Whether both sides have a dtype, and not the same."""
        return bool(self.model_dtype and self.checkpoint_dtype and self.model_dtype != self.checkpoint_dtype)


@displayed
class MatchGroup(NamedTuple):
    """Rows of one status whose names differ in numbers, or only at their ends.

    Attributes:
        status: that of the rows; `dtype` for rows whose dtypes differ, which may be in another group too.
        names: what they have in common: `blocks.{0..11}.attn.*`.
        keys: how many there are.
        checkpoint: shape, or dtype, in the checkpoint, where all have one.
        model: shape, or dtype, in the model.
        note: what explains it.
    """

    status: str
    names: str
    keys: int
    checkpoint: str
    model: str
    note: str


@displayed
@dataclass(frozen=True)
class Match:
    """Whether a checkpoint's model loads into another, and why not.

    Attributes:
        path: the checkpoint.
        to: what tells the names and shapes that are expected.
        loads: whether every name is there with its shape and none too many, as strict loading demands, without any
            rename; and the checkpoint is not known to be broken. Dtypes do not count: loading converts.
        whole: whether the checkpoint is whole; None where not every file was compared.
        model_names: how many names the model has, of those that were asked for.
        checkpoint_names: how many the checkpoint has.
        same: how many names of the model are there with their shape.
        renamed: how many more are after the renames.
        renames: the rename that fixes most, and those that fix more behind it. Never applied by itself.
        alternatives: renames that fix as many as another one, so that neither was chosen.
        groups: what differs, folded.
        rows: every name.
        fix: every name that the renames change, with what it becomes: `consolidate(map=...)` takes it. Without those
            that an assumed rename changes.
        assumed: every name that an assumed rename changes, with what it becomes.
    """

    path: str
    to: str
    loads: bool
    whole: bool | None
    model_names: int
    checkpoint_names: int
    same: int
    renamed: int
    renames: tuple[Rename, ...]
    alternatives: tuple[Rename, ...]
    groups: Rows[MatchGroup]
    rows: Rows[MatchRow] = field(repr=False)
    fix: Mapping[str, str] = field(default_factory=dict, repr=False)
    assumed: Mapping[str, str] = field(default_factory=dict, repr=False)

    def _told(self) -> str:
        renamed = f", {self.renamed} more after a rename" if self.renamed else ""
        return f"{'loads' if self.loads else 'DOES NOT LOAD'}: {self.same} of {self.model_names} names{renamed}"

    def to_dicts(self) -> list[dict[str, Any]]:
        """A plain dict per name."""
        return self.rows.to_dicts()
