"""What is said of a file that cannot be read comes from the error's kind; no word in its message decides."""

from __future__ import annotations

from pathlib import Path

from ckptools.errors import ReadError
from ckptools.formats.shared.file_status import Fault, looked_at
from ckptools.model.problems import Code

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
    file = looked_at(odd, 1, "", faults)
    assert (file.status, faults[odd].kind) == ("cut", "cut")
