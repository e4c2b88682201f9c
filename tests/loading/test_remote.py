"""A checkpoint in a bucket is loaded as one on a disk is."""

from __future__ import annotations

import pytest
import torch

import ckptools
from tests.object_store import BUCKET, Bucketful, s3_server, settings
from tests.truth import FIXTURES

NAMES = ("torch2.13.0-fsdp1-sharded-w4/rank0.pt", "torch2.13.0-fsdp2-dcp-w3/ckpt/.metadata")


@pytest.mark.slow
def test_a_model_in_a_bucket_is_that_on_the_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    with s3_server() as address:
        for key, value in settings(address).items():
            monkeypatch.setenv(key, value)
        for name in NAMES:
            local = FIXTURES / name
            Bucketful(address).put(local.parent)
            far = ckptools.load_state_dict(f"s3://{BUCKET}/{local.parent.name}/{local.name}")
            near = ckptools.load_state_dict(local)
            assert far.keys() == near.keys()
            assert all(torch.equal(far[key].nan_to_num(), near[key].nan_to_num()) for key in near)
