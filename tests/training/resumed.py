"""Train, save in the middle, go on from there, compare.

The folder gets one per layout, `full.pt` of when they were saved, and `resumed.json`: what came of going on from each
layout, in other strategies, and without one of the things that a checkpoint keeps.
"""

from __future__ import annotations

import dataclasses
import json
import random
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from ckptools.training import layouts, model
from ckptools.training.model import Position, make_scheduler
from ckptools.training.options import CreateOptions, ModelSize, ParallelOptions, ResumeOptions
from ckptools.training.resuming import found_at, resume
from ckptools.training.run import Run, full_state, prepare, save_full_state, train
from tests.training.forked import run_ranks
from tests.versions import torch_that_trains
from tools.demo import same, tensors

SMALL = ModelSize(vocab=31, width=20, layers=2, context=7)
"""A model whose runs take a second; two blocks, so that a pipeline of three has a stage with none."""

MIDDLE = "middle.pt"
"""The state that was saved, for other runs to compare with."""

WITHOUT: dict[str, Callable[[Run], Any]] = {
    "python": lambda run: random.seed(99),
    "numpy": lambda run: np.random.seed(99),
    "torch": lambda run: torch.manual_seed(99),
    "position": lambda run: setattr(run, "position", Position()),
    "scheduler": lambda run: setattr(run, "scheduler", make_scheduler("lambda", run.optimizer, 6)),
    "moments": lambda run: run.optimizer.state.clear(),
}
"""Spoils one of the things that were restored."""


@dataclass(frozen=True)
class What:
    """What to go on from, and how.

    Attributes:
        layouts: those in which it is saved.
        resumed: those that another run begins with, which must be as it was when it was saved.
        to_the_end: those of these from which it goes on, to the same end.
        others: strategies that the first layout is put into as well.
        elsewhere: folders of other runs of this kind, whose checkpoints in each layout are put into this one.
        without: go on from the first layout without each thing that a checkpoint keeps.
    """

    layouts: Sequence[str]
    resumed: Sequence[str] = ()
    to_the_end: Sequence[str] = ()
    others: Sequence[str] = ()
    elsewhere: Sequence[str] = ()
    without: bool = False


def go_on_from_each(options: CreateOptions, what: What) -> None:
    """Be one rank; every rank of the run is called alike."""
    out = options.out
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    first = what.layouts[0]
    asked = dataclasses.replace(options, layout=first).completed()
    middle: list[dict[str, Any]] = []
    run = trained(prepare(asked, say_nothing), lambda run: save(run, out, what.layouts, middle))
    truth = state(run)
    found = {name: put_into(asked, out / name, middle[0])[1] for name in what.resumed if name not in what.to_the_end}
    found |= {name: went_on(asked, out / name, middle[0], truth) for name in what.to_the_end}
    for name, spoil in WITHOUT.items() if what.without else ():
        found[f"without {name}"] = went_on(asked, out / first, middle[0], truth, spoil)
    for other in what.others:
        found[other] = put_into(dataclasses.replace(asked, strategy=other), out / first, middle[0])[1]
    for folder in map(Path, what.elsewhere):
        saved = torch.load(folder / MIDDLE, weights_only=False)
        for path in (path for path in folder.iterdir() if path.is_dir() and path.name != "huggingface"):
            found[str(path)] = put_into(asked, path, saved)[1]
    if dist.get_rank() == 0:
        torch.save(middle[0], out / MIDDLE)
        (out / "resumed.json").write_text(json.dumps(found))
    dist.barrier()
    # As every rank does: see `ckptools.training.rank`.
    del run
    dist.destroy_process_group()


def say_nothing(line: str) -> None:
    pass


def trained(run: Run, save: Callable[[Run], None] = lambda run: None) -> Run:
    train(run, say_nothing, save)
    return run


def save(run: Run, out: Path, names: Sequence[str], middle: list[dict[str, Any]]) -> None:
    """Save in every layout, and whole, and remember what there is, unless this is the end."""
    if run.step == run.options.steps:
        return
    for name in names:
        (out / name).mkdir(parents=True, exist_ok=True)
        asked, run.options = run.options, dataclasses.replace(run.options, layout=name)
        layouts.SAVE[name](run, out / name)
        run.options = asked
    save_full_state(run, out)
    middle.append(state(run))


