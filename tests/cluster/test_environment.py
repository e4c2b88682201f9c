"""Who a process is, from the variables of torchrun and SLURM."""

from __future__ import annotations

import pytest

from ckptools.cli.commands.create import explain
from ckptools.cluster.environment import Setting, derive
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


def values(variables: dict[str, str]) -> dict[str, str]:
    return {name: fact.value for name, fact in derive(variables).facts.items()}


def test_a_rank_of_torchrun_is_what_it_says() -> None:
    assert values(TORCHRUN) == TORCHRUN


def test_a_task_of_srun_is_a_rank() -> None:
    expected = {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "GROUP_RANK": "1"}
    assert values(SLURM) == expected | {"MASTER_ADDR": "node07", "MASTER_PORT": "15456"}


def test_tasks_dealt_out_in_turn_keep_the_node_that_srun_says() -> None:
    facts = values(SLURM | {"SLURM_PROCID": "1", "SLURM_NODEID": "1", "SLURM_LOCALID": "0"})
    assert (facts["GROUP_RANK"], facts["LOCAL_RANK"], facts["LOCAL_WORLD_SIZE"]) == ("1", "0", "1")


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
    ],
)
def test_a_variable_that_makes_no_sense_is_named(change: dict[str, str], says: str) -> None:
    with pytest.raises(UsageError) as raised:
        derive(TORCHRUN | change)
    assert says in str(raised.value)


@pytest.mark.parametrize(("job", "port"), [("7", "15007"), ("1234567", "19567"), ("x", "15000")])
def test_every_rank_of_a_job_makes_the_same_port_of_its_number(job: str, port: str) -> None:
    assert values(SLURM | {"SLURM_JOB_ID": job})["MASTER_PORT"] == port


@pytest.mark.parametrize(
    ("hosts", "first"),
    [
        ("login", "login"),
        ("a,b-1.site.example", "a"),
        ("node[01-03,07],login", "node01"),
        ("rack[1-2]n[01-02],login", "rack1n01"),
        ("gpu[9-11]-ib", "gpu9-ib"),
    ],
)
def test_ranks_meet_at_the_first_host_of_slurm_s_list(hosts: str, first: str) -> None:
    assert values(SLURM | {"SLURM_JOB_NODELIST": hosts})["MASTER_ADDR"] == first


@pytest.mark.parametrize("hosts", ["node[1-", "node]1[", ",a", "node[x-y]", "node[]", "a b"])
def test_what_is_no_list_of_hosts_is_refused(hosts: str) -> None:
    with pytest.raises(UsageError, match="is no list of hosts"):
        derive(SLURM | {"SLURM_JOB_NODELIST": hosts})


@pytest.mark.parametrize(("tasks", "expected"), [("3,1", "1"), ("2(x2)", "2"), ("4", None), ("2(x3)", None)])
def test_ranks_of_this_node_are_said_by_a_list_that_is_of_this_step(tasks: str, expected: str | None) -> None:
    assert values(SLURM | {"SLURM_TASKS_PER_NODE": tasks}).get("LOCAL_WORLD_SIZE") == expected


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
