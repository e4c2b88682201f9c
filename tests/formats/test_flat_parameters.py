"""FSDP1's LOCAL_STATE_DICT, taken apart with shapes from elsewhere: real files of three versions of torch."""

from __future__ import annotations

import json
import shutil
import zlib
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

import ckptools
from ckptools.errors import NotWholeError, ReadError
from ckptools.formats.flat_parameters.parameters import resolve_flat_shards, take_apart
from ckptools.formats.flat_parameters.units import UnknownLayoutError, infer_flat_layout
from ckptools.formats.shared.given_names_and_shapes import Shapes
from ckptools.model.regions import Box
from ckptools.model.shards import Shard, Source
from ckptools.model.tensor import Tensor
from ckptools.training_state.optimizers import AS_WRITTEN
from tests.formats import save_local_states
from tests.formats.test_truth import same
from tests.state_dicts import raw
from tests.truth import FIXTURES, LOCAL, WHOLE, Known, load_truth

TIED = {"head.weight": "emb.weight"}
COMPOSER = next(k for k in WHOLE if "local" in k.name)
(TORCH,) = LOCAL


@pytest.fixture(scope="module")
def saved(local_states) -> Path:
    """Every variant of `save_local_states`, with a JSON of shapes beside each."""
    for name, options in save_local_states.VARIANTS.items():
        write_json(local_states / f"{name}.json", shapes_of(local_states, name) | (TIED if options.get("tied") else {}))
    return local_states


def shapes_of(out: Path, name: str) -> dict[str, object]:
    parameters = dict(save_local_states.Model(False, False).named_parameters())
    return {k: list(v.shape) for k, v in torch.load(out / f"{name}.pt").items() if k in parameters}


def write_json(path: Path, content: object) -> Path:
    path.write_text(json.dumps(content))
    return path


def notes(ck: ckptools.Checkpoint) -> str:
    return " ".join(p.message for p in ck.problems if p.code == "CK106")


@pytest.mark.slow
@pytest.mark.parametrize("name", save_local_states.VARIANTS)
def test_every_value_equals_what_the_ranks_held(saved, name):
    ck = ckptools.open(saved / name, all_ranks=True, shapes=saved / f"{name}.json")
    weights, moments = torch.load(saved / f"{name}.pt"), torch.load(saved / f"{name}-moments.pt")
    assert {k: raw(t.load()) for k, t in ck.model.items()} == {k: raw(t) for k, t in weights.items()}
    (optimizer,) = ck.optimizers.values()
    found = {(k, s): raw(t.load()) for k, slots in optimizer.state.items() for s, t in slots.items()}
    assert found == {(k, s): raw(t) for k, slots in moments.items() for s, t in slots.items()}
    frozen = [("CK203", "norm.bias")] if name in ("orig_named", "orig_mixed") else []
    assert [(p.code, p.tensor) for p in ck.problems] == frozen and (ck.whole, ck.world_size.value) == (True, 4)


def test_a_module_tells_shapes_too(saved):
    told = [saved / "flat.json", save_local_states.Model(False, False)]
    one, other = (ckptools.open(saved / "flat", all_ranks=True, shapes=shapes) for shapes in told)
    assert {k: raw(t.load()) for k, t in one.model.items()} == {k: raw(t.load()) for k, t in other.model.items()}
    assert other.problems == ()


def test_the_model_is_in_module_order_again(saved):
    ck = ckptools.open(saved / "flat", all_ranks=True, shapes=saved / "flat.json")
    parameters = [k for k in ck.model if k in shapes_of(saved, "flat")]
    assert parameters == list(shapes_of(saved, "flat"))


def test_consolidating_gives_the_full_state_dict(saved, tmp_path):
    ckptools.open(saved / "flat_tied", shapes=saved / "flat_tied.json").consolidate(tmp_path / "m.pt", only="model")
    state, truth = torch.load(tmp_path / "m.pt"), torch.load(saved / "flat_tied.pt")
    assert {k: raw(t) for k, t in state.items()} == {k: raw(t) for k, t in truth.items()}
    assert state["head.weight"].data_ptr() == state["emb.weight"].data_ptr()


