"""Start the ranks of this node by torch's own launcher, or run as a rank that another launcher has started."""

from __future__ import annotations

import dataclasses
import logging
import math
import os
import signal
import sys
import tempfile
import threading
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from ckptools import errors
from ckptools.cluster.environment import (
    DEFAULT_PORT,
    ProcessInfo,
    Setting,
    calm_torch,
    derive,
    is_loopback,
    missing_variables,
)
from ckptools.errors import CkptoolsError, RendezvousError, UsageError, WriteError, remade
from ckptools.text import first_line, plural
from ckptools.training import backends, damage, output, worker
from ckptools.training.options import DEFAULT_WORLD_SIZE, CreateOptions, LaunchOptions, check_options
from ckptools.training.output import Created

if TYPE_CHECKING:
    from torch.distributed.elastic.multiprocessing.errors import ProcessFailure


def create(options: CreateOptions, verbose: bool = False) -> Created:
    """Train for real, save a checkpoint, and damage it as `options.damage` says.

    With `verbose` rank 0 writes a line per step to stdout.

    Raises:
        UsageError: the options do not fit together, or not with the launcher that started this process.
        RendezvousError: the other nodes or ranks were not found, or were lost.
        OutputExistsError: the folder holds a checkpoint already, and `force` is off.
        WriteError: a rank died, or a file could not be written.
    """
    options = options.completed()
    calm_torch()
    place = derive(os.environ, _given(options))
    # With `--nproc-per-node` a process that a scheduler started starts the ranks of a node itself, as torchrun would.
    if place.starter is not None and (_by_torchrun() or options.launch.nproc_per_node is None):
        return _damaged(_be_a_rank(options, place, verbose), options, {})
    check_options(options)
    node = this_node(options.launch, options.world_size, place)
    damage.check(options, node.world_size, own_ranks=node.nnodes == 1)
    if node.world_size is not None:
        backends.check_here(options, node.world_size, node.nproc)
    with tempfile.TemporaryDirectory(prefix="ckptools-") as scratch:
        runs = _other_runs(options, node, Path(scratch))
        return _damaged(_start_ranks(options, node, Path(scratch), verbose), options, runs)


# -- be a rank ---------------------------------------------------------------------------------------------------------


def _by_torchrun() -> bool:
    """Whether torchrun's variables are set, also if torchrun runs within a scheduler's job."""
    return "RANK" in os.environ or "WORLD_SIZE" in os.environ


def _given(options: CreateOptions) -> dict[str, Setting]:
    """Collect the variables that options give for a rank that an outer launcher started."""
    asked = options.launch
    given: dict[str, object] = {"LOCAL_RANK": asked.local_rank}
    if asked.rdzv_endpoint:
        given["MASTER_ADDR"], given["MASTER_PORT"] = parse_endpoint(asked.rdzv_endpoint)
    else:
        given |= {"MASTER_ADDR": asked.master_addr, "MASTER_PORT": asked.master_port}
    if asked.world_size_from == "argument" and "WORLD_SIZE" not in os.environ:
        given["WORLD_SIZE"] = options.world_size
    return {name: Setting(str(value), "an option") for name, value in given.items() if value is not None}


def _be_a_rank(options: CreateOptions, place: ProcessInfo, verbose: bool) -> Created:
    """Train as one rank that another launcher has started.

    All ranks of a node find the same error in the options, so only the first rank reports it.
    """
    try:
        check_options(options)
        _check_outer(options, place)
        damage.check(options, place.number("WORLD_SIZE"), own_ranks=False)
        place.export(os.environ)
        worker.prepare_process()
        from ckptools.training.rank import in_group, say, say_nothing, train_and_save

        with in_group(options):
            return train_and_save(options, None, say if verbose else say_nothing)
    except CkptoolsError as error:
        number = place.number("RANK" if place.number("LOCAL_RANK") is None else "LOCAL_RANK")
        if not number or isinstance(error, (WriteError, RendezvousError)):
            raise
        raise SystemExit(error.exit_code) from None


def _check_outer(options: CreateOptions, place: ProcessInfo) -> None:
    """Refuse options that contradict the launcher that started this rank, and a launcher that left variables unset."""
    name = "torchrun" if _by_torchrun() else "a scheduler"
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


