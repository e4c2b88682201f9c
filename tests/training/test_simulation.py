"""Files of a world that is not there are what its ranks would have written, and say how much of it is here."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torch.distributed.tensor import DTensor
from typer.testing import CliRunner

import ckptools
from ckptools.cli import app
from ckptools.errors import UsageError
from ckptools.training import create
from ckptools.training.options import CreateOptions, ParallelOptions, SimulationOptions
from ckptools.training.output import Created
from tests.training.conftest import Command
from tests.training.rank_files import load
from tests.versions import torch_that_trains
from tools import demo

WORLD = 6


def simulated(out: Path, strategy: str, ranks: str = "all", **options: Any) -> Created:
    torch_that_trains(strategy)
    simulation = SimulationOptions(simulate_world=WORLD, ranks=ranks)
    return create(CreateOptions(out, strategy, steps=2, simulation=simulation, **options))


@pytest.fixture(scope="session")
def all_of_fsdp1(folder: Path) -> Created:
    return simulated(folder / "simulated-fsdp1", "fsdp1", full=True)


@pytest.fixture(scope="session")
def all_of_fsdp2(folder: Path) -> Created:
    return simulated(folder / "simulated-fsdp2", "fsdp2", full=True)


@pytest.fixture(scope="session")
def all_of_hsdp_tp(folder: Path) -> Created:
    """2 replicas, of which each is cut by 3 ranks, and over 2 ranks before."""
    torch_that_trains("hsdp-tp")
    simulation = SimulationOptions(simulate_world=12, ranks="all", tiny=True)
    return create(CreateOptions(folder / "simulated-hsdp-tp", "hsdp-tp", steps=2, full=True, simulation=simulation))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["all_of_fsdp1", "all_of_fsdp2", "all_of_hsdp_tp"])
def test_all_ranks_together_are_the_run_of_one_process(
    name: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    created: Created = request.getfixturevalue(name)
    problems = ckptools.verify(created.first, deep=True).problems
    # With --tiny one random state stands for those of all ranks.
    assert [p.code for p in problems] == (["CK206"] if name == "all_of_hsdp_tp" else [])
    ckptools.consolidate(created.first, tmp_path / "merged.pt")
    total, different = demo.compare(tmp_path / "merged.pt", created.out / "full.pt")
    assert (total, different) == (22 + 3 * 17 if name == "all_of_hsdp_tp" else 48 + 3 * 43, [])


@pytest.mark.parametrize("name", ["all_of_fsdp1", "all_of_fsdp2"])
def test_every_rank_has_random_states_of_its_own_and_all_files_list_them(
    name: str, request: pytest.FixtureRequest
) -> None:
    created: Created = request.getfixturevalue(name)
    first, last = (load(created.out / f"ep0-ba2-rank{rank}.pt")["rng"] for rank in (0, WORLD - 1))
    assert len({state["torch"].numpy().tobytes() for state in first}) == WORLD
    assert [state["python"] for state in first] == [state["python"] for state in last]


def outline(value: Any) -> Any:
    """What a file holds, without the numbers in its tensors, plain values and times."""
    if isinstance(value, dict):
        return {key: outline(item) for key, item in value.items()}
    if isinstance(value, ShardedTensor):
        mine = [(shard.metadata, shard.tensor.shape, shard.tensor.dtype) for shard in value._local_shards]
        return ("sharded", value._metadata, value._sharding_spec, mine)
    if isinstance(value, DTensor):
        return ("dtensor", value.shape, value.stride(), value.placements, value._local_tensor.shape, value.dtype)
    if isinstance(value, torch.Tensor):
        return (type(value), value.shape, value.dtype)
    return type(value)


@pytest.mark.parametrize("rank", [0, 2])
def test_a_simulated_file_of_fsdp1_is_laid_out_as_that_of_a_real_rank(
    rank: int, fsdp1: Command, tmp_path: Path
) -> None:
    asked = {"seed": 7, "optimizer": "DecoupledAdamW", "scheduler": "lambda"}
    create(CreateOptions(tmp_path, "fsdp1", simulation=SimulationOptions(3, str(rank)), **asked))
    real, found = (load(folder / f"ep0-ba5-rank{rank}.pt") for folder in (fsdp1.out, tmp_path))
    assert outline(found) == outline(real)
    assert groups(found) == groups(real)


def test_a_simulated_file_of_fsdp2_is_laid_out_as_that_of_a_real_rank(fsdp2: Created, tmp_path: Path) -> None:
    create(CreateOptions(tmp_path, "fsdp2", simulation=SimulationOptions(2, "1")))
    real, found = (load(folder / "ep0-ba5-rank1.pt") for folder in (fsdp2.out, tmp_path))
    assert outline(found) == outline(real)
    assert groups(found) == groups(real)


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 5])
def test_a_simulated_file_of_a_mesh_is_laid_out_as_that_of_a_real_rank(
    rank: int, hsdp_tp: Created, tmp_path: Path
) -> None:
    create(CreateOptions(tmp_path, "hsdp-tp", steps=2, simulation=SimulationOptions(8, str(rank))))
    real, found = (load(folder / f"ep0-ba2-rank{rank}.pt") for folder in (hsdp_tp.out, tmp_path))
    assert outline(found) == outline(real)
    assert groups(found) == groups(real)


def test_the_1024_ranks_of_a_mesh_are_its_product(tmp_path: Path) -> None:
    torch_that_trains("hsdp-tp")
    parallel = ParallelOptions(replicas=8, tensor_parallel=8)
    simulation = SimulationOptions(1024, "1023", tiny=True)
    create(CreateOptions(tmp_path, "hsdp-tp", steps=1, parallel=parallel, simulation=simulation))
    (path,) = tmp_path.iterdir()
    weight = load(path)["state"]["model"]["emb.weight"]
    assert (weight.device_mesh.shape, weight.device_mesh.mesh_dim_names) == ((8, 16, 8), ("replicate", "shard", "tp"))


@pytest.mark.parametrize("world", [5, 6, 7])
def test_a_world_that_does_not_divide_into_the_mesh_is_refused(world: int, tmp_path: Path) -> None:
    simulation = SimulationOptions(world, tiny=True)
    with pytest.raises(UsageError, match=f"--world-size {world} does not divide by --tensor-parallel 2 times"):
        create(CreateOptions(tmp_path, "hsdp-tp", simulation=simulation))
    with pytest.raises(UsageError, match="--replicas is 0, must be at least 1"):
        create(CreateOptions(tmp_path, "hsdp-tp", simulation=simulation, parallel=ParallelOptions(replicas=0)))


def groups(content: Any) -> Any:
    (optimizer,) = content["state"]["optimizers"].values()
    return optimizer["param_groups"]


@pytest.mark.slow
def test_fewer_than_all_ranks_are_not_whole(tmp_path: Path) -> None:
    out = tmp_path / "run"
    asked = ["--simulate-world", "256", "--ranks", "0,137", "--tiny", "--steps", "1"]
    done = CliRunner().invoke(app, ["create", str(out), *asked])
    assert done.exit_code == 0, done.stderr
    assert "one process for 2 of 256 ranks, by torch's fake process group; fsdp1\nvalues: true" in done.stdout
    assert f"saved {out}/ep0-ba1-rank{{0,137}}.pt (" in done.stdout
    ck = ckptools.open(out)
    assert (ck.whole, ck.world_size.value, ck.ranks) == (False, 256, (0, 137))
    assert next((p.code, p.severity) for p in ck.problems) == ("CK001", "error")


def test_a_tiny_file_lists_the_shards_of_all_1024_ranks(tmp_path: Path) -> None:
    create(CreateOptions(tmp_path, steps=1, simulation=SimulationOptions(1024, "1023", tiny=True)))
    (path,) = tmp_path.iterdir()
    moment = load(path)["state"]["optimizers"]["AdamW"]["state"]["emb.weight"]["exp_avg"]
    assert [shard.placement.rank() for shard in moment._metadata.shards_metadata] == list(range(1024))
    assert moment._local_shards[0].metadata.shard_sizes == [1, 16]  # the last rank has one row of 2,047
    assert path.stat().st_size < 2_000_000


def test_verl_writes_three_files_for_each_rank(tmp_path: Path) -> None:
    created = simulated(tmp_path / "run", "fsdp2", "1,4", layout="verl")
    assert [path.name for path in created.files if "model" in path.name] == [
        f"model_world_size_{WORLD}_rank_{rank}.pt" for rank in (1, 4)
    ]
    assert ckptools.open(created.first).ranks == (1, 4)


@pytest.mark.slow
def test_several_processes_write_what_one_does(all_of_fsdp1: Created, tmp_path: Path) -> None:
    simulation = SimulationOptions(WORLD, "all", jobs=2)
    created = create(CreateOptions(tmp_path / "run", "fsdp1", steps=2, full=True, simulation=simulation))
    mine, theirs = (ckptools.open(one.first, all_ranks=True) for one in (created, all_of_fsdp1))
    assert [path.name for path in created.files] == [path.name for path in all_of_fsdp1.files]
    assert all(torch.equal(tensor.load(), theirs.model[name].load()) for name, tensor in mine.model.items())


@pytest.mark.parametrize(
    ("text", "expected"), [("0", (0,)), ("all", tuple(range(9))), ("0-3,7", (0, 1, 2, 3, 7)), ("7, 1,1", (1, 7))]
)
def test_ranks_are_told_one_by_one_in_spans_or_all(text: str, expected: tuple[int, ...]) -> None:
    assert SimulationOptions(9, text).ranks_written == expected


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("--ranks", "8"), "there is no rank 8 in a world of 8"),
        (("--ranks", "3-1"), "'3-1' is no rank"),
        (("--ranks", "x"), "'x' is no rank; expected such as 0,137 or 0-3 or all"),
        (("--world-size", "4"), "--world-size is 4, --simulate-world 8"),
        (("--layout", "dcp"), "writes no dcp with fsdp1, only --layout composer"),
        (("--jobs", "0"), "--jobs is 0"),
        (("--break", "missing:0"), "options to launch, resume or break do not apply"),
        (("--sharding", "hybrid"), "takes --replicas and --tensor-parallel; leave out how else it is cut"),
    ],
)
def test_what_cannot_be_simulated_is_one_line(arguments: tuple[str, ...], says: str, tmp_path: Path) -> None:
    done = CliRunner().invoke(app, ["create", str(tmp_path / "run"), "--simulate-world", "8", *arguments])
    assert (done.exit_code, done.stdout, done.stderr.count("\n")) == (2, "", 1)
    assert says in done.stderr
    assert not (tmp_path / "run").exists()


def test_a_world_of_no_ranks_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="--simulate-world is 0"):
        create(CreateOptions(tmp_path / "run", simulation=SimulationOptions(0)))
