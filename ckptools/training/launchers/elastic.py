"""torch's elastic launcher, which `torchrun` is made of: an agent per node starts the ranks and watches them."""

from __future__ import annotations

import logging
import signal
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from ckptools.cluster.process import is_loopback
from ckptools.training import worker
from ckptools.training.launchers.failures import failure_reason
from ckptools.training.launchers.job import Job
from ckptools.training.options import Created

if TYPE_CHECKING:
    from torch.distributed.launcher.api import LaunchConfig


def launch(job: Job) -> Created:
    """Start the ranks of this node, wait for them and take the answer of the first.

    Raises:
        CkptoolsError: a rank failed; it is the error that says why.
        KeyboardInterrupt: Ctrl-C; every rank has been ended.
    """
    from torch.distributed.elastic.multiprocessing import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import elastic_launch

    with tempfile.TemporaryDirectory(prefix="ckptools-") as scratch, _calm_launcher():
        answer = Path(scratch, "answer.json")
        arguments = worker.arguments(job.options, job.partial, answer, job.verbose)
        try:
            elastic_launch(_config(job, scratch), sys.executable)("-m", worker.__name__, *arguments)
        except ChildFailedError as error:
            raise failure_reason(job.options.out, error.failures) from None
        except SignalException as error:
            raise _interruption(error.sigval) from None
        return worker.from_json(answer.read_text(), job.options.out)


def _config(job: Job, scratch: str) -> LaunchConfig:
    """Say to torch what `torchrun` would; the nodes have met already, so nobody has to be waited for."""
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
    elastic = [
        logging.getLogger(name)
        for name in list(logging.root.manager.loggerDict)
        if name.startswith("torch.distributed")
    ]
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


def _interruption(number: signal.Signals) -> BaseException:
    """Say a signal the way Python and shells do: Ctrl-C as KeyboardInterrupt, others as exit code 128 + n."""
    return KeyboardInterrupt() if number == signal.SIGINT else SystemExit(128 + number)
