"""Compressed files and tars: unpacked into a temporary file or read where they lie, and refused when they are traps."""

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
from ckptools.api.tensor import with_lazy_tensors
from ckptools.errors import CkptoolsError, NoSpaceError, OutputExistsError, ReadError
from ckptools.files import compressed, file_type, temporary
from ckptools.formats.shared import rank_signs
from ckptools.model.tree import tensors_in
from ckptools.pickles import reader
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
    monkeypatch.setattr(temporary, "_folder", None)
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
    monkeypatch.setattr(rank_signs, "MAX_RANKS", 2)
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
    temporary._remove(folder, os.getpid() + 1)
    assert folder.is_dir()
    temporary._remove(folder, os.getpid())
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


# -- tars --------------------------------------------------------------------------------------------------------


def tar_of(path: Path, *members: tuple[str, bytes] | tarfile.TarInfo, format: int = tarfile.PAX_FORMAT) -> Path:
    with tarfile.open(path, "w", format=format) as tar:
        for member in members:
            if isinstance(member, tarfile.TarInfo):
                tar.addfile(member)
                continue
            info = tarfile.TarInfo(member[0])
            info.size = len(member[1])
            tar.addfile(info, io.BytesIO(member[1]))
    return path


def special(name: str, kind: bytes, target: str = "") -> tarfile.TarInfo:
    info = tarfile.TarInfo(name)
    info.type, info.linkname = kind, target
    return info


