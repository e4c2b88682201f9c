"""Checkpoints made by hand, for views: no file is opened."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection
from pathlib import Path
from typing import Any

from ckptools.model.checkpoint import Checkpoint
from ckptools.model.facts import Fact, RankFile, ReadCost
from ckptools.model.problems import Code, Problem
from ckptools.model.regions import Box, contiguous_strides
from ckptools.model.shards import Shard, Source
from ckptools.model.tensor import Tensor
from ckptools.model.tree import Opaque
from ckptools.rules import with_problems
from ckptools.training_state.optimizers import AS_SAVED
from ckptools.training_state.sections import find_sections
from ckptools.training_state.steps import find_step

RUN = Path("/ckpt/run7")
SAVED = 1763602927.0
"""2025-11-20 01:42:07 UTC."""


def source(shape: tuple[int, ...], dtype: str, record: str, path: Path = RUN / "ep0-ba12000-rank0.pt") -> Source:
    return Source(path, 64, dtype, shape, contiguous_strides(shape), f"data/{record}", (64, 4))


def plain(*shape: int, dtype: str = "float32", record: str = "0", rank: int | None = 0) -> Tensor:
    """A tensor that one file holds whole."""
    return Tensor(shape, dtype, (Shard(Box.whole(shape), rank, source(shape, dtype, record)),))


def sharded(
    *shape: int, ranks: int = 4, dtype: str = "float32", record: str = "0", read: Collection[int] = (0,)
) -> Tensor:
    """A ShardedTensor cut along dim 0 as torch cuts it, seen from the ranks that were `read`."""
    step = -(-shape[0] // ranks)
    shards = []
    for rank, first in enumerate(range(0, shape[0], step)):
        box = Box((first, *(0 for _ in shape[1:])), (min(step, shape[0] - first), *shape[1:]))
        path = RUN / f"ep0-ba12000-rank{rank}.pt"
        shards.append(Shard(box, rank, source(box.sizes, dtype, record, path) if rank in read else None))
    return Tensor(shape, dtype, tuple(shards), "sharded_tensor", world_size=ranks)


def dtensor(shape: tuple[int, ...], placements: tuple[str, ...], mesh: tuple[int, ...], boxes: list[Box]) -> Tensor:
    shards = tuple(Shard(box, rank, None) for rank, box in enumerate(boxes))
    return Tensor(shape, "float32", shards, "dtensor", placements, mesh, world_size=4)


def files(
    world: int, name: str = "ep0-ba12000-rank{}.pt", here: Any = None, nbytes: int = 1 << 20, read: bool = False
) -> tuple[RankFile, ...]:
    """Rank files of one folder: the first is read, or all are; others are looked at, those not `here` are missing."""
    here = set(range(world)) if here is None else set(here)
    made = []
    for rank in range(world):
        status = "missing" if rank not in here else "read" if read or rank == min(here) else "seen"
        size, time = (nbytes, SAVED + rank % 39) if rank in here else (0, None)
        made.append(RankFile(RUN / name.format(rank), rank, "", status, size, time))
    return tuple(made)


def checkpoint(tree: Any, **facts: Any) -> Checkpoint:
    """A checkpoint of one whole file, but for the `facts` that are given."""
    path = facts.setdefault("path", RUN / "model.pt")
    defaults = {
        "name": "model",
        "format": "torch_file",
        "saved_as": "one .pt, every tensor whole",
        "files": (RankFile(path, None, "", "read", 4096, SAVED),),
        "world_size": Fact(1, ("one file",)),
        "step": find_step(path, find_sections(tree)),
        "module_order": AS_SAVED,
        "bytes_expected": None,
        "cost": ReadCost(1, 0.012, 900),
    }
    return with_problems(Checkpoint(tree=tree, **{**defaults, **facts}))  # type: ignore[return-value]


def missing(*ranks: int) -> tuple[Problem, ...]:
    return tuple(Problem(Code.FILE_MISSING, f"no file ep0-ba12000-rank{r}.pt", r) for r in ranks)


def weights(ranks: int, read: Collection[int] = (0,)) -> dict[str, Tensor]:
    shapes = {"emb.weight": (32000, 4096), "blocks.0.up.weight": (11008, 4096), "blocks.0.norm.weight": (4096,)}
    made = {fqn: sharded(*s, ranks=ranks, record=str(n), read=read) for n, (fqn, s) in enumerate(shapes.items())}
    return OrderedDict(made)


def group(lr: float, decay: float, params: list[Any]) -> dict[str, Any]:
    common = {"betas": (0.9, 0.95), "eps": 1e-8, "amsgrad": False, "fused": None}
    return {"lr": lr, "weight_decay": decay, **common, "params": params}


def composer_tree(ranks: int = 256, read: Collection[int] | None = None) -> dict[str, Any]:
    """What rank 0's file has in it; the tensors as the ranks that were `read` have them, by default all."""
    model = weights(ranks, range(ranks) if read is None else read)
    state = {fqn: {"step": 12000, "exp_avg": t, "exp_avg_sq": t} for fqn, t in model.items()}
    groups = [group(2.834e-4, 0.1, list(model)[:2]), group(2.834e-4, 0.0, list(model)[2:])]
    scheduler = {"last_epoch": 12000, "_last_lr": [2.834e-4, 2.834e-4], "T_max": 20000}
    inside = {
        "model": model,
        "optimizers": {"AdamW": {"state": state, "param_groups": groups}},
        "schedulers": {"CosineAnnealingLR": scheduler},
        "timestamp": {"Timestamp": {"epoch": 0, "batch": 12000, "token": 50331648000}},
        "run_name": "run7",
        "callbacks": {},
    }
    return {"state": inside, "rng": plain(5056, dtype="uint8", record="9")}


