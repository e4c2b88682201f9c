"""How many ranks saved a DCP: what is proven, and what is only known to be the least."""

from __future__ import annotations

import shutil

import pytest
from typer.testing import CliRunner

import ckptools
from ckptools.cli import app
from tests.formats.test_dcp import COMPOSER, FSDP2, codes, copy, save
from tests.truth import FIXTURES


@pytest.fixture
def folder(tmp_path):
    return copy(FSDP2, tmp_path / "step-5")


def world(path) -> tuple[int, bool]:
    found = ckptools.open(path).world_size
    return found.value, found.at_least


def test_a_rank_with_nothing_to_write_counts_and_its_empty_file_is_no_stray(folder):
    (folder / "__3_0.distcp").touch()
    ck = ckptools.open(folder)
    assert (ck.whole, codes(ck), ck.ranks) == (True, codes(ckptools.open(FSDP2)), (0, 1, 2, 3))
    assert world(folder) == (4, False) and ckptools.verify(folder).ok


def test_an_empty_file_of_a_later_rank_tells_the_least_number(folder):
    (folder / "__6_0.distcp").touch()
    assert world(folder) == (7, True)
    out = CliRunner().invoke(app, ["inspect", str(folder)]).stdout
    assert "world size  at least 7" in out


def test_a_stray_file_is_not_counted_and_leaves_the_number_unproven(folder):
    shutil.copy(folder / "__0_0.distcp", folder / "__3_0.distcp")
    assert world(folder) == (3, True) and "CK009" in codes(ckptools.open(folder))


def test_an_empty_file_that_the_metadata_names_is_cut(folder):
    (folder / "__2_0.distcp").write_bytes(b"")
    assert "CK002" in codes(ckptools.open(folder))


@pytest.mark.parametrize("name", ["dcp-multifile", "torch1.13.1-fsdp1-sharded-dcp-w3"])
def test_where_each_item_has_a_file_ranks_without_items_may_be_missing(name):
    assert world(FIXTURES / name / "ckpt")[1]


def test_one_process_with_one_file_is_one_rank(tmp_path):
    assert world(save(tmp_path / "out")) == (1, False)


def test_what_the_state_says_goes_before_files(tmp_path):
    found = ckptools.open(COMPOSER / "ep0-ba5").world_size
    assert (found.value, found.sources, found.at_least) == (4, ("state.metadata.world_size",), False)
    few = ckptools.open(save(tmp_path / "out", {"state": {"metadata": {"world_size": 0, "x": [8]}}})).world_size
    assert (few.value, few.sources) == (1, ("files found",))
