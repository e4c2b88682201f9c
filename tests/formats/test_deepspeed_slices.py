"""Tensor-parallel weights of DeepSpeed, by what `universal_checkpoint_info` says of them."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import ckptools
from ckptools.errors import NotWholeError
from ckptools.formats.deepspeed.assembler import CutRules, SliceError
from tests.formats.deepspeed_writer import SLOTS, Run, values
from tests.formats.test_deepspeed import of_torch, raw
from tests.formats.test_deepspeed_parallel import edited
from tests.truth import FIXTURES

SHAPES = {"col.weight": (7, 4), "row.weight": (4, 7), "norm.weight": (5,), "qkv.weight": (14, 3), "half.weight": (8, 3)}
INFO: dict[str, Any] = {
    "universal_checkpoint_version": 0.4,
    "parameter_with_row_parallelism_patterns": [r"row.*\.weight"],
    "tp_replicated_parameter_patterns": [r"^norm\.weight$", r"^still\.bias$"],
    "parameter_with_2_sub_params_cat_dim_0": ["half.weight"],
    "parameter_with_sub_params": [{"patterns": [r"^qkv\.weight$"], "shape": [(8, 3, 3), -1], "partition_dim": 0}],
    "sub_param_shard_widths": {r"^qkv\.weight$": [[5, 3], [2, 1], [1, 2]]},
}


def cut(full: torch.Tensor, name: str, rank: int) -> torch.Tensor:
    """One of two ranks' slice, cut by hand."""
    if name == "qkv.weight":
        q, k, v = full.split([8, 3, 3])
        return torch.cat([q.split([5, 3])[rank], k.split([2, 1])[rank], v.split([1, 2])[rank]])
    if name == "half.weight":
        return torch.cat([half.chunk(2)[rank] for half in full.chunk(2)])
    if name in ("norm.weight", "still.bias"):
        return full
    return full.split([4, 3], 1 if name.startswith("row") else 0)[rank]


def save(folder: Path, info: Any = INFO, stage: int = 1, dp: int = 3, **options: Any) -> dict[str, torch.Tensor]:
    """A run of two tensor-parallel ranks; returns the full values."""
    full = values(SHAPES)
    frozen = {"still.weight": values({"x": (7, 2)})["x"], "still.bias": torch.ones(3)} if stage < 3 else {}
    for mp in range(2):
        own = {n: cut(t, n, mp).contiguous() for n, t in full.items()}
        still = {n: cut(t, n, mp).contiguous() for n, t in frozen.items()}
        extra = {"universal_checkpoint_info": info} if info is not None else {}
        groups = [["col.weight", "norm.weight"], ["row.weight", "qkv.weight", "half.weight"]]
        dims = {"pp_degree": 1, "tp_degree": 2}
        run = Run(own, groups, dp, stage, mp=mp, mp_world=2, dims=dims, frozen=still, extra=extra, **options)
        run.buffers = {"seen": torch.tensor([mp])}
        run.save(folder)
    return full | frozen


@pytest.mark.slow
@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("dp", [1, 2, 3])
def test_every_way_to_cut_a_weight_is_joined(tmp_path, stage, dp):
    full = save(tmp_path, stage=stage, dp=dp)
    ck = ckptools.open(tmp_path, all_ranks=True)
    assert (ck.whole, [str(p) for p in ck.problems if p.severity == "error"]) == (True, [])
    assert {n: raw(ck.model[n]) for n in full} == {n: of_torch(t) for n, t in full.items()}
    state = ck.optimizers["optimizer"].state
    for n in SHAPES:
        expected = [of_torch(full[n] * (3 if slot == "exp_avg" else 5) + 0.5) for slot in SLOTS]
        assert [raw(state[n][slot]) for slot in SLOTS] == expected
    ckptools.consolidate(tmp_path, tmp_path / "all.pt")


def test_the_modules_own_weights_are_joined_too(tmp_path):
    full = save(tmp_path, low=torch.bfloat16)
    ck = ckptools.open(tmp_path, weights="module", all_ranks=True)
    assert {n: raw(ck.model[n]) for n in full} == {n: of_torch(t.bfloat16()) for n, t in full.items()}


def test_a_buffer_that_differs_is_the_first_ranks_with_a_warning(tmp_path):
    save(tmp_path)
    ck = ckptools.open(tmp_path, all_ranks=True)
    assert ck.model["seen"].load().tolist() == [0]
    assert [(p.code, p.severity) for p in ck.problems if p.tensor == "model.seen"] == [("CK105", "warning")]


def test_replicated_copies_that_differ_are_refused(tmp_path):
    save(tmp_path, dp=1)
    path = tmp_path / "global_step7" / "zero_pp_rank_0_mp_rank_01_optim_states.pt"
    flat = "single_partition_of_fp32_groups"
    edited(path, lambda t: t["optimizer_state_dict"][flat][0].__setitem__(-1, 0))
    with pytest.raises(NotWholeError, match=r"norm\.weight"):
        ckptools.consolidate(tmp_path, tmp_path / "out.pt")


