"""The buckets of experts: over the expert-data-parallel groups, in the order in which modules make them."""

from __future__ import annotations

import shutil
import tempfile
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

import ckptools
from ckptools.formats.megatron_dist.buckets import UnjoinedError, join_buckets
from ckptools.model.regions import Box
from ckptools.model.shards import Shard
from ckptools.model.tensor import Tensor
from ckptools.tensor_io import read
from tests.formats.test_megatron_buckets import chunked, filled, moments, refused
from tests.formats.test_truth import same
from tests.truth import FIXTURES, load_truth

SAMPLE = FIXTURES / "megatron-core0.20-ep2dp2-dpr" / "ckpt"
AT = "decoder.layers.0.mlp"
DTYPE = "gbuf_idx_0.dtype_(torch.bfloat16, torch.float32)"


def test_every_master_copy_and_moment_of_two_chained_optimizers_equals_the_truth():
    found = moments(ckptools.open(SAMPLE, all_ranks=True))
    truth = {k: v for k, v in load_truth(SAMPLE.parent.name).items() if k.startswith("optim/")}
    assert [k for k, v in truth.items() if not same(found.get(k), *v)] == [] and len(truth) == 48


def test_a_missing_file_of_an_expert_group_leaves_holes_in_its_experts_alone(tmp_path):
    run = Path(shutil.copytree(SAMPLE, tmp_path / "run"))
    (run / "iter_0000003" / "__3_0.distcp").unlink()
    found = moments(ckptools.open(run, all_ranks=True))
    holes = {k for k, t in found.items() if any(s.source is None for s in t.shards) and ".experts." in k}
    assert holes and all(".experts.2." in k or ".experts.3." in k for k in holes)


# -- buckets as Megatron lays them out ---------------------------------------------------------------------------------


def experts(ep: int, dp: int, each: int, gate: int, grouped: bool) -> dict[int, list[tuple[str, tuple[int, int]]]]:
    """Each expert-parallel rank's weights with their shapes, in the order in which its modules make them."""
    found = {}
    for rank in range(ep):
        own = [(e, fc) for e in range(rank * each, (rank + 1) * each) for fc in (1, 2)]
        shapes = {1: (2 * gate, 3), 2: (3, gate)}
        named = [(f"{AT}.experts.experts.{e}.linear_fc{fc}.weight", shapes[fc], fc) for e, fc in own]
        found[rank] = [(n, s) for n, s, _ in (sorted(named, key=lambda w: w[2]) if grouped else named)]
    return found


def model(spread: dict[int, list[tuple[str, tuple[int, int]]]], ep: int) -> dict[str, Tensor]:
    """Every expert as the first rank of its group writes it: a gated layer in two boxes."""
    found = {}
    for rank, weights in spread.items():
        for name, (rows, columns) in weights:
            cuts = [(0, rows // 2), (rows // 2, rows)] if "fc1" in name else [(0, rows)]
            shards = tuple(Shard(Box((a, 0), (b - a, columns)), rank, None) for a, b in cuts)
            found[name] = Tensor((rows, columns), "bfloat16", shards, "chunks")
    return found


def write(folder: Path, spread: dict[int, list[tuple[str, tuple[int, int]]]], ep: int, dp: int) -> Any:
    """One bucket for each group of ranks that share experts, rank e of them being e modulo ep; and all values."""
    numbers, values, buffers = count(1), {}, {}
    for rank, weights in spread.items():
        for name, shape in weights:
            values[name] = np.array([next(numbers) for _ in range(int(np.prod(shape)))], "<f4").reshape(shape)
        ((flat, edges),) = filled([(n, values[n].reshape(-1)) for n, _ in weights], 1 << 30)
        flat.tofile(folder / str(rank))
        bucket = chunked(folder / str(rank), len(flat), edges, 0, dp)
        shards = tuple(s._replace(rank=s.rank * ep + rank) for s in bucket.shards)
        key = f"chained_1.optimizer.distributed.dp_group_idx_{rank}"
        buffers[f"{key}.{DTYPE}.bucket_idx_0.param"] = Tensor(bucket.shape, "float32", shards, "chunks")
        buffers[f"{key}.optimizer/shard_0_1"] = {"param_groups": [{"is_expert_parallel": True}]}
    return buffers, values


def dense(folder: Path, ranks: int) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """The other chained optimizer, of one norm."""
    ((flat, edges),) = filled([("", np.full(70, 9, "<f4"))], 1 << 30)
    flat.tofile(folder / "dense")
    key = "chained_0.optimizer.distributed.dp_group_idx_0"
    bucket = chunked(folder / "dense", 70, edges, 0, 1)
    weights = {
        "decoder.final_layernorm.weight": Tensor((70,), "bfloat16", (Shard(Box((0,), (70,)), 0, None),), "chunks")
    }
    marks = {"param_groups": [{"is_expert_parallel": False}]}
    return {f"{key}.{DTYPE}.bucket_idx_0.param": bucket, f"{key}.optimizer/shard_0_1": marks}, weights


@pytest.mark.slow
@settings(max_examples=100, deadline=None)
@given(st.integers(1, 3), st.integers(1, 3), st.integers(1, 3), st.integers(1, 9), st.booleans())
def test_any_experts_are_read_back_or_refused_and_never_wrong(ep, dp, each, gate, grouped):
    spread = experts(ep, dp, each, gate, grouped)
    with tempfile.TemporaryDirectory() as folder:
        buffers, values = write(Path(folder), spread, ep, dp)
        assume({s.rank for t in buffers.values() if isinstance(t, Tensor) for s in t.shards} == set(range(ep * dp)))
        more, weights = dense(Path(folder), ep * dp)
        try:
            state = join_buckets(more | buffers, model(spread, ep) | weights)
        except UnjoinedError as error:
            # Layers of one length, with their padding, leave open which experts come first.
            assert "more than one order" in str(error) and each > 1
            return
        for name, whole in values.items():
            found = read.read_box(state[name]["param"], Box.whole(whole.shape)).view("<f4")
            assert np.array_equal(found, whole), name


@pytest.fixture
def stored(tmp_path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    spread = experts(2, 2, 2, 5, grouped=False)
    buffers, _ = write(tmp_path, spread, 2, 2)
    more, weights = dense(tmp_path, 4)
    return more | buffers, model(spread, 2) | weights


def test_a_bias_of_the_router_has_no_state_and_is_left_out(stored):
    buffers, weights = stored
    bias = Tensor((4,), "float32", (), "plain")
    assert len(join_buckets(buffers, weights | {f"{AT}.router.expert_bias": bias})) == 9


def test_optimizers_that_do_not_say_what_they_train_are_refused(stored):
    buffers, weights = stored
    unmarked = {k: t for k, t in buffers.items() if "optimizer/shard" not in k}
    assert "nothing says which weights each of its 2 chained optimizers trains" in refused(unmarked, weights)
    both = {k: {"param_groups": [{"is_expert_parallel": True}]} if "/shard" in k else t for k, t in buffers.items()}
    assert "nothing says which weights" in refused(both, weights)


def test_experts_without_their_group_s_bucket_are_refused(stored):
    buffers, weights = stored
    assert refused({k: t for k, t in buffers.items() if "chained_1" not in k or "idx_1" not in k}, weights)


def test_swapped_buckets_of_two_optimizers_are_refused(stored):
    buffers, weights = stored
    other = {"chained_0": "chained_1", "chained_1": "chained_0"}
    swapped = {k if "/shard" in k else k.replace(k[:9], other[k[:9]]): t for k, t in buffers.items()}
    assert refused(swapped, weights)
