"""The tree of keys: it folds, opens, filters, sorts, and reads values only when asked."""

from __future__ import annotations

import shlex
import shutil

import pytest
from typer.testing import CliRunner

from ckptools.browse.key_tree import KeyTree
from ckptools.browse.row_list import text_of
from ckptools.browse.session import glob_of
from ckptools.cli import app
from ckptools.contents.tree import keys_of
from ckptools.files.opening import File
from tests.browse.driven import Driven, drive, pressed
from tests.display.made import checkpoint, plain
from tests.truth import FIXTURES

RANKS = FIXTURES / "torch2.13.0-fsdp1-sharded-w4"


def tree_of(tree):
    return KeyTree(keys_of(checkpoint(tree)))


def test_layers_are_folded_as_in_tree_and_open_to_every_key():
    tree = tree_of({f"blocks.{n}.w": plain(2, 3, record=str(n)) for n in range(3)})
    assert [tree.node(n).name for n in range(len(tree))] == ["model", "blocks.{0..2}.w"]
    assert tree.open(1)
    assert [tree.node(n).name for n in range(2, len(tree))] == ["blocks.0.w", "blocks.1.w", "blocks.2.w"]
    assert tree.close(3) == 1 and len(tree) == 2


def test_h_goes_up_and_l_goes_in():
    async def script(driven: Driven):
        await driven.press("2", "l")
        opened = len(driven.rows())
        await driven.press("j", "h")
        assert opened > len(driven.rows()) and driven.row.startswith("+ model")

    drive(RANKS, script)


def test_a_filter_narrows_the_keys_while_it_is_typed():
    async def script(driven: Driven):
        await driven.press("slash", "u", "p", ".", "w")
        assert driven.rows() and all("up.w" in row for row in driven.rows())
        await driven.press("enter", "escape")
        assert driven.row.startswith("+ model")

    drive(RANKS, script)


def test_a_filter_may_be_a_glob():
    tree = tree_of({"a.weight": plain(2), "a.bias": plain(2, record="1"), "b.weight": plain(2, record="2")})
    tree.arrange("a.*", "as saved")
    assert [tree.node(n).name for n in range(len(tree))] == ["a.weight", "a.bias"]


def test_keys_are_sorted_by_size():
    tree = tree_of({"small": plain(2), "large": plain(2000, record="1"), "middle": plain(20, record="2")})
    tree.arrange("", "size")
    assert [tree.node(n).name for n in range(len(tree))] == ["large", "middle", "small"]


@pytest.mark.slow
def test_moving_about_reads_nothing_and_f_reads_the_values_of_one_tensor():
    async def script(driven: Driven):
        await driven.press("slash", *"blocks.0.up.w", "enter")
        before, shown = File.total_read, driven.app.session.nbytes
        await driven.press("j", "k")
        assert (File.total_read, driven.app.session.nbytes) == (before, shown)
        assert "dim 0 over 4 ranks" in " ".join(map(str.strip, driven.rows("right")))
        await driven.press("f")
        assert driven.app.session.nbytes > shown
        assert driven.rows("right")[0].startswith("rms ")
        assert any("▁" in row or "█" in row for row in driven.rows("right"))

    drive(RANKS, script)


def test_tensors_that_were_read_are_sorted_by_rms():
    async def script(driven: Driven):
        await driven.press("2", "f", "o", "o")
        found = [float(row.split()[-1]) for row in driven.rows()]
        assert len(found) == 21 and found == sorted(found, reverse=True)
        assert "order: rms" in driven.text("message")

    drive(RANKS, script)


def test_a_slice_shows_the_elements_that_show_prints():
    async def script(driven: Driven):
        await driven.press("slash", *"blocks.0.up.w", "enter", "e")
        await driven.clear()
        await driven.pilot.press(*"0,0:2", "enter")
        await driven.settled()
        assert "[0,0:2]" in driven.rows("right")
        driven.app.action_copy()
        assert driven.text("message").endswith(" --values 0,0:2")

    drive(RANKS, script)


def test_enter_reads_the_shards_by_file():
    async def script(driven: Driven):
        await driven.press("slash", *"blocks.0.up.w", "enter", "enter")
        shown = "\n".join(driven.rows("right"))
        assert "rank0.pt" in shown and "rms" in shown  # a small tensor has its figures, as in `show`

    drive(RANKS, script)


def test_the_one_element_of_a_scalar_is_shown_as_it_is():
    async def script(driven: Driven):
        await driven.press("slash", *"seen", "enter", "e", "enter")
        assert driven.rows("right")[-1].strip() == "123456789012"

    drive(RANKS, script)


def test_rows_of_elements_that_are_wrapped_say_where_each_begins():
    async def script(driven: Driven):
        await driven.press("slash", *"mix.weight", "enter", "e", "enter")
        shown = driven.rows("right")
        assert [row[:3] for row in shown if row.startswith("[") and ":" not in row] == ["[0]", "[1]", "[2]", "[3]"]

    drive(RANKS, script)


def test_u_shows_each_layer():
    folded, each = pressed(RANKS, "2", "l"), pressed(RANKS, "2", "u", "l", "j", "l")
    assert any("{0,1}" in row for row in folded) and not any("{0,1}" in row for row in each)


