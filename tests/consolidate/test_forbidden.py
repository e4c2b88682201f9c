"""What each kind of problem forbids to write, as an error of a checkpoint that is otherwise whole."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

import ckptools
from ckptools.errors import NotWholeError
from ckptools.model.problems import Code, Problem
from tests.truth import FIXTURES

WHOLE = FIXTURES / "composer-0.13.5-torch1.13.1-sharded-w4"
CONTRADICTIONS = (
    Code.MIXED_SAVES,
    Code.METADATA_CONTRADICTS,
    Code.STRAY_FILE,
    Code.WORLD_SIZES_DISAGREE,
    Code.LAYOUT_DISAGREES,
    Code.COPIES_DIFFER,
)
LOST = (
    Code.FILE_MISSING,
    Code.FILE_CUT,
    Code.FILE_UNREADABLE,
    Code.VALUE_LOST,
    Code.ONE_OF_SEVERAL,
    Code.MODEL_PART_MISSING,
)


def with_error(kind: Code) -> ckptools.Checkpoint:
    return replace(ckptools.open(WHOLE, all_ranks=True), problems=(Problem(kind, "x", severity="error"),))


@pytest.mark.slow
@pytest.mark.parametrize("kind", CONTRADICTIONS, ids=lambda kind: kind.code)
@pytest.mark.parametrize("way", [{}, {"allow_missing": True}, {"allow_missing": True, "fill": "zero"}], ids=str)
def test_no_option_talks_a_contradiction_away(tmp_path: Path, kind: Code, way: dict[str, object]):
    with pytest.raises(NotWholeError, match=f"{kind.code}  x$"):
        ckptools.consolidate(with_error(kind), tmp_path / "m.pt", **way)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
@pytest.mark.parametrize("kind", LOST, ids=lambda kind: kind.code)
def test_what_is_lost_is_left_out_only_where_that_is_allowed(tmp_path: Path, kind: Code):
    with pytest.raises(NotWholeError, match="allow_missing=True writes what is whole"):
        ckptools.consolidate(with_error(kind), tmp_path / "m.pt", only="model")
    ckptools.consolidate(with_error(kind), tmp_path / "m.pt", only="model", allow_missing=True)
    assert (tmp_path / "m.pt").is_file()


def test_a_contradiction_that_is_no_error_forbids_nothing(tmp_path: Path):
    noted = replace(with_error(Code.LAYOUT_DISAGREES), problems=(Problem(Code.LAYOUT_DISAGREES, "x", severity="note"),))
    ckptools.consolidate(noted, tmp_path / "m.pt", only="model")
    assert (tmp_path / "m.pt").is_file()
