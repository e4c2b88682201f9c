from __future__ import annotations

import struct
import zipfile

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import ckptools
from ckptools.api.tensor import with_lazy_tensors
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
    tree = with_lazy_tensors(reader.read(path).tree)
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


def refused(tmp_path, members, **oddities):
    return one_line(archive(tmp_path / "odd.pt", members, **oddities))


def changed(members, name, **fields):
    for member in members:
        if member.name.endswith(name):
            for key, value in fields.items():
                setattr(member, key, value)
    return members


def test_duplicate_records_are_refused(members, tmp_path):
    twice = [*members, Member(b"good/data.pkl", b"N.")]
    assert "two records are called 'data.pkl'" in refused(tmp_path, twice)


def test_names_that_differ_in_case_only_are_refused_for_torch_does_not_tell_them_apart(members, tmp_path):
    assert "two records are called" in refused(tmp_path, [*members, Member(b"good/Data.pkl", b"N.")])


def test_two_roots_are_refused(members, tmp_path):
    assert "not below the archive's root" in refused(tmp_path, [*members, Member(b"other/data.pkl", b"N.")])


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


@pytest.mark.parametrize("name", NAMES)
def test_a_record_name_that_leads_elsewhere_is_refused(members, tmp_path, name):
    assert "record name" in refused(tmp_path, [*members, Member(name, b"x")])


def test_a_name_with_a_newline_does_not_forge_a_line(members, tmp_path):
    assert "\\n" in refused(tmp_path, [*members, *[Member(b"good/a\nok: fine", b"x")] * 2])


@pytest.mark.parametrize("front", [b"#!/bin/sh\n", b"PK\3\4junk", b"\0"])
def test_bytes_before_the_archive_are_refused(members, tmp_path, front):
    assert refused(tmp_path, members, front=front)


@pytest.mark.parametrize("front", [b"#!/bin/sh\n", b"PK\3\4junk"])
def test_bytes_before_an_archive_whose_offsets_do_not_count_them_are_refused(good, tmp_path, front):
    (tmp_path / "p.pt").write_bytes(front + good)
    assert "bytes were added or lost" in one_line(tmp_path / "p.pt")


@pytest.mark.parametrize("back", [b"\0", b"\n", b"x" * 30, b"PK\5\6" + bytes(18)])
def test_bytes_behind_the_archive_are_refused(members, tmp_path, back):
    assert refused(tmp_path, members, back=back)


def test_overlapping_records_are_refused(members, tmp_path):
    assert "runs into the next one" in refused(tmp_path, changed(members, b"data.pkl", size=1 << 20))


def test_two_records_that_share_one_header_are_refused(members, tmp_path):
    assert "the next one" in refused(tmp_path, [*members, Member(b"good/data/9", b"", header=0)])


def test_a_record_beyond_the_file_is_refused(members, tmp_path):
    assert refused(tmp_path, changed(members, b"data/0", header=1 << 30))


@pytest.mark.parametrize("size", [0, 23, 25])
def test_a_storage_of_another_size_than_its_tensors_expect_is_refused(members, tmp_path, size):
    data = bytes(size)
    assert "expect 24" in refused(tmp_path, changed(members, b"data/0", data=data))


def test_a_local_name_that_differs_is_refused(members, tmp_path):
    assert "disagree" in refused(tmp_path, changed(members, b"data.pkl", local_name=b"good/data.pkx"))


def test_a_local_size_that_differs_is_refused(members, tmp_path):
    assert "disagree" in refused(tmp_path, changed(members, b"data.pkl", local_size=3))


def test_a_wrong_checksum_of_the_pickle_is_refused(members, tmp_path):
    assert "disagree" in refused(tmp_path, changed(members, b"data.pkl", crc=1))
    both = changed(members, b"data.pkl", crc=1, local_flags=8)
    assert "CRC-32 is wrong" in refused(tmp_path, both)


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


@pytest.mark.parametrize("flags", [(1, 1), (1, 0), (0, 1)], ids=["both", "directory", "local header"])
def test_an_encrypted_flag_is_refused(members, tmp_path, flags):
    forged = changed(members, b"data.pkl", flags=flags[0], local_flags=flags[1])
    assert one_line(archive(tmp_path / "e.pt", forged))


