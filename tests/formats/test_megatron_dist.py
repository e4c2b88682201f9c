"""Megatron's torch_dist: stored names made the model's, the optimizer by weight, flat runs placed or refused."""

from __future__ import annotations

import hashlib
import json
import shutil
import warnings
from argparse import Namespace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import given, settings
from hypothesis import strategies as st

import ckptools
from ckptools.errors import NotWholeError, ReadError
from ckptools.formats import options as limits
from ckptools.formats.dcp import locator
from ckptools.formats.megatron_dist import stored as stacked
from ckptools.formats.megatron_dist.stored import StoredState
from ckptools.model.regions import Box, contiguous_strides
from ckptools.model.shards import Shard, Source
from ckptools.model.tensor import Tensor
from ckptools.tensor_io import read
from tests.formats.test_truth import same
from tests.truth import FIXTURES, load_truth

SAMPLE = FIXTURES / "megatron-tp2pp2-fp32" / "ckpt"
LIVE = {
    "self_attention.linear_qkv.layer_norm_": "input_layernorm.",
    "mlp.linear_fc1.layer_norm_": "pre_mlp_layernorm.",
}


@pytest.fixture
def sample(tmp_path) -> Path:
    return Path(shutil.copytree(SAMPLE, tmp_path / "run"))


def live(name: str) -> str:
    """The name that a module without Transformer Engine gives a norm which is stored fused."""
    for fused, own in LIVE.items():
        name = name.replace(fused, own)
    return name


def test_every_weight_and_moment_equals_the_truth_layer_by_layer():
    ck, truth = ckptools.open(SAMPLE, all_ranks=True), load_truth("megatron-tp2pp2-fp32")
    (optimizer,) = ck.optimizers.values()
    found: dict[str, Any] = {f"model/{live(k)}": v for k, v in ck.model.items()}
    found |= {f"optim/{live(k)}/{slot}": v for k, e in optimizer.state.items() for slot, v in e.items()}
    held = {k: v for k, v in truth.items() if not k.startswith("stored/") and "/output_layer." not in k}
    assert [k for k, v in held.items() if not same(found.get(k), *v)] == [] and len(held) == 60


def test_the_metadata_file_itself_gives_the_names_as_stored():
    ck = ckptools.open(SAMPLE / "iter_0000005" / ".metadata", all_ranks=True)
    stored = {k[7:]: v for k, v in load_truth("megatron-tp2pp2-fp32").items() if k.startswith("stored/")}
    assert [k for k, v in stored.items() if not same(ck.tree[k], *v)] == [] and len(stored) == 36


def test_both_forms_of_one_run_hold_the_same():
    legacy, dist = (ckptools.open(SAMPLE.parent / form, all_ranks=True) for form in ("legacy", "ckpt"))
    for name, tensor in dist.model.items():
        if isinstance(tensor, Tensor):
            assert torch.equal(tensor.load(), legacy.model[live(name)].load())
    extra = {f"decoder.layers.{n}.mlp.linear_fc1._extra_state": None for n in (0, 1)}
    assert {name: dist.model[name] for name in extra} == extra


def test_a_layer_of_many_items_finds_its_values_when_it_is_loaded(monkeypatch):
    every = ckptools.open(SAMPLE, all_ranks=True)
    monkeypatch.setattr(locator, "MAX_LOCATED", 5)
    monkeypatch.setattr(limits, "MAX_RANKS", 0)
    one = ckptools.open(SAMPLE)
    name = "decoder.layers.1.mlp.linear_fc1.weight"
    assert one.model[name].unread and torch.equal(one.model[name].load(), every.model[name].load())
    assert torch.equal(one.model[name][3:5], every.model[name].load()[3:5])


# -- made here ---------------------------------------------------------------------------------------------------------


def write(folder: Path, flat: dict[str, Any], common: dict[str, Any] | None, **config: Any) -> Path:
    """A checkpoint as Megatron's planner writes one: without nested paths."""
    planner = dcp.DefaultSavePlanner(flatten_state_dict=False)
    flat = {name: [value] if "/shard_" in name else value for name, value in flat.items()}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save(flat, checkpoint_id=folder, planner=planner)
    (folder / "metadata.json").write_text(json.dumps({"sharded_backend": "torch_dist", **config}))
    if common is not None:
        torch.save(common, folder / "common.pt")
    return folder


ARGS = Namespace(num_layers=3, world_size=8)
COMMON = {"args": ARGS, "iteration": 9, "optimizer": {"state": {"common_step": 9}, "param_groups": [{"lr": 0.1}]}}


