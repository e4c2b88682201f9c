"""`doctor` asks the others, says what they say, and ends in commands that work."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from typer.testing import CliRunner

import ckptools
from ckptools.cli import app
from ckptools.doctor.answers import FACTS, IN_STEP, LOADS, NEWEST, WHOLE, Diagnosis, Finding
from ckptools.doctor.examination import examined as examine
from ckptools.model.tree import tensors_in
from tests.truth import FIXTURES
from tests.watch.runs import flip, save

COMPOSER = FIXTURES / "composer-0.13.5-torch1.13.1-sharded-w4"
DCP = FIXTURES / "torch2.13.0-fsdp2-dcp-w3" / "ckpt"


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Rank files of one step, and a folder that holds another checkpoint."""
    for rank in range(4):
        shutil.copy(COMPOSER / f"ep0-ba5-rank{rank}.pt", tmp_path)
    return tmp_path


@pytest.fixture
def steps(tmp_path: Path) -> Path:
    for step in (4, 5):
        shutil.copytree(DCP, tmp_path / f"step-{step}")
    return tmp_path


def answers(found: Diagnosis) -> dict[str, bool | None]:
    return {row.question: row.ok for row in found.rows}


def row(found: Diagnosis, question: str) -> Finding:
    return next(row for row in found.rows if row.question == question)


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:3000])


def test_what_is_not_whole_is_said_with_codes_and_a_whole_one_is_named(steps):
    next((steps / "step-5").glob("__1_*.distcp")).unlink()
    found = ckptools.doctor(steps / "step-5")
    assert not found.ok and answers(found)[WHOLE] is False and "CK001" in row(found, WHOLE).evidence
    assert str(steps / "step-4") in row(found, NEWEST).answer and answers(found)[NEWEST] is False
    assert f"ckptools inspect {steps}/step-4" in found.next


def test_a_newer_checkpoint_that_is_not_whole_is_told_of_a_run(steps):
    (steps / "step-5" / ".metadata").unlink()
    (steps / "step-5").rename(steps / "step-6")
    found = ckptools.doctor(steps)
    assert not found.ok and "NOT WHOLE and newer: step-6" in row(found, NEWEST).evidence


def test_a_rank_file_that_cannot_be_opened_is_looked_at_from_another_rank(run):
    cut(run / "ep0-ba5-rank2.pt")
    found = ckptools.doctor(run / "ep0-ba5-rank2.pt")
    assert (found.ok, found.readable, answers(found)[WHOLE]) == (False, True, False)
    assert "rank 2" in row(found, WHOLE).evidence


def test_a_rank_of_another_folder_does_not_stand_for_one_that_cannot_be_opened(run):
    (run / "step-5").mkdir()
    shutil.copy(run / "ep0-ba5-rank2.pt", run / "step-5")
    cut(run / "step-5" / "ep0-ba5-rank2.pt")
    found = ckptools.doctor(run / "step-5" / "ep0-ba5-rank2.pt")
    assert (found.ok, found.readable, answers(found)[WHOLE]) == (False, False, False)


@pytest.mark.slow
def test_of_a_run_the_newest_whole_one_is_looked_at_though_a_newer_one_can_be_opened(steps):
    next((steps / "step-5").glob("__1_*.distcp")).unlink()
    for path in (steps / "step-5").iterdir():
        os.utime(path, (path.stat().st_atime, path.stat().st_mtime + 1000))
    found = ckptools.doctor(steps)
    assert answers(found)[WHOLE] is False and row(found, WHOLE).answer.startswith("step 5: NOT WHOLE")
    assert (
        row(found, WHOLE).answer.endswith("newest whole: step-4")
        and str(steps / "step-4") in row(found, WHOLE).evidence
    )
    assert answers(found)[NEWEST] is False and "NOT WHOLE and newer: step-5" in row(found, NEWEST).evidence


@pytest.mark.slow
def test_the_run_of_a_folder_inside_that_of_a_step_is_the_folder_of_all_steps(tmp_path):
    """verl's layout: `global_step_3/actor/model_world_size_4_rank_0.pt`."""
    for step in (3, 6):
        shutil.copytree(FIXTURES / "verl-fsdp1" / "ckpt" / "global_step_3", tmp_path / f"global_step_{step}")
    newest = row(ckptools.doctor(tmp_path / "global_step_3" / "actor"), NEWEST)
    assert newest.answer.startswith("step 6: ") and "2 checkpoints in" in newest.evidence
    assert "this one" in row(ckptools.doctor(tmp_path / "global_step_6" / "actor"), NEWEST).answer


def test_facts_of_which_none_is_a_step_are_neither_right_nor_wrong(tmp_path):
    torch.save({"w": torch.ones(2)}, tmp_path / "x.pt")
    found = row(ckptools.doctor(tmp_path / "x.pt"), FACTS)
    assert found.ok is None and "no file states a step" in found.evidence