# -- damage ------------------------------------------------------------------------------------------------------------


def _other_runs(options: CreateOptions, node: Node, scratch: Path) -> dict[str, Path]:
    """Train the runs that damage takes files from; returns the path to open for each.

    A stale rank's files come from a real run that stopped one step earlier, a mixed-in rank's files from a real run
    with the next seed. They are trained first, into a temporary folder: an interrupt leaves no half-broken checkpoint.
    """
    alike = dataclasses.replace(options, damage="", full=False)
    others = {
        "older run": dataclasses.replace(alike, out=scratch / "older", steps=options.steps - 1),
        "another run": dataclasses.replace(alike, out=scratch / "another", seed=options.seed + 1),
    }
    wanted = damage.other_runs(options.damage)
    return {name: _start_ranks(others[name], node, scratch, verbose=False).first for name in wanted}


def _damaged(created: Created, options: CreateOptions, runs: Mapping[str, Path]) -> Created:
    """Damage the saved checkpoint as the options say; only rank 0 does it."""
    if not options.damage or created.rank != 0:
        return created
    broken = damage.apply(created.first, options.damage, options.seed, runs)
    nbytes = sum(path.stat().st_size for path in created.files if path.exists())
    return dataclasses.replace(created, damage=broken, nbytes=nbytes)


# -- which node this is ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Node:
    """One node of a run.

    Attributes:
        node_rank: number of this node; None if the nodes number themselves.
        nproc: number of ranks that this node starts.
        world_size: number of all ranks; None if other nodes may start another number of ranks than this one.
        address: an address of node 0, at which the nodes meet.
        port: the port there; 0 for any free port, which is possible only for a lone node.
        rdzv_backend: torch's rendezvous backend, by which the nodes get their ranks.
    """

    nnodes: int
    node_rank: int | None
    nproc: int
    world_size: int | None
    address: str
    port: int
    rdzv_backend: str
    rdzv_id: str

    @property
    def endpoint(self) -> str:
        """`HOST:PORT`, with brackets around an address that has colons itself."""
        return f"[{self.address}]:{self.port}" if ":" in self.address else f"{self.address}:{self.port}"


