"""Files that are copies of others under another rank's name, by stated checksums or by first bytes."""

from __future__ import annotations

from array import array
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ckptools.files.opening import OpenFiles
from ckptools.model.extents import ExtentLayout, Extents, extent_file
from ckptools.model.regions import Box
from ckptools.model.shards import Shard, Source
from ckptools.model.tensor import Tensor
from ckptools.tensor_io import copies as module
from ckptools.tensor_io.copies import check_copies, copied_files, may_be_a_copy

ROWS = 40


def of_ranks(folder: Path, *pieces: np.ndarray, boxes: tuple[int, ...] | None = None) -> Tensor:
    """A tensor of which each rank has some rows in a file of bare floats."""
    shards = []
    for rank, piece in enumerate(pieces):
        path = folder / f"{rank}.bin"
        path.write_bytes(piece.astype("<f4").tobytes())
        source = Source(path, 0, "float32", (ROWS,), (1,), "", (0, 4 * ROWS))
        at = rank if boxes is None else boxes[rank]
        shards.append(Shard(Box((at * ROWS,), (ROWS,)), rank, source))
    return Tensor((ROWS * len(pieces),), "float32", tuple(shards), "chunks")


def by_column(tensor: Tensor) -> Tensor:
    """The same tensor with its shards in columns, as those of items that are like others."""
    listed = Extents("float32")
    for shard in tensor.found:
        listed.offsets.append(shard.box.offsets)
        listed.sizes.append(shard.box.sizes)
        listed.files.append(extent_file(shard.source.path, shard.rank))
        listed.starts.append(0)
        listed.lengths.append(0)
    listed.crcs = array("I", bytes(4 * len(listed)))
    listed.layouts = [ExtentLayout.of(shard.source, 0) for shard in tensor.found]
    return replace(tensor, shards=listed)


def copies(tensor: Tensor) -> list[tuple[str, int | None]]:
    with OpenFiles() as files:
        found, columns = ([*copied_files([("w", one)], files)] for one in (tensor, by_column(tensor)))
    assert found == columns
    return [(p.code, p.rank) for p in found]


def test_the_same_bytes_for_other_places_may_be_a_copy(tmp_path):
    one, other = np.arange(ROWS), np.arange(ROWS) + 1
    assert copies(of_ranks(tmp_path, one, other, one)) == [("CK009", 2)]


def test_other_bytes_are_none(tmp_path):
    assert copies(of_ranks(tmp_path, np.arange(ROWS), np.arange(ROWS) + 1)) == []


def test_replicas_have_the_same_place_and_are_none(tmp_path):
    one, other = np.arange(ROWS), np.arange(ROWS) + 1
    assert copies(of_ranks(tmp_path, one, other, one, other, boxes=(0, 1, 0, 1))) == []


def test_elements_that_are_all_alike_prove_nothing(tmp_path):
    assert copies(of_ranks(tmp_path, np.zeros(ROWS), np.zeros(ROWS), np.ones(ROWS), np.ones(ROWS))) == []


def test_another_tensor_that_differs_proves_that_there_is_no_copy(tmp_path):
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    same = of_ranks(tmp_path / "a", np.arange(ROWS), np.arange(ROWS))
    paths = [tmp_path / "a" / f"{rank}.bin" for rank in (0, 1)]
    for rank, path in enumerate(paths):
        path.write_bytes(path.read_bytes() + np.full(ROWS, rank, "<f4").tobytes())
    shards = [s._replace(source=s.source._replace(offset=4 * ROWS)) for s in same.shards if s.source]
    other = Tensor(same.shape, "float32", tuple(shards), "chunks")
    with OpenFiles() as files:
        assert copied_files([("w", same), ("v", other)], files) == []


# -- columns, compared with one shard after the other -----------------------------------------------------------------


FILES = 4
LENGTHS = (16, 20)


@pytest.fixture(scope="module")
def floats(tmp_path_factory):
    """Files of which two pairs have the same bytes, which repeat."""
    folder = tmp_path_factory.mktemp("floats")
    for number in range(FILES):
        (folder / f"{number}.bin").write_bytes((np.arange(100) % 20 + number % 2).astype("<f4").tobytes())
    return folder


@st.composite
def shards_of_tensors(draw):
    """Tensors of a few shards in few files: file, place, length, record, and the CRC-32 of that, mostly one of two."""
    places = st.sampled_from((0, 20)), st.sampled_from(LENGTHS)
    one = st.tuples(st.integers(0, FILES - 1), *places, st.sampled_from("ab"))
    crcs = {(file, record): draw(st.sampled_from((0, 5, 6))) for file in range(FILES) for record in "ab"}
    some = st.lists(one, min_size=1, max_size=6)
    cut_alike = one.map(lambda shard: [(file, *shard[1:]) for file in range(FILES)])
    listed = draw(st.lists(some | cut_alike, min_size=1, max_size=4))
    return [[(*shard, crcs[shard[0], shard[3]]) for shard in shards] for shards in listed]


