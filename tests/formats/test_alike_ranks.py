"""Rank files that are like another are read by comparing: the same checkpoint as opcode by opcode, damaged or not."""

from __future__ import annotations

import random
import struct
import zlib
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from ckptools.errors import ReadError
from ckptools.files.opening import File
from ckptools.files.zip_archive import Container, checksum_places
from ckptools.formats.open import open_checkpoint
from ckptools.formats.reader_processes import Receiver, Sender
from ckptools.formats.shared import merge
from ckptools.formats.shared import merge as alike_ranks
from ckptools.model.extents import Extents
from ckptools.model.tree import tensors_in
from ckptools.pickles import reader
from ckptools.pickles.alike import Pattern
from ckptools.pickles.reader import AlikeFiles
from ckptools.training_state import modules
from tests.fake_world import fake_group
from tests.pickles.test_shard_runs import spelled

WORLD = 20


@contextmanager
def one_by_one():
    """Read every file opcode by opcode, and keep an object for each shard."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(reader.AlikeFiles, "read", lambda *_: None)
        patched.setattr(merge, "MIN_COLUMNS", 1 << 30)
        yield


def save(folder: Path, rank: int, rows: int = 2, stage: str = "") -> None:
    """One rank's file: DTensors on a mesh of 10 by 2, a replica, and plain values that are its own.

    Names begin with those of a stage.
    """
    random.seed(rank)
    with fake_group(rank, WORLD):
        mesh = init_device_mesh("cpu", (10, 2), mesh_dim_names=("replicas", "shards"))
        # No operation on a DTensor: torch would answer with the mesh of the world before.
        local = torch.full((rows, 3), float(rank))
        sharded = [DTensor.from_local(local, mesh, [Replicate(), Shard(0)]) for _ in range(5)]
        cut = [DTensor.from_local(torch.ones(1, rows), mesh, [Shard(0), Shard(1)]) for _ in range(2)]
        state = {f"{stage}a": sharded[0], "b": sharded[1], "c": cut[0], "d": torch.nn.Parameter(torch.ones(rows))}
        seeds = tuple((1 << 20) + (n if n != 20 else 100 * rank) for n in range(40))  # one in a run of equal ints
        own = {
            "seeds": seeds,
            "rank": rank,
            "name": f"host-{rank}",
            "wall": 0.5 * rank,
            "python": random.getstate(),
            "same": [1, "x"],
        }
        of = {f"{stage}a": sharded[2], "b": sharded[3], "c": cut[1]}
        moments = {name: {"exp_avg": value, "step": torch.tensor(3.0)} for name, value in of.items()}
        groups = [{"params": [*moments], "lr": 0.1, "seen": rank % 3}]
        optimizer = {"state": moments, "param_groups": groups}
        tree = {"state": {"model": state, "optimizers": {"AdamW": optimizer}}, "rng": own}
        torch.save(tree, folder / f"ep0-ba1-rank{rank}.pt")


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    folder = tmp_path_factory.mktemp("alike") / "run"
    folder.mkdir()
    for rank in (0, *range(WORLD)):  # the first world of a process leaves its mesh to the later ones
        save(folder, rank)
    return folder


def rank_file(folder: Path, rank: int) -> Path:
    return folder / f"ep0-ba1-rank{rank}.pt"


def copied(world: Path, folder: Path) -> Path:
    (folder / "run").mkdir()
    for path in world.iterdir():
        (folder / "run" / path.name).symlink_to(path)
    return folder / "run"


def told(folder: Path, jobs: int = 1):
    """Everything about a checkpoint but the seconds that it took."""
    ck = open_checkpoint(folder, all_ranks=True, jobs=jobs, follow_symlinks=True)
    own = [{path: spelled(dict(of)) for path, of in values.items()} for values in (ck.per_rank, ck.unequal)]
    cost = (ck.cost.files, ck.cost.nbytes)
    return spelled(ck.tree), own, ck.files, ck.problems, ck.world_size, ck.step, ck.names, ck.differing, cost


def fields(saved):
    return spelled(saved.tree), saved._replace(tree=None)


@pytest.mark.slow
@pytest.mark.parametrize("jobs", [1, 2])
def test_a_checkpoint_is_the_same_compared_and_opcode_by_opcode(world, jobs):
    found = told(world, jobs)
    with one_by_one():
        assert found == told(world)


def test_two_files_of_one_rank_are_found_as_opcode_by_opcode(world, tmp_path):
    folder = copied(world, tmp_path)
    rank_file(folder, 1).unlink()
    rank_file(folder, 1).symlink_to(rank_file(world, 0))
    found = told(folder)
    with one_by_one():
        assert found == told(folder)


@pytest.mark.slow
@pytest.mark.parametrize("first", [0, 7])
def test_every_file_is_like_any_other(world, first):
    alike = AlikeFiles(rank_file(world, first))
    for rank in range(WORLD):
        saved = alike.read(rank_file(world, rank))
        assert fields(saved) == fields(modules.read_file(rank_file(world, rank)))


def test_a_process_answers_with_what_a_file_has_for_itself(world):
    path = rank_file(world, 3)
    saved = AlikeFiles(rank_file(world, 0)).read(path)
    data = Sender().encode(saved)
    received = Receiver({}, AlikeFiles(rank_file(world, 0))).decode(data)
    assert fields(received) == fields(modules.read_file(path)) and len(data) < 10_000


def test_shards_of_many_ranks_are_kept_by_column(world):
    tree = open_checkpoint(world, all_ranks=True).tree
    assert all(isinstance(tensor.shards, Extents) for _, tensor in tensors_in(tree["state"]))


@pytest.mark.slow
@pytest.mark.parametrize("missing", [[0], [5, 6], [18, 19]])
def test_pieces_of_missing_files_are_listed(world, tmp_path, missing):
    folder = copied(world, tmp_path)
    for rank in missing:
        rank_file(folder, rank).unlink()
    found = told(folder)
    with one_by_one():
        assert found == told(folder)


def test_files_that_are_unlike_are_merged_with_those_that_are_alike(world, tmp_path):
    folder = copied(world, tmp_path)
    for rank in (4, 11):
        rank_file(folder, rank).unlink()
        save(folder, rank, rows=4)
    found = told(folder)
    with one_by_one():
        assert found == told(folder) and found[3]


KINDS = {
    "in blocks": lambda rank: rank * 3 // WORLD,
    "in turn": lambda rank: rank % 3,
    "of which the first is alone": lambda rank: min(rank, 1),
    "of which each is another": lambda rank: rank,
}


@pytest.mark.slow
@pytest.mark.parametrize("jobs", [1, 2])
@pytest.mark.parametrize("least", [2, alike_ranks.MIN_RANKS])
@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_ranks_of_several_kinds_are_the_same_as_opcode_by_opcode(world, tmp_path, monkeypatch, kind, least, jobs):
    folder = copied(world, tmp_path)
    for rank in range(WORLD):
        rank_file(folder, rank).unlink()
        save(folder, rank, stage="stage" * kind(rank))
    monkeypatch.setattr(alike_ranks, "MIN_RANKS", least)
    monkeypatch.setattr(reader, "FILES_PER_PATTERN", 1)
    found = told(folder, jobs)
    with one_by_one():
        assert found == told(folder)


@pytest.mark.slow
@pytest.mark.parametrize("rows", [2, 3], ids=["whole", "short of elements"])
@pytest.mark.parametrize("jobs", [1, 2])
def test_the_last_ranks_of_an_uneven_cut_are_joined_with_the_others_by_column(tmp_path, monkeypatch, jobs, rows):
    monkeypatch.setattr(reader, "FILES_PER_PATTERN", 1)
    for rank in range(WORLD):
        save_uneven(tmp_path, rank, rows)
    found = told(tmp_path, jobs)
    with one_by_one():
        assert found == told(tmp_path)
    of = dict(tensors_in(open_checkpoint(tmp_path, all_ranks=True, jobs=jobs).tree))
    assert isinstance(of["model", "a"].shards, Extents) and len(of["model", "a"].shards) == WORLD - 2


def save_uneven(folder: Path, rank: int, rows: int) -> None:
    """Chunks of 3 rows, of which rank 17 has fewer, and the last two none."""
    with fake_group(rank, WORLD):
        mesh = init_device_mesh("cpu", (WORLD,))
        height = 3 if rank < 17 else rows if rank == 17 else 0
        shape = torch.Size((3 * 17 + 2, 2))
        local = torch.full((height, 2), float(rank))
        one = DTensor.from_local(local, mesh, [Shard(0)], run_check=False, shape=shape, stride=(2, 1))
        torch.save({"model": {"a": one}, "rank": rank}, folder / f"ep0-ba1-rank{rank}.pt")


def test_another_file_is_compared_with_after_two_of_its_kind_that_are_like_none(world, tmp_path):
    folder = copied(world, tmp_path)
    for rank in range(10, WORLD):
        rank_file(folder, rank).unlink()
        save(folder, rank, stage="other")
    alike = AlikeFiles(rank_file(folder, 0), 2 * reader.FILES_PER_PATTERN)
    compared = []
    for rank in range(WORLD):
        compared.append(alike.read(rank_file(folder, rank)) is not None)
        if not compared[-1]:
            alike.missed(reader.read(rank_file(folder, rank)))
    assert [rank for rank, was in enumerate(compared) if not was] == [10, 11]


def test_another_value_in_a_param_group_is_a_problem_of_that_rank(world, tmp_path):
    folder = copied(world, tmp_path)
    data = rank_file(folder, 13).read_bytes()
    rank_file(folder, 13).unlink()
    lr = struct.pack(">d", 0.1)
    rank_file(folder, 13).write_bytes(with_checksum(tmp_path, data.replace(lr, struct.pack(">d", 0.3))))
    found = told(folder)
    with one_by_one():
        assert found == told(folder)
    assert any(problem.ranks == (13,) for problem in found[3])


# -- damage -----------------------------------------------------------------------------------------------------------


def with_checksum(folder: Path, data: bytes) -> bytes:
    """The bytes of an archive with the right CRC-32 for its pickle, if the directory can be read."""
    path = folder / "changed.pt"
    path.write_bytes(data)
    changed = bytearray(data)
    with File(path) as file:
        archive = Container(file)
        start, size = archive.payload("data.pkl")
        crc = zlib.crc32(data[start : start + size])
        for place in checksum_places(archive, "data.pkl"):
            changed[place : place + 4] = crc.to_bytes(4, "little")
    return bytes(changed)


@pytest.fixture(scope="module")
def comparing(world, tmp_path_factory):
    """The pattern of a file, the bytes of another, where its pickle lies, and a place for changed copies."""
    path = rank_file(world, 3)
    with File(path) as file:
        start, size = Container(file).payload("data.pkl")
    return Pattern(rank_file(world, 0)), path.read_bytes(), range(start, start + size), tmp_path_factory.mktemp("bytes")


def assert_same_or_left_to_others(pattern: Pattern, path: Path) -> None:
    alike = AlikeFiles(None)
    alike._pattern = pattern
    saved = alike.read(path)
    if saved is not None:
        try:
            assert fields(saved) == fields(modules.read_file(path))
        except ReadError as error:
            pytest.fail(f"read by comparing, and else: {error}")


changes = st.lists(st.tuples(st.floats(0, 1, exclude_max=True), st.integers(0, 255)), min_size=1, max_size=3)


@pytest.mark.slow
@given(changes=changes)
@settings(deadline=None, max_examples=300)
def test_a_changed_pickle_with_a_right_checksum_means_the_same(comparing, changes):
    pattern, data, span, folder = comparing
    changed = bytearray(data)
    for where, byte in changes:
        changed[span[int(where * len(span))]] = byte
    path = folder / "ep0-ba1-rank3.pt"
    path.write_bytes(with_checksum(folder, bytes(changed)))
    assert_same_or_left_to_others(pattern, path)


@pytest.mark.slow
@given(changes=changes)
@settings(deadline=None, max_examples=300)
def test_changed_bytes_outside_of_the_pickle_mean_the_same(comparing, changes):
    pattern, data, span, folder = comparing
    changed = bytearray(data)
    outside = [*range(span.start), *range(span.stop, len(data))]
    for where, byte in changes:
        changed[outside[int(where * len(outside))]] = byte
    path = folder / "ep0-ba1-rank3.pt"
    path.write_bytes(changed)
    assert_same_or_left_to_others(pattern, path)


# -- more than 4 GiB --------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def wide(tmp_path_factory):
    """Two files with a hole of 5 GiB. The offsets of the records behind it stand in zip64 fields."""
    paths = [tmp_path_factory.mktemp("wide") / f"ep0-ba1-rank{rank}.pt" for rank in range(2)]
    for rank, path in enumerate(paths):
        with torch.serialization.skip_data():
            tree = {"a": torch.empty(5 << 30, dtype=torch.uint8), "b": torch.ones(3), "c": torch.ones(2), "rank": rank}
            torch.save(tree, path)
    return paths


def changed_at_the_end(path: Path, folder: Path, tail: bytes) -> Path:
    """A copy with other last bytes, and holes before them."""
    changed = folder / path.name
    size = path.stat().st_size
    with path.open("rb") as source, changed.open("wb") as file:
        file.write(source.read(1 << 14))
        file.seek(size - len(tail))
        file.write(tail)
    return changed


def tail_of(path: Path) -> bytes:
    """What lies behind the hole: local headers, the directory, the end records."""
    with path.open("rb") as file:
        file.seek(-(4 << 10), 2)
        return file.read()


def test_files_of_more_than_4_gib_are_compared(wide):
    saved = AlikeFiles(wide[0]).read(wide[1])
    assert fields(saved) == fields(modules.read_file(wide[1]))
    assert saved.tree["b"].shards[0].source.offset > 5 << 30


def test_a_hole_of_another_size_is_left_to_others(wide, tmp_path):
    path = tmp_path / "ep0-ba1-rank1.pt"
    with torch.serialization.skip_data():
        tree = {"a": torch.empty(6 << 30, dtype=torch.uint8), "b": torch.ones(3), "c": torch.ones(2), "rank": 1}
        torch.save(tree, path)
    assert AlikeFiles(wide[0]).read(path) is None


@pytest.mark.parametrize("offset", [0, 1, 1 << 62, (1 << 63) - 1, (1 << 64) - 1])
def test_an_absurd_zip64_offset_is_left_to_others(wide, tmp_path, offset):
    with File(wide[1]) as file:
        right = Container(file).records["data/2"].header.to_bytes(8, "little")
    tail = tail_of(wide[1])
    at = tail.rindex(right, 0, tail.rindex(b"PK\6\6"))
    path = changed_at_the_end(wide[1], tmp_path, tail[:at] + offset.to_bytes(8, "little") + tail[at + 8 :])
    assert AlikeFiles(wide[0]).read(path) is None


@pytest.mark.slow
@given(changes=changes)
@settings(deadline=None, max_examples=200)
def test_changed_bytes_behind_4_gib_mean_the_same(wide, tmp_path_factory, changes):
    tail = bytearray(tail_of(wide[1]))
    for where, byte in changes:
        tail[int(where * len(tail))] = byte
    path = changed_at_the_end(wide[1], tmp_path_factory.getbasetemp(), bytes(tail))
    assert_same_or_left_to_others(Pattern(wide[0]), path)
