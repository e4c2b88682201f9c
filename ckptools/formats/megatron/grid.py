"""The model-parallel ranks of a Megatron checkpoint: their folders, and what the saved arguments say of them.

`mp_rank_{tensor:02d}`, with `_{pipeline:03d}` when there is a pipeline and `_{expert:03d}` when there are expert ranks;
so a second number alone is the pipeline's, or the experts' where the arguments say that there is no pipeline. Only
data-parallel rank 0 of each writes. Global ranks count tensor, context, expert, data, pipeline, the first fastest.
Source: megatron/training/checkpointing.py (`get_checkpoint_name`), megatron/core/parallel_state.py (`order`).
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ckptools.files.location import check_stays_inside
from ckptools.files.opening import reading
from ckptools.model.checkpoint import Fact
from ckptools.model.regions import Ints
from ckptools.model.values import Opaque

FOLDER = re.compile(r"mp_rank_(\d{2,7})(?:_(\d{3,7}))?(?:_(\d{3,7}))?")
MODEL_FILES = ("model_optim_rng.pt", "model_rng.pt")
OPTIMIZER_FILES = ("distrib_optim.pt", "optim.pt")
"""Of the distributed optimizer; `optim.pt` and `model_rng.pt` are core 0.2's names."""

MAX_RANKS = 1 << 16
"""Model-parallel ranks; arguments that tell of more are not from any cluster there is."""


@dataclass(frozen=True)
class RankFolder:
    """The folder of one model-parallel rank.

    Attributes:
        path: its file with the model.
        numbers: the numbers in its name.
        optimizer: files with the state of the distributed optimizer.
    """

    path: Path
    numbers: Ints
    optimizer: tuple[Path, ...] = ()

    @property
    def name(self) -> str:
        """The folder's name, for people."""
        return self.path.parent.name


@dataclass(frozen=True, order=True)
class Coordinates:
    """The coordinates of a model-parallel rank, ordered as the pieces of the model are.

    Attributes:
        pp: pipeline stage.
        ep: expert-parallel rank.
        tp: tensor-parallel rank.
    """

    pp: int
    ep: int
    tp: int


@dataclass(frozen=True)
class Grid:
    """The sizes of the model-parallel grid.

    Attributes:
        tp: tensor-parallel size.
        pp: pipeline stages.
        ep: expert-parallel size.
        world: ranks of the run, and what says so.
        cp: context-parallel size.
        stage: how far apart in global rank two stages are.
        pipelined: whether a second number in a folder's name is a stage.
    """

    tp: int
    pp: int
    ep: int
    world: Fact
    cp: int
    stage: int
    pipelined: bool

    @property
    def size(self) -> int:
        """Number of model-parallel ranks."""
        return self.tp * self.pp * self.ep

    def place(self, member: RankFolder) -> Coordinates:
        """The coordinates that the name of a rank's folder says."""
        tp, *rest = member.numbers
        if len(rest) == 2:
            return Coordinates(rest[0], rest[1], tp)
        only = rest[0] if rest else 0
        return Coordinates(only, 0, tp) if self.pipelined else Coordinates(0, only, tp)

    def rank(self, at: Coordinates) -> int:
        """The lowest global rank at some coordinates, which wrote the file."""
        return at.tp + self.tp * self.cp * at.ep + self.stage * at.pp

    def folder(self, at: Coordinates) -> str:
        """The name of a rank's folder."""
        stage = f"_{at.pp:03d}" if self.pipelined else ""
        return f"mp_rank_{at.tp:02d}{stage}" + (f"_{at.ep:03d}" if self.ep > 1 else "")

    def every(self) -> list[Coordinates]:
        """The coordinates of every model-parallel rank."""
        return [Coordinates(p, e, t) for p in range(self.pp) for e in range(self.ep) for t in range(self.tp)]


def rank_folders(folder: Path, follow_symlinks: bool = False) -> list[RankFolder]:
    """The folders of model-parallel ranks that hold a model, in the order of their names.

    Raises:
        UnsafePathError: one of them, or its file, is a link out of the checkpoint.
    """
    with reading(folder):
        named = [(e, m) for e in sorted(folder.iterdir()) if (m := FOLDER.fullmatch(e.name)) and e.is_dir()]
    found: list[RankFolder] = []
    for entry, match in named:
        numbers = tuple(int(n) for n in match.groups() if n is not None)
        model = next((entry / name for name in MODEL_FILES if (entry / name).is_file()), None)
        if model is None:
            continue
        optimizer = tuple(entry / name for name in OPTIMIZER_FILES if (entry / name).is_file())
        for path in () if follow_symlinks else (entry, model, *optimizer):
            check_stays_inside(path, folder)
        found.append(RankFolder(model, numbers, optimizer))
    return found


def holds_rank_folders(folder: Path) -> bool:
    """Whether a folder holds folders of model-parallel ranks."""
    with reading(folder):
        entries = [e for e in folder.iterdir() if FOLDER.fullmatch(e.name) and e.is_dir()]
    return any((e / name).is_file() for e in entries for name in MODEL_FILES)


def arguments(tree: Any) -> Mapping[str, Any]:
    """The saved command line: an `argparse.Namespace`, or what a converter put in its place."""
    args = tree.get("args") if isinstance(tree, Mapping) else None
    state = args.state if isinstance(args, Opaque) else args
    return state if isinstance(state, Mapping) else {}


def setting(args: Mapping[str, Any], *names: str) -> int | None:
    """The first of some saved arguments that is a positive number; None where none is."""
    values = (args.get(name) for name in names)
    return next((v for v in values if type(v) is int and 0 < v < 1 << 31), None)


def grid_of(args: Mapping[str, Any], found: Sequence[RankFolder]) -> Grid:
    """The grid that the saved arguments tell; that of the folders' names where they tell none."""
    pipeline = setting(args, "pipeline_model_parallel_size")
    pipelined = pipeline > 1 if pipeline else any(len(m.numbers) > 1 for m in found)
    tp = setting(args, "tensor_model_parallel_size", "model_parallel_size") or 1 + max(m.numbers[0] for m in found)
    pp = pipeline or (1 + max(m.numbers[1] if len(m.numbers) > 1 else 0 for m in found) if pipelined else 1)
    experts = [m.numbers[-1] for m in found if len(m.numbers) > 1 + pipelined]
    ep = (setting(args, "expert_model_parallel_size") or 1 + max(experts)) if experts else 1
    cp = setting(args, "context_parallel_size") or 1
    world = _world(args, tp * pp, ep, cp)
    apart = world.value // pp if world.value and not args.get("use_tp_pp_dp_mapping") else 0
    return Grid(tp, pp, ep, world, cp, max(apart, tp * cp * ep), pipelined)


def _world(args: Mapping[str, Any], model_parallel: int, experts: int, contexts: int) -> Fact:
    least = model_parallel * experts
    stated, data = setting(args, "world_size"), setting(args, "data_parallel_size")
    if stated and stated >= least:
        return Fact(stated, ("args.world_size",))
    if data and model_parallel * contexts * data >= least:
        return Fact(model_parallel * contexts * data, ("args.data_parallel_size",))
    return Fact(least, ("files found",))
