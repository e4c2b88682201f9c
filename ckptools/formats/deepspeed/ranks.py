"""How many ranks wrote a DeepSpeed checkpoint, which rank each file is, and which files must be there.

The model-parallel rank in a file's name counts tensor-parallel ranks within pipeline stages, and global ranks count
tensor-parallel ranks first, then those of the ZeRO group, then stages. Source: runtime/pipe/topology.py
(`PipelineParallelGrid`, `PipeModelDataParallelTopology`), checkpoint/reshape_meg_2d.py.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from ckptools.formats.deepspeed.files import Files
from ckptools.formats.deepspeed.partition_layout import MAX_WORLD
from ckptools.formats.deepspeed.states import ModelStates
from ckptools.model.checkpoint import RankFile
from ckptools.model.problems import Code, Problem


@dataclass(frozen=True)
class Ranks:
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

    @property
    def stages(self) -> int:
        """Number of pipeline stages."""
        return max(1, self.mps // self.tp)

    def of(self, mp: int, dp: int) -> int:
        """The global rank of a model-parallel rank `mp` and a data-parallel rank `dp`."""
        stage, slice_ = divmod(mp, self.tp)
        return (stage * self.dp + dp) * self.tp + slice_


def model_parallel(files: Files, models: Mapping[tuple[int, int], ModelStates]) -> tuple[int, int]:
    """`(mps, tp)`, the model-parallel and tensor-parallel sizes: what the files state, or as many as there are."""
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
        # Without a pipeline nothing else is left that several model-parallel ranks could be.
        degree = mps
    return mps, max(1, min(degree, MAX_WORLD))


def list_files(
    files: Files, ranks: Ranks, worlds: Mapping[int, int], sharded: bool, zero: str | None
) -> Iterator[RankFile]:
    """Every file, found or missing.

    Args:
        files: those that are there.
        ranks: how the ranks are arranged.
        worlds: how many ranks each model-parallel rank's parameters are cut over.
        sharded: whether every rank has model states of its own (ZeRO-3).
        zero: what the names of optimizer states begin with; None without ZeRO.
    """
    parts: set[tuple[str, int, int]] = set()
    for name in files.names:
        by_rank = name.part in ("model", "optim")
        rank = ranks.of(name.mp or 0, name.dp or 0) if by_rank else None
        parts.add((name.part, name.mp or 0, name.dp or 0))
        yield files.status(name.path, rank, name.part if by_rank else name.path.name.partition("-model_st")[0])
    for part, mp, dp, name_ in _expected(worlds, sharded, zero):
        if (part, mp, dp) not in parts:
            yield RankFile(files.folder / name_, ranks.of(mp, dp), part, "missing", 0, None)


def leftover_files(files: Files, ranks: Ranks, worlds: Mapping[int, int]) -> Iterator[Problem]:
    """Optimizer states of more ranks than the parameters are cut over, which are left from another save.

    Args:
        files: those that are there.
        ranks: how the ranks are arranged.
        worlds: how many ranks each model-parallel rank's parameters are cut over.
    """
    for name in files.of("optim"):
        mp, dp, world = name.mp or 0, name.dp or 0, worlds.get(name.mp or 0, 0)
        if world <= dp < ranks.dp:
            text = f"{name.path.name} is rank {dp} of a group of {world}"
            yield Problem(Code.STRAY_FILE, text, ranks.of(mp, dp))


def _expected(worlds: Mapping[int, int], sharded: bool, zero: str | None) -> Iterator[tuple[str, int, int, str]]:
    """`(part, mp, dp, name)` of the files that must be there."""
    for mp, world in worlds.items():
        for dp in range(min(world, MAX_WORLD)):
            place = f"zero_pp_rank_{dp}_mp_rank_{mp:02d}"
            if sharded:
                yield "model", mp, dp, f"{place}_model_states.pt"
            elif dp == 0:
                yield "model", mp, dp, f"mp_rank_{mp:02d}_model_states.pt"
            if zero is not None:
                yield "optim", mp, dp, f"{zero}{place}_optim_states.pt"


def expected_bytes(files: tuple[RankFile, ...]) -> int | None:
    """Bytes of all files, if every missing or cut one were as large as the others of its part."""
    sizes: dict[str, list[int]] = {}
    for file in files:
        if file.is_here:
            sizes.setdefault(file.part, []).append(file.nbytes)
    absent = (sorted(sizes[f.part]) for f in files if not f.is_here and f.part in sizes)
    return sum(map(sum, sizes.values())) + sum(of_part[len(of_part) // 2] for of_part in absent)
