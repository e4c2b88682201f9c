"""The files that `verify --to-fetch` lists, copied again from a sound checkpoint, heal a damaged one."""

from __future__ import annotations

import pickle
import random
import shutil
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

import ckptools
from ckptools.cli import app
from ckptools.errors import CkptoolsError
from ckptools.verify.files_to_fetch import folder_of
from tests.damage.damages import damages
from tests.damage.test_matrix import place, suffered
from tests.truth import FIXTURES, WHOLE, Known, one_of_each_form

__all__ = ["place"]

KINDS = ("deleted", "halved", "one byte short", "another step")


@pytest.mark.slow
@pytest.mark.parametrize("known", one_of_each_form(WHOLE), ids=lambda known: known.label)
def test_files_copied_again_heal_a_checkpoint(known: Known, place: Path) -> None:
    folder, sound = place / "run", FIXTURES / known.name
    shutil.copytree(sound, folder, ignore=shutil.ignore_patterns("truth*", "HOW.md"))
    whole = ckptools.open(folder / known.path)
    begin = folder_of(whole)
    made = [damage for damage in damages(folder, [file.path for file in whole.files]) if damage.kind in KINDS]
    healed = 0
    for damage in random.Random(known.name).sample(made, min(12, len(made))):
        with suffered(damage):
            try:
                found = ckptools.verify(folder / known.path, deep=True)
            except CkptoolsError:  # it cannot be opened
                continue
            for name in found.to_fetch:
                shutil.copy(sound / begin.relative_to(folder) / name, begin / name)
            if found.to_fetch:
                healed += 1
                assert ckptools.verify(folder / known.path, deep=True).ok, (damage, found.to_fetch)
    assert healed or len(whole.files) < 3, "nothing was listed"


def names_of(path: Path) -> tuple[str, ...]:
    return ckptools.verify(path).to_fetch


@pytest.fixture
def ranks(tmp_path: Path) -> Path:
    for rank in range(3):
        torch.save({"model": {"w": torch.ones(3)}, "rank": rank, "world_size": 3}, tmp_path / f"rank{rank}.pt")
    return tmp_path


def test_lost_and_cut_files_are_listed(ranks):
    (ranks / "rank1.pt").unlink()
    (ranks / "rank2.pt").write_bytes((ranks / "rank2.pt").read_bytes()[:700])
    assert names_of(ranks) == ("rank1.pt", "rank2.pt")
    done = CliRunner().invoke(app, ["verify", str(ranks), "--to-fetch"])
    assert (done.exit_code, done.stdout) == (1, "rank1.pt\nrank2.pt\n")
    assert f"| rsync -a --files-from=- HOST:FOLDER/ {ranks}/" in done.stderr


def test_nothing_is_listed_where_nothing_is_wrong(ranks):
    assert names_of(ranks) == ()
    done = CliRunner().invoke(app, ["verify", str(ranks), "--to-fetch"])
    assert (done.exit_code, done.stdout, done.stderr) == (0, "", "0 files to copy again\n")


def test_a_file_in_which_the_save_died_is_not_listed(ranks):
    with pytest.raises((pickle.PicklingError, AttributeError)):
        torch.save({"model": lambda: None}, ranks / "rank1.pt")
    found = ckptools.verify(ranks)
    assert not found.ok and found.to_fetch == ()


def test_files_of_one_name_are_all_listed_where_the_rank_does_not_tell_which_is_meant(tmp_path):
    folder = tmp_path / "run"
    shutil.copytree(FIXTURES / "accelerate-fsdp2" / "ckpt", folder)
    damaged = folder / "optimizer_0" / "__0_0.distcp"
    data = bytearray(damaged.read_bytes())
    data[len(data) // 2] ^= 4
    damaged.write_bytes(data)
    found = ckptools.verify(folder, deep=True)
    assert not found.ok
    assert found.to_fetch == ("optimizer_0/__0_0.distcp", "pytorch_model_fsdp_0/__0_0.distcp")
