"""Start the ranks of this node, or be one of them where something else started them already."""

from __future__ import annotations

import dataclasses
import logging
import os
import signal
import sys
import tempfile
import threading
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ckptools import errors
from ckptools.cluster import environment
from ckptools.cluster.environment import (
    STARTERS,
    ProcessInfo,
    Setting,
    calm_torch,
    is_loopback,
    missing_variables,
    restarts,
)
from ckptools.cluster.waiting import say_nothing, say_on_stderr
from ckptools.errors import CkptoolsError, UsageError, WriteError, remade
from ckptools.training import damage, nodes, option_checks, output, worker
from ckptools.training.nodes import Node, agree, shared_partial_folder
from ckptools.training.option_checks import backend_chosen_here, backend_of_this_machine, check_world_size
from ckptools.training.options import CreateOptions
from ckptools.training.output import Created

if TYPE_CHECKING:
    from torch.distributed.elastic.multiprocessing.errors import ProcessFailure
    from torch.distributed.launcher.api import LaunchConfig

    from ckptools.cluster.rendezvous import Meeting


# -- the two launchers that start the ranks of a node: torch's elastic one, and `torch.multiprocessing.spawn` ----------


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


# -- elastic -----------------------------------------------------------------------------------------------------------


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


# -- spawn -------------------------------------------------------------------------------------------------------------


def _start_spawn(job: NodeJob, scratch: str, arguments: list[str]) -> None:
    """Start the ranks by `torch.multiprocessing.spawn`.

    The way of many tutorials: one Python process starts the ranks as its children, without an agent. They get the
    variables that the elastic launcher would set, and are not started again when one dies.
    """
    from torch.multiprocessing.spawn import ProcessExitedException, ProcessRaisedException, spawn

    variables = [_variables(job, local_rank, scratch) for local_rank in range(job.node.nproc)]
    ranks = spawn(_be_a_local_rank, (variables, arguments), nprocs=job.node.nproc, join=False)
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


def _be_a_local_rank(local_rank: int, variables: list[dict[str, str]], arguments: list[str]) -> None:
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


# -- failures ----------------------------------------------------------------------------------------------------------


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


# -- ranks of this node ------------------------------------------------------------------------------------------------


def create(options: CreateOptions, verbose: bool = False) -> Created:
    """Train for real and save a checkpoint; with `verbose` rank 0 writes a line per step to stdout.

    Raises:
        UsageError: the options do not fit together, or not with what started this process.
        RendezvousError: the other nodes or ranks were not found.
        OutputExistsError: the folder holds a checkpoint already, and `force` is off.
        WriteError: a rank died, or a file could not be written.
    """
    options = options.completed()
    option_checks.check_launch(options.launch)
    calm_torch()
    place = environment.derive(os.environ, _given(options))
    # With `--nproc-per-node` a process that a scheduler started starts the ranks of a node itself, as torchrun would.
    if place.starter is None or (place.starter is not STARTERS[0] and options.launch.nproc_per_node is not None):
        return _start_ranks(options, place, verbose)
    return _be_a_rank(options, place, verbose)


def _given(options: CreateOptions) -> dict[str, Setting]:
    """Collect what options say of a rank that an outer launcher started."""
    asked = options.launch
    given: dict[str, object] = {"LOCAL_RANK": asked.local_rank}
    if asked.rdzv_endpoint:
        given["MASTER_ADDR"], given["MASTER_PORT"] = nodes.parse_endpoint(asked.rdzv_endpoint)
    else:
        given |= {"MASTER_ADDR": asked.master_addr, "MASTER_PORT": asked.master_port}
    if asked.world_size_from == "argument" and "WORLD_SIZE" not in os.environ:
        given["WORLD_SIZE"] = options.world_size
    return {name: Setting(str(value), "an option") for name, value in given.items() if value is not None}


def _start_ranks(options: CreateOptions, place: ProcessInfo, verbose: bool) -> Created:
    option_checks.check(options)
    if options.launch.launcher == "spawn" and options.resuming.max_restarts:
        raise UsageError(None, "--max-restarts: --launcher spawn starts no rank again; --launcher elastic does")
    node = nodes.this_node(options.launch, options.world_size, place)
    from torch.distributed.distributed_c10d import PrefixStore

    from ckptools.cluster.rendezvous import Meeting, open_store

    timeout, say = options.launch.timeout, say_on_stderr if verbose else say_nothing
    at = open_store(node.address, node.port, node.hosts, timeout, say)
    node, store = dataclasses.replace(node, port=at.store.port), PrefixStore(node.rdzv_id, at.store)
    number, count = node.node_rank, node.nnodes
    with Meeting(store, "node", number, count, timeout, hosts=at.hosted, at=node.endpoint, say=say) as meeting:
        node = dataclasses.replace(node, node_rank=meeting.number)
        counts = agree(meeting, options, node.nproc)
        launched = dataclasses.replace(options.launch, nproc_per_node=",".join(map(str, counts)))
        options = dataclasses.replace(options, world_size=sum(counts), launch=launched)
        _check(options, sum(counts), node.nproc)
        warning = nodes.idle_gpus(node.nproc, backend_of_this_machine().gpus)
        if warning and verbose:
            say_on_stderr(warning)

        def train(folder: Path, run_id: str) -> Created:
            return launch(NodeJob(options, node, counts, at.hosted, folder, run_id, verbose))

        return _done_together(meeting, options.out, train)