def test_a_glob_means_some_keys_and_no_others_or_there_is_none():
    rows = keys_of(checkpoint({name: plain(2, record=name) for name in ("a.x", "a.y", "ab.x", "c[0].z")})).rows
    by = {row.name: row for row in rows}
    assert glob_of([by["a.x"], by["a.y"]], rows) == "a.*"
    assert glob_of([by["c[0].z"]], rows) == "c[[]0].z"
    assert glob_of([by["a.x"], by["ab.x"]], rows) == "a*.x"
    assert glob_of([by["a.y"], by["ab.x"]], rows) is None


def test_the_copied_command_shows_the_same():
    async def script(driven: Driven):
        copied = []
        driven.app.copy_to_clipboard = copied.append  # type: ignore[method-assign]
        await driven.press("y", "2", "y", "slash", *"blocks.0.up.w", "enter", "y", "3", "y")
        path = str(RANKS)
        assert copied == [
            f"ckptools inspect {path}", copied[1], f"ckptools show {path} blocks.0.up.weight",
            f"ckptools inspect {path} --all-ranks",
        ]  # fmt: skip
        assert driven.text("message") == copied[-1]

    drive(RANKS, script)


@pytest.mark.slow
@pytest.mark.parametrize("fixture", [RANKS, FIXTURES / "torch2.13.0-fsdp2-dcp-w3/ckpt", FIXTURES / "dcp-hf/ckpt"])
def test_every_command_that_y_copies_runs(fixture, tmp_path):
    copied: list[str] = []

    async def script(driven: Driven):
        driven.app.copy_to_clipboard = copied.append  # type: ignore[method-assign]
        for tab in "1234567":
            await driven.press(tab, "y")
        await driven.press("slash", *"weight", "enter", "f", "y")

    path = shutil.copytree(fixture, tmp_path / "a run")
    drive(path, script)
    assert len(copied) == 8 and "--hist" in copied[-1]
    for words in map(shlex.split, copied):
        assert CliRunner().invoke(app, words[1:]).exit_code == 0, words


@pytest.mark.slow
def test_a_hundred_thousand_keys_scroll_at_once():
    tree = {f"part{n % 1000}.k{n}": plain(2, record=str(n)) for n in range(100_000)}

    async def script(driven: Driven):
        await driven.press("2", "o", "G")
        assert "order: size" in driven.text("message") and driven.app.left.cursor == 99_999
        assert text_of(driven.app.left.source.line(99_999, 40)).split()[0] in driven.pictured()
        await driven.press("slash", *"k99999")
        assert len(driven.rows()) == 1

    drive(checkpoint(tree), script)


@pytest.mark.slow
def test_twenty_thousand_keys_are_sorted_filtered_and_scrolled():
    tree = {f"part{n % 100}.k{n}": plain(2, record=str(n)) for n in range(20_000)}
    shown = pressed(checkpoint(tree), "2", "o", "G", "slash", *"k19999")
    assert len(shown) == 1 and shown[0].split()[0] == "part99.k19999"


def test_shape_and_dtype_stand_in_columns_beside_the_keys():
    async def script(driven: Driven):
        await driven.press("2", "l")
        rows = {row.split()[0]: row for row in driven.rows() if "fp32" in row or "int64" in row}
        assert rows["emb.weight"].split()[1:4] == ["[33,", "17]", "fp32"]
        assert len({row.index("[") for row in rows.values()}) == 1
        assert len({row.index("fp32") for row in rows.values() if "fp32" in row}) == 1

    drive(RANKS, script, size=(120, 40))


def test_a_row_that_is_narrow_loses_its_shape_and_then_its_size_but_not_its_name():
    tree = tree_of({"a.long.name.of.a.weight": plain(20, 30)})
    tree.arrange("weight", "as saved")
    name = "a.long.name.of.a.weight"
    shown = [text_of(tree.line(0, width)) for width in (60, 40, 26)]
    assert shown[0].split()[1:4] == ["[20,", "30]", "fp32"] and "2.3 KiB" in shown[0]
    assert "[20" not in shown[1] and "2.3 KiB" in shown[1]
    assert shown[2].strip() == name and all(name in row for row in shown)


def test_p_leaves_the_keys_with_problems_and_escape_brings_all_back():
    async def script(driven: Driven):
        await driven.press("2")
        every = len(driven.rows())
        await driven.press("p")
        assert [row.split()[0] for row in driven.rows()] == ["norm.weight"]
        assert driven.text("counted").startswith("problems only: 1 of ") and "Esc" in driven.text("counted")
        await driven.press("6", "2")
        assert len(driven.rows()) == 1
        await driven.press("escape")
        assert len(driven.rows()) == every and not driven.app.query_one("#counted").display

    drive(FIXTURES.parent / "tests/odd/step10.pt", script)


def test_p_goes_with_a_filter_of_names():
    async def script(driven: Driven):
        await driven.press("2", "p", "slash", *"emb", "enter")
        assert driven.rows() == []
        await driven.press("escape")
        assert [row.split()[0] for row in driven.rows()] == ["norm.weight"]
        await driven.press("escape")
        assert len(driven.rows()) > 1

    drive(FIXTURES.parent / "tests/odd/step10.pt", script)
