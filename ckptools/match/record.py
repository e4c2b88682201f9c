"""The record of `match`: the names and shapes that a model expects, and the renames that would provide them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from ckptools.keys.rename_rules import Rename
from ckptools.model.records import Rows, displayed
from ckptools.model.regions import Ints

MatchStatus = Literal["same", "renamed", "converted", "tied", "shape", "unknown", "missing", "unexpected", "ignored"]


@displayed
class MatchRow(NamedTuple):
    """One name of the model, or of the checkpoint if the model has no counterpart.

    Attributes:
        status: `same` (name and shape), `renamed` (the same after the renames), `converted` (made of other names while
            transformers loads), `tied` (absent, but its values come with another name), `shape` (differs), `unknown`
            (unknown shape, or it cannot be loaded), `missing` (in the model only), `unexpected` (in the checkpoint
            only), `ignored` (in the checkpoint only, and transformers leaves it out).
        checkpoint_name: None for `missing` and `tied`, and for `converted` of several names; as `name`, the model's,
            for `unexpected` and `ignored`.
        model_shape: sizes in the model; None if unknown, as in the checkpoint.
        model_dtype: dtype in the model; "" if unknown.
        reason: `padded`, `slices`, `transposed`, `reshaped`, `tied` or `quantized` where one explains it; else "".
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
        both = self.model_dtype and self.checkpoint_dtype and self.reason != "quantized"
        return bool(both and self.model_dtype != self.checkpoint_dtype)


@displayed
class MatchGroup(NamedTuple):
    """Rows of one status whose names differ in numbers, or only at their ends.

    Attributes:
        status: that of the rows; `dtype` for rows whose dtypes differ, which may be in another group too.
        names: their common pattern: `blocks.{0..11}.attn.*`.
        checkpoint: shape, or dtype, in the checkpoint, if all have the same; as `model`.
    """

    status: str
    names: str
    keys: int
    checkpoint: str
    model: str
    note: str


ResumeVerdict = Literal["fits", "DOES NOT FIT", "worth a look", "not known"]


@displayed
class ResumeRow(NamedTuple):
    """One question of resuming, and its answer.

    Attributes:
        what: `dtypes`, `optimizer groups`, `optimizer state`, `ranks`, `rng torch`, `torch` and the like.
        verdict: `worth a look` loads, and something is not as it was.
        next: a command, without its checkpoint, or an option that helps; "" for none.
    """

    what: str
    verdict: ResumeVerdict
    detail: str
    next: str = ""


@displayed
@dataclass(frozen=True)
class Match:
    """Whether a checkpoint's model loads into another, and why not.

    Attributes:
        to: the source of the expected names and shapes.
        loads: whether every name is there with its shape and there are no others, as strict loading demands, without
            any rename; and the checkpoint is not known to be broken. Dtypes do not count: loading converts.
        whole: whether the checkpoint is whole; None if not every file was compared.
        same: number of names of the model that are there with their shape.
        renamed: number of further names after the renames.
        renames: the rename that fixes most, and those that fix more after it. Never applied by itself.
        alternatives: renames that fix the same number of names, so that none was chosen.
        fix: every name that the renames change, with its new name, for `consolidate(map=...)`. Without those that an
            assumed rename changes.
        assumed: every name that an assumed rename changes, with its new name.
        resume: what a run needs besides its model; empty if that was not asked for, and torch can read the files.
        converted: number of names of the model that transformers makes of other names while it loads.
        while_loading: what transformers does then; "" if it takes the tensors as they are, or they are compared as
            `load_state_dict` takes them and `from_pretrained` would not load them either.
        apart: how the tensors differ from those that `load_state_dict` wants, where `from_pretrained` converts them.
        like: the config of which `consolidate --like` writes them so.
        not_compared: what was not looked at, in a sentence each.
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
    resume: Rows[ResumeRow] = field(default_factory=Rows)
    converted: int = 0
    while_loading: str = ""
    apart: str = ""
    like: str = ""
    not_compared: tuple[str, ...] = ()

    @property
    def resumes(self) -> bool:
        """Whether the model loads, and nothing that was asked for besides stands in the way."""
        return self.loads and all(row.verdict in ("fits", "worth a look") for row in self.resume)

    @property
    def found(self) -> str:
        """How many names are there, and what transformers does to have the others."""
        facts = [f"{self.same} of {self.model_names} names of the model are there with their shape"]
        if self.apart:
            way = "from_pretrained converts them, Trainer's resume does not"
            return f"with load_state_dict: {facts[0]}; {self.apart}; {way}"
        return "; ".join([*facts, *([self.while_loading] if self.while_loading else [])])

    def _summary(self) -> str:
        renamed = f", {self.renamed} more after a rename" if self.renamed else ""
        return f"{'loads' if self.loads else 'DOES NOT LOAD'}: {self.same} of {self.model_names} names{renamed}"

    def to_dicts(self) -> list[dict[str, Any]]:
        """A plain dict per name."""
        return self.rows.to_dicts()
