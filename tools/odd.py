"""Write the odd checkpoints in tests/odd: two steps of a run in which as much as possible is unusual.

    python -m tools.odd

They are kept, for each torch writes other bytes.
"""

from __future__ import annotations

import argparse
import datetime
import random
from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
import torch

HERE = Path(__file__).parent.parent / "tests" / "odd"


def model(step: int) -> OrderedDict[str, torch.Tensor]:
    """Every dtype, with values that are none, and tensors of no and of one element."""
    torch.manual_seed(3)
    made = OrderedDict(
        {
            "emb.weight": torch.randn(6, 4),
            "h.0.up.weight": torch.randn(4, 4).bfloat16(),
            "h.0.up.bias": torch.randn(4).half(),
            "h.1.up.weight": torch.randn(4, 4).bfloat16(),
            "h.1.up.bias": torch.randn(4).half(),
            "phase": torch.randn(3, dtype=torch.complex64),
            "seen": torch.tensor(step),
            "mask": torch.tensor([True, False, True]),
            "none": torch.empty(0, 4),
            "small": torch.tensor([1.0, -0.5, 448.0]).to(torch.float8_e4m3fn),
            "norm.weight": torch.ones(4),
            "rows": torch.cat([torch.zeros(2, 3), torch.ones(1, 3)]),
        }
    )
    if step == 20:
        made["emb.weight"][1, 2] += 0.25
        made["h.0.up.bias"][3] = float("inf")
        made["h.1.up.weight"] = made["h.1.up.weight"].float()
        made["h.1.up.bias"] = torch.zeros(5)
        made["norm.weight"][0] = float("nan")
        made["mask"][1] = True
        made["new.weight"] = made.pop("rows")
    return made


def optimizer(step: int, weights: OrderedDict[str, torch.Tensor]) -> dict[str, Any]:
    """State by name, with a counter that disagrees, and groups of which B has one more."""
    names = [name for name in weights if name.endswith((".weight", ".bias"))]
    state = {
        name: {"step": torch.tensor(float(step)), "exp_avg": weights[name] * 0.1, "exp_avg_sq": weights[name] ** 2}
        for name in names[:-1]
    }
    if step == 20:
        state["emb.weight"]["step"] = torch.tensor(19.0)
        state["h.0.up.weight"].pop("exp_avg_sq")
    groups: list[dict[str, Any]] = [
        {"lr": 1e-3, "betas": (0.9, 0.95), "weight_decay": 0.1, "foreach": None, "params": names[:3]},
        {"lr": 1e-4, "betas": (0.9, 0.95), "weight_decay": 0.0, "foreach": None, "params": names[3:]},
    ]
    if step == 20:
        groups[0]["lr"], groups[1]["fused"] = 5e-4, True
        groups[1]["params"] = names[3:-1]
        groups.append({"lr": 7e-4, "params": names[-1:]})
    return {"state": state, "param_groups": groups}


def checkpoint(step: int) -> dict[str, Any]:
    """A state with lists, arrays, objects, and keys that are no texts."""
    later = step == 20
    weights = model(step)
    random.seed(step)
    long = list(range(40))
    long[7] += later
    array = np.arange(12, dtype=">f4").reshape(3, 4)
    array[2, 1] += later
    return {
        "model": weights,
        "optimizer": optimizer(step, weights),
        "second": {"state": {}, "param_groups": [{"lr": 0.1, "params": []}]} if later else None,
        "scheduler": {"last_epoch": step, "_last_lr": [1e-3, 1e-4], "base_lrs": [1e-3, 1e-4]},
        "rng": {"python": random.getstate(), "torch": torch.get_rng_state()[:64].clone()},
        "step": step,
        "long": long if not later else [*long, 40],
        "nested": [[1, 2, 3], [4, 5, 6 + later]] * 12,
        "array": array,
        "scalar": np.float32(0.5 + later),
        "when": datetime.timedelta(seconds=step),
        "args": argparse.Namespace(lr=1e-3, name="run", batch=8 + later),
        "_private": "a" * 200,
        "loose": {1: "int", "1.5": "text", None: "none", (2, 3): "tuple", "a.b": {"c": -0.0 if later else 0.0}},
        ("other" if later else "one"): {"tensor": torch.arange(5), "big": 2**70, "data": b"\0\xff" * 40},
        "empty": {},
    }


def main() -> None:
    """Write both steps."""
    for step in (10, 20):
        torch.save(checkpoint(step), HERE / f"step{step}.pt")


if __name__ == "__main__":
    main()
