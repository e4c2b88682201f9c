from __future__ import annotations

import struct
import zipfile

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import ckptools
from ckptools.errors import CkptoolsError, ReadError
from ckptools.files.opening import File
from ckptools.files.zip_archive import Container, probe
from ckptools.model.tensor import Tensor
from ckptools.pickles import reader
from tests.pickles.forge import Member, archive, members_of, one_line
from tests.truth import FIXTURES

TREE = {"w": torch.arange(6.0).reshape(2, 3), "step": 3}


@pytest.fixture
def members(tmp_path):
    return members_of(TREE, tmp_path / "good.pt")


@pytest.fixture(scope="module")
def good(tmp_path_factory):
    path = tmp_path_factory.mktemp("good") / "g.pt"
    torch.save(TREE, path)
    return path.read_bytes()


def values(path):
    tree = reader.read(path).tree
    return {k: v.load().tolist() if isinstance(v, Tensor) else v for k, v in tree.items()}


WANTED = {"w": TREE["w"].tolist(), "step": 3}


def test_a_hand_written_archive_is_as_good_as_torchs(members, tmp_path):
    assert values(archive(tmp_path / "a.pt", members)) == WANTED == values(tmp_path / "good.pt")


def test_payloads_lie_where_zipfile_finds_them(members, tmp_path):
    with File(tmp_path / "good.pt") as file:
        container = Container(file)
        assert {m.name.partition(b"/")[2].decode(): m.data for m in members} == {
            name: file.read(*container.payload(name)) for name in container.records
        }


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(cut=st.integers(0, 10_000))
def test_a_file_cut_anywhere_is_named_as_cut(good, tmp_path, cut):
    (tmp_path / "c.pt").write_bytes(good[: cut % len(good)])
    told = one_line(tmp_path / "c.pt")
    assert "cut short" in told or told == "is empty" or cut % len(good) < 4


@pytest.mark.parametrize("lost", [1, 2, 21, 22, 23, 60])
def test_a_file_that_lost_its_last_bytes_is_cut_short(good, tmp_path, lost):
    (tmp_path / "c.pt").write_bytes(good[:-lost])
    assert "cut short" in one_line(tmp_path / "c.pt")
    with File(tmp_path / "c.pt") as file, pytest.raises(ReadError, match="cut short"):
        probe(file)


NAMES = (
    b"/etc/passwd",
    b"../x",
    b"good/../x",
    b"good/a\0b",
    b"good",
    b"good/",
    b"",
    b"good/\xff",
    b"good//x",
    b"good/./x",
)
WIDE = struct.pack("<HHQQ", 1, 16, 2**63, 2**63)
TWICE = [Member(b"good/a\nok: fine", b"x")] * 2


def also(*more: Member):
    return lambda members: [*members, *more]


def with_fields(name: bytes, **fields):
    def change(members):
        for member in members:
            if member.name.endswith(name):
                vars(member).update(fields)
        return members

    return change


def without(name: bytes):
    return lambda members: [m for m in members if not m.name.endswith(name)]


ODD = {
    "two of one name": (also(Member(b"good/data.pkl", b"N.")), "two records are called 'data.pkl'"),
    "names that differ in case": (also(Member(b"good/Data.pkl", b"N.")), "two records are called"),
    "two roots": (also(Member(b"other/data.pkl", b"N.")), "not below the archive's root"),
    **{f"the name {name!r}": (also(Member(name, b"x")), "record name") for name in NAMES},
    "a line in a name": (also(*TWICE), "\\n"),
    "records that overlap": (with_fields(b"data.pkl", size=1 << 20), "runs into the next one"),
    "two of one header": (also(Member(b"good/data/9", b"", header=0)), "the next one"),
    "one beyond the file": (with_fields(b"data/0", header=1 << 30), ""),
    **{f"a storage of {n}": (with_fields(b"data/0", data=bytes(n)), "expect 24") for n in (0, 23, 25)},
    "another local name": (with_fields(b"data.pkl", local_name=b"good/data.pkx"), "disagree"),
    "another local size": (with_fields(b"data.pkl", local_size=3), "disagree"),
    "another local checksum": (with_fields(b"data.pkl", crc=1), "disagree"),
    "a wrong checksum": (with_fields(b"data.pkl", crc=1, local_flags=8), "CRC-32 is wrong"),
    "encrypted": (with_fields(b"data.pkl", flags=1, local_flags=1), ""),
    "encrypted in the directory": (with_fields(b"data.pkl", flags=1, local_flags=0), ""),
    "encrypted in the local header": (with_fields(b"data.pkl", flags=0, local_flags=1), ""),
    "two sizes": (with_fields(b"data.pkl", packed=5), "two sizes"),
    "a zip64 size without its field": (with_fields(b"data.pkl", size=0xFFFFFFFF), "zip64"),
    "an absurd zip64 size": (with_fields(b"data.pkl", size=0xFFFFFFFF, extra=WIDE), "runs into"),
    "no data.pkl": (without(b"data.pkl"), "data.pkl"),
    "big-endian": (with_fields(b"byteorder", data=b"big"), "big-endian"),
}
"""What is odd about the records of an archive, and words of the line that refuses it."""


