"""What ranks have for themselves is kept for every rank; what they should share is compared, wherever it lies."""

from __future__ import annotations

import copy
import datetime
import json

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from typer.testing import CliRunner

import ckptools
from ckptools.cli import app
from ckptools.errors import NotWholeError
from ckptools.training_state.sections import is_gathered
from tests.truth import FIXTURES

VERL = FIXTURES / "verl-fsdp1-orig" / "ckpt" / "global_step_3" / "actor"
WEIGHTS = {"w": torch.arange(12.0).reshape(4, 3), "b": torch.arange(4.0)}
RANKS = 3


def of_rank(rank: int) -> dict:
    """What rank `rank` saves: the model is everybody's, the rest its own."""
    torch.manual_seed(rank)
    return {
        "model": WEIGHTS,
        "rng": {"torch": torch.get_rng_state(), "numpy": np.random.RandomState(rank).get_state()},
        "train_sampler": {"epoch": 1, "pos": 10 * rank, "order": torch.arange(rank, rank + 3)},
        "buffer": torch.arange(rank + 1),
        "metric": torch.tensor([float(rank)]),
        "took": datetime.timedelta(seconds=rank),
        "seed": 7,
    }


@pytest.fixture
def run(tmp_path):
    """A folder with what every rank saved; called with a rank, a key and a value it changes that."""
    folder = tmp_path / "run"
    folder.mkdir()
    trees = [of_rank(rank) for rank in range(RANKS)]

    def save(rank=None, key=None, value=None):
        for tree in trees if rank is None and key is not None else trees[rank : rank + 1] if key else ():
            tree[key] = copy.deepcopy(value)
        for number, tree in enumerate(trees):
            torch.save(tree, folder / f"rank{number}.pt")
        return folder

    save()
    return save


def test_a_pt_has_what_each_rank_had_as_a_list_by_rank(run, tmp_path):
    done = ckptools.consolidate(run(), tmp_path / "all.pt")
    state = torch.load(tmp_path / "all.pt")
    for rank in range(RANKS):
        mine = of_rank(rank)
        assert torch.equal(state["rng"][rank]["torch"], mine["rng"]["torch"])
        assert np.array_equal(state["rng"][rank]["numpy"][1].numpy(), mine["rng"]["numpy"][1])
        assert state["train_sampler"][rank]["pos"] == 10 * rank
        assert torch.equal(state["train_sampler"][rank]["order"], mine["train_sampler"]["order"])
        assert torch.equal(state["buffer"][rank], mine["buffer"]) and torch.equal(state["metric"][rank], mine["metric"])
    assert (state["took"], state["seed"]) == ([0.0, 1.0, 2.0], 7)
    assert torch.equal(state["model"]["w"], WEIGHTS["w"])
    assert done.notes[0].startswith("5 values that ranks have for themselves ")
    assert "(rng, train_sampler, buffer, metric, took): kept for each of 3 ranks, as a list by rank" in done.notes[0]


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_a_dcp_has_the_same_lists(run, tmp_path):
    ckptools.consolidate(run(), tmp_path / "all.dcp")
    state = {"metric": [torch.zeros(1) for _ in range(RANKS)], "train_sampler": [{"pos": 0} for _ in range(RANKS)]}
    dcp.load(state, checkpoint_id=tmp_path / "all.dcp")
    assert [t.item() for t in state["metric"]] == [0.0, 1.0, 2.0]
    assert [s["pos"] for s in state["train_sampler"]] == [0, 10, 20]


def test_safetensors_have_the_tensors_and_the_json_beside_them_the_rest(run, tmp_path):
    ckptools.consolidate(run(), tmp_path / "all.safetensors", only="all")
    tensors = load_file(tmp_path / "all.safetensors")
    values = json.loads((tmp_path / "all.safetensors.json").read_text())["values"]
    assert [tensors[f"metric.{rank}"].item() for rank in range(RANKS)] == [0.0, 1.0, 2.0]
    assert [s["pos"] for s in values["train_sampler"]] == [0, 10, 20]
    assert [r["numpy"]["items"][2] for r in values["rng"]] == [624] * RANKS


def test_what_all_ranks_have_alike_stays_what_it_was(run, tmp_path):
    run(None, "rng", of_rank(0)["rng"])
    run(None, "train_sampler", {"pos": 5})
    ckptools.consolidate(run(), tmp_path / "all.pt")
    state = torch.load(tmp_path / "all.pt")
    assert list(state["rng"]) == ["torch", "numpy"] and state["train_sampler"] == {"pos": 5}


def test_a_rank_that_has_nothing_there_has_none_in_the_list(run, tmp_path):
    run(1, "took", None)
    state = of_rank(2)["rng"]
    run(2, "rng", {"torch": state["torch"]})
    ckptools.consolidate(run(), tmp_path / "all.pt")
    state = torch.load(tmp_path / "all.pt")
    assert state["took"] == [0.0, None, 2.0]
    assert [sorted(r) for r in state["rng"]] == [["numpy", "torch"], ["numpy", "torch"], ["torch"]]


def test_a_rank_whose_file_is_missing_leaves_its_place_empty(run, tmp_path):
    (run() / "rank1.pt").unlink()
    ckptools.consolidate(tmp_path / "run", tmp_path / "all.pt", allow_missing=True)
    state = torch.load(tmp_path / "all.pt")
    assert [s and s["pos"] for s in state["train_sampler"]] == [0, None, 20]


