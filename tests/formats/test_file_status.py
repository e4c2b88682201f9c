"""What is said of a file that cannot be read comes from the error's kind; no word in its message decides."""

from __future__ import annotations

from pathlib import Path

import pytest

import ckptools
from ckptools.errors import ReadError
from ckptools.files.remote.path import RemotePath
from ckptools.files.remote.store import Place, Store
from ckptools.files.storage import Status
from ckptools.formats.shared.checkpoint_builder import Fault, looked_at
from ckptools.model.problems import Code
from tests.truth import FIXTURES

PATH = Path("run/rank1.pt")


def test_words_in_a_message_decide_nothing():
    fault = Fault.of(ReadError(PATH, "record 'cannot be read: is cut short' is damaged"), PATH)
    assert (fault.status, fault.problem("rank1.pt").kind) == ("bad", Code.FILE_CUT)


def test_the_kind_decides_how_a_file_is_listed_and_which_problem_it_is():
    cut, refused = (Fault.of(ReadError(PATH, "x", kind), PATH) for kind in ("cut", "no access"))
    assert (cut.status, cut.problem("rank1.pt", 1).kind) == ("cut", Code.FILE_CUT)
    assert (refused.status, refused.problem("rank1.pt", 1).kind) == ("bad", Code.FILE_UNREADABLE)
    assert str(cut.problem("rank1.pt", 1)) == "CK002  rank 1  rank1.pt x"


def test_an_error_about_another_file_names_it():
    assert Fault.of(ReadError(Path("run/config.json"), "is odd"), PATH).reason == "run/config.json: is odd"


def test_a_file_that_was_not_read_is_looked_at(tmp_path):
    odd, faults = tmp_path / "rank1.pt", {}
    odd.write_bytes(b"PK\3\4" + bytes(60))
    file = looked_at(odd, 1, "", faults, files=100)
    assert (file.status, faults[odd].kind) == ("cut", "cut")


class Many(Store):
    """A store with files that are no checkpoints, and one that is empty."""

    fetched = 0

    def _list(self, folder):
        return {"rank1.pt": Status(100, 0.0), "empty.pt": Status(0, 0.0)}

    def _look(self, key):
        return None

    def _fetch(self, key, version, start, end):
        self.fetched += 1
        return bytes(end - start)


@pytest.fixture
def store(monkeypatch):
    found = Many(Place(None, str, "fixed"))
    monkeypatch.setattr(RemotePath, "_store", found)
    return found


def test_of_many_files_in_a_store_none_is_looked_at(store):
    path = RemotePath("s3://bucket/run/rank1.pt")
    file = looked_at(path, 1, "", {}, files=65)
    assert (file.status, file.nbytes, store.fetched) == ("listed", 100, 0)


def test_of_few_files_in_a_store_each_is_looked_at(store):
    path = RemotePath("s3://bucket/run/rank1.pt")
    assert looked_at(path, 1, "", {}, files=64).status == "bad" and store.fetched
    assert looked_at(path, 1, "", {}, files=64, read=True).status == "read"


def test_what_is_known_to_be_wrong_of_a_file_in_a_store_is_said_however_many_there_are(store):
    path, empty = RemotePath("s3://bucket/run/rank1.pt"), RemotePath("s3://bucket/run/empty.pt")
    assert looked_at(path, 1, "", {path: Fault("is cut short", "cut")}, files=1000).status == "cut"
    assert looked_at(empty, 1, "", {}, files=1000).status == "cut"


@pytest.mark.parametrize("given", [["d/{0}", "d/{1}"], ["{d}/{0}", "{d}/{1}"], ["d/{0}", "{d}/{1}"]])
def test_several_files_are_opened_as_the_folder_that_has_them_all(given, tmp_path, monkeypatch):
    folder = tmp_path / "d"
    folder.mkdir()
    for rank in range(3):
        (folder / f"rank{rank}.pt").write_bytes((FIXTURES / "torch2.4.1-fsdp2-w3" / f"rank{rank}.pt").read_bytes())
    monkeypatch.chdir(tmp_path)
    paths = [Path(text.format("rank0.pt", "rank2.pt", d=folder)) for text in given]
    ck = ckptools.open(paths, all_ranks=True)
    absolute = any(path.is_absolute() for path in paths)
    assert ck.path == (folder if absolute else Path("d")) and ck.whole is False
    assert sorted((f.rank, f.status) for f in ck.files) == [(0, "read"), (1, "missing"), (2, "read")]
