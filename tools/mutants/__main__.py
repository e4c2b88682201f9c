"""`make mutants`: put faults at random into a copy of the package, one at a time; do the tests of that line notice?

    python -m tools.mutants --sample 200 --seed 7 [ckptools/verify ckptools/model/tensor.py]

A line is drawn, then one of the operators that fit it, then one of its changes: a line with a long call counts as
much as a guard. A fault is noticed where a test fails that passes without it, or hangs.
"""

from __future__ import annotations

import argparse
import difflib
import gc
import multiprocessing
import os
import random
import resource
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

# Imported once here, and not by each of the processes that are forked.
import hypothesis  # noqa: F401
import pytest
import torch  # noqa: F401
import typer.testing  # noqa: F401

from tools.mutants.covering import KEPT, PACKAGE, ROOT, Recording, copied, record

ROOMS = (
    "tensor_io", "training_state", "rules", "formats", "keys", "display", "inspect", "verify", "stats", "diff", "match",
    "consolidate", "contents", "ls", "plots.py", "doctor", "report", "api",
)  # fmt: skip
ENOUGH = 0.85
PROCESSES = 2
SECONDS = 120.0
"""Of tests, as long as they took when they were recorded: so many are tried on each fault, the cheapest first."""

ONE_TEST = 60
"""Seconds after which one test is taken for hanging, plus ten times what it took."""

MEMORY = 8 << 30
"""Bytes that a process may hold: a fault in a length must not take those of the machine."""


@dataclass(frozen=True)
class Fault:
    """One fault in one module.

    Attributes:
        file: below the repository.
        line: that has it.
        kind: the operator.
        code: the module with the fault.
    """

    file: Path
    line: int
    kind: str
    code: str

    @property
    def room(self) -> str:
        return self.file.parts[1]

    def __str__(self) -> str:
        """The change as a diff without context."""
        before = (ROOT / self.file).read_text().splitlines()
        changed = list(difflib.unified_diff(before, self.code.splitlines(), lineterm="", n=0))[3:]
        return "\n".join([f"{self.file}:{self.line} ({self.kind})", *changed])


@dataclass(frozen=True)
class Verdict:
    """What became of a fault.

    Attributes:
        fault: that was tried.
        noticed: whether a test failed, or hung.
        why: the test, or how many passed of those that run the line.
        seconds: that it took.
    """

    fault: Fault
    noticed: bool
    why: str
    seconds: float

    def __str__(self) -> str:
        word = "noticed" if self.noticed else "SURVIVED"
        return f"{word:8} {self.seconds:4.0f} s  {self.fault.file}:{self.fault.line} {self.fault.kind}: {self.why}"


def drawn(files: Sequence[Path], size: int, seed: int) -> list[Fault]:
    """So many different faults, drawn at random from some modules."""
    from tools.mutants.faults import faults_by_line  # libcst takes a third of a second, and not all need it

    chance = random.Random(seed)
    texts = {file: (ROOT / file).read_text() for file in files}
    places = [(file, line) for file, text in texts.items() for line in range(1, text.count("\n") + 1)]
    chance.shuffle(places)
    known = {}
    found: list[Fault] = []
    for file, line in places:
        if file not in known:
            known[file] = faults_by_line(texts[file])
        kinds = known[file].get(line)
        if kinds:
            kind = chance.choice(sorted(kinds))
            found.append(Fault(file, line, kind, chance.choice(kinds[kind])()))
        if len(found) == size:
            break
    return found


def chosen(
    fault: Fault, recordings: Sequence[Recording], unfit: frozenset[str] = frozenset()
) -> tuple[dict[str, float], int]:
    """The tests to try with their seconds, and how many run the line; each function once before any of them twice."""
    covering = {t: r.seconds[t] for r in recordings for t in r.tests_of(fault.file, fault.line)}
    seconds = {test: taken for test, taken in covering.items() if function_of(test) not in unfit}
    by_function = defaultdict(list)
    for test in sorted(seconds, key=lambda t: (seconds[t], t)):
        by_function[function_of(test)].append(test)
    order = sorted(seconds, key=lambda t: (by_function[function_of(t)].index(t), seconds[t], t))
    taken: dict[str, float] = {}
    for test in order:
        if taken and sum(taken.values()) + seconds[test] > SECONDS:
            break
        taken[test] = seconds[test]
    return taken, len(seconds)


