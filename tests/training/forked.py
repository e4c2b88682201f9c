"""Start ranks as forks of a server that has imported torch: what three seconds of imports are for each of them else.

For tests whose subject is not how ranks are started. The ranks are real processes that meet at a port, with the
variables that torchrun would set for them.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import Any

from torch.multiprocessing.spawn import ProcessContext, start_processes

from ckptools.__main__ import main
from ckptools.cluster.environment import calm_torch
from ckptools.formats import registry
from ckptools.training import create, worker
from ckptools.training.options import CreateOptions
from ckptools.training.output import Created
from tests.training.started import PATIENCE, free_port

FORMATS = [f"ckptools.formats.{one.NAME}" for one in registry.FORMATS]
PRELOADED = ["ckptools.training.rank", "torch._dynamo", "ckptools.api", *FORMATS]
"""What every rank imports, and those that go on from a checkpoint."""


def forkserver() -> ForkServerContext:
    """Start processes as forks of the server."""
    multiprocessing.set_forkserver_preload(PRELOADED)
    return multiprocessing.get_context("forkserver")


def run_ranks(world_size: int, function: Callable[..., None], *arguments: Any) -> None:
    """Call a function of a module in every rank of a world, and wait until all have returned.

    Raises:
        ProcessRaisedException: it raised in one; the others are ended.
        TimeoutError: it did not return in one.
    """
    with _started(world_size, function, arguments) as ranks:
        deadline = time.monotonic() + PATIENCE
        while not ranks.join(timeout=1):
            if time.monotonic() > deadline:
                raise TimeoutError(f"{function.__module__}: not all of {world_size} ranks ended")


def exit_codes_of_ranks(world_size: int, function: Callable[..., None], *arguments: Any) -> list[int | None]:
    """Call a function of a module in every rank of a world in which some may die; the others are not ended.

    Returns:
        The exit code of each rank, or the negative number of the signal that ended it; None if it did not end.
    """
    with _started(world_size, function, arguments) as ranks:
        deadline = time.monotonic() + PATIENCE
        for process in ranks.processes:
            process.join(max(0, deadline - time.monotonic()))
        return [process.exitcode for process in ranks.processes]


def create_forked(options: CreateOptions) -> Created:
    """Do as `create` does, in ranks that this started: what it writes is what it writes under any launcher."""
    answer = options.out.with_name(f"{options.out.name}.json")
    run_ranks(options.world_size or 1, _create, options, answer)
    return worker.from_json(answer.read_text(), options.out)


def _create(options: CreateOptions, answer: Path) -> None:
    done = create(options)
    if done.rank == 0:
        answer.write_text(worker.to_json(done))


def ckptools_forked(
    world_size: int, *arguments: object, before: Callable[[], object] | None = None
) -> subprocess.CompletedProcess[str]:
    """Run a command line in every rank, as inside of torchrun; returns the largest exit code and what all printed.

    Each rank calls `before` first.
    """
    words = ["ckptools", *map(str, arguments)]
    with tempfile.TemporaryDirectory() as folder:
        run_ranks(world_size, _be_a_command, words, Path(folder), before)
        out, err = (Path(folder, name).read_text() for name in ("out", "err"))
        code = max(int(Path(folder, f"code-{rank}").read_text()) for rank in range(world_size))
    return subprocess.CompletedProcess(words, code, out, err)


def _be_a_command(words: list[str], folder: Path, before: Callable[[], object] | None) -> None:
    for stream, name in ((1, "out"), (2, "err")):
        with (folder / name).open("a") as file:
            os.dup2(file.fileno(), stream)
    sys.argv, code = words, None
    if before:
        before()
    try:
        main()
    except SystemExit as ended:
        code = ended.code
    (folder / f"code-{os.environ['RANK']}").write_text(str(code or 0))


def _be_a_rank(rank: int, world_size: int, port: int, function: Callable[..., None], arguments: tuple[Any]) -> None:
    local = {"LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": world_size, "GROUP_RANK": 0}
    where = {"RANK": rank, "WORLD_SIZE": world_size, "MASTER_ADDR": "localhost", "MASTER_PORT": port}
    os.environ.update({name: str(value) for name, value in (where | local).items()})
    function(*arguments)


@contextlib.contextmanager
def _started(world_size: int, function: Callable[..., None], arguments: tuple[Any, ...]) -> Iterator[ProcessContext]:
    """Inside this context the ranks run; none is left behind, whatever happens."""
    forkserver()
    calm_torch()
    shared = (world_size, free_port(), function, arguments)
    ranks = start_processes(_be_a_rank, shared, world_size, join=False, daemon=True, start_method="forkserver")
    try:
        yield ranks
    finally:
        for process in ranks.processes:
            process.kill()
            process.join()
