"""DCP folders in a bucket: what their metadata tells beforehand is fetched together."""

from __future__ import annotations

import pytest
import torch

import ckptools
from ckptools.files.opening import location
from ckptools.files.remote import cached_file
from ckptools.files.remote.store import Store
from ckptools.formats.dcp import locator
from ckptools.formats.dcp.folder import read_folder
from ckptools.formats.options import Options
from tests.formats.test_dcp import save
from tests.formats.test_object_store import sources
from tests.truth import FIXTURES

ITEMS = 40
NBYTES = 200_000
"""Of each tensor: too many to be fetched for what lies around it."""

SMALL = FIXTURES / "torch2.13.0-fsdp2-dcp-w3" / "ckpt"


@pytest.fixture
def requests(monkeypatch):
    asked, fetch = [], Store._fetch
    monkeypatch.setattr(Store, "_fetch", lambda *a: (asked.append(a[3:]), fetch(*a))[1])
    return asked


@pytest.fixture(scope="module")
def far_apart(tmp_path_factory):
    state = {f"layers.{n}": torch.full((NBYTES // 4,), float(n)) for n in range(ITEMS)}
    return save(tmp_path_factory.mktemp("dcp") / "far", {**state, "step": 3})


def test_items_close_together_are_located_by_one_request_for_each_file(bucket, requests):
    there = ckptools.open(bucket.put(SMALL), all_ranks=True)
    assert sources(there.tree) == sources(ckptools.open(SMALL, all_ranks=True).tree) != []
    assert len(requests) <= 1 + 2 * 3  # the metadata; objects and tensors of three files


@pytest.mark.slow
def test_items_far_apart_are_located_by_one_request_for_each_and_no_values(far_apart, bucket, requests):
    there = ckptools.open(bucket.put(far_apart), all_ranks=True)
    assert sources(there.tree) == sources(ckptools.open(far_apart, all_ranks=True).tree) != []
    assert len(requests) <= ITEMS + 4
    assert sum(end - start for start, end in requests) < ITEMS * NBYTES / 10


def test_of_items_far_apart_both_ends_of_some_are_looked_at(far_apart, bucket, requests, monkeypatch):
    monkeypatch.setattr(locator, "MAX_REQUESTS", 8)
    assert read_folder(location(bucket.put(far_apart)), Options()).problems == ()
    looked_at = [start for start, end in requests if end - start <= 2 * cached_file.SMALL]
    assert 10 <= len(looked_at) <= 17 and max(looked_at) > ITEMS * NBYTES * 3 / 4


def test_verify_deep_of_a_dcp_folder_reads_no_byte_twice(far_apart, bucket, requests):
    found = ckptools.verify(bucket.put(far_apart), deep=True)
    size = sum(path.stat().st_size for path in far_apart.iterdir())
    assert found.ok and sum(end - start for start, end in requests) <= 1.1 * size
