"""The folders of a Megatron run: its tracker and iterations, and the grid of model-parallel ranks in an iteration.

`<save>/latest_checkpointed_iteration.txt` contains a plain number or the word `release`; the checkpoint is then
`<save>/iter_{number:07d}` or `<save>/release`. Source: megatron/training/checkpointing.py (`get_checkpoint_name`,
`read_metadata`), the same since v1.0.

`mp_rank_{tensor:02d}`, with `_{pipeline:03d}` when there is a pipeline and `_{expert:03d}` when there are expert ranks;
so a second number alone is the pipeline's, or the experts' if the arguments state that there is no pipeline. Only
data-parallel rank 0 of each writes. Global ranks count tensor, context, expert, data, pipeline, the first fastest.
Source: megatron/training/checkpointing.py (`get_checkpoint_name`), megatron/core/parallel_state.py (`order`).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from ckptools.errors import ReadError
from ckptools.files.opening import check_stays_inside, reading
from ckptools.formats.shared.several_checkpoints import ASTRAY, several, text_of
from ckptools.model.facts import FILES_FOUND, Fact
from ckptools.model.problems import Code, Problem
from ckptools.model.records import grouped
from ckptools.model.regions import Ints
from ckptools.model.tree import Opaque, describe_for_error
from ckptools.rules.files import FileClaims

FOLDER = re.compile(r"mp_rank_(\d{2,7})(?:_(\d{3,7}))?(?:_(\d{3,7}))?")
MODEL_FILES = ("model_optim_rng.pt", "model_rng.pt")
OPTIMIZER_FILES = ("distrib_optim.pt", "optim.pt")
"""Files of the distributed optimizer; `optim.pt` and `model_rng.pt` are core 0.2's names."""

MAX_RANKS = 1 << 16
"""At most this many model-parallel ranks are accepted; no cluster has more."""


class RankFolder(NamedTuple):
    """The folder of one model-parallel rank: its model file, the numbers in its name, its optimizer files."""

    path: Path
    numbers: Ints
    optimizer: tuple[Path, ...] = ()

    @property
    def name(self) -> str:
        """The folder's name, for people."""
        return self.path.parent.name


class Coordinates(NamedTuple):
    """The pipeline stage, expert- and tensor-parallel rank of a file, in the order of the model's pieces."""

    pp: int
    ep: int
    tp: int

    def by_axis(self) -> dict[str, int]:
        """The coordinates by the name of their axis."""
        return dict(zip(("pipeline stage", "expert-parallel rank", "tensor-parallel rank"), self, strict=True))


