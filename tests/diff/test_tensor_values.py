"""Values of tensors streamed over both layouts."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from ckptools.diff import tensor_values
from ckptools.diff.tensor_values import Reading, compare_tensors
from ckptools.files.opening import OpenFiles
from ckptools.model.regions import Box
from ckptools.tensor_io import elements
from tests.diff.made import columns, cut, rows

ARRAY = np.random.default_rng(0).standard_normal((48, 40)).astype("f4")
OTHER = ARRAY.copy()
OTHER[37, 11] += 1
LAYOUTS = {
    "whole": [Box((0, 0), (48, 40))],
    "rows": rows(48, 40, 4),
    "uneven rows": [Box((0, 0), (1, 40)), Box((1, 0), (47, 40))],
    "columns": columns(48, 40, 5),
    "grid": [Box((y, x), (24, 20)) for y in (0, 24) for x in (0, 20)],
}


def compared(a, b, **more):
    with OpenFiles() as files:
        return compare_tensors([("w", a, b)], Reading(files, 2, **more))[0]


def read_by_this_process() -> int:
    """Bytes that this process has read, as the system counts them."""
    return int(Path("/proc/self/io").read_text().split()[1])


@pytest.mark.slow
@pytest.mark.parametrize("left", LAYOUTS)
@pytest.mark.parametrize("right", LAYOUTS)
def test_the_layouts_make_no_difference(left, right, tmp_path, monkeypatch):
    monkeypatch.setattr(elements, "BAND", 50)
    monkeypatch.setattr(tensor_values, "REGION", 300)
    a = cut(tmp_path, "a", ARRAY, LAYOUTS[left], crc=False)
    same, other = (cut(tmp_path, name, x, LAYOUTS[right], crc=False) for name, x in (("b", ARRAY), ("c", OTHER)))
    assert compared(a, same).measures.differing == 0
    found = compared(a, other).measures
    assert (found.compared, found.differing, found.first) == (ARRAY.size, 1, (37, 11))
    assert found.change == pytest.approx(1 / np.linalg.norm(ARRAY.astype("f8")), rel=1e-6)


def test_elements_that_do_not_follow_each_other_in_a_file_are_compared_where_they_belong(tmp_path):
    whole = Box((0, 0), (48, 40))
    a, turned = cut(tmp_path, "a", ARRAY, [whole]), cut(tmp_path, "b", ARRAY.T.copy(), [Box((0, 0), (40, 48))])
    source = turned.shards[0].source._replace(shape=(48, 40), strides=(1, 48))
    b = replace(a, shards=(turned.shards[0]._replace(box=whole, source=source),))
    assert compared(a, b).measures.differing == compared(b, b, every_byte=True).measures.differing == 0


def test_two_shards_that_are_swapped_are_noticed(tmp_path):
    a, b = (cut(tmp_path, name, ARRAY, rows(48, 40, 4)) for name in "ab")
    first, second, *rest = b.shards
    swapped = replace(b, shards=(first._replace(source=second.source), second._replace(source=first.source), *rest))
    found = compared(a, swapped)
    assert found.measures.differing > 900 and found.skipped == 2 * 12 * 40


def test_a_shard_of_the_same_checksum_is_not_read(tmp_path):
    big = np.random.default_rng(2).standard_normal((1024, 1024)).astype("f4")
    changed = big.copy()
    changed[700, 3] = 9
    a, b, c = (cut(tmp_path, n, x, rows(1024, 1024, 4)) for n, x in (("a", big), ("b", big), ("c", changed)))
    before = read_by_this_process()
    found = compared(a, b)
    assert found.measures is None and (found.skipped, found.nbytes) == (big.size, 0)
    assert read_by_this_process() - before < 100_000
    before = read_by_this_process()
    found = compared(a, c)
    assert (found.measures.compared, found.skipped) == (big.size // 4, big.size * 3 // 4)
    assert 2 * big.nbytes // 4 <= read_by_this_process() - before < 2 * big.nbytes // 4 + 100_000
    before = read_by_this_process()
    assert compared(a, b, every_byte=True).skipped == 0
    assert read_by_this_process() - before >= 2 * big.nbytes


@pytest.mark.parametrize("change", ["crc", "length", "offset", "strides", "dtype", "no crc"])
def test_only_the_same_part_of_a_record_of_the_same_checksum_is_believed(tmp_path, change):
    a, b = (cut(tmp_path, name, ARRAY, [Box((0, 0), ARRAY.shape)]) for name in "ab")
    source = b.shards[0].source
    changes = {
        "crc": {"crc": source.crc ^ 1},
        "length": {"record_span": (0, ARRAY.nbytes - 4)},
        "offset": {"record_span": (-4, ARRAY.nbytes)},
        "strides": {"strides": (1, 48)},
        "dtype": {"dtype": "int32"},
        "no crc": {"crc": 0},
    }
    made = replace(b, shards=(b.shards[0]._replace(source=source._replace(**changes[change])),))
    if change == "no crc":
        a = replace(a, shards=(a.shards[0]._replace(source=a.shards[0].source._replace(crc=0)),))
    assert compared(a, made).skipped == 0


def test_a_flipped_bit_under_the_same_checksum_is_found_by_reading_every_byte(tmp_path):
    a, b = (cut(tmp_path, name, ARRAY, rows(48, 40, 4)) for name in "ab")
    path = b.shards[2].source.path
    data = bytearray(path.read_bytes())
    data[5] ^= 1
    path.write_bytes(data)
    found = compared(a, b, every_byte=True)
    assert (found.measures.differing, found.measures.first, found.damaged) == (1, (24, 1), True)


def test_a_file_that_is_cut_is_the_reason_why_a_tensor_cannot_be_compared(tmp_path):
    a, b = (cut(tmp_path, name, ARRAY, rows(48, 40, 4), crc=False) for name in "ab")
    path = b.shards[3].source.path
    path.write_bytes(path.read_bytes()[:100])
    with OpenFiles() as files:
        found = compare_tensors([("w", a, b), ("v", a, a)], Reading(files, 2))
    assert "b-3.bin: ends at byte 100" in found[0].problem and not found[1].problem


def copies(tmp_path, name, arrays):
    made = [cut(tmp_path, f"{name}{n}", x, [Box((0, 0), x.shape)]) for n, x in enumerate(arrays)]
    return replace(made[0], shards=tuple(t.shards[0]._replace(rank=n) for n, t in enumerate(made)))


def test_copies_that_differ_are_compared_rank_by_rank_or_not_at_all(tmp_path):
    a, b = copies(tmp_path, "a", (ARRAY, OTHER)), copies(tmp_path, "b", (ARRAY, OTHER))
    assert (compared(a, b, every_byte=True).measures.differing, compared(a, b).by_rank) == (0, True)
    moved = copies(tmp_path, "c", (OTHER, ARRAY))
    assert compared(a, moved).measures.differing == 2
    one = cut(tmp_path, "one", ARRAY, [Box((0, 0), ARRAY.shape)])
    assert "A: ranks hold different copies" in compared(a, one).problem
    assert compared(copies(tmp_path, "d", (ARRAY, ARRAY)), one, every_byte=True).measures.differing == 0


def test_a_copy_that_was_flipped_under_its_checksum_is_found_by_reading_every_byte(tmp_path):
    a, b = copies(tmp_path, "a", (ARRAY, ARRAY)), cut(tmp_path, "b", ARRAY, [Box((0, 0), ARRAY.shape)])
    path = a.shards[1].source.path
    path.write_bytes(bytes([path.read_bytes()[0] ^ 1]) + path.read_bytes()[1:])
    assert "different copies" in compared(a, b, every_byte=True).problem


def peak() -> int:
    """Most memory in KiB that this process held since it was told to forget."""
    status = Path("/proc/self/status").read_text()
    return int(next(line.split()[1] for line in status.splitlines() if line.startswith("VmHWM")))


def test_memory_does_not_grow_with_the_tensor(tmp_path):
    big = np.zeros((1 << 12, 1 << 12), "f4")  # 64 MiB
    a = cut(tmp_path, "a", big, rows(*big.shape, 2), crc=False)
    b = cut(tmp_path, "b", big, columns(*big.shape, 2), crc=False)
    del big
    Path("/proc/self/clear_refs").write_text("5")
    before = peak()
    assert compared(a, b).measures.differing == 0
    assert peak() - before < 32 << 10


def test_of_three_shards_the_ones_of_another_checksum_are_read(tmp_path):
    for place in range(3):
        other = ARRAY.copy()
        other[16 * place + 3, 2] += 1
        a, b = cut(tmp_path, "a", ARRAY, rows(48, 40, 3)), cut(tmp_path, f"b{place}", other, rows(48, 40, 3))
        found = compared(a, b)
        assert (found.measures.differing, found.measures.first) == (1, (16 * place + 3, 2))
        assert (found.measures.compared, found.skipped, found.nbytes_skipped) == (640, 1280, 2 * 1280 * 4)
        assert (found.nbytes, found.damaged, found.by_rank, found.problem) == (2 * 640 * 4, False, False, "")


def test_every_region_is_skipped_where_all_checksums_agree(tmp_path):
    a, b = (cut(tmp_path, name, ARRAY, rows(48, 40, 3)) for name in "ab")
    found = compared(a, b)
    assert (found.measures, found.skipped, found.nbytes) == (None, ARRAY.size, 0)
    every = compared(a, b, every_byte=True)
    assert (every.measures.compared, every.skipped, every.damaged) == (ARRAY.size, 0, False)


def test_a_progress_bar_is_told_how_many_bytes_are_compared(tmp_path):
    class Bar:
        expected = read = 0

        def begin(self, stage, nbytes):
            self.expected += nbytes

        def __call__(self, nbytes, name):
            self.read += nbytes

    one, other = np.arange(60, dtype="f4").reshape(10, 6), np.ones((10, 6), "f4")
    a, b = cut(tmp_path, "a", one, rows(10, 6, 2)), cut(tmp_path, "b", other, columns(10, 6, 3))
    skipped = cut(tmp_path, "c", one, rows(10, 6, 2)), cut(tmp_path, "d", one, rows(10, 6, 2))
    bar = Bar()
    with OpenFiles() as files:
        compare_tensors([("w", a, b), ("same", *skipped)], Reading(files, 2, progress=bar))
    assert bar.expected == bar.read == 2 * one.nbytes
