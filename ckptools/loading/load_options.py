"""The options of loading: which checkpoint is opened and how, and how its values become those of the running job."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypedDict

from ckptools.api import functions
from ckptools.consolidate.options import ConsolidateOptions
from ckptools.model.checkpoint import Checkpoint

if TYPE_CHECKING:
    from ckptools.formats.options import Weights
    from ckptools.formats.shared.given_names_and_shapes import NamesFrom, ShapesFrom


class LoadOptions(TypedDict, total=False):
    """Options of `StorageReader`, `load` and `load_state_dict`.

    The first ten are those of `ckptools.open`, which explains them; the others are those of `consolidate`.

    Attributes:
        rename: `OLD=NEW` for a tensor or a module, or `OLD.=NEW.` for a beginning of names.
        map: new names by old ones, or a JSON with these, as `ckptools match --write-map` writes it.
        strip_prefix: a beginning of names to take away.
        like: a Hugging Face `config.json`, or the folder with it: load with the names of that model's state dict.
        assume: with `like`, take what only shapes or a trainer's defaults speak for.
        dequantize: load the values of quantized weights, not their codes.
        allow_missing: load what is there of a checkpoint that is not whole; the other values stay as they are.
        fill: with `allow_missing`, the value of lost elements, `nan` or `zero`.
        prefer_rank: where ranks hold different copies of one tensor, the rank whose copy is loaded.
        unchecked: do not compare what is read with the checksums that the files state.
    """

    follow_symlinks: bool
    jobs: int | None
    shapes: ShapesFrom | None
    weights: Weights
    rules: str | Path | None
    ranks: str | None
    names: NamesFrom | None
    salvage: bool
    step: int | None
    model: str | None
    rename: Sequence[str]
    map: Mapping[str, str] | str | Path | None
    strip_prefix: str | None
    like: str | Path | None
    assume: bool
    dequantize: bool
    allow_missing: bool
    fill: str | None
    prefer_rank: int | None
    unchecked: bool


CHOICES = (
    "rename", "map", "strip_prefix", "like", "assume", "dequantize", "allow_missing", "fill", "prefer_rank", "unchecked"
)  # fmt: skip


def choices_in(options: Mapping[str, Any]) -> ConsolidateOptions:
    """The options that choose values.

    Raises:
        TypeError: there is no such option.
    """
    unknown = options.keys() - LoadOptions.__annotations__.keys()
    if unknown:
        raise TypeError(f"there is no option {min(unknown)!r}")
    rename = options.get("rename", ())
    chosen = {name: options[name] for name in CHOICES if name in options}
    return ConsolidateOptions(**{**chosen, "rename": [rename] if isinstance(rename, str) else rename})


def opened(path: str | Path | Sequence[str | Path], options: Mapping[str, Any]) -> Checkpoint:
    """Open a checkpoint with every rank's structure.

    Raises:
        ReadError: it cannot be read.
        UsageError: options contradict each other.
    """
    given = {name: value for name, value in options.items() if name not in CHOICES}
    return functions.open(path, all_ranks=True, **given)
