"""ORIGINAL and the output in a bucket: the small files go with the weights, and are compared like on a disk."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed.checkpoint as dcp

import ckptools
from ckptools.files.remote import path as remote_path
from tests.hugging_face.toy_models import loaded_strictly, logits, save_original, toy_model
from tests.object_store import Bucketful, s3_server, settings


@pytest.fixture(scope="module")
def bucket() -> Iterator[Bucketful]:
    with s3_server() as address, pytest.MonkeyPatch.context() as patch:
        for name, value in settings(address).items():
            patch.setenv(name, value)
        patch.setattr(remote_path, "_stores", {})  # those of other servers
        yield Bucketful(address)


@pytest.mark.slow
def test_an_original_in_a_store_is_read_there(bucket, tmp_path):
    url = bucket.put(save_original("llama", tmp_path / "original"))
    dcp.save({"model": dict(toy_model("llama").state_dict())}, checkpoint_id=tmp_path / "run")
    done = ckptools.consolidate(tmp_path / "run", f"{tmp_path / 'hf'}/", like=url)
    assert "tokenizer.json" in done.like.copied
    assert torch.equal(logits(loaded_strictly(tmp_path / "hf")), logits(toy_model("llama")))


def test_an_output_in_a_store_has_config_and_tokenizer(bucket, tmp_path):
    original = save_original("llama", tmp_path / "original")
    dcp.save({"model": dict(toy_model("llama").state_dict())}, checkpoint_id=tmp_path / "run")
    done = ckptools.consolidate(tmp_path / "run", "s3://checkpoints/hf/", like=original, check=True)
    assert "s3://checkpoints/hf/tokenizer.json" in {str(path) for path in done.files}
    assert ckptools.diff("s3://checkpoints/hf", tmp_path / "run", values=True).proof.elements == 21_664