def run7(tree: Any = None, **facts: Any) -> Checkpoint:
    """The case of 256 ranks, every one of which was read."""
    defaults = {
        "path": RUN / "ep0-ba12000-rank0.pt",
        "name": "ep0-ba12000",
        "format": "rank_files",
        "saved_as": "per-rank .pt, FSDP ShardedTensor",
        "files": files(256, nbytes=315_923_456, read=True),
        "world_size": Fact(256, ("layout",)),
        "bytes_expected": 256 * 315_923_456,
        "cost": ReadCost(256, 12.9, 256 * 25_165_824),
    }
    return checkpoint(composer_tree() if tree is None else tree, **{**defaults, **facts})


def unread_run7(here: Any = None, **facts: Any) -> Checkpoint:
    """The same, seen from the file of the lowest rank that is `here`; of the others nothing was read."""
    first = min(here, default=0) if here is not None else 0
    defaults = {
        "files": files(256, here=here, nbytes=315_923_456),
        "all_ranks": False,
        "cost": ReadCost(1, 2.9, 25_165_824),
    }
    return run7(composer_tree(read={first}), **{**defaults, **facts})


def broken_run7() -> Checkpoint:
    """Ranks 201 to 203 are missing, rank 137 is cut; of the others only rank 0 was read."""
    found = list(files(256, here=set(range(256)) - {201, 202, 203}, nbytes=315_923_456))
    found[137] = RankFile(found[137].path, 137, "", "cut", 209_715_200, SAVED)
    cut = Problem(Code.FILE_CUT, "ep0-ba12000-rank137.pt is cut short: 209715200 bytes; no zip directory", 137)
    return unread_run7(files=tuple(found), problems=(*missing(201, 202, 203), cut))


def alone() -> Checkpoint:
    """Rank 7's file on a laptop."""
    return unread_run7(here={7}, path=RUN / "ep0-ba12000-rank7.pt", problems=missing(*sorted(set(range(256)) - {7})))


def snapshot() -> Checkpoint:
    """A DDP snapshot: optimizer state by number, and an object of a foreign class."""
    model = OrderedDict({"module.w": plain(3, 5, record="0"), "module.b": plain(3, record="1")})
    state = {0: {"exp_avg": plain(3, 5, record="2")}, 1: {"exp_avg": plain(3, record="3")}}
    tree = {
        "MODEL_STATE": model,
        "OPTIMIZER_STATE": {"state": state, "param_groups": [group(1e-3, 0.1, [0, 1])]},
        "EPOCHS_RUN": 5,
        "args": Opaque("argparse.Namespace"),
        "metadata": {"torch_version": "2.6.0+cu124"},
    }
    return checkpoint(tree, name="snapshot", path=RUN / "snapshot.pt")


ESCAPE = "\x1b[31mred\x1b[0m"
FORGED = "w\n\nwhole: all 256 rank files are here"
HOSTILE = (
    ESCAPE,
    FORGED,
    "1e5",
    "00012",
    "layers[red].w[/bold]",
    "<script>alert(1)</script>",
    "a\u202egnp.exe",
    "bell\x07\x9b2J\r",
    "half\ud800",
    "\u6f22\u5b57",
)


def hostile() -> Checkpoint:
    """Every name that a file can choose is a trap."""
    model = {name: plain(2, 3, record=str(n)) for n, name in enumerate(HOSTILE)}
    state = {name: {ESCAPE: plain(2, 3, record=f"m{n}")} for n, name in enumerate(HOSTILE)}
    groups = [{"lr": 1e-3, FORGED: ESCAPE, "<b>": float("nan"), "params": list(HOSTILE)}]
    tree = {
        f"model{ESCAPE}": model,
        FORGED: {"state": state, "param_groups": groups},
        "<i>sched</i>": {"last_epoch": 3, ESCAPE: FORGED},
        ESCAPE: {FORGED: "<script>", "1e5": "00012"},
        "evil": Opaque("os.system\n<b>"),
    }
    names = ("collections.OrderedDict", "os.system\n<b>", f"my.pkg.{ESCAPE}")
    return checkpoint(tree, name=f"ck{ESCAPE}", names=names, saved_as="one .pt, every tensor whole")
