"""What a file is, by its first bytes."""

from __future__ import annotations

import io
import struct

import pytest

import ckptools
from ckptools.errors import CkptoolsError
from ckptools.files import opening


def npz() -> bytes:
    import numpy as np

    buffer = io.BytesIO()
    np.savez(buffer, w=np.ones(3))
    return buffer.getvalue()


KNOWN = {
    "Git LFS": b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 1234\n",
    "HTML": b"<!DOCTYPE html>\n<html><head><title>404</title></head></html>",
    "XML": b"<?xml version='1.0'?><Error><Code>AccessDenied</Code></Error>",
    "JSON": b'{"error": "not found"}',
    "text": b"hello world\n" * 50,
    "empty": b"",
    "zeros": bytes(5000),
    "GGUF": b"GGUF\3\0\0\0" + bytes(range(100)),
    "ONNX": b"\x08\x07\x12\x07pytorch\x1a\x052.1.0:\xff\x00\x01",
    "HDF5": b"\x89HDF\r\n\x1a\n" + bytes(range(50)),
    "safetensors": struct.pack("<Q", 40) + b'{"w":{"dtype":"F32","shape":[1]}}' + bytes(20),
    "plain Python pickle": b"\x80\x04\x95\x05\0\0\0\0\0\0\0}\x94.",
    "msgpack": b"\x82\xa6params\x81\xa1w\xc7\x10\x01",
    ".npz": npz(),
    "PNG": b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR" + bytes(range(40)),
    "JPEG": b"\xff\xd8\xff\xe0\0\x10JFIF" + bytes(range(40)),
}


@pytest.mark.parametrize("name", ["x.pt", "rank0.pt"])
@pytest.mark.parametrize("what", KNOWN)
def test_a_file_that_is_something_else_is_told_so(what, name, tmp_path):
    (tmp_path / name).write_bytes(KNOWN[what])
    with pytest.raises(CkptoolsError, match=what.replace(".", r"\.")) as caught:
        ckptools.open(tmp_path / name)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("head", [b"", b"\x80", b"L1", b"B", b"\x1f\x8b", b"\xff" * 512, bytes(range(256))])
def test_any_first_bytes_have_a_content_or_none(head):
    assert opening.content_of(head) == "" and isinstance(opening.what_is(head), str)