@pytest.mark.parametrize("by_column", [1, stacked.MIN_COLUMNS])
def test_stacked_layers_come_apart_in_the_order_of_the_layers(tmp_path, monkeypatch, by_column):
    monkeypatch.setattr(stacked, "MIN_COLUMNS", by_column)
    layers = torch.arange(24.0).reshape(3, 4, 2)
    flat = {"decoder.layers.a": layers, "decoder.layers.b": layers * 2, "decoder.final": torch.ones(2)}
    ck = ckptools.open(write(tmp_path / "out", flat, COMMON), all_ranks=True)
    names = [f"decoder.layers.{n}.{part}" for n in range(3) for part in "ab"]
    assert list(ck.model) == [*names, "decoder.final"]
    assert torch.equal(ck.model["decoder.layers.2.b"].load(), layers[2] * 2)


def test_layers_with_a_number_are_kept_as_they_are(tmp_path):
    flat = {f"decoder.layers.{n}.w": torch.ones(2) * n for n in range(12)}
    assert list(ckptools.open(write(tmp_path / "out", flat, None)).model) == list(flat)


@pytest.mark.parametrize("shapes", [((3, 2), (4, 2)), ((2, 2), (2, 2))])
def test_a_first_dimension_that_does_not_count_layers_is_left_alone(shapes, tmp_path):
    flat = {f"decoder.layers.{name}": torch.ones(shape) for name, shape in zip("ab", shapes, strict=True)}
    ck = ckptools.open(write(tmp_path / "out", flat, COMMON))
    assert list(ck.model) == list(flat) and any("does not show the number of layers" in p.message for p in ck.problems)


def test_what_is_common_may_lie_in_the_folder_itself(tmp_path):
    flat = {"w": torch.ones(2), "common_state/shard_0_1": dict(COMMON)}
    ck = ckptools.open(write(tmp_path / "out", flat, None))
    assert (ck.step.value, ck.world_size.value, ck.problems) == (9, 8, ())
    assert next(iter(ck.optimizers.values())).param_groups[0].lr == 0.1


@pytest.mark.parametrize(("config", "severity"), [({}, "warning"), ({"common_backend": "torch"}, "error")])
def test_a_missing_common_file_is_told_and_the_weights_are_read(config, severity, tmp_path):
    ck = ckptools.open(write(tmp_path / "out", {"w": torch.ones(2)}, None, **config))
    assert [(p.code, p.severity) for p in ck.problems] == [("CK001", severity)] and ck.model["w"].shape == (2,)


def test_a_cut_common_file_is_told_and_the_weights_can_be_written(sample, tmp_path):
    common = sample / "iter_0000005" / "common.pt"
    common.write_bytes(common.read_bytes()[:500])
    ck = ckptools.open(sample)
    assert not ck.whole and ck.problems[0].code == "CK002" and "common.pt" in ck.problems[0].message
    with pytest.raises(NotWholeError, match=r"common\.pt"):
        ck.consolidate(tmp_path / "all.pt")
    ck.consolidate(tmp_path / "m.safetensors")


@pytest.mark.parametrize("config", ["{}", "[]", '{"sharded_backend": "zarr"}', '{"sharded_backend": 1, '])
def test_another_backend_is_refused_in_one_line(config, sample):
    (sample / "iter_0000005" / "metadata.json").write_text(config + ' "sharded_backend"' * ("zarr" not in config))
    with pytest.raises(ReadError, match=r"metadata\.json: ") as error:
        ckptools.open(sample)
    assert "\n" not in str(error.value)


def test_a_tracker_leads_to_a_dcp_folder_without_megatrons_files_too(tmp_path):
    for n in (10, 20):
        (write(tmp_path / f"iter_00000{n}", {"w": torch.ones(2)}, None) / "metadata.json").unlink()
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("20")
    assert ckptools.open(tmp_path).step.value == 20


# -- the optimizer -----------------------------------------------------------------------------------------------------


def test_master_copies_take_the_place_of_half_weights_unless_the_modules_are_asked_for(tmp_path):
    half = torch.arange(24.0).reshape(3, 4, 2).bfloat16()
    flat = {"decoder.layers.w": half, "optimizer.state.fp32_param.decoder.layers.w": half.float() + 1e-3}
    folder = write(tmp_path / "out", flat, COMMON)
    fp32, module = ckptools.open(folder), ckptools.open(folder, weights="module")
    assert torch.equal(fp32.model["decoder.layers.1.w"].load(), half[1].float() + 1e-3)
    assert torch.equal(module.model["decoder.layers.1.w"].load(), half[1])
    assert any("weights='module'" in p.message for p in fp32.problems)


