"""A run that was cut short is taken up: what it has written is read again, and only what is right is believed."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import ckptools
from ckptools.consolidate.publishing.publish import Done, JournalLine
from ckptools.consolidate.source_records import CopiedBytes
from ckptools.errors import DamagedError, ReadError, RefusedError, WriteError
from ckptools.tensor_io.stream import Band, Copy
from tests.sparse_files import sparse
from tests.truth import FIXTURES, load_truth

SOURCE = FIXTURES / "torch2.13.0-fsdp1-sharded-w4"


@pytest.fixture
def source(tmp_path) -> Path:
    """A copy of a checkpoint."""
    folder = tmp_path / "source"
    shutil.copytree(SOURCE, folder)
    return folder


def content(out: Path) -> dict[str, bytes]:
    return {p.name: p.read_bytes() for p in out.iterdir()} if out.is_dir() else {"": out.read_bytes()}


def cut_short(source: Path, out: Path) -> Path:
    """Write all of an output, and fail at the end, as the source is touched meanwhile; return what is kept."""
    before, times = source / "rank0.pt", (source / "rank0.pt").stat()

    def touch(nbytes: int, fqn: str) -> None:
        os.utime(before, ns=(times.st_atime_ns, times.st_mtime_ns + 10**9))

    with pytest.raises(ReadError, match=r"rank0\.pt: changed since it was opened"):
        ckptools.consolidate(source, out, resume=True, max_shard_size=20_000, progress=touch)
    os.utime(before, ns=(times.st_atime_ns, times.st_mtime_ns))
    assert not out.exists()
    return out.with_name(f".{out.name}.resume")


def resumed(source: Path, out: Path) -> int:
    """Take up what is kept; return how many bytes were written."""
    written: list[int] = []
    done = ckptools.consolidate(
        source, out, resume=True, max_shard_size=20_000, progress=lambda nbytes, _: written.append(nbytes)
    )
    expected = out.with_name(f"expected{out.suffix}")
    ckptools.consolidate(source, expected, max_shard_size=20_000)
    assert content(out) == content(expected) and done.checksums is not None and done.checksums.right == 214
    assert [path.name for path in out.parent.iterdir() if path.name.startswith(".")] == []
    return sum(written)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["x.pt", "x.dcp"])
def test_what_is_complete_is_not_written_again(source, tmp_path, name):
    cut_short(source, tmp_path / name)
    assert resumed(source, tmp_path / name) == 0


@pytest.mark.slow
def test_a_torn_line_and_a_changed_line_are_passed_over(source, tmp_path):
    (journal,) = cut_short(source, tmp_path / "x.pt").glob("journal-*.jsonl")
    lines = journal.read_bytes().splitlines(keepends=True)
    odd = lines[3].replace(b'"odd":false', b'"odd":true')
    journal.write_bytes(b"".join([*lines[:3], odd, *lines[4:-1], lines[-1][:-9]]))
    gone = [json.loads(line[9:])["nbytes"] for line in (lines[3], lines[-1])]
    assert odd != lines[3] and resumed(source, tmp_path / "x.pt") == sum(gone) > 0


@pytest.mark.slow
def test_a_flipped_byte_of_what_is_kept_is_written_again(source, tmp_path):
    kept = cut_short(source, tmp_path / "x.pt")
    _, values, _ = load_truth(SOURCE.name)["model/emb.weight"]
    data = bytearray((kept / "x.pt").read_bytes())
    data[data.index(values)] ^= 1
    (kept / "x.pt").write_bytes(data)
    assert resumed(source, tmp_path / "x.pt") == len(values)


@pytest.mark.slow
def test_what_is_kept_of_another_source_is_refused(source, tmp_path):
    kept = cut_short(source, tmp_path / "x.pt")
    before = content(kept)
    os.utime(source / "rank1.pt")
    with pytest.raises(RefusedError, match=r"is of a run with another state of the source's files; remove it"):
        ckptools.consolidate(source, tmp_path / "x.pt", resume=True)
    assert content(kept) == before


@pytest.mark.slow
def test_a_plan_that_is_torn_is_no_plan_of_this_run(source, tmp_path):
    kept = cut_short(source, tmp_path / "x.pt")
    (kept / "plan.json").write_text((kept / "plan.json").read_text()[:40])
    before = content(kept)
    with pytest.raises(RefusedError, match=r"is of a run with another .* and another .*; remove it") as error:
        ckptools.consolidate(source, tmp_path / "x.pt", resume=True, max_shard_size=20_000)
    assert error.value.path == kept and content(kept) == before


def test_a_file_in_the_place_of_what_would_be_kept_is_named(source, tmp_path):
    (tmp_path / ".x.pt.resume").write_text("in the way")
    with pytest.raises(WriteError, match="cannot be made: file exists") as error:
        ckptools.consolidate(source, tmp_path / "x.pt", resume=True)
    assert error.value.path == tmp_path / ".x.pt.resume" and not (tmp_path / "x.pt").exists()


@pytest.mark.slow
def test_what_two_journals_say_of_the_same_bytes_counts_once(source, tmp_path):
    (journal,) = cut_short(source, tmp_path / "x.pt").glob("journal-*.jsonl")
    shutil.copy(journal, journal.with_name("journal-zz.jsonl"))
    assert resumed(source, tmp_path / "x.pt") == 0


@pytest.mark.slow
def test_lines_about_bytes_that_the_plan_does_not_have_are_passed_over(source, tmp_path):
    (journal,) = cut_short(source, tmp_path / "x.pt").glob("journal-*.jsonl")
    regions = [(10**6, 0, 8), (0, 10**9, 8), (0, 1 << 40, 1 << 40), (-1, 0, 8)]
    with journal.open("ab") as file:
        file.writelines(JournalLine(CopiedBytes(job, offset, n, 0)).line() for job, offset, n in regions)
    assert resumed(source, tmp_path / "x.pt") == 0


@pytest.mark.slow
def test_a_damaged_source_is_noticed_also_where_its_copy_is_kept(source, tmp_path):
    kept = cut_short(source, tmp_path / "x.pt")
    (journal,) = kept.glob("journal-*.jsonl")
    lines = []
    for line in journal.read_bytes().splitlines(keepends=True):
        entry = JournalLine.of_line(line)
        assert entry is not None
        # As if other bytes had been read of the source: all that this run knows of them.
        read = [(*piece[:4], piece[4] ^ 1) for piece in entry.read]
        lines.append(JournalLine(entry.region, entry.odd, read).line())
    journal.write_bytes(b"".join(lines))
    with pytest.raises(DamagedError):
        ckptools.consolidate(source, tmp_path / "x.pt", resume=True, max_shard_size=20_000)
    assert not (tmp_path / "x.pt").exists()


def test_nan_that_an_earlier_run_has_written_is_told_and_what_was_clean_stays_clean(tmp_path):
    source, out = tmp_path / "w.pt", tmp_path / "x.pt"
    torch.save({"a": torch.ones(999), "b": torch.full((999,), float("nan")), "c": torch.ones(999)}, source)
    times = source.stat()

    def touch(nbytes: int, fqn: str) -> None:
        os.utime(source, ns=(times.st_atime_ns, times.st_mtime_ns + 10**9))

    with pytest.raises(ReadError, match="changed since it was opened"):
        ckptools.consolidate(source, out, resume=True, progress=touch)
    os.utime(source, ns=(times.st_atime_ns, times.st_mtime_ns))
    written: list[str] = []
    done = ckptools.consolidate(source, out, resume=True, progress=lambda _, fqn: written.append(fqn))
    assert (written, done.odd) == ([], ("b",))


@pytest.mark.slow
def test_an_interrupt_says_what_is_kept_and_how_to_go_on(tmp_path):
    out = tmp_path / "x.pt"
    command = [sys.executable, "-m", "ckptools", "consolidate", str(sparse(tmp_path / "big.safetensors", 4 << 30))]
    command += ["--allow-missing", "--fill", "zero"]
    command += ["-o", str(out), "--resume", "-j", "1"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as started:
        while not (tmp_path / ".x.pt.resume" / "x.pt").exists():
            assert started.poll() is None
            time.sleep(0.001)
        started.send_signal(signal.SIGINT)
        printed, said = started.communicate(timeout=60)
    assert (started.returncode, printed, out.exists()) == (130, "", False)
    kept = tmp_path / ".x.pt.resume"
    expected = f"interrupted; what was written is kept in {kept}, and the same command with --resume takes it up\n"
    assert said == expected


SPANS = st.lists(st.tuples(st.integers(0, 60), st.integers(1, 20)), max_size=8)


@given(SPANS, st.integers(0, 40), st.integers(1, 60))
def test_of_a_copy_exactly_that_is_missing_which_no_region_has(spans, offset, nbytes):
    regions, at = [], 0
    for gap, length in spans:
        regions.append(CopiedBytes(5, at + gap, length, 0))
        at += gap + length
    done = Done([JournalLine(region) for region in regions])
    copy = Copy(Path("f"), 1000 + offset, offset, nbytes)
    missing = list(done.missing(5, copy))
    bytes_of = [n for part in missing for n in range(part.offset, part.offset + part.nbytes)]
    written = {n for region in regions for n in range(region.offset, region.end)}
    assert bytes_of == [n for n in range(offset, offset + nbytes) if n not in written]
    assert all(isinstance(part, Copy) and part.source_offset == 1000 + part.offset for part in missing)


def test_a_region_that_is_put_together_is_missing_unless_all_of_it_is_written():
    band = Band(None, 10, 10)  # type: ignore[arg-type]  # where it is in the tensor plays no part
    assert list(Done([JournalLine(CopiedBytes(0, 0, 20, 0))]).missing(0, band)) == []
    assert list(Done([JournalLine(CopiedBytes(0, 0, 19, 0))]).missing(0, band)) == [band]
    assert list(Done([JournalLine(CopiedBytes(1, 0, 20, 0))]).missing(0, band)) == [band]
    assert list(Done().missing(0, band)) == [band]
