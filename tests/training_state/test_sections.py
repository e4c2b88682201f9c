from __future__ import annotations

import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch import nn

import ckptools
from ckptools.inspect.record import inspect_report
from ckptools.model.regions import Box
from ckptools.model.shards import Shard, Source
from ckptools.model.tensor import Tensor
from ckptools.model.tree import Lost, Opaque, walk
from ckptools.training_state.sections import (
    find_sections,
    free_name,
    is_optimizer,
    measure,
    section_name,
    storage_identity,
)
from tests.truth import FIXTURES

OPTIMIZER = {"state": {}, "param_groups": [{"lr": 0.1, "params": [0]}]}
SCHEDULER = {"last_epoch": 3, "base_lrs": [0.1]}


def tensor(shape=(2,), record="data/0", offset=0, dtype="float32"):
    strides = tuple(range(len(shape), 0, -1))
    source = Source("f", offset, dtype, shape, strides, record, (0, 8))
    return Tensor(shape, dtype, (Shard(Box.whole(shape), None, source),))


MODEL = {"w": tensor(), "b": tensor(record="data/1")}


def kinds(tree):
    return [(s.kind, s.name) for s in find_sections(tree)]


def test_nothing_but_tensors_is_a_model():
    assert kinds(MODEL) == [("model", "model")]


def test_a_tensor_beside_counters_and_words_is_a_model_whatever_its_name():
    tree = {"w": tensor((3, 4)), "step": 4, "lr": 0.1, "name": "x"}
    model, *others = find_sections(tree)
    assert (model.kind, list(model.value)) == ("model", ["w"])
    assert all(s.kind == "other" for s in others) and others


def test_counters_in_tensors_are_no_model():
    tree = {"state_dict": MODEL, "averaging_state": {"n_averaged": tensor((), dtype="int64")}}
    assert [k for k, _ in kinds(tree)] == ["model", "other"]


def test_a_snapshot_is_told_from_its_content_not_from_its_keys():
    tree = {"MODEL_STATE": MODEL, "OPT": OPTIMIZER, "S": SCHEDULER, "EPOCHS_RUN": 3}
    assert [k for k, _ in kinds(tree)] == ["model", "optimizer", "scheduler", "other"]


def test_a_section_is_looked_for_in_five_levels_and_deeper_ones_split_nothing():
    inner = {"c": {"d": {"e": OPTIMIZER}}, "n": 1}
    assert kinds({"a": {"b": inner}}) == [("optimizer", "a.b.c.d.e"), ("other", "a.b.n")]
    assert kinds({"top": {"a": {"b": inner}}}) == [("other", "top")]


def test_the_moments_of_an_optimizer_whose_groups_are_lost_are_no_model():
    moments = {name: {"exp_avg": tensor(), "exp_avg_sq": tensor()} for name in MODEL}
    tree = {"model": MODEL, "optim": {"state": moments, "param_groups": Lost("lost")}}
    assert kinds(tree) == [("model", "model"), ("other", "optim")]


def test_composers_wrapper_is_left_out_of_the_names():
    state = {"model": MODEL, "optimizers": {"AdamW": OPTIMIZER}, "schedulers": {"LambdaLR": SCHEDULER}, "run_name": "x"}
    assert kinds({"state": state, "rng": []}) == [
        ("model", "model"),
        ("optimizer", "optimizers.AdamW"),
        ("scheduler", "schedulers.LambdaLR"),
        ("other", "run_name"),
        ("rng", "rng"),
    ]


def test_weights_beside_an_optimizer_are_the_model_and_the_rest_keeps_its_sections():
    tree = {**MODEL, "optimizer": OPTIMIZER, "lr_scheduler": SCHEDULER, "train_state": {"step": 3}, "loss": 0.5}
    sections = find_sections(tree)
    assert [s.name for s in sections] == ["model", "optimizer", "lr_scheduler", "train_state", "loss"]
    assert (list(sections[0].value), sections[0].path) == (["w", "b"], ())
    assert sections[0].holds(("w",)) and not sections[0].holds(("optimizer", "state"))


def test_a_tensor_at_the_root_is_no_model_where_there_is_a_real_one():
    tree = {"nets": {"generator": MODEL}, "optimizer": OPTIMIZER, "loss": tensor()}
    assert [(s.kind, s.name) for s in find_sections(tree) if s.kind == "model"] == [("model", "nets.generator")]


