"""What the DCP writer refuses, and that a folder appears whole or not at all, the one that it replaces included."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from unittest import mock

import pytest
import torch
from typer.testing import CliRunner

import ckptools
from ckptools.cli import app
from ckptools.consolidate.writers import dcp
from ckptools.errors import NoSpaceError, OutputExistsError, ReadError, RefusedError, UsageError, WriteError
from ckptools.files.partial_files import PartialFiles
from tests.consolidate.test_refusals import LIMITED, flip
from tests.truth import FIXTURES

DDP = FIXTURES / "torch2.13.0-ddp-w4" / "snapshot.pt"
DCP = FIXTURES / "torch2.13.0-fsdp2-dcp-w3" / "ckpt"


def content(folder: Path) -> dict[str, bytes]:
    return {p.name: p.read_bytes() for p in folder.iterdir()}


def names(folder: Path) -> list[str]:
    return sorted(p.name for p in folder.iterdir())


@pytest.fixture
def old(tmp_path) -> Path:
    """A DCP that is there already."""
    torch.save({"w": torch.ones(3)}, tmp_path / "old.pt")
    ckptools.consolidate(tmp_path / "old.pt", tmp_path / "x.dcp")
    (tmp_path / "old.pt").unlink()
    return tmp_path / "x.dcp"


def test_a_folder_that_exists_is_kept_unless_forced_and_then_replaced_whole(old):
    before = content(old)
    with pytest.raises(OutputExistsError, match="force"):
        ckptools.consolidate(DDP, old, only="model")
    assert content(old) == before
    (old / "__0_7.distcp").write_bytes(b"of an earlier output")
    ckptools.consolidate(DDP, old, only="model", force=True)
    assert sorted(content(old)) == [".metadata", "__0_0.distcp", "ckptools.json"]
    assert "gate" in ckptools.open(old).model and names(old.parent) == ["x.dcp"]


@pytest.mark.parametrize("name", ["notes.txt", "__0_0.distcp.bak", "sub/x"])
def test_a_folder_with_other_things_in_it_is_never_replaced(old, name):
    (old / name).parent.mkdir(exist_ok=True)
    (old / name).write_text("mine")
    with pytest.raises(OutputExistsError, match="no part of a DCP"):
        ckptools.consolidate(DDP, old, force=True)
    assert (old / name).read_text() == "mine"


def test_a_file_or_a_link_of_that_name_is_never_replaced(old, tmp_path):
    (tmp_path / "file.dcp").write_text("mine")
    (tmp_path / "link.dcp").symlink_to(old)
    for name in ("file.dcp", "link.dcp"):
        with pytest.raises(OutputExistsError, match="no folder"):
            ckptools.consolidate(DDP, tmp_path / name, force=True)


def test_the_source_is_never_the_output_and_nothing_is_written_inside_it(tmp_path):
    source = tmp_path / "run.dcp"
    shutil.copytree(DCP, source)
    before = content(source)
    for out, told in ((source, "checkpoint itself"), (source / "x.dcp", "inside"), (tmp_path, "checkpoint itself")):
        with pytest.raises(OutputExistsError, match=told):
            ckptools.consolidate(source, out, format="dcp", force=True)
    assert content(source) == before


def test_an_output_that_does_not_fit_is_refused_before_anything_is_written(tmp_path):
    torch.save({"w": torch.zeros(1).expand(2**40)}, tmp_path / "run")
    with mock.patch.object(dcp, "ITEM_BYTES", 2**34), pytest.raises(NoSpaceError, match="needs 4398"):
        ckptools.consolidate(tmp_path / "run", tmp_path / "x.dcp")
    assert names(tmp_path) == ["run"]


@pytest.mark.parametrize(
    "tree",
    [
        {"model": {"w": torch.ones(1)}, "a": {"b": 1}, "a.b": 2},
        {"model": {"w": torch.ones(1)}, "a": {1: 1, "1": 2}},
        {"net": {"w": torch.ones(1)}, "model.w": 3},
    ],
    ids=["dots", "number and text", "the model's place"],
)
def test_two_values_of_one_name_are_refused(tree, tmp_path):
    torch.save(tree, tmp_path / "x.pt")
    with pytest.raises(RefusedError, match="two values would be called"):
        ckptools.consolidate(tmp_path / "x.pt", tmp_path / "x.dcp", layout="flat")
    assert not (tmp_path / "x.dcp").exists()


@pytest.mark.parametrize("tree", [torch.ones(2), [torch.ones(2), 5]], ids=["tensor", "list"])
def test_what_is_no_dict_is_refused(tree, tmp_path):
    torch.save(tree, tmp_path / "x.pt")
    with pytest.raises(RefusedError, match="a DCP holds a dict"):
        ckptools.consolidate(tmp_path / "x.pt", tmp_path / "x.dcp")


def test_formats_are_named_by_suffix_or_option(tmp_path):
    with pytest.raises(UsageError, match="choose one of pt, safetensors, dcp"):
        ckptools.consolidate(DDP, tmp_path / "x", format="hdf5")
    with pytest.raises(UsageError, match="there is no folder"):
        ckptools.consolidate(DDP, tmp_path / "nowhere" / "x.dcp")
    arguments = ["consolidate", str(DDP), "-o", str(tmp_path / "step-5"), "--format", "dcp"]
    result = CliRunner().invoke(app, arguments)
    assert (result.exit_code, result.stdout.splitlines()[0]) == (0, f"wrote {tmp_path / 'step-5'}")
    assert sorted(content(tmp_path / "step-5")) == [".metadata", "__0_0.distcp", "ckptools.json"]


def test_a_flipped_bit_is_found_in_a_record_that_becomes_several_items(tmp_path):
    torch.save({"w": torch.ones(100, 100)}, tmp_path / "x.pt")
    flip(tmp_path / "x.pt", "data/0")
    with mock.patch.object(dcp, "ITEM_BYTES", 10_000), pytest.raises(ReadError, match="CRC-32"):
        ckptools.consolidate(tmp_path / "x.pt", tmp_path / "x.dcp")
    assert names(tmp_path) == ["x.pt"]


@pytest.mark.slow
def test_a_disk_that_ends_leaves_one_line_and_the_old_folder(old):
    before = content(old)
    limited = LIMITED.replace("sys.argv[2]]", 'sys.argv[2], "--force"]')
    command = [sys.executable, "-c", limited, str(DDP), str(old)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == WriteError.exit_code
    assert done.stderr.count("\n") == 1 and "file too large" in done.stderr
    assert content(old) == before and names(old.parent) == ["x.dcp"]


@pytest.mark.parametrize("failing", [1, 2])
def test_a_rename_that_fails_leaves_the_old_folder_in_its_place(old, monkeypatch, failing):
    before, calls, rename = content(old), [], Path.rename

    def fail(self: Path, target: Path) -> Path:
        calls.append(self)
        if len(calls) == failing:
            raise OSError(5, "Input/output error")
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", fail)
    with pytest.raises(WriteError, match="could not be finished"):
        ckptools.consolidate(DDP, old, only="model", force=True)
    assert content(old) == before
    assert names(old.parent) == ["x.dcp"]


def test_the_old_folder_stays_until_the_new_one_is_whole_and_synced(old, monkeypatch):
    before, seen = content(old), []
    monkeypatch.setattr(os, "fsync", lambda _: seen.append(content(old) == before))
    ckptools.consolidate(DDP, old, only="model", force=True)
    # Three files and the new folder while the old one is there; then the folder around both.
    assert seen == [True, True, True, True, False]


def test_files_of_a_folder_are_not_seen_under_its_name_before_it_is_published(tmp_path):
    with PartialFiles() as partial:
        partial.create_folder(tmp_path / "x.dcp")
        os.write(partial.create(tmp_path / "x.dcp" / ".metadata", 0), b"whole")
        assert not (tmp_path / "x.dcp").exists() and len(names(tmp_path)) == 1
        partial.publish()
    assert content(tmp_path / "x.dcp") == {".metadata": b"whole"}
    assert names(tmp_path) == ["x.dcp"]


@pytest.fixture(scope="module")
def big_run(tmp_path_factory) -> Path:
    """A plain checkpoint that takes long enough to be interrupted."""
    folder = tmp_path_factory.mktemp("big")
    torch.save({f"w{i}": torch.full((256, 1024), float(i)) for i in range(200)}, folder / "big.pt")
    return folder / "big.pt"


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_an_end_from_outside_leaves_no_folder_of_that_name(big_run, tmp_path, number):
    command = [sys.executable, "-m", "ckptools", "consolidate", str(big_run), "-o", str(tmp_path / "x.dcp"), "-j", "1"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 20
    while not list(tmp_path.glob(".*.partial/*")) and time.monotonic() < deadline:
        time.sleep(0.001)
    process.send_signal(number)
    _, stderr = process.communicate(timeout=20)
    assert not (tmp_path / "x.dcp").exists()
    if number != signal.SIGKILL:
        assert names(tmp_path) == []
        assert process.returncode == 130 and "interrupted" in stderr
