"""FSDP1's flat parameters in an optimizer beside a model by name: taken apart where one way fits, never wrongly."""

from __future__ import annotations

import shutil
import tempfile
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import count
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import ckptools
from ckptools.errors import NotWholeError, ReadError
from ckptools.formats.flat_parameters import parameters as unit_optimizer
from ckptools.formats.flat_parameters.units import UnknownLayoutError, units_of
from ckptools.model.regions import Box, Ints, chunk
from ckptools.model.shards import Shard, Source
from ckptools.model.tensor import Tensor
from ckptools.tensor_io import read
from tests.formats import save_unit_states
from tests.state_dicts import raw
from tests.truth import FIXTURES
from tests.versions import torch_that_loads

VERL = FIXTURES / "verl-fsdp1" / "ckpt" / "global_step_3" / "actor"


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> Path:
    """Every variant of `save_unit_states`."""
    out = tmp_path_factory.mktemp("units") / "out"
    save_unit_states.save_all(out)
    return out


def refusal(ck: ckptools.Checkpoint) -> str:
    return " ".join(p.message for p in ck.problems if p.code == "CK106")


@pytest.mark.slow
@pytest.mark.parametrize("name", save_unit_states.VARIANTS)
def test_every_moment_equals_what_torch_gathers(saved, name):
    ck = ckptools.open(saved / name, all_ranks=True)
    (optimizer,) = ck.optimizers.values()
    found = {(k, s): raw(t.load()) for k, slots in optimizer.state.items() for s, t in slots.items()}
    moments = torch.load(saved / f"{name}-moments.pt")
    assert found == {(k, s): raw(t) for k, slots in moments.items() for s, t in slots.items()}
    frozen = [("CK203", f"blocks.{n}.inner.scale") for n in range(2)] if name == "frozen" else []
    assert [(p.code, p.tensor) for p in ck.problems] == [*frozen, ("CK108", "optim")] and ck.whole


@pytest.mark.slow
@pytest.mark.parametrize("name", save_unit_states.VARIANTS)
def test_the_param_group_has_every_parameter_once(saved, name):
    (optimizer,) = ckptools.open(saved / name, all_ranks=True).optimizers.values()
    (group,) = optimizer.param_groups
    tied = {"head.weight"} if name == "tied_bf16" else set()
    parameters = {k for k, _ in save_unit_states.Model(False, False).named_parameters()}
    assert sorted(group.names) == sorted(parameters - tied)


def test_one_rank_finds_the_others_when_a_moment_is_loaded(saved):
    ck = ckptools.open(saved / "dtensor" / "rank2.pt")
    moment = ck.optimizers["optim"].state["head.weight"]["exp_avg"]
    assert raw(moment.load()) == raw(torch.load(saved / "dtensor-moments.pt")["head.weight"]["exp_avg"])


@pytest.mark.parametrize("rank", range(4))
def test_a_missing_rank_is_a_hole_and_shifts_nothing(saved, rank, tmp_path):
    shutil.copytree(saved / "dtensor", tmp_path / "run")
    (tmp_path / "run" / f"rank{rank}.pt").unlink()
    ck = ckptools.open(tmp_path / "run", all_ranks=True)
    moment = ck.optimizers["optim"].state["blocks.0.up.weight"]["exp_avg"]
    truth = torch.load(saved / "dtensor-moments.pt")["blocks.0.up.weight"]["exp_avg"].numpy()
    for shard in moment.found:
        rows = tuple(slice(o, o + n) for o, n in zip(shard.box.offsets, shard.box.sizes, strict=True))
        assert np.array_equal(read.read_box(moment, shard.box).view("<f4"), truth[rows])
    assert not any(s.rank == rank for s in moment.found)
    with pytest.raises(NotWholeError, match=f"rank {rank} missing"):
        ck.consolidate(tmp_path / "out.pt")


def test_consolidating_gives_the_optimizer_by_name(saved, tmp_path):
    ckptools.open(saved / "dtensor").consolidate(tmp_path / "out.pt")
    state = torch.load(tmp_path / "out.pt")
    moments = torch.load(saved / "dtensor-moments.pt")
    assert raw(state["optim"]["state"]["norm.weight"]["exp_avg"]) == raw(moments["norm.weight"]["exp_avg"])
    assert state["optim"]["param_groups"][0]["params"] == list(moments)


