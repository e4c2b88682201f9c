"""What consolidate writes, read back by torch and safetensors themselves, against the truth."""

from __future__ import annotations

import argparse
import dataclasses
import enum
import errno
import functools
import json
import os
import pathlib
import subprocess
import sys
import types
import zipfile
from collections import OrderedDict
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

import ckptools
from ckptools.consolidate.record import Consolidated
from ckptools.errors import ReadError
from ckptools.text import fqn_of
from ckptools.training_state.optimizers import Optimizer
from tests.pickles.test_machine import Called
from tests.truth import LOCAL, WHOLE, Known, load_truth


def raw(tensor: torch.Tensor) -> tuple[str, bytes, tuple[int, ...]]:
    data = tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    return str(tensor.dtype)[6:], data, tuple(tensor.shape)


def known(name: str) -> Known:
    return next(k for k in WHOLE if k.name.startswith(name))


@cache
def opened(fixture: Known) -> ckptools.Checkpoint:
    """A fixture, opened once for all outputs."""
    return fixture.open()


def model_truth(of: Known) -> dict[str, tuple[str, bytes, tuple[int, ...]]]:
    truth = {k: v for k, v in load_truth(of.name).items() if k.startswith("model/")}
    truth = {k: v for k, v in truth.items() if not k.startswith(of.absent or "-")}
    prefix = of.prefix.removeprefix("module.")  # a model alone has no names of wrappers
    return {prefix + k.removeprefix("model/"): v for k, v in truth.items()}


@pytest.mark.parametrize("fixture", (*WHOLE, *LOCAL), ids=lambda k: k.name)
def test_a_model_pt_loads_safely_and_equals_the_truth(fixture, tmp_path):
    opened(fixture).consolidate(tmp_path / "m.pt", only="model")
    state = torch.load(tmp_path / "m.pt", weights_only=True, mmap=True)
    truth = model_truth(fixture)
    assert {k: raw(state[k]) for k in truth} == truth


@pytest.mark.slow
@pytest.mark.parametrize("fixture", (*WHOLE, *LOCAL), ids=lambda k: k.name)
def test_a_safetensors_file_equals_the_truth(fixture, tmp_path):
    opened(fixture).consolidate(tmp_path / "m.safetensors")
    with safe_open(tmp_path / "m.safetensors", framework="pt") as file:
        found = {k: raw(file.get_tensor(k)) for k in file.keys()}  # noqa: SIM118 - it is no dict
    truth = model_truth(fixture)
    assert {k: found[k] for k in truth} == truth


@pytest.fixture(scope="module")
def full(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Known], tuple[Consolidated, Path]]:
    """A fixture as a full .pt, which is written once."""

    @cache
    def write(fixture: Known) -> tuple[Consolidated, Path]:
        path = tmp_path_factory.mktemp(fixture.name) / "all.pt"
        return opened(fixture).consolidate(path), path

    return write


@pytest.mark.slow
@pytest.mark.parametrize("fixture", WHOLE, ids=lambda k: k.name)
def test_a_full_pt_has_the_same_tree_and_every_value(fixture, full):
    done, path = full(fixture)
    before, after = ckptools.open(fixture.file, all_ranks=True), ckptools.open(path)
    assert [s.path for s in before.sections if fqn_of(s.path) not in done.left_out] == [s.path for s in after.sections]
    assert list(before.optimizers) == list(after.optimizers)
    for a, b in zip(before.optimizers.values(), after.optimizers.values(), strict=True):
        check_state(a, b)


def check_state(a: Optimizer, b: Optimizer) -> None:
    assert list(a.state) == list(b.state)
    for fqn, slots in a.state.items():
        for slot, value in slots.items():
            other = b.state[fqn][slot]
            assert raw(value.load()) == raw(other.load()) if hasattr(value, "load") else value == other


@pytest.mark.slow
@pytest.mark.parametrize("fixture", WHOLE, ids=lambda k: k.name)
def test_a_full_pt_is_read_by_plain_torch_load(fixture, full):
    done, path = full(fixture)
    assert done.needs == ()
    for tree in (torch.load(path), torch.load(path, mmap=True)):
        assert list(tree) == [k for k in ckptools.open(fixture.file).tree if k not in done.left_out]


def test_the_lines_of_today_work_on_the_output(tmp_path):
    ckptools.consolidate(known("composer-0.13").file, tmp_path / "all.pt")
    shard = torch.load(tmp_path / "all.pt")
    group = shard["state"]["optimizers"]["DecoupledAdamW"]["param_groups"][0]
    assert (group["betas"], group["foreach"]) == ((0.9, 0.95), None)
    assert shard["state"]["schedulers"]["LambdaLR"]["lr_lambdas"] == [None]


