"""Options that every format accepts when it opens a checkpoint."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from ckptools.files.opening import check_stays_inside
from ckptools.model.facts import GivenNames
from ckptools.model.provenance import Said
from ckptools.pickles.reader import Saved
from ckptools.training_state import modules

if TYPE_CHECKING:
    from ckptools.formats.shared.given_names_and_shapes import Shapes

Reader = Callable[[Path], Saved]
OnFile = Callable[[Path], None]
Weights = Literal["fp32", "module"]

MAX_RANKS = 64
"""Up to this many ranks, every file is read by default; results never depend on a clock."""

MAX_STRUCTURE = 64 << 20
"""Up to this many bytes of structure, every file is read by default."""

TAKEN_BY = {
    "rules": ("megatron", "meta_llama", "model_parts", "rank_files"),
    "weights": ("deepspeed", "megatron", "megatron_dist"),
}
"""Options that have an effect only for some formats."""


def is_small(ranks: int, nbytes: int) -> bool:
    """Whether there are few enough ranks, with little enough structure, to read all by default."""
    return ranks <= MAX_RANKS and nbytes <= MAX_STRUCTURE


def _not_ahead(paths: Sequence[Path]) -> None:
    """Do not read ahead."""


@dataclass(frozen=True)
class Options:
    """The options for opening a checkpoint.

    Attributes:
        all_ranks: read every rank's structure, not only that of the named file.
        every_item: with all ranks, read each item of a file that lists the items elsewhere (DCP), however many.
        only_this_file: do not look for siblings.
        follow_symlinks: accept siblings that are links out of the folder.
        read_file: reads one torch.save file; the inert reader by default.
        read_ahead: called with the files that will be read, in order, if there may be many.
        jobs: processes that read rank files; None for the number of cores, if there is work for them.
        on_file: called for each torch.save file that has been read, to report progress for example.
        shapes: the shapes of parameters that the checkpoint itself lacks.
        weights: if a checkpoint has the model twice (DeepSpeed, Megatron): `fp32` for the optimizer's master copy if it
            has one, `module` for the weights of the forward pass.
        names: names for an optimizer that is keyed by number.
        model: the model that commands look at: the name of its section, its role, or `all`; None for the trained one.
        said: receives the provenance record of each file that was read.
        rules: a JSON file with the dimension along which each tensor-parallel weight is joined.
        files: rank files that the caller gave one by one, which are the checkpoint; empty to look for siblings.
        ranks: names of the rank files of a folder, such as `model-{rank}-of-{world}.pt`.
    """

    all_ranks: bool = False
    only_this_file: bool = False
    follow_symlinks: bool = False
    read_file: Reader = modules.read_file
    read_ahead: Callable[[Sequence[Path]], None] = _not_ahead
    jobs: int | None = None
    on_file: OnFile | None = None
    shapes: Shapes | None = None
    weights: Weights = "fp32"
    rules: Path | None = None
    files: tuple[Path, ...] = ()
    ranks: str | None = None
    names: GivenNames | None = None
    every_item: bool = True
    model: str | None = None
    said: dict[Path, Said] = field(default_factory=dict, repr=False, compare=False)

    def check_link(self, path: Path, folder: Path) -> None:
        """Refuse a link at `path` that leads out of `folder`, unless links are to be followed.

        Raises:
            UnsafePathError: it leads out.
        """
        if not self.follow_symlinks:
            check_stays_inside(path, folder)

    @property
    def looks_around(self) -> bool:
        """Whether siblings are searched: the caller neither gave them nor excluded them."""
        return not (self.only_this_file or self.files or self.ranks)