# -- where the shapes may come from ----------------------------------------------------------------------------


def truth_of(known: Known) -> dict[str, torch.Tensor]:
    truth = {k[6:]: v for k, v in load_truth(known.name).items() if k.startswith("model/")}
    names = json.loads((FIXTURES / TORCH.name / "shapes.json").read_text()) if known is TORCH else truth
    return {k: torch.zeros(truth[k][2]) for k in names}


@pytest.mark.slow
@pytest.mark.parametrize("known", [COMPOSER, TORCH], ids=lambda k: k.name)
@pytest.mark.parametrize("kind", ["json", "pt", "safetensors"])
def test_the_samples_equal_their_truth_with_shapes_from(known, kind, tmp_path):
    told, path = truth_of(known), tmp_path / f"shapes.{kind}"
    if known is COMPOSER:
        # The order is the optimizer state's; this file has none of its own.
        order = [k for g in ckptools.open(known.file).optimizers["DecoupledAdamW"].param_groups for k in g.names]
        told = {k: told[k] for k in order}
    if kind == "json":
        write_json(path, {k: list(t.shape) for k, t in told.items()})
    else:
        (torch.save if kind == "pt" else save_file)(told, path)
    ck = ckptools.open(known.file, all_ranks=True, shapes=path)
    (optimizer,) = ck.optimizers.values()
    found = {f"model/{k}": v for k, v in ck.model.items()}
    found |= {f"optim/{k}/{slot}": v for k, slots in optimizer.state.items() for slot, v in slots.items()}
    assert [k for k, v in load_truth(known.name).items() if not same(found.get(k), *v)] == []


def test_another_checkpoint_of_the_same_model_tells_the_shapes(saved):
    ck = ckptools.open(saved / "flat", all_ranks=True, shapes=saved / "flat.pt")
    assert raw(ck.model["emb.weight"].load()) == raw(torch.load(saved / "flat.pt")["emb.weight"])


def test_a_checkpoint_in_which_they_share_bytes_tells_which_weights_are_tied(saved, tmp_path):
    torch.save(save_local_states.Model(tied=True, frozen=False).state_dict(), tmp_path / "tied.pt")
    ck = ckptools.open(saved / "flat_tied", all_ranks=True, shapes=tmp_path / "tied.pt")
    assert raw(ck.model["head.weight"].load()) == raw(torch.load(saved / "flat_tied.pt")["head.weight"])


def test_an_optimizer_state_keyed_by_name_is_enough(saved):
    ck = ckptools.open(saved / "flat_named", all_ranks=True)
    truth = torch.load(saved / "flat_named.pt")
    assert {k: raw(t.load()) for k, t in ck.model.items()} == {k: raw(t) for k, t in truth.items()}


def test_names_may_have_other_outer_modules(saved, tmp_path):
    told = {f"model.module.{k}": v for k, v in shapes_of(saved, "flat").items()}
    ck = ckptools.open(saved / "flat", all_ranks=True, shapes=write_json(tmp_path / "s.json", told))
    assert raw(ck.model["head.bias"].load()) == raw(torch.load(saved / "flat.pt")["head.bias"])


# -- what is refused -------------------------------------------------------------------------------------------


def refused(saved: Path, name: str, tmp_path: Path, told: dict[str, object]) -> str:
    ck = ckptools.open(saved / name, all_ranks=True, shapes=write_json(tmp_path / "s.json", told))
    with pytest.raises(ReadError):
        ck.model["_flat_param"].load()
    return notes(ck)


def test_without_shapes_it_says_what_to_do(saved):
    ck = ckptools.open(saved / "flat", all_ranks=True)
    assert "give them with shapes (" in notes(ck)
    with pytest.raises(NotWholeError, match="shapes"):
        ck.consolidate(saved / "x.pt", only="model")


