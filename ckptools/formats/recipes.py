"""Formats that are folders of parts and need little more than a recipe: layout, source, recipe of each."""

from __future__ import annotations

from ckptools.files.opening import head_at
from ckptools.formats.dcp.files import METADATA
from ckptools.formats.recipe import Part, PartsBuilder, Recipe
from ckptools.model.checkpoint import Fact

# -- ByteCheckpoint: a step's folder with a DCP folder each for model and optimizer, and a file per rank for the rest --
#
#     global_step_3/model/.metadata           of ByteCheckpoint's own class; `dcp.metadata` has it
#     global_step_3/model/__0_0.distcp        nothing but the bytes of tensors
#     global_step_3/optimizer/…
#     global_step_3/extra_state/extra_state_rank_0.pt      torch.save of each rank's own
#
# Source: bytecheckpoint/checkpointer/fsdp2_checkpointer.py, meta_type.py of 0.0.3; `model/` is checked on a checkpoint
# of it, the other parts on folders of this layout made by hand.

HEAD = 256
"""Bytes of a metadata file that name its class."""

BYTE_CHECKPOINT = Recipe(
    NAME="byte_checkpoint",
    READS="ByteCheckpoint: a step folder with model/ and optimizer/ (bare .distcp) and extra_state/ of each rank",
    KNOWN_BY="a folder with model/.metadata or optimizer/.metadata of ByteCheckpoint's class",
    TRIED=("ByteCheckpoint 0.0.3",),
    BY_HAND=("optimizer and extra_state",),
    signs=(("model/.metadata", "optimizer/.metadata"),),
    confirmed=lambda path: any(
        b"bytecheckpoint" in head_at(path / name / METADATA, HEAD)
        for name in ("model", "optimizer")
        if (path / name / METADATA).is_file()
    ),
    parts=(
        Part(("model",), "model", PartsBuilder.add_dcp, "error"),
        Part(("optimizer",), "optimizer", PartsBuilder.add_dcp, "warning"),
        Part(("extra_state/extra_state_rank_{rank}.pt",), "extra_state", PartsBuilder.add_states),
    ),
    saved_as="ByteCheckpoint, DCP folders",
    world_size=lambda parts: Fact(1 + max(parts.writers.ranks, default=0), ("files found",)),
)
