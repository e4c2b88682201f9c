"""How long consolidating took: opening is part of it, whoever opened."""

from __future__ import annotations

from dataclasses import replace

from ckptools.consolidate.options import ConsolidateOptions
from ckptools.consolidate.run import consolidate
from ckptools.formats.open import open_checkpoint
from tests.truth import FIXTURES

FSDP2 = FIXTURES / "torch2.4.1-fsdp2-w3"


def test_what_opening_took_is_counted_once(tmp_path):
    ck = open_checkpoint(FSDP2, all_ranks=True)
    slowly = replace(ck, cost=ck.cost._replace(seconds=1000.0))
    assert 1000 < consolidate(slowly, tmp_path / "a.pt", ConsolidateOptions()).seconds < 1100
    # Opened again in there, which the clock sees.
    one = replace(slowly, all_ranks=False)
    assert 0 < consolidate(one, tmp_path / "b.pt", ConsolidateOptions()).seconds < 100