def test_a_parameter_too_few_or_too_many_is_told_with_both_numbers(saved, tmp_path):
    told = shapes_of(saved, "flat")
    less = {k: v for k, v in told.items() if k != "head.bias"}
    assert "_flat_param has 186 elements, the 5 parameters" in refused(saved, "flat", tmp_path, less)
    assert "have 193" in refused(saved, "flat", tmp_path, told | {"extra": [7]})


def test_a_tied_weight_that_is_not_told_as_one_is_refused(saved, tmp_path):
    assert "tied" in refused(saved, "flat_tied", tmp_path, shapes_of(saved, "flat_tied"))


def test_sorted_names_have_no_order(saved, tmp_path):
    save_file({k: torch.zeros(v) for k, v in shapes_of(saved, "flat").items()}, tmp_path / "s.safetensors")
    ck = ckptools.open(saved / "flat", all_ranks=True, shapes=tmp_path / "s.safetensors")
    assert "not the order" in notes(ck)


def test_with_original_names_the_order_is_the_files(saved, tmp_path):
    told = dict(sorted(shapes_of(saved, "orig").items(), reverse=True))
    ck = ckptools.open(saved / "orig", all_ranks=True, shapes=write_json(tmp_path / "s.json", told))
    assert {k: raw(t.load()) for k, t in ck.model.items()} == {
        k: raw(t) for k, t in torch.load(saved / "orig.pt").items()
    }


def test_an_order_that_contradicts_the_optimizer_state_is_refused(saved, tmp_path):
    told = dict(reversed(shapes_of(saved, "flat_named").items()))
    assert "another order" in refused(saved, "flat_named", tmp_path, told)


def test_a_shape_that_contradicts_the_optimizer_state_is_refused(saved, tmp_path):
    told = shapes_of(saved, "flat_named") | {"head.weight": [7, 11]}
    assert "shape [7, 11], its optimizer state [11, 7]" in refused(saved, "flat_named", tmp_path, told)


def test_names_of_another_model_are_refused(saved, tmp_path):
    told = {f"other{i}": v for i, v in enumerate(shapes_of(saved, "orig").values())}
    assert "names none of the parameters" in refused(saved, "orig", tmp_path, told)


def test_a_shape_that_padding_could_hide_does_not_fit_the_runs(saved, tmp_path):
    told = shapes_of(saved, "orig") | {"shift": [6]}
    assert "do not lie where the ranks hold them" in refused(saved, "orig", tmp_path, told)


def test_a_frozen_parameter_that_the_optimizer_state_lacks_is_left_alone(saved):
    ck = ckptools.open(saved / "orig_named", all_ranks=True)
    truth = torch.load(saved / "orig_named.pt")
    assert "norm.bias: FSDP1 local state" in notes(ck)
    placed = {k: raw(t.load()) for k, t in ck.model.items() if k != "norm.bias"}
    assert placed == {k: raw(t) for k, t in truth.items() if k != "norm.bias"}


@pytest.mark.parametrize("name", ["flat", "orig"])
def test_a_missing_rank_is_a_gap_that_names_it(saved, name, tmp_path):
    shutil.copytree(saved / name, tmp_path / "run")
    (tmp_path / "run" / "rank1.pt").unlink()
    ck = ckptools.open(tmp_path / "run", all_ranks=True, shapes=saved / f"{name}.json")
    with pytest.raises(NotWholeError, match=r"rank 1 missing.*gap"):
        ck.consolidate(tmp_path / "m.pt", only="model")


def test_parameters_of_which_one_rank_holds_nothing_are_not_called_tied(saved):
    ck = ckptools.open(saved / "orig" / "rank0.pt", shapes=saved / "orig.json", only_this_file=True)
    assert "the parameters of blocks.0._flat_param fit in" in notes(ck)
    assert "has 140 elements" not in notes(ck)


# -- by hand ---------------------------------------------------------------------------------------------------