def test_integer_keys_and_ordered_dicts_stay_what_they_were(tmp_path):
    ckptools.consolidate(known("verl-fsdp1").file, tmp_path / "all.pt")
    tree = torch.load(tmp_path / "all.pt")
    assert sorted(tree["optim"]["state"]) == list(range(21))
    assert tree["optim"]["param_groups"][0]["params"] == list(range(21))
    assert isinstance(tree["model"], OrderedDict)


def test_the_archive_passes_zipfile_and_its_storages_are_aligned(tmp_path):
    ckptools.consolidate(known("composer-0.13").file, tmp_path / "all.pt")
    subprocess.run([sys.executable, "-m", "zipfile", "-t", str(tmp_path / "all.pt")], check=True, capture_output=True)
    with zipfile.ZipFile(tmp_path / "all.pt") as archive:
        data = (tmp_path / "all.pt").read_bytes()
        for info in archive.infolist():
            n_name, n_extra = data[info.header_offset + 26], data[info.header_offset + 28]
            assert (info.header_offset + 30 + n_name + n_extra) % 64 == 0


def test_tied_weights_share_one_storage_in_a_pt(tmp_path):
    done = ckptools.consolidate(known("verl-fsdp2").file, tmp_path / "m.pt", only="model")
    state = torch.load(tmp_path / "m.pt", weights_only=True)
    assert done.tied == {"lm_head.weight": "model.embed_tokens.weight"}
    assert state["lm_head.weight"].data_ptr() == state["model.embed_tokens.weight"].data_ptr()


def test_tied_weights_are_kept_or_dropped_in_safetensors_as_asked(tmp_path):
    file = known("verl-fsdp2").file
    ckptools.consolidate(file, tmp_path / "keep.safetensors", tied="keep")
    ckptools.consolidate(file, tmp_path / "drop.safetensors", tied="drop")
    with safe_open(tmp_path / "keep.safetensors", "pt") as keep, safe_open(tmp_path / "drop.safetensors", "pt") as drop:
        assert set(keep.keys()) - set(drop.keys()) == {"lm_head.weight"}


def test_dropping_tied_weights_keeps_every_step_of_the_optimizer(tmp_path):
    file = known("torch1.13.1").file
    kept = ckptools.consolidate(file, tmp_path / "keep.safetensors", only="all", tied="keep")
    dropped = ckptools.consolidate(file, tmp_path / "drop.safetensors", only="all", tied="drop")
    assert kept.tensors == dropped.tensors and dropped.tied == {}


def test_several_files_have_an_index_that_names_every_tensor(tmp_path):
    done = ckptools.consolidate(known("verl-fsdp1").file, tmp_path / "model.safetensors", max_shard_size=16_000)
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert len(set(index["weight_map"].values())) == len(done.layout.files) > 2
    for name, file in index["weight_map"].items():
        with safe_open(tmp_path / file, "pt") as shard:
            assert name in shard.keys()  # noqa: SIM118 - it is no dict


def test_a_dtype_is_torchs_own_conversion_of_the_model_alone(tmp_path):
    file = known("torch2.13.0-fsdp1").file
    ckptools.consolidate(file, tmp_path / "bf16.pt", dtype="bf16")
    ckptools.consolidate(file, tmp_path / "full.pt")
    small, full = torch.load(tmp_path / "bf16.pt"), torch.load(tmp_path / "full.pt")
    for fqn, tensor in full["model"].items():
        expected = tensor.to(torch.bfloat16) if tensor.is_floating_point() else tensor
        assert raw(small["model"][fqn]) == raw(expected)
    assert small["optim"]["state"]["emb.weight"]["exp_avg"].dtype == torch.float32


def test_what_is_not_a_tensor_goes_to_a_json_beside_safetensors(tmp_path):
    ckptools.consolidate(known("composer-0.13").file, tmp_path / "all.safetensors", only="all")
    beside = json.loads((tmp_path / "all.safetensors.json").read_text(), parse_constant=pytest.fail)
    state = beside["values"]["state"]
    assert state["timestamp"]["Timestamp"]["batch"] == 5
    assert state["timestamp"]["Timestamp"]["batch_wct"]["$type"] == "timedelta"


def test_foreign_objects_that_are_more_than_their_attributes_are_left_out_and_listed(tmp_path):
    torch.save({"model": {"w": torch.ones(1)}, "f": functools.partial(int, base=2)}, tmp_path / "in.pt")
    done = ckptools.consolidate(tmp_path / "in.pt", tmp_path / "all.pt", only="all")
    listed = json.loads((tmp_path / "all.pt.left-out.json").read_text())["left_out"]
    assert [row["name"] for row in listed] == ["f"]
    assert done.left_out == {"f": "an object of class functools.partial"}
    assert "f" not in torch.load(tmp_path / "all.pt")
    (problem,) = ckptools.open(tmp_path / "all.pt").problems
    assert (problem.code, problem.severity) == ("CK020", "warning") and problem.message.endswith("no such values: f")


class Phase(enum.Enum):
    MAIN = "main"


