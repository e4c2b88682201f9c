"""Compressed files: unpacked into a temporary file, and refused when they are traps."""

from __future__ import annotations

import bz2
import gzip
import io
import lzma
import os
import shutil
import struct
import subprocess
import sys
import tarfile
import threading
from pathlib import Path

import lz4.frame
import pytest
import torch
import zstandard

import ckptools
from ckptools.errors import NoSpaceError, OutputExistsError, ReadError
from ckptools.files import compressed, partial_files
from ckptools.formats import options as limits
from ckptools.model.tree import tensors_in
from tests.pickles.forge import one_line
from tests.pickles.test_tensors import same_bits
from tests.truth import FIXTURES

TREE = {"w": torch.arange(8_000, dtype=torch.float32).reshape(80, 100), "b": torch.ones(3, dtype=torch.bfloat16)}

PACKERS = {
    "gz": gzip.compress,
    "bz2": bz2.compress,
    "xz": lzma.compress,
    "lzma": lambda data: lzma.compress(data, lzma.FORMAT_ALONE),
    "zst": zstandard.ZstdCompressor().compress,
    "lz4": lz4.frame.compress,
}
"""By suffix: what writes such a file."""

TOOLS = {"gz": "gzip", "bz2": "bzip2", "xz": "xz", "lzma": "lzma", "zst": "zstd", "lz4": "lz4"}


def saved(tree: object = TREE, old: bool = False) -> bytes:
    buffer = io.BytesIO()
    torch.save(tree, buffer, _use_new_zipfile_serialization=not old)
    return buffer.getvalue()


def packed(path: Path, data: bytes, suffix: str | None = None) -> Path:
    path.write_bytes(PACKERS[suffix or path.suffix[1:]](data))
    return path


def values(path: Path) -> None:
    ck = ckptools.open(path)
    same_bits(ck.model["w"].load(), TREE["w"])
    same_bits(ck.model["b"].load(), TREE["b"])


@pytest.fixture
def scratch(tmp_path, monkeypatch):
    """A fresh place for temporary files; returns it."""
    folder = tmp_path / "scratch"
    folder.mkdir()
    monkeypatch.setattr(partial_files, "_folder", None)
    monkeypatch.setattr(compressed, "_made", {})
    monkeypatch.setattr("tempfile.tempdir", str(folder))
    return folder


def files_in(folder: Path) -> list[Path]:
    return [p for p in folder.rglob("*") if p.is_file()]


# -- what is read ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("old", [False, True], ids=["zip", "stream"])
@pytest.mark.parametrize("suffix", PACKERS)
def test_a_compressed_file_is_read_bit_for_bit(suffix, old, tmp_path):
    values(packed(tmp_path / f"model.pt.{suffix}", saved(old=old)))


@pytest.mark.parametrize("suffix", TOOLS)
def test_what_the_command_line_tools_write_is_read(suffix, tmp_path):
    tool = shutil.which(TOOLS[suffix])
    if tool is None:
        pytest.skip(f"no {TOOLS[suffix]} here")
    with (tmp_path / f"model.pt.{suffix}").open("wb") as out:
        subprocess.run([tool, "-c"], input=saved(), stdout=out, check=True)
    values(tmp_path / f"model.pt.{suffix}")


@pytest.mark.parametrize("suffix", PACKERS)
def test_the_content_decides_and_not_the_suffix(suffix, tmp_path):
    values(packed(tmp_path / "model.pt", saved(), suffix))


@pytest.mark.parametrize("suffix", PACKERS)
def test_streams_behind_each_other_are_one(suffix, tmp_path):
    data, pack = saved(), PACKERS[suffix]
    path = tmp_path / f"model.pt.{suffix}"
    path.write_bytes(b"".join(pack(data[i : i + 10_000]) for i in range(0, len(data), 10_000)))
    values(path)


@pytest.mark.parametrize("mode", ["w", "w:gz", "w:bz2", "w:xz"])
def test_composers_tar_is_read(mode, tmp_path):
    folder = tmp_path / "made"
    folder.mkdir()
    torch.save({"state": {"model": TREE}, "rng": []}, folder / "composer_states.pt")
    with tarfile.open(tmp_path / "ep0-ba5-rank0.tar", mode) as tar:
        tar.add(folder, arcname="")
    ck = ckptools.open(tmp_path / "ep0-ba5-rank0.tar")
    same_bits(ck.model["w"].load(), TREE["w"])
    assert (ck.whole, ck.step.value, ck.name) == (True, 5, "ep0-ba5")


def test_what_is_read_is_said(tmp_path):
    assert ckptools.open(packed(tmp_path / "m.pt.gz", saved())).saved_as == "one .pt, every tensor whole (gzip)"
    assert "(xz, pickle stream" in ckptools.open(packed(tmp_path / "m.pt.xz", saved(old=True))).saved_as


