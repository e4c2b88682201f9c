"""Start the ranks through torch's elastic launcher, or be one of them where a launcher did that already."""

from __future__ import annotations

import dataclasses
import logging
import os
import signal
import sys
import tempfile
import threading
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from ckptools import errors
from ckptools.errors import CkptoolsError, UsageError, WriteError
from ckptools.training import options as choices
from ckptools.training import output, worker
from ckptools.training.options import Created, CreateOptions

if TYPE_CHECKING:
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

DEFAULT_WORLD_SIZE = 4


def create(options: CreateOptions, verbose: bool = False) -> Created:
    """Train for real and save a checkpoint.

    Args:
        options: what to train and how to save it.
        verbose: rank 0 writes a line per step to stdout.

    Returns:
        The files, the losses and the world size.

    Raises:
        UsageError: the options do not fit together, or not with the outer torchrun.
        OutputExistsError: the folder holds a checkpoint already, and `force` is off.
        WriteError: a rank died, or a file could not be written.
    """
    options = options.completed()
    if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
        return _be_a_rank(options, verbose)
    if options.world_size is None:
        options = dataclasses.replace(options, world_size=DEFAULT_WORLD_SIZE)
    _check(options)
    run_id = uuid.uuid4().hex
    with output.open_partial_folder(options.out, run_id) as partial:
        return _launch(options, partial, run_id, verbose)


def _check(options: CreateOptions) -> None:
    choices.check(options)
    _check_torch(options)
    output.refuse_existing(options.out, options.force)


def _check_torch(options: CreateOptions) -> None:
    """Refuse FSDP2 where torch can do it on GPUs only: up to 2.6 it asks for streams, which a CPU does not have."""
    import torch

    if options.strategy == "fsdp2" and not hasattr(torch.cpu.Stream, "record_event"):
        text = f"--strategy fsdp2 on a CPU needs a later torch than {torch.__version__}; fsdp1 and ddp do not"
        raise UsageError(None, text)


def _be_a_rank(options: CreateOptions, verbose: bool) -> Created:
    """Train as the rank that an outer torchrun started.

    Only rank 0 looks for mistakes. The others would find the same ones and say them again; they wait in the
    rendezvous instead, until torchrun sees that rank 0 is gone and ends them.
    """
    worker.prepare_process()
    from ckptools.training.rank import say_nothing, train_and_save

    say = worker.say if verbose else say_nothing
    run_id = os.environ.get("TORCHELASTIC_RUN_ID", "run")
    if os.environ["RANK"] != "0":
        return train_and_save(options, output.partial_folder(options.out, run_id), say)
    _check_world(options)
    _check(options)
    with output.open_partial_folder(options.out, run_id) as partial:
        return train_and_save(options, partial, say)


def _check_world(options: CreateOptions) -> None:
    started = int(os.environ["WORLD_SIZE"])
    if options.world_size not in (None, started):
        raise UsageError(
            None, f"--world-size is {options.world_size}, but torchrun started {started} ranks; leave it out"
        )


def _launch(options: CreateOptions, partial: Path, run_id: str, verbose: bool) -> Created:
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    with tempfile.TemporaryDirectory(prefix="ckptools-") as scratch, _calm_launcher():
        config = LaunchConfig(
            min_nodes=1,
            max_nodes=1,
            nproc_per_node=options.world_size or DEFAULT_WORLD_SIZE,
            run_id=run_id,
            rdzv_backend="c10d",
            rdzv_endpoint="localhost:0",
            local_addr="localhost",
            max_restarts=0,
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


def failure_reason(out: Path, error: ChildFailedError) -> Exception:
    """Make one line of what the ranks died from.

    When one rank dies, the others soon fail too, at the connection to it or by the launcher's SIGTERM. So a rank
    that another signal ended is believed first, then one that says what was wrong, then the earliest.

    Returns:
        The ckptools error that the rank raised, WriteError for a rank that was killed, RuntimeError for a
        mistake in ckptools.
    """
    rank, failure = min(error.failures.items(), key=lambda item: _weight(item[1]))
    if failure.exitcode < 0:
        return WriteError(out, f"not written: rank {rank} was killed by {failure.signal_name()}")
    kind, _, message = _message(failure).partition(": ")
    known = getattr(errors, kind, None)
    if isinstance(known, type) and issubclass(known, CkptoolsError):
        return known(None, message)
    return RuntimeError(f"rank {rank}: {kind}: {message}".splitlines()[0])


def _weight(failure: ProcessFailure) -> tuple[bool, bool, bool, int]:
    told_to_stop = failure.exitcode == -signal.SIGTERM
    ours = hasattr(errors, _message(failure).partition(": ")[0])
    return told_to_stop, failure.exitcode >= 0, not ours, failure.timestamp


def _message(failure: ProcessFailure) -> str:
    recorded = failure.message
    return str(recorded["message"]) if isinstance(recorded, dict) else recorded
