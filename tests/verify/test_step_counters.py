"""Counters of training, optimizers, schedulers and epochs are held against each other."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.optim import lr_scheduler

import ckptools
from ckptools.doctor.answers import IN_STEP
from ckptools.verify.record import Check

CAUSES = "was it stepped once per epoch, rebuilt on resume, or stepped once per process (x world size)?"

Made = Callable[[torch.optim.Optimizer], Any]


def constant(optimizer: torch.optim.Optimizer) -> Any:
    return lr_scheduler.LambdaLR(optimizer, lambda _: 1.0)


def sequence(optimizer: torch.optim.Optimizer) -> Any:
    return lr_scheduler.SequentialLR(optimizer, [constant(optimizer), constant(optimizer)], [4])


def chain(optimizer: torch.optim.Optimizer) -> Any:
    return lr_scheduler.ChainedScheduler([constant(optimizer), constant(optimizer)])


def trained(steps: int, scheduled: int, made: Made = constant, kind: Any = torch.optim.AdamW) -> dict[str, Any]:
    torch.manual_seed(0)
    model = torch.nn.Linear(2, 3)
    optimizer = kind(model.parameters(), lr=0.1)
    scheduler = made(optimizer)
    for _ in range(steps):
        model(torch.ones(2)).sum().backward()
        optimizer.step()
    for _ in range(scheduled):
        scheduler.step()
    return {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "scheduler": scheduler.state_dict()}


def counters(folder: Path, state: dict[str, Any]) -> Check:
    torch.save(state, folder / "x.pt")
    return next(c for c in ckptools.verify(folder / "x.pt").checks if c.name == "step counters")


def test_a_scheduler_that_was_rebuilt_on_resume_is_out_of_step(tmp_path):
    found = counters(tmp_path, trained(40, 22) | {"epoch": 1, "global_step": 40})
    expected = f"CK204  scheduler.last_epoch 22 beside global_step 40, the optimizer's steps 40: {CAUSES}"
    assert (found.result, [str(p) for p in found.problems]) == ("warn", [expected])
    (answer,) = [row for row in ckptools.doctor(tmp_path / "x.pt").rows if row.question == IN_STEP]
    assert (answer.answer, answer.doubtful) == ("no", True) and CAUSES in answer.evidence


@pytest.mark.parametrize("made", [constant, sequence, chain])
@pytest.mark.parametrize(("scheduled", "result"), [(9, "ok"), (10, "ok"), (11, "ok"), (20, "warn"), (7, "warn")])
def test_a_scheduler_counts_steps_whatever_it_is_made_of(made, scheduled, result, tmp_path):
    assert counters(tmp_path, trained(10, scheduled, made)).result == result


def test_a_scheduler_may_count_epochs(tmp_path):
    found = counters(tmp_path, trained(40, 3) | {"epoch": 3, "global_step": 40})
    words = "40 in global_step, 2 optimizer steps, scheduler.last_epoch 3, once per epoch"
    assert (found.result, found.detail) == ("ok", words)


def test_whether_a_scheduler_counts_epochs_is_not_judged_where_nothing_counts_them(tmp_path):
    found = counters(tmp_path, trained(40, 4) | {"global_step": 40})
    words = f"40 in global_step, 2 optimizer steps; 2 of 3 looked at: scheduler.last_epoch 4: {CAUSES}"
    assert (found.result, found.detail) == ("partly", words)
    assert not [row for row in ckptools.doctor(tmp_path / "x.pt").rows if row.question == IN_STEP and row.ok]


def test_a_scheduler_alone_beside_an_optimizer_that_counts_nothing_is_held_against_the_training(tmp_path):
    sgd = trained(10, 10, kind=torch.optim.SGD)
    assert counters(tmp_path, sgd | {"global_step": 10}).result == "ok"
    assert counters(tmp_path, sgd | {"global_step": 13}).result == "warn"
    assert counters(tmp_path, sgd).not_ok.startswith("not judged: no optimizer counts steps")


def test_optimizers_that_take_turns_count_their_own_steps(tmp_path):
    one, other = trained(10, 10), trained(50, 50)
    state = {
        "generator": one["model"],
        "discriminator": other["model"],
        "opt_g": one["optimizer"],
        "opt_d": other["optimizer"],
        "sched_g": one["scheduler"],
        "sched_d": other["scheduler"],
    }
    assert counters(tmp_path, state | {"global_step": 10}).result == "ok"
    assert counters(tmp_path, state | {"global_step": 60}).result == "ok"
    assert counters(tmp_path, state | {"global_step": 33}).result == "warn"


def stateless(kind: Any, **how: Any) -> dict[str, Any]:
    model = torch.nn.Linear(2, 3)
    optimizer = kind(model.parameters(), lr=0.1, **how)
    state = {**optimizer.state_dict(), "state": {}}
    return {"model": model.state_dict(), "optimizer": state}


@pytest.mark.parametrize(
    ("kind", "how", "warned"),
    [
        (torch.optim.AdamW, {}, True),
        (torch.optim.RMSprop, {}, True),
        (torch.optim.Adagrad, {}, True),
        (torch.optim.SGD, {"momentum": 0.9}, True),
        (torch.optim.SGD, {}, False),
    ],
)
def test_an_optimizer_that_lost_all_its_state_is_named_and_one_that_keeps_none_is_not(kind, how, warned, tmp_path):
    torch.save(stateless(kind, **how) | {"step": 8}, tmp_path / "x.pt")
    found = [str(p) for p in ckptools.open(tmp_path / "x.pt").problems if p.code == "CK203"]
    words = "its groups list 2 parameters and there is no state of any, at step 8: all moments would begin at zero"
    assert found == ([f"CK203  optimizer  {words}"] if warned else [])
    check = next(c for c in ckptools.verify(tmp_path / "x.pt").checks if c.name == "optimizer covers params")
    assert check.result == ("warn" if warned else "not judged")


def test_an_optimizer_without_state_before_the_first_step_is_as_it_should_be(tmp_path):
    torch.save(stateless(torch.optim.AdamW) | {"step": 0}, tmp_path / "x.pt")
    assert not ckptools.open(tmp_path / "x.pt").problems


def test_an_epoch_that_is_the_first_counts_too(tmp_path):
    found = counters(tmp_path, trained(40, 1) | {"epoch": 0, "global_step": 40})
    assert (found.result, found.detail.endswith("scheduler.last_epoch 1, once per epoch")) == ("ok", True)
