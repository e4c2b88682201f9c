"""Every check says how much it looked at: `ok` covers only that, and nothing that nobody looked at."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

import ckptools
from ckptools.model.problems import Code, Problem
from ckptools.verify.record import Check, judged, not_judged, without


def check(path: Path, name: str, **how: bool) -> Check:
    return next(c for c in ckptools.verify(path, **how).checks if c.name.startswith(name))


@pytest.mark.parametrize(
    ("looked_at", "of", "result"), [(3, 3, "ok"), (2, 3, "partly"), (0, 3, "not judged"), (0, 0, "not judged")]
)
def test_a_check_without_problems_is_ok_only_if_it_looked_at_everything(looked_at, of, result):
    found = judged("rng", [], "2 states", looked_at=looked_at, of=of, rest="no file has the others")
    assert (found.result, found.looked_at, found.of) == (result, looked_at, of)


def test_the_reason_for_the_rest_is_in_the_detail():
    found = judged("rng", [], "2 states", looked_at=2, of=3, rest="no file has the others")
    assert found.detail == "2 states; 2 of 3 looked at: no file has the others"
    assert found.not_ok == f"partly: {found.detail}"
    assert not_judged("rng", "no RNG state").not_ok == "not judged: no RNG state"


@pytest.mark.parametrize(("severity", "result"), [("error", "FAIL"), ("warning", "warn"), ("note", "not judged")])
def test_a_problem_counts_whatever_was_looked_at(severity, result):
    problem = Problem(Code.VALUE_LOST, "", severity=severity)
    assert judged("rng", [problem], "", looked_at=0, of=0).result == result


def test_a_check_whose_problems_are_ignored_is_not_ok():
    found = judged("rng", [Problem(Code.VALUE_LOST, "")], "2 states", looked_at=2, of=2)
    assert without(found, {"CK005"}).result == "partly"
    assert without(found, {"CK005"}).detail == "1 problem ignored; 2 states"
    assert without(found, {"CK001"}) is found


def test_checksums_of_safetensors_are_not_judged(tmp_path):
    save_file({"a": torch.rand(4)}, tmp_path / "a.safetensors")
    found = check(tmp_path / "a.safetensors", "checksums", deep=True)
    assert (found.not_ok, found.looked_at, found.of) == ("not judged: no checksum in this format", 0, 1)


def test_integers_have_no_values_that_are_not_finite(tmp_path):
    torch.save({"a": torch.arange(4)}, tmp_path / "a.pt")
    found = check(tmp_path / "a.pt", "finite", values=True)
    assert (found.not_ok, found.of) == ("not judged: integers are always finite", 0)


def test_an_infinity_in_complex_halves_is_found(tmp_path):
    with pytest.warns(UserWarning, match="ComplexHalf"):
        torch.save({"a": torch.tensor([1, float("inf")], dtype=torch.complex32)}, tmp_path / "a.pt")
    found = check(tmp_path / "a.pt", "finite", values=True)
    assert [str(p) for p in found.problems] == ["CK201  a  1 NaN, first at [1]"]


def test_empty_tensors_have_nothing_to_look_at(tmp_path):
    torch.save({"a": torch.empty(0)}, tmp_path / "a.pt")
    for name in ("checksums", "finite"):
        found = check(tmp_path / "a.pt", name, deep=True, values=True)
        assert (found.not_ok, found.of) == ("not judged: no tensor has bytes here", 0)