def function_of(test: str) -> str:
    """A test without its parameters."""
    return test.partition("[")[0]


class Chosen:
    """A plugin of pytest: of what is collected only some tests, file by file, the cheapest first."""

    def __init__(self, tests: dict[str, float], output: Path) -> None:
        self.tests, self.output = tests, output

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        cheapest: dict[str, float] = {}
        for test, seconds in self.tests.items():
            file = test.partition("::")[0]
            cheapest[file] = cheapest.get(file, 0.0) + seconds
        kept = [item for item in items if item.nodeid in self.tests]
        items[:] = sorted(kept, key=lambda i: (cheapest[i.nodeid.partition("::")[0]], self.tests[i.nodeid]))
        for item in items:
            item.add_marker(pytest.mark.timeout(ONE_TEST + 10 * self.tests[item.nodeid]))

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._note(report, report.nodeid)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        self._note(report, f"{report.nodeid} cannot be imported")

    def _note(self, report: pytest.TestReport | pytest.CollectReport, words: str) -> None:
        if report.failed:
            with self.output.open("a") as file:
                file.write(f"{words}\n")


_tree: Path
_recordings: list[Recording]


def settle(scratch: str, recordings: list[Recording]) -> None:
    """Give this process a tree of its own."""
    global _tree, _recordings
    _tree, _recordings = copied(Path(scratch) / str(os.getpid()) / "tree"), recordings


def tried(work: tuple[Fault, frozenset[str]]) -> Verdict:
    """Put a fault into this process's tree, run the tests but for those that are unfit, and mend the tree."""
    (fault, unfit), started = work, time.monotonic()
    tests, covering = chosen(fault, _recordings, unfit)
    file = _tree / fault.file
    healthy = file.read_text()
    try:
        _write(file, fault.code)
        failed = next(iter(failing(_tree, tests)), "") if tests else ""
    finally:
        _write(file, healthy)
    first = dict(list(tests.items())[:1])
    noticed = failed in tests or (bool(failed) and not failing(_tree, first))
    passed = f"{len(tests)} of {covering} tests pass" if covering else "no test runs this line"
    return Verdict(fault, noticed, failed or passed, time.monotonic() - started)


def unfit_among(tests: set[str]) -> set[str]:
    """Those that fail without a fault."""
    return tests & set(failing(_tree, dict.fromkeys(tests, 1.0), all_of_them=True)) if tests else set()


def failing(tree: Path, tests: dict[str, float], all_of_them: bool = False) -> list[str]:
    """The first test that fails in a tree, or all; how pytest ends otherwise; nothing where all is well."""
    output = tree.parent / "failed"
    output.write_text("")
    gc.freeze()  # pytest collects garbage at its end: torch's objects are none
    child = os.fork()
    if child == 0:
        try:
            code = _tested(tree, tests, output, [] if all_of_them else ["-x"])
        except BaseException:
            code = pytest.ExitCode.INTERNAL_ERROR
        os._exit(int(code))
    limit = time.monotonic() + 10 * sum(tests.values()) + 3 * ONE_TEST
    while True:
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            code = os.waitstatus_to_exitcode(status)
            return output.read_text().splitlines() or ([f"pytest ends with {code}"] if code else [])
        if time.monotonic() > limit:
            os.killpg(child, signal.SIGKILL)
            os.waitpid(child, 0)
            return ["hangs"]
        time.sleep(0.05)


