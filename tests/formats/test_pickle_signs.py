"""Signs of rank, world size and step in a pickle's bytes are those that interpreting it gives."""

from __future__ import annotations

import io
import pickle
import zipfile

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import ckptools
from ckptools.errors import ReadError
from ckptools.formats.rank_search.rank_groups import find_signs, signs_in
from tests.truth import FIXTURES

SHARDED = [
    "composer-0.13.5-torch1.13.1-sharded-w4/ep0-ba5-rank{}.pt",
    "torch1.13.1-fsdp1-sharded-w3/rank{}.pt",
    "torch2.0.1-fsdp1-hsdp2x2-st-w4/rank{}.pt",
    "torch2.13.0-fsdp1-sharded-w4/rank{}.pt",
    "torch2.13.0-fsdp2-tp2x2-w4/rank{}.pt",
    "torch2.6.0-fsdp1-local-w4/rank{}.pt",
]
MESHES = ["torch2.2.2-fsdp1-dtensor-w3/rank{}.pt", "torch2.4.1-fsdp2-w3/rank{}.pt"]


@pytest.mark.parametrize("name", SHARDED)
@pytest.mark.parametrize("rank", [0, 2])
def test_the_rank_is_the_one_that_the_content_says(name, rank):
    signs = signs_in(FIXTURES / name.format(rank))
    assert signs is not None and signs.rank == rank


@pytest.mark.parametrize("name", MESHES)
def test_a_file_that_names_no_rank_tells_its_place_in_the_mesh(name):
    found = [signs_in(FIXTURES / name.format(rank)) for rank in range(3)]
    assert [(s.rank, s.place) for s in found if s] == [(None, (0,)), (None, (1,)), (None, (2,))]


@pytest.mark.slow
@pytest.mark.parametrize("name", [*SHARDED, *MESHES])
def test_every_rank_says_the_same_of_step_and_world(name):
    first, second = (signs_in(FIXTURES / name.format(rank)) for rank in (0, 1))
    assert first is not None and second is not None and first.shared == second.shared
    step = ckptools.open(FIXTURES / name.format(0)).step.value
    assert step in dict(first.shared).values()


@given(st.integers(-(1 << 31), (1 << 31) - 1), st.integers(0, 400))
def test_a_number_is_found_where_its_name_is_spelled_and_where_the_memo_gives_it(number, others):
    tree = {"a": {str(i): i for i in range(others)}, "b": {"step": number}, "c": {"step": number // 2}}
    found = find_signs(pickle.dumps(tree, protocol=2)).shared
    assert found == ((b"step", number), (b"step", number // 2))


def test_newer_protocols_and_other_containers_have_to_be_read_in_full(tmp_path):
    torch.save({"step": 3}, tmp_path / "five.pt", pickle_protocol=5)
    torch.save({"step": 3}, tmp_path / "old.pt", _use_new_zipfile_serialization=False)
    assert (signs_in(tmp_path / "five.pt"), signs_in(tmp_path / "old.pt")) == (None, None)


def test_a_damaged_pickle_is_an_error_and_not_a_sign(tmp_path):
    torch.save({"step": 3}, tmp_path / "a.pt")
    whole = (tmp_path / "a.pt").read_bytes()
    with zipfile.ZipFile(io.BytesIO(whole)) as archive:
        counted = whole.index(archive.read("a/data.pkl")) + 5
    (tmp_path / "a.pt").write_bytes(whole[:counted] + bytes([whole[counted] ^ 1]) + whole[counted + 1 :])
    with pytest.raises(ReadError, match=r"data\.pkl: CRC-32 is wrong"):
        signs_in(tmp_path / "a.pt")