plain = st.recursive(
    st.integers(0, 2) | st.sampled_from(["a", None, True, 0.5]),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.sampled_from("ab"), inner, max_size=2),
    max_leaves=5,
)


@pytest.mark.slow
@settings(max_examples=80, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(own=st.lists(plain, min_size=2, max_size=3), name=st.sampled_from(["rng", "train_sampler"]))
def test_whatever_ranks_have_for_themselves_comes_out_as_it_was(tmp_path, own, name):
    assume(not any(map(is_gathered, own)))  # a list of all ranks' states, which has to be the same in every file
    for old in tmp_path.iterdir():
        old.unlink()
    for rank, value in enumerate(own):
        torch.save({"model": WEIGHTS, name: value}, tmp_path / f"rank{rank}.pt")
    ckptools.consolidate(tmp_path / "rank0.pt", tmp_path / "all.pt")
    alike = all(json.dumps(value, sort_keys=True) == json.dumps(own[0], sort_keys=True) for value in own)
    assert json.dumps(torch.load(tmp_path / "all.pt")[name]) == json.dumps(own[0] if alike else own)


def test_real_random_states_of_four_ranks_are_all_kept(tmp_path):
    ckptools.consolidate(VERL / "model_world_size_4_rank_0.pt", tmp_path / "all.pt")
    kept = torch.load(tmp_path / "all.pt")["extra_state"]["rng"]
    for rank in range(4):
        saved = torch.load(VERL / f"extra_state_world_size_4_rank_{rank}.pt", weights_only=False)["rng"]
        assert torch.equal(kept[rank]["cpu"], saved["cpu"]) and kept[rank]["random"] == saved["random"]
        assert np.array_equal(kept[rank]["numpy"][1].numpy(), saved["numpy"][1])


MOVED = {name: tensor + 1 for name, tensor in WEIGHTS.items()}
COPIES = {
    "a dict by name": (WEIGHTS, MOVED),
    "below a key": ({"decay": 0.9, "kept": WEIGHTS}, {"decay": 0.9, "kept": MOVED}),
    "a list of shapes": (list(WEIGHTS.values()), list(MOVED.values())),
    "a number beside": ({"decay": 0.9, "shadow": WEIGHTS}, {"decay": 0.8, "shadow": WEIGHTS}),
}


@pytest.mark.parametrize("name", ["ema", "average"])
@pytest.mark.parametrize("kind", [kind for kind in COPIES if "number" not in kind])
def test_another_copy_of_the_model_that_differs_between_ranks_is_refused_and_fails_verify(kind, name, run, tmp_path):
    usual, odd = COPIES[kind]
    run(None, name, usual)
    folder = run(2, name, odd)
    with pytest.raises(NotWholeError, match=f"CK105  rank 2, {name}.*prefer_rank"):
        ckptools.consolidate(folder, tmp_path / "all.pt")
    found = ckptools.verify(folder)
    assert not found.ok and {(p.code, p.rank) for p in found.problems} == {("CK105", 2)}


def test_a_rank_s_copy_is_taken_on_demand_and_every_rank_s_own_is_kept_all_the_same(run, tmp_path):
    run(None, "ema", WEIGHTS)
    done = ckptools.consolidate(run(2, "ema", MOVED), tmp_path / "all.pt", prefer_rank=2)
    state = torch.load(tmp_path / "all.pt")
    assert torch.equal(state["ema"]["w"], MOVED["w"]) and state["took"] == [0.0, 1.0, 2.0]
    assert len(done.notes) == 2


def test_a_lone_tensor_or_number_called_ema_is_shared(run, tmp_path):
    for value, odd in ((torch.zeros(2), torch.ones(2)), (1, 2)):
        run(None, "ema", value)
        with pytest.raises(NotWholeError, match="CK105"):
            ckptools.consolidate(run(1, "ema", odd), tmp_path / "all.pt")


def test_equal_copies_are_written_once(run, tmp_path):
    folder = run(None, "ema", WEIGHTS)
    ckptools.consolidate(folder, tmp_path / "all.pt")
    assert torch.equal(torch.load(tmp_path / "all.pt")["ema"]["w"], WEIGHTS["w"]) and ckptools.verify(folder).ok


def test_verify_and_inspect_name_what_each_rank_has_for_itself(run):
    folder = str(run())
    verified = CliRunner().invoke(app, ["verify", folder])
    line = next(row for row in verified.stdout.splitlines() if row.startswith("copies are equal"))
    assert verified.exit_code == 0 and "each rank has its own: rng, train_sampler, took, buffer, metric" in line
    shown = CliRunner().invoke(app, ["inspect", folder, "--all-ranks"]).stdout
    assert "rng.numpy" in shown and "train_sampler.pos" in shown


def test_one_file_alone_is_written_as_it_is(run, tmp_path):
    ckptools.consolidate(ckptools.open(run() / "rank1.pt", only_this_file=True), tmp_path / "one.pt")
    state = torch.load(tmp_path / "one.pt")
    assert state["train_sampler"]["pos"] == 10 and state["took"] == 1.0
