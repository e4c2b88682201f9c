"""Who a process is, from the variables of launchers and schedulers."""

from __future__ import annotations

from pathlib import Path

import pytest

from ckptools.cli.commands.create import explain
from ckptools.cluster.environment import Setting, derive, job_port
from ckptools.errors import UsageError
from tests.training.rank_files import ckptools

TORCHRUN = {
    "RANK": "3",
    "WORLD_SIZE": "4",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
    "GROUP_RANK": "1",
    "MASTER_ADDR": "here",
    "MASTER_PORT": "1234",
}
SLURM = {
    "SLURM_PROCID": "3",
    "SLURM_STEP_ID": "0",
    "SLURM_NTASKS": "4",
    "SLURM_LOCALID": "0",
    "SLURM_NODEID": "1",
    "SLURM_JOB_ID": "1230456",
    "SLURM_JOB_NODELIST": "node[07-08]",
    "SLURM_TASKS_PER_NODE": "3,1",
}
OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "5",
    "OMPI_COMM_WORLD_SIZE": "8",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "4",
    "OMPI_COMM_WORLD_NODE_RANK": "1",
}
HYDRA = {"PMI_RANK": "1", "PMI_SIZE": "2", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"}
PBS = {"PBS_JOBID": "4711[2].server", "PBS_NODENUM": "2", "PBS_TASKNUM": "9"}


def values(variables: dict[str, str]) -> dict[str, str]:
    return {name: fact.value for name, fact in derive(variables).facts.items()}


def pbs(tmp_path: Path) -> dict[str, str]:
    (tmp_path / "nodes").write_text("a\na\nb\nb\n")
    return PBS | {"PBS_NODEFILE": str(tmp_path / "nodes")}


def test_a_rank_of_torchrun_is_what_it_says() -> None:
    assert values(TORCHRUN) == TORCHRUN


def test_a_task_of_srun_is_a_rank() -> None:
    expected = {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "GROUP_RANK": "1"}
    assert values(SLURM) == expected | {"MASTER_ADDR": "node07", "MASTER_PORT": "15456"}
    assert derive(SLURM).counts == (3, 1)


def test_tasks_dealt_out_in_turn_keep_the_node_that_srun_says() -> None:
    facts = values(SLURM | {"SLURM_PROCID": "1", "SLURM_NODEID": "1", "SLURM_LOCALID": "0"})
    assert (facts["GROUP_RANK"], facts["LOCAL_RANK"], facts["LOCAL_WORLD_SIZE"]) == ("1", "0", "1")


@pytest.mark.parametrize(("distribution", "counts"), [("block:cyclic", (3, 1)), ("cyclic", ()), ("plane=2", ())])
def test_ranks_of_a_node_are_told_by_their_numbers_only_where_srun_fills_node_after_node(distribution, counts):
    assert derive(SLURM | {"SLURM_DISTRIBUTION": distribution}).counts == counts


@pytest.mark.parametrize(("step", "port"), [("0", "15456"), ("2", "15458"), ("4294967290", "15456")])
def test_steps_of_a_job_at_the_same_time_meet_at_ports_of_their_own(step: str, port: str) -> None:
    assert values(SLURM | {"SLURM_STEP_ID": step})["MASTER_PORT"] == port


def test_a_step_counts_more_than_its_job() -> None:
    facts = values(SLURM | {"SLURM_STEP_NUM_TASKS": "5", "SLURM_STEP_NODELIST": "node08"})
    assert (facts["WORLD_SIZE"], facts["MASTER_ADDR"]) == ("5", "node08")


@pytest.mark.parametrize("step", [{}, {"SLURM_STEP_ID": "4294967290"}])
def test_a_batch_script_or_shell_of_slurm_is_no_rank(step: dict[str, str]) -> None:
    without = {name: value for name, value in SLURM.items() if name != "SLURM_STEP_ID"}
    assert derive(without | step).starter is None


def test_open_mpi_tells_node_ranks_by_equal_nodes() -> None:
    facts = derive(OPEN_MPI).facts
    assert facts["GROUP_RANK"] == Setting("1", "RANK // LOCAL_WORLD_SIZE")
    assert derive(OPEN_MPI | {"OMPI_COMM_WORLD_NODE_RANK": "0"}).facts == facts


def test_nodes_of_unequal_size_are_not_made_up() -> None:
    assert derive(OPEN_MPI).counts == (4, 4)
    assert derive(OPEN_MPI | {"OMPI_COMM_WORLD_SIZE": "9"}).counts == ()


def test_where_open_mpi_ranks_meet_on_several_nodes_has_to_be_said() -> None:
    assert derive(OPEN_MPI).missing == ("MASTER_ADDR",)
    assert values(OPEN_MPI | {"MASTER_ADDR": "a"})["MASTER_PORT"] == "29500"


def test_ranks_of_mpiexec_on_one_node_meet_there() -> None:
    facts = values(HYDRA)
    assert (facts["RANK"], facts["WORLD_SIZE"], facts["LOCAL_RANK"], facts["MASTER_ADDR"]) == (
        "1",
        "2",
        "1",
        "127.0.0.1",
    )


def test_mpiexec_goes_before_the_batch_script_that_it_runs_in() -> None:
    started_by_srun = SLURM | {"SLURM_PROCID": "0"} | HYDRA
    assert values(started_by_srun)["RANK"] == "1"
    pmi2 = SLURM | {"PMI_RANK": "3", "PMI_SIZE": "4"}
    assert derive(pmi2).facts["RANK"].source == "SLURM_PROCID"


def test_pbs_gives_ranks_by_the_lines_of_its_node_file(tmp_path: Path) -> None:
    expected = {"RANK": "2", "WORLD_SIZE": "4", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2", "GROUP_RANK": "1"}
    assert values(pbs(tmp_path)) == expected | {"MASTER_ADDR": "a", "MASTER_PORT": "22112"}


def test_the_job_script_of_pbs_is_no_rank(tmp_path: Path) -> None:
    assert derive(pbs(tmp_path) | {"PBS_NODENUM": "0", "PBS_TASKNUM": "1"}).starter is None


def test_mpiexec_in_a_pbs_job_meets_at_its_first_host(tmp_path: Path) -> None:
    facts = values(pbs(tmp_path) | {"PBS_NODENUM": "0", "PBS_TASKNUM": "1", "PMI_RANK": "3", "PMI_SIZE": "4"})
    assert (facts["RANK"], facts["LOCAL_RANK"], facts["MASTER_ADDR"]) == ("3", "1", "a")


def test_variables_of_torch_go_before_what_follows_from_a_job() -> None:
    facts = values(SLURM | {"MASTER_ADDR": "other", "MASTER_PORT": "1"})
    assert (facts["MASTER_ADDR"], facts["MASTER_PORT"]) == ("other", "1")


def test_an_option_goes_before_every_variable() -> None:
    assert derive(TORCHRUN, {"MASTER_PORT": Setting("7", "an option")}).facts["MASTER_PORT"].value == "7"


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"RANK": "one"}, "RANK is 'one', must be a number"),
        ({"RANK": "4"}, "RANK is 4, but a world of 4 has ranks 0 to 3"),
        ({"MASTER_PORT": "99999"}, "MASTER_PORT is '99999', must be a port"),
        ({"SLURM_JOB_ID": "1", "SLURM_JOB_NODELIST": "n[1-"}, "SLURM_JOB_NODELIST: 'n[1-' is no list of hosts"),
    ],
)
def test_a_variable_that_makes_no_sense_is_named(change: dict[str, str], says: str) -> None:
    with pytest.raises(UsageError) as raised:
        derive(TORCHRUN | change)
    assert says in str(raised.value)


@pytest.mark.parametrize(("job", "port"), [("7", 15007), ("1234567", 19567), ("4711.server9", 19711), ("x", 15000)])
def test_every_rank_of_a_job_makes_the_same_port_of_its_number(job: str, port: int) -> None:
    assert job_port(job) == port


def test_what_was_found_follows_and_is_missing_is_explained() -> None:
    variables = {"RANK": "1", "MASTER_PORT": "29500", "HOME": "/"}
    lines = explain(variables, derive(variables)).splitlines()
    assert "  MASTER_PORT  29500" in lines
    assert not any("HOME" in line for line in lines)
    assert lines[-1] == "missing: WORLD_SIZE, MASTER_ADDR"


def test_the_environment_is_explained_without_a_folder() -> None:
    done = ckptools("create", "--explain-env", env=SLURM)
    assert (done.returncode, done.stderr) == (0, "")
    assert "follows: this process is a rank that srun of SLURM started" in done.stdout
    assert "LOCAL_WORLD_SIZE" in done.stdout
