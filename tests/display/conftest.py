"""Golden outputs: `CKPTOOLS_REWRITE_GOLDEN=1 pytest tests/display` rewrites them; then read the diff."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

GOLDEN = Path(__file__).parent / "golden"


@pytest.fixture(autouse=True)
def utc(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """File times are shown in the local zone."""
    monkeypatch.setenv("TZ", "UTC")
    time.tzset()
    yield
    monkeypatch.undo()
    time.tzset()


@pytest.fixture
def golden() -> Callable[[str, str], None]:
    """Compare a text with the file of that name."""

    def compare(name: str, text: str) -> None:
        file = GOLDEN / name
        if os.environ.get("CKPTOOLS_REWRITE_GOLDEN"):
            file.write_text(text + "\n", encoding="utf-8")
        assert text + "\n" == file.read_text(encoding="utf-8")

    return compare
