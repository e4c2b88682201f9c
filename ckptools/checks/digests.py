"""Are the values those that a manifest tells?"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from ckptools.consolidate.manifest import file_digest, tensor_digest
from ckptools.dtypes import short
from ckptools.files.opening import OpenFiles
from ckptools.model.checkpoint import Checkpoint
from ckptools.model.problems import Problem
from ckptools.model.tensor import Tensor
from ckptools.model.tree import fqn_of, tensors_in
from ckptools.tensor_io.coverage import cover_problem


def whole_tensors(ck: Checkpoint) -> Iterator[tuple[str, Tensor]]:
    """Every tensor by its name in the tree; those of a single model also by their own fqn, as in a bare state dict."""
    models = ck.of_kind("model")
    for path, tensor in tensors_in(models[0].value) if len(models) == 1 else ():
        yield fqn_of(path), tensor
    for path, tensor in tensors_in(ck.tree):
        yield fqn_of(path), tensor


def of_tensor(
    name: str, said: tuple[str, tuple[int, ...], str], tensor: Tensor | None, files: OpenFiles
) -> Iterator[Problem]:
    """What is wrong with one tensor."""
    dtype, shape, digest = said
    if tensor is None:
        yield Problem("CK014", "error", "is in the manifest and not in the checkpoint", None, name)
        return
    if (tensor.dtype, tensor.shape) != (dtype, shape):
        text = f"is {short(tensor.dtype)} {list(tensor.shape)}, in the manifest {short(dtype)} {list(shape)}"
        yield Problem("CK014", "error", text, None, name)
        return
    if cover_problem(tensor, name) is None and tensor_digest(_once(tensor), files) != digest:
        yield Problem("CK014", "error", "has other values than the manifest says", None, name)


def _once(tensor: Tensor) -> Tensor:
    """The tensor with one shard per region; whether replicas are equal is another check's."""
    return replace(tensor, shards=tuple({s.box: s for s in reversed(tensor.found)}.values()))


def of_file(manifest: Path, name: str, said: tuple[int, str]) -> Iterator[Problem]:
    """What is wrong with one file, where it is beside the manifest."""
    plain = all(part not in ("", ".", "..") for part in name.split("/")) and "\0" not in name and "\\" not in name
    path = manifest.parent / name
    if not plain or not path.is_file():
        return
    nbytes, digest = file_digest(path)
    if (nbytes, digest) != said:
        text = f"{name} has {nbytes} bytes and another sha256 than the manifest says ({said[0]} bytes)"
        yield Problem("CK014", "error", text)