def _tested(tree: Path, tests: dict[str, float], output: Path, options: list[str]) -> int:
    os.setsid()
    resource.setrlimit(resource.RLIMIT_DATA, (MEMORY, MEMORY))
    log = os.open(tree.parent / "output", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.chdir(tree)
    os.environ.update(PYTHONPATH=str(tree), CI="1")  # hypothesis then tries the same examples each time
    sys.path[:] = [str(tree), *(p for p in sys.path if p not in ("", str(ROOT)))]
    for name in [n for n in sys.modules if n.partition(".")[0] in (PACKAGE, "tests", "tools")]:
        del sys.modules[name]
    sys.modules["__main__"].__spec__ = None  # what tests spawn would run this module again
    multiprocessing.current_process()._config["daemon"] = False  # daemons may start none
    files = sorted({test.partition("::")[0] for test in tests})
    options = [*options, "-q", "-n", "0", f"--basetemp={tree.parent / 'tmp'}"]
    options += [word for name in ("cacheprovider", "anyio", "hypothesispytest") for word in ("-p", f"no:{name}")]
    return pytest.main([*options, *files], plugins=[Chosen(tests, output)])


def _write(file: Path, text: str) -> None:
    """Write a module, and remove its compiled form: one of another text, as long and as old, would be taken for it."""
    file.write_text(text)
    for compiled in (file.parent / "__pycache__").glob(f"{file.stem}.*"):
        compiled.unlink()


def judged(faults: Sequence[Fault]) -> Iterator[Verdict]:
    """Try all faults, in two processes; once more where the test that failed does so without the fault too."""
    scratch = tempfile.mkdtemp(prefix="ckptools-mutants-")
    left, unfit = list(faults), frozenset[str]()
    try:
        with multiprocessing.Pool(PROCESSES, settle, (scratch, Recording.all())) as pool:
            while left:
                found = []
                for verdict in pool.imap_unordered(tried, [(fault, unfit) for fault in left]):
                    print(verdict, flush=True)
                    found.append(verdict)
                bad = pool.apply(unfit_among, ({v.why for v in found if "::" in v.why},))
                print(*(f"fails without a fault: {test}\n" for test in sorted(bad)), sep="", end="")
                # All parameters of a test that fails so, at once: each round takes minutes.
                unfit |= {function_of(test) for test in bad}
                yield from (v for v in found if function_of(v.why) not in unfit)
                left = [v.fault for v in found if function_of(v.why) in unfit]
    finally:
        shutil.rmtree(scratch)


def report(verdicts: Iterable[Verdict]) -> int:
    """Print the faults that survived, and the figures by room."""
    noticed, survivors = Counter[str](), []
    for verdict in verdicts:
        if verdict.noticed:
            noticed[verdict.fault.room] += 1
        else:
            survivors.append(verdict)
    survived = Counter(v.fault.room for v in survivors)
    for verdict in survivors:
        print(f"\n{verdict.fault}\n  {verdict.why}")
    print()
    for room in sorted({*noticed, *survived}):
        print(f"{room:15} {noticed[room]:4} noticed {survived[room]:4} survived")
    share = noticed.total() / max(noticed.total() + survived.total(), 1)
    print(f"{'all':15} {noticed.total():4} noticed {survived.total():4} survived   {share:.0%}")
    return 0 if share >= ENOUGH else 1


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("modules", nargs="*", help="files or folders of the package")
    parser.add_argument("--sample", type=int, default=200)
    parser.add_argument("--seed", type=int, default=7)
    given = parser.parse_args()
    paths = [ROOT / name for name in given.modules or [f"{PACKAGE}/{room}" for room in ROOMS]]
    missing = [str(path) for path in paths if not path.exists()]
    if missing:
        parser.error(f"not there: {', '.join(missing)}")
    if not KEPT.exists():
        print("recording which tests run which line: half an hour", flush=True)
        record([])
    files = sorted({f.relative_to(ROOT) for path in paths for f in ([path] if path.is_file() else path.rglob("*.py"))})
    print(f"{given.sample} faults, seed {given.seed}, in {len(files)} modules", flush=True)
    return report(judged(drawn(files, given.sample, given.seed)))


if __name__ == "__main__":
    sys.exit(main())
