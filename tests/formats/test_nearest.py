"""A folder that no format recognises gets the nearest guess: whose it looks like and which file it lacks."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

import ckptools
from ckptools.errors import UnknownFormatError
from tests.truth import FIXTURES


@pytest.mark.parametrize(
    ("fixture", "lost", "writer"),
    [
        ("nanotron-tp2pp2", "checkpoint_metadata.json", "Nanotron"),
        ("torchsnapshot-fsdp1", ".snapshot_metadata", "torchsnapshot"),
    ],
)
def test_the_file_that_is_missing_is_named(tmp_path, fixture, lost, writer):
    folder = Path(shutil.copytree(FIXTURES / fixture / "ckpt", tmp_path / "step"))
    (folder / lost).unlink()
    text = f"looks like {writer}: {lost} is missing, which it writes last: the save has not ended, or it died"
    with pytest.raises(UnknownFormatError, match=text):
        ckptools.open(folder)


def test_a_run_with_several_checkpoints_lacks_nothing(tmp_path):
    for step in ("5", "6"):
        shutil.copytree(FIXTURES / "nanotron-tp2pp2" / "ckpt", tmp_path / step)
    with pytest.raises(ckptools.CkptoolsError, match="holds 2 checkpoints"):
        ckptools.open(tmp_path)


@pytest.mark.parametrize(
    ("name", "writer"),
    [
        ("default/manifest.ocdbt", "Orbax"),
        ("variables/variables.data-00000-of-00001", "TensorFlow"),
        ("model.pdparams", "PaddlePaddle"),
        ("q4.gguf", "llama.cpp"),
    ],
)
def test_another_framework_is_named(tmp_path, name, writer):
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).write_bytes(b"bytes of it")
    with pytest.raises(UnknownFormatError, match=f"looks like {writer}"):
        ckptools.open(tmp_path)


def test_an_unknown_folder_leads_to_the_form_for_new_formats(tmp_path):
    (tmp_path / "weights.xyz").write_bytes(b"bytes of it")
    with pytest.raises(UnknownFormatError, match="issue form 'New format'"):
        ckptools.open(tmp_path)
    assert (FIXTURES.parent / ".github/ISSUE_TEMPLATE/format.yml").is_file()
