"""Errors carry what happened as attributes, also to another process."""

from __future__ import annotations

import pickle
from pathlib import Path

import pytest

from ckptools import errors
from ckptools.errors import CkptoolsError, DamagedError, ForeignClassError, NotWholeError, ReadError
from ckptools.files.opening import File
from ckptools.files.partial_files import temporary_file
from ckptools.model.problems import Code, Problem
from ckptools.pickles import reader

EVERY = sorted(
    (c for c in vars(errors).values() if isinstance(c, type) and issubclass(c, CkptoolsError)), key=lambda c: c.__name__
)
SPECIAL = {
    DamagedError: DamagedError(Path("m.pt"), "w", "CRC-32 is 0"),
    ForeignClassError: ForeignClassError(Path("m.pt"), ["a.B"]),
    NotWholeError: NotWholeError(Path("m.pt"), "not whole", [Problem(Code.TENSOR_GAP, "gap", 1, "w")]),
    ReadError: ReadError(Path("m.pt"), "is cut short", "cut"),
}


@pytest.mark.parametrize("kind", EVERY, ids=lambda c: c.__name__)
def test_an_error_is_the_same_in_another_process(kind):
    error = SPECIAL.get(kind) or kind(Path("m.pt"), "is odd")
    again = pickle.loads(pickle.dumps(error))
    assert (type(again), str(again), vars(again)) == (kind, str(error), vars(error))


def test_the_reason_is_the_message_without_the_path():
    error = ReadError("run/m.pt", "is odd: run/m.pt: odd")
    assert (str(error), error.reason) == ("run/m.pt: is odd: run/m.pt: odd", "is odd: run/m.pt: odd")
    assert ReadError(None, "is odd").reason == str(ReadError(None, "is odd")) == "is odd"


def test_an_error_about_a_temporary_file_names_what_it_was_made_from():
    path = pickle.loads(pickle.dumps(temporary_file(Path("run/m.pt.gz"), "m.pt")))
    error = ReadError(path, "is odd")
    assert (str(error), error.path) == ("run/m.pt.gz: is odd", Path("run/m.pt.gz"))


@pytest.mark.parametrize(("content", "kind"), [(b"", "cut"), (b"PK\3\4" + bytes(60), "cut"), (b"buy milk", "damaged")])
def test_the_kind_tells_what_ends_too_early(tmp_path, content, kind):
    path = tmp_path / "m.pt"
    path.write_bytes(content)
    with pytest.raises(ReadError) as caught:
        reader.read(path)
    assert caught.value.kind == kind


def test_the_kind_tells_that_there_is_no_file_or_no_access(tmp_path):
    with pytest.raises(ReadError, match="no such file") as absent:
        File(tmp_path / "m.pt")
    with pytest.raises(ReadError, match=r"cannot be read: file name too long") as refused:
        File(tmp_path / ("m" * 300))
    assert (absent.value.kind, refused.value.kind) == ("absent", "no access")
