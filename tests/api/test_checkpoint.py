"""What users hold: a checkpoint, its mappings and its lazy tensors."""

from __future__ import annotations

import inspect
import shutil
from collections import Counter
from dataclasses import fields

import pytest

import ckptools
from ckptools.consolidate.options import ConsolidateOptions
from ckptools.formats.open import open_checkpoint
from ckptools.model.checkpoint import INSIDE
from ckptools.training_state import modules
from tests.truth import FIXTURES

SHARDED = FIXTURES / "torch2.13.0-fsdp1-sharded-w4"
RANK0 = SHARDED / "rank0.pt"


class Counting:
    """Reads files as the inert reader does, and remembers which."""

    def __init__(self):
        self.read = Counter()

    def __call__(self, path):
        self.read[path.name] += 1
        return modules.read_file(path)


@pytest.fixture
def one_rank(large_world):
    """Opens a checkpoint of four ranks of which one file is read."""

    def opened(**options):
        ck = ckptools.open(RANK0, **options)
        assert not ck.all_ranks
        return ck

    return opened


def test_each_file_of_another_rank_is_read_once_however_many_tensors_are_loaded(one_rank):
    reader = Counting()
    ck = one_rank(read_file=reader)
    for tensor in ck.model.values():
        tensor.load()
    assert reader.read == {f"rank{rank}.pt": 1 for rank in range(4)}


def test_every_tensor_is_the_same_whether_one_rank_was_read_or_all(one_rank):
    one, every = one_rank(), ckptools.open(RANK0, all_ranks=True)
    assert all(t.load().equal(every.model[name].load()) for name, t in one.model.items())


def test_a_slice_reads_only_the_ranks_that_hold_it(one_rank):
    reader = Counting()
    ck = one_rank(read_file=reader)
    name, tensor = next((k, t) for k, t in ck.model.items() if len(t.shards) == 4 and t.shards[1].box.numel)
    last = tensor.shards[1].box.offsets[0]
    assert tensor[last].equal(ckptools.open(RANK0, all_ranks=True).model[name].load()[last])
    assert set(reader.read) == {"rank0.pt", "rank1.pt"}


def test_verify_and_consolidate_share_what_was_read_of_all_ranks(one_rank, tmp_path):
    reader = Counting()
    ck = one_rank(read_file=reader)
    assert ck.verify().ok
    before = reader.read.copy()
    ck.consolidate(tmp_path / "out.pt")
    assert reader.read == before


def test_a_file_that_came_back_after_a_verdict_is_seen_by_the_next(large_world, tmp_path):
    folder = shutil.copytree(SHARDED, tmp_path / "ck")
    lost = (folder / "rank2.pt").rename(tmp_path / "rank2.pt")
    ck = ckptools.open(folder / "rank0.pt")
    assert not ck.verify().ok
    lost.rename(folder / "rank2.pt")
    assert ck.verify().ok


def test_at_the_end_of_its_block_it_forgets_what_it_read(one_rank):
    reader = Counting()
    with one_rank(read_file=reader) as ck:
        ck.other_ranks.all_ranks()
    read = reader.read.total()
    ck.other_ranks.all_ranks()
    assert reader.read.total() == read + 4


@pytest.mark.slow
@pytest.mark.parametrize("what", ["model", "optimizers", "schedulers"])
def test_a_key_that_is_not_there_is_told_with_the_nearest(what):
    known = getattr(ckptools.open(SHARDED), what)
    key = next(iter(known))
    with pytest.raises(KeyError, match=f"no '{key}x' here; the nearest is '{key}'"):
        known[f"{key}x"]
    assert f"{key}x" not in known and known.get(f"{key}x", 7) == 7


def test_of_a_small_world_every_file_is_read_when_it_is_opened_and_the_verdict_is_whole():
    reader = Counting()
    ck = ckptools.open(RANK0, read_file=reader)
    assert set(reader.read) == {f"rank{rank}.pt" for rank in range(4)}
    assert (ck.all_ranks, ck.whole, ck.verdict.depth) == (True, True, "structure")
    assert ck.verdict.headline == "whole: all 4 rank files are here, all read"


def test_of_a_large_world_nothing_is_proven_before_every_rank_was_read(one_rank):
    ck = one_rank()
    assert (ck.whole, ck.verdict.recoverable, ck.verdict.joinable, ck.verdict.depth) == (None, None, None, "listed")
    assert ck.verdict.headline == "all 4 rank files are here; contents not compared (verify)"
    assert (ck.verify().verdict.whole, ck.verify().verdict.depth) == (True, "structure")


def test_checksums_make_a_verdict_one_of_the_bytes():
    assert ckptools.verify(RANK0, deep=True).verdict.depth == "bytes"


def test_what_a_reader_returns_is_of_the_class_that_users_hold():
    assert type(open_checkpoint(RANK0)) is type(ckptools.open(RANK0)) is ckptools.Checkpoint
    assert type(open_checkpoint(RANK0).model["gate"]) is ckptools.Tensor


def test_a_tensor_says_its_name_once():
    assert repr(ckptools.open(RANK0).model["gate"]) == "<Tensor gate: fp32 [3], 12 B, 3 shards, not loaded>"


def test_completion_proposes_what_users_call_and_nothing_for_other_rooms():
    ck = ckptools.open(RANK0)
    public = {name for name in dir(ck) if not name.startswith("_")}
    assert {"model", "step", "files", "verify", "consolidate", "raw"} <= public and "worked_out" not in public
    assert set(vars(ckptools.Checkpoint)) | {field.name for field in fields(ckptools.Checkpoint)} >= INSIDE
    tensor = {name for name in dir(ck.model["gate"]) if not name.startswith("_")}
    assert {"shape", "dtype", "load", "shards", "stats"} <= tensor and "extents" not in tensor


def parameters(function):
    """Names of what can be given to a function beside the checkpoint and its callbacks."""
    found = inspect.signature(function).parameters.values()
    assert all(p.kind is not p.VAR_KEYWORD and (p.annotation is not p.empty or p.name == "self") for p in found)
    return {p.name: p.default for p in found if p.name not in ("self", "checkpoint", "out", "progress")}


def test_methods_and_functions_have_the_same_full_signatures():
    assert parameters(ckptools.Checkpoint.verify) == parameters(ckptools.verify)
    assert parameters(ckptools.Checkpoint.consolidate) == parameters(ckptools.consolidate)
    assert parameters(ckptools.consolidate) == {f.name: f.default for f in fields(ConsolidateOptions)}


def test_every_public_name_is_documented():
    assert [name for name in ckptools.__all__ if not inspect.getdoc(getattr(ckptools, name))] == []
    methods = [getattr(c, n) for c in (ckptools.Checkpoint, ckptools.Tensor) for n in vars(c) if n[0] != "_"]
    assert [m for m in methods if callable(m) and not inspect.getdoc(m)] == []


def test_dir_shows_the_public_names_only():
    assert dir(ckptools) == sorted([*ckptools.__all__, "__version__"])


def test_the_picture_of_the_ranks_is_of_this_checkpoint(tmp_path):
    folder = shutil.copytree(FIXTURES / "torch2.4.1-fsdp2-w3", tmp_path / "run")
    (folder / "rank1.pt").unlink()
    assert "missing: 1 rank: 1" in ckptools.open(folder).plot.ranks().text