def test_ranks_that_hold_different_lengths_are_not_joined(saved, tmp_path):
    shutil.copytree(saved / "dtensor", tmp_path / "run")
    path = tmp_path / "run" / "rank1.pt"
    state = torch.load(path, weights_only=False)
    state["optim"]["state"][1]["exp_avg"] = state["optim"]["state"][1]["exp_avg"][:-1]
    torch.save(state, path)
    ck = ckptools.open(tmp_path / "run", all_ranks=True)
    with pytest.raises(ReadError):
        ck.tree["optim"]["state"][0]["exp_avg"].load()


def test_chunks_that_nothing_places_are_not_compared_as_copies(tmp_path):
    for file in VERL.glob("*.pt"):
        torch_that_loads(file)
        saved = torch.load(file, weights_only=False)
        if file.name.startswith("optim"):
            (group,) = saved["param_groups"]
            saved["param_groups"] = [{**group, "params": ids} for ids in (group["params"][:1], group["params"][1:])]
        torch.save(saved, tmp_path / file.name)
    found = ckptools.open(tmp_path, all_ranks=True).verify()
    codes = {p.code for p in found.problems}
    assert "CK106" in codes and "CK105" not in codes and found.verdict.whole


def test_a_file_without_the_model_beside_it_stays_as_it_is():
    ck = ckptools.open(VERL / "optim_world_size_4_rank_0.pt", only_this_file=True)
    assert list(ck.tree["optim"]["state"] if "optim" in ck.tree else ck.tree["state"]) == [0, 1, 2]


# -- which units there are -------------------------------------------------------------------------------------


def parameters(same: tuple[str, ...] = (), **shapes: Ints) -> dict[str, Tensor]:
    """Parameters whose bytes differ, but for some."""
    made = {}
    for crc, (key, shape) in enumerate(shapes.items(), 1):
        source = Source(Path("0"), 0, "float32", shape, (), "data", (0, 0), 99 if key in same else crc)
        made[key.replace("__", ".")] = Tensor(shape, "float32", (Shard(Box.whole(shape), 0, source),))
    return made


LAYERS: dict[str, Ints] = {f"layers__{n}__{k}": shape for n in (0, 1) for k, shape in (("a", (3, 4)), ("b", (5,)))}
TWO = parameters(out=(7,), emb__w=(6, 4), **LAYERS)


def test_layers_of_equal_size_are_told_apart_by_the_order_of_the_numbers():
    assert units_of(TWO, [16, 9, 9], 2) == [((0, (0, 1)), (1, (2, 3)), (2, (4, 5)))]


def test_parameters_of_the_same_bytes_may_be_tied_and_the_lengths_tell():
    model = parameters(("emb__w", "head__w"), emb__w=(6, 4), layer__a=(5,), head__w=(6, 4))
    assert units_of(model, [12, 3], 2) == [((0, (0,)), (1, (1,)))]
    assert units_of(model, [24, 3], 2) == [((0, (0, 2)), (1, (1,)))]


def test_parameters_of_other_bytes_are_not_tied():
    assert units_of(parameters(emb__w=(6, 4), layer__a=(5,), head__w=(6, 4)), [12, 3], 2) == []


def test_of_very_many_equal_parameters_none_one_or_all_are_tied():
    model: dict[str, Tensor] = {}
    for n in range(1, 9):
        model |= parameters((f"a{n}__w", f"b{n}__w"), **{f"a{n}__w": (n,), f"b{n}__w": (n,)})
    firsts, both = tuple(range(0, 16, 2)), tuple(range(16))
    assert units_of(model, [36], 1) == [((0, firsts),)]
    assert units_of(model, [72], 1) == [((0, both),)]
    assert len(units_of(model, [64], 1)) == 1 and units_of(model, [57], 1) == []


def test_lengths_that_two_ways_give_are_two_ways():
    assert len(units_of(parameters(w=(8,), a__x=(4,), b__x=(4,)), [6, 2], 2)) == 2


def test_padding_that_could_hide_a_parameter_is_two_ways():
    model = parameters(w=(3,), a__y=(1,), a__b__x=(5,))
    assert set(units_of(model, [2, 3], 2)) == {((0, (0,)), (1, (1, 2))), ((0, (0, 1)), (1, (2,)))}
    assert units_of(model, [4, 5], 1) == [((0, (0, 1)), (1, (2,)))]


@pytest.mark.parametrize("lengths", [[15, 9, 9], [17, 9, 9], [16, 8, 9], [16, 10, 9], [16, 9], [16, 9, 9, 1]])
def test_lengths_that_no_way_gives_are_no_way(lengths):
    assert units_of(TWO, lengths, 2) == []


