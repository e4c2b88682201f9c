"""The two launchers that start the ranks of a node: torch's elastic one, and `torch.multiprocessing.spawn`."""

from __future__ import annotations

import logging
import os
import signal
import sys
import tempfile
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ckptools import errors
from ckptools.cluster.environment import is_loopback
from ckptools.errors import WriteError, remade
from ckptools.training import worker
from ckptools.training.nodes import Node
from ckptools.training.options import CreateOptions
from ckptools.training.output import Created

if TYPE_CHECKING:
    from torch.distributed.elastic.multiprocessing.errors import ProcessFailure
    from torch.distributed.launcher.api import LaunchConfig


@dataclass(frozen=True)
class NodeJob:
    """The ranks of one node.

    Attributes:
        options: checked, and the same on every node.
        node: this one; its rank and its port are known by now.
        counts: ranks of each node, by node rank.
        hosts: this process hosts the store where the nodes meet.
        partial: folder for files in the making.
        run_id: the same on every node.
    """

    options: CreateOptions
    node: Node
    counts: tuple[int, ...]
    hosts: bool
    partial: Path
    run_id: str
    verbose: bool


def launch(job: NodeJob) -> Created:
    """Start the ranks of this node, wait for them and take the answer of the first.

    Raises:
        CkptoolsError: a rank failed; it is the error that says why.
        KeyboardInterrupt: Ctrl-C; every rank has been ended.
    """
    start = _start_spawn if job.options.launch.launcher == "spawn" else _start_elastic
    with tempfile.TemporaryDirectory(prefix="ckptools-") as scratch:
        answer = Path(scratch, "answer.json")
        start(job, scratch, worker.arguments(job.options, job.partial, answer, job.verbose))
        return worker.from_json(answer.read_text(), job.options.out)


# -- elastic ----------------------------------------------------------------------------------------------------------


def _start_elastic(job: NodeJob, scratch: str, arguments: list[str]) -> None:
    """Start the ranks by torch's elastic launcher.

    `torchrun` is made of it: an agent per node starts the ranks and watches them.
    """
    from torch.distributed.elastic.multiprocessing import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import elastic_launch

    with _calm_launcher():
        try:
            elastic_launch(_config(job, scratch), sys.executable)("-m", worker.__name__, *arguments)
        except ChildFailedError as error:
            raise failure_reason(job.options.out, error.failures) from None
        except SignalException as error:
            # As Python and shells do: Ctrl-C is KeyboardInterrupt, other signals are exit code 128 + n.
            number = error.sigval
            raise KeyboardInterrupt if number == signal.SIGINT else SystemExit(128 + number) from None


def _config(job: NodeJob, scratch: str) -> LaunchConfig:
    """The configuration that `torchrun` would make; the nodes have met already, so there is no wait."""
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
    from torch.distributed.launcher.api import LaunchConfig

    node = job.node
    own = {"rank": node.node_rank} if node.rdzv_backend == "static" else {"is_host": job.hosts}
    return LaunchConfig(
        min_nodes=node.nnodes,
        max_nodes=node.nnodes,
        nproc_per_node=node.nproc,
        run_id=job.run_id,
        rdzv_backend=node.rdzv_backend,
        rdzv_endpoint=node.endpoint,
        rdzv_configs={**own, "timeout": int(job.options.launch.timeout) + 1},
        # The address that rank 0's node gives to the others; its own name may not be known to them.
        local_addr=node.address if job.hosts or is_loopback(node.address) else None,
        max_restarts=job.options.resuming.max_restarts,
        logs_specs=DefaultLogsSpecs(log_dir=scratch),
    )


@contextmanager
def _calm_launcher() -> Iterator[None]:
    """Silence torchelastic's own report of a failure, and take its signal handlers away afterwards."""
    names = [name for name in logging.root.manager.loggerDict if name.startswith("torch.distributed")]
    elastic = [logging.getLogger(name) for name in names]
    levels = [logger.level for logger in elastic]
    for logger in elastic:
        logger.setLevel(logging.CRITICAL + 1)
    try:
        with _signal_handlers_kept():
            yield
    finally:
        for logger, level in zip(elastic, levels, strict=True):
            logger.setLevel(level)


