from __future__ import annotations

from tests.display.made import alone, broken_run7, run7, snapshot, unread_run7


def test_a_checkpoint_is_one_line():
    assert repr(run7()) == "<Checkpoint ep0-ba12000: step 12000, 256 ranks (whole), 10 tensors, 75.3 GiB>"
    assert "256 ranks (not compared)" in repr(unread_run7())
    assert repr(broken_run7()) == "<Checkpoint ep0-ba12000: step 12000, 252 of 256 ranks, 10 tensors, 74.3 GiB>"
    assert repr(alone()) == "<Checkpoint ep0-ba12000: step 12000, 1 of 256 ranks, 10 tensors, 301.3 MiB>"
    assert repr(snapshot()) == "<Checkpoint snapshot: one file, 4 tensors, 4.0 KiB>"
