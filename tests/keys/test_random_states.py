"""Fingerprints of random states: everything that decides what is drawn next, the same in every command."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

import ckptools
from ckptools.cli import app
from ckptools.files.opening import OpenFiles
from ckptools.keys.random_states import random_states
from tests.truth import FIXTURES

COMPOSER = FIXTURES / "composer-0.13.5-torch1.13.1-sharded-w4"


def states(seed: int = 0) -> dict[str, Any]:
    python, numpy = random.Random(seed), np.random.RandomState(seed)
    generator = torch.Generator().manual_seed(seed)
    return {"python": python.getstate(), "numpy": numpy.get_state(), "torch": generator.get_state()}


def saved(path: Path, rng: Any, name: str = "rng") -> Path:
    torch.save({"model": {"w": torch.arange(3.0)}, name: rng}, path)
    return path


def prints(path: Path, stream: str = "") -> Any:
    with OpenFiles() as files:
        found = random_states(ckptools.open(path, all_ranks=True), files)
    by_rank = {name: {rank: c.fingerprint for rank, c in of.items()} for name, of in found.items()}
    return by_rank[stream][None] if stream else by_rank


@settings(max_examples=15, deadline=None)
@given(draws=st.integers(0, 700), legacy=st.booleans())
def test_a_numpy_state_has_another_fingerprint_after_each_draw_and_the_same_before(tmp_path_factory, draws, legacy):
    folder, drawn = tmp_path_factory.mktemp("numpy"), np.random.RandomState(3)
    drawn.randint(0, 2**31, draws)
    before = prints(saved(folder / "a.pt", {"numpy": drawn.get_state(legacy=legacy)}), "numpy")
    assert before == prints(saved(folder / "b.pt", {"numpy": drawn.get_state(legacy=legacy)}), "numpy")
    drawn.randint(0, 2**31)
    assert before != prints(saved(folder / "c.pt", {"numpy": drawn.get_state(legacy=legacy)}), "numpy")


def changed(place: int, value: Any, of: str = "numpy") -> dict[str, Any]:
    return {of: tuple(value if n == place else old for n, old in enumerate(states()[of]))}


OTHERS = {
    "numpy's place": ("numpy", changed(2, 5)),
    "numpy's algorithm": ("numpy", changed(0, "PCG64")),
    "that numpy keeps a normal number": ("numpy", changed(3, 1)),
    "the normal number that numpy keeps": ("numpy", changed(4, 0.5)),
    "python's version": ("python", changed(0, 2, "python")),
    "the normal number that python keeps": ("python", changed(2, 0.5, "python")),
    "python's place": ("python", changed(1, (*states()["python"][1][:-1], 5), "python")),
    "a byte of torch's": ("torch", {"torch": states()["torch"].clone().index_fill_(0, torch.tensor([4]), 7)}),
}


@pytest.mark.parametrize("what", OTHERS)
def test_what_decides_the_next_draw_is_in_the_fingerprint(tmp_path, what):
    stream, other = OTHERS[what]
    assert prints(saved(tmp_path / "a.pt", states()), stream) != prints(saved(tmp_path / "b.pt", other), stream)


def test_of_several_devices_each_counts(tmp_path):
    devices = [[torch.zeros(16, dtype=torch.uint8), torch.full((16,), n)] for n in (1, 2)]
    found = [prints(saved(tmp_path / f"{n}.pt", {"cuda": of}), "cuda") for n, of in enumerate(devices)]
    assert found[0] != found[1]


def test_generators_in_sections_of_their_own_do_not_hide_each_other(tmp_path):
    def of(cuda: int) -> Path:
        rng = {"cuda_rng_state": torch.full((16,), cuda), "torch_rng_state": torch.arange(16)}
        torch.save({"model": {"w": torch.arange(3.0)}, "epoch": 1, "args": {}, **rng}, tmp_path / f"{cuda}.pt")
        return tmp_path / f"{cuda}.pt"

    assert set(prints(of(1))) == {"cuda", "torch"}
    found = ckptools.diff(of(1), of(2))
    assert found.same is False and [r.name for r in found.values if r.verdict == "differs"] == ["rng cuda"]


def test_a_seed_beside_the_states_is_no_state_and_still_differs(tmp_path):
    paths = [saved(tmp_path / f"{n}.pt", {**states(), "step": n}) for n in (1, 2)]
    assert set(prints(paths[0])) == {"python", "numpy", "torch"}
    (row,) = [r for r in ckptools.diff(*paths).values if r.verdict == "differs"]
    assert (row.name, row.value_a, row.value_b) == ("rng.step", "1", "2")


def test_ranks_that_stand_at_another_place_are_not_called_equal(tmp_path):
    rng = [{"numpy": ("MT19937", np.arange(624, dtype=np.uint32), place, 0, 0.0)} for place in (1, 2, 3)]
    path = saved(tmp_path / "all.pt", rng)
    check = next(c for c in ckptools.verify(path).checks if c.name == "rng")
    assert (check.result, check.detail) == ("ok", "numpy 3 distinct of 3")
    assert ckptools.open(path).show("rng").streams[0].distinct == 3


def test_states_by_rank_are_told_apart_where_a_rank_is_lost(tmp_path):
    found = prints(saved(tmp_path / "a.pt", {str(rank): states(rank) for rank in (0, 2, 3)}))
    assert [set(of) for of in found.values()] == [{0, 2, 3}] * 3


@pytest.mark.slow
def test_every_command_says_one_fingerprint():
    found = prints(COMPOSER)
    shown = json.loads(CliRunner().invoke(app, ["show", str(COMPOSER), "rng", "--json"]).stdout)["streams"]
    assert {row["stream"]: row["fingerprints"] for row in shown} == {
        stream: {str(rank): digits for rank, digits in of.items()} for stream, of in found.items()
    }
    of_diff = {(r.name, r.rank): r.value_a for r in ckptools.diff(COMPOSER, COMPOSER).values if r.subject == "rng"}
    expected = {(f"rng {s}", rank): f"fingerprint {digits}" for s, of in found.items() for rank, digits in of.items()}
    assert of_diff == expected


def test_verify_names_the_fingerprint_that_ranks_share(tmp_path):
    path = saved(tmp_path / "all.pt", [states(seed) for seed in (0, 1, 1, 2)])
    (problem,) = [p for p in ckptools.verify(path).problems if p.code == "CK206"]
    for stream, of in prints(path).items():
        assert f"{stream} state ({of[1]})" in problem.message and of[0] not in problem.message


MEGATRON = FIXTURES / "megatron-tp2pp2-fp32" / "ckpt"


@pytest.mark.slow
def test_megatrons_states_are_told_apart_by_their_place_in_its_grid():
    found = prints(MEGATRON)
    assert set(found["torch"]) == {"shard 0.0", "shard 0.1", "shard 1.0", "shard 1.1"}
    assert len(set(found["torch"].values())) == 2 and len(set(found["python"].values())) == 1
    rows = {row.stream: row for row in ckptools.open(MEGATRON).show("rng").streams}
    assert (rows["torch"].ranks, rows["torch"].distinct) == (4, 2)
    check = next(c for c in ckptools.verify(MEGATRON).checks if c.name == "rng")
    assert check.result == "ok" and check.detail.endswith("torch 2 distinct of 4")
    named = {row.name: row.value_a for row in ckptools.diff(MEGATRON, MEGATRON).values if row.subject == "rng"}
    assert named["rng torch of shard 1.0"] == f"fingerprint {found['torch']['shard 1.0']}"


# -- told by their form --------------------------------------------------------------------------------------------

FORMS = {
    "python": lambda seed: random.Random(seed).getstate(),
    "python, as a list": lambda seed: list(random.Random(seed).getstate()),
    "numpy": lambda seed: np.random.RandomState(seed).get_state(),
    "numpy, as a dict": lambda seed: np.random.RandomState(seed).get_state(legacy=False),
    "numpy's PCG64": lambda seed: np.random.default_rng(seed).bit_generator.state,
}


@pytest.mark.slow
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("place", ["here", "extra.here", "extra.random"])
def test_a_state_is_known_by_its_form_wherever_it_lies_and_whatever_it_is_called(tmp_path, form, place):
    outer, _, key = place.rpartition(".")
    paths = []
    for seed in (1, 1, 2):
        state = {key: FORMS[form](seed)}
        tree = {"model": {"w": torch.ones(3)}, "epoch": 4, **({outer: {**state, "seen": 7}} if outer else state)}
        torch.save(tree, tmp_path / f"{len(paths)}.pt")
        paths.append(tmp_path / f"{len(paths)}.pt")
    stream = form[:6].rstrip(",'")
    ck = ckptools.open(paths[0])
    assert [(s.kind, s.name) for s in ck.sections if s.kind == "rng"] == [("rng", place)]
    assert set(prints(paths[0])) == {stream} and prints(paths[0]) == prints(paths[1]) != prints(paths[2])
    assert [r.name for r in ckptools.diff(paths[0], paths[2]).values if r.verdict == "differs"] == [f"rng {stream}"]


@pytest.mark.parametrize("form", FORMS)
def test_inspect_says_which_generator_a_state_is_of_that_is_known_by_its_form(tmp_path, form):
    torch.save({"model": {"w": torch.ones(3)}, "here": FORMS[form](1)}, tmp_path / "x.pt")
    out = CliRunner().invoke(app, ["inspect", str(tmp_path / "x.pt")]).stdout
    (row,) = [line for line in out.splitlines() if line.startswith("here ")]
    assert row.split()[-1] == form[:6].rstrip(",'")


@pytest.mark.parametrize(
    "value",
    [(3, tuple(range(624)), None), (3, tuple(range(625)), "x"), (1.5, tuple(range(625)), None), (3, (1, 2), None),
     ("a", list(range(625)), 1, 0, 0.0), {"bit_generator": 3, "state": {}}, {"state": {}}],
)  # fmt: skip
def test_what_only_resembles_a_state_is_none(tmp_path, value):
    torch.save({"model": {"w": torch.ones(3)}, "here": value}, tmp_path / "x.pt")
    assert [s.kind for s in ckptools.open(tmp_path / "x.pt").sections] == ["model", "other"]


def test_each_rank_s_own_state_under_any_name_is_its_own_and_no_difference_between_ranks(tmp_path):
    for rank in range(3):
        torch.save({"model": {"w": torch.ones(3)}, "here": random.Random(rank).getstate()}, tmp_path / f"rank{rank}.pt")
    assert ckptools.open(tmp_path).problems == ()
    assert len(set(prints(tmp_path)["python"].values())) == 3