class Grid(NamedTuple):
    """The tensor-, pipeline-, expert- and context-parallel sizes of a run.

    Attributes:
        world: number of ranks of the run, and its sources.
        stage: difference in global rank between two stages.
        pipelined: whether a second number in a folder's name is a stage.
        etp: ranks over which each expert is cut; all other weights are cut over `tp`.
    """

    tp: int
    pp: int
    ep: int
    world: Fact
    cp: int
    stage: int
    pipelined: bool
    etp: int

    @property
    def size(self) -> int:
        """Number of model-parallel ranks."""
        return max(self.tp, self.etp) * self.pp * self.ep

    def place(self, member: RankFolder) -> Coordinates:
        """The coordinates in the name of a rank's folder."""
        tp, *rest = member.numbers
        if len(rest) == 2:
            return Coordinates(rest[0], rest[1], tp)
        only = rest[0] if rest else 0
        return Coordinates(only, 0, tp) if self.pipelined else Coordinates(0, only, tp)

    def rank(self, at: Coordinates) -> int:
        """The lowest global rank at some coordinates, which wrote the file."""
        if self.etp != self.tp:
            starts = ((k * self.ep + at.ep) * self.etp for k in range(self.tp))
            here = (start + (at.tp - start) % self.tp for start in starts if (at.tp - start) % self.tp < self.etp)
            return next(here, at.tp) + self.stage * at.pp
        return at.tp + self.tp * self.cp * at.ep + self.stage * at.pp

    def folder(self, at: Coordinates) -> str:
        """The name of a rank's folder."""
        stage = f"_{at.pp:03d}" if self.pipelined else ""
        return f"mp_rank_{at.tp:02d}{stage}" + (f"_{at.ep:03d}" if self.ep > 1 else "")

    @property
    def sizes(self) -> str:
        """The sizes in words."""
        return f"tensor parallel {self.tp} x pipeline {self.pp}" + (f" x expert {self.ep}" if self.ep > 1 else "")

    def every(self) -> list[Coordinates]:
        """The coordinates of every model-parallel rank that writes a file.

        If experts are cut over other ranks, not every pair of tensor- and expert-parallel rank writes: only those that
        are first in their expert-data-parallel group. A slice of other weights that none of them has is lost.
        """
        if self.etp != self.tp:
            ranks = range(max(self.etp * self.ep, self.tp))
            here = (Coordinates(p, r // self.etp % self.ep, r % self.tp) for p in range(self.pp) for r in ranks)
            return list(dict.fromkeys(here))
        return [Coordinates(p, e, t) for p in range(self.pp) for e in range(self.ep) for t in range(self.tp)]


def rank_folders(folder: Path, follow_symlinks: bool) -> list[RankFolder]:
    """The folders of model-parallel ranks with a model, in the order of their names.

    Raises:
        UnsafePathError: one of them, or its file, is a link out of the checkpoint.
    """
    found = list(_rank_folders(folder))
    for member in () if follow_symlinks else found:
        for path in (member.path.parent, member.path, *member.optimizer):
            check_stays_inside(path, folder)
    return found


def holds_rank_folders(folder: Path) -> bool:
    """Whether a folder contains folders of model-parallel ranks."""
    return next(_rank_folders(folder), None) is not None


def _rank_folders(folder: Path) -> Iterator[RankFolder]:
    with reading(folder):
        named = [(e, m) for e in sorted(folder.iterdir()) if (m := FOLDER.fullmatch(e.name)) and e.is_dir()]
    for entry, match in named:
        model = next((entry / name for name in MODEL_FILES if (entry / name).is_file()), None)
        if model is not None:
            optimizer = tuple(entry / name for name in OPTIMIZER_FILES if (entry / name).is_file())
            yield RankFolder(model, tuple(int(n) for n in match.groups() if n is not None), optimizer)


def arguments(tree: Any) -> Mapping[str, Any]:
    """The saved command line: an `argparse.Namespace`, or a converter's replacement for it."""
    args = tree.get("args") if isinstance(tree, Mapping) else None
    state = args.state if isinstance(args, Opaque) else args
    return state if isinstance(state, Mapping) else {}


def setting(args: Mapping[str, Any], *names: str) -> int | None:
    """The first positive number among some saved arguments, or None."""
    values = (args.get(name) for name in names)
    return next((v for v in values if type(v) is int and 0 < v < 1 << 31), None)


def grid_of(args: Mapping[str, Any], found: Sequence[RankFolder]) -> Grid:
    """The grid of the saved arguments, else of the folders' names."""
    pipeline = setting(args, "pipeline_model_parallel_size")
    pipelined = pipeline > 1 if pipeline else any(len(m.numbers) > 1 for m in found)
    tp = setting(args, "tensor_model_parallel_size", "model_parallel_size") or 1 + max(m.numbers[0] for m in found)
    pp = pipeline or (1 + max(m.numbers[1] if len(m.numbers) > 1 else 0 for m in found) if pipelined else 1)
    experts = [m.numbers[-1] for m in found if len(m.numbers) > 1 + pipelined]
    # A name contains the expert-parallel rank only if there are several.
    ep = (setting(args, "expert_model_parallel_size") or max(2, 1 + max(experts))) if experts else 1
    cp = setting(args, "context_parallel_size") or 1
    world = _world(args, tp * pp, ep, cp)
    apart = world.value // pp if world.value and not args.get("use_tp_pp_dp_mapping") else 0
    etp = setting(args, "expert_tensor_parallel_size")
    return Grid(tp, pp, ep, world, cp, max(apart, tp * cp * ep), pipelined, min(etp or tp, MAX_RANKS))


def _world(args: Mapping[str, Any], model_parallel: int, experts: int, contexts: int) -> Fact:
    least = model_parallel * experts
    stated, data = setting(args, "world_size"), setting(args, "data_parallel_size")
    if stated and stated >= least:
        return Fact(stated, ("args.world_size",))
    if data and model_parallel * contexts * data >= least:
        return Fact(model_parallel * contexts * data, ("args.data_parallel_size",))
    return Fact(least, (FILES_FOUND,))


SAME = (
    "tensor_model_parallel_size", "model_parallel_size", "pipeline_model_parallel_size", "expert_model_parallel_size",
    "num_layers", "hidden_size", "padded_vocab_size",
)  # fmt: skip


def check_arguments(grid: Grid, args: Mapping[Coordinates, Mapping[str, Any]]) -> Iterator[Problem]:
    """Find files whose arguments are from another run."""
    first = next(iter(args.values()), {})
    for at, own in args.items():
        odd = next((name for name in SAME if setting(own, name) != setting(first, name)), None)
        if odd is not None:
            text = f"{grid.folder(at)}: args.{odd} is {setting(own, odd)}, the first file's is {setting(first, odd)}"
            yield Problem(Code.WORLD_SIZES_DISAGREE, f"{text}; the files are not of one run", grid.rank(at))


def claims_of(
    grid: Grid, found: Iterable[RankFolder], args: Mapping[Coordinates, Mapping[str, Any]]
) -> Iterator[FileClaims]:
    """The places of files by their folders' names, and by their arguments, which state the rank that wrote each.

    A converter writes every file from one process, so equal ranks prove nothing.
    """
    ranks = {at: rank for at, own in args.items() if type(rank := own.get("rank")) is int}
    alike = grouped(ranks, lambda at: (ranks[at] // grid.etp % grid.ep if grid.cp == 1 else at.ep, ranks[at] % grid.tp))
    by_args: dict[Coordinates, Coordinates] = {}
    for (ep, tp), places in alike.items() if 1 < len(set(ranks.values())) == len(args) else ():
        # In any order of ranks, the ranks of a later stage have higher numbers.
        by_rank = zip(sorted(places, key=ranks.__getitem__), sorted(at.pp for at in places), strict=True)
        by_args |= {at: Coordinates(pp, ep, tp) for at, pp in by_rank}
    for member in found:
        at = grid.place(member)
        stated, by = (by_args[at].by_axis(), f"args.rank {ranks[at]}") if at in by_args else ({}, "")
        yield FileClaims(member.path, grid.rank(at), at.by_axis(), stated, by, name=member.name)


# -- the run: its tracker and iterations -------------------------------------------------------------------------------

TRACKER = "latest_checkpointed_iteration.txt"
ITERATION = re.compile(r"iter_\d{1,12}")

Holds = Callable[[Path], bool]
"""Tests whether a folder holds one checkpoint of some format."""


def looks_like_run(path: Path, holds: Holds) -> bool:
    """Whether `path`, or the folder that its tracker names, or one of its iteration folders holds a checkpoint."""
    named = None
    if (path / TRACKER).is_file():
        with suppress(ReadError):
            named = _iteration(path, _tracker_text(path, follow_symlinks=False))
    return holds(path) or any(map(holds, [named] if named and named.is_dir() else _iterations(path)))


def find_iteration(path: Path, holds: Holds, follow_symlinks: bool) -> Path:
    """Find the checkpoint's own folder from the folder of a run, or that folder itself.

    Raises:
        ReadError: the tracker names no iteration, or a missing one.
        UsageError: there is no tracker and the run has several iterations.
        UnsafePathError: the folder is a link out of the run's.
    """
    if holds(path):
        return path
    if (path / TRACKER).is_file():
        text = _tracker_text(path, follow_symlinks)
        found = _iteration(path, text)
        if found is None:
            raise ReadError(path / TRACKER, f"holds {describe_for_error(text)}; expected a plain number or release")
        if not found.is_dir():
            why = f"names {found.name}, which is not here ({ASTRAY}); open one of the folders beside it"
            raise ReadError(path / TRACKER, why)
    else:
        here = [folder for folder in _iterations(path) if holds(folder)]
        if len(here) != 1:
            raise several(path, here, f" and no {TRACKER}")
        found = here[0]
    if not follow_symlinks:
        check_stays_inside(found, path)
    if not holds(found):
        text = f"{TRACKER} names {found.name}, which holds no such checkpoint ({ASTRAY}); open one of its folders"
        raise ReadError(path, text)
    return found


def _tracker_text(path: Path, follow_symlinks: bool) -> str:
    if not follow_symlinks:
        check_stays_inside(path / TRACKER, path)
    return text_of(path / TRACKER)


def _iteration(path: Path, text: str) -> Path | None:
    if text == "release":
        return path / "release"
    return path / f"iter_{int(text):07d}" if re.fullmatch(r"[0-9]{1,12}", text) else None


def _iterations(path: Path) -> list[Path]:
    with reading(path):
        entries = sorted(path.iterdir())
    return [e for e in entries if (ITERATION.fullmatch(e.name) or e.name == "release") and e.is_dir()]
