"""The fuzz targets on their own seeds, and on every input that once failed (`regressions/<target>/`)."""

from __future__ import annotations

from pathlib import Path

import pytest

from tools.fuzz.targets import TARGETS, seeds

REGRESSIONS = Path(__file__).parent / "regressions"


@pytest.mark.parametrize("name", TARGETS)
def test_a_target_takes_its_seeds_and_their_pieces(name):
    target, _ = TARGETS[name]
    found = seeds(name)
    for data in found[:: max(len(found) // 8, 1)]:
        target(data)
        target(data[: len(data) // 2])
    assert len(found) > 5


@pytest.mark.parametrize("path", sorted(REGRESSIONS.glob("*/*")), ids=lambda p: f"{p.parent.name}-{p.name}")
def test_what_once_failed_is_read_or_refused(path):
    TARGETS[path.parent.name][0](path.read_bytes())