def test_a_missing_tensor_parallel_rank_is_not_whole(tmp_path):
    save(tmp_path)
    for path in (tmp_path / "global_step7").glob("*mp_rank_01*"):
        path.unlink()
    ck = ckptools.open(tmp_path, all_ranks=True)
    assert not ck.whole and {"CK001"} == {p.code for p in ck.problems if p.severity == "error"}
    with pytest.raises(NotWholeError):
        ckptools.consolidate(tmp_path, tmp_path / "out.pt")


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"sub_param_shard_widths": {}}, "no sub_param_shard_widths"),
        ({"sub_param_shard_widths": {r"^qkv\.weight$": [[9, 3], [2, 1], [1, 2]]}}, "do not make up"),
        ({"autotp_unsupported_parameter_patterns": {r"^qkv\.weight$": "odd heads"}}, "cannot convert it: odd heads"),
        ({"affine_map": {"version": 2, "params": {r"^qkv\.weight$": {}}}}, "affine_map of version 2"),
        ({"affine_map": {"version": 1, "params": {r"^qkv\.weight$": {"ranks": 3}}}}, "no pieces"),
        ({"tp_replicated_parameter_patterns": [r"(a+)+$"]}, "not plain enough"),
        ({"tp_replicated_parameter_patterns": [r".*.*.*x"]}, "too many repeats"),
    ],
)
def test_what_does_not_show_how_it_was_cut_is_refused_by_name(tmp_path, change, why):
    save(tmp_path, INFO | change)
    with pytest.raises(NotWholeError, match=why):
        ckptools.consolidate(tmp_path, tmp_path / "out.pt")


def test_model_states_of_the_first_tensor_parallel_rank_that_are_missing_leave_a_verdict(tmp_path):
    save(tmp_path)
    next(tmp_path.rglob("mp_rank_00_model_states.pt")).unlink()
    ck = ckptools.open(tmp_path)
    assert ck.verdict.headline.startswith("NOT WHOLE: rank 0 missing")
    with pytest.raises(NotWholeError, match="model states of 2 tensor-parallel ranks are needed"):
        ck.consolidate(tmp_path / "out.pt")


@pytest.mark.parametrize("swapped", [True, False])
def test_a_file_in_the_place_of_another_tensor_parallel_ranks_is_refused(tmp_path, swapped):
    folder = shutil.copytree(FIXTURES / "deepspeed-autotp-tp2dp2-z1-fp32" / "ckpt" / "global_step5", tmp_path / "c")
    one, other = (folder / f"zero_pp_rank_0_mp_rank_0{mp}_optim_states.pt" for mp in (0, 1))
    first, second = one.read_bytes(), other.read_bytes()
    one.write_bytes(second if swapped else first)
    other.write_bytes(first)
    ck = ckptools.open(folder)
    assert [p.code for p in ck.problems if p.severity == "error"] == ["CK009"] * (2 if swapped else 1)
    with pytest.raises(NotWholeError, match="does not round to the float32 weight"):
        ck.consolidate(tmp_path / "out.pt")


def test_without_zero_the_optimizers_of_tensor_parallel_ranks_are_not_joinable(tmp_path):
    moments = {n: {"step": torch.tensor(3.0), "exp_avg": torch.rand(3, 4)} for n in range(5)}
    optimizer = {"state": moments, "param_groups": [{"lr": 0.1, "params": [*range(5)]}]}
    save(tmp_path, stage=0, dp=1)
    for path in tmp_path.glob("*/mp_rank_*_model_states.pt"):
        edited(path, lambda tree: tree.update(optimizer=optimizer))
    ck = ckptools.open(tmp_path, all_ranks=True)
    assert (ck.verdict.whole, ck.verdict.joinable) == (True, False)
    assert any("own, whose moments are of its slices and are not joined" in p.message for p in ck.problems)
    with pytest.raises(NotWholeError, match="CK106"):
        ck.consolidate(tmp_path / "out.pt", only="all")
    ck.consolidate(tmp_path / "out.safetensors", only="model")


def test_a_scaled_piece_is_refused():
    piece = {"shape": [4], "source": [0, [1]], "dest": [0, [1]], "locations": [0], "scale": 0.5}
    entry = {"logical_shape": [4], "ranks": {0: {"shard_shape": [4], "pieces": [piece]}}}
    with pytest.raises(SliceError, match="scaled"):
        CutRules({"affine_map": {"version": 1, "params": {"^b$": entry}}}).slices("b", [(4,)])


@given(st.lists(st.integers(0, 4), min_size=1, max_size=4), st.integers(1, 3), st.integers(0, 1))
@settings(deadline=None)
def test_an_affine_map_and_the_rule_for_its_dimension_say_the_same(widths, other, dim):
    shapes = [(n, other) if dim == 0 else (other, n) for n in widths]
    rules = {"parameter_with_row_parallelism_patterns": ["w"] if dim else []}
    by_rule = CutRules(rules).slices("w", shapes)
    total, start, ranks = by_rule.shape, 0, {}
    for rank, (n, shape) in enumerate(zip(widths, shapes, strict=True)):
        strides = [total[1], 1]
        piece = {"shape": list(shape), "source": [start * strides[dim], strides], "dest": [0, [shape[1], 1]]}
        ranks[rank] = {"shard_shape": list(shape), "pieces": [{**piece, "locations": [rank]}]}
        start += n
    entry = {"logical_shape": list(total), "ranks": ranks}
    by_map = CutRules({"affine_map": {"version": 1, "params": {r"^w$": entry}}}).slices("w", shapes)
    filled = [[p for p in pieces if p.local.numel] for pieces in by_map.by_rank]
    assert (by_map.shape, filled) == (total, [[p for p in pieces if p.local.numel] for pieces in by_rule.by_rank])
