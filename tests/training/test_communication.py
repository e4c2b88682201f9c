"""What `--communication` says of a step."""

from __future__ import annotations

import pytest

from ckptools.training import run
from tests.training.forked import ckptools_forked


@pytest.fixture(scope="module")
def pipeline(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    out = tmp_path_factory.mktemp("pipeline") / "run"
    asked = ("--strategy", "pipeline", "--layout", "dcp", "--steps", 2, "--communication")
    done = ckptools_forked(2, "create", out, *asked)
    assert (done.returncode, done.stderr.count("\n")) == (0, 1), done.stderr
    return done.stdout.splitlines()


def row(lines: list[str], operation: str) -> list[str]:
    """Calls, elements and ranks of an operation."""
    (found,) = (line.split(maxsplit=3)[1:] for line in lines if line.split()[:1] == [operation])
    return found


@pytest.mark.slow
def test_stages_of_a_pipeline_send_each_microbatch_on_and_its_gradient_back(pipeline: list[str]) -> None:
    # Four microbatches of two sequences of 31 tokens with 65 features.
    assert row(pipeline, "send") == row(pipeline, "recv") == ["4", str(4 * 2 * 31 * 65), "0, 1"]


@pytest.mark.slow
def test_only_the_last_step_is_recorded(pipeline: list[str]) -> None:
    assert [line.split()[:2] for line in pipeline if line.startswith(("step", "one"))] == [
        ["step", "1"],
        ["one", "step"],
        ["step", "2"],
    ]


def test_ranks_that_did_the_same_share_a_row() -> None:
    lines = list(run.table([{"send": (1, 5)}, {"recv": (1, 5)}, {"recv": (1, 5)}]))
    assert [line.split(maxsplit=3) for line in lines[1:]] == [["recv", "1", "5", "1, 2"], ["send", "1", "5", "0"]]