def test_of_what_is_not_whole_verify_is_to_list_the_lost_files_and_its_bytes_are_not_read(run):
    (run / "ep0-ba5-rank1.pt").unlink()
    assert ckptools.doctor(run / "ep0-ba5-rank0.pt").next[0] == f"ckptools verify {run}/ep0-ba5-rank0.pt --to-fetch"


def test_blanks_in_a_path_do_not_cut_the_command_that_is_proposed(tmp_path):
    path = tmp_path / "my     model.pt"
    torch.save({"w": torch.ones(3)}, path)
    assert f"ckptools consolidate '{path}' -o OUT.safetensors --dry-run" in ckptools.doctor(path).next


def test_what_only_warns_is_doubtful_and_no_bad_answer_as_verify_fails_no_check(tmp_path):
    layer = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    optimizer.step()
    scheduler.step()
    state = {"model": layer.state_dict(), "optimizer": optimizer.state_dict(), "scheduler": scheduler.state_dict()}
    state["optimizer"]["param_groups"][0]["lr"] = 0.5
    torch.save(state, tmp_path / "x.pt")
    checks = [check for check in ckptools.verify(tmp_path / "x.pt").checks if check.name == "lr: scheduler = groups"]
    assert [check.result for check in checks] == ["warn"]
    found = ckptools.doctor(tmp_path / "x.pt")
    asked = row(found, IN_STEP)
    assert (found.ok, asked.ok, asked.doubtful, asked.answer) == (True, None, True, "no")
    assert "worth a look: optimizer and scheduler in step?" in repr(found)


def test_a_frozen_parameter_is_worth_a_look_and_not_out_of_step(tmp_path):
    state = trained(3, torch.optim.Adam, step=3)
    state["optimizer"]["state"].popitem()
    torch.save(state, tmp_path / "x.pt")
    found = ckptools.doctor(tmp_path / "x.pt")
    asked = row(found, IN_STEP)
    assert (found.ok, asked.ok, asked.answer) == (True, None, "worth a look") and "CK203" in asked.evidence


@pytest.mark.parametrize("broken", [False, True])
def test_doctor_and_verify_end_in_the_same_exit_code(broken, tmp_path):
    state = trained(3, torch.optim.Adam, step=4)
    state["optimizer"]["param_groups"][0]["params"] += [0] * broken
    torch.save(state, tmp_path / "x.pt")
    codes = [CliRunner().invoke(app, [name, str(tmp_path / "x.pt")]).exit_code for name in ("verify", "doctor")]
    assert codes == [int(broken)] * 2


def trained(steps: int, kind: type[torch.optim.Optimizer], **more: Any) -> dict[str, Any]:
    layer = torch.nn.Linear(2, 2)
    optimizer = kind(layer.parameters(), lr=0.1)  # type: ignore[call-arg]
    for _ in range(steps):
        layer(torch.ones(2)).sum().backward()
        optimizer.step()
    return {"model": layer.state_dict(), "optimizer": optimizer.state_dict(), **more}


def with_scheduler(state: dict[str, Any]) -> dict[str, Any]:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.1)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: 1.0)
    for _ in range(3):
        optimizer.step()
        scheduler.step()
    return {**state, "scheduler": scheduler.state_dict()}


@pytest.mark.parametrize(("step", "answer"), [(3, "yes"), (4, "no")])
def test_optimizer_scheduler_and_training_are_in_step_where_all_counters_agree(step, answer, tmp_path):
    torch.save(with_scheduler(trained(3, torch.optim.Adam, step=step)), tmp_path / "x.pt")
    assert row(ckptools.doctor(tmp_path / "x.pt"), IN_STEP).answer == answer


@pytest.mark.parametrize(
    ("kind", "step", "answer"),
    [
        (torch.optim.Adam, {"step": 3}, "partly"),
        (torch.optim.Adam, {}, "partly"),
        (torch.optim.SGD, {"step": 3}, "not judged"),
        (torch.optim.SGD, {}, "not judged"),
    ],
)
def test_without_a_scheduler_nobody_says_that_it_is_in_step(kind, step, answer, tmp_path):
    torch.save(trained(3, kind, **step), tmp_path / "x.pt")
    found = row(ckptools.doctor(tmp_path / "x.pt"), IN_STEP)
    assert (found.ok, found.answer) == (None, answer)
    assert "learning rates agree: not judged: no scheduler states rates that can be compared" in found.evidence


def test_equal_rates_are_a_part_of_the_answer_where_the_optimizer_counts_nothing(tmp_path):
    torch.save(with_scheduler(trained(3, torch.optim.SGD)), tmp_path / "x.pt")
    found = row(ckptools.doctor(tmp_path / "x.pt"), IN_STEP)
    assert (found.ok, found.answer) == (
        None,
        "partly",
    ) and "learning rates agree: 0.1 in scheduler and param groups" in found.evidence


