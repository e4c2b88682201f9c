"""The tutorial does what it shows: it is run, and what its cells show is held against what it has."""

from __future__ import annotations

import math
import re
from itertools import zip_longest

import nbformat
import pytest

from tools.documents import agrees
from tools.tutorial import TUTORIAL, executed, outputs, shown

pytestmark = pytest.mark.slow

FRACTION = re.compile(r"-?\d+\.\d+(e[+-]\d+)?")


@pytest.fixture(scope="module")
def ran(tmp_path_factory):
    return executed(tmp_path_factory.mktemp("tutorial"))


@pytest.fixture(scope="module")
def kept():
    return nbformat.read(TUTORIAL, as_version=4)


def close(old: str, new: str) -> bool:
    """Whether two lines are the same but for the last digits of fractions: each kind of processor rounds otherwise."""
    words = list(zip_longest(old.split(), new.split(), fillvalue=""))
    return all(a == b or (FRACTION.fullmatch(a) and FRACTION.fullmatch(b) and near(a, b)) for a, b in words)


def near(one: str, other: str) -> bool:
    return math.isclose(float(one), float(other), rel_tol=0.02)


def test_every_cell_shows_what_the_notebook_has(ran, kept):
    now, then = shown(ran), shown(kept)
    lines = [(n, a, b) for (n, old), (_, new) in zip(then, now, strict=True) for a, b in zip_longest(old, new)]
    assert [line for line in lines if not close(line[1] or "", line[2] or "")] == []


def test_every_answer_is_a_table_and_a_line(kept):
    tables = [n for n, _ in outputs(kept, "text/html")]
    lines = [text for n, text in outputs(kept, "text/plain") if n in tables]
    assert len(tables) > 12 and all(len(text) <= 120 for text in lines if "\n" not in text)


def test_it_is_kept_without_runs_and_machines(kept):
    text = TUTORIAL.read_text()
    assert "/tmp" not in text and "/home" not in text and "/root" not in text and "Traceback" not in text
    assert all(cell.execution_count is None and not cell.metadata for cell in kept.cells if cell.cell_type == "code")


def test_a_difference_would_be_seen():
    assert close("w [195] 0.07042 -0.002034 0", "w [195] 0.07039 -0.002031 0")
    for other in ("w [195] 0.0724 -0.002034 0", "w [195] 0.07042 0.002034 0", "w [195] 0.07042 -0.002034", "v"):
        assert not close("w [195] 0.07042 -0.002034 0", other)
    assert agrees("3 keys", "3 keys\n") and not agrees("3 keys", "4 keys\n")
