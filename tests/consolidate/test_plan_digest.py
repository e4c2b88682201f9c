"""Plans that differ between ranks are told apart, in a line that names the rank and what differs."""

from __future__ import annotations

import os
import shutil
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

import pytest

from ckptools.cluster.team import Team, working_in
from ckptools.consolidate.options import ConsolidateOptions
from ckptools.consolidate.run import consolidate
from ckptools.consolidate.shares import check_same_plan, plan_digests
from ckptools.errors import RefusedError
from ckptools.formats.open import with_all_ranks
from tests.truth import FIXTURES

T = TypeVar("T")


class WithOther(Team):
    """Rank 0 of two, of which the other has a plan that is known before."""

    world_size = 2

    def __init__(self, other: dict[str, str]) -> None:
        self.other = other

    def gather(self, value: T) -> list[T]:
        return [value, self.other]  # type: ignore[list-item]


def digests(source: Path, out: Path, **options: object) -> dict[str, str]:
    done = consolidate(source, out, ConsolidateOptions(dry_run=True, **options))  # type: ignore[arg-type]
    return plan_digests(with_all_ranks(source), done.layout, {})


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return Path(shutil.copytree(FIXTURES / "torch2.13.0-fsdp1-sharded-w4", tmp_path / "source"))


def refused(own: dict[str, str], other: dict[str, str]) -> str:
    with working_in(WithOther(other)), pytest.raises(RefusedError) as caught:
        check_same_plan(own)
    return str(caught.value)


@pytest.mark.slow
def test_the_same_call_has_the_same_plan(source: Path, tmp_path: Path) -> None:
    first, second = (digests(source, tmp_path / "x.pt") for _ in range(2))
    with working_in(WithOther(second)):
        check_same_plan(first)


@pytest.mark.slow
def test_a_file_that_was_written_to_is_another_one(source: Path, tmp_path: Path) -> None:
    first = digests(source, tmp_path / "x.pt")
    os.utime(source / "rank2.pt")
    told = refused(first, digests(source, tmp_path / "x.pt"))
    assert told.startswith("rank 1 has another state of the source's files than rank 0;")


@pytest.mark.slow
def test_another_option_is_another_plan(source: Path, tmp_path: Path) -> None:
    told = refused(digests(source, tmp_path / "x.pt"), digests(source, tmp_path / "x.pt", dtype="bf16"))
    assert told.startswith("rank 1 has another plan than rank 0;")


def test_another_version_says_so(source: Path, tmp_path: Path) -> None:
    own = digests(source, tmp_path / "x.pt")
    assert refused(own, own | {"ckptools": "0"}).startswith("rank 1 has another ckptools than rank 0;")


def test_another_place_of_one_tensor_is_another_plan(source: Path, tmp_path: Path) -> None:
    layout = consolidate(source, tmp_path / "x.pt", ConsolidateOptions(dry_run=True)).layout
    first, *others = layout.jobs
    moved = replace(layout, jobs=(replace(first, offset=first.offset + 64), *others))
    checkpoint = with_all_ranks(source)
    told = refused(plan_digests(checkpoint, layout, {}), plan_digests(checkpoint, moved, {}))
    assert told.startswith("rank 1 has another plan than rank 0;")
