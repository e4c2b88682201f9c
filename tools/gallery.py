"""`python -m tools.gallery`: the pictures of `docs/pictures.md`, of a small Llama that eight ranks have trained.

The model is transformers' own, spread by FSDP2 over tensor parallel on a mesh of 4 x 2, and saved every five steps. Of
a copy of its newest checkpoint one rank is lost and one is cut.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path

import ckptools
from ckptools.display.drawing import Picture
from tests.training.forked import run_ranks

ROOT = Path(__file__).parent.parent
PICTURES = ROOT / "docs" / "images" / "pictures"
LICENSE = ROOT / "LICENSE"
"""A text that stays the same, to train on."""

RANKS, STEPS, EVERY = 8, 40, 5
SAVED = 1_760_000_000
"""When the first checkpoint was written, in seconds since 1970; a picture that is made anew has the same times."""


def trained(folder: Path) -> Path:
    """Train the Llama; return the folder of its run, which has `step-10/rank0.pt` and so on."""
    run = folder / "llama"
    run_ranks(RANKS, _train, run)
    for path in run.glob("step-*/*"):
        step = int(path.parent.name.removeprefix("step-"))
        os.utime(path, (SAVED + 60 * step, SAVED + 60 * step))
    return run


def _train(run: Path) -> None:
    """Be one rank of the training."""
    import torch
    from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_optimizer_state_dict
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.distributed.init_process_group("gloo")
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=256, hidden_size=64, intermediate_size=172, num_hidden_layers=8, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=64, attn_implementation="eager", use_cache=False,
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    mesh = init_device_mesh("cpu", (RANKS // 2, 2), mesh_dim_names=("dp", "tp"))
    across = {f"self_attn.{one}_proj": ColwiseParallel() for one in "qkv"} | {"self_attn.o_proj": RowwiseParallel()}
    across |= {"mlp.gate_proj": ColwiseParallel(), "mlp.up_proj": ColwiseParallel(), "mlp.down_proj": RowwiseParallel()}
    for layer in model.model.layers:
        parallelize_module(layer, mesh["tp"], across)
        fully_shard(layer, mesh=mesh["dp"])
    fully_shard(model, mesh=mesh["dp"])
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, betas=(0.9, 0.95), weight_decay=0.1)
    warm_up = torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, total_iters=10)
    cosine = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS)
    scheduler = torch.optim.lr_scheduler.SequentialLR(optimizer, [warm_up, cosine], [10])
    text = torch.frombuffer(bytearray(LICENSE.read_bytes()), dtype=torch.uint8).long()
    rank = torch.distributed.get_rank()
    for step in range(1, STEPS + 1):
        start = (step * 997 + rank // 2 * 131) % (len(text) - 33)
        tokens = text[start : start + 33][None]
        model(input_ids=tokens[:, :-1], labels=tokens[:, :-1]).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
        if step % EVERY == 0:
            (run / f"step-{step}").mkdir(parents=True, exist_ok=True)
            state = {"model": get_model_state_dict(model), "optimizer": get_optimizer_state_dict(model, optimizer)}
            state |= {"scheduler": scheduler.state_dict(), "step": step}
            torch.save(state, run / f"step-{step}" / f"rank{rank}.pt")


def pictures(run: Path) -> dict[str, Picture]:
    """The pictures by their names."""
    newest = run / f"step-{STEPS}"
    broken = shutil.copytree(newest, run.parent / "broken" / newest.name)
    (broken / "rank5.pt").unlink()
    os.truncate(broken / "rank3.pt", 40_000)
    checkpoint = ckptools.open(newest)
    middle = ckptools.open(run / f"step-{STEPS // 2}")
    return {
        "ranks": ckptools.open(broken).plot.ranks(),
        "strip": checkpoint.plot.layout("model.model.embed_tokens.weight"),
        "grid": checkpoint.plot.layout("model.model.layers.0.self_attn.o_proj.weight"),
        "bytes": checkpoint.plot.bytes(),
        "heat": checkpoint.plot.heat("rms"),
        "change": ckptools.diff(middle, checkpoint, values=True).plot.heat(),
        "values": checkpoint.plot.histogram("model.model.layers.0.mlp.up_proj.weight"),
        "norms": checkpoint.plot.norms(),
        "run": ckptools.checkpoints_in(run).plot.steps(),
    }


def main(to: Path = PICTURES) -> None:
    """Write all of them."""
    to.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as name:
        for picture, drawn in pictures(trained(Path(name))).items():
            drawn.save(to / f"{picture}.svg", force=True)


if __name__ == "__main__":
    main()
