"""The buckets of Megatron's distributed optimizer: taken apart where one layout fits, refused where not."""

from __future__ import annotations

import shutil
import tempfile
from argparse import Namespace
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import count, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

import ckptools
from ckptools.errors import NotWholeError
from ckptools.formats.dcp import locator
from ckptools.formats.megatron_dist.buckets import UnjoinedError, _by_stage, join_buckets
from ckptools.model.regions import Box, Ints
from ckptools.model.shards import Shard, Source
from ckptools.model.tensor import Tensor
from ckptools.tensor_io import read
from tests.formats.test_megatron_dist import live
from tests.formats.test_megatron_dist import write as torch_dist
from tests.formats.test_truth import same
from tests.truth import FIXTURES, load_truth

SAMPLE = FIXTURES / "megatron-tp2dp2-distopt" / "ckpt"
TRUTH = load_truth("megatron-tp2dp2-distopt")


def moments(ck: ckptools.Checkpoint) -> dict[str, Any]:
    (optimizer,) = ck.optimizers.values()
    slots = {"param": "fp32_param"}
    return {f"optim/{live(k)}/{slots.get(s, s)}": t for k, e in optimizer.state.items() for s, t in e.items()}


def test_every_master_copy_and_moment_equals_the_truth():
    found = moments(ckptools.open(SAMPLE, all_ranks=True))
    truth = {k: v for k, v in TRUTH.items() if k.startswith("optim/") and "/output_layer." not in k}
    assert [k for k, v in truth.items() if not same(found.get(k), *v)] == [] and len(truth) == 60


def test_the_module_s_own_weights_equal_the_truth():
    ck = ckptools.open(SAMPLE, all_ranks=True, weights="module")
    found = {f"model/{live(k)}": t for k, t in ck.model.items()}
    truth = {k: v for k, v in TRUTH.items() if k.startswith("model/") and "output_layer" not in k}
    assert [k for k, v in truth.items() if not same(found.get(k), *v)] == [] and len(truth) == 20


def test_names_by_order_are_called_assumed():
    ck = ckptools.open(SAMPLE)
    (optimizer,) = ck.optimizers.values()
    assert (optimizer.naming.by, len(optimizer.naming.assumed)) == ("order", 20)
    assert "CK108" in {p.code for p in ck.problems} and ck.whole


def test_a_moment_of_many_items_finds_its_values_when_it_is_loaded(monkeypatch, large_world):
    every = moments(ckptools.open(SAMPLE, all_ranks=True))
    monkeypatch.setattr(locator, "MAX_LOCATED", 5)
    one = moments(ckptools.open(SAMPLE))
    name = "optim/decoder.layers.1.mlp.linear_fc1.weight/exp_avg"
    assert one[name].unread and torch.equal(one[name].load(), every[name].load())


def test_a_missing_file_leaves_holes_and_moves_nothing(tmp_path):
    run = Path(shutil.copytree(SAMPLE, tmp_path / "run"))
    (run / "iter_0000005" / "__2_1.distcp").unlink()
    ck = ckptools.open(run, all_ranks=True)
    for name, tensor in moments(ck).items():
        _, data, shape = TRUTH[name]
        whole = np.frombuffer(data, "<f4").reshape(shape)
        for shard in tensor.found:
            rows = tuple(slice(o, e) for o, e in zip(shard.box.offsets, shard.box.ends, strict=True))
            assert np.array_equal(read.read_box(replace(tensor, shards=(shard,)), shard.box).view("<f4"), whole[rows])
    with pytest.raises(NotWholeError):
        ck.consolidate(tmp_path / "all.pt")


def test_consolidating_writes_the_state_by_weight(tmp_path):
    ckptools.open(SAMPLE).consolidate(tmp_path / "all.pt")
    written = torch.load(tmp_path / "all.pt", weights_only=False)["optimizer"]["state"]
    dtype, data, shape = TRUTH["optim/decoder.layers.0.mlp.linear_fc1.weight/exp_avg_sq"]
    held = written["decoder.layers.0.mlp.linear_fc1.weight"]["exp_avg_sq"]
    assert (dtype, data, shape) == ("float32", held.numpy().tobytes(), tuple(held.shape))


# -- what the values say ----------------------------------------------------------------------------------------------

NORM = "decoder.final_layernorm.weight"


def one_weight(folder: Path, weight: torch.Tensor, copy: torch.Tensor) -> Path:
    """A checkpoint of one weight, whose place in its bucket leaves no choice."""
    bucket = f"optimizer.distributed.dp_group_idx_0.gbuf_idx_0.dtype_({weight.dtype}, torch.float32).bucket_idx_0."
    flat = {NORM: weight, **{f"{bucket}{slot}": copy for slot in ("param", "exp_avg", "exp_avg_sq")}}
    return torch_dist(folder, flat, {"iteration": 1})