def test_where_every_counter_is_lost_it_is_not_known_whether_they_are_in_step(steps):
    for path in (steps / "step-5").glob("*.distcp"):
        path.unlink()
    found = row(ckptools.doctor(steps / "step-5"), IN_STEP)
    assert (found.ok, found.answer) == (None, "partly") and "in files that are not here" in found.evidence
    checks = {check.name: check.result for check in ckptools.verify(steps / "step-5").checks}
    assert checks["step counters"] == "not judged"


def test_rates_that_agree_do_not_stand_for_counters_that_are_lost(tmp_path):
    """The scheduler's rates lie in the pickle, the counters of the optimizer in records that are cut off."""
    state = trained(3, torch.optim.Adam, step=3)
    scheduler = torch.optim.lr_scheduler.StepLR(torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.1), 1)
    for slots in state["optimizer"]["state"].values():
        slots["step"] = slots["step"].to("meta")
    torch.save({**state, "scheduler": scheduler.state_dict()}, tmp_path / "x.pt")
    found = row(ckptools.doctor(tmp_path / "x.pt"), IN_STEP)
    assert (found.ok, found.answer) == (None, "partly")


@pytest.mark.parametrize(
    ("content", "says"),
    [(b"", "empty"), (b"PK\3\4 and no more", "zip"), (b"GGUF\0\0", "GGUF"), (b"hello there, this is text", "text")],
)
def test_what_cannot_be_opened_is_told_by_its_first_bytes(content, says, tmp_path):
    (tmp_path / "x.pt").write_bytes(content)
    found = ckptools.doctor(tmp_path / "x.pt")
    assert (found.ok, found.readable, answers(found)[WHOLE]) == (False, False, False)
    assert says in row(found, "what is it?").answer
    assert row(found, WHOLE).evidence.startswith(f"{tmp_path / 'x.pt'}: is ")


def test_what_is_not_there_is_an_error(tmp_path):
    with pytest.raises(ckptools.CkptoolsError, match="no such file"):
        ckptools.doctor(tmp_path / "nowhere")


@pytest.mark.slow
def test_facts_that_disagree_are_told(run):
    for rank in range(4):
        (run / f"ep0-ba5-rank{rank}.pt").rename(run / f"ep0-ba7-rank{rank}.pt")
    found = row(ckptools.doctor(run), FACTS)
    assert (found.ok, found.doubtful, found.answer) == (None, True, "no")
    assert found.evidence.count("another step") == 1


@pytest.mark.slow
def test_a_model_that_it_does_not_load_into_is_said_and_match_proposed(run, tmp_path):
    names = {"w": [3, 5]}
    (tmp_path / "shapes.json").write_text(json.dumps(names))
    found = ckptools.doctor(run, to=str(tmp_path / "shapes.json"))
    assert answers(found)[LOADS] is False and any(c.startswith("ckptools match ") for c in found.next)
    assert answers(ckptools.doctor(run, to=str(run / "ep0-ba5-rank1.pt")))[LOADS] is True
    unread = row(ckptools.doctor(run, to=str(tmp_path / "none.json")), LOADS)
    assert unread.ok is False and "no such file" in unread.evidence


@pytest.mark.slow
def test_exit_codes_are_those_of_the_answers(run):
    invoke = CliRunner().invoke
    assert invoke(app, ["doctor", str(run)]).exit_code == 0
    (run / "ep0-ba5-rank1.pt").unlink()
    assert invoke(app, ["doctor", str(run)]).exit_code == 1
    assert invoke(app, ["doctor", str(run / "nowhere")]).exit_code == 3


def test_state_without_a_sure_name_leaves_open_whether_it_is_in_step(tmp_path):
    model = {"a": torch.ones(3), "b": torch.ones(3)}
    state = {n: {"step": torch.tensor(5.0), "exp_avg": torch.ones(3), "exp_avg_sq": torch.ones(3)} for n in (0, 1)}
    optim = {"state": state, "param_groups": [{"lr": 0.1, "params": [0, 1]}]}
    dcp.save({"model": model, "optim": optim}, checkpoint_id=tmp_path / "step-5")
    found = ckptools.doctor(tmp_path / "step-5")
    (row,) = [row for row in found.rows if row.question == "optimizer and scheduler in step?"]
    assert (row.ok, row.answer) == (None, "not judged") and "CK210" in row.evidence and found.ok


def test_links_are_followed_in_the_whole_run_where_that_is_asked_for(tmp_path):
    for name in ("run", "far"):
        dcp.save({"model": {"w": torch.ones(2)}}, checkpoint_id=tmp_path / name / f"step-{len(name)}")
    (tmp_path / "run" / "step-9").symlink_to(tmp_path / "far" / "step-3")
    found = ckptools.doctor(tmp_path / "run" / "step-3", follow_symlinks=True)
    (row,) = [row for row in found.rows if row.question == "newest whole here?"]
    assert "2 checkpoints in" in row.evidence