def _done_together(meeting: Meeting, out: Path, train: Callable[[Path, str], Created]) -> Created:
    """Train as all members of a meeting do, given the folder for files in the making and a name for the run."""
    run_id = meeting.gather("run", uuid.uuid4().hex)[0]
    with shared_partial_folder(meeting, out, run_id) as folder:
        try:
            created = train(folder, run_id)
        except RuntimeError as error:
            # Where another member failed first, it says why.
            raise meeting.cause(error) from None
        meeting.gather("done")
        return created


def lone_node(options: CreateOptions) -> Node | None:
    """The node that this process is, where it starts all ranks itself; None where something else starts some."""
    place = environment.derive(os.environ, _given(options))
    node = None if place.starter else nodes.this_node(options.launch, options.world_size, place)
    return node if node and node.nnodes == 1 else None


def _be_a_rank(options: CreateOptions, place: ProcessInfo, verbose: bool) -> Created:
    """Train as the rank that something else started.

    A mistake is found by all ranks, as all have the same options; the first to say so speaks for all.
    """
    _check_outer(options, place)
    place.export(os.environ)
    worker.prepare_process()
    from ckptools.cluster.rendezvous import meet_ranks

    say = say_on_stderr if verbose else say_nothing
    with meet_ranks(options.launch.timeout, place.counts, say=say) as meeting:
        try:
            agree(meeting, options, 1)
            if meeting.number == 0:
                _check(options, meeting.count, int(os.environ.get("LOCAL_WORLD_SIZE", meeting.count)))
            from ckptools.training.rank import train_and_save

            report = worker.say if verbose else say_nothing
            return _done_together(meeting, options.out, lambda folder, _: train_and_save(options, folder, report))
        except CkptoolsError as error:
            if meeting.reported:
                raise SystemExit(error.exit_code) from None
            raise


def _check_outer(options: CreateOptions, place: ProcessInfo) -> None:
    """Refuse what contradicts the launcher that started this rank, and what it has left open."""
    name = place.starter.name if place.starter else ""
    started = place.number("WORLD_SIZE")
    if started is not None and options.world_size not in (None, started):
        text = f"--world-size is {options.world_size}, but {name} started {started} ranks; leave it out"
        raise UsageError(None, text)
    if place.missing:
        raise UsageError(None, missing_variables(place.missing))
    for word in ("launcher", "nnodes", "node_rank", "nproc_per_node", "rdzv_backend", "rdzv_id"):
        if getattr(options.launch, word) is not None:
            flag = f"--{word.replace('_', '-')}"
            raise UsageError(None, f"{flag}: {name} has started the ranks already; leave it out")


def _check(options: CreateOptions, world_size: int, nproc: int) -> None:
    option_checks.check(options)
    if options.damage:
        damage.check(options, world_size, own_ranks=lone_node(options) is not None)
    check_world_size(options, world_size)
    option_checks.check_torch(options)
    backend_chosen_here(options.hardware, nproc)
    # What a run has saved before it was started again, or goes on from, is not in its way.
    if not (restarts() or (options.several and options.resuming.goes_on_in(options.out))):
        output.refuse_existing(options.out, options.force)


def create_damaged(options: CreateOptions, verbose: bool) -> Created:
    """Train for real, save a checkpoint, and damage it as `options.damage` says.

    A stale rank's files are those of a real run that stopped one step earlier, a mixed-in rank's those of a real run
    with the next seed. Both are trained first, into a folder that goes again, so that an interrupt leaves no
    half-broken checkpoint behind.

    Raises:
        UsageError: the damage does not apply, or as `create`.
    """
    with tempfile.TemporaryDirectory(prefix="ckptools-") as scratch:
        # Where something else starts ranks, all of them come here; `create` refuses then what takes another run.
        node = lone_node(options)
        runs = _other_runs(options, node.nproc, Path(scratch)) if node else {}
        created = create(options, verbose)
        if created.rank != 0:
            return created
        broken = damage.apply(created.first, options.damage, options.seed, runs)
        nbytes = sum(path.stat().st_size for path in created.files if path.exists())
        return dataclasses.replace(created, damage=broken, nbytes=nbytes)


def _other_runs(options: CreateOptions, world_size: int, scratch: Path) -> dict[str, Path]:
    """Train the runs that files are taken from; returns what to open of each."""
    damage.check(options, world_size)
    output.refuse_existing(options.out, options.force)
    alike = dataclasses.replace(options, damage="", full=False)
    others = {
        "older run": dataclasses.replace(alike, out=scratch / "older", steps=options.steps - 1),
        "another run": dataclasses.replace(alike, out=scratch / "another", seed=options.seed + 1),
    }
    return {name: create(others[name]).first for name in damage.other_runs(options.damage)}