FLAT = {"state.w.exp_avg": tensor(), "state.b.exp_avg": tensor(), "param_groups.w.lr": 0.1, "param_groups.b.lr": 0.1}


@pytest.mark.parametrize("weights", [MODEL, {"model": MODEL}], ids=["at the root too", "below a key"])
def test_a_flattened_optimizer_at_the_root_is_one_beside_the_model(weights):
    sections = find_sections({**weights, **FLAT, "epoch": 3})
    assert {s.kind: list(s.value) for s in sections if s.kind != "other"} == {"model": [*MODEL], "optimizer": [*FLAT]}


@pytest.mark.parametrize("more", [{"state.proj.weight": tensor()}, {"param_groups.0.weight": tensor()}])
def test_keys_at_the_root_that_may_be_weights_split_off_no_optimizer(more):
    assert "optimizer" not in dict(kinds({**MODEL, **FLAT, **more}))


def test_a_dcp_with_all_keys_at_the_root_is_shown_and_renamed_by_its_parts(tmp_path):
    state = {name: torch.ones(2) if isinstance(value, Tensor) else value for name, value in {**MODEL, **FLAT}.items()}
    dcp.save(state, checkpoint_id=tmp_path / "flat")
    with ckptools.open(tmp_path / "flat") as ck:
        assert [(o.section, o.parameters, len(o.groups)) for o in inspect_report(ck).optimizers] == [
            ("optimizer", 2, 1)
        ]
        ck.consolidate(tmp_path / "new.pt", only="all", rename=["w=x"])
    renamed = torch.load(tmp_path / "new.pt")
    assert set(renamed) == {name.replace("w", "x") for name in state}


def test_a_flattened_optimizer_is_an_optimizer_and_a_flattened_model_is_none():
    assert is_optimizer({"state.a.b.exp_avg": tensor(), "param_groups.a.b.lr": 0.1})
    assert not is_optimizer({"state.a.b.weight": tensor()})
    assert not is_optimizer({"state.a.exp_avg": tensor(), "param_groups.a.lr": 0.1, "model.w": tensor()})


def test_extra_state_between_the_tensors_does_not_hide_a_model():
    assert kinds({"model": {**MODEL, "x._extra_state": {}}})[0] == ("model", "model")


def test_random_states_are_no_model_though_they_are_tensors():
    assert kinds({"rng_state": {"cpu": tensor(), "cuda": tensor()}, "model": MODEL})[0][0] == "rng"
    assert kinds({"a": {"rng": {"torch": tensor()}}, "model": MODEL})[0] == ("rng", "a.rng")


def test_a_list_of_optimizers_is_several_sections():
    assert kinds({"optimizer_states": [OPTIMIZER, OPTIMIZER], "state_dict": MODEL}) == [
        ("optimizer", "optimizer_states.0"),
        ("optimizer", "optimizer_states.1"),
        ("model", "state_dict"),
    ]


@pytest.mark.parametrize("tree", [{}, [], (), None, 3, "x", Opaque("a.B"), {"a": {}}, {"state": 3, "param_groups": 3}])
def test_a_tree_without_any_of_it_is_other(tree):
    assert {k for k, _ in kinds(tree)} <= {"other"}


@pytest.mark.parametrize(
    "odd", [3, {}, {"state": {}}, {"state": [], "param_groups": []}, {"state": {}, "param_groups": {}}]
)
def test_what_is_not_quite_an_optimizer_is_none(odd):
    assert not is_optimizer(odd)


def test_a_section_too_deep_to_look_for_is_other():
    tree = MODEL
    for _ in range(8):
        tree = {"x": tree, "n": 1}
    assert {k for k, _ in kinds(tree)} == {"other"}


def test_names_are_for_people():
    assert [section_name(p) for p in ((), ("state",), ("state", "model"), ("a", 0))] == [
        "checkpoint",
        "state",
        "model",
        "a.0",
    ]


words = st.sampled_from(["state", "param_groups", "model", "rng", "last_epoch", "w", "x"])
leaves = st.one_of(st.integers(), st.just(tensor()), st.none())
trees = st.recursive(
    leaves, lambda t: st.one_of(st.dictionaries(words, t, max_size=4), st.lists(t, max_size=3)), max_leaves=25
)


