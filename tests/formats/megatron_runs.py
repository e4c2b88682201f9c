"""Legacy Megatron checkpoints cut from known full tensors, the way Megatron's layers cut them."""

from __future__ import annotations

from argparse import Namespace
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from tests.state_dicts import state_dict

Tensors = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Run:
    """A tiny GPT model and how it is spread.

    Attributes:
        layers: layers of each stage, chunk by chunk: `[[1, 2], [1, 1]]` are two chunks on two stages.
    """

    tp: int = 1
    layers: list[list[int]] = field(default_factory=lambda: [[2]])
    gated: bool = False
    bias: bool = False
    heads: int = 4
    groups: int = 4
    vocab: int = 16
    untied: bool = True
    half: bool = False
    args: dict[str, Any] = field(default_factory=dict)

    @property
    def pp(self) -> int:
        return len(self.layers[0])

    @property
    def total(self) -> int:
        return sum(map(sum, self.layers))


HIDDEN, FFN, HEAD = 8, 12, 2


def full_model(run: Run) -> Tensors:
    """Every weight, with values of its own."""
    shapes: dict[str, tuple[int, ...]] = {
        "embedding.word_embeddings.weight": (run.vocab, HIDDEN),
        "embedding.position_embeddings.weight": (5, HIDDEN),
    }
    for n in range(run.total):
        layer = f"decoder.layers.{n}."
        shapes[layer + "input_layernorm.weight"] = (HIDDEN,)
        shapes[layer + "self_attention.linear_proj.weight"] = (HIDDEN, run.heads * HEAD)
        shapes[layer + "self_attention.linear_qkv.weight"] = ((run.heads + 2 * run.groups) * HEAD, HIDDEN)
        shapes[layer + "pre_mlp_layernorm.weight"] = (HIDDEN,)
        shapes[layer + "mlp.linear_fc1.weight"] = (FFN * (2 if run.gated else 1), HIDDEN)
        shapes[layer + "mlp.linear_fc2.weight"] = (HIDDEN, FFN)
    shapes["decoder.final_layernorm.weight"] = (HIDDEN,)
    shapes["output_layer.weight"] = (run.vocab, HIDDEN)
    if run.bias:
        shapes = {n: s for k, v in shapes.items() for n, s in ((k, v), *_bias_of(k, v))}
    made = {k: torch.randn(s, generator=torch.Generator().manual_seed(n)) for n, (k, s) in enumerate(shapes.items())}
    if not run.untied:
        made["output_layer.weight"] = made["embedding.word_embeddings.weight"]
    return {k: v.bfloat16() if run.half else v for k, v in made.items()}


def _bias_of(name: str, shape: tuple[int, ...]) -> list[tuple[str, tuple[int, ...]]]:
    return [(name[:-6] + "bias", shape[:1])] if ".linear_" in name else []


def piece(name: str, tensor: torch.Tensor, tp: int, rank: int, gated: bool) -> torch.Tensor:
    """What one tensor-parallel rank holds."""
    if "fc1" in name and gated:
        return torch.cat([half.chunk(tp)[rank] for half in tensor.chunk(2)])
    if any(part in name for part in ("word_emb", "output_layer", "linear_qkv", "fc1")):
        return tensor.chunk(tp)[rank].clone()
    if name.endswith(("linear_proj.weight", "fc2.weight")):
        return tensor.chunk(tp, dim=1)[rank].clone()
    return tensor.clone()


def stage_names(run: Run, chunk: int, stage: int) -> dict[str, str]:
    """Whole-model name by the name on a stage."""
    order = [(c, s) for c in range(len(run.layers)) for s in range(run.pp)]
    before = sum(run.layers[c][s] for c, s in order[: order.index((chunk, stage))])
    names: dict[str, str] = {}
    for name in full_model(run):
        if name.startswith("embedding") and (chunk, stage) == (0, 0):
            names[name] = name
        elif name.startswith("decoder.layers."):
            _, _, number, rest = name.split(".", 3)
            if 0 <= int(number) - before < run.layers[chunk][stage]:
                names[f"decoder.layers.{int(number) - before}.{rest}"] = name
        elif name.startswith(("decoder.final", "output")) and (chunk, stage) == order[-1]:
            names[name] = name
    if not run.untied and run.pp == 1:
        names.pop("output_layer.weight", None)
    return names


