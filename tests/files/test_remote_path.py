"""The path of something in a store: as any path, with a URL for its text."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path

import pytest

from ckptools.errors import ReadError
from ckptools.files.opening import common_folder, is_remote, is_there, location, path_of, real_path
from ckptools.files.remote.path import RemotePath
from ckptools.files.remote.store import Place, Store
from ckptools.files.storage import FOLDER, RemoteError, Status

RANK_0 = RemotePath("s3://bucket/run7/ep0-ba1-rank0.pt")


class Tree(Store):
    """A store with the files of a nested dictionary, or one that does not list them."""

    def __init__(self, files: dict[str, int]) -> None:
        super().__init__(Place(None, str, "fixed"))
        self.files, self.listed = files, 0

    def _list(self, folder):
        self.listed += 1
        below = [name[len(folder) + 1 if folder else 0 :] for name in self.files if name.startswith(folder)]
        return {n.split("/")[0]: FOLDER if "/" in n else Status(self.files[f"{folder}/{n}"], 1.5) for n in below}

    def _look(self, key):
        raise AssertionError("a folder that is listed needs no look at a single file")

    def _fetch(self, key, version, start, end):
        return bytes(end - start)


@pytest.fixture
def run7() -> RemotePath:
    path = RemotePath("s3://bucket/run7")
    path._store = Tree({"run7/ep0-ba1-rank0.pt": 10, "run7/a/b.pt": 20, "run7/a/c.bin": 30})
    return path


def test_its_text_is_the_url_wherever_it_came_from():
    assert str(RANK_0) == RANK_0.as_posix() == "s3://bucket/run7/ep0-ba1-rank0.pt"
    assert str(RANK_0.parent) == "s3://bucket/run7" and str(RANK_0.parent / "x" / "y.z") == "s3://bucket/run7/x/y.z"
    assert str(RANK_0.with_name("b")) == "s3://bucket/run7/b" and str(RANK_0.relative_to(RANK_0.parent)) == RANK_0.name


def test_the_key_is_what_follows_the_bucket():
    assert (RANK_0.key, RANK_0.parent.key, RANK_0.parent.parent.key) == ("run7/ep0-ba1-rank0.pt", "run7", "")


def test_what_lies_above_a_bucket_is_no_path_in_it():
    bucket = RemotePath("s3://bucket")
    assert [str(above) for above in (bucket.parent, bucket.parent.parent)] == ["s3:", "."]
    assert (bucket.parent.key, bucket.parent.parent.key) == ("", "")


@pytest.mark.parametrize(
    "again", [copy.deepcopy, lambda p: pickle.loads(pickle.dumps(p)), RemotePath, path_of, real_path]
)
def test_a_copy_is_the_same_path(again):
    made = again(RANK_0)
    assert (type(made), made, hash(made), str(made)) == (RemotePath, RANK_0, hash(RANK_0), str(RANK_0))


def test_questions_about_the_files_of_a_folder_are_one_request(run7):
    file, folder = (run7 / "ep0-ba1-rank0.pt"), (run7 / "a")
    assert file.is_file() and not file.is_dir() and file.exists() and file.stat().st_size == 10
    assert folder.is_dir() and not folder.is_file() and not (run7 / "none").exists() and is_there(file)
    assert file.stat().st_mtime == 1.5 and run7.store.listed == 1


def test_a_folder_lists_what_lies_in_it_and_a_pattern_chooses(run7):
    assert sorted(p.name for p in run7.iterdir()) == ["a", "ep0-ba1-rank0.pt"]
    assert [p.name for p in run7.glob("*rank*.pt")] == ["ep0-ba1-rank0.pt"]
    assert [str(p) for p in (run7 / "a").glob("b*")] == ["s3://bucket/run7/a/b.pt"]


@pytest.mark.parametrize("write", ["mkdir", "unlink", "touch", "rmdir"])
def test_nothing_is_written_through_it(write):
    with pytest.raises(RemoteError, match="is in a store, which is only read"):
        getattr(RANK_0, write)()


def test_the_folder_that_paths_share_is_found_on_disk_and_in_a_store():
    others = [RANK_0, RANK_0.parent / "a" / "b"]
    assert common_folder([p.parent for p in others]) == RANK_0.parent
    assert common_folder([Path("/x/y/z"), Path("/x/y")]) == Path("/x/y")


def test_only_what_has_a_scheme_is_taken_for_a_url(tmp_path, monkeypatch):
    assert is_remote("s3://b/x") and is_remote(RANK_0) and not is_remote("s3:b") and not is_remote("C:/x")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "s3:" / "b").mkdir(parents=True)
    assert not is_remote("s3://b")


@pytest.mark.parametrize("url", ["s4://a/b", "rsync://a/b"])
def test_a_scheme_that_is_not_read_is_one_line(url):
    with pytest.raises(ReadError, match=f"^{url}: .*s3://, ") as error:
        location(url)
    assert "\n" not in str(error.value)
