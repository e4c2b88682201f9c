"""What a layout writes is what its framework's own code writes of the same run: files, keys, classes and bits."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open
from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from tests.training.rank_files import load
from tests.training.test_trainer_layouts import files_in
from tools.demo import same

pytestmark = pytest.mark.slow

TRAINERS = ("accelerate", "fabric", "lightning")
SAVED = {
    "ddp": TRAINERS,
    "fsdp1": TRAINERS,
    "fsdp2": TRAINERS,
    "fsdp1-local": ("accelerate",),
    "fsdp1-full": ("accelerate",),
}
"""A strategy, and a type of state dict, with the frameworks that save so."""


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with one for each run, which has `ours` and `theirs`."""
    out = tmp_path_factory.mktemp("frameworks")
    command = [sys.executable, "-m", "tests.training.frameworks", str(out), *SAVED]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280, env=os.environ | {"TMPDIR": str(out)})
    assert done.returncode == 0, done.stderr
    return out


def contents(folder: Path, scratch: Path) -> dict[str, Any]:
    """What torch and safetensors load of every file in a folder; a DCP folder is one of them."""
    found: dict[str, Any] = {}
    for name in files_in(folder):
        path = folder / name
        if path.suffix == ".safetensors":
            with safe_open(path, framework="pt") as file:
                found[name] = {"metadata": file.metadata(), **{key: file.get_tensor(key) for key in file.keys()}}  # noqa: SIM118
        elif path.name == ".metadata":
            dcp_to_torch_save(path.parent, scratch / "dcp.pt")
            found[name] = torch.load(scratch / "dcp.pt", weights_only=False)
        elif path.suffix != ".distcp":
            found[name] = load(path)
    return found


def differences(one: Any, other: Any, at: str = "") -> Iterator[str]:
    """Where two trees are not the same, in keys, classes or bits."""
    if type(one) is not type(other):
        yield f"{at}: {type(one).__name__} and {type(other).__name__}"
    elif isinstance(one, dict):
        yield from (f"{at}/{key}: in one only" for key in one.keys() ^ other.keys())
        for key in one.keys() & other.keys():
            yield from differences(one[key], other[key], f"{at}/{key}")
    elif isinstance(one, (list, tuple)) and len(one) == len(other):
        for index, (left, right) in enumerate(zip(one, other, strict=True)):
            yield from differences(left, right, f"{at}/{index}")
    elif isinstance(one, ShardedTensor):
        yield from differences(one._metadata.shards_metadata, other._metadata.shards_metadata, f"{at}/shards")
        tensors = ([shard.tensor for shard in sharded._local_shards] for sharded in (one, other))
        yield from differences(*tensors, at)
    elif isinstance(one, torch.Tensor):
        yield from () if same(one, other) else (f"{at}: other values",)
    elif not np.array_equal(one, other):
        yield f"{at}: {one!r} and {other!r}"


@pytest.mark.parametrize(
    ("how", "layout"),
    [pytest.param(how, layout, id=f"{how}-{layout}") for how in SAVED for layout in SAVED[how]],
)
def test_a_layout_is_what_its_framework_writes(how: str, layout: str, runs: Path, tmp_path: Path) -> None:
    ours, theirs = (runs / how / whose / layout for whose in ("ours", "theirs"))
    assert files_in(ours) == files_in(theirs)
    found = contents(ours, tmp_path)
    assert found
    assert list(differences(found, contents(theirs, tmp_path))) == []


@pytest.mark.parametrize(
    "other", [{"a": [1, torch.ones(2)]}, {"a": (1, torch.zeros(2))}, {"a": [2, torch.zeros(2)]}, {"a": [1]}, {}]
)
def test_a_difference_in_keys_classes_or_bits_is_found(other: dict[str, Any]) -> None:
    tree = {"a": [1, torch.zeros(2)]}
    assert list(differences(tree, {"a": [1, torch.zeros(2)]})) == []
    assert len(list(differences(tree, other))) == 1
