"""Tars: the members that tarfile finds, a checkpoint read where it lies in one, and traps refused."""

from __future__ import annotations

import io
import tarfile
import time
from pathlib import Path

import pytest

from tests.files.test_compressed import saved, values
from tests.pickles.forge import one_line


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
            found = [(name, m.start, m.size) for name, m in members(file).items()]
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
            assert file.bytes_read < 4096


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
    "a file of torch 0.1": (
        tuple((name, b"\x80\x02N.") for name in ("sys_info", "pickle", "tensors", "storages")),
        "is a tar of torch 0.1, which ckptools does not read",
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


def header(kind: bytes, size: int, sparse: bytes = b"") -> bytes:
    """A block that says what tarfile would never write."""
    block = bytearray(special("m.pt", kind).tobuf(tarfile.GNU_FORMAT))
    block[124:136] = size.to_bytes(12, "big", signed=True) if size < 0 else b"%011o\0" % size
    block[386 : 386 + len(sparse)] = sparse
    block[148:156] = b"%06o\0 " % (sum(block[:148]) + 8 * ord(" ") + sum(block[156:]))
    return bytes(block)


PAX_SPARSE = b"22 GNU.sparse.major=1\n22 GNU.sparse.minor=0\n".ljust(512, b"\0")

TRAPS = {
    "long names without end": ((header(b"L", 4) + b"abc".ljust(512, b"\0")) * 5000, "too long a header"),
    "a long name of 8 GiB": (header(b"L", 8**11 - 1), "too long a header"),
    "a long name of less than nothing": (header(b"L", -512), "too long a header"),
    "a member of less than nothing": (header(b"0", -512), "has -512 bytes"),
    "a sparse map without end": (header(b"S", 0, b"0" * 96 + b"\1") + b"1" * 100_000, "header at byte 512 is damaged"),
    "a sparse map in pax": (
        header(b"x", 44) + PAX_SPARSE + header(b"0", 1) + b"9999999\n" * 90_000,
        "too long a header",
    ),
    "digits without end": (header(b"x", 60_000) + b"1" * 60_000, "header at byte 512 is damaged"),
    "a second header that is damaged": (header(b"5", 0) + b"x" + header(b"5", 0)[1:], "header at byte 512 is damaged"),
}


@pytest.mark.parametrize("name", TRAPS)
def test_headers_that_would_keep_tarfile_busy_are_refused(name, tmp_path):
    data, told = TRAPS[name]
    (tmp_path / "m.tar").write_bytes(data + bytes(2048))
    start = time.process_time()
    assert told in one_line(tmp_path / "m.tar") and time.process_time() - start < 2


def test_every_one_of_many_members_costs_little_and_too_many_are_refused(tmp_path, monkeypatch):
    from ckptools.files import tar_archive

    monkeypatch.setattr(tar_archive, "MAX_MEMBERS", 50)
    assert "more than 50 members" in one_line(tar_of(tmp_path / "m.tar", *((f"{i}.pt", b"") for i in range(60))))
