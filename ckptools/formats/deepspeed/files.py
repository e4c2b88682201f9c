"""The files of a tag folder: what was read of them, which of them are copies, and the rank of each.

The model-parallel rank in a file's name counts tensor-parallel ranks within pipeline stages, and global ranks count
tensor-parallel ranks first, then those of the ZeRO group, then stages. Source: runtime/pipe/topology.py
(`PipelineParallelGrid`, `PipeModelDataParallelTopology`), checkpoint/reshape_meg_2d.py.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ckptools.errors import ReadError
from ckptools.formats.deepspeed.names import Place, StateName
from ckptools.formats.deepspeed.partition_layout import MAX_WORLD
from ckptools.formats.deepspeed.states import ModelStates, OptimStates
from ckptools.formats.options import Options
from ckptools.formats.rank_search import rank_checks
from ckptools.formats.shared.checkpoint_builder import Fault, looked_at, was_read
from ckptools.model.checkpoint import ModuleOrder, RankFile
from ckptools.model.problems import Code, Problem
from ckptools.pickles.reader import Saved

GROUPED = ModuleOrder(False, "DeepSpeed lists parameters by group, which round robin may have reordered")
"""Its files name the content of the flat groups (`param_shapes`), so no order is needed."""


@dataclass
class Files:
    """The files of a tag folder: what was read, and why others could not be.

    An error in the file that a caller named (`must`) is the caller's.
    """

    folder: Path
    names: list[StateName]
    options: Options
    must: Path
    saved: dict[Path, Saved] = field(default_factory=dict)
    faults: dict[Path, Fault] = field(default_factory=dict)

    def read(self, names: Iterable[StateName]) -> None:
        """Read files, and keep the faults of those that cannot be read.

        Raises:
            ReadError: the file that the caller named cannot be read.
        """
        for name in names:
            if name.path in self.saved or name.path in self.faults:
                continue
            try:
                self.saved[name.path] = self.options.read_file(name.path)
            except ReadError as error:
                if name.path == self.must:
                    raise
                self.faults[name.path] = Fault.of(error, name.path)

    def read_one_of_each(self, part: str) -> None:
        """Read the first readable file of each model-parallel rank; the others of its ZeRO group are like it."""
        read: set[int | None] = set()
        for name in self.of(part):
            if name.mp not in read:
                self.read([name])
                read |= {name.mp} if name.path in self.saved else set()

    def of(self, part: str) -> list[StateName]:
        """The files of one part."""
        return [n for n in self.names if n.part == part]

    def tree(self, name: StateName) -> dict[Any, Any] | None:
        """The dict that a file holds; None when it was not read.

        Raises:
            ReadError: it is no dict.
        """
        if name.path not in self.saved:
            return None
        tree = self.saved[name.path].tree
        if not isinstance(tree, dict):
            raise ReadError(name.path, f"holds a {type(tree).__name__}, expected the dict that DeepSpeed saves")
        return tree

    def models(self) -> dict[Place, ModelStates]:
        """The model states that were read, by `(mp, dp)`.

        Raises:
            ReadError: one is an optimizer states file.
        """
        trees = ((n, self.tree(n)) for n in self.of("model"))
        read = [ModelStates(n.path, *n.place, tree) for n, tree in trees if tree is not None]
        for model in read:
            if "module" not in model.tree and "optimizer_state_dict" in model.tree:
                raise ReadError(model.path, "holds optimizer states and no model; an optimizer's file under this name")
        return {(m.mp, m.dp): m for m in reversed(read)}

    def optims(self) -> dict[Place, OptimStates]:
        """The optimizer states that were read, by `(mp, dp)`.

        Raises:
            ReadError: one is no optimizer states file.
        """
        found = {}
        for name in reversed(self.of("optim")):
            tree = self.tree(name)
            state = tree.get("optimizer_state_dict") if tree is not None else None
            if tree is not None and not isinstance(state, dict):
                raise ReadError(name.path, "has no optimizer_state_dict; not written by ZeRO, or damaged")
            if isinstance(state, dict):
                found[name.place] = OptimStates(name.path, state)
        return dict(sorted(found.items()))

    def status(self, path: Path, rank: int | None, part: str) -> RankFile:
        """The status of a present file; one that was not read is looked at from its end."""
        if path in self.saved:
            return was_read(self.saved[path], rank, part)
        return looked_at(path, rank, part, self.faults, len(self.names))


@dataclass(frozen=True)
class RankLayout:
    """How the ranks are arranged: data-parallel, tensor-parallel, pipeline stages.

    Attributes:
        dp: ranks in a data-parallel group.
        mps: model-parallel ranks: pipeline stages times tensor-parallel ranks.
        tp: ranks over which each weight is cut, beside ZeRO's own cutting.
    """

    dp: int
    mps: int
    tp: int

    @property
    def world(self) -> int:
        """The world size."""
        return self.dp * self.mps

    def of(self, where: Sequence[int]) -> int:
        """The global rank of a place that begins with a model-parallel rank and a data-parallel rank."""
        mp, dp = where[:2]
        stage, slice_ = divmod(mp, self.tp)
        return (stage * self.dp + dp) * self.tp + slice_


def model_parallel(files: Files, models: Mapping[Place, ModelStates]) -> tuple[int, int]:
    """`(mps, tp)`, the model-parallel and tensor-parallel sizes: as the files state, or as many as there are."""
    found = [n.mp for n in (*files.of("model"), *files.of("optim")) if n.mp is not None]
    stated = [model.number("mp_world_size") or 1 for model in models.values()]
    mps = min(max([*found, *(n - 1 for n in stated)]) + 1, MAX_WORLD)
    base = models[min(models)]
    dims = base.tree.get("checkpoint_parallel_dimensions")
    degree = dims.get("tp_degree") if isinstance(dims, dict) else None
    layers = files.of("layer")
    if layers or base.module is None:
        degree = max(len({n.axes for n in layers}), degree if type(degree) is int else 1)
    elif type(degree) is not int:
        # Without a pipeline, several model-parallel ranks can be nothing else.
        degree = mps
    return mps, max(1, min(degree, MAX_WORLD))


def list_files(
    files: Files, ranks: RankLayout, worlds: Mapping[int, int], sharded: bool, zero: str | None
) -> Iterator[RankFile]:
    """Every file, found or missing.

    `worlds` are the numbers of ranks that each model-parallel rank's parameters are cut over; if they are `sharded`
    (ZeRO-3), every rank has model states of its own. `zero` is the prefix of optimizer states, None without ZeRO.
    """
    for name in files.names:
        if name.part in ("model", "optim"):
            yield files.status(name.path, ranks.of(name.place), name.part)
        else:
            yield files.status(name.path, None, name.path.name.partition("-model_st")[0])
    here = {(name.part, *name.place) for name in files.names}
    for mp, world in worlds.items():
        for dp in range(min(world, MAX_WORLD)):
            own = f"zero_pp_rank_{dp}_mp_rank_{mp:02d}"
            expected = {"optim": f"{zero}{own}_optim_states.pt"} if zero is not None else {}
            if sharded or dp == 0:
                expected = {"model": f"{own if sharded else f'mp_rank_{mp:02d}'}_model_states.pt", **expected}
            for part, missing in expected.items():
                if (part, mp, dp) not in here:
                    yield RankFile(files.folder / missing, ranks.of((mp, dp)), part, "missing", 0, None)


def leftover_files(files: Files, ranks: RankLayout, worlds: Mapping[int, int], base: ModelStates) -> Iterator[Problem]:
    """Files of more ranks than those of the save, which are left from another one.

    The parameters are cut over `worlds`. Without a pipeline, `base` states the number of model-parallel ranks.
    """
    stated = base.number("mp_world_size") if base.module is not None else None
    for name in (*files.of("model"), *files.of("optim")):
        if stated and name.place[0] >= stated:
            text = f"{name.path.name} is model-parallel rank {name.place[0]} of {stated} (mp_world_size)"
            yield Problem(Code.STRAY_FILE, text, ranks.of(name.place))
    for name in files.of("optim"):
        mp, dp = name.place
        world = worlds.get(mp, 0)
        if world <= dp < ranks.dp:
            text = f"{name.path.name} is rank {dp} of a group of {world}"
            yield Problem(Code.STRAY_FILE, text, ranks.of((mp, dp)))


def expected_bytes(files: Iterable[RankFile]) -> int:
    """Bytes of all files, if every missing or cut one were as large as the others of its part."""
    by_part: dict[str, list[RankFile]] = {}
    for file in files:
        by_part.setdefault(file.part, []).append(file)
    return sum(rank_checks.expected_bytes(of_part) or 0 for of_part in by_part.values())
