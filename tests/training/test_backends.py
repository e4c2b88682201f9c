"""Which backend and which device a run takes, on machines with and without GPUs, and what is said of the others."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from ckptools.cli import app
from ckptools.errors import UsageError
from ckptools.training.backends import Chosen, Hardware, absence, choose, default_in_words, rows
from ckptools.training.options import BackendOptions, CreateOptions, check_options
from tests.training.conftest import Command
from tests.training.rank_files import load

LAPTOP = Hardware("2.13.0+cpu")
ONE_GPU = Hardware("2.13.0", gpus=1, cuda=True, nccl=True)
NODE = Hardware("2.13.0", gpus=8, cuda=True, nccl=True)
WINDOWS = Hardware("2.13.0", gpus=2, cuda=True)


def chosen(machine: Hardware, ranks: int, backend: str = "auto", device: str = "auto") -> tuple[str, str]:
    found = choose(BackendOptions(backend, device), ranks, machine)
    return found.backend, found.device


@pytest.mark.parametrize(
    ("machine", "ranks", "asked", "expected"),
    [
        (LAPTOP, 4, ("auto", "auto"), ("gloo", "cpu")),
        (NODE, 8, ("auto", "auto"), ("nccl", "cuda")),
        (NODE, 9, ("auto", "auto"), ("gloo", "cuda")),
        (ONE_GPU, 1, ("auto", "auto"), ("nccl", "cuda")),
        (ONE_GPU, 2, ("auto", "auto"), ("gloo", "cuda")),
        (NODE, 8, ("gloo", "auto"), ("gloo", "cuda")),
        (NODE, 8, ("auto", "cpu"), ("gloo", "cpu")),
        (WINDOWS, 2, ("auto", "auto"), ("gloo", "cuda")),
    ],
)
def test_a_run_takes_what_the_node_has(
    machine: Hardware, ranks: int, asked: tuple[str, str], expected: tuple[str, str]
) -> None:
    assert chosen(machine, ranks, *asked) == expected


@pytest.mark.parametrize("asked", [BackendOptions("ncl"), BackendOptions(device="gpu")])
def test_an_unknown_word_is_refused(asked: BackendOptions) -> None:
    with pytest.raises(UsageError, match="is not known; choose from auto, "):
        check_options(CreateOptions(Path("run"), hardware=asked))


@pytest.mark.parametrize(
    ("machine", "ranks", "asked", "says"),
    [
        (LAPTOP, 1, ("nccl", "auto"), "built without CUDA"),
        (Hardware("2.13.0", cuda=True, nccl=True), 1, ("nccl", "auto"), "no GPU is visible"),
        (WINDOWS, 1, ("nccl", "auto"), "built without NCCL"),
        (ONE_GPU, 2, ("nccl", "auto"), "2 ranks on this node and 1 GPU, and it takes one rank per GPU"),
        (NODE, 2, ("nccl", "cpu"), "not of --device cpu"),
        (Hardware("2.13.0", gloo=False), 1, ("gloo", "auto"), "built without gloo"),
        (LAPTOP, 1, ("auto", "cuda"), "--device cuda: torch .* was built without CUDA"),
    ],
)
def test_what_is_not_to_be_had_is_refused_with_the_reason(
    machine: Hardware, ranks: int, asked: tuple[str, str], says: str
) -> None:
    with pytest.raises(UsageError, match=says):
        chosen(machine, ranks, *asked)


def test_ranks_that_share_a_gpu_are_told_so() -> None:
    assert "2 ranks on this node and 1 GPU: " in choose(BackendOptions(), 2, ONE_GPU).remark
    assert choose(BackendOptions(), 8, NODE).remark == ""
    assert choose(BackendOptions(device="cpu"), 9, NODE).remark == ""


def test_what_lies_on_the_cpu_goes_over_gloo_where_gpus_use_nccl() -> None:
    assert Chosen("nccl", "cuda", 8).group == "cpu:gloo,cuda:nccl"
    assert Chosen("gloo", "cpu").group == "gloo"


def test_every_backend_has_a_row_that_says_yes_or_why_not() -> None:
    assert [(name, here) for name, here, _ in rows(NODE)] == [("gloo", "yes"), ("nccl", "yes")]
    assert [why for _, here, why in rows(LAPTOP) if here == "no"] == [absence("nccl", LAPTOP)]
    assert default_in_words(NODE).endswith("nccl, GPU by local rank; gloo when a node has more ranks than its 8")


def test_the_backends_are_told_without_a_folder() -> None:
    done = CliRunner().invoke(app, ["create", "--backends"])
    assert (done.exit_code, done.stderr) == (0, "")
    assert [line.split()[:2] for line in done.stdout.splitlines()[2:3]] == [["gloo", "yes"]]


def test_a_folder_that_is_not_given_is_asked_for() -> None:
    done = CliRunner().invoke(app, ["create", "--world-size", "2"])
    assert (done.exit_code, done.stdout, done.stderr.count("\n")) == (2, "", 1)
    assert "OUT is missing" in done.stderr


def test_a_backend_that_is_not_here_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    done = CliRunner().invoke(app, ["create", str(tmp_path / "run"), "--backend", "nccl"])
    assert (done.exit_code, done.stdout, done.stderr.count("\n")) == (2, "", 1)
    assert not (tmp_path / "run").exists()


def test_the_file_says_what_carried_the_collectives(fsdp1: Command) -> None:
    metadata = load(fsdp1.out / "ep0-ba5-rank0.pt")["state"]["metadata"]
    assert (metadata["dist_backend"], metadata["device"]) == ("gloo", "cpu")
