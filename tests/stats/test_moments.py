"""Moments beside the model: the update is the step that the optimizer took, and what is odd is counted."""

from __future__ import annotations

import math
from unittest import mock

import pytest
import torch

import ckptools
from ckptools.consolidate.writers import dcp
from ckptools.errors import UsageError
from tests.truth import FIXTURES

COMPOSER = FIXTURES / "composer-0.13.5-torch1.13.1-sharded-w4"


def trained(path, steps=3, **options):
    """Train two layers; how far the last step moved each parameter, and the file."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(9, 7), torch.nn.Linear(7, 5))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02, weight_decay=0.0, **options)
    for _ in range(steps):
        before = {n: p.detach().clone() for n, p in model.named_parameters()}
        optimizer.zero_grad()
        model(torch.randn(4, 9)).square().sum().backward()
        optimizer.step()
    moved = {n: (p.detach() - before[n]).double().square().mean().sqrt().item() for n, p in model.named_parameters()}
    state = optimizer.state_dict()
    torch.save({"model": model.state_dict(), "optimizer": state}, path)
    return moved, state, model


@pytest.mark.parametrize("options", [{}, {"eps": 1e-2}, {"betas": (0.5, 0.6)}, {"amsgrad": True}], ids=str)
def test_an_update_is_the_step_that_the_optimizer_took_last(tmp_path, options):
    moved, _, model = trained(tmp_path / "m.pt", **options)
    found = ckptools.open(tmp_path / "m.pt").moments()
    weights = {name: p.detach().double().square().mean().sqrt().item() for name, p in model.named_parameters()}
    assert {row.name for row in found.rows} == moved.keys()
    for row in found.rows:
        assert row.corrected and (row.step, row.lr, row.problem) == (3, 0.02, "")
        assert row.update * row.lr == pytest.approx(moved[row.name], rel=1e-4)
        assert row.weight == pytest.approx(weights[row.name])
        assert row.ratio == pytest.approx(moved[row.name] / weights[row.name], rel=1e-4)


def test_the_elements_of_a_weight_and_of_both_its_moments_are_counted(tmp_path):
    _, _, model = trained(tmp_path / "m.pt")
    held = sum(p.numel() for p in model.parameters())
    assert ckptools.open(tmp_path / "m.pt").moments().elements == 3 * held


def test_without_a_step_nothing_is_corrected_and_without_eps_there_is_no_update(tmp_path):
    _, state, model = trained(tmp_path / "m.pt")
    first, second = state["state"][0]["exp_avg"], state["state"][0]["exp_avg_sq"]
    for slots in state["state"].values():
        del slots["step"]
    torch.save({"model": model.state_dict(), "optimizer": state}, tmp_path / "a.pt")
    row = ckptools.open(tmp_path / "a.pt").moments().rows[0]
    plain = (first / (second.sqrt() + 1e-8)).double().square().mean().sqrt().item()
    assert (row.corrected, row.step, row.update) == (False, None, pytest.approx(plain, rel=1e-5))
    del state["param_groups"][0]["eps"]
    torch.save({"model": model.state_dict(), "optimizer": state}, tmp_path / "b.pt")
    row = ckptools.open(tmp_path / "b.pt").moments().rows[0]
    assert (row.eps, row.update, row.ratio) == (None, None, None)
    assert row.exp_avg == pytest.approx(first.double().square().mean().sqrt().item())
    assert row.exp_avg_sq == pytest.approx(second.double().mean().sqrt().item())


def test_negative_second_moments_and_what_is_not_finite_are_counted_and_left_out(tmp_path):
    _, state, model = trained(tmp_path / "m.pt")
    clean = ckptools.open(tmp_path / "m.pt").moments(filter="0.weight").rows[0]
    state["state"][0]["exp_avg_sq"][0, :2] = torch.tensor([-1.0, math.nan])
    state["state"][0]["exp_avg"][1, 0] = math.inf
    torch.save({"model": model.state_dict(), "optimizer": state}, tmp_path / "m.pt")
    row = ckptools.open(tmp_path / "m.pt").moments(filter="0.weight").rows[0]
    assert (row.negative, row.nonfinite, row.elements) == (1, 2, 63)
    assert 0 < row.update < 2 * clean.update


def test_moments_of_sharded_optimizers_are_those_of_their_full_tensors():
    with ckptools.open(COMPOSER, all_ranks=True) as ck:
        found = ck.moments()
        (optimizer,) = ck.optimizers.values()
        assert len(found.rows) == len(optimizer.state) > 5
        for row in found.rows:
            first, second = (optimizer.state[row.name][slot].load().double() for slot in ("exp_avg", "exp_avg_sq"))
            assert (row.elements, row.problem) == (first.numel(), "")
            assert row.exp_avg == pytest.approx(first.square().mean().sqrt().item())
            assert row.exp_avg_sq == pytest.approx(second.mean().sqrt().item())
            assert row.weight == pytest.approx(ck.model[row.name].load().double().square().mean().sqrt().item())


def test_a_missing_rank_leaves_what_the_others_hold(tmp_path):
    for path in COMPOSER.glob("*rank[013].pt"):
        (tmp_path / path.name).write_bytes(path.read_bytes())
    found = ckptools.open(tmp_path / "ep0-ba5-rank0.pt", all_ranks=True).moments()
    rows = [row for row in found.rows if row.elements < row.numel]
    assert rows and found.incomplete == len(rows)
    assert all(row.update and row.problem.startswith("parameter, exp_avg, exp_avg_sq: gap ") for row in rows)


def test_an_optimizer_without_moments_is_no_adam(tmp_path):
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "m.pt")
    with pytest.raises(UsageError, match="no optimizer in it has exp_avg and exp_avg_sq"):
        ckptools.open(tmp_path / "m.pt").moments()


def embedding(path, optimizer=True):
    torch.manual_seed(0)
    model = torch.nn.Embedding(40, 6)
    with torch.no_grad():
        model.weight[[3, 17]] = 0
    adam = torch.optim.AdamW(model.parameters())
    used = torch.tensor([i for i in range(40) if i not in (3, 5, 30)])
    model(used).sum().backward()
    adam.step()
    state = {"optimizer": adam.state_dict()} if optimizer else {}
    with torch.no_grad():
        model.weight[17] = -0.0
    torch.save({"model": {"emb.weight": model.weight.detach(), "bias": torch.ones(3)}, **state}, path)


def test_rows_that_are_zero_or_never_got_a_gradient_are_named(tmp_path):
    embedding(tmp_path / "m.pt")
    (row,) = ckptools.open(tmp_path / "m.pt").dead_rows().rows
    assert (row.name, row.rows, row.zero, row.first_zero) == ("emb.weight", 40, 2, (3, 17))
    assert (row.idle, row.first_idle, row.problem) == (3, (3, 5, 30), "")


def test_without_an_optimizer_nobody_says_which_rows_got_no_gradient(tmp_path):
    embedding(tmp_path / "m.pt", optimizer=False)
    (row,) = ckptools.open(tmp_path / "m.pt").dead_rows().rows
    assert (row.zero, row.idle, row.first_idle) == (2, None, ())


def test_of_a_parameter_in_two_optimizers_nobody_says_which_rows_got_no_gradient(tmp_path):
    embedding(tmp_path / "m.pt")
    state = torch.load(tmp_path / "m.pt")
    named = {"state": {"emb.weight": state["optimizer"]["state"][0]}, "param_groups": [{"params": ["emb.weight"]}]}
    torch.save({"model": state["model"], "optimizer": named, "optimizer2": named}, tmp_path / "two.pt")
    (row,) = ckptools.open(tmp_path / "two.pt").dead_rows().rows
    assert (row.zero, row.idle) == (2, None)


def test_rows_of_sharded_matrices_are_looked_at_where_they_are_whole(tmp_path):
    known: dict[str, int] = {}
    with ckptools.open(COMPOSER, all_ranks=True) as ck:
        for row in ck.dead_rows().rows:
            known[row.name] = row.zero
            zero = (ck.model[row.name].load() == 0).all(dim=1).nonzero().flatten().tolist()
            assert (row.rows, row.zero, list(row.first_zero)) == (row.shape[0], len(zero), zero[:8])
    for path in COMPOSER.glob("*rank[013].pt"):
        (tmp_path / path.name).write_bytes(path.read_bytes())
    rows = ckptools.open(tmp_path / "ep0-ba5-rank0.pt", all_ranks=True).dead_rows().rows
    cut = [row for row in rows if row.rows < row.shape[0]]
    assert cut and all("gap " in row.problem and row.zero <= known[row.name] for row in cut)


def test_moments_that_are_cut_otherwise_than_each_other_have_the_same_update(tmp_path):
    _, state, model = trained(tmp_path / "m.pt")
    for slots in state["state"].values():
        slots["exp_avg"] = slots["exp_avg"].bfloat16()
    torch.save({"model": model.state_dict(), "optimizer": state}, tmp_path / "m.pt")
    whole = {row.name: row for row in ckptools.open(tmp_path / "m.pt").moments().rows}
    with mock.patch.object(dcp, "ITEM_BYTES", 60):
        ckptools.consolidate(tmp_path / "m.pt", tmp_path / "out.dcp", only="all")
    with ckptools.open(tmp_path / "out.dcp") as ck:
        (optimizer,) = ck.optimizers.values()
        slots = optimizer.state["0.weight"]
        assert 1 < len(slots["exp_avg"].shards) < len(slots["exp_avg_sq"].shards)
        for row in ck.moments().rows:
            assert (row.elements, row.problem) == (row.numel, "")
            assert (row.update, row.exp_avg) == pytest.approx((whole[row.name].update, whole[row.name].exp_avg))


def test_moments_and_rows_that_claim_far_more_elements_than_the_file_has_are_not_read(tmp_path):
    huge = torch.ones(1).expand(3_000_000, 1_000_000)
    state = {0: {"step": torch.tensor(1.0), "exp_avg": huge, "exp_avg_sq": huge}}
    groups = [{"lr": 0.1, "eps": 1e-8, "params": [0]}]
    torch.save({"model": {"w": huge}, "optimizer": {"state": state, "param_groups": groups}}, tmp_path / "m.pt")
    ck = ckptools.open(tmp_path / "m.pt")
    again = "its strides show the bytes of a record more than once"
    assert [(row.elements, row.problem) for row in ck.moments().rows] == [(0, f"exp_avg, exp_avg_sq: {again}")]
    (row,) = ck.dead_rows().rows
    assert (row.rows, row.problem) == (0, f"parameter, exp_avg_sq: {again}")


@pytest.mark.parametrize(("beta", "step"), [(0.0, -1), (-0.5, 1.5), (0.9, -(10**10)), (1.0, 3), (1e200, 10.0)])
def test_betas_and_steps_that_no_adam_has_correct_nothing(tmp_path, beta, step):
    _, state, model = trained(tmp_path / "m.pt")
    state["param_groups"][0]["betas"] = (beta, 0.9)
    for slots in state["state"].values():
        slots["step"] = step
    torch.save({"model": model.state_dict(), "optimizer": state}, tmp_path / "m.pt")
    assert {(row.corrected, row.problem) for row in ckptools.open(tmp_path / "m.pt").moments().rows} == {(False, "")}


def test_moments_that_are_no_tensors_are_none(tmp_path):
    _, state, model = trained(tmp_path / "m.pt")
    state["state"][0] |= {"exp_avg": 5, "exp_avg_sq": 5}
    torch.save({"model": model.state_dict(), "optimizer": state}, tmp_path / "m.pt")
    assert len(ckptools.open(tmp_path / "m.pt").moments().rows) == len(state["state"]) - 1