@given(tree=trees)
def test_every_leaf_is_in_exactly_one_section(tree):
    found = [((*s.path, *path), id(leaf)) for s in find_sections(tree) for path, leaf in walk(s.value)]
    assert sorted(map(str, found)) == sorted(str((path, id(leaf))) for path, leaf in walk(tree)) or not tree


# -- sizes --------------------------------------------------------------------------------------------------------


def test_a_tied_weight_counts_once_and_is_a_tensor_twice():
    size = measure({"emb": tensor((3, 2)), "head": tensor((3, 2)), "b": tensor(record="data/1", dtype="bfloat16")})
    assert (size.tensors, size.params, size.nbytes) == (3, 8, 28)
    assert size.dtypes == {"float32": 2, "bfloat16": 1}


def test_views_of_one_storage_that_differ_are_not_tied():
    assert storage_identity(tensor((2,))) != storage_identity(tensor((2,), offset=8))
    assert storage_identity(tensor((2,))) != storage_identity(tensor((1, 2)))


def test_empty_and_absent_tensors_are_tied_to_nothing():
    assert storage_identity(tensor((0,))) is None and storage_identity(Tensor((2,), "float32", ())) is None


def test_foreign_objects_are_named_once():
    assert measure([Opaque("a.B"), {"x": Opaque("a.B")}, Opaque("c.D")]).opaque == ("a.B", "c.D")


@pytest.mark.parametrize("path", sorted(FIXTURES.glob("*/*rank0.pt")), ids=lambda p: p.parent.name)
def test_every_fixture_has_one_model_and_one_optimizer(path):
    ck = ckptools.open(path)
    assert (len(ck.of_kind("model")), len(ck.of_kind("optimizer"))) == (1, 1)


# -- random states that lie beside what they belong to -------------------------------------------------------------

STATES = {
    "cuda_rng_state": tensor((16,), "data/8", dtype="uint8"),
    "torch_rng_state": tensor((5056,), "data/9", dtype="uint8"),
}


@pytest.mark.parametrize("wrapped", [lambda tree: tree, lambda tree: {"state": tree, "step": 1}])
def test_random_states_beside_a_model_are_no_part_of_it(wrapped):
    found = kinds(wrapped({"model": MODEL, **STATES}))
    assert [pair for pair in found if pair[0] != "other"] == [
        ("model", "model"), ("rng", "cuda_rng_state"), ("rng", "torch_rng_state"),
    ]  # fmt: skip


def test_random_states_alone_or_beside_an_optimizer_are_no_model():
    assert [kind for kind, _ in kinds(STATES)] == ["rng", "rng"]
    assert {kind for kind, _ in kinds({**STATES, "optim": OPTIMIZER})} == {"rng", "optimizer"}


def test_a_buffer_among_weights_stays_with_them_whatever_it_is_called():
    assert kinds({**MODEL, **STATES}) == [("model", "model")]
    assert kinds({**MODEL, **STATES, "optim": OPTIMIZER})[0] == ("model", "model")


def test_a_name_alone_makes_no_random_state_of_a_tensor_of_numbers():
    assert kinds({"rng_state": tensor((3,)), "noise": 1, "w": tensor()}) == [("model", "model")]


def test_every_tensor_of_a_file_with_random_states_beside_the_model_is_written_where_it_belongs(tmp_path):
    model, rng = nn.Linear(2, 2).state_dict(), torch.get_rng_state()
    torch.save({"model": model, "torch_rng_state": rng, "cuda_rng_state": rng[:16].clone()}, tmp_path / "a.pt")
    ck = ckptools.open(tmp_path / "a.pt")
    assert [section.holds for section in inspect_report(ck).sections][1:] == ["torch", "cuda"]
    assert list(ck.model) == list(model) and torch.equal(ck.rng[None]["torch"].value.load(), rng)
    ckptools.consolidate(tmp_path / "a.pt", tmp_path / "model.safetensors")
    assert load_file(tmp_path / "model.safetensors").keys() == model.keys()


def test_sections_of_one_name_are_numbered_one_by_one():
    assert free_name({}, "model") == "model"
    assert free_name({"model": 1}, "model") == "model 2" and free_name({"model": 1, "model 2": 1}, "model") == "model 3"
