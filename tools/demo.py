"""`python -m tools.demo DIR`: the main job from end to end, as `make demo` runs it.

Trains and saves with four ranks, looks into one rank's file, consolidates all of them, and compares the result
bit for bit with the state that torch itself gathered from the trained model.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from ckptools.training.options import FULL_STATE
from ckptools.training.rank import say


def main(folder: str) -> int:
    """Run the commands, then compare; returns the exit code."""
    first, merged = f"{folder}/run/ep0-ba5-rank0.pt", f"{folder}/model.pt"
    run("create", f"{folder}/run", "--strategy", "fsdp1", "--world-size", "4", "--full")
    run("inspect", first)
    run("consolidate", first, "-o", merged)
    say(f'\n>>> state = torch.load("{merged}")')
    total, different = compare(Path(merged), Path(folder, "run", FULL_STATE))
    for name in different:
        say(f"differs: {name}")
    say(f"{total - len(different)} of {total} tensors equal the trained model")
    return 1 if different or total == 0 else 0


def run(*arguments: str) -> None:
    """Show one command and run it.

    Raises:
        SystemExit: it failed; it has said why, and the code is its own.
    """
    say(f"\n$ ckptools {' '.join(arguments)}")
    code = subprocess.run([sys.executable, "-m", "ckptools", *arguments], check=False).returncode
    if code:
        raise SystemExit(code)


def compare(merged: Path, full: Path) -> tuple[int, list[str]]:
    """Compare a consolidated file in composer's tree with `full.pt`, model and optimizer.

    Returns:
        How many tensors the trained model and its optimizer have, and the names of those that the consolidated
        file lacks or holds with other bits. Tensors that only the consolidated file has are among the names.
    """
    state = torch.load(merged)["state"]
    (optimizer,) = state["optimizers"].values()
    found = dict(tensors({"model": state["model"], "optimizer": optimizer["state"]}))
    truth = torch.load(full)
    expected = dict(tensors({"model": truth["model"], "optimizer": truth["optimizer"]["state"]}))
    different = [name for name, tensor in expected.items() if name not in found or not same(found[name], tensor)]
    return len(expected), different + sorted(found.keys() - expected.keys())


def tensors(tree: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    """Yield every tensor of nested dicts under its keys, joined by ` / `."""
    for key, value in tree.items():
        name = f"{prefix}{key}"
        if isinstance(value, torch.Tensor):
            yield name, value
        elif isinstance(value, dict):
            yield from tensors(value, f"{name} / ")


def same(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors have the same dtype, shape and bits; a NaN equals itself, 0.0 is not -0.0."""
    if one.dtype != other.dtype or one.shape != other.shape:
        return False
    return torch.equal(*(tensor.contiguous().flatten().view(torch.uint8) for tensor in (one, other)))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