def test_names_that_do_not_come_in_the_order_of_modules_are_refused():
    model = {k: TWO[k] for k in ("layers.0.a", "emb.w", "layers.0.b", "layers.1.a", "layers.1.b")}
    with pytest.raises(UnknownLayoutError, match="order of its modules"):
        units_of(model, [16, 9, 9], 2)


def test_parameters_of_the_outermost_module_may_come_last():
    """As FSDP1 of older versions lists them; the state dict's own list of modules tells."""
    late = {k: TWO[k] for k in ("layers.0.a", "layers.0.b", "layers.1.a", "layers.1.b", "out", "emb.w")}
    modules = dict.fromkeys(("", "emb", "layers", "layers.0", "layers.1"))
    assert list(unit_optimizer.in_module_order(late, modules)) == list(TWO)


def test_without_a_list_of_modules_no_order_is_believed():
    with pytest.raises(UnknownLayoutError, match="does not list its modules"):
        unit_optimizer.in_module_order(TWO, None)


def test_too_many_ways_to_look_through_are_refused():
    model = {f"m{i}.w": Tensor((8,), "float32", ()) for i in range(40)}
    with pytest.raises(UnknownLayoutError, match="too many ways"):
        units_of(model, [4] * 20 + [None] * 3, 2)


def test_a_name_of_very_many_modules_is_refused():
    with pytest.raises(UnknownLayoutError, match="more than 100 modules"):
        units_of({"a." * 200 + "w": Tensor((8,), "float32", ())}, [4], 2)


def test_a_layer_without_state_is_named_by_what_is_left():
    assert units_of(TWO, [16, None, 9], 2) == [((0, (0, 1)), (1, (2, 3)), (2, (4, 5)))]


# -- any tree of modules, wrapped in any way that torch has ----------------------------------------------------

Tree = dict[str, Any]
"""Parameters (shapes) and modules (trees) by name."""

shapes = st.lists(st.integers(1, 5), min_size=1, max_size=2).map(tuple)
leaves = st.dictionaries(st.sampled_from("xyz"), shapes, min_size=1, max_size=2)


def extended(inner: st.SearchStrategy[Tree]) -> st.SearchStrategy[Tree]:
    alike = st.tuples(inner, st.integers(1, 3)).map(lambda t: {str(i): t[0] for i in range(t[1])})
    several = st.lists(inner, min_size=1, max_size=3).map(lambda ts: {str(i): t for i, t in enumerate(ts)})
    own = st.dictionaries(st.sampled_from("xyz"), shapes, max_size=2)
    named = st.dictionaries(st.sampled_from("abc"), inner, min_size=1, max_size=2)
    return st.one_of(alike, several, st.tuples(own, named).map(lambda t: {**t[0], **t[1]}))


trees = st.recursive(leaves, extended, max_leaves=6)


def named_parameters(tree: Tree, prefix: str = "") -> Iterator[tuple[str, Ints]]:
    yield from ((prefix + k, v) for k, v in tree.items() if isinstance(v, tuple))
    for k, v in tree.items():
        if isinstance(v, dict):
            yield from named_parameters(v, f"{prefix}{k}.")


def flatten(tree: Tree, wraps: Mapping[str, bool], prefix: str = "", root: bool = True) -> tuple[list, list]:
    """What torch makes of a tree: parameters of no unit yet, and its units in the order of `parameters()`."""
    own = [(prefix + k, v) for k, v in tree.items() if isinstance(v, tuple)]
    nested: list[list[tuple[str, Ints]]] = []
    for k, v in tree.items():
        if isinstance(v, dict):
            left, units = flatten(v, wraps, f"{prefix}{k}.", root=False)
            own += left
            nested += units
    is_unit = root or wraps.get(repr(tree), False)
    return ([], [own, *nested] if own else nested) if is_unit else (own, nested)


def kinds(tree: Tree) -> Iterator[str]:
    yield repr(tree)
    for v in tree.values():
        if isinstance(v, dict):
            yield from kinds(v)


