"""Whatever happens while consolidate works, nothing looks finished that is not, and no source is touched."""

from __future__ import annotations

import hashlib
import json
import os
import resource
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import ckptools
from ckptools.errors import ReadError, WriteError

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parent.parent.parent
KILLS = 50
"""For each of three outputs."""


@pytest.fixture
def run(tmp_path) -> Path:
    """Two files of one checkpoint, of a few megabytes, in one folder."""
    folder = tmp_path / "run"
    folder.mkdir()
    for part in (1, 2):
        tensors = {f"w{part}{i}": torch.full((64, 1024), float(i)) for i in range(40)}
        torch.save(tensors, folder / f"pytorch_model-0000{part}-of-00002.bin")
    return folder


def sums(folder: Path) -> dict[str, str]:
    return {p.name: hashlib.sha256(p.read_bytes()).hexdigest() for p in folder.iterdir()}


@pytest.mark.parametrize("suffix", [".pt", ".safetensors", ".dcp"])
def test_a_kill_at_any_moment_leaves_nothing_that_looks_finished(suffix, run, tmp_path):
    before = sums(run)
    command = [sys.executable, "-m", "tests.consolidate.crashes", str(run), str(tmp_path / f"out{suffix}"), str(KILLS)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-2000:]
    told = json.loads(done.stdout)
    assert told["wrong"] == 0 and sum(told.values()) == KILLS
    assert told["midway"] >= KILLS // 10, told
    assert sums(run) == before


@pytest.mark.parametrize(("old", "new"), [(4096, 4096), (4096, 8192), (8192, 4096), (0, 4096)])
def test_a_kill_between_two_names_never_leaves_old_and_new_files_as_one_output(old, new, tmp_path):
    for name, value in (("old", 1.0), ("new", 2.0)):
        save_file({f"w{i}": torch.full((512,), value + i) for i in range(8)}, tmp_path / f"{name}.safetensors")
    paths = [tmp_path / "old.safetensors", old, tmp_path / "new.safetensors", new, tmp_path / "out"]
    command = [sys.executable, "-m", "tests.consolidate.killed_between", *map(str, paths)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-2000:]
    told = json.loads(done.stdout)
    count = 16_384 // new
    assert [state for state in told["states"] if "mix" in state] == []
    assert len(told["states"]) > count and set(told["states"][-1]) == {"new"}
    shards = [f"m-{n + 1:05d}-of-{count:05d}.safetensors" for n in range(count)]
    assert told["left"] == [*shards, "m.safetensors.index.json"]


def after(nbytes: int, happen) -> object:
    """A progress that makes something happen once, when some bytes are written."""
    seen = [0]

    def progress(n: int, _: str) -> None:
        seen[0] += n
        if seen[0] >= nbytes > seen[0] - n:
            happen()

    return progress


def nothing_left(folder: Path) -> bool:
    return sorted(p.name for p in folder.iterdir()) == ["run"]


@pytest.mark.parametrize("suffix", [".pt", ".safetensors", ".dcp"])
def test_a_source_that_shrinks_meanwhile_is_named(suffix, run, tmp_path):
    last = run / "pytorch_model-00002-of-00002.bin"
    with pytest.raises(ReadError, match=last.name):
        ckptools.consolidate(run, tmp_path / f"out{suffix}", progress=after(2 << 20, lambda: os.truncate(last, 5000)))
    assert nothing_left(tmp_path)


@pytest.mark.parametrize("suffix", [".pt", ".safetensors", ".dcp"])
def test_a_source_that_is_replaced_or_written_to_meanwhile_is_named(suffix, run, tmp_path):
    first = run / "pytorch_model-00001-of-00002.bin"

    def replace() -> None:
        shutil.copy(first, tmp_path / "run" / "x")
        os.utime(run / "x", (1, 1))
        (run / "x").replace(first)

    with pytest.raises(ReadError, match=r"changed since it was opened: it was written to; nothing was written"):
        ckptools.consolidate(run, tmp_path / f"out{suffix}", progress=after(1 << 20, replace))
    assert nothing_left(tmp_path)


def test_a_source_that_is_deleted_meanwhile_is_named(run, tmp_path):
    first = run / "pytorch_model-00001-of-00002.bin"
    with pytest.raises(ReadError, match=r"gone since it was opened|no such file"):
        ckptools.consolidate(run, tmp_path / "out.pt", progress=after(1 << 20, first.unlink))
    assert nothing_left(tmp_path)


@pytest.mark.parametrize("suffix", [".pt", ".safetensors", ".dcp"])
def test_a_read_that_fails_meanwhile_is_one_line_with_the_file(suffix, run, tmp_path):
    """No disk here fails on request; a descriptor that may not be read any more makes the same system call fail."""
    last = run / "pytorch_model-00002-of-00002.bin"
    blocked = os.open(tmp_path / "run" / "blocked", os.O_WRONLY | os.O_CREAT)

    def block() -> None:
        for link in list(Path("/proc/self/fd").iterdir()):
            if os.path.realpath(link) == str(last):
                os.dup2(blocked, int(link.name))

    with pytest.raises(ReadError, match=last.name) as error:
        ckptools.consolidate(run, tmp_path / f"out{suffix}", jobs=1, progress=after(12 << 20, block))
    os.close(blocked)
    assert "bad file descriptor" in str(error.value) and "\n" not in str(error.value)
    assert nothing_left(tmp_path)