def flat(total: int, *regions: tuple[int, int, int]) -> Tensor:
    """A flat parameter of shards `(rank, first, length)`, each in a file of its own."""
    shards = [
        Shard(Box((first,), (n,)), rank, Source(Path(f"{rank}"), 0, "float32", (n,), (1,), "data/0", (0, 4 * n)))
        for rank, first, n in regions
    ]
    return Tensor((total,), "float32", tuple(shards), "sharded_tensor")


def told(**shapes: tuple[int, ...]) -> Shapes:
    return Shapes("told", shapes, {}, AS_WRITTEN)


def test_groups_that_repeat_the_parameters_are_told_apart_by_their_regions():
    """HSDP whose sharing groups are ranks 0 and 2, 1 and 3: rank order alone would mix them up."""
    model = {"_flat_param": flat(6, (0, 0, 3), (1, 0, 3), (2, 3, 3), (3, 3, 3))}
    take_apart(model, infer_flat_layout(model, told(a=(2, 2), b=(2,)), None), "", ())
    assert [(s.rank, str(s.box)) for s in model["b"].shards] == [(2, "[0:2]"), (3, "[0:2]")]
    assert [s.box.numel for s in model["a"].shards] == [2, 1, 2, 1, 1, 1]


def test_a_unit_in_a_unit_is_not_part_of_the_outer_one():
    model = {
        "_flat_param": flat(3, (0, 0, 3)),
        "a._flat_param": flat(2, (0, 0, 2)),
        "a.b.flat_param": flat(1, (0, 0, 1)),
    }
    shapes = {"w": (3,), "a.w": (2,), "a.b.w": (1,)}
    units = infer_flat_layout(model, Shapes("told", shapes, {}, AS_WRITTEN), None)
    assert [[m.key for m in u.members] for u in units] == [["w"], ["a.w"], ["a.b.w"]]


def test_a_buffer_that_is_told_as_well_is_no_parameter():
    model = {"_flat_param": flat(3, (0, 0, 3)), "mean": Tensor((3,), "float32", ())}
    (unit,) = infer_flat_layout(model, told(w=(3,), mean=(3,)), None)
    assert [m.key for m in unit.members] == ["w"]


def test_a_name_of_very_many_modules_is_refused():
    with pytest.raises(UnknownLayoutError, match="more than 100 modules"):
        infer_flat_layout(
            {"x._flat_param": flat(3, (0, 0, 3))}, Shapes("told", {"a." * 200 + "w": (3,)}, {}, AS_WRITTEN), None
        )


def run_at(first: int, length: int) -> Tensor:
    """What rank 0 has of a parameter under its own name: a view of its flat parameter's storage."""
    source = Source(Path("0"), 4 * first, "float32", (length,), (1,), "data/0", (0, 16))
    return Tensor((length,), "float32", (Shard(Box((0,), (length,)), 0, source),))


def test_runs_of_the_right_lengths_at_other_places_are_refused():
    right = {"_flat_param": flat(4, (0, 0, 4)), "v": run_at(0, 2), "w": run_at(2, 2)}
    (unit,) = infer_flat_layout(right, told(v=(2,), w=(2,)), None)
    assert [m.start for m in unit.members] == [0, 2]
    with pytest.raises(UnknownLayoutError, match="do not lie where the ranks hold them"):
        infer_flat_layout({**right, "v": run_at(2, 2), "w": run_at(0, 2)}, told(v=(2,), w=(2,)), None)


def test_runs_that_two_alignments_explain_are_refused():
    """Of 8 ranks one was read: `b` begins at element 2 or at 4, and none of it is here."""
    region = flat(8, (0, 0, 1))
    others = tuple(Shard(Box((rank,), (1,)), rank, None) for rank in range(1, 8))
    model = {"_flat_param": replace(region, shards=(*region.shards, *others)), "a": run_at(0, 1), "b": run_at(1, 0)}
    with pytest.raises(UnknownLayoutError, match="the parameters of _flat_param fit in 2 ways"):
        infer_flat_layout(model, told(a=(1,), b=(1,)), None)


