"""ByteCheckpoint: a step's folder with a DCP folder each for model and optimizer, and a file per rank for the rest.

    global_step_3/model/.metadata           of ByteCheckpoint's own class; `dcp.metadata` has it
    global_step_3/model/__0_0.distcp        nothing but the bytes of tensors
    global_step_3/optimizer/…
    global_step_3/extra_state/extra_state_rank_0.pt      torch.save of each rank's own

Each part by its own format, one checkpoint. Source: bytecheckpoint/checkpointer/fsdp2_checkpointer.py, meta_type.py of
0.0.3; `model/` is checked on a checkpoint of it, the other parts on folders of this layout made by hand.
"""

from __future__ import annotations

import re
from pathlib import Path

from ckptools.errors import ReadError
from ckptools.files.opening import head_at, reading
from ckptools.formats.dcp.files import METADATA
from ckptools.formats.dcp.folder import PLANNED, CompositeBuilder, is_dcp
from ckptools.formats.options import Options
from ckptools.model.checkpoint import Checkpoint, Fact

NAME = "byte_checkpoint"
READS = "ByteCheckpoint: a step folder with model/ and optimizer/ (bare .distcp) and extra_state/ of each rank"
KNOWN_BY = "a folder with model/.metadata or optimizer/.metadata of ByteCheckpoint's class"
TRIED = ("ByteCheckpoint 0.0.3",)
BY_HAND = ("optimizer and extra_state",)
JOINS = ("model", "optimizer", "rest")

DCP_PARTS = ("model", "optimizer")
EXTRA = "extra_state"
OF_A_RANK = re.compile(r"extra_state_rank_(?P<rank>\d{1,7})\.pt")
CLASS = b"bytecheckpoint"
HEAD = 256
MAX_RANKS = 1 << 16


def detect(path: Path) -> bool:
    """A folder with a DCP folder of ByteCheckpoint, by the first class that its metadata names."""
    return any(is_dcp(path / part) and CLASS in head_at(path / part / METADATA, HEAD) for part in DCP_PARTS)


def read(path: Path, options: Options) -> Checkpoint:
    """Open a step's folder.

    Raises:
        ReadError: no part of it can be read.
        UnsafePathError: a part is a link out of the folder.
    """
    parts = CompositeBuilder(NAME, path, options)
    for part in DCP_PARTS:
        parts.add_dcp_part(path / part, part, f"no folder {part}", needed=part == "model")
    if not parts.tree:
        raise ReadError(path, f"no part of it can be read: {parts.problems[0].message}")
    world = 1 + max(parts.writers.ranks, default=0)
    _add_extra(parts, path / EXTRA, world)
    return parts.checkpoint("ByteCheckpoint, DCP folders", Fact(world, ("files found",)), PLANNED)


def _add_extra(parts: CompositeBuilder, folder: Path, world: int) -> None:
    """Add what each rank has for itself, by rank."""
    if not folder.is_dir():
        return
    parts.check_link(folder)
    with reading(folder):
        files = {int(m["rank"]): p for p in sorted(folder.iterdir()) if (m := OF_A_RANK.fullmatch(p.name))}
    parts.add_states(EXTRA, {("", rank): path for rank, path in files.items()})
    for rank in range(min(world, MAX_RANKS)):
        if rank not in files:
            parts.miss_state(folder / f"extra_state_rank_{rank}.pt", EXTRA, rank)