def codes(verification: Any) -> list[str]:
    return [p.code for check in verification.checks if check.result == "FAIL" for p in check.problems]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_copies_that_round_to_their_weights_prove_the_layout(dtype, tmp_path):
    values = torch.cat([torch.randn(5000), torch.tensor([float("nan"), float("inf"), -0.0, 1 + 2**-8, 3.4e38])])
    run = one_weight(tmp_path / "run", values.to(dtype), values)
    assert codes(ckptools.verify(run)) == []
    ckptools.consolidate(run, tmp_path / "all.pt")
    assert torch.equal(torch.load(tmp_path / "all.pt")["model"][NORM][:5000], values[:5000])


@pytest.mark.parametrize("odd", [0, 1, 4095])
def test_a_copy_that_does_not_round_to_its_weight_is_refused(odd, tmp_path):
    values = torch.randn(5000)
    other = values.clone()
    other[odd] += 1
    run = one_weight(tmp_path / "run", values.bfloat16(), other)
    assert codes(ckptools.verify(run)) == ["CK105"]
    for out in ({"out": tmp_path / "all.pt"}, {"out": tmp_path / "m.safetensors", "only": "model"}):
        with pytest.raises(NotWholeError, match="does not round to the bfloat16 weight"):
            ckptools.consolidate(run, **out)
    own = ckptools.open(run, weights="module")
    own.consolidate(tmp_path / "own.pt", only="model", unchecked=True)
    assert torch.equal(torch.load(tmp_path / "own.pt")[NORM], values.bfloat16())


def test_a_copy_of_an_fp32_weight_must_equal_it(tmp_path):
    values = torch.randn(5000)
    other = values.clone()
    other[7] = other[7].nextafter(torch.tensor(9.0))
    assert codes(ckptools.verify(one_weight(tmp_path / "run", values, other))) == ["CK105"]


def test_a_copy_of_which_a_part_is_missing_is_not_counted_as_compared(tmp_path):
    run = Path(shutil.copytree(SAMPLE, tmp_path / "run"))
    (run / "iter_0000005" / "__2_0.distcp").unlink()
    (copies,) = (c for c in ckptools.verify(run).checks if c.name == "copies equal")
    assert "weights beside fp32 copies" in copies.detail and "20 weights beside" not in copies.detail


# -- buckets as Megatron lays them out, for any model --------------------------------------------------------------

Weights = dict[str, tuple[Ints, int | None, int]]
"""Shape of a rank's piece, the dimension that is cut (None: not), and its blocks, in the order of the modules."""


def gpt(layers: int, hidden: int, ffn: int, fused: bool, bias: bool, gated: bool) -> Weights:
    """A GPT model, by stored names, in the order in which its modules make their parameters."""

    def norm(name: str) -> Weights:
        return {f"{name}weight": ((hidden,), None, 1)} | ({f"{name}bias": ((hidden,), None, 1)} if bias else {})

    found: Weights = {"embedding.word_embeddings.weight": ((7, hidden), 0, 1)}
    for n in range(layers):
        at = f"decoder.layers.{n}."
        before = norm(f"{at}self_attention.linear_qkv.layer_norm_")
        found |= {} if fused else before
        found[f"{at}self_attention.linear_proj.weight"] = ((hidden, 3), 1, 1)
        found |= before if fused else {}
        found[f"{at}self_attention.linear_qkv.weight"] = ((9, hidden), 0, 1)
        found |= norm(f"{at}mlp.linear_fc1.layer_norm_")
        found[f"{at}mlp.linear_fc1.weight"] = ((2 * ffn, hidden), 0, 2) if gated else ((ffn, hidden), 0, 1)
        found[f"{at}mlp.linear_fc2.weight"] = ((hidden, ffn), 1, 1)
    return found | norm("decoder.final_layernorm.") | {"output_layer.weight": ((7, hidden), 0, 1)}


def boxes(spec: tuple[Ints, int | None, int], tp: int, rank: int) -> list[Box]:
    """What a tensor-parallel rank has of a weight: one box, or one for each block."""
    shape, dim, blocks = spec
    if dim is None:
        return [Box.whole(shape)]
    n = shape[dim] // blocks
    sizes = tuple(n if d == dim else size for d, size in enumerate(shape))
    at = [(block * tp + rank) * n for block in range(blocks)]
    return [Box(tuple(a if d == dim else 0 for d in range(len(shape))), sizes) for a in at]


