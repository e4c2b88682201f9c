"""Small records in a store are fetched for all files at once."""

from __future__ import annotations

import pytest

import ckptools
from ckptools.files.bucket import Bucket
from ckptools.files.opening import OpenFiles
from ckptools.model.regions import Box
from ckptools.model.tree import fqn_of, tensors_in
from ckptools.tensor_io.fetch_ahead import fetch_small
from ckptools.tensor_io.read import read_box
from tests.truth import FIXTURES

RUN7 = FIXTURES / "torch2.13.0-fsdp1-sharded-w4"


@pytest.fixture
def requests(monkeypatch):
    asked, fetch = [], Bucket._fetch
    monkeypatch.setattr(Bucket, "_fetch", lambda *a: (asked.append(a[1:]), fetch(*a))[1])
    return asked


def test_tensors_that_were_fetched_are_read_without_a_request(requests, bucket):
    with OpenFiles() as files:
        there = ckptools.open(bucket.put(RUN7), all_ranks=True)
        here = dict(tensors_in(ckptools.open(RUN7, all_ranks=True).tree))
        tensors = [(fqn_of(path), tensor) for path, tensor in tensors_in(there.tree)]
        fetch_small(tensors, files, 4)
        asked = len(requests)
        for (_, tensor), own in zip(tensors, here.values(), strict=True):
            assert read_box(tensor, Box.whole(tensor.shape)).tobytes() == read_box(own, Box.whole(own.shape)).tobytes()
        assert len(requests) == asked > 4
