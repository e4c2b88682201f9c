"""Real checkpoints that several tests read, each made once for the whole session."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.formats import save_local_states


@pytest.fixture(scope="session")
def local_states(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder that `save_local_states` fills."""
    out = tmp_path_factory.mktemp("local") / "out"
    save_local_states.save_all(out)
    return out