@pytest.mark.parametrize("format", [tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
@pytest.mark.parametrize("name", ["model.pt", "./model.pt", "a/" * 60 + "b.pt", "m" * 90 + ".pt"])
def test_a_tar_with_one_file_is_that_file(name, format, tmp_path):
    values(tar_of(tmp_path / "m.tar", (name, saved()), format=format))


def test_the_members_are_those_that_tarfile_finds(tmp_path):
    from ckptools.files.opening import File
    from ckptools.files.tar_archive import members

    names = ["x", "ä" * 80, "n" * 300, "a/b/c", "empty"]
    for format in (tarfile.GNU_FORMAT, tarfile.PAX_FORMAT):
        path = tar_of(tmp_path / "m.tar", *((n, n.encode() * 7 if n != "empty" else b"") for n in names), format=format)
        with tarfile.open(path) as tar, File(path) as file:
            found = [(m.name, m.start, m.size) for m in members(file).values()]
            assert found == [(m.name, m.offset_data, m.size) for m in tar.getmembers()]


def test_a_member_beyond_8_gib_is_found_by_its_wide_size(tmp_path):
    from ckptools.files.opening import File
    from ckptools.files.tar_archive import members

    for format in (tarfile.GNU_FORMAT, tarfile.PAX_FORMAT):
        info = tarfile.TarInfo("big.pt")
        info.size = 9 << 30
        path = tmp_path / "big.tar"
        path.write_bytes(info.tobuf(format))
        with path.open("ab") as out:
            out.truncate(path.stat().st_size + info.size + 1024)
        with File(path) as file:
            assert [m.size for m in members(file).values()] == [9 << 30]


REFUSED = {
    "a link": ((special("model.pt", tarfile.SYMTYPE, "/etc/passwd"),), "a link"),
    "a hard link": ((("a.pt", saved()), special("model.pt", tarfile.LNKTYPE, "a.pt")), "a link"),
    "a device": ((special("model.pt", tarfile.CHRTYPE),), "a member of type"),
    "a FIFO": ((special("model.pt", tarfile.FIFOTYPE),), "a member of type"),
    "a GNU sparse file": ((special("model.pt", tarfile.GNUTYPE_SPARSE),), "a sparse file"),
    "two of one name": ((("m.pt", saved()), ("m.pt", saved())), "two members called 'm.pt'"),
    "a name that leads out": ((("../m.pt", saved()),), "no plain relative name"),
    "an absolute name": ((("/m.pt", saved()),), "no plain relative name"),
    "several files": ((("a.pt", saved()), ("b.pt", saved())), "a tar of 2 files ('a.pt', 'b.pt'"),
    "nothing": ((), "zeros from its first byte on"),
    "a folder only": ((special("a", tarfile.DIRTYPE),), "a tar of 0 files"),
    "something else": ((("readme", b"x" * 600),), "is no torch.save file"),
    "a DeepSpeed run": (
        (("composer_states.pt", saved()), ("deepspeed/mp_rank_00_model_states.pt", saved())),
        "DeepSpeed run: unpack the tars of all ranks",
    ),
    "a name of 100 kB": ((("n" * 100_000 + ".pt", saved()),), "at most 65536"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_tar_that_is_no_one_checkpoint_is_refused(name, tmp_path):
    made, told = REFUSED[name]
    assert told in one_line(tar_of(tmp_path / "m.tar", *made))


@pytest.mark.parametrize("cut", [100, 512, 5000, 30_000])
def test_a_tar_that_is_cut_is_refused(cut, tmp_path):
    path = tar_of(tmp_path / "m.tar", ("m.pt", saved()))
    path.write_bytes(path.read_bytes()[:cut])
    told = one_line(path)
    assert "cut short" in told or cut == 100


@pytest.mark.parametrize(("at", "byte"), [(0, b"x"), (124, b"7"), (150, b"1"), (156, b"5")])
def test_a_header_that_is_damaged_is_refused(at, byte, tmp_path):
    path = tar_of(tmp_path / "m.tar", ("m.pt", saved()))
    data = bytearray(path.read_bytes())
    data[at : at + 1] = byte
    path.write_bytes(data)
    assert "header at byte 0 is damaged" in one_line(path)


def test_every_one_of_many_members_costs_little_and_too_many_are_refused(tmp_path, monkeypatch):
    from ckptools.files import tar_archive

    monkeypatch.setattr(tar_archive, "MAX_MEMBERS", 50)
    assert "more than 50 members" in one_line(tar_of(tmp_path / "m.tar", *((f"{i}.pt", b"") for i in range(60))))


# -- torch 0.1 ---------------------------------------------------------------------------------------------------


def ancient(path: Path, protocol: int = 2, ndim: int = 2, view: tuple[int, int, int, int] = (9, 7, 4, 8)) -> Path:
    """A file as torch 0.1 wrote it: a storage, a view of it, three tensors, one of them used twice."""
    import pickle

    def dumps(value: object) -> bytes:
        return pickle.dumps(value, protocol)

    kind = torch.FloatStorage
    storages = dumps(2) + dumps((7, "cpu", kind)) + struct.pack("<q12f", 12, *range(12))
    storages += dumps((8, "cpu", torch.LongStorage)) + struct.pack("<q2q", 2, -1, 5) + dumps([view])
    tensors = dumps(3)
    for key, of, sizes, strides, offset in (
        (1, 7, (3, 4), (4, 1), 0),
        (2, 9, (2, 2), (1, 2), 1),
        (3, 8, (2,), (1,), 0),
    ):
        n = ndim if key == 1 else len(sizes)
        tensors += dumps((key, of, torch.FloatTensor)) + struct.pack("<ii", n, 0)
        tensors += struct.pack(f"<{2 * len(sizes) + 1}q", *sizes, *strides, offset)

    class Pickler(pickle.Pickler):
        def persistent_id(self, value: object) -> str | None:
            return str(value.key) if isinstance(value, Persistent) else None

    buffer = io.BytesIO()
    Pickler(buffer, protocol).dump({"w": Persistent(1), "v": Persistent(2), "tied": Persistent(1), "n": Persistent(3)})
    system = dumps({"protocol_version": 1000, "little_endian": True, "type_sizes": {"int": 4}})
    parts = {"sys_info": system, "pickle": buffer.getvalue(), "tensors": tensors, "storages": storages}
    return tar_of(path, *parts.items())


class Persistent:
    def __init__(self, key: int) -> None:
        self.key = key


def test_a_file_of_torch_0_1_is_read_as_torch_reads_it(tmp_path):
    path = ancient(tmp_path / "old.pt")
    wanted, tree = torch.load(path, weights_only=False), with_lazy_tensors(reader.read(path).tree)
    assert list(tree) == list(wanted)
    for name, tensor in wanted.items():
        same_bits(tree[name].load(), tensor)
    assert tree["w"].shards == tree["tied"].shards


@pytest.mark.parametrize(("changed", "told"), [({"ndim": 99}, "99 dimensions"), ({"ndim": -1}, "-1 dimensions")])
def test_a_file_of_torch_0_1_with_odd_tensors_is_refused(changed, told, tmp_path):
    assert told in one_line(ancient(tmp_path / "old.pt", **changed))


@pytest.mark.parametrize("view", [(9, 7, 4, 80), (9, 6, 0, 1), (7, 7, 0, 1), (9, 7, -1, 2), (9, "7", 0, 1)])
def test_a_file_of_torch_0_1_with_odd_views_is_refused(view, tmp_path):
    assert one_line(ancient(tmp_path / "old.pt", view=view))


@pytest.mark.parametrize("member", ["storages", "tensors", "pickle", "sys_info"])
def test_a_file_of_torch_0_1_that_is_cut_is_refused(member, tmp_path):
    path = ancient(tmp_path / "old.pt")
    with tarfile.open(path) as tar:
        parts = {m.name: tar.extractfile(m).read() for m in tar}  # type: ignore[union-attr]
    for keep in (0, 5, len(parts[member]) - 3):
        assert one_line(tar_of(path, *(parts | {member: parts[member][:keep]}).items()))


# -- what a file is ----------------------------------------------------------------------------------------------


def npz() -> bytes:
    import numpy as np

    buffer = io.BytesIO()
    np.savez(buffer, w=np.ones(3))
    return buffer.getvalue()


KNOWN = {
    "Git LFS": b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 1234\n",
    "HTML": b"<!DOCTYPE html>\n<html><head><title>404</title></head></html>",
    "XML": b"<?xml version='1.0'?><Error><Code>AccessDenied</Code></Error>",
    "JSON": b'{"error": "not found"}',
    "text": b"hello world\n" * 50,
    "empty": b"",
    "zeros": bytes(5000),
    "GGUF": b"GGUF\3\0\0\0" + bytes(range(100)),
    "ONNX": b"\x08\x07\x12\x07pytorch\x1a\x052.1.0:\xff\x00\x01",
    "HDF5": b"\x89HDF\r\n\x1a\n" + bytes(range(50)),
    "safetensors": struct.pack("<Q", 40) + b'{"w":{"dtype":"F32","shape":[1]}}' + bytes(20),
    "plain Python pickle": b"\x80\x04\x95\x05\0\0\0\0\0\0\0}\x94.",
    "msgpack": b"\x82\xa6params\x81\xa1w\xc7\x10\x01",
    ".npz": npz(),
    "PNG": b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR" + bytes(range(40)),
    "JPEG": b"\xff\xd8\xff\xe0\0\x10JFIF" + bytes(range(40)),
}


@pytest.mark.parametrize("name", ["x.pt", "rank0.pt"])
@pytest.mark.parametrize("what", KNOWN)
def test_a_file_that_is_something_else_is_told_so(what, name, tmp_path):
    (tmp_path / name).write_bytes(KNOWN[what])
    with pytest.raises(CkptoolsError, match=what.replace(".", r"\.")) as caught:
        ckptools.open(tmp_path / name)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("head", [b"", b"\x80", b"L1", b"B", b"\x1f\x8b", b"\xff" * 512, bytes(range(256))])
def test_any_first_bytes_have_a_content_or_none(head):
    assert file_type.content_of(head) == "" and isinstance(file_type.what_is(head), str)
