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
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from ckptools.training.demo import same
from tests.training.test_trainer_layouts import files_in

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module", params=["ddp", "fsdp1", "fsdp2"])
def saved(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with `ours` and `theirs`, of one strategy."""
    out = tmp_path_factory.mktemp("frameworks") / request.param
    start = ("torch.distributed.run", "--standalone", "--nproc_per_node", "2", "-m", "tests.training.frameworks")
    environment = os.environ | {"TMPDIR": str(out.parent), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", *start, str(out), request.param]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280, env=environment)
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
            found[name] = torch.load(path, weights_only=False)
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
    elif isinstance(one, torch.Tensor):
        yield from () if same(one, other) else (f"{at}: other values",)
    elif not np.array_equal(one, other):
        yield f"{at}: {one!r} and {other!r}"


@pytest.mark.parametrize("layout", ["accelerate", "fabric", "lightning"])
def test_a_layout_is_what_its_framework_writes(saved: Path, layout: str, tmp_path: Path) -> None:
    ours, theirs = saved / "ours" / layout, saved / "theirs" / layout
    assert files_in(ours) == files_in(theirs)
    assert list(differences(contents(ours, tmp_path), contents(theirs, tmp_path))) == []
