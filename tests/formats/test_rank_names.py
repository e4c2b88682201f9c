from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptools.errors import ReadError, UsageError
from ckptools.formats.rank_search.rank_groups import group_in
from ckptools.formats.rank_search.rank_names import numbers_in, parse, siblings

NAMES = [
    ("ep0-ba5-rank3.pt", 3, "", None),
    ("rank0.pt", 0, "", None),
    ("rank_12.pth", 12, "", None),
    ("model_world_size_8_rank_7.pt", 7, "model", 8),
    ("optim_world_size_8_rank_7.pt", 7, "optim", 8),
    ("extra_state_world_size_8_rank_7.pt", 7, "extra_state", 8),
    ("pytorch_model_fsdp_0_rank3.bin", 3, "", None),
    ("x.rank-2.ckpt", 2, "", None),
    ("other_world_size_2_rank_1.pt", 1, "", 2),
    ("a\nrank1.pt", 1, "", None),
    ("ep0-ba5-rank3.pt.gz", 3, "", None),
    ("rank3.pt.zst", 3, "", None),
    ("model_world_size_8_rank_7.pt.lz4", 7, "model", 8),
    ("ep0-ba5-rank2.tar", 2, "", None),
    ("ep0-ba5-rank2.tar.lzma", 2, "", None),
    ("ep0-ba5-rank2.tgz", 2, "", None),
    ("ep0-ba5-rank2", 2, "", None),
    ("run-ep12-ba345-rank21", 21, "", None),
]


@pytest.mark.parametrize(("name", "rank", "part", "world"), NAMES, ids=[n for n, *_ in NAMES])
def test_a_name_proposes_rank_part_and_world_size(name, rank, part, world):
    found = parse(Path(name))
    assert (found.rank, found.part, found.world_size) == (rank, part, world)


OTHERS = (
    "model.pt", "rank.pt", "frank0.pt", "rank0.txt", "rank0.pt.bak", "rank0", "rank12345678.pt", "Rank0.pt",
    "rank0_x.pt", "rank0.gz", "rank0.pt.zip", "rank0.txt.gz", "latest-rank0", "ep0-rank0", "ep0-ba5-rank0.json",
    "mp_rank_00_model_states.pt", "rank3.pt.tmp",
)  # fmt: skip


@pytest.mark.parametrize("name", OTHERS)
def test_other_names_have_none(name):
    assert parse(Path(name)) is None


@given(name=st.text(max_size=40))
def test_any_name_has_a_rank_or_none(name):
    try:
        path = Path(name)
        found = parse(path)
    except ValueError:
        return
    assert found is None or found.rank >= 0


def touched(folder, *names):
    for name in names:
        (folder / name).touch()
    return folder


def test_siblings_are_in_rank_order_and_of_one_checkpoint(tmp_path):
    touched(tmp_path, "a-rank10.pt", "a-rank2.pt", "a-rank0.pt", "b-rank1.pt", "a-rank1.pth", "a.pt")
    found = [n.path.name for n in siblings(parse(tmp_path / "a-rank2.pt"))]
    assert found == ["a-rank0.pt", "a-rank2.pt", "a-rank10.pt"]


def test_the_parts_of_a_rank_are_siblings_of_the_same_world(tmp_path):
    names = [f"{p}_world_size_2_rank_{r}.pt" for r in range(2) for p in ("model", "optim", "extra_state")]
    touched(tmp_path, *names, "model_world_size_4_rank_3.pt")
    assert [n.path.name for n in siblings(parse(tmp_path / names[4]))] == names


def test_a_folder_gives_its_one_checkpoint_or_asks_which(tmp_path):
    assert group_in(tmp_path) is None
    assert group_in(touched(tmp_path, "rank1.pt", "rank0.pt", "x.txt")).path.name == "rank0.pt"
    with pytest.raises(UsageError, match=r"2 checkpoints.*: b-rank1\.pt, rank0\.pt"):
        group_in(touched(tmp_path, "b-rank1.pt", "b-rank2.pt"))
    with pytest.raises(ReadError, match="no such file"):
        group_in(tmp_path / "none")


def test_numbers_behind_words_that_count_steps_are_told_apart():
    found = [(number[0], steps) for number, steps in numbers_in("ep0-ba5-gpu1-rank3-1234567890.pt")]
    assert found == [("0", True), ("5", True), ("1", False), ("3", False)]