@contextmanager
def _signal_handlers_kept() -> Iterator[None]:
    if threading.current_thread() is not threading.main_thread():
        yield  # Only the main thread may set handlers; torchelastic does not try elsewhere either.
        return
    names = [name for name in ("SIGTERM", "SIGINT", "SIGHUP", "SIGQUIT") if hasattr(signal, name)]
    handlers = {signal.Signals[name]: signal.getsignal(signal.Signals[name]) for name in names}
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)


# -- spawn ------------------------------------------------------------------------------------------------------------


def _start_spawn(job: NodeJob, scratch: str, arguments: list[str]) -> None:
    """Start the ranks by `torch.multiprocessing.spawn`.

    The way of many tutorials: one Python process starts the ranks as its children, without an agent. They get the
    variables that the elastic launcher would set, and are not started again when one dies.
    """
    from torch.multiprocessing.spawn import ProcessExitedException, ProcessRaisedException, spawn

    variables = [_variables(job, local_rank, scratch) for local_rank in range(job.node.nproc)]
    ranks = spawn(_be_a_rank, (variables, arguments), nprocs=job.node.nproc, join=False)
    try:
        while not ranks.join():
            pass
    except (ProcessExitedException, ProcessRaisedException):
        raise failure_reason(job.options.out, _failures(ranks.processes, variables)) from None
    finally:
        # A rank has nothing to clean up.
        for process in ranks.processes:
            process.kill()
        for process in ranks.processes:
            process.join()


def _variables(job: NodeJob, local_rank: int, scratch: str) -> dict[str, str]:
    node = job.node
    first = sum(job.counts[: node.node_rank])
    return {
        "RANK": str(first + local_rank),
        "WORLD_SIZE": str(sum(job.counts)),
        "LOCAL_RANK": str(local_rank),
        "LOCAL_WORLD_SIZE": str(node.nproc),
        "GROUP_RANK": str(node.node_rank),
        "MASTER_ADDR": node.address,
        "MASTER_PORT": str(node.port),
        # The store where the nodes met stays open for the ranks: no other process can take its port in between.
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_ERROR_FILE": str(Path(scratch, f"error{local_rank}.json")),
    }


def _be_a_rank(local_rank: int, variables: list[dict[str, str]], arguments: list[str]) -> None:
    os.environ.update(variables[local_rank])
    # Not sys.exit: a gloo group that is torn down waits for its threads, and they may wait for the interpreter.
    os._exit(worker.main(arguments))


def _failures(processes: list[Any], variables: list[dict[str, str]]) -> dict[int, ProcessFailure]:
    from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

    return {
        int(own["RANK"]): ProcessFailure(
            int(own["LOCAL_RANK"]), process.pid, process.exitcode, own["TORCHELASTIC_ERROR_FILE"]
        )
        for process, own in zip(processes, variables, strict=True)
        if process.exitcode
    }


# -- failures ---------------------------------------------------------------------------------------------------------


def failure_reason(out: Path, failures: Mapping[int, ProcessFailure]) -> Exception:
    """Make an error of what the ranks died from: theirs, WriteError for a rank that was killed, or RuntimeError.

    When one rank dies, the others soon fail too, at the connection to it or by the launcher's SIGTERM. So a rank
    that another signal ended is believed first, then one that says what was wrong, then the earliest.
    """
    rank, failure = min(failures.items(), key=lambda item: _weight(item[1]))
    if failure.exitcode < 0:
        return WriteError(out, f"not written: rank {rank} was killed by {failure.signal_name()}")
    kind, _, message = _message(failure).partition(": ")
    return remade(kind, message) or RuntimeError(f"rank {rank}: {kind}: {message}".splitlines()[0])


def _weight(failure: ProcessFailure) -> tuple[bool, bool, bool, int]:
    stopped = failure.exitcode == -signal.SIGTERM
    ours = hasattr(errors, _message(failure).partition(": ")[0])
    return stopped, failure.exitcode >= 0, not ours, failure.timestamp


def _message(failure: ProcessFailure) -> str:
    recorded = failure.message
    return str(recorded["message"]) if isinstance(recorded, dict) else recorded
