"""The check against a manifest: tensors and files have the SHA-256 that it lists."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from ckptools.dtypes import short
from ckptools.errors import ReadError
from ckptools.files.opening import File, OpenFiles
from ckptools.keys.value_digests import once
from ckptools.model.checkpoint import Checkpoint
from ckptools.model.cover import cover_problem
from ckptools.model.problems import Code, Problem
from ckptools.model.tensor import Tensor
from ckptools.model.tree import fqn_of, tensors_in
from ckptools.tensor_io.stream import MANIFEST_SCHEMA, file_digest, tensor_digest
from ckptools.training_state.sections import sections_of_kind

MAX_MANIFEST = 256 << 20
"""Largest manifest in bytes."""


@dataclass(frozen=True)
class ListedDigests:
    """The digests in a manifest.

    Attributes:
        tensors: by fqn: dtype, shape and sha256.
        files: by name: bytes and sha256.
    """

    tensors: Mapping[str, tuple[str, tuple[int, ...], str]]
    files: Mapping[str, tuple[int, str]]


def read_manifest(path: Path) -> ListedDigests:
    """Read a manifest that `consolidate` wrote.

    Raises:
        ReadError: the file cannot be read, or is no manifest.
    """
    with File(path) as file:
        if file.size > MAX_MANIFEST:
            raise ReadError(path, f"has {file.size} bytes; at most {MAX_MANIFEST} are read")
        data = file.read(0, file.size)
    try:
        content = json.loads(data)
        tensors = {k: (str(v["dtype"]), tuple(v["shape"]), str(v["sha256"])) for k, v in content["tensors"].items()}
        files = {k: (int(v["bytes"]), str(v["sha256"])) for k, v in content["files"].items()}
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ReadError(path, "is no manifest of ckptools, which has tensors and files with their sha256") from error
    if content.get("schema") != MANIFEST_SCHEMA:
        raise ReadError(path, f"is no manifest that this version reads; expected schema {MANIFEST_SCHEMA}")
    return ListedDigests(tensors, files)


def whole_tensors(ck: Checkpoint) -> Iterator[tuple[str, Tensor]]:
    """Every tensor by its name in the tree; those of a single model also by their own fqn, as in a bare state dict."""
    models = sections_of_kind(ck, "model")
    for path, tensor in tensors_in(models[0].value) if len(models) == 1 else ():
        yield fqn_of(path), tensor
    for path, tensor in tensors_in(ck.tree):
        yield fqn_of(path), tensor


def of_tensor(
    name: str, said: tuple[str, tuple[int, ...], str], tensor: Tensor | None, files: OpenFiles
) -> Iterator[Problem]:
    """How one tensor differs from its entry in the manifest."""
    dtype, shape, digest = said
    if tensor is None:
        yield Problem(Code.MANIFEST_DIFFERS, "is in the manifest and not in the checkpoint", None, name)
        return
    if (tensor.dtype, tensor.shape) != (dtype, shape):
        text = f"is {short(tensor.dtype)} {list(tensor.shape)}, in the manifest {short(dtype)} {list(shape)}"
        yield Problem(Code.MANIFEST_DIFFERS, text, None, name)
        return
    if cover_problem(tensor, name) is None and tensor_digest(once(tensor), files) != digest:
        yield Problem(Code.MANIFEST_DIFFERS, "has other values than the manifest says", None, name)


def of_file(manifest: Path, name: str, said: tuple[int, str]) -> Iterator[Problem]:
    """How one file beside the manifest differs from its entry in it; nothing if the file does not exist."""
    plain = all(part not in ("", ".", "..") for part in name.split("/")) and "\0" not in name and "\\" not in name
    path = manifest.parent / name
    if not plain or not path.is_file():
        return
    nbytes, digest = file_digest(path)
    if (nbytes, digest) != said:
        text = f"{name} has {nbytes} bytes and another sha256 than the manifest says ({said[0]} bytes)"
        yield Problem(Code.MANIFEST_DIFFERS, text)