def test_what_is_worth_a_look_is_named_where_every_byte_is_read(tmp_path):
    torch.manual_seed(0)
    layers = {f"layers.{n}.up.weight": torch.randn(32, 32) for n in range(8)}
    layers["layers.3.up.weight"].zero_()
    torch.save({"model": layers}, tmp_path / "model.pt")
    shallow, deep = (ckptools.doctor(tmp_path / "model.pt", deep=deep) for deep in (False, True))
    assert (shallow.ok, deep.ok, "bytes and values right?" in [row.question for row in shallow.rows]) == (
        True,
        False,
        False,
    )
    asked = next(row for row in deep.rows if row.question == "bytes and values right?")
    assert asked.ok is False and "layers.3.up.weight: all zero, unlike 7 other layers" in asked.evidence


def test_the_newest_is_not_called_whole_where_its_bytes_are_damaged(tmp_path):
    run = tmp_path / "run"
    save(run, 1)
    newest = flip(save(run, 2))
    shallow, deep = (ckptools.doctor(newest, deep=deep) for deep in (False, True))
    assert row(shallow, NEWEST).answer == "this one, step 2"
    assert (row(deep, NEWEST).ok, row(deep, NEWEST).answer) == (False, "not known")
    assert deep.next[:2] == (f"ckptools verify {newest} --deep --to-fetch", f"ckptools ls {run} --deep")
    (run / "step-1.pt").unlink()
    assert row(ckptools.doctor(newest, deep=True), NEWEST).answer == "none"


def test_files_to_copy_again_are_listed_by_their_bytes_where_the_damage_is_in_bytes(tmp_path):
    older, newest = flip(save(tmp_path, 1)), save(tmp_path, 2)
    found = ckptools.doctor(older, deep=True)
    assert found.next[:2] == (
        f"ckptools consolidate {newest} -o OUT.safetensors",
        f"ckptools verify {older} --deep --to-fetch",
    )


def test_the_command_begins_with_what_is_worth_a_look_where_every_byte_is_read(tmp_path):
    layers = {f"layers.{n}.up.weight": torch.arange(1.0, 65.0).reshape(8, 8) + n for n in range(8)}
    layers["layers.5.up.weight"][2, 3] = torch.nan
    torch.save({"model": layers}, tmp_path / "model.pt")
    command = ["doctor", str(tmp_path / "model.pt")]
    shallow, deep = (CliRunner().invoke(app, [*command, *more]) for more in ([], ["--deep"]))
    assert (shallow.exit_code, deep.exit_code) == (0, 1) and "layers.5.up.weight" not in shallow.stdout
    assert "verify" in shallow.stdout and "--deep --values" in shallow.stdout
    lines = deep.stdout.splitlines()
    assert lines[2] == "whole, but 1 error: NaN or infinity: model.layers.5.up.weight"
    assert lines[3].startswith("  CK201  model.layers.5.up.weight: 1 NaN")
    assert lines[6].startswith("BAD  whole?") and lines[6].endswith("as above")
    assert lines[7].startswith("BAD  bytes and values right?") and "layers.5.up.weight" in lines[8]


def test_deep_answers_count_the_bytes_that_they_read(tmp_path):
    read: list[int] = []
    examine(DCP, deep=True, progress=lambda nbytes, name: read.append(nbytes))
    assert sum(read) >= sum(tensor.nbytes for _, tensor in tensors_in(ckptools.open(DCP).tree)) > 0


def test_whether_all_is_here_is_unknown_where_nothing_is_wrong_and_nothing_states_it(tmp_path):
    folder = Path(shutil.copytree(FIXTURES / "dcp-hf" / "ckpt", tmp_path / "ckpt"))
    found = row(ckptools.doctor(folder), WHOLE)
    assert (found.ok, ckptools.open(folder).verdict.whole) == (None, None)
    file = next(folder.glob("*.safetensors"))
    file.write_bytes(file.read_bytes()[:-8])
    assert row(ckptools.doctor(folder), WHOLE).ok is False


def test_around_a_file_that_no_step_names_only_its_own_folder_is_searched(tmp_path):
    torch.save({"w": torch.zeros(2)}, tmp_path / "model.pt")
    (tmp_path / "others").mkdir()
    (tmp_path / "others" / "theirs.pt").write_bytes(b"PK\x03\x04")
    newest = next(row for row in examine(tmp_path / "model.pt").rows if row.question == NEWEST)
    assert newest.evidence.startswith("1 checkpoint in")
    assert "whose subfolders were not searched" in newest.evidence
    assert "theirs" not in newest.evidence
