"""Optimizer state that one side keeps by number and the other by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import ckptools
from ckptools.diff.digest_file import write_digest_file
from ckptools.diff.record import DIFFERENT
from ckptools.diff.text import verdict_line


def saved(path: Path, tree: Any) -> Path:
    torch.save(tree, path)
    return path


def by_number(tree: dict[str, Any]) -> dict[str, Any]:
    """The same state as an optimizer alone gives it: its parameters numbered through the groups, no model beside."""
    groups = tree["optimizer"]["param_groups"]
    numbers = {name: n for n, name in enumerate(name for group in groups for name in group["params"])}
    state = {numbers[name]: slots for name, slots in tree["optimizer"]["state"].items()}
    numbered = [{**group, "params": [numbers[name] for name in group["params"]]} for group in groups]
    return {"optimizer": {"state": state, "param_groups": numbered}}


def halves(**change: Any) -> dict[str, Any]:
    """A state in which several parameters have one shape, in an order that no sorting of names gives."""
    names = ["z.w", "a.w", "m.w", "b"]
    model = {name: torch.full((2, 2), float(n)) for n, name in enumerate(names)}
    moments = {name: {"step": torch.tensor(3.0), "exp_avg": change.get(name, t * 2)} for name, t in model.items()}
    groups = [{"lr": 0.1, "params": names[:3]}, {"lr": change.get("lr", 0.2), "params": names[3:]}]
    return {"model": model, "optimizer": {"state": moments, "param_groups": groups}}


@pytest.mark.parametrize("swapped", [False, True])
def test_numbers_are_compared_with_names_where_the_groups_tell_the_order(tmp_path, swapped):
    paths = [saved(tmp_path / "a.pt", by_number(halves())), saved(tmp_path / "b.pt", halves())]
    changed = saved(tmp_path / "c.pt", halves(**{"a.w": torch.full((2, 2), 9.0)}))
    for named, odd in ((paths[1], set()), (changed, {"a.w"})):
        found = ckptools.diff(*[paths[0], named][:: -1 if swapped else 1], section="optimizer", every_byte=True)
        assert (found.same, {row.name for row in found.rows if row.verdict != "same"}) == (
            (not odd, {f"optimizer.state.{'?1' if not swapped else 'a.w'}.exp_avg"} if odd else set())
        )
        which = "B's numbers are A's names" if swapped else "A's numbers are B's names"
        assert any(note.startswith(f"optimizer: {which} in the order of its groups") for note in found.notes)


def test_hyperparameters_of_numbers_and_of_names_are_those_of_one_parameter(tmp_path):
    paths = saved(tmp_path / "a.pt", by_number(halves())), saved(tmp_path / "b.pt", halves(lr=0.3))
    found = ckptools.diff(*paths, section="optimizer")
    assert {r.name for r in found.rows if r.verdict in DIFFERENT} == {"optimizer.param_groups.1.lr"}


def another_shape(tree: dict[str, Any]) -> None:
    tree["optimizer"]["state"]["m.w"]["exp_avg"] = torch.ones(4)


def other_groups(tree: dict[str, Any]) -> None:
    tree["optimizer"]["param_groups"][1]["params"].append(tree["optimizer"]["param_groups"][0]["params"].pop())


def another_slot(tree: dict[str, Any]) -> None:
    tree["optimizer"]["state"]["m.w"]["exp_avg_sq"] = torch.ones(2, 2)


@pytest.mark.parametrize("change", [another_shape, other_groups, another_slot])
@pytest.mark.parametrize("values", [False, True])
def test_where_the_order_is_not_proven_no_state_is_said_to_be_on_one_side_alone(tmp_path, change, values):
    other = halves()
    change(other)
    paths = saved(tmp_path / "a.pt", by_number(halves())), saved(tmp_path / "b.pt", other)
    found = ckptools.diff(*paths, section="optimizer", values=values)
    states = [row for row in found.rows if ".state." in row.name]
    assert {row.verdict for row in states} == {"cannot be compared"} and found.same is False
    assert all("order is not proven" in row.detail for row in states)


def test_what_nothing_could_compare_is_not_called_different(tmp_path):
    path = saved(tmp_path / "a.pt", by_number(halves()))
    found = ckptools.diff(path, path, section="optimizer")
    assert verdict_line(found).startswith("not proven the same; cannot be compared: moments")


def test_a_folder_that_has_lost_the_order_of_its_groups_proves_none(tmp_path):
    from torch.distributed.checkpoint import save

    tree = halves()
    flat = {f"state.{n}.{slot}": v for n, slots in tree["optimizer"]["state"].items() for slot, v in slots.items()}
    flat |= {f"param_groups.{n}.lr": g["lr"] for g in tree["optimizer"]["param_groups"] for n in g["params"]}
    save({"optimizer": flat}, checkpoint_id=tmp_path / "b")
    found = ckptools.diff(saved(tmp_path / "a.pt", by_number(tree)), tmp_path / "b", section="optimizer")
    assert {row.verdict for row in found.rows if ".state." in row.name} == {"cannot be compared"}


def test_numbers_are_named_by_a_file_of_digests_too(tmp_path):
    named = saved(tmp_path / "b.pt", halves())
    write_digest_file(ckptools.open(named), tmp_path / "b.json", False)
    found = ckptools.diff(saved(tmp_path / "a.pt", by_number(halves())), tmp_path / "b.json", section="optimizer")
    assert found.same is True and any("A's numbers are B's names" in note for note in found.notes)
