"""What an output is called, and what lies beside it: the one rule, case by case."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import ckptools
from ckptools.consolidate.output_place import output_of
from ckptools.errors import OutputExistsError, ReadError, UsageError
from tests.consolidate.test_refusals import flip
from tests.truth import FIXTURES

COMPOSER = FIXTURES / "composer-0.13.5-torch1.13.1-sharded-w4"
DDP = FIXTURES / "torch2.13.0-ddp-w4" / "snapshot.pt"

NAMES = {
    ("m.pt", None): "m.pt",
    ("m.ckpt", None): "m.ckpt",
    ("m.SAFETENSORS", None): "m.SAFETENSORS",
    ("m.dcp", None): "m.dcp",
    ("m.pt", "pt"): "m.pt",
    ("m", "pt"): "m.pt",
    ("m", "safetensors"): "m.safetensors",
    ("m.v2", "safetensors"): "m.v2.safetensors",
    ("step-5", "dcp"): "step-5",
    ("new/", None): "new/model.safetensors",
    ("new/", "pt"): "new/model.pt",
    ("new/", "dcp"): "new",
    ("new.dcp/", None): "new.dcp",
    ("new.pt/", None): "new.pt/model.safetensors",
    ("here", None): "here/model.safetensors",
    ("here", "pt"): "here/model.pt",
    ("here.dcp", None): "here.dcp",
}


@pytest.mark.parametrize(("given", "written"), NAMES.items(), ids=str)
def test_the_suffix_says_the_format_and_the_option_where_there_is_none(given, written, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for folder in ("here", "here.dcp"):
        Path(folder).mkdir()
    assert output_of(*given).path == Path(written)


@pytest.mark.parametrize(
    ("out", "format", "told"),
    [
        ("m.pt", "dcp", ".pt is written as pt, and --format says dcp"),
        ("m.dcp", "pt", ".dcp is written as dcp, and --format says pt"),
        ("m.xyz", None, "no output format for '.xyz'"),
        ("m", None, "no output format for a name without suffix"),
        ("m", "hdf5", "choose one of pt, safetensors, dcp"),
        ("..", "dcp", "is no name for an output"),
        ("", None, "--out is empty"),
    ],
)
def test_a_name_that_says_no_format_or_another_is_a_usage_error(out, format, told):
    with pytest.raises(UsageError, match=told):
        output_of(out, format)


def test_a_new_folder_is_made_for_a_name_that_ends_with_a_slash(tmp_path):
    done = ckptools.consolidate(COMPOSER, f"{tmp_path}/new/", max_shard_size=8_000)
    assert done.files[0].parent == tmp_path / "new"
    assert {p.name for p in (tmp_path / "new").iterdir()} == {p.name for p in done.files}


def test_the_folder_above_a_new_one_has_to_be_there(tmp_path):
    with pytest.raises(UsageError, match="there is no folder"):
        ckptools.consolidate(COMPOSER, f"{tmp_path}/nowhere/new/")
    assert list(tmp_path.iterdir()) == []


def test_a_dry_run_and_a_failure_leave_no_folder(tmp_path):
    torch.save({"w": torch.full((100, 100), 3.0)}, tmp_path / "x.pt")
    flip(tmp_path / "x.pt", "data/0")
    ckptools.consolidate(tmp_path / "x.pt", f"{tmp_path}/new/", format="pt", dry_run=True)
    with pytest.raises(ReadError, match="CRC-32"):
        ckptools.consolidate(tmp_path / "x.pt", f"{tmp_path}/new/", format="pt")
    assert [p.name for p in tmp_path.iterdir()] == ["x.pt"]


def test_what_lies_beside_an_output_has_its_whole_name_in_front(tmp_path):
    ckptools.consolidate(DDP, tmp_path / "x.safetensors", only="all", manifest=True, max_shard_size=4_000)
    beside = {p.name for p in tmp_path.iterdir() if p.suffix == ".json"}
    assert beside == {f"x.safetensors.{what}json" for what in ("", "manifest.", "index.")}


def test_a_file_in_the_folder_is_not_overwritten_unless_asked(tmp_path):
    (tmp_path / "model.pt").write_text("mine")
    with pytest.raises(OutputExistsError, match="force"):
        ckptools.consolidate(DDP, tmp_path, format="pt")
    assert (tmp_path / "model.pt").read_text() == "mine"