def tensors(folder: Path, drawn, shared: bool):
    lists = {}
    for number, listed in enumerate(drawn):
        shards = []
        for file, at, length, record, crc in listed:
            source = Source(folder / f"{file}.bin", 4 * at, "float32", (length,), (1,), record, (0, 400), crc)
            shards.append(Shard(Box((at,), (length,)), file, source))
        kept = Extents.of(shards, "float32")
        for name in ("files", "offsets", "sizes") if shared else ():
            column = getattr(kept, name)
            setattr(kept, name, lists.setdefault(tuple(column), column))
        yield f"t{number}", Tensor((60,), "float32", kept, "chunks")


def stray(drawn):
    """Files that state the same as the first one that does, each shard looked at; every second has the same bytes."""
    stated: dict[int, dict[object, tuple]] = {}
    for number, listed in enumerate(drawn):
        for file, at, length, record, crc in listed:
            if crc:
                facts = record, "float32", crc, 400
                stated.setdefault(file, {})[number, at, length, record] = facts
    first, found = {}, []
    for file, facts in stated.items():
        names = {number for number, *_ in facts}
        other = first.setdefault((frozenset(facts.values()), names.pop() if len(names) == 1 else None), file)
        times = [v[1:] for v in set(facts.values())]
        elsewhere = [v[1:] for place, v in facts.items() if place not in stated[other]]
        elsewhere = [v for v in elsewhere if times.count(v) == 1]
        if other != file and other % 2 == file % 2 and may_be_a_copy(elsewhere):
            found.append(file)
    return found


@pytest.mark.parametrize("first", [0, 1, 4])
@pytest.mark.parametrize("one_of", [1, 2])
@given(drawn=shards_of_tensors())
@settings(deadline=None)
def test_stated_checksums_in_columns_prove_the_copies_that_each_shard_proves(one_of, first, floats, drawn):
    for shared in (False, True):
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(module, "FIRST_KINDS", first)
            patched.setattr(module, "MANY", 0)
            patched.setattr(module, "ONE_OF", one_of)
            found = check_copies([((name,), t) for name, t in tensors(floats, drawn, shared)])
            assert [p.rank for p in found] == stray(drawn)


def test_tied_weights_in_a_file_each_are_no_copies(floats):
    drawn = [[(0, 0, 20, "a", 5), (1, 20, 20, "a", 6)], [(2, 0, 20, "a", 5), (3, 20, 20, "a", 6)]]
    assert [*check_copies([((name,), t) for name, t in tensors(floats, drawn, shared=False)])] == []
    copied = [[(0, 0, 20, "a", 5), (2, 20, 20, "a", 5)], [(1, 0, 20, "a", 5), (3, 20, 20, "a", 6)]]
    assert [p.rank for p in check_copies([((name,), t) for name, t in tensors(floats, copied, shared=False)])] == [2]


def test_what_each_file_has_twice_proves_no_copy(floats):
    experts = [[(file, place, 20, record, 5)] for file, place, record in ((0, 0, "a"), (0, 20, "b"))]
    experts = [[*one, (1, one[0][1] + 40, 20, one[0][3], 5)] for one in experts]
    assert [*check_copies([((name,), t) for name, t in tensors(floats, experts, shared=False)])] == []


def same_bytes(drawn):
    """Files with tensors of the same names and sizes as an earlier one at other places, and the same bytes in all."""
    held: dict[int, dict[int, list]] = {}
    for number, listed in enumerate(drawn):
        for file, at, length, _, crc in listed:
            if not crc:
                held.setdefault(file, {}).setdefault(number, []).append((at, length))

    def kind(file, what):
        return frozenset((number, what(piece)) for number, pieces in held[file].items() for piece in pieces)

    alike: dict[object, list[int]] = {}
    for file in held:
        alike.setdefault(kind(file, lambda piece: piece[1]), []).append(file)
    found = []
    for files in alike.values():
        firsts: dict[object, int] = {}
        for file in files:
            firsts.setdefault(kind(file, lambda piece: piece), file)
        names = sorted(held[files[0]])
        data = {
            f: [(np.arange(100) % 20 + f % 2)[a : a + n].tolist() for a, n in (held[f][x][-1] for x in names)]
            for f in firsts.values()
        }
        groups: dict[str, list[int]] = {}
        for file, values in data.items():
            groups.setdefault(str(values), []).append(file)
        found += [file for group in groups.values() for file in group[1:]]
    return sorted(found)


@given(drawn=shards_of_tensors())
@settings(deadline=None, max_examples=300)
def test_first_bytes_in_columns_prove_the_copies_that_each_shard_proves(floats, drawn):
    for shared in (False, True):
        with OpenFiles() as files:
            found = copied_files([*tensors(floats, drawn, shared)], files)
        assert sorted(p.rank for p in found) == same_bytes(drawn)
