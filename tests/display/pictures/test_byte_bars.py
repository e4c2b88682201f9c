"""Bytes by section: bars as long as the bytes are many, whose parts add up."""

from __future__ import annotations

from itertools import pairwise
from math import isclose

from hypothesis import given
from hypothesis import strategies as st

from ckptools.display.drawing import WIDTH
from ckptools.pictures.rank_map import NAMES, SIZES, ByteBar, byte_bars, bytes_by_section, part_widths
from tests.display.made import checkpoint, plain
from tests.display.pictures.svg import hovers


@given(st.lists(st.integers(1, 2**60), min_size=1, max_size=7), st.integers(0, 2**60))
def test_the_parts_of_a_bar_follow_each_other_and_none_is_wider_than_its_bytes(parts, more):
    bar = ByteBar("model", tuple((f"d{n}", nbytes) for n, nbytes in enumerate(parts)))
    most, room = bar.nbytes + more, WIDTH - NAMES - SIZES
    found = list(part_widths(bar, most))
    assert isclose(sum(width for _, width in found), bar.nbytes / most * room, rel_tol=1e-9)
    assert all(isclose(x + width, y, rel_tol=1e-9) for (x, width), (y, _) in pairwise(found))


def test_a_tied_weight_counts_once_and_dtypes_are_told_apart():
    weights = {"a": plain(8, 4, record="0"), "b": plain(8, 4, record="0"), "c": plain(8, dtype="bfloat16", record="1")}
    [bar] = byte_bars(checkpoint({"model": weights}))
    assert bar.dtypes == (("float32", 128), ("bfloat16", 16))


def test_words_and_picture_tell_the_same():
    weights = {"a": plain(1024, 4), "c": plain(1024, dtype="bfloat16", record="1")}
    picture = bytes_by_section(checkpoint({"model": weights, "rng": {"torch": plain(5056, dtype="uint8", record="2")}}))
    assert "model: 18.0 KiB (fp32 16.0 KiB, bf16 2.0 KiB)\nrng: uint8 4.9 KiB" in picture.text
    assert hovers(picture) == ["model: fp32 16.0 KiB", "model: bf16 2.0 KiB", "rng: uint8 4.9 KiB"]


def test_a_checkpoint_without_tensors_has_a_picture():
    assert "0 sections" in bytes_by_section(checkpoint({"step": 3})).text


def test_sections_that_have_no_room_are_counted():
    tree = {f"extra{n}": {"buffer": plain(n + 1, dtype="uint8", record=str(n))} for n in range(60)}
    picture = bytes_by_section(checkpoint(tree))
    assert len(hovers(picture)) == 40 and "20 smaller ones are not drawn" in picture.svg
    assert picture.text.count("\n") == 60
