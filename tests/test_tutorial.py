"""The tutorial does what it shows: it is run, and what its cells show is held against what it has."""

from __future__ import annotations

import nbformat
import pytest

from tests.documents import agrees
from tests.tutorial import TUTORIAL, executed, outputs, shown

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def ran(tmp_path_factory):
    return executed(tmp_path_factory.mktemp("tutorial"))


@pytest.fixture(scope="module")
def kept():
    return nbformat.read(TUTORIAL, as_version=4)


def test_every_cell_shows_what_the_notebook_has(ran, kept):
    now, then = shown(ran), shown(kept)
    differing = [(n, old, new) for (n, old), (_, new) in zip(then, now, strict=True) if old != new]
    assert differing == []


def test_every_answer_is_a_table_and_a_line(kept):
    tables = [n for n, _ in outputs(kept, "text/html")]
    lines = [text for n, text in outputs(kept, "text/plain") if n in tables]
    assert len(tables) > 12 and all(len(text) <= 120 for text in lines if "\n" not in text)


def test_it_is_kept_without_runs_and_machines(kept):
    text = TUTORIAL.read_text()
    assert "/tmp" not in text and "/home" not in text and "/root" not in text and "Traceback" not in text
    assert all(cell.execution_count is None and not cell.metadata for cell in kept.cells if cell.cell_type == "code")


def test_a_difference_would_be_seen():
    assert agrees("3 keys", "3 keys\n") and not agrees("3 keys", "4 keys\n")