@pytest.mark.parametrize("what", ODD)
def test_an_archive_of_odd_records_is_refused(members, tmp_path, what):
    make, words = ODD[what]
    assert words in one_line(archive(tmp_path / "odd.pt", make(members)))


@pytest.mark.parametrize(
    "around",
    [
        *({"front": front} for front in (b"#!/bin/sh\n", b"PK\3\4junk", b"\0")),
        *({"back": back} for back in (b"\0", b"\n", b"x" * 30, b"PK\5\6" + bytes(18))),
        *({"count": count} for count in (0, 1, 65534)),
    ],
    ids=str,
)
def test_an_archive_with_bytes_around_it_or_a_count_that_lies_is_refused(members, tmp_path, around):
    assert ("entries" if "count" in around else "") in one_line(archive(tmp_path / "odd.pt", members, **around))


ADDED = "bytes were added or lost"
CHANGED = {
    "in front": (lambda good: b"#!/bin/sh\n" + good, ADDED),
    "an entry in front": (lambda good: b"PK\3\4junk" + good, ADDED),
    "a comment": (lambda good: good[:-2] + b"\x01\0", ""),
    "zeros behind": (lambda good: good + b"\0" * 100, "has 100 extra bytes at the end, behind a zip archive of"),
    "text behind": (lambda good: good + b"x" * 100, "has 100 extra bytes at the end, behind a zip archive of"),
    "itself behind": (lambda good: good + b"\0" + good, ADDED),
    "before the 64-bit end": (lambda good: between(good, b"PK\6\6"), ADDED),
    "before the locator": (lambda good: between(good, b"PK\6\7"), ADDED),
    "before the end": (lambda good: between(good, b"PK\5\6"), ADDED),
    "end records that disagree": (lambda good: disagreeing(good), "end records"),
}


def between(good: bytes, record: bytes) -> bytes:
    at = good.rindex(record)
    return good[:at] + b"\0" * 7 + good[at:]


def disagreeing(good: bytes) -> bytes:
    assert b"PK\6\6" in good and b"PK\6\7" in good
    at = good.rindex(b"PK\6\6")
    return good[: at + 48] + struct.pack("<Q", 5) + good[at + 56 :]


@pytest.mark.parametrize("what", CHANGED)
def test_an_archive_of_torch_with_other_bytes_is_refused(good, tmp_path, what):
    change, words = CHANGED[what]
    (tmp_path / "c.pt").write_bytes(change(good))
    assert words in one_line(tmp_path / "c.pt")
    with pytest.raises(ReadError):
        reader.probe(tmp_path / "c.pt")


def test_no_checksums_at_all_are_accepted(tmp_path):
    torch.serialization.set_crc32_options(False)
    try:
        torch.save(TREE, tmp_path / "n.pt")
    finally:
        torch.serialization.set_crc32_options(True)
    with File(tmp_path / "n.pt") as file:
        assert {r.crc for r in Container(file).records.values()} <= {0}
    assert values(tmp_path / "n.pt") == WANTED


def test_a_compressed_record_is_refused(tmp_path, members):
    with zipfile.ZipFile(tmp_path / "z.pt", "w", zipfile.ZIP_DEFLATED) as zipped:
        for member in members:
            zipped.writestr(member.name.decode(), member.data)
    assert "compressed" in one_line(tmp_path / "z.pt")


def test_a_local_header_that_moves_its_payload_into_the_next_record_is_refused(members, tmp_path):
    path = archive(tmp_path / "e.pt", members)
    data = bytearray(path.read_bytes())
    data[28:30] = struct.pack("<H", 8)  # the length of the first record's extra field
    path.write_bytes(data)
    with File(path) as file, pytest.raises(ReadError, match="disagree"):
        Container(file).payload(members[0].name.partition(b"/")[2].decode())


