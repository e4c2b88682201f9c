"""Bytes that are a pickle themselves are shown with what they hold, and nothing of it is run."""

from __future__ import annotations

import os
import pickle
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from ckptools.cli import app
from ckptools.contents.tree import pickled_text

STATE = {"_num_yielded": 4, "dataset": {"sample_idx": 128, "name": "c4"}, "betas": [0.9, 0.95]}


class Trap:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


@pytest.mark.parametrize("protocol", range(2, 6))
def test_values_of_a_pickle_are_told_with_their_names(protocol):
    text = pickled_text(pickle.dumps(STATE, protocol))
    assert text == "_num_yielded 4, dataset.sample_idx 128, dataset.name 'c4', betas [0.9, 0.95]"


def test_many_values_are_cut_and_that_is_said():
    text = pickled_text(pickle.dumps({f"k{n}": n for n in range(40)}))
    assert text.startswith("k0 0, ") and text.endswith("k11 11 and more")
    assert pickled_text(pickle.dumps(list(range(40)))) == "40 values"


def test_nothing_in_it_is_run(tmp_path):
    data = pickle.dumps({"epoch": 1, "trap": Trap(tmp_path / "made")})
    assert (
        pickled_text(data).startswith(f"epoch 1, trap {os.mkdir.__module__}.mkdir") and not (tmp_path / "made").exists()
    )


@pytest.mark.parametrize(
    "cut", [b"", b".", b"\x80.", pickle.dumps(STATE)[:-1], pickle.dumps(STATE) + b".", b"\x80\x04x."]
)
def test_what_is_no_whole_pickle_is_only_bytes(cut):
    assert pickled_text(cut) == ""


@given(st.binary(max_size=200))
def test_any_bytes_are_told_or_not_without_an_error(data):
    assert isinstance(pickled_text(b"\x80\x04" + data + b"."), str)


def test_the_place_in_the_data_of_each_data_loader_is_on_screen(tmp_path):
    state = {"model": {"w": torch.ones(2)}, "dataloader": {"dp_rank_0": pickle.dumps(STATE), "world_size": 1}}
    torch.save(state, tmp_path / "a.pt")
    for words in (["show", "dataloader"], ["show", "dataloader.dp_rank_0"], ["tree"]):
        done = CliRunner().invoke(app, [words[0], str(tmp_path / "a.pt"), *words[1:]])
        assert "bytes, a pickle of _num_yielded 4, dataset.sample_idx 128" in done.stdout
