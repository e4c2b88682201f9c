"""`make mutants`: put one fault at a time into a copy of the package, and see whether the tests notice it.

    python -m tests.mutants regions merge

tries the faults whose file or text holds one of the words. The working tree is only copied. A fault whose text is not
in its file exactly once fails the run, for it would try nothing; one whose tests fail without it is not tried.
"""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

# Imported once here, and not by each of the processes that are forked.
import hypothesis  # noqa: F401
import pytest
import typer.testing  # noqa: F401

from tests.mutants.faults import FAULTS, Fault

ROOT = Path(__file__).parent.parent.parent
PACKAGE = "ckptools"
COPIED = (PACKAGE, "tests", "pyproject.toml", "README.md", "Makefile", "constraints.txt")
SECONDS = 120
"""For one test; a fault that makes it hang so long is noticed."""


def main(words: Sequence[str]) -> int:
    wanted = [f for f in FAULTS if not words or any(word in f.file or word in f.old for word in words)]
    stale = [f for f in wanted if (ROOT / PACKAGE / f.file).read_text().count(f.old) != 1]
    for fault in stale:
        print(f"DOES NOT APPLY  {fault}")
    if stale or not wanted:
        print(f"{len(stale)} of {len(wanted)} faults are not in their file exactly once; mend tests/mutants/faults.py")
        return 2
    with tempfile.TemporaryDirectory(prefix="ckptools-mutants-") as scratch:
        return judge(copied(Path(scratch) / "tree"), wanted)


def copied(tree: Path) -> Path:
    """A copy of what the tests need; fixtures are read only, so a link will do."""
    tree.mkdir()
    for name in COPIED:
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, tree / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(source, tree)
    (tree / "fixtures").symlink_to(ROOT / "fixtures")
    return tree


def judge(tree: Path, faults: Sequence[Fault]) -> int:
    """Try every fault in a tree; tell which survived, and how many were noticed."""
    healthy: dict[tuple[str, ...], bool] = {}
    counted: Counter[str] = Counter()
    for fault in faults:
        started = time.monotonic()
        if fault.tests not in healthy:
            healthy[fault.tests] = passes(tree, fault.tests)
            if not healthy[fault.tests]:
                print(f"fails without a fault: {' '.join(fault.tests)}\n{_output(tree).read_text()[-3000:]}")
        found = "not tried" if not healthy[fault.tests] else "noticed" if noticed(tree, fault) else "SURVIVED"
        counted[found] += 1
        print(f"{found:9} {time.monotonic() - started:4.0f} s  {fault}", flush=True)
    print(f"{counted['noticed']} of {len(faults)} faults noticed, {counted['not tried']} not tried")
    return 0 if counted["noticed"] == len(faults) else 2 if counted["not tried"] else 1


def noticed(tree: Path, fault: Fault) -> bool:
    """Whether the fault's tests fail with it in a tree, which is mended afterwards."""
    file = tree / PACKAGE / fault.file
    text = file.read_text()
    try:
        _write(file, text.replace(fault.old, fault.new))
        return not passes(tree, fault.tests)
    finally:
        _write(file, text)


def _write(file: Path, text: str) -> None:
    """Write a module, and remove its compiled form: one of another text, as long and as old, would be taken for it."""
    file.write_text(text)
    for compiled in (file.parent / "__pycache__").glob(f"{file.stem}.*"):
        compiled.unlink()


def passes(tree: Path, tests: Sequence[str]) -> bool:
    """Whether pytest passes in a tree, in a process of its own; the package that it imports is the tree's."""
    child = os.fork()
    if child == 0:
        try:
            code = _tested(tree, tests)
        except BaseException:
            code = pytest.ExitCode.INTERNAL_ERROR
        os._exit(int(code))
    _, status = os.waitpid(child, 0)
    return os.waitstatus_to_exitcode(status) == pytest.ExitCode.OK


def _tested(tree: Path, tests: Sequence[str]) -> int:
    output = os.open(_output(tree), os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.chdir(tree)
    os.environ["PYTHONPATH"] = str(tree)
    sys.path[:] = [str(tree), *(p for p in sys.path if p not in ("", str(ROOT)))]
    for name in [n for n in sys.modules if n.partition(".")[0] in (PACKAGE, "tests")]:
        del sys.modules[name]
    # What interrupts and kills does so after some time, which a busy machine may not take for the same.
    options = ["-x", "-q", "-p", "no:cacheprovider", "-o", f"timeout={SECONDS}", "-k", "not interrupt and not kill"]
    return pytest.main([*options, *tests])


def _output(tree: Path) -> Path:
    return tree.parent / "output"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