def test_a_record_larger_than_the_reader_wants_is_refused(members, tmp_path):
    with File(archive(tmp_path / "a.pt", members)) as file:
        container = Container(file)
        assert len(container.read("data/0", at_most=24)) == 24
        with pytest.raises(ReadError, match="has 24 bytes; at most 23 are read"):
            container.read("data/0", at_most=23)


def test_a_torchscript_archive_is_named(tmp_path):
    torch.jit.script(torch.nn.Linear(2, 2)).save(str(tmp_path / "s.pt"))
    assert "TorchScript" in one_line(tmp_path / "s.pt")


def test_bytes_between_the_directory_and_a_narrow_end_record_are_refused(members, tmp_path):
    data = archive(tmp_path / "z.pt", members).read_bytes()
    (tmp_path / "z.pt").write_bytes(data[:-22] + b"\0" * 7 + data[-22:])
    assert "zip directory is not where the end record says" in one_line(tmp_path / "z.pt")


def test_a_sparse_file_beyond_4_gib_is_read_through_zip64(tmp_path):
    path, far = tmp_path / "big.pt", 5 << 30
    members = members_of({"w": torch.arange(4.0)}, tmp_path / "small.pt")
    order = sorted(members, key=lambda m: m.name.endswith(b"data/0"))
    with path.open("wb") as file:
        directory = b""
        for member in order:
            if member.name.endswith(b"data/0"):
                file.seek(far)
                member.header, member.extra = 0xFFFFFFFF, struct.pack("<HHQ", 1, 8, far)
            directory += member.central(file.tell())
            file.write(member.local())
        start = file.tell()
        end64 = struct.pack("<4sQ2H2L4Q", b"PK\6\6", 44, 45, 45, 0, 0, *[len(order)] * 2, len(directory), start)
        locator = struct.pack("<4sLQL", b"PK\6\7", 0, start + len(directory), 1)
        end = struct.pack("<4s4H2LH", b"PK\5\6", 0, 0, *[len(order)] * 2, len(directory), 0xFFFFFFFF, 0)
        file.write(directory + end64 + locator + end)
    assert reader.read(path).tree["w"].load().tolist() == [0, 1, 2, 3]


def test_a_directory_of_a_million_and_more_records_is_refused(tmp_path):
    many = struct.pack("<4s6H3L5H2L", b"PK\1\2", *[0] * 9, 3, 0, 0, 0, 0, 0, 0) + b"a/b"
    n = 1_200_000
    end64 = struct.pack("<4sQ2H2L4Q", b"PK\6\6", 44, 45, 45, 0, 0, n, n, n * len(many), 0)
    locator = struct.pack("<4sLQL", b"PK\6\7", 0, n * len(many), 1)
    end = struct.pack("<4s4H2LH", b"PK\5\6", 0, 0, 0xFFFF, 0xFFFF, 0xFFFFFFFF, 0, 0)
    (tmp_path / "m.pt").write_bytes(many * n + end64 + locator + end)
    assert "records" in one_line(tmp_path / "m.pt")


def test_an_empty_file_says_so(tmp_path):
    (tmp_path / "e.pt").touch()
    assert one_line(tmp_path / "e.pt") == "is empty"
    with pytest.raises(ReadError, match="is empty"):
        ckptools.open(tmp_path / "e.pt")


REAL = [*sorted(FIXTURES.glob("*/*rank0.pt")), FIXTURES / "torch2.13.0-ddp-w4/snapshot.pt"]


@pytest.mark.slow
@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_random_damage_to_a_real_file_is_accepted_or_refused_in_one_line(tmp_path, data):
    original = data.draw(st.sampled_from(REAL)).read_bytes()
    damaged = bytearray(original)
    for _ in range(data.draw(st.integers(1, 4))):
        # The pickle comes first in the file and the directory last; most damage should hit those.
        at = data.draw(st.one_of(st.integers(0, len(original) - 1), st.integers(0, 3000), st.integers(-3000, -1)))
        damaged[at] = data.draw(st.integers(0, 255))
    path = tmp_path / "rank0.pt"
    path.write_bytes(damaged[: data.draw(st.one_of(st.just(len(original)), st.integers(0, len(original))))])
    try:
        ckptools.open(path)
    except CkptoolsError as error:
        assert "\n" not in str(error)