def test_flat_buffers_of_the_distributed_optimizer_are_shown_and_not_joined(tmp_path):
    ranks = "chained_0.optimizer.distributed.dp_group_idx_"
    flat: dict[str, Any] = {"w": torch.ones(2)}
    for rank, slot in product((0, 1), ("param", "exp_avg")):
        flat[f"{ranks}{rank}.gbuf_idx_0.dtype_(torch.float32, torch.float32).bucket_idx_0.{slot}"] = torch.ones(64)
        flat[f"{ranks}{rank}.optimizer/shard_0_1"] = {"param_groups": [{"lr": 0.5}]}
    ck = ckptools.open(write(tmp_path / "out", flat, {"iteration": 1}), all_ranks=True)
    (optimizer,) = ck.optimizers.values()
    assert [set(slots) for slots in optimizer.state.values()] == [{"param", "exp_avg"}] * 2
    assert [g.lr for g in optimizer.param_groups] == [0.5]
    why = "rank 0 wrote buckets of several groups"
    with pytest.raises(NotWholeError, match=rf"flat buffers without names.*{why}.*only='model'"):
        ck.consolidate(tmp_path / "all.pt")
    ck.consolidate(tmp_path / "model.pt", only="model")


def test_a_nan_in_a_buffer_that_is_not_joined_may_be_padding(tmp_path):
    buffer = (
        "chained_0.optimizer.distributed.dp_group_idx_0.gbuf_idx_0.dtype_(torch.float32, torch.float32).bucket_idx_0"
    )
    odd = torch.tensor([1.0, float("nan")])
    path = write(tmp_path / "out", {"w": torch.ones(2), f"{buffer}.exp_avg": odd}, {"iteration": 1})
    (problem,) = [p for p in ckptools.verify(path, values=True).problems if p.code == "CK201"]
    assert problem.severity == "warning" and problem.message.endswith("not joined: it may be padding")
    path = write(tmp_path / "other", {"w": odd}, {"iteration": 1})
    assert [p.severity for p in ckptools.verify(path, values=True).problems if p.code == "CK201"] == ["error"]


def test_chained_optimizers_share_one_state_by_weight(tmp_path):
    flat = {
        "a": torch.ones(2),
        "b": torch.ones(2),
        "optimizer.state.m.a": torch.ones(2),
        "optimizer.state.m.b": torch.ones(2),
    }
    one = {"optimizer": {"state": {"common_step": 4}, "param_groups": [{"lr": 0.1}]}}
    ck = ckptools.open(write(tmp_path / "out", flat, {"optimizer": {0: one, 1: one}}))
    (optimizer,) = ck.optimizers.values()
    assert list(optimizer.state) == ["a", "b"] and len(optimizer.param_groups) == 2


def test_state_of_another_shape_than_its_weight_is_refused(tmp_path):
    flat = {"w": torch.ones(4, 2), "optimizer.state.exp_avg.w": torch.ones(8)}
    folder = write(tmp_path / "out", flat, COMMON)
    with pytest.raises(NotWholeError, match="not its weight's shape"):
        ckptools.consolidate(folder, tmp_path / "all.pt")