def this_node(launch: LaunchOptions, world_size: int | None, place: ProcessInfo) -> Node:
    """Describe this node by the options; for options that are not given, by a scheduler's variables and defaults.

    In the job of a scheduler this process, `place`, stands for a node, so that its rank is the rank of the node.

    Raises:
        UsageError: the options contradict each other, or one is missing.
    """
    listed = _counts(launch.nproc_per_node)
    several = len(listed) if len(listed) > 1 else None
    if launch.nnodes is not None and several not in (None, launch.nnodes):
        given = f"--nproc-per-node {launch.nproc_per_node} is a list for {several} nodes"
        raise UsageError(None, f"{given}, but --nnodes is {launch.nnodes}")
    nnodes = launch.nnodes or several or (place.number("WORLD_SIZE") if place.starter else None) or 1
    node_rank = launch.node_rank
    if node_rank is None and place.starter:
        node_rank = place.number("RANK")
    if node_rank is None and nnodes == 1:
        node_rank = 0
    if node_rank is not None and not 0 <= node_rank < nnodes:
        raise UsageError(None, f"--node-rank is {node_rank}, but --nnodes {nnodes} has node ranks 0 to {nnodes - 1}")
    backend = launch.rdzv_backend or ("static" if nnodes > 1 else "c10d")
    if node_rank is None and (backend == "static" or several):
        why = "with --rdzv-backend static" if backend == "static" else "with a list of ranks per node"
        raise UsageError(None, f"--node-rank is missing: {why} each of the {nnodes} nodes says which it is, from 0")
    address, port = _endpoint(launch, nnodes, backend, place)
    if (several or (listed and nnodes == 1)) and world_size not in (None, sum(listed)):
        makes = f"--nproc-per-node {','.join(map(str, listed))} makes {sum(listed)}"
        raise UsageError(None, f"--world-size is {world_size}, but {makes}; leave one of them out")
    wanted = DEFAULT_WORLD_SIZE if world_size is None else world_size
    if not listed and wanted % nnodes:
        text = f"a world size of {wanted} does not divide by --nnodes {nnodes}; say --nproc-per-node, such as 2,1"
        raise UsageError(None, text)
    counts = listed if several else (listed or (wanted // nnodes,)) * nnodes
    known = None if listed and not several and nnodes > 1 else sum(counts)
    run = launch.rdzv_id or "ckptools"
    return Node(nnodes, node_rank, counts[node_rank or 0], known, address, port, backend, run)


def _counts(text: str | None) -> tuple[int, ...]:
    """Read `--nproc-per-node`: empty where it was not given, one number for every node, or one for each."""
    if text is None:
        return ()
    if text in ("auto", "cpu", "gpu"):
        gpus = backends.of_this_machine().gpus if text != "cpu" else 0
        if text == "gpu" and not gpus:
            raise UsageError(
                None, "--nproc-per-node gpu: there is no GPU here that torch can use; give a number, or cpu"
            )
        return (gpus or os.cpu_count() or 1,)
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() and int(part) for part in parts):
        raise UsageError(None, f"--nproc-per-node is {text!r}, must be a number, one per node (2,1), or auto, cpu, gpu")
    return tuple(map(int, parts))


def _endpoint(launch: LaunchOptions, nnodes: int, backend: str, place: ProcessInfo) -> tuple[str, int]:
    """Say where the nodes meet; `--rdzv-endpoint` goes before an address and a port of their own."""
    if launch.rdzv_endpoint:
        return parse_endpoint(launch.rdzv_endpoint)
    found = place.facts.get("MASTER_ADDR")
    address = launch.master_addr or (found.value if found else None)
    port = launch.master_port or place.number("MASTER_PORT")
    if nnodes > 1 and not address:
        raise UsageError(None, f"--nnodes {nnodes} needs --master-addr, the address of node 0, or --rdzv-endpoint")
    return address or "localhost", port or (0 if nnodes == 1 and backend == "c10d" else DEFAULT_PORT)


def parse_endpoint(text: str) -> tuple[str, int]:
    """Read `HOST:PORT`, `[::1]:29500` or `HOST` alone.

    Raises:
        UsageError: the text has another form.
    """
    try:
        parts = urlsplit(f"//{text}")
        host, port = parts.hostname, parts.port or DEFAULT_PORT
    except ValueError:
        host, port = None, 0
    if not host or "/" in text or "@" in text:
        raise UsageError(None, f"--rdzv-endpoint is {text!r}, must be HOST:PORT with a port from 1 to 65535")
    return host, port


# -- start the ranks of a node -----------------------------------------------------------------------------------------


def _start_ranks(options: CreateOptions, node: Node, scratch: Path, verbose: bool) -> Created:
    """Start the ranks of this node, wait for them, and return the result that the first of them wrote."""
    gpus = backends.of_this_machine().gpus
    if verbose and node.nproc < gpus:
        idle = f"{gpus} GPUs on this node, but {node.nproc} ranks: {gpus - node.nproc} of them stay idle"
        _say_on_stderr(f"{idle}; see --nproc-per-node")
    if verbose and node.nnodes > 1:
        _say_on_stderr(f"waiting for {node.nnodes} nodes at {node.endpoint}, at most {options.launch.timeout:g} s")
    # All nodes of a run must give the folder for unfinished files the same name.
    run_id = uuid.uuid4().hex if node.nnodes == 1 else node.rdzv_id
    with output.partial_folder(options.out, run_id) as partial:
        answer = scratch / "answer.json"
        _launch(options, node, run_id, scratch, worker.arguments(options, partial, answer, verbose))
        return worker.from_json(answer.read_text(), options.out)


def _say_on_stderr(line: str) -> None:
    sys.stderr.write(f"{line}\n")
    sys.stderr.flush()


def _launch(options: CreateOptions, node: Node, run_id: str, scratch: Path, words: list[str]) -> None:
    """Start the ranks by the launcher that `torchrun` itself uses.

    An agent on each node meets the agents of the other nodes, starts the ranks of its node and watches them. It starts
    ranks as commands or, as many tutorials do, by `torch.multiprocessing.spawn`.
    """
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.elastic.rendezvous.api import RendezvousError as NotMet
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    seconds = math.ceil(options.launch.timeout)
    configs: dict[str, Any] = {"timeout": seconds, "read_timeout": seconds}
    if node.rdzv_backend == "static":
        configs["rank"] = node.node_rank
    else:
        configs["join_timeout"] = seconds  # the dynamic rendezvous has its own name for it
        if node.node_rank is not None:
            configs["is_host"] = node.node_rank == 0
    config = LaunchConfig(
        min_nodes=node.nnodes,
        max_nodes=node.nnodes,
        nproc_per_node=node.nproc,
        run_id=run_id,
        rdzv_backend=node.rdzv_backend,
        rdzv_endpoint=node.endpoint,
        rdzv_configs=configs,
        # The node of rank 0 gives this address to the others, which may not be able to resolve its host name.
        local_addr=node.address if node.node_rank == 0 or is_loopback(node.address) else None,
        max_restarts=options.resuming.max_restarts,
        logs_specs=DefaultLogsSpecs(log_dir=str(scratch)),
    )
    with _calm_launcher(waits=node.nnodes > 1):
        try:
            if options.launch.launcher == "spawn":
                elastic_launch(config, worker.be_spawned)(*words)
            else:
                elastic_launch(config, sys.executable)("-m", worker.__name__, *words)
        except ChildFailedError as error:
            raise failure_reason(options.out, error.failures) from None
        except SignalException as error:
            # As Python and shells do: Ctrl-C is KeyboardInterrupt, other signals are exit code 128 + n.
            number = error.sigval
            raise KeyboardInterrupt if number == signal.SIGINT else SystemExit(128 + number) from None
        except (RuntimeError, NotMet) as error:
            nodes = plural(node.nnodes, "node")
            raise RendezvousError(None, f"{nodes} did not meet at {node.endpoint}: {first_line(error)}") from error


@contextmanager
def _calm_launcher(waits: bool) -> Iterator[None]:
    """Silence torchelastic's own report of a failure, and remove its signal handlers afterwards.

    While torchelastic waits for other nodes in C++, Python's handler for Ctrl-C would not run. So Ctrl-C ends the
    process at once until there are ranks.
    """
    # Only the main thread may set handlers; torchelastic does not try elsewhere either.
    in_main = threading.current_thread() is threading.main_thread()
    names = ("SIGTERM", "SIGINT", "SIGHUP", "SIGQUIT") if in_main else ()
    handlers = {name: signal.getsignal(getattr(signal, name)) for name in names if hasattr(signal, name)}
    disabled = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    if waits and in_main:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        yield
    finally:
        logging.disable(disabled)
        for name, handler in handlers.items():
            signal.signal(getattr(signal, name), handler)


# -- failures ----------------------------------------------------------------------------------------------------------


def failure_reason(out: Path, failures: Mapping[int, ProcessFailure]) -> Exception:
    """Make one error of the ranks' failures: a rank's own error, WriteError if a rank was killed, or RuntimeError.

    When one rank dies, the others soon fail too, at the connection to it or by the launcher's SIGTERM. So a rank that
    another signal ended is believed first, then a rank with an error of its own that is no lost connection, then the
    earliest.
    """
    rank, failure = min(failures.items(), key=lambda item: _weight(item[1]))
    if failure.exitcode < 0:
        return WriteError(out, f"not written: rank {rank} was killed by {failure.signal_name()}")
    kind, _, message = _message(failure).partition(": ")
    return remade(kind, message) or RuntimeError(f"rank {rank}: {kind}: {message}".splitlines()[0])


def _weight(failure: ProcessFailure) -> tuple[bool, bool, bool, bool, int]:
    stopped = failure.exitcode == -signal.SIGTERM
    kind = _message(failure).partition(": ")[0]
    lost = kind == RendezvousError.__name__
    return stopped, failure.exitcode >= 0, lost, not hasattr(errors, kind), failure.timestamp


def _message(failure: ProcessFailure) -> str:
    recorded = failure.message
    return str(recorded["message"]) if isinstance(recorded, dict) else recorded
