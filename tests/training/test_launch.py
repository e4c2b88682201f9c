"""From the ranks' deaths to one line, and from options to another process and back."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

from ckptools.errors import WriteError
from ckptools.training import options
from ckptools.training.launch import failure_reason
from ckptools.training.options import CreateOptions, ModelSize


def failure(tmp_path: Path, rank: int, exitcode: int, message: str = "") -> ProcessFailure:
    file = tmp_path / f"error{rank}.json"
    if message:
        file.write_text(json.dumps({"message": {"message": message, "extraInfo": {"timestamp": "1"}}}))
    return ProcessFailure(rank, pid=1, exitcode=exitcode, error_file=str(file))


def explained(*failures: ProcessFailure) -> Exception:
    return failure_reason(Path("run"), dict(enumerate(failures)))


def test_a_killed_rank_is_named_before_those_that_lost_it(tmp_path: Path) -> None:
    lost = failure(tmp_path, 0, 1, "RuntimeError: Connection closed by peer")
    error = explained(lost, failure(tmp_path, 1, -signal.SIGKILL), failure(tmp_path, 2, -signal.SIGTERM))
    assert isinstance(error, WriteError)
    assert str(error) == "run: not written: rank 1 was killed by SIGKILL"


def test_the_rank_that_knows_why_is_believed(tmp_path: Path) -> None:
    lost = failure(tmp_path, 0, 1, "RuntimeError: Connection closed by peer")
    error = explained(lost, failure(tmp_path, 1, 1, "WriteError: run: could not be written: disk full"))
    assert isinstance(error, WriteError)
    assert str(error) == "run: could not be written: disk full"


def test_a_rank_that_lost_another_is_believed_last(tmp_path: Path) -> None:
    lost = failure(tmp_path, 0, 1, "RendezvousError: rank 0 lost the connection to another rank")
    error = explained(lost, failure(tmp_path, 1, 1, "ValueError: wrong"))
    assert str(error) == "rank 1: ValueError: wrong"


def test_a_mistake_of_ours_stays_one(tmp_path: Path) -> None:
    error = explained(failure(tmp_path, 0, 1, "ValueError: wrong\nat some length"))
    assert (type(error), str(error)) == (RuntimeError, "rank 0: ValueError: wrong")


def test_options_survive_the_way_to_another_process() -> None:
    asked = CreateOptions(Path("a b"), "ddp", world_size=3, size=ModelSize(vocab=11))
    assert options.from_json(options.to_json(asked)) == asked


@pytest.mark.parametrize(
    "module",
    [
        "ckptools.training",
        "ckptools.training.launch",
        "ckptools.cluster.environment",
        "ckptools.cli.commands.create",
    ],
)
def test_torch_is_not_imported_before_it_is_needed(module: str) -> None:
    code = f"import sys, {module}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
