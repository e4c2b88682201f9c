from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from typer.testing import CliRunner

from ckptools.cli import app
from ckptools.display.screen import Screen
from ckptools.inspect.record import (
    SchedulerRow,
    inspect_report,
    optimizer_lines,
    read_line,
    report_text,
    scheduler_words,
    size_expected,
)
from ckptools.inspect.sections import section_details, section_text
from tests.display.made import (
    HOSTILE,
    alone,
    broken_run7,
    checkpoint,
    composer_tree,
    files,
    group,
    hostile,
    missing,
    plain,
    run7,
    snapshot,
    unread_run7,
)

CASES = {"whole": run7, "listed": unread_run7, "broken": broken_run7, "alone": alone}
CASES |= {"snapshot": snapshot, "hostile": hostile}
TERMINAL = Screen(80, 40)


@pytest.mark.parametrize("name", CASES)
def test_a_report_reads_well(name, golden):
    report = inspect_report(CASES[name]())
    golden(
        f"{name}.txt",
        f"{report_text(report)}\n\n{read_line(report)}\nnext: {report.next}",
    )


@pytest.mark.parametrize("name", ["broken", "hostile"])
def test_a_report_fits_a_terminal(name, golden):
    shown = report_text(inspect_report(CASES[name]()), TERMINAL)
    golden(f"{name}-80.txt", shown)
    rest = shown.splitlines()[1:]
    assert max(map(len, rest)) <= 80


@pytest.mark.parametrize("section", ["model", "optimizer", "scheduler", "rng", "other"])
def test_a_section_reads_well(section, golden):
    ck = run7()
    golden(f"section-{section}.txt", section_text(inspect_report(ck), section_details(ck, section)))


@pytest.mark.parametrize("screen", [Screen(), TERMINAL])
def test_no_name_forges_a_line_or_moves_the_cursor(screen):
    report = inspect_report(hostile())
    lines = report_text(report, screen).split("\n")
    lines += section_text(report, section_details(hostile(), "model"), screen).split("\n")
    assert all(line.isprintable() for line in lines)
    assert not any(line.startswith("whole: all") for line in lines)


def test_names_that_look_like_numbers_or_markup_stay_as_they_are():
    shown = section_text(inspect_report(hostile()), section_details(hostile(), "model"))
    for name in ("1e5", "00012", "layers[red].w[/bold]", "<script>alert(1)</script>", "漢字"):
        assert f"\n{name} " in shown
    assert len(HOSTILE) == shown.count("[2, 3]")


def test_a_monolithic_file_of_rank_0_is_said_to_be_whole():
    one = snapshot()
    ck = replace(one, files=(one.files[0]._replace(rank=0),))
    line = inspect_report(ck).verdict.headline
    assert line == "whole: one file, rank 0's by its name; that other ranks hold more is not excluded"


def test_all_files_of_ranks_that_have_several_are_counted():
    parts = tuple(f._replace(part=part) for f in run7().files[:4] for part in ("model", "optim"))
    report = inspect_report(run7(files=parts, world_size=run7().world_size._replace(value=4)))
    assert report.verdict.headline == "whole: all 8 files of 4 ranks are here, all read"


def test_a_lost_file_whose_content_nothing_states_is_not_recoverable():
    here, world = files(5, here=range(4), read=True), run7().world_size._replace(value=5)
    report = inspect_report(run7({"model": {"w": plain(4)}}, files=here, world_size=world, problems=missing(4)))
    assert report.verdict.headline == "NOT WHOLE: rank 4 missing"


@pytest.mark.parametrize(("found", "said"), [(1, "of 2.0 KiB"), (2047, ""), (2048, ""), (3000, "")])
def test_the_size_that_is_expected_is_said_only_where_files_lack_some_of_it(found, said):
    assert size_expected(inspect_report(run7())._replace(bytes_found=found, bytes_expected=2048)) == said


def test_hyperparameters_that_differ_are_columns_and_the_others_a_line():
    groups = [{**group(0.1, 0.0, [0]), "name": "a"}, {**group(0.1, 0.0, [1]), "momentum": 0.9}]
    report = inspect_report(checkpoint({"o": {"state": {}, "param_groups": groups}}))
    _, titles, _, first, second, same = optimizer_lines(report.optimizers[0])
    assert titles.split() == ["group", "lr", "betas", "momentum", "wd", "eps", "name", "params", "tensors"]
    assert first.split()[4] == "-" and "'a'" in first
    assert second.split()[4] == "0.9"
    assert same == "all groups: amsgrad False, fused None"


def test_a_rate_that_is_not_the_groups_stands_out():
    tree = composer_tree(4)
    tree["state"]["schedulers"]["CosineAnnealingLR"]["_last_lr"] = [1.0, 1.0]
    assert "LR IS NOT THAT OF THE PARAM GROUPS" in report_text(inspect_report(checkpoint(tree)))


def test_a_terminal_gets_forty_rows_and_a_pipe_all():
    tree = {"model": {f"w{n}": plain(2, record=str(n)) for n in range(300)}}
    ck = checkpoint(tree)
    shown = [section_text(inspect_report(ck), section_details(ck, "model"), s) for s in (TERMINAL, Screen())]
    assert "260 more; all of them when piped, as in | less" in shown[0]
    assert (shown[0].count("\n"), shown[1].count("w299")) == (46, 1)


def test_private_values_of_a_scheduler_are_counted_until_they_are_asked_for():
    scheduler = SchedulerRow("StepLR", "scheduler", {"last_epoch": 3, "_step_count": 4}, None)
    assert scheduler_words(scheduler) == "last_epoch 3; 1 private value: --private"
    assert scheduler_words(scheduler, private=True) == "last_epoch 3, _step_count 4"


def test_of_two_optimizers_each_is_shown_with_its_own_groups(tmp_path):
    state = {name: {"state": {}, "param_groups": [{"lr": lr, "params": []}]} for name, lr in (("A", 0.5), ("B", 0.25))}
    torch.save({"model": {"w": torch.ones(2)}, "optimizers": state}, tmp_path / "run.pt")
    done = {
        name: CliRunner().invoke(app, ["inspect", str(tmp_path / "run.pt"), "--section", f"optimizers.{name}"])
        for name in state
    }
    assert "0.5" in done["A"].stdout and "0.25" not in done["A"].stdout
    assert "0.25" in done["B"].stdout and "0.5 " not in done["B"].stdout


def test_a_screen_says_the_parent_of_values_that_differ_between_ranks_once_and_a_pipe_names_each():
    report = inspect_report(checkpoint(composer_tree()))._replace(differing=("time.batch", "time.epoch", "time.token"))
    assert "as it may: time.{batch,epoch,token}" in report_text(report, Screen(80, 40))
    assert "as it may: time.batch, time.epoch, time.token" in report_text(report)
