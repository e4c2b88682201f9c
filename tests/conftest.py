"""A test that was skipped tested nothing: skips are counted, and one that nobody gave a reason for fails the run."""

from __future__ import annotations

import functools
import gc
import os
import re
import signal
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import pytest
from hypothesis import settings
from typer.main import get_command

from ckptools.formats import options

if TYPE_CHECKING:
    from tests.object_store import Bucketful

SKIPS = {
    "needs a device that is always full": "/dev/full is Linux's",
    "no /proc/self/io here": "how many bytes a process has read is told by Linux",
    "this machine lets nobody mount a small disk": "mounting needs user namespaces, which a container may forbid",
    r"no (gzip|bzip2|xz|lzma|zstd|lz4) here": "the packers' own command lines are no Python packages",
    r"could not import 'peft': .*": "it is one of the group `frameworks`; what it saved and merged is compared anyway",
    r"could not import 'torchtitan': .*": "it would bring datasets and wandb; its state dict is filled anyway",
    "no Chromium here": "browsers are in no package index; CI installs one where it can",
    r"torch 2\.[6-9]\.\S+ has no \w+": "what the oldest torch cannot write, or compute beside us, a newer one does",
}
"""Patterns of reasons to skip that a machine may give, and why the tests cannot bring along what is missing."""


LONGEST_FIRST = (
    "tests/training/test_matrix.py",
    "tests/loading/test_matrix.py",
    "tests/damage/test_matrix.py",
    "tests/damage/test_net.py",
    "tests/test_training_guide.py",
    "tests/test_documents.py",
    "tests/transcripts/test_transcripts.py",
    "tests/browse/test_keys.py",
    "tests/training/test_two_nodes.py",
    "tests/browse/test_hostile.py",
    "tests/damage/test_in_a_bucket.py",
    "tests/cluster/test_consolidate.py",
    "tests/hostile/test_corpus.py",
    "tests/browse/test_tabs.py",
    "tests/training/test_restart.py",
    "tests/cli/test_json_schemas.py",
    "tests/browse/test_terminal.py",
    "tests/test_tutorial.py",
    "tests/formats/test_contract_in_a_bucket.py",
    "tests/consolidate/test_crashes.py",
    "tests/ls/test_run_folder.py",
    "tests/consolidate/test_upload.py",
    "tests/watch/test_command.py",
    "tests/training/test_launchers.py",
    "tests/training/test_damage.py",
    "tests/loading/test_trainers.py",
    "tests/training/test_frameworks.py",
    "tests/training/test_resume.py",
    "tests/verify/test_flipped_bits.py",
    "tests/training/test_strategies_fsdp.py",
    "tests/watch/test_callbacks.py",
)
"""Files whose tests take longest: begun last, one would keep one process busy after the others have ended.

Those that wait for a screen, a clock or other processes stand between those that compute, so that the cores are busy.
"""


@dataclass(eq=False)
class Skips:
    """Reasons of the tests that were skipped; reports come here from every process that runs tests."""

    counted: Counter[str] = field(default_factory=Counter)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.skipped:
            self.counted[_reason(report)] += 1


def pytest_configure(config: pytest.Config) -> None:
    # An example takes as long as it takes: beside other work a deadline of hypothesis fails what is right.
    settings.register_profile("ckptools", settings.get_profile(settings.get_current_profile_name()), deadline=None)
    settings.load_profile("ckptools")
    # `nohup make test &`: a shell ignores Ctrl-C for what it starts in the background, and tests' processes would too.
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    config.pluginmanager.register(Skips(), "skips")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers() -> int | None:
    """Two processes more than there are cores: these wait most of the time, for ranks that start or for a clock."""
    return None if "PYTEST_XDIST_AUTO_NUM_WORKERS" in os.environ else (os.cpu_count() or 1) + 2


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    order = {name: place for place, name in enumerate(LONGEST_FIRST)}
    items.sort(key=lambda item: order.get(item.nodeid.partition("::")[0], len(order)))


def pytest_collection_finish() -> None:
    """Search for cycles seldom, as `ckptools.__main__` does, and never among what was collected."""
    gc.freeze()
    gc.set_threshold(100_000)


@pytest.fixture(autouse=True, scope="session")
def state_home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """What `watch` remembers is kept for these tests alone."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_STATE_HOME", str(tmp_path_factory.mktemp("state")))
        yield


@pytest.fixture
def large_world(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every world counts as one of so many ranks that not all are read without being asked to."""
    monkeypatch.setattr(options, "MAX_RANKS", 0)


@pytest.fixture(autouse=True, scope="session")
def commands_are_made_once() -> Iterator[None]:
    """`CliRunner` lets typer make all commands from their signatures for each call; many an `inspect` is as short."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("typer.testing._get_command", functools.cache(get_command))
        yield


def pytest_collectreport(report: pytest.CollectReport) -> None:
    """A module that skips itself as a whole is worse than a test that does: it is not even counted."""
    if report.skipped:
        pytest.fail(f"{report.nodeid} skips itself as a whole: {_reason(report)}")


def _reason(report: pytest.TestReport | pytest.CollectReport) -> str:
    text = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
    return str(text).removeprefix("Skipped: ")


def _counted(config: pytest.Config) -> Counter[str]:
    return config.pluginmanager.get_plugin("skips").counted  # type: ignore[union-attr, no-any-return]


def unlisted(reasons: Counter[str]) -> list[str]:
    """Reasons of tests that were skipped and that `SKIPS` does not have."""
    return sorted(reason for reason in reasons if not any(re.fullmatch(pattern, reason) for pattern in SKIPS))


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    if exitstatus == pytest.ExitCode.OK and unlisted(_counted(session.config)):
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    counted = _counted(config)
    bad = unlisted(counted)
    for reason, count in sorted(counted.items()):
        verdict = "FAILED: not among the reasons in tests/conftest.py" if reason in bad else "listed"
        terminalreporter.write_line(f"skipped {count}: {reason} ({verdict})")


@pytest.fixture(scope="session")
def s3() -> Iterator[Bucketful]:
    """A bucket of a local S3 server."""
    from tests.object_store import Bucketful, s3_server

    with s3_server() as address:
        yield Bucketful(address)


@pytest.fixture
def bucket(s3: Bucketful, monkeypatch: pytest.MonkeyPatch) -> Bucketful:
    """That bucket, with the environment of a user who may read it."""
    from tests.object_store import settings

    for name, value in settings(s3.address).items():
        monkeypatch.setenv(name, value)
    return s3
