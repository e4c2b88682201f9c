"""Consolidating by several ranks: the same bytes as by one process, and nothing at all where one of them fails."""

from __future__ import annotations

import signal
import struct
import subprocess
import time
import zipfile
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

import ckptools
from tests.cluster.launched import CLEAN, TORCHRUN, ended, srun, torchrun
from tests.cluster.outputs import write
from tests.sparse_files import sparse
from tests.training.forked import ckptools_forked
from tests.truth import FIXTURES

SOURCE = FIXTURES / "torch2.13.0-fsdp1-sharded-w4"


def files_in(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


@pytest.fixture
def damaged(tmp_path) -> Path:
    """A copy of the source, of which the last large record is damaged."""
    folder = tmp_path / "damaged"
    folder.mkdir()
    for path in SOURCE.glob("rank*.pt"):
        (folder / path.name).write_bytes(path.read_bytes())
    flip_last_record(folder / "rank3.pt")
    return folder


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_nodes_of_two_processes_and_of_one_write_and_say_what_one_process_does(damaged, tmp_path):
    for name in ("alone", "together"):
        (tmp_path / name).mkdir()
    write(SOURCE, damaged, tmp_path / "alone")
    torchrun("-m", "tests.cluster.outputs", SOURCE, damaged, tmp_path / "together", tasks=(2, 1))
    written, alone = files_in(tmp_path / "together"), files_in(tmp_path / "alone")
    told = [written.pop(f"told-{rank}.txt") for rank in range(3)]
    assert told == [alone.pop("told-0.txt")] * 3 and b"checksums (CRC-32): FAIL, 1 problem" in told[0]
    assert written == alone
    assert {"all.pt", "all.dcp/.metadata", "one.safetensors.manifest.json", "digests.json"} <= written.keys()


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_nodes_that_number_themselves_write_what_one_process_does(tmp_path):
    alone, together = tmp_path / "alone.safetensors", tmp_path / "together.safetensors"
    printed = torchrun("-m", "ckptools", "consolidate", SOURCE, "-o", together, tasks=(1, 2), rdzv="c10d")
    ckptools.consolidate(SOURCE, alone)
    assert sum(map(bool, printed)) == 1 and together.read_bytes() == alone.read_bytes()


def partial_in(folder: Path) -> list[Path]:
    return [path for path in folder.iterdir() if path.name.startswith(".")]


def wait_for_partial(folder: Path, started: list[subprocess.Popen[str]]) -> None:
    while not partial_in(folder):
        assert all(process.poll() is None for process in started), ended(started)
        time.sleep(0.001)


@pytest.mark.slow
@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    ("killed", "by", "why"),
    [
        (1, signal.SIGKILL, " is gone: "),
        (1, signal.SIGSTOP, " is gone: Timed out waiting 2000ms for "),
        (0, signal.SIGKILL, ", or what started it, has ended: "),
    ],
)
def test_a_killed_rank_ends_the_other_in_one_line_without_an_output(tmp_path, killed, by, why):
    source, out = sparse(tmp_path / "big.safetensors", 3 << 30), tmp_path / "out"
    out.mkdir()
    zeros = ("--allow-missing", "--fill", "zero")
    started = srun("consolidate", source, "-o", out / "x.pt", "-j", 1, *zeros, CKPTOOLS_RANK_TIMEOUT=2)
    wait_for_partial(out, started)
    started[killed].send_signal(by)
    [(code, printed, said)] = ended([started[1 - killed]])
    started[killed].kill()
    ended([started[killed]])
    assert (code, printed) == (3, "")
    assert said.startswith(f"error: rank {killed} on ") and why in said and said.count("\n") == 1
    assert [path.suffix for path in out.iterdir()] == ([] if killed else [".partial"])  # rank 0 would remove it


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_of_several_killed_ranks_each_is_named_and_no_other(tmp_path):
    source, out = sparse(tmp_path / "big.safetensors", 20 << 30), tmp_path / "out"
    out.mkdir()
    zeros = ("--allow-missing", "--fill", "zero")
    started = srun("consolidate", source, "-o", out / "x.pt", "-j", 1, *zeros, tasks=(5,))
    wait_for_partial(out, started)
    for rank in (1, 2):
        started[rank].kill()
    (code, printed, said), *others = ended(started)
    assert [code, *(other[0] for other in others)] == [3, -signal.SIGKILL, -signal.SIGKILL, 3, 3]
    assert said.startswith("error: rank 1 on ") and ", rank 2 on " in said and " are gone: " in said
    assert "rank 3" not in said and "rank 4" not in said and list(out.iterdir()) == []
    assert printed == "" and [other[1:] for other in others] == [("", "")] * 4


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_what_a_killed_job_has_kept_is_taken_up_by_the_next(tmp_path):
    source, out = tmp_path / "source.safetensors", tmp_path / "out"
    save_file({f"t{n}": torch.randn(1 << 18) for n in range(96)}, source)
    out.mkdir()
    words = ("consolidate", source, "-o", out / "x.pt", "-j", 1, "--resume")
    started = srun(*words, CKPTOOLS_RANK_TIMEOUT=2)
    while not any(path.stat().st_size for path in out.glob(".x.pt.resume/journal-*")):
        time.sleep(0.001)
    started[1].send_signal(signal.SIGKILL)
    assert ended(started)[0][0] == 3 and [path.name for path in out.iterdir()] == [".x.pt.resume"]
    assert [code for code, _, _ in ended(srun(*words))] == [0, 0]
    ckptools.consolidate(source, tmp_path / "expected.pt")
    assert [path.name for path in out.iterdir()] == ["x.pt"]
    assert (out / "x.pt").read_bytes() == (tmp_path / "expected.pt").read_bytes()


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_an_error_of_one_rank_is_one_line_that_names_it(damaged, tmp_path):
    (code, printed, said), other = ended(srun("consolidate", damaged, "-o", tmp_path / "x.pt"))
    assert (code, printed, other) == (4, "", (4, "", ""))
    assert said.startswith("error: rank 1 on ") and "rank3.pt: " in said and "the file is damaged" in said
    assert [path.name for path in tmp_path.iterdir()] == ["damaged"] and said.count("\n") == 1


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_under_torchrun_too_an_error_is_one_line(damaged, tmp_path):
    words = ("--standalone", "--nproc-per-node", "3", "-m", "ckptools", "consolidate", damaged, "-o", tmp_path / "x.pt")
    done = subprocess.run([TORCHRUN, *words], capture_output=True, text=True, env=CLEAN | {"OMP_NUM_THREADS": "1"})
    [said] = [line for line in done.stderr.splitlines() if line.startswith(("error", "interrupted"))]
    assert said.startswith("error: rank 2 on ") and "rank3.pt: " in said
    assert [path.name for path in tmp_path.iterdir()] == ["damaged"]


@pytest.mark.timeout(120)
def test_a_record_that_two_ranks_read_is_compared_as_one(tmp_path):
    source = tmp_path / "in.pt"
    torch.save({"w": torch.arange(1 << 16, dtype=torch.float32)}, source)
    done = ckptools_forked(2, "consolidate", source, "-o", tmp_path / "x.pt")
    assert done.returncode == 0 and "source checksums: 1 record right" in done.stdout
    assert torch.equal(torch.load(tmp_path / "x.pt")["w"], torch.arange(1 << 16, dtype=torch.float32))
    flip_last_record(source)
    done = ckptools_forked(2, "consolidate", source, "-o", tmp_path / "y.pt")
    assert done.returncode == 4 and done.stderr.count("in.pt: w: ") == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in.pt", "x.pt"]


def flip_last_record(path: Path) -> None:
    """Flip a bit of a record of a torch.save archive that lies near its end, and is part of a tensor."""
    found = [i for i in zipfile.ZipFile(path).infolist() if "/data/" in i.filename and i.file_size >= 256]
    data = bytearray(path.read_bytes())
    at = found[-1].header_offset
    name, extra = struct.unpack_from("<HH", data, at + 26)
    data[at + 30 + name + extra] ^= 1
    path.write_bytes(data)
