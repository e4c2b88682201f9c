"""DCP folders of DLRover's flash checkpoint: each file is the shared memory that a rank filled."""

from __future__ import annotations

import io
import pickle
import sys
from dataclasses import make_dataclass
from itertools import accumulate
from pathlib import Path
from types import ModuleType

import pytest
import torch
import torch.distributed.checkpoint as dcp

import ckptools
from tests.pickles.test_tensors import same_bits

HOME = "dlrover.trainer.torch.flash_checkpoint.fsdp_engine"
STATE = {
    "model": {"w": torch.arange(35.0).reshape(7, 5).t(), "b": torch.tensor([1, -2], dtype=torch.bfloat16)},
    "optim": {"state": {"w": {"step": torch.tensor(3.0), "exp_avg": torch.ones(5, 7)}}, "param_groups": [{"lr": 0.1}]},
    "step": 3,
}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """What DLRover 0.6.1 writes of a state, made of what torch writes of it."""
    info = make_dataclass("_StorageInfo", ["relative_path", "offset", "length"])
    for name in accumulate(HOME.split("."), "{}.{}".format):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    info.__module__, sys.modules[HOME]._StorageInfo = HOME, info
    dcp.save(STATE, checkpoint_id=tmp_path / "torch")
    metadata, memory = dcp.FileSystemReader(tmp_path / "torch").read_metadata(), b""
    saved = (tmp_path / "torch" / "__0_0.distcp").read_bytes()
    for index, place in metadata.storage_data.items():
        item = saved[place.offset : place.offset + place.length]
        if index.offset is not None:  # a tensor: its bytes alone
            item = torch.load(io.BytesIO(item)).contiguous().view(-1).view(torch.uint8).numpy().tobytes()
        metadata.storage_data[index] = info(place.relative_path, len(memory), len(item))
        memory += item
    (tmp_path / "3").mkdir()
    (tmp_path / "3" / "__0_0.distcp").write_bytes(memory + bytes(444))
    (tmp_path / "3" / ".metadata").write_bytes(pickle.dumps(metadata))
    return tmp_path / "3"


def test_the_bytes_of_tensors_in_shared_memory_are_read(folder):
    ck = ckptools.open(folder)
    assert (ck.whole, list(ck.problems), ck.step.value, ck.raw["optim"]["param_groups"]) == (True, [], 3, [{"lr": 0.1}])
    for name, value in STATE["model"].items():
        same_bits(ck.model[name].load(), value)
    assert ck.raw["optim"]["state"]["w"]["step"].item() == 3


def test_the_tracker_of_a_run_leads_to_its_checkpoint(folder):
    (folder.parent / "dlrover_latest.txt").write_text("3")
    (tracker,) = ckptools.checkpoints_in(folder.parent).trackers
    assert (tracker.name, tracker.step, tracker.problem) == ("dlrover_latest.txt", 3, "")


def test_shared_memory_that_was_cut_is_not_whole(folder):
    memory = (folder / "__0_0.distcp").read_bytes()
    (folder / "__0_0.distcp").write_bytes(memory[: len(memory) // 2])
    assert [p.code for p in ckptools.open(folder).problems][:1] == ["CK002"]
