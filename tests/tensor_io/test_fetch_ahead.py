"""Small records in a store are fetched for all files at once."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

import ckptools
from ckptools.cli import app
from ckptools.diff.digest_file import write_digest_file
from ckptools.files.remote.cached_file import LARGE, RemoteFile
from ckptools.files.remote.path import RemotePath
from ckptools.files.remote.store import Store
from ckptools.model.regions import Box
from ckptools.model.tree import tensors_in
from ckptools.tensor_io import fetch_ahead
from ckptools.tensor_io.checksums import stored_records
from ckptools.tensor_io.fetch_ahead import CopiesAhead, copies_of, fetched_runs
from ckptools.tensor_io.read import read_box
from tests.truth import FIXTURES

RUN7 = FIXTURES / "torch2.13.0-fsdp1-sharded-w4"
FILES = 4


@pytest.fixture
def requests(monkeypatch):
    asked, fetch = [], Store._fetch
    monkeypatch.setattr(Store, "_fetch", lambda *a: (asked.append(a[1:]), fetch(*a))[1])
    return asked


@pytest.fixture
def far(bucket, requests):
    """The checkpoint in a bucket, opened; what was asked for that is forgotten."""
    found = ckptools.open(bucket.put(RUN7), all_ranks=True)
    requests.clear()
    return found


def test_tensors_that_were_fetched_are_read_without_a_request(far, requests):
    there = [tensor for _, tensor in tensors_in(far.tree)]
    here = [tensor for _, tensor in tensors_in(ckptools.open(RUN7, all_ranks=True).tree)]
    assert next(fetched_runs(there, lambda t: [one.record.part for one in stored_records([("", t)])])) == there
    assert len(requests) == FILES
    for far_one, own in zip(there, here, strict=True):
        assert read_box(far_one, Box.whole(own.shape)).tobytes() == read_box(own, Box.whole(own.shape)).tobytes()
    assert len(requests) == FILES


def test_verify_asks_once_for_each_file(far, requests):
    assert ckptools.verify(far).ok and len(requests) == FILES


def test_verify_deep_asks_once_for_each_file(far, requests):
    assert ckptools.verify(far, deep=True).ok and len(requests) == FILES


def test_digests_ask_for_nothing_that_was_not_fetched(far, requests, monkeypatch, tmp_path):
    monkeypatch.setattr(RemoteFile, "_widened", lambda *_: pytest.fail("a request of its own"))
    write_digest_file(far, tmp_path / "digests.json", force=False)
    assert FILES <= len(requests) <= 3 * FILES


def test_what_each_rank_has_for_itself_is_fetched(bucket, requests, monkeypatch, tmp_path):
    for rank in range(3):
        held = {"model": {"w": torch.ones(3)}, "buffer": torch.full((50_000,), float(rank)), "step": 1}
        torch.save(held, tmp_path / f"rank{rank}.pt")
    far = ckptools.open(bucket.put(tmp_path), all_ranks=True)
    monkeypatch.setattr(RemoteFile, "_widened", lambda *_: pytest.fail("a request of its own"))
    found = write_digest_file(far, tmp_path / "digests.json", force=False)
    assert len({content.digest for value in found.values.values() for content in value.contents.values()} - {""}) > 3


def test_values_that_are_compared_are_fetched(far, requests, monkeypatch):
    monkeypatch.setattr(RemoteFile, "_widened", lambda *_: pytest.fail("a request of its own"))
    found = ckptools.diff(far, ckptools.open(RUN7, all_ranks=True), values=True, every_byte=True)
    assert found.same and FILES <= len(requests) <= 4 * FILES


def test_figures_of_all_tensors_ask_a_few_times_for_each_file(bucket, requests):
    done = CliRunner().invoke(app, ["stats", bucket.put(RUN7)])
    assert done.exit_code == 0 and len(requests) <= 5 * FILES


@pytest.mark.parametrize("dtype", [None, "bfloat16"])
def test_consolidate_asks_twice_for_each_file(dtype, far, requests, tmp_path):
    here = ckptools.open(RUN7, all_ranks=True)
    for checkpoint, name in ((far, "far"), (here, "here")):
        checkpoint.consolidate(tmp_path / f"{name}.safetensors", dtype=dtype)
    assert len(requests) <= 2 * FILES
    assert (tmp_path / "far.safetensors").read_bytes() == (tmp_path / "here.safetensors").read_bytes()


def test_copies_are_fetched_with_those_of_the_tensors_that_come_next(far, requests):
    tensors = {path: tensor for path, tensor in tensors_in(far.tree) if copies_of(tensor)}
    ahead = CopiesAhead(tensors.items())
    for path in list(tensors)[1:]:
        ahead.reach(path)
        assert len(requests) == FILES
    ahead.reach(next(iter(tensors)))
    assert len(requests) <= 2 * FILES


@pytest.fixture
def fetching(monkeypatch):
    """What is fetched, each time; nothing is."""
    asked = []
    monkeypatch.setattr(fetch_ahead, "stores_are_used", lambda: True)
    monkeypatch.setattr(fetch_ahead, "in_threads", lambda work, requests, threads: asked.append(list(requests)))
    return asked


sizes = st.lists(st.lists(st.integers(0, 30_000), max_size=5), max_size=60)


@given(sizes, st.integers(1, 50_000))
def test_no_more_is_fetched_than_may_wait(sizes, gap):
    parts = [
        [(RemotePath(f"s3://b/{gap * n % 7}"), gap * n, gap * n + size) for size in own] for n, own in enumerate(sizes)
    ]
    with pytest.MonkeyPatch.context() as patch:
        asked = []
        patch.setattr(fetch_ahead, "stores_are_used", lambda: True)
        patch.setattr(fetch_ahead, "in_threads", lambda work, requests, threads: asked.append(list(requests)))
        patch.setattr(fetch_ahead, "WAITING", 400_000)
        runs = list(fetched_runs(range(len(parts)), parts.__getitem__))
    assert [item for run in runs for item in run] == list(range(len(parts)))
    assert all(sum(end - start for _, start, end in requests) <= 600_000 for requests in asked)


def test_what_is_large_or_lies_on_this_machine_is_not_fetched(fetching):
    far, here = RemotePath("s3://b/a"), Path("a")
    parts = [(far, 0, LARGE + 1), (here, 0, 10), (far, 7, 7), (far, 50, 60)]
    assert list(fetched_runs([1], lambda _: parts)) == [[1]]
    assert fetching == [[(far, 50, 60)]]


def test_of_an_item_that_reads_more_than_may_wait_the_first_is_fetched(fetching, monkeypatch):
    monkeypatch.setattr(fetch_ahead, "WAITING", 1000)
    parts = [(RemotePath(f"s3://b/{n}"), 0, 300) for n in range(9)]
    assert list(fetched_runs("xy", lambda _: parts)) == [["x"], ["y"]]
    assert fetching == [parts[:3], parts[:3]]


def test_only_regions_that_several_ranks_hold_have_copies():
    tensors = [tensor for _, tensor in tensors_in(ckptools.open(RUN7, all_ranks=True).tree)]
    for tensor in tensors:
        assert len(copies_of(tensor)) == (FILES if not tensor.sharded and tensor.numel else 0)


def test_parts_close_together_are_many_of_one_run(fetching):
    paths = [RemotePath(f"s3://b/{n}") for n in range(256)]
    parts = [(paths[n % 256], n // 256 * 128, n // 256 * 128 + 4) for n in range(25_600)]
    runs = list(fetched_runs(range(0, 25_600, 256), lambda n: parts[n : n + 256]))
    assert len(runs) == len(fetching) == 1 and len(fetching[0]) == 256