@dataclasses.dataclass
class Settings:
    lr: float
    inner: Any = None


def test_objects_that_are_their_attributes_become_dicts_and_enums_and_paths_text(tmp_path):
    settings = Settings(0.1, types.SimpleNamespace(phase=Phase.MAIN, sizes=[1, 2]))
    saved = {
        "args": argparse.Namespace(steps=6),
        "cfg": settings,
        "to": pathlib.PurePosixPath("/a/b"),
        "on": Phase.MAIN,
    }
    torch.save({"model": {"w": torch.ones(1)}, **saved}, tmp_path / "in.pt")
    done = ckptools.consolidate(tmp_path / "in.pt", tmp_path / "all.pt", only="all")
    found = torch.load(tmp_path / "all.pt", weights_only=True)
    assert found["args"] == {"steps": 6} and found["to"] == "/a/b" and found["on"] == "Phase('main')"
    assert found["cfg"] == {"lr": 0.1, "inner": {"phase": "Phase('main')", "sizes": [1, 2]}}
    assert done.left_out == {} and len([note for note in done.notes if "became" in note]) == 2


def test_an_object_that_holds_itself_or_names_what_could_run_is_left_out(tmp_path):
    loop, runs = argparse.Namespace(), Called(os.system, "true")
    loop.me = loop
    torch.save({"model": {"w": torch.ones(1)}, "loop": loop, "runs": runs}, tmp_path / "in.pt")
    done = ckptools.consolidate(tmp_path / "in.pt", tmp_path / "all.pt", only="all")
    assert set(done.left_out) == {"loop", "runs"}


def test_a_class_as_a_key_is_left_out_so_that_plain_torch_load_reads_the_rest(tmp_path):
    torch.save({"w": torch.ones(2), torch.nn.Linear: torch.ones(3)}, tmp_path / "x.pt")
    done = ckptools.consolidate(tmp_path / "x.pt", tmp_path / "out.pt")
    assert [why.startswith("its key is") for why in done.left_out.values()] == [True]
    assert list(torch.load(tmp_path / "out.pt")) == ["w"]


def test_a_dry_run_writes_nothing_and_knows_every_copy(tmp_path):
    done = ckptools.consolidate(known("composer-0.13").file, tmp_path / "all.pt", dry_run=True)
    assert list(tmp_path.iterdir()) == []
    assert sum(part.nbytes for job in done.layout.jobs for part in job.parts()) == sum(
        j.nbytes for j in done.layout.jobs
    )


def test_a_row_of_a_dry_run_has_the_dtype_that_would_be_written(tmp_path):
    torch.save({"model": {"w": torch.ones(3), "n": torch.ones(2, dtype=torch.int64)}}, tmp_path / "in.pt")
    done = ckptools.consolidate(tmp_path / "in.pt", tmp_path / "out.pt", only="model", dtype="bf16", dry_run=True)
    assert {row.name: row.dtype for row in done.rows} == {"w": "bfloat16", "n": "int64"}


def test_keys_that_are_no_texts_have_their_type_in_the_json(tmp_path):
    torch.save({"model": {"w": torch.ones(2)}, "seen": {3: 1, True: 2, "a": 4}}, tmp_path / "run.pt")
    ckptools.consolidate(tmp_path / "run.pt", tmp_path / "out.safetensors", only="all")
    beside = json.loads((tmp_path / "out.safetensors.json").read_text())
    assert '"$keys": {"3": "int", "True": "bool"}' in json.dumps(beside)


def test_bytes_that_the_kernel_does_not_copy_go_through_memory(tmp_path, monkeypatch):
    values = {"a": torch.arange(12.0).reshape(3, 4), "b": torch.ones(5, dtype=torch.bfloat16)}
    save_file(values, tmp_path / "in.safetensors")
    calls = mock.Mock(side_effect=OSError(errno.EXDEV, os.strerror(errno.EXDEV)))
    monkeypatch.setattr(os, "copy_file_range", calls, raising=False)
    ckptools.consolidate(tmp_path / "in.safetensors", tmp_path / "out.safetensors")
    found = load_file(tmp_path / "out.safetensors")
    assert calls.called and all(torch.equal(found[name], value) for name, value in values.items())


def test_a_source_that_becomes_shorter_meanwhile_is_named_with_the_tensor(tmp_path):
    save_file({"a": torch.ones(4096), "b": torch.ones(4096)}, tmp_path / "in.safetensors")

    def cut(nbytes: int, fqn: str) -> None:
        os.truncate(tmp_path / "in.safetensors", 9000)

    with pytest.raises(ReadError, match=r"became shorter while .* was read") as error:
        ckptools.consolidate(tmp_path / "in.safetensors", tmp_path / "out.safetensors", jobs=1, progress=cut)
    assert error.value.path == tmp_path / "in.safetensors"
    assert [path.name for path in tmp_path.iterdir()] == ["in.safetensors"]
