"""Damage that nobody can know of from the files alone, with the reason.

    python -m tests.damage.exceptions

prints the table. An exception that no damage of the matrix meets fails it.
"""

from __future__ import annotations

import re
import sys
from dataclasses import dataclass

from ckptools.display.tables import Column, table
from tests.damage.damages import Damage


@dataclass(frozen=True)
class Unknowable:
    """Damage that goes unnoticed.

    Attributes:
        checkpoint: pattern of the fixture and the path in it.
        damage: pattern of the damage, such as `flipped .*\\.metadata`.
        reason: why nothing in the files tells.
    """

    checkpoint: str
    damage: str
    reason: str

    def holds_for(self, checkpoint: str) -> bool:
        return re.match(self.checkpoint, checkpoint) is not None

    def covers(self, damage: Damage) -> bool:
        return re.match(self.damage, str(damage)) is not None


METADATA = "a .metadata has no checksum, and a bit of it can make another place that is as good as the first"
SAFETENSORS = "safetensors have no checksums"
BARE = "ByteCheckpoint keeps no checksums"
SNAPSHOT = "torchsnapshot keeps no checksums"
NO_STEP = "the file holds what has one dtype and shape in every step; a count in it that others contradict is warned of"
NO_RANK = "nothing in the files says whose they are, and they fit each rank"
EQUAL = "nothing in the files says whose they are, and ranks may save equal files; a warning names both"
OPTIONAL = "nothing names the file: a run without a scheduler leaves the same folder"
NO_LIST = "nothing lists the parts of a composite folder, and another trainer leaves none of this name"
JSON = "JSON has no checksum"

MASTERS = (
    "the file holds fp32 copies and moments alone, and what differs in a low bit rounds to the weights all the same; "
    "verify --deep compares integrity.json"
)

PLAIN_DCP = "without it the folder is a plain DCP, whose values are right under the names that are stored"

_EXCEPTIONS = {
    "composer-0.16.4-torch2.0.1-elastic-w4": {
        r"flipped .*/\.metadata ": METADATA,
        r"another step .*\.distcp": NO_STEP,
    },
    "hf-llama-safetensors-bf16|dcp-hf": {r"flipped .*\.safetensors ": SAFETENSORS},
    "verl-": {"another step .*/model_world_size": NO_STEP},
    "(dcp-multifile|dcp-objects)/": {r"another step .*\.distcp": NO_STEP},
    "torch1.13.1-fsdp1-sharded-dcp": {r"another step .*\.distcp": NO_STEP},
    "(accelerate|torchao-fsdp2-adamw8bit)": {r"another step .*\.distcp": NO_STEP},
    "megatron-tp2pp2-fp32/ckpt": {r"another step .*\.distcp": NO_STEP},
    "megatron-(tp2pp2-fp32|tp2dp2-distopt|core0.20-ep2dp2-dpr)/ckpt": {r"deleted .*/metadata\.json": PLAIN_DCP},
    "lightning-fabric-fsdp2": {r"another step .*/meta\.pt": NO_STEP},
    "hf-gpt2-bin-tied-fp32": {r"another step .*\.bin": NO_STEP},
    "accelerate-fsdp2": {
        "another step .*/(random_states|custom_checkpoint)": NO_STEP,
        r"deleted .*/scheduler\.bin": OPTIONAL,
    },
    "torchsnapshot-fsdp1": {r"flipped .*/batched/": SNAPSHOT},
    "torch-checkpointing-st-fsdp2": {
        r"flipped .*\.safetensors ": SAFETENSORS,
        r"swapped .*/model_\d\.safetensors": NO_RANK,
        r"copied .*/model_\d\.safetensors": EQUAL,
    },
    "nemo-automodel-fsdp2": {
        r"flipped .*/\.metadata ": METADATA,
        r"another step .*(\.distcp|_rank_\d\.pt|step_scheduler\.pt)": NO_STEP,
        r"deleted .*/(losses\.json|step_scheduler\.pt)": OPTIONAL,
    },
    "composite-dcp-": {
        r"another step .*(/model/.*\.distcp|_rank_\d\.pt|scheduler\.pt)": NO_STEP,
        r"deleted .*/train_state\.json": NO_LIST,
        r"flipped .*/train_state\.json ": JSON,
    },
    "bytecheckpoint-": {r"flipped .*\.distcp ": BARE},
    "nanotron-": {
        r"flipped .*\.safetensors ": SAFETENSORS,
        r"another step .*/lr_scheduler\.pt": NO_STEP,
        r"flipped .*/checkpoint_metadata\.json ": JSON,
    },
    "megatron-core0.16-pp2dp2": {
        r"another step .*/common\.pt": NO_STEP,
        r"deleted .*/metadata\.json": PLAIN_DCP,
    },
    "megatron-core0.20-ep2dp2-dpr": {r"another step .*/__[23]_0\.distcp": MASTERS},
    "megatron-ep2dp2-bf16-legacy": {
        "swapped .*/model_optim_rng": NO_RANK,
        "copied .*/model_optim_rng": EQUAL,
    },
}

EXCEPTIONS = tuple(
    Unknowable(checkpoint, damage, reason)
    for checkpoint, reasons in _EXCEPTIONS.items()
    for damage, reason in reasons.items()
)


def main() -> None:
    """Print the table."""
    columns = tuple(map(Column, ("checkpoint", "damage", "why nobody can know")))
    sys.stdout.write("\n".join(table(columns, [(e.checkpoint, e.damage, e.reason) for e in EXCEPTIONS])) + "\n")


if __name__ == "__main__":
    main()
