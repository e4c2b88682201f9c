"""The commands of the page of `create` print what it shows.

It starts a dozen trainings, more than any other page: a process of its own can run it.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tools.documents import TRAINING, printed_otherwise


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_every_command_of_the_page_prints_what_the_page_shows(tmp_path: Path) -> None:
    assert printed_otherwise(TRAINING, tmp_path) == []