def flat_runs(path: Path, whole: np.ndarray, cuts: tuple[int, ...], runs: list[int]) -> Tensor:
    """A tensor cut into a grid of pieces, each of them into flat runs: as `fully_sharded_model_space` stores it."""
    local = tuple(n // cut for n, cut in zip(whole.shape, cuts, strict=True))
    shards, data = [], []
    for at in product(*map(range, cuts)):
        piece = whole[tuple(slice(i * n, (i + 1) * n) for i, n in zip(at, local, strict=True))].reshape(-1)
        for start, end in zip([0, *runs], [*runs, piece.size], strict=True):
            shape = (*(1 for _ in at), end - start)
            span = (4 * sum(map(len, data)), 4 * (end - start))
            source = Source(path, span[0], "float32", shape, contiguous_strides(shape), "r", span)
            shards.append(Shard(Box((*at, start), shape), len(shards), source))
            data.append(piece[start:end])
    path.write_bytes(np.concatenate(data).astype("<f4").tobytes())
    return Tensor((*cuts, int(np.prod(local))), "float32", tuple(shards), "chunks")


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_flat_runs_of_pieces_are_placed(tmp_path_factory, data):
    cuts = tuple(data.draw(st.lists(st.integers(1, 3), min_size=1, max_size=3)))
    local = tuple(data.draw(st.integers(1, 4)) for _ in cuts)
    shape = tuple(n * cut for n, cut in zip(local, cuts, strict=True))
    runs = sorted(data.draw(st.lists(st.integers(0, int(np.prod(local))), max_size=3)))
    whole = np.arange(np.prod(shape), dtype="<f4").reshape(shape)
    stored = flat_runs(tmp_path_factory.mktemp("runs") / "n.bin", whole, cuts, runs)
    name = "optimizer.state.exp_avg.w"
    made = StoredState({name: stored}, {name: {"nd_reformulated_orig_global_shape": shape}}, {}).tree("fp32")
    moment = made["optimizer"]["state"]["w"]["exp_avg"]
    assert moment.shape == shape and np.array_equal(read.to_numpy(moment), whole)


@pytest.mark.parametrize("shape", [(5, 4), (4,), (4, -4), ("4", 4), (8, 8), None, 7])
def test_flat_runs_of_a_shape_that_cannot_be_are_refused(shape, tmp_path):
    stored = flat_runs(tmp_path / "n.bin", np.arange(16, dtype="<f4").reshape(4, 4), (2, 2), [])
    name = "optimizer.state.exp_avg.w"
    made = StoredState({name: stored}, {name: {"nd_reformulated_orig_global_shape": shape}}, {}).tree("fp32")
    moment = made["optimizer"]["state"]["w"]["exp_avg"]
    assert "--only model" in moment.note or (shape is None and moment is stored)


def test_a_common_file_that_holds_no_dict_is_an_error_and_the_weights_are_read(sample):
    torch.save([1], sample / "iter_0000005" / "common.pt")
    (problem,) = [p for p in ckptools.open(sample).problems if p.severity == "error"]
    assert (problem.code, problem.rank) == ("CK002", None) and "holds a list, expected a dict" in problem.message


# -- digests that the checkpoint states --------------------------------------------------------------------------------


@pytest.fixture
def stated(sample) -> Path:
    """The sample with the list of digests that `verify_integrity` saves; Megatron's own hashing of each file."""
    folder = sample / "iter_0000005"
    files = {p.name: hashlib.sha256(p.read_bytes()).hexdigest() for p in sorted(folder.iterdir())}
    (folder / "integrity.json").write_text(json.dumps({"algorithm": "sha256", "files": files}))
    return folder


def stated_check(folder: Path, **options: Any) -> Any:
    found = ckptools.verify(folder, **options)
    return next(check for check in found.checks if check.name == "stated digests (sha256)")


def test_stated_digests_are_compared_when_every_byte_is_read(stated):
    assert stated_check(stated).result == "not judged"
    check = stated_check(stated, deep=True)
    assert (check.result, check.detail, list(check.problems)) == ("ok", "11 files as stated beside them", [])


def test_a_listed_file_that_is_missing_is_named(stated):
    (stated / "common.pt").unlink()
    (problem,) = stated_check(stated, deep=True).problems
    assert problem.message == "common.pt is listed with a sha256, and not here"


@pytest.mark.parametrize("text", ["", "[]", '{"files": {}}', '{"algorithm": "sha256", "files": {"../x": "%s"}}'])
def test_a_list_that_is_none_is_said_and_never_followed(text, stated):
    (stated / "integrity.json").write_text(text.replace("%s", "0" * 64))
    ck = ckptools.open(stated)
    assert ck.stated_digests == {} and ck.whole
    assert any(p.severity == "warning" and "integrity.json" in p.message for p in ck.problems)


def test_swapped_files_of_fp32_copies_are_refused_for_the_weights_of_the_module_as_verify_says(tmp_path):
    folder = shutil.copytree(FIXTURES / "megatron-tp2dp2-distopt" / "ckpt", tmp_path / "ckpt")
    one, other = (next(folder.glob(f"*/__{rank}_0.distcp")) for rank in (2, 3))
    first, second = one.read_bytes(), other.read_bytes()
    one.write_bytes(second)
    other.write_bytes(first)
    ck = ckptools.open(folder, all_ranks=True, weights="module")
    assert not ckptools.verify(ck).ok
    with pytest.raises(NotWholeError, match="CK105"):
        ck.consolidate(tmp_path / "out.safetensors", only="model")
    assert ck.consolidate(tmp_path / "out.safetensors", only="model", unchecked=True).tensors == 20
