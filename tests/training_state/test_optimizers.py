"""Names for optimizer state that is keyed by number: given only where there is one way to give them."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import ckptools
from ckptools.model.facts import ModuleOrder
from ckptools.model.regions import Box
from ckptools.model.shards import Shard, Source
from ckptools.model.tensor import Tensor
from ckptools.training_state.optimizers import CONFIRMED, QUANT_STATE, Naming, Optimizer, optimizers_of
from ckptools.training_state.optimizers import name_parameters as name_by
from tests.display.made import checkpoint

LOST = ModuleOrder(False, "safetensors are sorted")


def tensor(*shape: int, kind: str = "plain", at: int | None = None, dtype: str = "float32") -> Tensor:
    if at is None:
        return Tensor(shape, dtype, (), kind)  # type: ignore[arg-type]
    source = Source("f", at, dtype, shape, (1,) * len(shape), "r", (at, 1))  # type: ignore[arg-type]
    return Tensor(shape, dtype, (Shard(Box.whole(shape), 0, source),), kind)  # type: ignore[arg-type]


def name_parameters(value: Any, state_dict: Any, order: ModuleOrder = CONFIRMED) -> Naming:
    return name_by(value, state_dict, order)


def describe(value: Any, **models: Any) -> Optimizer:
    return optimizers_of(checkpoint({**models, "optimizers": {"AdamW": value}}))["AdamW"]


def optimizer(*groups: list[tuple[int, tuple[int, ...]]]) -> dict[str, object]:
    """Groups of `(id, shape of its moments)`; no shape for a parameter without state."""
    state = {i: {"step": tensor(), "exp_avg": tensor(*s)} for group in groups for i, s in group if s is not None}
    return {"state": state, "param_groups": [{"params": [i for i, _ in g]} for g in groups]}


def model(**shapes: tuple[int, ...]) -> dict[str, Tensor]:
    return {name: tensor(*shape) for name, shape in shapes.items()}


def test_names_in_the_file_are_taken_as_they_are():
    naming = name_parameters({"state": {"a.w": {}}, "param_groups": [{"params": ["a.w"]}]}, None)
    assert (naming.by, naming.names) == ("fqn", {"a.w": "a.w"})


def test_names_that_are_numbers_are_names_where_the_model_has_them():
    state = {"state": {i: {"exp_avg": tensor(2)} for i in ("0", "1")}, "param_groups": [{"params": ["0", "1"]}]}
    naming = name_parameters(state, {"0": tensor(2), "1": tensor(2)})
    assert (naming.by, naming.names) == ("fqn", {"0": "0", "1": "1"})


def test_a_parameter_whose_state_is_a_counter_alone_leaves_the_others_their_names():
    state: Any = optimizer([(0, (2,)), (1, (3,))])
    state["state"][0] = {"step": tensor()}
    assert name_parameters(state, model(w=(2,), b=(3,))).names == {0: "w", 1: "b"}


def test_a_flattened_state_dict_is_the_nested_one_again():
    flat = {"state.a.w.step": 1, "state.a.b.step": 2, "state.c.w.step": 3}
    flat |= {f"param_groups.{fqn}.lr": lr for fqn, lr in (("a.w", 0.1), ("a.b", 0.2), ("c.w", 0.1))}
    told = describe(flat)
    assert told.state == {"a.w": {"step": 1}, "a.b": {"step": 2}, "c.w": {"step": 3}}
    assert [(g.lr, g.names) for g in told.param_groups] == [(0.1, ("a.w", "c.w")), (0.2, ("a.b",))]


def test_parameters_of_different_shapes_are_named_by_them():
    naming = name_parameters(optimizer([(0, (2, 3)), (1, (2,))]), model(w=(2, 3), b=(2,)))
    assert (naming.by, naming.names, naming.unnamed) == ("shape", {0: "w", 1: "b"}, ())


def test_a_buffer_of_another_shape_between_them_does_not_matter():
    naming = name_parameters(optimizer([(0, (2, 3)), (1, (2,))]), model(w=(2, 3), mean=(7,), b=(2,)))
    assert naming.names == {0: "w", 1: "b"}


def test_a_buffer_of_the_same_shape_leaves_the_name_open():
    naming = name_parameters(optimizer([(0, (2, 3)), (1, (2,))]), model(w=(2, 3), b=(2,), mean=(2,)))
    assert naming.names == {0: "w"} and naming.unnamed == (1,)
    assert "1 of 2 without a name" in naming.note


def test_a_name_tied_to_an_earlier_one_is_no_parameter_of_its_own():
    tied = {"emb": tensor(2, 3, at=0), "head": tensor(2, 3, at=0), "out": tensor(2, 3, at=24)}
    assert name_parameters(optimizer([(0, (2, 3)), (1, (2, 3))]), tied).names == {0: "emb", 1: "out"}


def test_two_groups_share_the_parameters_out():
    groups = optimizer([(0, (2, 3)), (1, (3, 4))], [(2, (2,)), (3, (3,))])
    naming = name_parameters(groups, model(w0=(2, 3), b0=(2,), w1=(3, 4), b1=(3,)))
    assert naming.names == {0: "w0", 1: "w1", 2: "b0", 3: "b1"}


def test_a_frozen_parameter_in_a_group_has_no_state_and_still_its_place():
    naming = name_parameters(optimizer([(0, (2, 3)), (1, None), (2, (4,))]), model(w=(2, 3), frozen=(5,), b=(4,)))
    assert naming.names == {0: "w", 1: "frozen", 2: "b"}


def test_a_tied_name_is_no_parameter_of_its_own():
    state_dict = {"emb": tensor(5, 2, at=0), "b": tensor(3, at=64), "head": tensor(5, 2, at=0)}
    assert name_parameters(optimizer([(0, (5, 2)), (1, (3,))]), state_dict).names == {0: "emb", 1: "b"}


def test_what_fsdp_did_not_shard_is_a_buffer():
    state_dict = {"w": tensor(4, kind="dtensor"), "mean": tensor(4), "b": tensor(4, kind="dtensor")}
    groups = {"state": {}, "param_groups": [{"params": [0, 1]}]}
    assert name_parameters(groups, state_dict).names == {0: "w", 1: "b"}


def test_integer_buffers_are_never_parameters():
    state_dict = {"w": tensor(2), "seen": tensor(2, dtype="int64")}
    assert name_parameters(optimizer([(0, (2,))]), state_dict).names == {0: "w"}


def test_without_a_model_nothing_is_named_and_it_is_said():
    naming = name_parameters(optimizer([(0, (2,))]), None)
    assert naming.names == {} and "no one model" in naming.note


def test_where_the_module_order_is_lost_only_a_shape_that_is_there_once_names_a_parameter():
    value = optimizer([(0, (4, 4)), (1, (4, 4)), (2, (2, 3)), (3, (7,))])
    state_dict = model(alpha=(4, 4), beta=(7,), mean=(7,), zeta=(4, 4), eta=(2, 3))
    naming = name_parameters(value, state_dict, LOST)
    assert (naming.names, naming.by, naming.unnamed) == ({2: "eta"}, "shape", (0, 1, 3))
    assert "safetensors are sorted" in naming.note and "--names" in naming.note


def test_factored_moments_and_a_model_that_lacks_parameters_name_nothing_without_order():
    factored = optimizer([(0, (4, 5)), (1, (9,))])
    factored["state"][0]["row"] = tensor(4)  # type: ignore[index]
    assert name_parameters(factored, model(w=(4, 5), b=(9,)), LOST).names == {1: "b"}
    assert name_parameters(optimizer([(0, (4, 5)), (1, (9,))]), model(w=(4, 5)), LOST).names == {}


def test_groups_show_names_and_hyperparameters():
    value = optimizer([(0, (2, 3)), (1, (2,))])
    value["param_groups"][0]["lr"] = 0.1  # type: ignore[index]
    (group,) = describe(value, model=model(w=(2, 3), b=(2,))).param_groups
    assert (group.lr, group["lr"], group.names) == (0.1, 0.1, ("w", "b"))


def embeddings(groups: list[list[tuple[int, ...]]], params: list[tuple[int, ...]]) -> list[tuple[tuple[int, ...], ...]]:
    """Every way to lay the groups over the parameters: each in order, none twice."""
    found: list[tuple[tuple[int, ...], ...]] = [()]
    for group in groups:
        grown = []
        for taken in found:
            free = [k for k in range(len(params)) if not any(k in t for t in taken)]
            fits = (c for c in combinations(free, len(group)) if [params[k] for k in c] == group)
            grown += [(*taken, c) for c in fits]
        found = grown
    return found


one_shape = st.sampled_from([(2,), (3,), (2, 2)])


@given(st.lists(st.tuples(one_shape, st.sampled_from([0, 1, None])), min_size=1, max_size=7))
@settings(max_examples=300, deadline=None)
def test_every_name_that_is_given_is_right_in_every_way_to_give_them(cells):
    params = [shape for shape, _ in cells]
    groups = [[(100 * g + k, s) for k, (s, mine) in enumerate(cells) if mine == g] for g in (0, 1)]
    groups = [g for g in groups if g]
    naming = name_parameters(optimizer(*groups), {f"p{k}": tensor(*s) for k, s in enumerate(params)})
    ways = embeddings([[s for _, s in g] for g in groups], params)
    for way in ways:
        placed = {
            i: f"p{k}"
            for group, places in zip(groups, way, strict=True)
            for (i, _), k in zip(group, places, strict=True)
        }
        assert all(placed[i] == name for i, name in naming.names.items())
    if len(ways) == 1 and len(groups) == 1:
        assert naming.unnamed == ()


def test_a_run_of_a_flattened_parameter_has_nobodys_shape():
    state_dict = {"w": tensor(2, 4, kind="dtensor"), "b": tensor(4, kind="dtensor")}
    assert name_parameters(optimizer([(0, (4,)), (1, (2,))]), state_dict, LOST).names == {}


def test_more_states_than_parameters_of_a_shape_prove_nothing():
    value = optimizer([(0, (2,)), (1, (2,)), (2, (5,))])
    assert name_parameters(value, model(w=(2,), b=(5,), c=(9,)), LOST).names == {}


def test_a_group_in_another_order_makes_the_order_of_all_doubtful():
    value = optimizer([(0, (2,)), (1, (2,))], [(2, (4,)), (3, (3,))])
    naming = name_parameters(value, model(a=(2,), b=(2,), c=(3,), d=(4,)))
    assert (naming.names, naming.by, naming.unnamed) == ({2: "d", 3: "c"}, "shape", (0, 1))


def test_a_number_in_two_groups_leaves_all_without_a_name_by_order():
    value = optimizer([(0, (2,)), (1, (2,))])
    value["param_groups"].append({"params": [1]})  # type: ignore[attr-defined]
    assert name_parameters(value, {"a": tensor(2), "b": tensor(2)}).names == {}


def test_one_name_for_two_parameters_is_no_name():
    value = optimizer([(0, (2,)), (1, (3,))])
    value["param_groups"][0]["param_names"] = ["weight", "weight"]  # type: ignore[index]
    assert name_by(value, None, CONFIRMED).names == {}
    value["param_groups"][0]["param_names"] = ["a.weight", "b.weight"]  # type: ignore[index]
    assert name_by(value, None, CONFIRMED).names == {0: "a.weight", 1: "b.weight"}


def run_of(*shape: int, at: int) -> Tensor:
    """A flattened parameter that rank 0 holds."""
    return tensor(*shape, kind="flat_pieces", at=at)


def test_a_flattened_parameter_takes_moments_only_that_ranks_hold_as_much_of():
    state = {0: {"exp_avg": tensor(6, at=0)}, 1: {"exp_avg": tensor(4, at=9)}}
    value = {"state": state, "param_groups": [{"params": [0, 1]}]}
    fits = {"a": run_of(3, 2, at=20), "b": run_of(2, 2, at=30)}
    assert name_parameters(value, fits).names == {0: "a", 1: "b"}
    assert name_parameters(value, {"b": fits["b"], "a": fits["a"]}).names == {}


def over_ranks(*shape: int, at: int) -> Tensor:
    """A parameter of which two ranks hold half of the rows each."""
    rows, rest = shape[0] // 2, shape[1:]
    shards = []
    for rank in (0, 1):
        source = Source("f", at, "float32", (rows, *rest), (1,) * len(shape), "r", (at, rank))  # type: ignore[arg-type]
        shards.append(Shard(Box((rank * rows, *(0,) * len(rest)), (rows, *rest)), rank, source))
    return Tensor(shape, "float32", tuple(shards), "dtensor", world_size=2)


def test_runs_belong_to_a_parameter_of_as_many_elements_once_all_ranks_are_read():
    state = {0: {"exp_avg": tensor(8, at=0)}, 1: {"exp_avg": tensor(4, at=9)}}
    groups = [{"params": [0]}, {"params": [1]}]
    sizes = {"a": over_ranks(2, 2, at=20), "b": over_ranks(4, 2, at=30), "c": over_ranks(2, 3, at=40)}
    assert name_parameters({"state": state, "param_groups": groups}, sizes).names == {0: "b", 1: "a"}
    del sizes["a"]
    assert name_parameters({"state": state, "param_groups": groups}, sizes).names == {}


def test_three_times_the_elements_are_no_replicas_in_a_world_of_two():
    value = {"state": {0: {"exp_avg": tensor(12, at=0)}}, "param_groups": [{"params": [0]}]}
    assert name_parameters(value, {"a": over_ranks(2, 2, at=20)}).names == {}


def test_runs_belong_to_the_flattened_parameter_that_the_same_ranks_hold():
    value = {"state": {0: {"exp_avg": tensor(4, at=0)}}, "param_groups": [{"params": [0]}]}
    elsewhere = run_of(2, 2, at=20)
    (shard,) = elsewhere.shards
    elsewhere = replace(elsewhere, shards=(shard._replace(rank=1),))
    assert name_parameters(value, {"a": elsewhere, "b": run_of(2, 2, at=30)}).names == {0: "b"}


@pytest.mark.parametrize("slots", [("row_var", "col_var", 1), ("exp_avg_sq_row", "exp_avg_sq_col", 0)])
def test_factors_of_a_moment_prove_the_shape_that_they_stand_for(tmp_path, slots):
    model = {"a": torch.ones(2, 3, 4), "b": torch.ones(2, 4, 3), "c": torch.ones(3, 4)}
    row, col, kept = slots
    state = {
        n: {row: p.mean(-1, bool(kept)), col: p.mean(-2, bool(kept))} for n, p in enumerate(reversed(model.values()))
    }
    groups = [{"lr": 0.1, "params": [0, 1, 2]}]
    torch.save({"model": model, "optimizer": {"state": state, "param_groups": groups}}, tmp_path / "factored.pt")
    naming = ckptools.open(tmp_path / "factored.pt").optimizers["optimizer"].naming
    assert (naming.names, naming.by) == ({0: "c", 1: "b", 2: "a"}, "shape")


def test_factors_that_are_of_no_one_shape_prove_nothing(tmp_path):
    model, factors = {"a": torch.ones(2, 3)}, {"row_var": torch.ones(2, 1), "col_var": torch.ones(2, 3)}
    optimizer = {"state": {0: factors}, "param_groups": [{"lr": 0.1, "params": [0]}]}
    torch.save({"model": model, "optimizer": optimizer}, tmp_path / "odd.pt")
    assert ckptools.open(tmp_path / "odd.pt").optimizers["optimizer"].naming.names == {}


def of_bitsandbytes(*shapes: tuple[int, ...], packed: bool) -> dict[str, Any]:
    """An optimizer of bitsandbytes in 8 bits; 0.48 on packs its own tensors."""
    beside = {"qmap1": tensor(256), "absmax1": tensor(1), "gnorm_vec": tensor(100)}
    own = [{"state1": tensor(*s, dtype="uint8"), "state2": tensor(*s, dtype="uint8"), **beside} for s in shapes]
    entries = [{"step": 1, QUANT_STATE: slots} if packed else {"step": 1, **slots} for slots in own]
    return {"state": dict(enumerate(entries)), "param_groups": [{"params": list(range(len(shapes)))}]}


@pytest.mark.parametrize("packed", [True, False])
def test_moments_of_bitsandbytes_prove_names_by_their_shape(packed):
    value = of_bitsandbytes((4, 3), (2,), packed=packed)
    assert name_parameters(value, model(b=(2,), w=(4, 3))).names == {0: "w", 1: "b"}


@pytest.mark.parametrize("packed", [True, False])
def test_moments_of_bitsandbytes_in_another_order_than_the_model_are_not_named_by_order(packed):
    value = of_bitsandbytes((4, 3), (2,), (2,), packed=packed)
    assert name_parameters(value, model(a=(2,), b=(2,), w=(4, 3))).names == {0: "w"}


def test_names_without_any_shape_are_not_said_to_agree_in_shape():
    value = {"state": {i: {"inside": {"moment": tensor(2)}} for i in range(2)}, "param_groups": [{"params": [0, 1]}]}
    assert name_parameters(value, model(a=(2,), b=(3,))).note.endswith("(no shapes to compare)")
    value["state"][1] = {"exp_avg": tensor(2)}
    assert name_parameters(value, model(a=(2,), b=(2,))).note.endswith("(shapes agree of 1, the others have none)")