def whole_shape(spec: tuple[Ints, int | None, int], tp: int) -> Ints:
    return tuple(n * tp if d == spec[1] else n for d, n in enumerate(spec[0]))


def model_of(weights: Weights, tp: int, dp: int) -> dict[str, Tensor]:
    """The model as stored: each piece by one of its ranks, what all have by any."""
    found = {}
    for i, (name, spec) in enumerate(weights.items()):
        shards = [
            Shard(box, t * dp + i % dp, None)
            for t in (range(tp) if spec[1] is not None else [i % tp])
            for box in boxes(spec, tp, t)
        ]
        found[name] = Tensor(whole_shape(spec, tp), "bfloat16", tuple(shards), "chunks")
    return found


def write(folder: Path, weights: Weights, tp: int, dp: int, most: int) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Buckets of about `most` elements with numbers as values, and the values of each weight."""
    numbers = count(1)
    values = {}
    for name, spec in weights.items():
        shape = whole_shape(spec, tp)
        values[name] = np.array([next(numbers) for _ in range(int(np.prod(shape)))], "<f4").reshape(shape)
    buffers = {}
    for t in range(tp):
        pieces = {n: [values[n][slices(b)].reshape(-1) for b in boxes(spec, tp, t)] for n, spec in weights.items()}
        for k, bucket in enumerate(filled([(n, np.concatenate(p)) for n, p in pieces.items()], most)):
            path = folder / f"{t}-{k}"
            flat, edges = bucket
            flat.tofile(path)
            key = f"optimizer.distributed.dp_group_idx_{t}.gbuf_idx_0.dtype_(torch.bfloat16, torch.float32)"
            buffers[f"{key}.bucket_idx_{k}.param"] = chunked(path, len(flat), edges, t * dp, dp)
    return buffers, values


def slices(box: Box) -> tuple[slice, ...]:
    return tuple(slice(o, e) for o, e in zip(box.offsets, box.ends, strict=True))


def filled(pieces: list[tuple[str, np.ndarray]], most: int) -> Iterator[tuple[np.ndarray, set[int]]]:
    """The elements of each bucket, and where parameters begin and end; padding is -1."""
    flat, edges = np.empty(0, "<f4"), {0}
    for _, values in reversed(pieces):
        start = -(-len(flat) // 64) * 64
        flat = np.concatenate([flat, np.full(start - len(flat), -1, "<f4"), values])
        edges |= {start, len(flat)}
        if len(flat) >= most:
            yield flat, edges
            flat, edges = np.empty(0, "<f4"), {0}
    if len(flat):
        yield flat, edges


def chunked(path: Path, length: int, edges: set[int], first: int, dp: int) -> Tensor:
    """A bucket as its ranks write it: each has an equal part of the padded one, in a chunk for each run and gap."""
    padded = -(-length // (128 * dp)) * 128 * dp
    cuts = sorted(edges | set(range(0, length, padded // dp)) | {length})
    shards = []
    for start, end in pairwise(cuts):
        source = Source(path, 4 * start, "float32", (end - start,), (1,), "data", (0, 0))
        shards.append(Shard(Box((start,), (end - start,)), first + start * dp // padded, source))
    return Tensor((length,), "float32", tuple(shards), "chunks")


@pytest.mark.slow
@settings(max_examples=120, deadline=None)
@given(
    st.tuples(st.integers(1, 3), st.integers(1, 12), st.integers(1, 12), st.booleans(), st.booleans(), st.booleans()),
    st.integers(1, 3), st.integers(1, 3), st.sampled_from([1, 100, 300, 10_000]),
)  # fmt: skip
def test_any_model_is_read_back_or_refused_and_never_wrong(model, tp, dp, most):
    weights = gpt(*model)
    with tempfile.TemporaryDirectory() as folder:
        buffers, values = write(Path(folder), weights, tp, dp, most)
        # Megatron stops where a rank has no part of a bucket.
        assume({s.rank for t in buffers.values() for s in t.shards} == set(range(tp * dp)))
        try:
            state = join_buckets(buffers, model_of(weights, tp, dp))
        except UnjoinedError as error:
            # Sizes that coincide leave open where the norms are.
            assert "more than one order" in str(error)
            return
        for name, slots in state.items():
            whole = read.read_box(slots["param"], Box.whole(values[name].shape)).view("<f4")
            assert np.array_equal(whole, values[name]), name
            assert {s.rank // dp for s in slots["param"].shards} == set(range(tp))
        assert list(state) == list(weights)


MODEL = gpt(2, 8, 5, fused=False, bias=True, gated=True)


@pytest.fixture
def stored(tmp_path) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    buffers, _ = write(tmp_path, MODEL, 2, 2, 10_000)
    return buffers, model_of(MODEL, 2, 2)


def refused(buffers: dict[str, Tensor], weights: dict[str, Tensor]) -> str:
    with pytest.raises(UnjoinedError) as error:
        join_buckets(buffers, weights)
    return str(error.value)


def test_a_weight_that_megatron_s_own_models_do_not_have_is_refused(stored):
    buffers, weights = stored
    assert "decoder.adapter" in refused(buffers, weights | {"decoder.adapter": weights["output_layer.weight"]})


def test_a_weight_too_few_is_refused(stored):
    buffers, weights = stored
    del weights["decoder.layers.0.mlp.linear_fc2.weight"]
    assert "more elements than its parameters" in refused(buffers, weights)


def test_a_weight_too_many_is_refused(stored):
    buffers, weights = stored
    more = {"decoder.layers.2.self_attention.linear_proj.bias": weights["decoder.final_layernorm.weight"]}
    assert "lengths of its buckets" in refused(buffers, weights | more)


def test_a_weight_of_a_dtype_without_buckets_is_refused(stored):
    buffers, weights = stored
    weights["output_layer.weight"] = replace(weights["output_layer.weight"], dtype="float32")
    assert "more elements than its parameters" in refused(buffers, weights)


def test_a_dtype_of_which_there_is_no_bucket_is_named(tmp_path):
    weights = {n: w for n, w in MODEL.items() if n != "output_layer.weight"}
    buffers, _ = write(tmp_path, weights, 2, 2, 10_000)
    model = model_of(MODEL, 2, 2)
    model["output_layer.weight"] = replace(model["output_layer.weight"], dtype="float32")
    assert "no bucket is for 'float32'" in refused(buffers, model)


def test_edges_where_no_parameter_ends_are_refused(stored):
    buffers, weights = stored

    def cut(tensor: Tensor) -> Tensor:
        first, *rest = tensor.shards
        n = first.box.sizes[0]
        two = [first._replace(box=Box((0,), (3,))), first._replace(box=Box((3,), (n - 3,)))]
        return replace(tensor, shards=(*two, *rest))

    assert "no parameter begins or ends at 3" in refused({k: cut(t) for k, t in buffers.items()}, weights)


def test_a_chunk_of_two_parameters_is_refused(stored):
    buffers, weights = stored

    def joined(tensor: Tensor) -> Tensor:
        first, second, *rest = tensor.shards
        both = first._replace(box=Box((0,), (first.box.sizes[0] + second.box.sizes[0],)))
        return replace(tensor, shards=(both, *rest))

    assert "no parameter begins or ends at" in refused({k: joined(t) for k, t in buffers.items()}, weights)


def test_a_rank_with_two_pieces_of_an_ungated_weight_is_refused(stored):
    buffers, weights = stored
    name = "decoder.layers.1.self_attention.linear_qkv.weight"
    first, second = weights[name].shards
    halves = [first._replace(box=Box((at, 0), (n, 8))) for at, n in ((0, 4), (4, 5))]
    weights[name] = replace(weights[name], shards=(*halves, second))
    assert f"2 pieces of '{name}'" in refused(buffers, weights)


def test_a_part_that_nobody_wrote_is_refused(stored):
    buffers, weights = stored
    less = {k: replace(t, shards=t.shards[:-1]) for k, t in buffers.items()}
    assert "a part of a bucket is missing" in refused(less, weights)


@pytest.mark.parametrize(
    ("rename", "told"),
    [
        (lambda k: k.replace("gbuf_idx_0", "gbuf_idx_1") if "dp_group_idx_1" in k else k, "buffers"),
        (lambda k: k.replace("bucket_idx_0", "bucket_idx_1"), "lacks a bucket"),
        (lambda k: k.replace("bucket_idx_0.", ""), "no bucket of dp_reshardable"),
        (lambda k: f"chained_1.{k}", "only chained_1 of its chained optimizers is there"),
        (lambda k: k.replace("torch.bfloat16", "torch.float32") if "dp_group_idx_1" in k else k, "same dtypes"),
    ],
)
def test_names_of_another_form_are_refused(stored, rename: Callable[[str], str], told: str):
    buffers, weights = stored
    if told == "buffers":
        buffers |= {
            k.replace("gbuf_idx_0", "gbuf_idx_1").replace("bucket_idx_0", "bucket_idx_1"): t for k, t in buffers.items()
        }
        assert told in refused(buffers, weights)
    else:
        assert told in refused({rename(k): t for k, t in buffers.items()}, weights)


def test_slots_that_do_not_lie_alike_are_refused(stored):
    buffers, weights = stored
    key, tensor = next(iter(buffers.items()))
    other = replace(tensor, shape=(tensor.shape[0] + 1,))
    assert "do not lie alike" in refused(buffers | {key.replace(".param", ".exp_avg"): other}, weights)


def test_a_rank_that_wrote_for_two_groups_is_refused(stored):
    buffers, weights = stored
    same_ranks = {k: replace(t, shards=tuple(s._replace(rank=0) for s in t.shards)) for k, t in buffers.items()}
    assert "wrote buckets of several groups" in refused(same_ranks, weights)


def test_a_bucket_whose_writer_is_not_known_is_refused(stored):
    buffers, weights = stored
    unknown = {k: replace(t, shards=tuple(s._replace(rank=None) for s in t.shards)) for k, t in buffers.items()}
    assert "nothing says which rank wrote a bucket" in refused(unknown, weights)


def test_a_piece_of_a_rank_that_wrote_no_bucket_is_refused(stored):
    buffers, weights = stored
    proj = weights["output_layer.weight"]
    weights["output_layer.weight"] = replace(
        proj, shards=tuple(s._replace(rank=(s.rank or 0) + 40) for s in proj.shards)
    )
    assert "a rank that wrote no bucket" in refused(buffers, weights)


def test_norms_whose_place_no_size_tells_are_refused(tmp_path):
    # A row of three elements in the projection, and norms of as many together.
    weights = gpt(1, 1, 5, fused=False, bias=True, gated=False)
    weights["decoder.layers.0.self_attention.linear_proj.weight"] = ((1, 1), 1, 1)
    buffers, _ = write(tmp_path, weights, 1, 1, 10_000)
    assert "more than one order" in refused(buffers, model_of(weights, 1, 1))


# -- pipeline stages, and state by weight -----------------------------------------------------------------------------


def by_weight(folder: Path, master: torch.Tensor, **args: Any) -> Path:
    """A checkpoint as `fully_reshardable` saves it, of one weight."""
    state = {f"optimizer.state.{slot}.{NORM}": master for slot in ("param", "exp_avg", "exp_avg_sq")}
    return torch_dist(folder, {NORM: torch.ones(6).bfloat16(), **state}, {"iteration": 1, "args": Namespace(**args)})


def test_a_master_copy_by_name_that_is_not_its_weight_s_is_refused(tmp_path):
    run = by_weight(tmp_path / "iter_0000001", torch.full((6,), 0.5))
    with pytest.raises(NotWholeError, match=rf"CK105  {NORM}.*does not round to the bfloat16 weight"):
        ckptools.open(run).consolidate(tmp_path / "model.safetensors")
    own = ckptools.open(run, weights="module")
    own.consolidate(tmp_path / "model.safetensors", only="model", unchecked=True)
    assert codes(ckptools.open(run).verify()) == ["CK105"]


def test_a_master_copy_of_a_weight_in_fp8_need_not_round_to_it(tmp_path):
    run = by_weight(tmp_path / "iter_0000001", torch.full((6,), 1.03), fp8_param_gather=True)
    ckptools.open(run).consolidate(tmp_path / "model.safetensors")
    assert codes(ckptools.open(run).verify()) == []


def test_buckets_of_pipeline_stages_and_state_by_weight_are_the_same():
    folder = FIXTURES / "megatron-core0.16-pp2dp2"
    buckets, named = (moments(ckptools.open(folder / form, all_ranks=True)) for form in ("ckpt", "fully"))
    assert buckets.keys() == named.keys() and len(named) == 63
    assert all(torch.equal(tensor.load(), named[name].load()) for name, tensor in buckets.items())


def test_a_weight_of_a_rank_that_wrote_no_bucket_is_of_no_known_stage():
    weights = {f"decoder.layers.{n}.self_attention.linear_proj.weight": tensor_of(n) for n in range(3)}
    stages = {(n, "bfloat16"): {n} for n in range(2)}
    with pytest.raises(UnjoinedError, match=r"nothing says which pipeline stage .decoder"):
        _by_stage(weights, stages)
    of_each = _by_stage({n: t for n, t in weights.items() if "layers.2" not in n}, stages)
    assert [len(names) for names in of_each.values()] == [1, 1]


def tensor_of(rank: int) -> Tensor:
    """A whole weight that a rank wrote."""
    source = Source(Path("x"), 0, "bfloat16", (4, 4), (4, 1), "", (0, 32))
    return Tensor((4, 4), "bfloat16", (Shard(Box.whole((4, 4)), rank, source),))
