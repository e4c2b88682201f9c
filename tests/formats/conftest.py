"""Real checkpoints that several tests read, each made once for the whole session."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.formats import save_local_states


@pytest.fixture(scope="session")
def local_states(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder that `save_local_states` fills."""
    out = tmp_path_factory.mktemp("local") / "out"
    out.mkdir()
    subprocess.run([sys.executable, save_local_states.__file__, str(out)], check=True, timeout=200)
    return out
