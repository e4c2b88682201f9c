"""What is at some keys, as text."""

from __future__ import annotations

import pytest

from ckptools.contents.record import ShardRow
from ckptools.contents.show import show
from ckptools.contents.text import element_lines, shard_map, shown_text
from ckptools.display.screen import PIPE, Screen
from tests.display.made import checkpoint, composer_tree, hostile, plain, sharded


def key(shape, *shards: tuple[int | None, tuple[int, ...], tuple[int, ...], str]):
    rows = [ShardRow(rank, offsets, sizes, status, "f", "r", 0, 0, "", "") for rank, offsets, sizes, status in shards]
    return shape, rows


def test_a_strip_has_a_cell_for_each_row_and_holes_are_marked():
    made = key((8, 3), (0, (0, 0), (3, 3), "here"), (1, (3, 0), (3, 3), "missing"), (2, (6, 0), (2, 3), "here"))
    assert shard_map(*made) == ["dim 0  [000...22]"]


def test_long_dimensions_are_drawn_in_proportion_and_a_small_hole_is_seen():
    made = key((6400,), (0, (0,), (3200,), "here"), (1, (3201,), (3199,), "here"))
    assert shard_map(*made) == ["dim 0  [" + "0" * 32 + "." + "1" * 31 + "]"]


def test_a_replica_that_is_here_stands_for_one_that_is_not():
    made = key((4,), (0, (0,), (2,), "missing"), (2, (0,), (2,), "here"), (1, (2,), (2,), "here"))
    assert shard_map(*made) == ["dim 0  [2211]"]


def test_two_cut_dimensions_make_a_grid():
    quarters = [(r, (2 * (r // 2), 3 * (r % 2)), (2, 3), "here" if r != 3 else "missing") for r in range(4)]
    assert shard_map(*key((4, 6), *quarters)) == [
        "dim 0 down, dim 1 across", "[000111]", "[000111]", "[222...]", "[222...]",
    ]  # fmt: skip


def test_many_shards_have_a_cell_each_and_what_is_whole_has_no_map():
    many = key((256,), *((r, (r,), (1,), "here" if r != 137 else "missing") for r in range(256)))
    lines = shard_map(*many)[1:]
    assert [len(line) for line in lines] == [66] * 4 and lines[2][1 + 137 - 128] == "."
    assert lines[0].startswith("[0123456789ab") and "#" in lines[0]
    assert shard_map(*key((4,), (0, (0,), (4,), "here"))) == shard_map(*key(())) == []


def text(ck, *keys: str, screen: Screen = PIPE) -> list[str]:
    return shown_text(show(ck, keys), screen).splitlines()


def test_values_are_a_table_and_one_alone_stands_in_full():
    ck = checkpoint(composer_tree(4))
    assert text(ck, "scheduler")[0].split() == ["key", "value"]
    assert text(ck, "schedulers.CosineAnnealingLR.T_max") == ["schedulers.CosineAnnealingLR.T_max  20000"]


def test_elements_of_a_slice_stand_below_each_other_to_the_right():
    assert list(element_lines([[1, -20], [300, 4]], "int64")) == ["  1  -20", "300    4"]
    assert list(element_lines([[[1], [22]]], "int64")) == ["[0, 0]   1", "[0, 1]  22"]
    assert list(element_lines([[1, -20], [300, 4]], "int64", placed=True)) == ["[0]    1  -20", "[1]  300    4"]


def test_bytes_alone_stand_behind_their_description():
    assert text(checkpoint({"model": {"w": plain(2)}, "blob": b"ab\x00"}), "blob") == ["blob  3 bytes: 616200"]


def test_a_terminal_shows_so_many_shards_and_says_how_many_more():
    ck = checkpoint({"model": {"w": sharded(512, 2, ranks=256)}})
    assert len(text(ck, "w", screen=Screen(100, 40))) < 55 < len(text(ck, "w"))
    assert any("216 more" in line for line in text(ck, "w", screen=Screen(100, 40)))


def test_the_files_of_shards_are_named_in_full_and_said_once_if_there_is_only_one():
    lines = text(checkpoint({"w": sharded(64, 2, ranks=4)}), "w", screen=Screen(54, 40))
    title = next(n for n, line in enumerate(lines) if line.startswith("rank "))
    assert max(map(len, lines[title:])) <= 54 and not any("..." in line for line in lines[title:])
    one = text(checkpoint({"w": plain(64, 2)}), "w", screen=Screen(50, 40))
    assert [line for line in one if line.startswith("file ")] == ["file ep0-ba12000-rank0.pt"]


@pytest.mark.parametrize("screen", [PIPE, Screen(80, 40), Screen(30, 40)])
def test_names_from_the_file_can_neither_act_nor_forge_a_line(screen):
    lines = text(hostile(), "*", screen=screen)
    assert all(line.isprintable() for line in lines) and not any(line.startswith("whole") for line in lines)
