"""Which node this is, how many ranks it has and where the nodes meet."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from ckptools.cluster.environment import ProcessInfo, derive, is_loopback
from ckptools.errors import UsageError
from ckptools.training.launch import Node, this_node
from ckptools.training.options import CreateOptions, LaunchOptions, check_options
from tests.cluster.test_environment import SLURM

NOWHERE = ProcessInfo(None, None)
AT = {"master_addr": "a", "master_port": 7}


def node(world_size: int | None = None, place: ProcessInfo = NOWHERE, **given: Any) -> Node:
    return this_node(LaunchOptions(**given), world_size, place)


def test_a_lone_node_starts_four_ranks_at_a_free_port() -> None:
    assert node() == Node(1, 0, 4, 4, "localhost", 0, "c10d", "ckptools")


def test_the_ranks_of_a_run_are_known_where_no_other_node_may_start_other_numbers() -> None:
    assert node(nproc_per_node="2,1", node_rank=1, **AT).world_size == 3
    assert node(6, nnodes=2, node_rank=0, **AT).world_size == 6
    assert node(nnodes=2, nproc_per_node="2", node_rank=0, **AT).world_size is None


def test_a_list_says_the_ranks_of_every_node_and_how_many_nodes_there_are() -> None:
    assert [node(nproc_per_node="2,1", node_rank=rank, **AT).nproc for rank in (0, 1)] == [2, 1]
    assert node(nproc_per_node="2,1", node_rank=1, **AT).nnodes == 2


def test_a_world_size_is_divided_among_the_nodes() -> None:
    assert node(6, nnodes=2, node_rank=0, **AT).nproc == 3


def test_an_endpoint_goes_before_address_and_port() -> None:
    found = node(nnodes=2, node_rank=0, rdzv_endpoint="b:8", **AT)
    assert (found.address, found.port, found.rdzv_backend) == ("b", 8, "static")
    assert node(rdzv_endpoint="[::1]:8").endpoint == "[::1]:8"


def test_several_nodes_meet_at_the_port_of_torch_where_none_is_given() -> None:
    assert node(nnodes=2, node_rank=0, master_addr="a").port == 29500


def test_with_c10d_nodes_need_no_ranks() -> None:
    found = node(nnodes=2, rdzv_backend="c10d", **AT)
    assert (found.node_rank, found.rdzv_backend) == (None, "c10d")


def test_a_task_of_a_scheduler_may_be_a_node() -> None:
    found = node(place=derive(SLURM), nproc_per_node="2")
    assert (found.nnodes, found.node_rank, found.nproc, found.endpoint) == (4, 3, 2, "node07:15456")


def test_a_word_for_the_ranks_of_a_node_counts_what_is_there() -> None:
    assert node(nproc_per_node="cpu").nproc == os.cpu_count()


@pytest.mark.parametrize(
    ("world_size", "given", "says"),
    [
        (4, {"nproc_per_node": "2,1", "node_rank": 0}, "--world-size is 4, but --nproc-per-node 2,1 makes 3"),
        (3, {"nproc_per_node": "2"}, "--world-size is 3, but --nproc-per-node 2 makes 2"),
        (3, {"nnodes": 2, "node_rank": 0}, "world size of 3 does not divide by --nnodes 2"),
        (None, {"nnodes": 3, "nproc_per_node": "2,1"}, "is a list for 2 nodes, but --nnodes is 3"),
        (None, {"nproc_per_node": "2,x"}, "--nproc-per-node is '2,x', must be a number"),
        (None, {"nproc_per_node": "0"}, "--nproc-per-node is '0', must be a number"),
        (None, {"nnodes": 2}, "--node-rank is missing"),
        (None, {"nproc_per_node": "2,1", "rdzv_backend": "c10d"}, "--node-rank is missing: with a list"),
        (None, {"nnodes": 2, "node_rank": 2}, "--node-rank is 2, but --nnodes 2 has node ranks 0 to 1"),
        (None, {"rdzv_endpoint": "a:x"}, "--rdzv-endpoint is 'a:x', must be HOST:PORT"),
        (None, {"rdzv_endpoint": "http://a:7"}, "must be HOST:PORT"),
    ],
)
def test_what_contradicts_is_one_line(world_size: int | None, given: dict[str, Any], says: str) -> None:
    with pytest.raises(UsageError) as raised:
        node(world_size, **AT | given)
    assert says in str(raised.value)


def test_nodes_without_an_address_are_asked_for_one() -> None:
    with pytest.raises(UsageError, match="--nnodes 2 needs --master-addr"):
        node(nnodes=2, node_rank=0)


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"launcher": "fork"}, "--launcher fork is not known; choose from elastic, spawn"),
        ({"rdzv_backend": "etcd"}, "--rdzv-backend etcd is not known; choose from static, c10d"),
        ({"nnodes": 0}, "--nnodes 0: must be at least 1"),
        ({"master_port": 70000}, "--master-port 70000: must be"),
        ({"timeout": 0}, "--timeout 0: must be more than 0"),
        ({"timeout": float("nan")}, "--timeout nan: must be"),
    ],
)
def test_an_unknown_word_or_a_number_out_of_range_is_one_line(given: dict[str, Any], says: str) -> None:
    with pytest.raises(UsageError) as raised:
        check_options(CreateOptions(Path("run"), launch=LaunchOptions(**given)))
    assert says in str(raised.value)


def test_only_addresses_of_this_machine_are_loopback() -> None:
    assert is_loopback("localhost")
    assert is_loopback("127.0.0.2")
    assert is_loopback("::1")
    assert not is_loopback("192.0.2.1")
