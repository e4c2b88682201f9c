"""The faults of `make mutants` name lines of the package: each must be there."""

from __future__ import annotations

from tests.mutants.__main__ import PACKAGE, ROOT
from tests.mutants.faults import FAULTS


def test_every_fault_is_in_its_file_exactly_once():
    stale = [str(f) for f in FAULTS if (ROOT / PACKAGE / f.file).read_text().count(f.old) != 1]
    assert stale == []


def test_the_tests_of_every_fault_are_there():
    named = {name.partition("::")[0] for f in FAULTS for name in f.tests}
    assert [name for name in sorted(named) if not (ROOT / name).exists()] == []
