"""Links in place of a checkpoint's files: none that leads out of the folder is followed unless the caller says so."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

import ckptools
from ckptools.errors import CkptoolsError, UnknownFormatError, UnsafePathError
from tests.truth import FIXTURES

DDP = FIXTURES / "torch2.13.0-ddp-w4" / "snapshot.pt"
FSDP2 = FIXTURES / "torch2.4.1-fsdp2-w3"
TORCHTITAN = FIXTURES / "torchtitan-fsdp-tp" / "ckpt"

ONE_OF_EACH = (
    "accelerate-fsdp2/ckpt",
    "composer-0.13.5-torch1.13.1-sharded-w4",
    "composer-0.16.4-torch2.0.1-elastic-w4",
    "dcp-hf/ckpt",
    "deepspeed-z3-bf16/ckpt",
    "hf-gpt2-bin-tied-fp32/ckpt",
    "hf-llama-safetensors-bf16/ckpt",
    "lightning-fabric-fsdp2/ckpt",
    "lightning-trainer-ddp/ckpt",
    "megatron-tp2dp2-distopt/ckpt",
    "megatron-tp2pp2-fp32/legacy",
    "nemo-automodel-fsdp2/ckpt",
    "torch-checkpointing-st-fsdp2/ckpt",
    "torch2.4.1-fsdp2-w3",
    "torchsnapshot-fsdp1/ckpt",
    "verl-fsdp1/ckpt",
)
"""A checkpoint of nearly every format that there are fixtures of."""

RECOGNISED_BY = ("metadata.json", "metadata.pkl")
"""What tells a format by its first bytes, which are looked at before the link is refused."""


_watched: list[str] = []
_opened: set[str] = set()


def _watch(event: str, args: tuple[object, ...]) -> None:
    if _watched and event == "open" and isinstance(args[0], (str, bytes, os.PathLike)):
        path = os.path.realpath(os.fsdecode(args[0]))
        _opened.update(path for folder in _watched if path.startswith(folder))


sys.addaudithook(_watch)  # one for the whole process, for a hook cannot be taken away


@contextmanager
def opened_in(folder: Path) -> Iterator[set[str]]:
    """The files below a folder that are opened meanwhile, by whatever name."""
    _opened.clear()
    _watched.append(os.path.realpath(folder))
    try:
        yield _opened
    finally:
        _watched.pop()


def behind_link(path: Path, elsewhere: Path) -> Path:
    """Move a file or folder elsewhere, and put a link to it in its place."""
    elsewhere.mkdir(exist_ok=True)
    shutil.move(path, elsewhere / path.name)
    path.symlink_to(elsewhere / path.name)
    return path


@pytest.mark.parametrize("name", ONE_OF_EACH)
def test_nothing_behind_a_link_is_opened_whatever_file_it_takes_the_place_of(name, tmp_path):
    shutil.copytree(FIXTURES / name, tmp_path / "ck")
    for path in sorted(p for p in (tmp_path / "ck").rglob("*") if p.is_file() and p.name not in RECOGNISED_BY):
        behind_link(path, tmp_path / "elsewhere")
        with opened_in(tmp_path / "elsewhere") as opened:
            try:
                ckptools.open(tmp_path / "ck").verify(deep=True)
            except CkptoolsError as error:
                assert "follow_symlinks" in str(error)
        assert opened == set(), path
        path.unlink()
        shutil.move(tmp_path / "elsewhere" / path.name, path)


@pytest.mark.parametrize("name", ONE_OF_EACH)
def test_a_checkpoint_of_links_is_opened_by_who_follows_them(name, tmp_path):
    shutil.copytree(FIXTURES / name, tmp_path / "ck")
    whole = ckptools.open(tmp_path / "ck").whole
    for path in sorted(p for p in (tmp_path / "ck").iterdir()):
        behind_link(path, tmp_path / "elsewhere")
    assert ckptools.open(tmp_path / "ck", follow_symlinks=True).whole == whole


def test_the_only_rank_file_of_a_folder_may_not_be_a_link_either(tmp_path):
    shutil.copytree(FSDP2, tmp_path / "all")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "rank0.pt").symlink_to(tmp_path / "all" / "rank0.pt")
    for how in ({}, {"only_this_file": True}, {"all_ranks": True}):
        with pytest.raises(UnsafePathError, match=r"rank0\.pt: is a link to .*follow it with follow_symlinks"):
            ckptools.open(tmp_path / "run", **how)
    assert ckptools.open(tmp_path / "run", follow_symlinks=True).ranks == (0,)


def test_a_file_that_is_named_may_be_a_link(tmp_path):
    (tmp_path / "mine.pt").symlink_to(DDP)
    assert ckptools.open(tmp_path / "mine.pt").whole


def test_a_folder_with_nothing_but_a_link_says_how_to_follow_it(tmp_path):
    (tmp_path / "snapshot.pt").symlink_to(DDP)
    with pytest.raises(
        UnknownFormatError, match=r"1 link out of it, not followed \(follow_symlinks=True\): snapshot\.pt"
    ):
        ckptools.open(tmp_path)
    assert ckptools.open(tmp_path, follow_symlinks=True).path == tmp_path / "snapshot.pt"


@pytest.mark.parametrize("text", ["step-6", "snapshot.pt"])
def test_a_checkpoint_beside_the_opened_one_that_is_behind_a_link_is_noted(text, tmp_path):
    shutil.copytree(TORCHTITAN / "step-5", tmp_path / "step-5")
    (tmp_path / text).symlink_to(TORCHTITAN / "step-6" if text == "step-6" else DDP)
    (noted,) = ckptools.open(tmp_path).problems
    assert (noted.code, noted.severity) == ("CK013", "note")
    assert noted.message.endswith(f"1 link out of it, not followed (follow_symlinks=True): {text}")


def test_a_link_to_a_folder_above_is_not_searched(tmp_path):
    shutil.copytree(TORCHTITAN / "step-5", tmp_path / "run" / "inner" / "step-5")
    (tmp_path / "run" / "up").symlink_to(tmp_path)
    ck = ckptools.open(tmp_path / "run", follow_symlinks=True)
    assert (ck.name, ck.problems) == ("step-5", ())


def test_a_link_to_what_no_checkpoint_is_called_is_not_noted(tmp_path):
    shutil.copytree(TORCHTITAN / "step-5", tmp_path / "run" / "inner" / "step-5")
    (tmp_path / "notes.txt").write_text("mine")
    (tmp_path / "run" / "notes.txt").symlink_to(tmp_path / "notes.txt")
    assert ckptools.open(tmp_path / "run").problems == ()


@pytest.mark.parametrize("follow", [False, True])
def test_a_link_within_the_folder_is_another_name_of_what_it_holds(follow, tmp_path):
    shutil.copytree(TORCHTITAN / "step-5", tmp_path / "inner" / "step-5")
    (tmp_path / "again").symlink_to("inner/step-5")
    assert ckptools.open(tmp_path, follow_symlinks=follow).problems == ()