def arguments(run: Run, rank: int) -> Namespace:
    """What Megatron saves of its command line."""
    told = {
        "tensor_model_parallel_size": run.tp, "pipeline_model_parallel_size": run.pp, "num_layers": run.total,
        "world_size": run.tp * run.pp, "padded_vocab_size": run.vocab, "swiglu": run.gated, "rank": rank,
        "untie_embeddings_and_output_weights": run.untied,
    }  # fmt: skip
    return Namespace(**{**told, **run.args})


def optimizer_of(names: dict[str, str], moments: dict[str, Tensors], run: Run, rank: int) -> dict[str, Any]:
    """A state dict keyed by number: first the group with weight decay, then the one without."""
    groups = [[n for n in names.values() if not (moments["exp_avg"][n].ndim == 1) ^ small] for small in (True, False)][
        ::-1
    ]
    state: dict[int, Any] = {}
    listed = []
    for wd, group in zip((1.0, 0.0), groups, strict=True):
        ids = list(range(len(state), len(state) + len(group)))
        for i, name in zip(ids, group, strict=True):
            state[i] = {slot: piece(name, full[name], run.tp, rank, run.gated) for slot, full in moments.items()}
            state[i]["step"] = torch.tensor(5.0)
        listed.append({"lr": 1e-3, "wd_mult": wd, "params": ids})
    return {"state": state, "param_groups": listed}


def moments_of(full: Tensors) -> dict[str, Tensors]:
    return {slot: {k: v.float() * f for k, v in full.items()} for slot, f in (("exp_avg", 3), ("exp_avg_sq", 7))}


def save(run: Run, save_to: Path, iteration: int = 5, **more: Any) -> Path:
    """Write the run; `more` are further keys of every file. Return the iteration's folder."""
    full = full_model(run)
    folder = save_to / f"iter_{iteration:07d}"
    for stage in range(run.pp):
        for rank in range(run.tp):
            name = f"mp_rank_{rank:02d}" + (f"_{stage:03d}" if run.pp > 1 else "")
            (folder / name).mkdir(parents=True)
            tree = file_tree(run, full, stage, rank)
            torch.save({**tree, "iteration": iteration, **more}, folder / name / "model_optim_rng.pt")
    (save_to / "latest_checkpointed_iteration.txt").write_text(str(iteration))
    return folder


def file_tree(run: Run, full: Tensors, stage: int, rank: int) -> dict[str, Any]:
    """What one file holds."""
    tree: dict[str, Any] = {"args": arguments(run, rank + run.tp * stage), "checkpoint_version": 3.0}
    names: dict[str, str] = {}
    for chunk in range(len(run.layers)):
        mine = stage_names(run, chunk, stage)
        names |= {f"{chunk}:{k}": v for k, v in mine.items()}
        model = state_dict({k: piece(v, full[v], run.tp, rank, run.gated) for k, v in mine.items()})
        tree["model" if len(run.layers) == 1 else f"model{chunk}"] = model
    inner = optimizer_of(names, moments_of(full), run, rank)
    tree["optimizer"] = (
        inner if not run.half else {"optimizer": inner, "fp32_from_fp16_params": masters(names, full, run, rank)}
    )
    tree["rng_state"] = [{"torch_rng_state": torch.full((8,), rank, dtype=torch.uint8)}]
    return tree


def master(name: str, full: Tensors) -> torch.Tensor:
    """A master copy that rounds to the weight and differs from it."""
    return full[name].float() * (1 + 2**-12)


def masters(names: dict[str, str], full: Tensors, run: Run, rank: int) -> list[list[torch.Tensor]]:
    copies = {n: piece(n, master(n, full), run.tp, rank, run.gated) for n in names.values()}
    return [[copies[n] for n in names.values() if full[n].ndim == d] for d in (2, 1)]