def test_rank_files_may_be_compressed(tmp_path):
    name = "torch2.13.0-fsdp1-sharded-w4"
    for path in (FIXTURES / name).glob("rank*.pt"):
        packed(tmp_path / f"ep0-ba5-{path.name}.gz", path.read_bytes())
    one, two = ckptools.open(tmp_path, all_ranks=True), ckptools.open(FIXTURES / name / "rank0.pt", all_ranks=True)
    assert (one.whole, one.ranks) == (True, (0, 1, 2, 3)) and "gzip" in one.saved_as
    for (_, found), (_, wanted) in zip(tensors_in(one.tree), tensors_in(two.tree), strict=True):
        assert found.numpy().tobytes() == wanted.numpy().tobytes()


def test_of_many_ranks_only_the_one_that_is_asked_for_is_unpacked(tmp_path, scratch, monkeypatch):
    monkeypatch.setattr(limits, "MAX_RANKS", 2)
    for rank in range(3):
        packed(tmp_path / f"rank{rank}.pt.gz", saved())
    assert [f.status for f in ckptools.open(tmp_path / "rank1.pt.gz").files] == ["seen", "read", "seen"]
    assert len(files_in(scratch)) == 1


def test_it_is_consolidated_and_the_original_is_protected(tmp_path):
    path = packed(tmp_path / "model.pt", saved(), "zst")
    ckptools.consolidate(path, tmp_path / "out.pt")
    same_bits(torch.load(tmp_path / "out.pt")["w"], TREE["w"])
    with pytest.raises(OutputExistsError, match="file of the checkpoint itself"):
        ckptools.consolidate(path, path, force=True)


def test_the_torch_loader_takes_compressed_files_too(tmp_path):
    same_bits(ckptools.load_shard(packed(tmp_path / "m.pt.bz2", saved()))["w"], TREE["w"])
    same_bits(ckptools.load_shard(packed(tmp_path / "m.pt.gz", saved(old=True)))["w"], TREE["w"])


def test_files_and_paths_are_those_of_the_original(tmp_path):
    path = packed(tmp_path / "model.pt.gz", saved())
    ck = ckptools.open(path)
    (file,) = ck.files
    assert (ck.path, file.path, file.nbytes, ck.name) == (path, path, path.stat().st_size, "model")


# -- the temporary file ------------------------------------------------------------------------------------------


