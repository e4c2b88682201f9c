"""The known full values of the fixtures, for comparison bit for bit."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
from safetensors import safe_open

import ckptools
from tests.thorough import THOROUGH

FIXTURES = Path(__file__).parent.parent / "fixtures"
SEVERAL = (FIXTURES / "peft-adapters",)
"""Folders of many checkpoints, none of which is the folder itself."""

GOLDEN = Path(__file__).parent / "formats" / "golden"
"""What tests/formats/test_as_read.py compares each fixture with."""


@dataclass(frozen=True)
class Known:
    """A fixture that ckptools can put together.

    Attributes:
        name: its folder in fixtures/.
        path: what a user would open, below that folder.
        prefix: what the file's names have in front of the truth's.
        world_size: ranks that saved it.
        step: training step; None when the file does not tell.
        absent: truths that the file does not hold, or not under a name that is sure.
        shapes: what tells the shapes that the checkpoint lacks, in the same folder.
        weights: which of two copies of the model the truth is of.
        names: what tells the names that its optimizer lacks, in the same folder.
        place: where the fixtures' folders are.
        written_with: what `consolidate` must be asked for, to write all of it.
    """

    name: str
    path: str
    prefix: str
    world_size: int
    step: int | None
    absent: tuple[str, ...] = ()
    shapes: str | None = None
    weights: Literal["fp32", "module"] = "fp32"
    names: str | None = None
    place: Path = FIXTURES
    written_with: Mapping[str, Any] = field(default_factory=dict, hash=False)

    @property
    def folder(self) -> Path:
        return self.place / self.name

    @property
    def file(self) -> Path:
        return self.folder / self.path

    @property
    def label(self) -> str:
        """Its name, with the part of it that is opened where it has several."""
        part = self.path.partition("/")[0]
        return f"{self.name}-{part}" if part in ("universal", "legacy", "fully") else self.name

    @property
    def form(self) -> tuple[object, ...]:
        """What decides which code reads it: format and layout, in the words of the report, and what a user must add."""
        described = (GOLDEN / "sound" / f"{self.label}.txt").read_text().partition("\n")[0].partition(" (")[2]
        return described, bool(self.shapes), bool(self.names), *self.written_with

    @property
    def write_options(self) -> tuple[str, ...]:
        """`written_with` as the command line has it."""
        named = [(f"--{name.replace('_', '-')}", value) for name, value in self.written_with.items()]
        return tuple(word for name, value in named for word in ((name,) if value is True else (name, str(value))))

    @property
    def options(self) -> dict[str, Any]:
        """What a user would say to open it."""
        shapes = self.folder / self.shapes if self.shapes else None
        names = self.folder / self.names if self.names else None
        return {"shapes": shapes, "names": names, "weights": self.weights}

    def open(self, **options: Any) -> ckptools.Checkpoint:
        """Open it with what a user would say."""
        return ckptools.open(self.file, **{**self.options, **options})


VERL = "ckpt/global_step_3/actor/model_world_size_4_rank_0.pt"
DEEPSPEED = ("lowp/", "buffer/stats.mask", "optim/lm_head.weight/")

# Norms have the names of fused layers there, and a tied output layer is not stored; a test of its own compares them.
FUSED = [f"decoder.layers.{n}.{norm}_layernorm." for n in (0, 1) for norm in ("input", "pre_mlp")]
MEGATRON_DIST = ("stored/", *(f"{what}/{name}" for what in ("model", "optim") for name in ("output_layer.", *FUSED)))
MEGATRON_STAGES = tuple(name for name in MEGATRON_DIST if "output_layer" not in name)

WHOLE = (
    Known("composer-0.13.5-torch1.13.1-sharded-w4", "ep0-ba5-rank0.pt", "", 4, 5),
    Known("torch1.13.1-fsdp1-sharded-w3", "rank2.pt", "", 3, 5),
    Known("torch2.0.1-fsdp1-hsdp2x2-st-w4", "rank1.pt", "", 4, 5),
    Known("torch2.13.0-fsdp1-sharded-w4", "rank0.pt", "", 4, 5),
    Known("torch2.13.0-fsdp2-tp2x2-w4", "rank3.pt", "", 4, 5),
    Known("torch2.2.2-fsdp1-dtensor-w3", "rank0.pt", "", 3, 5),
    Known("torch2.4.1-fsdp2-w3", "rank1.pt", "", 3, 5),
    Known("torch2.6.0-fsdp1-hsdp2x2-w4", "rank0.pt", "", 4, 5),
    Known("torch2.6.0-fsdp2-tp2x2-w4", "rank2.pt", "", 4, 5),
    # Buffers that the model does not save.
    Known("verl-fsdp1-orig", VERL, "", 4, 3, ("buffer/",)),
    Known("verl-fsdp1", VERL, "", 4, 3, ("buffer/",)),
    Known("verl-fsdp2-bf16", VERL, "", 4, 3),
    Known("torch2.13.0-ddp-w4", "snapshot.pt", "module.", 1, 5),
    # The fused optimizer has no param groups; a test of its own compares its state.
    Known("torchrec-w3", "ckpt/ckpt_rank1.pt", "", 3, 3, ("optim/",)),
    Known("torch2.15.0-checkpointable-tensor-w4", "ckpt/rank0.pt", "", 4, 5),
    # The last id could be three parameters of one shape, and buffers that differ per rank were saved by rank 0.
    Known("lightning-trainer-ddp", "ckpt/last.ckpt", "", 1, 5, ("optim/net.block.down.bias/", "rank0/", "rank1/")),
    # Flat parameters; the optimizer state beside them is keyed by name and tells their shapes.
    Known("composer-0.14.1-torch2.0.1-local-w4", "ep0-ba5-rank0.pt", "", 4, 5),
    Known("torch2.13.0-fsdp2-dcp-w3", "ckpt", "", 3, 5),
    # DCP keeps one rank's copy of a buffer that differs per rank, not the one of rank 0.
    Known("dcp-zstd", "ckpt", "", 4, 5, ("rank", "model/stats.running_mean")),
    Known("dcp-multifile", "ckpt", "", 4, 5, ("rank", "model/stats.running_mean")),
    Known("dcp-objects", "ckpt/.metadata", "", 3, 5, ("rank", "model/stats.running_mean")),
    Known("composer-0.16.4-torch2.0.1-elastic-w4", "ep0-ba5", "", 4, 5),
    # torch 1.13 saved the model only.
    Known("torch1.13.1-fsdp1-sharded-dcp-w3", "ckpt/__0_0.distcp", "", 3, None, ("optim/",)),
    Known("lightning-fabric-fsdp2", "ckpt", "", 4, 5, ("rank", "model/stats.running_mean")),
    Known("torchtitan-fsdp-tp", "ckpt/step-5", "", 4, 5),
    # `lowp/` is the module's copy; the mask is not persistent, and a tied name has no state of its own.
    Known("deepspeed-z1-fp32", "ckpt", "", 4, 5, DEEPSPEED),
    Known("deepspeed-z1-fp32", "universal", "", 4, 5, DEEPSPEED),
    Known("deepspeed-z3-bf16", "ckpt/global_step5", "", 4, 5, DEEPSPEED),
    Known("deepspeed-pipe-fp32", "ckpt", "", 4, 3, ("lowp/",)),
    Known("deepspeed-moe-ep2-z1-fp32", "ckpt", "", 4, 5, ("lowp/",)),
    Known("deepspeed-autotp-tp2dp2-z1-fp32", "ckpt", "", 4, 5, ("lowp/",)),
    # `stored/` are the names of the other form, which stacks the layers.
    Known("megatron-tp2pp2-fp32", "legacy", "", 4, 5, ("stored/",)),
    Known("megatron-ep2dp2-bf16-legacy", "ckpt", "", 4, 5, ("stored/",), weights="module"),
    Known("megatron-tp2pp2-fp32", "ckpt", "", 4, 5, MEGATRON_DIST),
    Known("megatron-tp2dp2-distopt", "ckpt", "", 4, 5, MEGATRON_DIST, weights="module"),
    Known("megatron-core0.20-ep2dp2-dpr", "ckpt", "", 4, 3, MEGATRON_DIST, weights="module"),
    Known("megatron-core0.16-pp2dp2", "ckpt", "", 4, 3, MEGATRON_STAGES, weights="module"),
    Known("megatron-core0.16-pp2dp2", "fully", "", 4, 3, MEGATRON_STAGES, weights="module"),
    Known("hf-llama-safetensors-bf16", "ckpt", "", 1, None),
    Known("hf-gpt2-bin-tied-fp32", "ckpt/pytorch_model-00003-of-00004.bin", "", 1, None),
    # The model only; of a buffer that differs per rank DCP keeps rank 1's copy.
    Known("dcp-hf", "ckpt", "", 4, None, ("optim/", "rank", "model/stats.running_mean"), shapes="shapes.json"),
    # The optimizer is keyed by number, its four moments have one shape, and DCP has lost the order.
    Known("dcp-ddp-number-plain-w2", "ckpt", "", 2, 3, names="names.json"),
    # The scheduler counts every process: 20 steps for 4 of them.
    Known("accelerate-fsdp2", "ckpt", "", 4, 5, ("rank", "model/stats.running_mean")),
    # A running mean that each rank has for itself; the mask is not persistent.
    Known("torchsnapshot-fsdp1", "ckpt", "", 2, 5, ("rank", "buffer/stats.mask")),
    Known("torch-checkpointing-pt-fsdp2", "ckpt", "", 4, 5, ("rank",)),
    # The layout of what the ranks have in safetensors is in metadata.pkl alone.
    Known("torch-checkpointing-st-fsdp2", "ckpt", "", 4, 5, ("rank",)),
    Known("nanotron-tp2pp2", "ckpt", "", 4, 5),
    # Flattened parameters, placed by the metadata beside them; the mask is not persistent.
    Known("fairscale-fsdp-nested", "ckpt", "", 4, 5, ("buffer/stats.mask",)),
    Known("fairscale-fsdp-tied-w3", "ckpt/checkpoint_3-shard1.pt", "", 3, 3),
    Known("bytecheckpoint-fsdp2", "ckpt/global_step_3", "", 2, 3),
    # safetensors shards for the model, a DCP for the optimizer.
    Known("nemo-automodel-fsdp2", "ckpt/epoch_0_step_5", "", 4, 5),
    # The names of a model that PEFT changed.
    Known("peft-lora-fsdp2", "ckpt/rank1.pt", "", 2, 3),
    Known("transformers-shards", "ckpt", "", 2, None),
    # A folder for each part, by no framework.
    Known("composite-dcp-fsdp2", "ckpt/step_5", "", 2, 5),
)

# Flat parameters: whole when their shapes are told.
LOCAL = (Known("torch2.6.0-fsdp1-local-w4", "rank0.pt", "", 4, 5, shapes="shapes.json"),)

# Ranks have values of their own in a buffer that all should have alike, so that consolidate asks for --prefer-rank.
OWN_BUFFERS = (Known("dcp-experimental-checkpointer-tp2x2", "ckpt/checkpoint_2.pt", "", 4, 5, ("rank",)),)

# Tensors of other classes, which are written when it is said how; a buffer differs between the ranks of the first.
ASKED = (
    Known(
        *("torchao-fsdp2-float8-training", "ckpt/step5-rank0.pt", "", 2, 5, ("rank",)),
        names="names.json",
        written_with={"prefer_rank": 0},
    ),
    Known(
        *("torchao-fsdp2-adamw8bit-dcp", "ckpt", "", 2, 5, ("rank", "model/stats.running_mean")),
        written_with={"dequantize": True},
    ),
    Known("torchao-int8", "ckpt/model.pt", "", 1, 5, written_with={"dequantize": True}),
    Known("torchao-flattened", "ckpt", "", 1, None, written_with={"dequantize": True}),
)

_ONE_OF_A_KIND = {
    "composer-0.13.5-torch1.13.1-sharded-w4": "ep0-ba5-rank0.pt",
    "torch2.4.1-fsdp2-w3": "rank1.pt",
    "composer-0.14.1-torch2.0.1-local-w4": "ep0-ba5-rank0.pt",
    "dcp-objects": "ckpt/.metadata",
    "lightning-fabric-fsdp2": "ckpt",
    "deepspeed-z1-fp32": "universal",
    "deepspeed-z3-bf16": "ckpt/global_step5",
    "megatron-tp2pp2-fp32": "legacy",
    "hf-llama-safetensors-bf16": "ckpt",
    "hf-gpt2-bin-tied-fp32": "ckpt/pytorch_model-00003-of-00004.bin",
}


def one_of_each_form(fixtures: Iterable[Known]) -> list[Known]:
    """The first of the fixtures that have one `form`; all of them if tests are to be `THOROUGH`.

    For tests that multiply fixtures by damages or commands. Two fixtures of one form differ in the version of their
    writer, the number of ranks or the names of keys, and tests that open each fixture once take both.
    """
    fixtures = list(fixtures)
    if THOROUGH:
        return fixtures
    return list({known.form: known for known in reversed(fixtures)}.values())[::-1]


KINDS = tuple(known for known in WHOLE if _ONE_OF_A_KIND.get(known.name) == known.path)
"""One fixture for each way of storing a checkpoint."""


def load_truth(name: str) -> dict[str, tuple[str, bytes, tuple[int, ...]]]:
    """`{key: (dtype, bytes, shape)}`; keys are `model/<fqn>`, `optim/<fqn>/<slot>`, `buffer/<fqn>`."""
    folder = FIXTURES / name
    typed = folder / "truth.safetensors"
    if typed.exists():
        with safe_open(typed, framework="pt") as file:
            tensors = {k: file.get_tensor(k) for k in file.keys()}  # noqa: SIM118 - it is no dict
        return {
            k: (str(t.dtype)[6:], t.contiguous().reshape(-1).view(_uint8()).numpy().tobytes(), tuple(t.shape))
            for k, t in tensors.items()
        }
    dtypes = json.loads((folder / "truth.json").read_text()).get("dtypes", {})
    values = np.load(folder / "truth.npz")
    return {k: (dtypes.get(k, str(values[k].dtype)), values[k].tobytes(), values[k].shape) for k in values.files}


def _uint8() -> object:
    import torch

    return torch.uint8