def state(run: Run) -> dict[str, Any]:
    """What there is: losses, every tensor, hyperparameters by name, and this rank's random states; a collective."""
    whole = full_state(run)
    groups = [(name, group) for group in whole["optimizer"]["param_groups"] for name in group["params"]]
    return {
        "losses": list(run.losses),
        "tensors": {name: tensor.clone() for name, tensor in tensors(whole)},
        "groups": {name: {**group, "params": []} for name, group in groups},
        "random": model.random_fingerprint(model.capture_random_states(run.device)),
        "at": (run.step, run.position, run.scheduler.last_epoch),
    }


def differing(found: dict[str, Any], truth: dict[str, Any]) -> list[str]:
    """What of a state is not that of another: names of tensors, and of the rest but losses and random states."""
    names = [name for name, tensor in truth["tensors"].items() if not same(found["tensors"][name], tensor)]
    return names + [key for key in ("groups", "at") if found[key] != truth[key]]


def put_into(asked: CreateOptions, folder: Path, middle: dict[str, Any]) -> tuple[Run, dict[str, Any]]:
    """Put a checkpoint into a new run and say what differs from when it was saved."""
    said: list[str] = []
    run = prepare(asked, say_nothing)
    resume(run, found_at(folder), said.append)
    own = model.capture_random_states(run.device)
    found = state(run)
    model.restore_random_states(own, run.device)
    put = {
        "said": said,
        "put otherwise": differing(found, middle),
        "random put": on_all_ranks(same_random(found, middle)),
    }
    return run, put


def same_random(found: dict[str, Any], truth: dict[str, Any]) -> bool:
    return bool(found["random"] == truth["random"])


def on_all_ranks(here: bool) -> bool:
    """Whether something is so on every rank; a collective."""
    everywhere: list[bool] = [False] * dist.get_world_size()
    dist.all_gather_object(everywhere, here)
    return all(everywhere)


def went_on(
    asked: CreateOptions,
    folder: Path,
    middle: dict[str, Any],
    truth: dict[str, Any],
    spoil: Callable[[Run], Any] = lambda run: None,
) -> dict[str, Any]:
    """Go on to the end and say what differs."""
    run, put = put_into(asked, folder, middle)
    spoil(run)
    found = state(trained(run))
    return {
        **put,
        "losses": found["losses"] == truth["losses"][-len(found["losses"]) :] and len(found["losses"]) == 3,
        "random": on_all_ranks(same_random(found, truth)),
        "differ": differing(found, truth),
    }


def gone_on(out: Path, strategy: str, *layouts: str, world_size: int = 2, **more: Any) -> dict[str, Any]:
    """Train six steps over the end of an epoch, save the third in each layout, and go on from there.

    Args:
        out: a folder for all of it.
        strategy: of the run.
        layouts: those it is saved in.
        world_size: ranks.
        more: other fields of `resumed.What`, or choices of the strategy.
    """
    torch_that_trains(strategy)
    choices = {key: more.pop(key) for key in list(more) if key in ParallelOptions.__dataclass_fields__}
    options = CreateOptions(
        out,
        strategy,
        world_size,
        steps=6,
        batch=128,
        size=SMALL,
        parallel=ParallelOptions(**choices),
        resuming=ResumeOptions(save_every=3),
    )
    what = What(layouts, **({"resumed": layouts, "to_the_end": layouts} | more))
    run_ranks(world_size, go_on_from_each, options, what)
    found: dict[str, Any] = json.loads((out / "resumed.json").read_text())
    return found


def put(found: dict[str, Any]) -> bool:
    """Whether everything was put where it had been: all that a step depends on, random states too."""
    return bool(found["random put"] and not found["put otherwise"])


def equal(found: dict[str, Any]) -> bool:
    """Whether that was so, and all that followed was as in the run that was not stopped."""
    return put(found) and bool(found["losses"] and found["random"] and not found["differ"])
