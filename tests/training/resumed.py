"""Train, save in the middle, go on from there, compare.

The folder gets one per layout and `resumed.json`: what came of going on from each layout, and of going on from the
first without one of the things that a checkpoint keeps.
"""

from __future__ import annotations

import dataclasses
import json
import random
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from ckptools.training import full_state, layouts, random_states
from ckptools.training.data import Position
from ckptools.training.demo import same, tensors
from ckptools.training.optimizers import make_scheduler
from ckptools.training.options import CreateOptions
from ckptools.training.resume import resume
from ckptools.training.run import Run, prepare, train
from ckptools.training.snapshots import found_at

WITHOUT: dict[str, Callable[[Run], Any]] = {
    "python": lambda run: random.seed(99),
    "numpy": lambda run: np.random.seed(99),
    "torch": lambda run: torch.manual_seed(99),
    "position": lambda run: setattr(run, "position", Position()),
    "scheduler": lambda run: setattr(run, "scheduler", make_scheduler("lambda", run.optimizer, 6)),
    "moments": lambda run: run.optimizer.state.clear(),
}
"""Spoils one of the things that were restored."""


def go_on_from_each(options: CreateOptions, names: tuple[str, ...]) -> None:
    """Be one rank; every rank of the run is called alike."""
    out = options.out
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    asked = dataclasses.replace(options, layout=names[0]).completed()
    run = trained(prepare(asked, lambda line: None), lambda run: save(run, out, names))
    truth = state(run)
    found = {name: gone_on(asked, out / name, truth) for name in names}
    broadcast = dataclasses.replace(asked, resuming=dataclasses.replace(asked.resuming, load="broadcast"))
    found["broadcast"] = gone_on(broadcast, out / names[0], truth)
    found |= {f"without {what}": gone_on(asked, out / names[0], truth, spoil) for what, spoil in WITHOUT.items()}
    if dist.get_rank() == 0:
        (out / "resumed.json").write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


def trained(run: Run, save: Callable[[Run], None] = lambda run: None) -> Run:
    train(run, lambda line: None, save)
    return run


def save(run: Run, out: Path, names: tuple[str, ...]) -> None:
    """Save in every layout, unless this is the end."""
    if run.step == run.options.steps:
        return
    for name in names:
        (out / name).mkdir(parents=True, exist_ok=True)
        asked, run.options = run.options, dataclasses.replace(run.options, layout=name)
        layouts.BY_NAME[name].save(run, out / name)
        run.options = asked
    dist.barrier()


def state(run: Run) -> dict[str, Any]:
    """What there is at the end: losses, every tensor, and the random states of this rank."""
    return {
        "losses": run.losses,
        "tensors": dict(tensors(full_state.gather(run))),
        "groups": full_state.gather(run)["optimizer"]["param_groups"],
        "random": random_states.fingerprint(random_states.capture(run.device)),
    }


def gone_on(
    asked: CreateOptions, folder: Path, truth: dict[str, Any], spoil: Callable[[Run], Any] = lambda run: None
) -> dict[str, Any]:
    """Go on to the end and say what differs."""
    said: list[str] = []
    run = prepare(asked, lambda line: None)
    resume(run, found_at(folder), said.append)
    spoil(run)
    found = state(trained(run))
    return {
        "said": said,
        "losses": found["losses"] == truth["losses"][-len(found["losses"]) :] and len(found["losses"]) == 3,
        "groups": found["groups"] == truth["groups"],
        "random": found["random"] == truth["random"],
        "differ": [name for name, tensor in truth["tensors"].items() if not same(found["tensors"][name], tensor)],
    }
