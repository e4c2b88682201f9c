"""Two nodes on one machine: two commands that meet at a port, start ranks of one world and write one checkpoint."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from ckptools.errors import WriteError
from ckptools.training import create
from ckptools.training.options import CreateOptions, LaunchOptions
from tests.training.conftest import FSDP1, Command
from tests.training.started import children, finish, free_port, is_free, same, start
from tests.training.test_command import leftovers

ENDLESS = ("--steps", 100_000)
LOST = "error: rank 0 lost the connection to another rank, which ended first; its node says why\n"


def two(port: int, first: tuple[object, ...], second: tuple[object, ...]) -> list[subprocess.Popen[str]]:
    at = ("--rdzv-endpoint", f"localhost:{port}")
    return [start(*first, *at), start(*second, *at)]


NUMBERED = ("--rdzv-backend", "static", "--launcher", "spawn", "--nproc-per-node", "1,2", "--node-rank")
THEMSELVES = ("--rdzv-backend", "c10d", "--launcher", "elastic", "--nnodes", 2, "--rdzv-id", "a", "--nproc-per-node")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("how", "first", "second"),
    [
        pytest.param(NUMBERED, 0, 1, id="numbered, with a list of ranks per node"),
        pytest.param(THEMSELVES, 2, 1, id="that number themselves, each with ranks of its own"),
    ],
)
def test_unequal_nodes_write_what_one_node_writes(
    how: tuple[object, ...], first: int, second: int, fsdp1: Command, tmp_path: Path
) -> None:
    port, out = free_port(), tmp_path / "run"
    asked = (out, *FSDP1, *how)
    ended = finish(two(port, (*asked, first), (*asked, second)))
    assert [code for code, _, _ in ended] == [0, 0], ended
    assert "".join(said for _, said, _ in ended).count("saved ") == 1
    assert [path.name for path in sorted(out.iterdir())] == [f"ep0-ba5-rank{rank}.pt" for rank in range(3)]
    assert same(out, fsdp1.out)
    assert leftovers(str(tmp_path)) == []
    assert is_free(port)


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["static", "c10d"])
def test_a_node_that_never_comes_is_missed_and_nothing_is_left(backend: str, tmp_path: Path) -> None:
    port = free_port()
    asked = ("--nproc-per-node", "2,1", "--node-rank", 0, "--rdzv-endpoint", f"localhost:{port}", "--timeout", 2)
    [(code, _, said)] = finish([start(tmp_path / "run", *asked, "--rdzv-backend", backend)])
    assert (code, said.count("\n")) == (3, 1)
    assert said.startswith(f"error: 2 nodes did not meet at localhost:{port}: ")
    assert not (tmp_path / "run").exists()
    assert is_free(port)


@pytest.mark.slow  # each waits some seconds for what the other says
def test_a_node_whose_folder_is_another_one_is_noticed_by_both(tmp_path: Path) -> None:
    port, outs = free_port(), [tmp_path / "here", tmp_path / "elsewhere"]

    def refused(node: int) -> str:
        launch = LaunchOptions(nnodes=2, node_rank=node, rdzv_endpoint=f"localhost:{port}")
        with pytest.raises(WriteError) as raised:
            create(CreateOptions(outs[node], world_size=2, launch=launch))
        return str(raised.value).partition(";")[0]

    with ThreadPoolExecutor(2) as nodes:
        said = list(nodes.map(refused, [0, 1]))
    assert said == [f"{out}: on rank 1 is not the folder that rank 0 writes to" for out in outs]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_a_rank_that_is_killed_on_one_node_is_named_there_and_missed_on_the_other(tmp_path: Path) -> None:
    port = free_port()
    asked = (tmp_path / "run", *ENDLESS, "--nnodes", 2, "--world-size", 2, "--launcher", "spawn")
    nodes = two(port, (*asked, "--node-rank", 0), (*asked, "--node-rank", 1))
    wait_for_training(nodes[0])
    # Python's own tracker of resources is a child of a spawning process too, and the first.
    os.kill(children(nodes[1].pid)[-1], signal.SIGKILL)
    (code, _, said), (killed, _, told) = finish(nodes)
    assert (code, said) == (3, LOST)
    assert (killed, told) == (3, f"error: {tmp_path / 'run'}: not written: rank 1 was killed by SIGKILL\n")
    assert list(tmp_path.iterdir()) == []
    assert leftovers(str(tmp_path)) == []
    assert is_free(port)


@pytest.mark.slow
def test_an_interrupt_on_one_node_ends_every_rank_of_both_and_leaves_nothing(tmp_path: Path) -> None:
    asked = (tmp_path / "run", *ENDLESS, "--nproc-per-node", "1,2")
    nodes = two(free_port(), (*asked, "--node-rank", 0), (*asked, "--node-rank", 1))
    wait_for_training(nodes[0])
    nodes[1].send_signal(signal.SIGINT)
    (code, _, said), (interrupted, _, told) = finish(nodes)
    assert (code, said) == (3, LOST)
    assert (interrupted, told.count("\n")) == (130, 1)
    assert list(tmp_path.iterdir()) == []
    assert leftovers(str(tmp_path)) == []


@pytest.mark.slow
def test_an_interrupt_while_a_node_waits_ends_it_at_once(tmp_path: Path) -> None:
    port = free_port()
    node = start(tmp_path / "run", "--nnodes", 2, "--node-rank", 0, "--rdzv-endpoint", f"localhost:{port}")
    assert node.stderr is not None
    assert node.stderr.readline() == f"waiting for 2 nodes at localhost:{port}, at most 300 s\n"
    while is_free(port):
        time.sleep(0.1)
    node.send_signal(signal.SIGINT)
    assert finish([node]) == [(-signal.SIGINT, "", "")]
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_a_launcher_that_is_killed_leaves_no_rank(tmp_path: Path) -> None:
    asked = (tmp_path / "run", *ENDLESS, "--nnodes", 2, "--world-size", 2)
    nodes = two(free_port(), (*asked, "--node-rank", 0), (*asked, "--node-rank", 1))
    wait_for_training(nodes[0])
    nodes[1].kill()
    (code, _, said), _ = finish(nodes)
    assert (code, said) == (3, LOST)
    assert list(tmp_path.iterdir()) == []
    assert leftovers(str(tmp_path)) == []


def wait_for_training(node: subprocess.Popen[str]) -> None:
    """Wait until the ranks have joined each other: the first line says how many processes there are."""
    assert node.stdout is not None
    assert "processes" in node.stdout.readline()
