"""Files and folders that the user may not read: one line, exit code 3, or a rank that is told to be bad."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

FIXTURES = Path(__file__).parent.parent.parent / "fixtures"

LESS_THAN_ROOT = """
import ctypes, os, sys
PR_CAPBSET_DROP, CAP_DAC_OVERRIDE, CAP_DAC_READ_SEARCH = 24, 1, 2
for capability in (CAP_DAC_OVERRIDE, CAP_DAC_READ_SEARCH):
    assert ctypes.CDLL(None, use_errno=True).prctl(PR_CAPBSET_DROP, capability, 0, 0, 0) == 0, ctypes.get_errno()
os.execv(sys.argv[1], sys.argv[1:])
"""
"""Root reads everything; a process that was started without these two capabilities is refused like anybody else."""

PLAIN_USER = [sys.executable, "-c", LESS_THAN_ROOT] if os.geteuid() == 0 else []


@pytest.fixture
def ranks(tmp_path):
    shutil.copytree(FIXTURES / "torch2.13.0-fsdp1-sharded-w4", tmp_path / "ranks")
    (tmp_path / "ranks" / "rank1.pt").chmod(0)
    return tmp_path / "ranks"


@pytest.fixture
def dcp(tmp_path):
    return Path(shutil.copytree(FIXTURES / "torch2.13.0-fsdp2-dcp-w3" / "ckpt", tmp_path / "dcp"))


def ckptools(*arguments: object) -> subprocess.CompletedProcess[str]:
    command = [*PLAIN_USER, sys.executable, "-m", "ckptools", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=60)


@pytest.mark.parametrize("command", ["inspect", "verify", "shell", "consolidate"])
def test_a_file_that_may_not_be_read_is_one_line(ranks, tmp_path, command):
    more = ["-o", tmp_path / "out.pt"] if command == "consolidate" else []
    done = ckptools(command, ranks / "rank1.pt", *more)
    assert (done.returncode, done.stdout) == (3, "")
    assert done.stderr == f"error: {ranks / 'rank1.pt'}: cannot be read: permission denied\n"
    assert not (tmp_path / "out.pt").exists()


@pytest.mark.parametrize("command", ["inspect", "verify"])
def test_a_rank_that_may_not_be_read_is_named(ranks, command):
    done = ckptools(command, ranks / "rank0.pt")
    assert done.returncode == 1
    assert "rank 1  CK015  rank1.pt cannot be read: permission denied" in done.stdout


def test_permission_is_not_told_as_damage(ranks):
    done = ckptools("inspect", ranks)
    assert "NOT WHOLE: rank 1 not readable\n" in done.stdout and "cut" not in done.stdout and "CK002" not in done.stdout


def test_consolidation_refuses_what_it_may_not_read(ranks, tmp_path):
    done = ckptools("consolidate", ranks, "-o", tmp_path / "out.pt")
    first, cause, *_ = done.stderr.splitlines()
    assert done.returncode == 4 and first.startswith(f"error: {ranks}: NOT WHOLE: rank 1 not readable; 51 ")
    assert cause == "  rank 1  CK015  rank1.pt cannot be read: permission denied"
    assert "missing" not in done.stderr.replace("--allow-missing", "") and "CK002" not in done.stderr
    assert [p.name for p in tmp_path.iterdir()] == ["ranks"]


@pytest.mark.parametrize("command", ["inspect", "verify", "consolidate"])
def test_a_data_file_of_a_dcp_that_may_not_be_read_has_the_same_cause_in_every_command(dcp, tmp_path, command):
    (dcp / "__1_0.distcp").chmod(0)
    done = ckptools(command, dcp, *(["-o", tmp_path / "out.pt"] if command == "consolidate" else []))
    said = " ".join((done.stdout + done.stderr).split())
    assert "rank 1 CK015" in said and "__1_0.distcp cannot be read: permission denied" in said
    assert "CK106" not in said and "CK002" not in said


LOSE = """
import os, sys, ckptools
ck = ckptools.open(sys.argv[1], all_ranks=True)
file = sys.argv[1] + "/rank1.pt"
lose = {"mode": lambda: os.chmod(file, 0), "cut": lambda: os.truncate(file, 999), "gone": lambda: os.remove(file)}
lose[sys.argv[2]]()
print(*{p.code for p in ck.verify(deep=True).problems} & {"CK001", "CK002", "CK004", "CK015"})
"""


@pytest.mark.slow
@pytest.mark.parametrize(("how", "code"), [("mode", "CK015"), ("cut", "CK002"), ("gone", "CK001")])
def test_what_verify_cannot_read_any_more_is_told_as_what_it_is(tmp_path, how, code):
    folder = shutil.copytree(FIXTURES / "torch2.13.0-fsdp1-sharded-w4", tmp_path / "ranks")
    command = [*PLAIN_USER, sys.executable, "-c", LOSE, str(folder), how]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.stdout == f"{code}\n", done.stderr


@pytest.mark.parametrize(("name", "code"), [(".metadata", 3), ("__1_0.distcp", 1)])
def test_a_file_of_a_dcp_that_may_not_be_read_is_named(dcp, name, code):
    (dcp / name).chmod(0)
    done = ckptools("verify", dcp, "--deep")
    assert done.returncode == code
    assert "permission denied" in done.stdout + done.stderr and name in done.stdout + done.stderr


def test_a_file_of_a_snapshot_that_may_not_be_read_is_named_when_it_is_opened(tmp_path):
    folder = Path(shutil.copytree(FIXTURES / "torchsnapshot-fsdp1" / "ckpt", tmp_path / "snapshot"))
    file = max((folder / "batched").iterdir(), key=lambda path: path.stat().st_size)
    file.chmod(0)
    done = ckptools("inspect", folder)
    assert done.returncode == 1 and "CK015" in done.stdout
    assert f"{file.relative_to(folder)} cannot be read: permission denied" in done.stdout


def test_a_folder_that_may_not_be_entered_is_one_line(dcp):
    dcp.chmod(0)
    done = ckptools("inspect", dcp)
    dcp.chmod(0o700)
    assert (done.returncode, done.stderr) == (3, f"error: {dcp}: cannot be read: permission denied\n")


@pytest.mark.parametrize("opened", ["", "step-5"])
def test_a_neighbour_that_may_not_be_entered_is_not_in_the_way(dcp, tmp_path, opened):
    (tmp_path / "run").mkdir()
    dcp.rename(tmp_path / "run" / "step-5")
    for folder in (tmp_path / "run" / "lost+found", tmp_path / "run" / "step-5" / "closed"):
        folder.mkdir(0)
    done = ckptools("inspect", tmp_path / "run" / opened)
    for folder in (tmp_path / "run" / "lost+found", tmp_path / "run" / "step-5" / "closed"):
        folder.chmod(0o700)
    assert done.returncode == 0 and "DCP folder" in done.stdout


def test_an_output_folder_that_may_not_be_written_is_one_line(dcp, tmp_path):
    closed = tmp_path / "closed"
    closed.mkdir(0o500)
    done = ckptools("consolidate", dcp, "-o", closed / "out.safetensors")
    expected = f"error: {closed / 'out.safetensors'}: cannot be created: permission denied\n"
    assert (done.returncode, done.stderr) == (3, expected)


@pytest.mark.parametrize(
    ("option", "checkpoint"),
    [
        ("--shapes", "torch2.6.0-fsdp1-local-w4/rank0.pt"),
        ("--rules", "megatron-tp2pp2-fp32/legacy"),
        ("--manifest", "torch2.13.0-fsdp2-dcp-w3/ckpt"),
    ],
)
def test_an_option_s_file_that_may_not_be_read_is_one_line(tmp_path, option, checkpoint):
    secret = tmp_path / "secret.json"
    secret.write_text("{}")
    secret.chmod(0)
    done = ckptools("verify", FIXTURES / checkpoint, option, secret)
    assert (done.returncode, done.stderr) == (3, f"error: {secret}: cannot be read: permission denied\n")
