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

from ckptools.training import options as choices
from ckptools.training import worker
from ckptools.training.launchers.failures import failure_reason
from ckptools.training.options import Created, CreateOptions


def launch(options: CreateOptions, partial: Path, run_id: str, verbose: bool) -> Created:
    """Start the ranks, wait for them and take the answer of rank 0.

    Raises:
        CkptoolsError: a rank failed; it is the error that says why.
        KeyboardInterrupt: Ctrl-C; every rank has been ended.
    """
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    with tempfile.TemporaryDirectory(prefix="ckptools-") as scratch, _calm_launcher():
        config = LaunchConfig(
            min_nodes=1,
            max_nodes=1,
            nproc_per_node=options.world_size or 1,
            run_id=run_id,
            rdzv_backend="c10d",
            rdzv_endpoint="localhost:0",
            local_addr="localhost",
            max_restarts=options.resuming.max_restarts,
            logs_specs=DefaultLogsSpecs(log_dir=scratch),
        )
        answer = Path(scratch, "answer.json")
        arguments = (choices.to_json(options), str(partial), str(answer), "loud" if verbose else "quiet")
        try:
            elastic_launch(config, sys.executable)("-m", worker.__name__, *arguments)
        except ChildFailedError as error:
            raise failure_reason(options.out, error) from None
        except SignalException as error:
            raise _interruption(error.sigval) from None
        return worker.from_json(answer.read_text(), options.out)


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
