"""Files that torch.save leaves when it raises: what is said of them, and of the other ranks' files."""

from __future__ import annotations

import io
import pickle
import zipfile
from pathlib import Path

import pytest
import torch

import ckptools
from ckptools.errors import ReadError
from ckptools.model.incidents import causes_of
from ckptools.pickles import reader
from tests.truth import FIXTURES

STATE = {"model": {"a": torch.ones(1000), "b": torch.ones(1000)}}
RANKS = FIXTURES / "torch2.6.0-fsdp1-hsdp2x2-w4"


def failed(path: Path, zipped: bool = True) -> Path:
    """What torch.save leaves at a path where the state holds a function without a name."""
    with pytest.raises((pickle.PicklingError, AttributeError)):
        torch.save({**STATE, "f": lambda x: x}, path, _use_new_zipfile_serialization=zipped)
    return path


def test_a_save_that_raised_before_it_wrote_the_object_is_told_from_a_foreign_archive(tmp_path):
    with pytest.raises(ReadError, match=r"torch.save began it and failed .* look for an exception of that save"):
        ckptools.open(failed(tmp_path / "a.pt"))
    with pytest.raises(ReadError, match="failed before it wrote the object"):
        reader.probe(tmp_path / "a.pt")
    with zipfile.ZipFile(tmp_path / "other.pt", "w") as other:
        other.writestr("other/version", "3")
        other.writestr("other/weights", "3")
    with pytest.raises(ReadError, match=r"not written by torch.save"):
        ckptools.open(tmp_path / "other.pt")


def test_a_save_of_the_older_writer_that_raised_ends_in_the_object(tmp_path):
    with pytest.raises(ReadError, match=r"is cut short: it ends at byte \d+, in the saved object"):
        ckptools.open(failed(tmp_path / "a.pt", zipped=False))


class FullDisk(io.RawIOBase):
    """A file on a disk with room for a number of bytes."""

    def __init__(self, path: Path, room: int) -> None:
        self.path, self.room = path, room
        path.touch()

    def writable(self) -> bool:
        return True

    def write(self, data) -> int:
        with self.path.open("ab") as file:
            written = file.write(bytes(data)[: self.room])
        self.room -= written
        if written < len(data):
            raise OSError(28, "No space left on device")
        return written


@pytest.mark.parametrize("zipped", [True, False])
@pytest.mark.parametrize("room", [0, 100, 600, 3000, 5000])
def test_a_save_that_a_full_disk_ended_is_empty_or_cut(room, zipped, tmp_path):
    with pytest.raises((OSError, RuntimeError)):
        torch.save(STATE, FullDisk(tmp_path / "a.pt", room), _use_new_zipfile_serialization=zipped)
    with pytest.raises(ReadError, match=r"is cut short|is empty"):
        ckptools.open(tmp_path / "a.pt")


def test_a_rank_whose_save_raised_is_named_and_the_others_are_read(tmp_path):
    for path in RANKS.rglob("*rank*.pt"):
        (tmp_path / path.name).write_bytes(path.read_bytes())
    first, second, *_ = sorted(tmp_path.glob("*.pt"))
    failed(second)
    (cause,) = [p for p in ckptools.open(first).problems if p.code == "CK002"]
    assert "torch.save began it and failed" in cause.message and cause.rank == 1
    assert "an earlier checkpoint" in causes_of([cause])[0].remedy


def test_storages_that_a_save_did_not_come_to_write_are_gaps_of_a_salvaged_file(tmp_path):
    torch.save(STATE, tmp_path / "a.pt")
    with zipfile.ZipFile(tmp_path / "a.pt") as whole, zipfile.ZipFile(tmp_path / "b.pt", "w") as part:
        for name in whole.namelist():
            if not name.endswith("data/1"):
                part.writestr(name.replace("a/", "b/", 1), whole.read(name))
    with pytest.raises(ReadError, match=r"record 'data/1' is missing: torch.save failed before it wrote it"):
        ckptools.open(tmp_path / "b.pt")
    found = ckptools.open(tmp_path / "b.pt", salvage=True)
    assert found.model["a"].load().tolist() == [1.0] * 1000
    assert [p.tensor for p in ckptools.verify(found).problems if p.code == "CK101"] == ["model.b"]