FAILING_COPIES = """
import errno, os, sys, ckptools
from pathlib import Path
from tests.failing_calls import COPY_FILE_RANGE, fail

def read_no_more():
    memory = os.open("/proc/self/mem", os.O_RDONLY)  # where nothing is mapped, reading it is an EIO
    for link in list(Path("/proc/self/fd").iterdir()):
        if os.path.realpath(link) == source:
            os.dup2(memory, int(link.name))

source, out, broken = sys.argv[1:]
import ckptools.consolidate.run
fail(COPY_FILE_RANGE, errno.EIO)
try:
    ckptools.consolidate(source, out, progress=lambda *_: read_no_more() if broken == "source" else None, jobs=1)
except ckptools.CkptoolsError as error:
    print(type(error).__name__, error)
"""


def copied(source: Path, out: Path, broken: str) -> str:
    """What is said where the kernel's own copying ends in EIO, as it does when either disk fails."""
    command = [sys.executable, "-c", FAILING_COPIES, str(source), str(out), broken]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_disk_error_while_the_kernel_copies_is_blamed_on_the_file_that_cannot_be_read(tmp_path):
    source = tmp_path / "model.safetensors"
    save_file({f"w{i}": torch.full((256, 1024), float(i)) for i in range(8)}, source)
    said = copied(source, tmp_path / "out.safetensors", "source")
    assert said == f"ReadError {source}: cannot be read: input/output error\n"
    assert [p.name for p in tmp_path.iterdir()] == [source.name]


def test_what_the_kernel_cannot_copy_is_read_and_written_instead(tmp_path):
    source, out = tmp_path / "model.safetensors", tmp_path / "out.safetensors"
    save_file({f"w{i}": torch.full((16, 16), float(i)) for i in range(8)}, source)
    assert copied(source, out, "nothing") == ""
    assert load_file(out)["w7"].tolist() == load_file(source)["w7"].tolist()


OWN_MOUNTS = ["unshare", "--user", "--map-root-user", "--mount"]
SMALL_DISK = ["mount", "-t", "tmpfs", "-o", "size=40M", "none"]
FULL_DISK = """
import sys, pathlib, subprocess
subprocess.run([*sys.argv[4:], sys.argv[2]], check=True)
import ckptools
out, seen = pathlib.Path(sys.argv[2]), []
def fill(n, _):
    seen.append(n)
    if sum(seen) > 4 << 20 and not (out / "other").exists():
        try:
            (out / "other").write_bytes(bytes(40 << 20))
        except OSError:
            pass
try:
    ckptools.consolidate(sys.argv[1], out / sys.argv[3], progress=fill)
except ckptools.CkptoolsError as error:
    print(type(error).__name__, error)
print(sorted(p.name for p in out.iterdir()))
"""


@pytest.fixture(scope="module")
def small_disk(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Skip where a process may not mount a disk of its own, which is asked without ckptools."""
    mount = shlex.join([*SMALL_DISK, str(tmp_path_factory.mktemp("disk"))])
    if subprocess.run([*OWN_MOUNTS, "sh", "-c", mount], capture_output=True).returncode:
        pytest.skip("this machine lets nobody mount a small disk")


@pytest.mark.usefixtures("small_disk")
@pytest.mark.parametrize("suffix", [".pt", ".safetensors", ".dcp"])
def test_a_disk_that_really_fills_up_meanwhile_is_one_line_and_no_output(suffix, run, tmp_path):
    (tmp_path / "disk").mkdir()
    command = [*OWN_MOUNTS, sys.executable, "-c", FULL_DISK, str(run), str(tmp_path / "disk"), f"out{suffix}"]
    done = subprocess.run([*command, *SMALL_DISK], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    error, left = done.stdout.splitlines()
    assert error.startswith("WriteError ") and "no space left on device" in error
    assert left == "['other']"


def test_too_few_file_descriptors_are_one_line(run, tmp_path):
    code = (
        "import sys, resource, ckptools\n"
        "ck = ckptools.open(sys.argv[1], all_ranks=True)\n"
        "import ckptools.consolidate.publishing.publish, ckptools.consolidate.writers.pt\n"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (4, 4))\n"
        "try: ck.consolidate(sys.argv[2])\n"
        "except ckptools.CkptoolsError as error: print(error)\n"
    )
    command = [sys.executable, "-c", code, str(run), str(tmp_path / "out.pt")]
    done = subprocess.run(command, capture_output=True, text=True)
    assert "too many open files" in done.stdout and done.stdout.count("\n") == 1, done.stderr
    assert nothing_left(tmp_path)


def test_a_limit_of_the_file_size_is_one_line(run, tmp_path):
    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))

    command = [sys.executable, "-m", "ckptools", "consolidate", str(run), "-o", str(tmp_path / "o.pt")]
    done = subprocess.run(command, capture_output=True, text=True, preexec_fn=limit)
    assert (done.returncode, done.stderr.count("\n")) == (WriteError.exit_code, 1)
    assert nothing_left(tmp_path)
