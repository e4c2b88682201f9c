"""Which tests run a line, and how long each takes: recorded once with coverage's contexts, and kept in `.mutants`.

As a plugin of pytest (`-p tools.mutants.covering`) this names the test that is running, for its process and for the
processes that it starts. What a fixture of a module or session runs is counted for all tests of the file.
"""

from __future__ import annotations

import ast
import difflib
import functools
import json
import os
import shutil
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import coverage
import pytest

ROOT = Path(__file__).parent.parent.parent
PACKAGE = "ckptools"
KEPT = ROOT / ".mutants"
COPIED = (PACKAGE, "tests", "tools", "docs", "pyproject.toml", "README.md", "Makefile", "constraints.txt")
NAME, RESULTS = "CKPTOOLS_TEST", "CKPTOOLS_TEST_RESULTS"
SETTINGS = f"""[run]
source_pkgs = {{package}}
data_file = {{folder}}/coverage
parallel = true
sigterm = true
disable_warnings = no-data-collected, module-not-imported, module-not-measured, couldnt-parse
context = ${{{{{NAME}-}}}}
"""


def copied(tree: Path) -> Path:
    """A copy of what the tests need; fixtures are read only, so a link will do."""
    tree.mkdir(parents=True)
    for name in COPIED:
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, tree / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(source, tree)
    (tree / "fixtures").symlink_to(ROOT / "fixtures")
    return tree


def record(paths: Sequence[str]) -> None:
    """Run the tests below some paths in a copy of the working tree, and keep which lines each of them ran."""
    folder = KEPT / f"{len(list(KEPT.glob('[0-9]*'))):03}"
    tree = copied(folder / "tree")
    (folder / "settings").write_text(SETTINGS.format(folder=folder, package=PACKAGE))
    environment = {**os.environ, "CI": "1", "PYTHONPATH": str(tree), RESULTS: str(folder / "tests.json")}
    environment["COVERAGE_PROCESS_START"] = str(folder / "settings")
    command = [sys.executable, "-m", "pytest", "-n", "2", "--dist", "loadfile", "-p", "tools.mutants.covering", *paths]
    options = ["-p", "no:cacheprovider", "-m", "not slow", "-o", "timeout=1200"]
    subprocess.run(
        [*command, *options], cwd=tree, env={**environment, RESULTS: str(folder / "tests.json")}, check=False
    )
    data = coverage.Coverage(data_file=folder / "coverage", config_file=False)
    data.combine([str(folder)])
    data.save()
    for name in ("tests", "tools"):
        shutil.rmtree(tree / name)


class Recorder:
    """Tell coverage which test is running, and keep each test's seconds and outcome."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)
        self.failed: set[str] = set()

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        _switch(item.nodeid)
        return (yield)

    @pytest.hookimpl(wrapper=True)
    def pytest_fixture_setup(self, fixturedef: Any, request: Any) -> Iterator[None]:
        before = os.environ.get(NAME, "")
        if fixturedef.scope != "function":
            _switch(before.partition("::")[0])
        try:
            return (yield)
        finally:
            _switch(before)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.seconds[report.nodeid] += report.duration
        if not report.passed:
            self.failed.add(report.nodeid)

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if not hasattr(session.config, "workerinput"):
            passed = {name: round(s, 3) for name, s in self.seconds.items() if name not in self.failed}
            Path(os.environ[RESULTS]).write_text(json.dumps(passed))


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(Recorder())


def _switch(context: str) -> None:
    os.environ[NAME] = context
    running = coverage.Coverage.current()
    if running is not None:
        running.switch_context(context)


@dataclass(frozen=True)
class Recording:
    """What one run of the tests has recorded.

    Attributes:
        folder: below `.mutants`.
        seconds: of each test that passed.
    """

    folder: Path
    seconds: dict[str, float]

    @classmethod
    def all(cls) -> list[Recording]:
        """Every recording, newest first; a test file's tests are those of the newest that has it."""
        found: list[Recording] = []
        taken: set[str] = set()
        for folder in sorted((path.parent for path in KEPT.glob("*/coverage")), reverse=True):
            seconds = json.loads((folder / "tests.json").read_text())
            found.append(cls(folder, {t: s for t, s in seconds.items() if t.partition("::")[0] not in taken}))
            taken |= {t.partition("::")[0] for t in seconds}
        return found

    def tests_of(self, file: Path, line: int) -> set[str]:
        """The tests that ran a line of a file as it is now; where it is in no function, those that ran any that is."""
        old = self.folder / "tree" / file
        if not old.exists():
            return set()
        before, now = old.read_text(), (ROOT / file).read_text()
        moved = _moved(before.splitlines(), now.splitlines())
        function, statement = _function_at(now, line), _statement_at(now, line)
        if function:
            wanted = {moved[n] for n in statement if n in moved} or {moved[n] for n in function if n in moved}
        else:  # is run when it is imported, by whichever test comes first
            wanted = {n for found in _functions(before) for n in found}
        ran = self._ran(file)
        names = {name for number in wanted for name in ran.get(number, ())}
        files = {name for name in names if "::" not in name}
        return {t for t in self.seconds if t in names or t.partition("::")[0] in files}

    @functools.cached_property
    def _data(self) -> coverage.CoverageData:
        data = coverage.CoverageData(basename=str(self.folder / "coverage"))
        data.read()
        return data

    def _ran(self, file: Path) -> dict[int, list[str]]:
        return self._data.contexts_by_lineno(str(self.folder / "tree" / file))


def _moved(old: Sequence[str], new: Sequence[str]) -> dict[int, int]:
    """Lines that are the same in both, new to old, counted from 1."""
    blocks = difflib.SequenceMatcher(None, old, new, autojunk=False).get_matching_blocks()
    return {b.b + i + 1: b.a + i + 1 for b in blocks for i in range(b.size)}


def _functions(source: str) -> Iterator[range]:
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield range(node.body[0].lineno, (node.end_lineno or node.lineno) + 1)


def _function_at(source: str, line: int) -> range:
    """The lines of the innermost function that has a line."""
    return min((found for found in _functions(source) if line in found), key=len, default=range(0))


def _statement_at(source: str, line: int) -> range:
    """The lines of the innermost statement that reaches a line; of a compound one its head."""
    found = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.stmt) and node.lineno <= line]
    node: Any = max(found, key=lambda node: node.lineno)
    end = node.body[0].lineno if getattr(node, "body", None) else node.end_lineno + 1
    return range(node.lineno, max(end, node.lineno + 1))


if __name__ == "__main__":
    record(sys.argv[1:])
