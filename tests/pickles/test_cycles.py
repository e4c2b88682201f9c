"""Containers that lie in themselves: shown as such, and everything else of the file is read."""

from __future__ import annotations

from collections import OrderedDict

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

import ckptools
from ckptools.cli import app
from ckptools.model.tree import Cycle, walk
from ckptools.pickles.machine import without_cycles
from ckptools.torch_engine import describe


def circles() -> dict[str, object]:
    """Every way in which containers can lie in each other."""
    in_list: list[object] = [1]
    in_list.append(in_list)
    in_dict: dict[str, object] = {"x": 1}
    in_dict["me"] = in_dict
    through: list[object] = []
    through.append((2, through))
    far: dict[str, object] = {"a": [{"b": ()}]}
    far["a"][0]["b"] = (far, 3)  # type: ignore[index]
    return {"list": in_list, "dict": in_dict, "tuple": through, "far": far}


def test_a_container_in_itself_is_shown_and_the_rest_is_read(tmp_path):
    torch.save({"model": {"w": torch.ones(3)}, **circles()}, tmp_path / "m.pt")
    ck = ckptools.open(tmp_path / "m.pt")
    assert ck.whole and ck.model["w"].load().tolist() == [1, 1, 1]
    assert ck.raw["list"][0] == 1 and ck.raw["list"][1].name == "the list that it lies in"
    assert ck.raw["dict"]["x"] == 1 and ck.raw["dict"]["me"].name == "the dict that it lies in"
    assert ck.raw["tuple"][0][0] == 2 and isinstance(ck.raw["tuple"][0][1], Cycle)
    assert isinstance(ck.raw["far"]["a"][0]["b"][0], Cycle) and ck.raw["far"]["a"][0]["b"][1] == 3


@pytest.mark.parametrize("command", [["inspect"], ["inspect", "--section", "other"], ["inspect", "--json"], ["verify"]])
def test_every_command_ends_with_its_answer(tmp_path, command):
    torch.save({"model": {"w": torch.ones(3)}, **circles()}, tmp_path / "m.pt")
    done = CliRunner().invoke(app, [command[0], str(tmp_path / "m.pt"), *command[1:]])
    assert done.exit_code == 0, done.stderr


def test_torch_gives_the_same_tree(tmp_path):
    found = {name: value for name, value in circles().items() if name in ("list", "dict")}
    torch.save({"model": {"w": torch.ones(3)}, **found}, tmp_path / "m.pt")
    ours, torchs = ckptools.open(tmp_path / "m.pt"), ckptools.open(tmp_path / "m.pt", read_file=describe.read)
    assert repr(ours.raw["list"]) == repr(torchs.raw["list"]) and repr(ours.raw["dict"]) == repr(torchs.raw["dict"])


def test_what_lies_in_itself_is_left_out_of_an_output_with_a_line(tmp_path):
    torch.save({"model": {"w": torch.ones(3)}, **circles()}, tmp_path / "m.pt")
    done = CliRunner().invoke(app, ["consolidate", str(tmp_path / "m.pt"), "-o", str(tmp_path / "out.pt")])
    assert done.exit_code == 0, done.stderr
    again = torch.load(tmp_path / "out.pt")
    assert again["dict"] == {"x": 1} and again["list"] == [1, None]
    assert "the list that it lies in" in done.stderr


def test_a_state_dict_whose_versions_hold_it_keeps_its_tensors():
    state = OrderedDict(w=1)
    state._metadata = {"": state}  # type: ignore[attr-defined]
    made = without_cycles([state])
    assert made[0]["w"] == 1 and [leaf for _, leaf in walk(made)] == [1]


links = st.lists(st.tuples(st.integers(0, 7), st.integers(0, 7)), max_size=20)


@given(links=links, kinds=st.lists(st.sampled_from("ldt"), min_size=8, max_size=8))
def test_any_graph_of_containers_becomes_a_tree_that_ends(links, kinds):
    inner: list[list[object]] = [[n] for n in range(8)]
    nodes: list[object] = [
        {"in": i} if k == "d" else (i, k) if k == "t" else i for i, k in zip(inner, kinds, strict=True)
    ]
    for source, target in links:
        inner[source].append(nodes[target])
    made = without_cycles(nodes)
    leaves = [leaf for _, leaf in walk(made)]
    assert not any(isinstance(leaf, (list, tuple, dict)) and leaf for leaf in leaves)
    assert {leaf for leaf in leaves if isinstance(leaf, int)} == set(range(8))