def test_a_source_is_unpacked_once_and_by_one_thread(tmp_path, scratch):
    path = packed(tmp_path / "m.pt.gz", saved())
    threads = [threading.Thread(target=ckptools.open, args=(path,)) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(files_in(scratch)) == 1


def test_a_file_that_changed_is_unpacked_again(tmp_path, scratch):
    path = packed(tmp_path / "m.pt.gz", saved())
    ckptools.open(path)
    packed(path, saved({"model": {"other": torch.ones(1)}}))
    assert list(ckptools.open(path).model) == ["other"]


def test_a_temporary_file_that_somebody_removed_is_made_again(tmp_path, scratch):
    path = packed(tmp_path / "m.pt.gz", saved())
    ckptools.open(path)
    shutil.rmtree(next(scratch.iterdir()))
    values(path)


def test_it_is_nobody_elses_to_read(tmp_path, scratch):
    ckptools.open(packed(tmp_path / "m.pt.gz", saved()))
    assert [p.stat().st_mode & 0o077 for p in scratch.iterdir()] == [0]


ENDINGS = {
    "well": "",
    "in an error": "raise SystemExit('x')",
    "with a traceback": "1 / 0",
    "by Ctrl-C": "import os, signal; os.kill(os.getpid(), signal.SIGINT)",
}


@pytest.mark.slow
@pytest.mark.parametrize("ending", ENDINGS.values(), ids=ENDINGS)
def test_it_is_gone_when_the_process_ended(ending, tmp_path):
    path, scratch = packed(tmp_path / "m.pt.gz", saved()), tmp_path / "t"
    scratch.mkdir()
    code = f"import ckptools, sys, pathlib; ckptools.open({str(path)!r})\n"
    code += f"assert len(list(pathlib.Path({str(scratch)!r}).iterdir())) == 1\n{ending}"
    subprocess.run([sys.executable, "-c", code], env={**os.environ, "TMPDIR": str(scratch)}, capture_output=True)
    assert list(scratch.iterdir()) == []


def test_the_command_line_leaves_nothing_and_honours_tmpdir(tmp_path):
    path, scratch = packed(tmp_path / "m.pt.gz", saved()), tmp_path / "t"
    scratch.mkdir()
    command = [sys.executable, "-m", "ckptools", "inspect", str(path)]
    done = subprocess.run(command, env={**os.environ, "TMPDIR": str(scratch)}, capture_output=True, text=True)
    assert done.returncode == 0 and "(gzip)" in done.stdout
    assert list(scratch.iterdir()) == []


def test_a_forked_child_leaves_the_folder_to_its_parent(tmp_path, scratch):
    ckptools.open(packed(tmp_path / "m.pt.gz", saved()))
    (folder,) = scratch.iterdir()
    partial_files._remove_own_folder(folder, os.getpid() + 1)
    assert folder.is_dir()
    partial_files._remove_own_folder(folder, os.getpid())
    assert not folder.exists()


def test_an_error_about_it_names_the_original(tmp_path):
    data = saved()
    at = data.index(TREE["w"].numpy().tobytes()[:4000])
    path = packed(tmp_path / "m.pt.gz", data[:at] + b"xxxx" + data[at + 4 :])
    with pytest.raises(ReadError, match="CRC-32") as caught:
        ckptools.consolidate(path, tmp_path / "out.pt")
    assert str(caught.value).startswith(f"{path}: ")


# -- what is refused ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("keep", [0.02, 0.5, 0.99])
@pytest.mark.parametrize("suffix", PACKERS)
def test_a_file_that_is_cut_is_refused_and_leaves_nothing(suffix, keep, tmp_path, scratch):
    torch.manual_seed(0)
    path = packed(tmp_path / f"m.pt.{suffix}", saved({"w": torch.randn(10_000)}))
    path.write_bytes(path.read_bytes()[: int(path.stat().st_size * keep)])
    told = one_line(path)
    assert "cut short" in told and files_in(scratch) == []


@pytest.mark.parametrize("suffix", PACKERS)
def test_a_damaged_file_is_refused_in_one_line(suffix, tmp_path):
    torch.manual_seed(0)
    path = packed(tmp_path / f"m.pt.{suffix}", saved({"w": torch.randn(10_000)}))
    data = bytearray(path.read_bytes())
    data[len(data) // 2 :] = bytes(len(data) - len(data) // 2)
    path.write_bytes(data)
    assert one_line(path)


def test_a_bomb_is_refused_and_its_temporary_file_removed(tmp_path, scratch, monkeypatch):
    monkeypatch.setattr(compressed, "BOMB_BYTES", 32 << 20)
    path = packed(tmp_path / "m.pt.zst", saved({}) + bytes(64 << 20))
    assert "decompression bomb" in one_line(path)
    assert files_in(scratch) == []


def test_a_large_file_that_shrank_little_is_no_bomb(tmp_path, monkeypatch):
    monkeypatch.setattr(compressed, "BOMB_BYTES", 1000)
    values(packed(tmp_path / "m.pt.gz", saved()))


def test_a_full_disk_is_told_and_leaves_nothing(tmp_path, scratch, monkeypatch):
    full = shutil._ntuple_diskusage(1 << 40, 1 << 40, 1 << 20)  # type: ignore[attr-defined]
    monkeypatch.setattr(shutil, "disk_usage", lambda _: full)
    with pytest.raises(NoSpaceError, match=r"no room to unpack m\.pt\.gz .*set TMPDIR"):
        ckptools.open(packed(tmp_path / "m.pt.gz", saved()))
    assert files_in(scratch) == []


@pytest.mark.parametrize("name", ["zstandard", "lz4.frame"])
def test_a_package_that_is_not_installed_is_named(name, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, name, None)
    path = packed(tmp_path / f"m.pt.{'zst' if name == 'zstandard' else 'lz4'}", saved())
    assert "pip install 'ckptools[compressed]'" in one_line(path)


def test_lzo_is_named_and_refused(tmp_path):
    (tmp_path / "m.pt.lzo").write_bytes(b"\x89LZO\0\r\n\x1a\n" + bytes(100))
    assert "lzop -d" in one_line(tmp_path / "m.pt.lzo")


@pytest.mark.parametrize(
    ("inside", "told"),
    [
        (b"a,b,c\n1,2,3\n" * 100, "text"),
        (b"", "empty"),
        (gzip.compress(saved()), "gzip"),
        (bytes(2000), "zeros"),
        (b"\x01\xff" * 600, "something else"),
    ],
)
def test_something_else_in_it_is_told_before_all_of_it_is_unpacked(inside, told, tmp_path, scratch):
    assert f"no torch.save file is inside but {told}" in one_line(packed(tmp_path / "m.pt.gz", inside))
    assert files_in(scratch) == []


def test_a_dictionary_of_gigabytes_is_refused(tmp_path):
    filters = [{"id": lzma.FILTER_LZMA1, "dict_size": 1 << 16}]
    data = bytearray(lzma.compress(saved(), lzma.FORMAT_ALONE, filters=filters))
    data[1:5] = struct.pack("<I", 3 << 30)
    (tmp_path / "m.pt").write_bytes(data)
    assert "cannot be unpacked as lzma: Memory usage limit" in one_line(tmp_path / "m.pt")