def test_names_that_fit_under_two_outer_modules_are_refused():
    shapes = Shapes("told", {"a.w": (3,)}, {}, AS_WRITTEN)
    with pytest.raises(UnknownLayoutError, match="its names fit in 2 ways"):
        infer_flat_layout({"m.n._flat_param": flat(3, (0, 0, 3))}, shapes, None)


@pytest.mark.parametrize(("lengths", "placed"), [((1, 3), True), ((1, 2), False), ((3, 5), False), ((2, 2, 2), False)])
def test_runs_are_placed_only_where_they_make_whole_parameters(lengths, placed):
    """Optimizer state by name beside a sharded model: in rank order the runs fill the parameter, once or more often."""
    shards = tuple(run_at(0, n).shards[0]._replace(rank=rank) for rank, n in enumerate(lengths))
    weight = Tensor((4,), "float32", tuple(Shard(Box((2 * r,), (2,)), r, None) for r in (0, 1)), "dtensor")
    moment = Tensor((lengths[0],), "float32", shards)
    optimizer = {"state": {"w": {"exp_avg": moment}}, "param_groups": [{"params": ["w"]}]}
    resolve_flat_shards({"model": {"w": weight}, "optimizer": optimizer}, all_ranks=True)
    moment = optimizer["state"]["w"]["exp_avg"]  # type: ignore[index]
    assert (moment.shape == (4,), not moment.note) == (placed, placed)


def of_ranks(*contents: bytes) -> Tensor:
    """A plain 1-D tensor of four elements that each rank has in a file of its own, as merging leaves it."""
    sources = [
        Source(Path(f"rank{r}.pt"), 64, "float32", (4,), (1,), "data/0", (64, 16), zlib.crc32(data))
        for r, data in enumerate(contents)
    ]
    return Tensor((4,), "float32", tuple(Shard(Box((0,), (4,)), r, source) for r, source in enumerate(sources)))


@pytest.mark.parametrize(("second", "joined"), [(1.0, True), (2.0, False)])
def test_moments_that_are_views_of_one_storage_on_all_ranks_are_replicas(tmp_path, second, joined):
    for rank, factor in enumerate((1.0, second)):
        flat = torch.arange(20.0) * factor
        moments = {"a": flat[:7], "b": flat[7:], "unused": torch.zeros(4)}
        state = {name: {"exp_avg": moment} for name, moment in moments.items()}
        torch.save({"state": state, "param_groups": [{"params": [*state]}]}, tmp_path / f"optim-rank{rank}.pt")
    ck = ckptools.open(tmp_path, all_ranks=True)
    notes = [p.message for p in ck.problems if p.code == "CK106"]
    assert (notes == [], ck.saved_as.endswith("every tensor whole")) == (joined, joined)
    assert not any("--only model" in note or "DTensor" in ck.saved_as for note in notes)


@pytest.mark.parametrize(
    ("contents", "is_one_value"),
    [
        ((b"the same 16 byte", b"the same 16 byte"), True),
        ((b"the same 16 byte", b"not the same 16b"), False),
        ((bytes(16), bytes(16)), False),
        ((b"one rank's alone",), False),
    ],
)
def test_a_vector_beside_shards_is_a_replica_where_all_ranks_have_the_same_elements(contents, is_one_value):
    table = Tensor((8, 2), "float32", (Shard(Box((0, 0), (4, 2)), 0, None),), "sharded_tensor")
    state = {0: {"exp_avg": of_ranks(*contents)}, 1: {"exp_avg": of_ranks(b"other sixteen by", b"of rank one only")}}
    tree = {"model": {"table": table}, "optim": {"state": state, "param_groups": [{"params": [0, 1]}]}}
    resolve_flat_shards(tree, all_ranks=True)
    assert (state[0]["exp_avg"].note == "", state[1]["exp_avg"].note == "") == (is_one_value, False)