def test_a_local_header_that_moves_its_payload_into_the_next_record_is_refused(members, tmp_path):
    path = archive(tmp_path / "e.pt", members)
    data = bytearray(path.read_bytes())
    data[28:30] = struct.pack("<H", 8)  # the length of the first record's extra field
    path.write_bytes(data)
    with File(path) as file, pytest.raises(ReadError, match="disagree"):
        Container(file).payload(members[0].name.partition(b"/")[2].decode())


def test_an_archive_with_a_comment_is_refused(good, tmp_path):
    (tmp_path / "c.pt").write_bytes(good[:-2] + b"\x01\0")
    assert one_line(tmp_path / "c.pt")


def test_a_record_larger_than_the_reader_wants_is_refused(members, tmp_path):
    with File(archive(tmp_path / "a.pt", members)) as file:
        container = Container(file)
        assert len(container.read("data/0", at_most=24)) == 24
        with pytest.raises(ReadError, match="has 24 bytes; at most 23 are read"):
            container.read("data/0", at_most=23)


@pytest.mark.parametrize("count", [0, 1, 65534])
def test_an_entry_count_that_lies_is_refused(members, tmp_path, count):
    assert "entries" in refused(tmp_path, members, count=count)


def test_a_stored_record_with_two_sizes_is_refused(members, tmp_path):
    assert "two sizes" in refused(tmp_path, changed(members, b"data.pkl", packed=5))


def test_a_zip64_size_without_its_field_is_refused(members, tmp_path):
    assert "zip64" in refused(tmp_path, changed(members, b"data.pkl", size=0xFFFFFFFF))


def test_an_absurd_zip64_size_is_refused(members, tmp_path):
    wide = struct.pack("<HHQQ", 1, 16, 2**63, 2**63)
    assert "runs into" in refused(tmp_path, changed(members, b"data.pkl", size=0xFFFFFFFF, extra=wide))


def test_a_file_without_data_pkl_is_refused(members, tmp_path):
    assert "data.pkl" in refused(tmp_path, [m for m in members if not m.name.endswith(b"data.pkl")])


def test_a_torchscript_archive_is_named(tmp_path):
    torch.jit.script(torch.nn.Linear(2, 2)).save(str(tmp_path / "s.pt"))
    assert "TorchScript" in one_line(tmp_path / "s.pt")


def test_a_big_endian_file_is_refused(members, tmp_path):
    assert "big-endian" in refused(tmp_path, changed(members, b"byteorder", data=b"big"))


def test_torchs_own_end_records_are_zip64_and_agree(good, tmp_path):
    assert b"PK\6\6" in good and b"PK\6\7" in good
    at = good.rindex(b"PK\6\6")
    (tmp_path / "z.pt").write_bytes(good[: at + 48] + struct.pack("<Q", 5) + good[at + 56 :])
    assert "end records" in one_line(tmp_path / "z.pt")


@pytest.mark.parametrize("record", [b"PK\6\6", b"PK\6\7", b"PK\5\6"])
def test_bytes_between_the_directory_and_an_end_record_are_refused(good, tmp_path, record):
    at = good.rindex(record)
    (tmp_path / "z.pt").write_bytes(good[:at] + b"\0" * 7 + good[at:])
    assert "bytes were added or lost" in one_line(tmp_path / "z.pt")
    with pytest.raises(ReadError):
        reader.probe(tmp_path / "z.pt")


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
    assert with_lazy_tensors(reader.read(path).tree)["w"].load().tolist() == [0, 1, 2, 3]


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


@pytest.mark.parametrize("more", [b"\0" * 100, b"x" * 100])
def test_bytes_behind_an_archive_are_no_sign_that_it_is_cut_short(good, tmp_path, more):
    path = tmp_path / "a.pt"
    path.write_bytes(good + more)
    with pytest.raises(ReadError, match=rf"has 100 extra bytes at the end, behind a zip archive of {len(good)} bytes"):
        reader.read(path)


def test_an_archive_that_a_copy_of_itself_follows_is_told_as_extra_bytes(good, tmp_path):
    path = tmp_path / "a.pt"
    path.write_bytes(good + b"\0" + good)
    assert "bytes were added or lost" in one_line(path)
