"""Every tab shows what its command prints, and problems lead to where they are."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from ckptools.browse.row_list import RowList
from ckptools.display.screen import Screen
from ckptools.files.opening import File
from ckptools.formats.open import open_checkpoint
from ckptools.inspect.record import facts_text, inspect_report
from ckptools.text import size
from tests.browse.driven import Driven, drive, pressed
from tests.display import made
from tests.truth import FIXTURES

RANKS = FIXTURES / "torch2.13.0-fsdp1-sharded-w4"
RUN = FIXTURES / "composer-0.13.5-torch1.13.1-sharded-w4"


def test_the_first_screen_of_a_sound_checkpoint_is_its_verdict_the_next_command_and_the_facts():
    report, shown = inspect_report(open_checkpoint(RANKS, all_ranks=True)), pressed(RANKS)
    facts = facts_text(report, Screen(79)).split("\n")
    assert shown[0] == report.verdict.headline and shown[-len(facts) :] == facts
    assert any(line.startswith("next: ckptools consolidate") for line in shown[1 : -len(facts)])


def test_the_title_has_the_verdict_and_a_line_what_was_read():
    before = File.total_read

    async def script(driven: Driven):
        assert driven.text("title").startswith("torch2.13.0-fsdp1-sharded-w4: whole: all 4 rank files are here")
        assert driven.text("status").startswith(f"read {size(File.total_read - before)} in ")

    drive(RANKS, script)


def test_optimizer_and_scheduler_have_a_tab():
    shown = "\n".join(pressed(RANKS, "4"))
    assert "optim: 2 param groups" in shown and "scheduler: " in shown


def test_values_that_ranks_do_not_share_are_listed_and_read_on_request():
    async def script(driven: Driven):
        await driven.press("5")
        assert driven.row.split() == ["own", "rng"]
        assert " ".join(driven.rows("right")) == "rng own, on 4 ranks; Enter reads what each has"
        await driven.press("enter")
        assert "torch: 1 distinct of 4" in "".join(driven.rows("right"))

    drive(RANKS, script)


def test_values_below_a_container_are_read_together():
    async def script(driven: Driven):
        await driven.press("5", "enter")
        shown = "".join(driven.rows("right"))
        assert driven.row.split() == ["own", "dataset_state"] and "train" in shown and "eval" in shown

    drive(RUN, script)


def test_a_tensor_that_ranks_have_each_is_not_said_to_be_read_of_all():
    async def script(driven: Driven):
        await driven.press("5")
        assert driven.row == "should be equal stats.running_mean"
        assert " ".join(driven.rows("right")[1:]) == "should be equal, on 2 ranks; Enter reads that of rank 0"

    drive(FIXTURES / "torchsnapshot-fsdp1/ckpt", script)


def test_where_ranks_share_every_value_a_whole_line_says_so():
    shown = pressed(FIXTURES / "torch2.13.0-fsdp2-dcp-w3/ckpt", "5")
    assert " ".join(shown).startswith("no value was found that a rank has for itself")


def test_a_rank_has_its_problems_by_cause_with_their_tensors(tmp_path):
    folder = shutil.copytree(FIXTURES / "torch2.13.0-fsdp2-dcp-w3/ckpt", tmp_path / "ckpt")
    first, second = folder / "__1_0.distcp", folder / "__2_0.distcp"
    first.rename(tmp_path / "kept"), second.rename(first), (tmp_path / "kept").rename(second)

    async def script(driven: Driven):
        await driven.press("3", "l")
        shown = driven.rows("right")
        assert [row.split()[:3] for row in shown if "CK" in row[:20]] == [["rank", "1", "CK018"]]
        assert shown[-1].strip() == "-> 17 values are lost"

    drive(folder, script)


def test_a_name_that_is_too_long_loses_its_middle():
    async def script(driven: Driven):
        await driven.press("6")
        shown = [line.partition("│")[0].rstrip() for line in driven.pictured().split("\n")[2:6]]
        names = [row.split()[-1] for row in driven.rows()]
        assert all(line.endswith(name[-8:]) for line, name in zip(shown, names, strict=False))

    drive(FIXTURES / "torchsnapshot-fsdp1/ckpt", script)


def test_a_checkpoint_of_the_run_has_its_name_beside_a_long_verdict(tmp_path):
    shutil.copytree(RANKS, tmp_path / "step7")

    async def script(driven: Driven):
        await driven.press("7")
        line = driven.pictured().split("\n")[2]
        cells = line.partition("│")[0].split()
        assert (*cells[:3], cells[-1]) == ("5", "4/4", "whole,", "step7")
        assert any("KiB, saved" in row for row in driven.rows("right"))

    drive(tmp_path, script)


def test_files_are_listed_with_what_is_known_of_each():
    async def script(driven: Driven):
        await driven.press("6", "j")
        assert [row.split()[-1] for row in driven.rows()] == [f"rank{n}.pt" for n in range(4)]
        assert any("rank 1" in row for row in driven.rows("right"))

    drive(RANKS, script)


def test_the_checkpoints_of_the_run_are_listed_and_enter_opens_one():
    async def script(driven: Driven):
        await driven.press("7")
        names = [row.split()[-1] for row in driven.rows()]
        assert len(names) > 0 and all("ep0" in name for name in names)
        await driven.press("enter")
        assert driven.text("tabs").startswith("[1 overview]")
        assert driven.text("title").startswith("ep0-ba5: ")

    drive(RUN, script)


def test_a_folder_of_several_checkpoints_begins_with_their_list(tmp_path):
    for name in ("step10", "step20"):
        (tmp_path / f"{name}.pt").write_bytes((FIXTURES.parent / "tests/odd" / f"{name}.pt").read_bytes())

    async def script(driven: Driven):
        assert driven.text("tabs").endswith("[7 run]")
        assert sorted(row.split()[-1] for row in driven.rows()) == ["step10.pt", "step20.pt"]
        assert driven.text("title") == f"{tmp_path}: several checkpoints; 7 lists them, Enter opens one"
        await driven.press("2")
        assert driven.rows() == ["several checkpoints; 7 lists them, Enter opens one"]
        await driven.press("7")
        await driven.press("enter")
        assert driven.text("title").startswith("step20: ") and driven.text("message") == ""

    drive(tmp_path, script)


def test_the_first_screen_of_a_broken_checkpoint_is_a_card_for_each_culprit_and_the_next_command():
    async def script(driven: Driven):
        cards = [(n, row.split()) for n, row in enumerate(driven.rows()) if "  CK" in row]
        assert [words[:3] for _, words in cards] == [["ranks", "201..203", "CK001"], ["rank", "137", "CK002"]]
        following = next(n for n, row in enumerate(driven.rows()) if row.startswith("next: ckptools "))
        title = next(n for n, row in enumerate(driven.rows()) if row.startswith("ep0-ba12000 in "))
        assert cards[0][0] == 0 and cards[-1][0] < following < title

    drive(made.broken_run7(), script)


def test_enter_on_a_card_goes_to_its_rank():
    async def script(driven: Driven):
        assert driven.text("title").startswith("ep0-ba12000: NOT WHOLE: ranks 201..203 missing; rank 137 cut")
        await driven.press("enter")
        assert "[3 ranks]" in driven.text("tabs") and driven.rows("right")[0].startswith("rank 201: missing")
        await driven.press("1")
        driven.app.left.go(next(n for n, row in enumerate(driven.rows()) if "rank 137" in row))
        await driven.press("enter")
        assert driven.rows("right")[0].startswith("rank 137: cut")

    drive(made.broken_run7(), script)


def test_enter_on_a_card_goes_to_its_tensor():
    async def script(driven: Driven):
        await driven.press("p", "1", "enter")
        assert "[2 keys]" in driven.text("tabs") and driven.row.split()[0] == "norm.weight"
        assert driven.row.split()[1] == "CK203" and not driven.app.query_one("#counted").display

    drive(FIXTURES.parent / "tests/odd/step10.pt", script)


def test_enter_on_a_card_goes_to_its_file(tmp_path):
    folder = shutil.copytree(FIXTURES / "hf-llama-safetensors-bf16/ckpt", tmp_path / "ckpt")
    cut = folder / "model-00002-of-00004.safetensors"
    cut.write_bytes(cut.read_bytes()[:-100])

    async def script(driven: Driven):
        await driven.press("enter")
        assert "[6 files]" in driven.text("tabs") and driven.row.split()[0] == "cut"
        await driven.press("p")
        assert driven.text("counted").startswith("problems only: 1 of 5 files") and len(driven.rows()) == 1
        await driven.press("3")
        assert driven.text("counted").startswith("problems only: 1 of 5 files")
        await driven.press("6")
        await driven.press("escape")
        assert len(driven.rows()) == 5

    drive(folder, script)


def test_a_problem_that_names_a_file_with_its_folders_leads_to_this_file(tmp_path):
    folder = shutil.copytree(FIXTURES / "nanotron-tp2pp2/ckpt", tmp_path / "ckpt")
    cut = folder / "model/model/final_layer_norm/pp_block/model_weight.safetensors"
    cut.write_bytes(cut.read_bytes()[:-100])

    async def script(driven: Driven):
        await driven.press("enter")
        assert "[6 files]" in driven.text("tabs") and driven.row.split()[0] == "cut"
        shown = driven.rows("right")
        assert "final_layer_norm" in "".join(shown) and any("CK002" in row for row in shown)
        await driven.press("p")
        assert driven.text("counted").startswith("problems only: 1 of ")

    drive(folder, script)


def test_enter_on_the_next_command_copies_it():
    async def script(driven: Driven):
        driven.app.left.go(next(n for n, row in enumerate(driven.rows()) if row.startswith("next: ")))
        await driven.press("enter")
        assert driven.text("message").startswith("ckptools consolidate ")

    drive(RANKS, script)


def test_what_cannot_be_opened_says_so_with_the_answers_of_doctor(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # a short path, which no line breaks
    torn = Path("torn.pt")
    torn.write_bytes((RANKS / "rank0.pt").read_bytes()[:5000])

    async def script(driven: Driven):
        assert driven.text("title") == str(driven.app.error) and driven.text("title").count(str(torn)) == 1
        assert "is cut short" in driven.text("title")
        assert " ".join(driven.rows()[:2]).startswith(f"cannot be opened: {torn}")
        for key in "oswu":
            driven.app.say("")
            await driven.press(key)
            assert driven.text("message").startswith("cannot be opened: ")
        await driven.press("3")
        assert " ".join(driven.rows()).startswith("cannot be opened: ")
        await driven.press("1")
        assert any("whole?" in row for row in driven.rows())

    app = drive(torn, script)
    assert app.error is not None and app.error.exit_code == 3


def test_what_is_not_there_ends_it_at_once(tmp_path):
    app = drive(tmp_path / "none.pt", lambda driven: driven.until(lambda: not driven.app.is_running), wait=False)
    assert "no such file" in str(app.error)


@pytest.mark.slow
@pytest.mark.parametrize("size", [(60, 24), (80, 24), (200, 60)])
def test_it_fits_screens_of_any_size(size):
    async def script(driven: Driven):
        for tab in "1234567":
            await driven.press(tab)
            assert driven.text("status") in driven.pictured()
        await driven.press("2")
        beside = driven.app.right.region.x > driven.app.left.region.x
        assert beside is (size[0] >= 80)

    drive(RANKS, script, size=size)


def test_a_smaller_window_puts_what_was_beside_below_and_keeps_the_row():
    async def script(driven: Driven):
        await driven.press("6", "j", "j")
        await driven.pilot.resize_terminal(60, 20)
        await driven.settled()
        assert driven.app.right.region.y > driven.app.left.region.y
        assert driven.row.endswith("rank2.pt")

    drive(RANKS, script)


@pytest.mark.slow
@pytest.mark.parametrize("keys", [["question_mark"], ["w", "enter"]])
@pytest.mark.parametrize("size", [(60, 24), (80, 24)])
def test_what_a_dialog_says_is_wrapped_and_not_cut(size, keys, tmp_path, monkeypatch):
    async def script(driven: Driven):
        await driven.press(*keys)
        box = driven.app.screen.query_one(RowList)
        room = box.scrollable_content_region.width
        assert all(len(row) <= room for row in (box.source.line(n, 0)[0] for n in range(len(box.source))))
        assert len(box.source) == box.size.height or box.show_vertical_scrollbar

    monkeypatch.chdir(tmp_path)
    drive(RANKS, script, size=size)


@pytest.mark.parametrize("key", ["s", "w"])
def test_what_is_typed_into_a_dialog_is_seen(key):
    async def script(driven: Driven):
        await driven.pilot.press(key, *"X.y")
        await driven.pilot.pause()
        assert "X.y" in driven.pictured()
        await driven.press("escape")

    drive(RANKS, script)


def test_all_tabs_are_named_on_a_screen_of_60_columns():
    async def script(driven: Driven):
        for tab in "1234567":
            await driven.press(tab)
            line = driven.pictured().split("\n")[1]
            assert line.count("[") == 1 and "7 run" in line and line.split("[")[1].startswith(tab)

    drive(RANKS, script, size=(60, 24))


def test_a_row_that_is_cut_says_so():
    async def script(driven: Driven):
        await driven.press("2", "p")
        assert any("..." in line for line in driven.pictured().split("\n")[2:-2])

    drive(FIXTURES.parent / "tests/odd/step10.pt", script, size=(20, 24))


def test_a_line_of_facts_that_is_cut_says_so_and_can_be_moved():
    async def script(driven: Driven):
        await driven.press("slash", *"emb.weight", "enter", "enter")
        shown = [line.partition("│ ")[2] for line in driven.pictured().split("\n") if "__0_0." in line]
        assert "__0_0." in shown[0] and shown[0].rstrip().endswith(">")
        driven.app.right.focus()
        await driven.press("l", "l")
        assert any(row.split()[-1] in driven.pictured() for row in driven.rows("right") if "__0_0." in row)

    drive(FIXTURES / "torch2.13.0-fsdp2-dcp-w3/ckpt", script, size=(98, 24))


@pytest.mark.slow
@pytest.mark.parametrize("light", [False, True])
def test_words_are_readable_on_their_background(light):
    """At least 4.5 to 1. Source: Web Content Accessibility Guidelines 2.1, 1.4.3."""

    async def script(driven: Driven):
        driven.app.theme = "textual-light" if light else "textual-dark"
        for tab in "123":
            await driven.press(tab)
            for segment in (s for strip in driven.app.screen._compositor.render_strips() for s in strip):
                colours = segment.style and (segment.style.color, segment.style.bgcolor)
                if colours and all(colours) and any(map(str.isalnum, segment.text)):
                    assert contrast(*(colour.get_truecolor() for colour in colours)) >= 4.5, segment

    for checkpoint in (made.broken_run7(), RANKS):
        drive(checkpoint, script)


def contrast(*colours) -> float:
    """Source: the same, `relative luminance` and `contrast ratio`."""
    linear = [[v / 255 / 12.92 if v <= 10 else ((v / 255 + 0.055) / 1.055) ** 2.4 for v in one] for one in colours]
    dark, light = sorted(0.2126 * r + 0.7152 * g + 0.0722 * b for r, g, b in linear)
    return (light + 0.05) / (dark + 0.05)