def write(folder: Path, units: list, world: int, ranks: int) -> tuple[dict, dict]:
    """A model's layout and an optimizer as the ranks would save it, with numbers as values; the values by name."""
    values: dict[str, np.ndarray] = {}
    state: dict[int, dict[str, Tensor]] = {}
    number = count(1.0)
    for key, members in enumerate(units):
        flat = np.array([next(number) for _, shape in members for _ in range(prod(shape))], "<f4")
        start = 0
        for name, shape in members:
            values[name] = flat[start : start + prod(shape)].reshape(shape)
            start += prod(shape)
        length = -(-len(flat) // ranks)
        padded = np.concatenate([flat, np.full(length * ranks - len(flat), -1, "<f4")])
        path = folder / f"{key}"
        padded.tofile(path)
        shards = [_at(path, (rank % ranks) * length, length, rank) for rank in range(world)]
        state[key] = {"exp_avg": Tensor((length,), "float32", tuple(shards))}
    return {"state": state, "param_groups": [{"lr": 0.1, "params": list(state)}]}, values


def _at(path: Path, start: int, length: int, rank: int) -> Shard:
    source = Source(path, 4 * start, "float32", (length,), (1,), "data", (0, 0))
    return Shard(Box((0,), (length,)), rank, source)


def sharded(shape: Ints, world: int, ranks: int) -> Tensor:
    shards = []
    for rank in range(world):
        at, n = chunk(shape[0], ranks, rank % ranks)
        if n:
            shards.append(Shard(Box((at, *(0,) * len(shape[1:])), (n, *shape[1:])), rank, None))
    return Tensor(shape, "float32", tuple(shards), "dtensor", world_size=world)


def state_dict(tree: Tree, world: int, ranks: int) -> OrderedDict[str, Tensor]:
    model = OrderedDict((k, sharded(v, world, ranks)) for k, v in named_parameters(tree))
    model._metadata = dict.fromkeys(paths(tree))
    return model


def paths(tree: Tree, prefix: str = "") -> Iterator[str]:
    yield prefix
    for k, v in tree.items():
        if isinstance(v, dict):
            yield from paths(v, f"{prefix}.{k}".lstrip("."))


SMALL: Tree = {"x": (3,), "a": {"y": (4, 2)}}


def small(folder: Path) -> tuple[dict[str, Any], OrderedDict[str, Tensor]]:
    """Two units over two ranks."""
    optimizer, _ = write(folder, [[("x", (3,))], [("a.y", (4, 2))]], 2, 2)
    return optimizer, state_dict(SMALL, 2, 2)


def test_several_param_groups_leave_the_order_of_units_open(tmp_path):
    optimizer, model = small(tmp_path)
    optimizer["param_groups"] = [{"params": [0]}, {"params": [1]}]
    with pytest.raises(UnknownLayoutError, match="several param groups"):
        unit_optimizer.take_optimizer_apart(optimizer, model, all_ranks=True)


def test_ranks_that_hold_each_others_pieces_are_refused(tmp_path):
    optimizer, model = small(tmp_path)
    model["a.y"] = replace(model["a.y"], shards=tuple(s._replace(rank=1 - s.rank) for s in model["a.y"].shards))
    with pytest.raises(UnknownLayoutError, match=r"does not hold the piece of a\.y"):
        unit_optimizer.take_optimizer_apart(optimizer, model, all_ranks=True)


def test_moments_of_several_lengths_are_no_chunks(tmp_path):
    optimizer, _ = small(tmp_path)
    moment = optimizer["state"][1]["exp_avg"]
    first, second = moment.shards
    optimizer["state"][1]["exp_avg"] = replace(moment, shards=(first, second._replace(box=Box((0,), (3,)))))
    assert unit_optimizer.unit_lengths(optimizer) is None
    optimizer["state"][1] = {"exp_avg": moment, "absmax": replace(moment, shape=(1,))}
    assert unit_optimizer.unit_lengths(optimizer) is None


@pytest.mark.slow
@settings(max_examples=200, deadline=None)
@given(trees, st.data(), st.sampled_from([(1, 1), (2, 2), (3, 3), (4, 2), (4, 4)]))
def test_any_wrapping_is_read_back_or_refused_and_never_wrong(tree, data, group):
    world, ranks = group
    wraps = {kind: data.draw(st.booleans()) for kind in dict.fromkeys(kinds(tree))}
    _, units = flatten(tree, wraps)
    model = state_dict(tree, *group)
    with tempfile.TemporaryDirectory() as folder:
        optimizer, values = write(Path(folder), units, world, ranks)
        try:
            told = unit_optimizer.take_optimizer_apart(optimizer, model, all_ranks=True)
        except UnknownLayoutError:
            return
        assert told and optimizer["param_groups"][0]["params"] == [name for unit in units for name, _ in unit]
        for name, entry in optimizer["state"].items():
            for rank in range(world):
                boxes = entry["exp_avg"].on_rank(rank)
                assert len(boxes) <= 3
            whole = read.read_box(entry["exp_avg"], Box.whole(values[name].shape)).view("<f4")
            assert np.array_equal(whole, values[name])
