"""`verify` on real checkpoints: whole ones pass, and each kind of damage is found by the check that is there for it."""

from __future__ import annotations

import json
import math
import os
import random
import re
import shutil
import zipfile
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from typer.testing import CliRunner

import ckptools
from ckptools.cli import app
from ckptools.errors import UsageError
from ckptools.keys import random_states
from ckptools.model.records import Rows
from ckptools.verify.record import TITLES, Check, Verification, summary, verification_json
from ckptools.verify.run import bytes_to_verify
from ckptools.verify.stored_bytes import bytes_to_read
from tests.fake_world import fake_group
from tests.truth import FIXTURES

COMPOSER = FIXTURES / "composer-0.13.5-torch1.13.1-sharded-w4"
HSDP = FIXTURES / "torch2.6.0-fsdp1-hsdp2x2-w4"


@pytest.fixture
def composer(tmp_path):
    return Path(shutil.copytree(COMPOSER, tmp_path / "run"))


@pytest.fixture
def hsdp(tmp_path):
    return Path(shutil.copytree(HSDP, tmp_path / "run"))


def check(found: Verification, name: str) -> Check:
    return next(c for c in found.checks if c.name.startswith(name))


def tensor_bytes(file: Path, fqn: str) -> tuple[Path, int, int]:
    """The file, offset and length of the bytes that one rank's file has of a model tensor."""
    source = ckptools.open(file, only_this_file=True).model[fqn].found[0].source
    return source.path, *source.record_span


def overwrite(path: Path, offset: int, data: bytes) -> None:
    with path.open("r+b") as file:
        file.seek(offset)
        file.write(data)


def test_without_options_no_tensor_is_read_but_what_must_be_compared(tmp_path):
    found = ckptools.verify(COMPOSER)
    assert found.bytes_read == 0
    assert (check(found, "checksums").result, check(found, "finite").result) == ("not judged", "not judged")


@pytest.mark.parametrize("damage", ["missing", "cut"])
def test_a_dcp_without_the_file_that_counts_steps_ends_with_its_verdict(tmp_path, damage):
    source, folder = FIXTURES / "torch2.13.0-fsdp2-dcp-w3" / "ckpt", tmp_path / "run"
    shutil.copytree(source, folder, copy_function=shutil.copy)  # with times of now, as the damaged file will have
    file = folder / "__1_0.distcp"
    file.unlink() if damage == "missing" else file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])
    done = CliRunner().invoke(app, ["verify", str(folder), "--deep", "--json"])
    told = json.loads(done.stdout)
    assert (done.exit_code, told["ok"], len(told["checks"])) == (1, False, 14)
    assert {p["rank"] for c in told["checks"][:3] for p in c["problems"]} == {1}


@pytest.mark.parametrize("option", ["deep", "values"])
def test_a_file_that_shrinks_while_it_is_checked_is_a_problem_and_the_checks_go_on(composer, option):
    ck = ckptools.open(composer, all_ranks=True)
    file = composer / "ep0-ba5-rank1.pt"
    file.write_bytes(file.read_bytes()[:50_000])
    found = ckptools.verify(ck, **{option: True})
    problems = check(found, "checksums" if option == "deep" else "finite").problems
    assert {(p.code, p.rank) for p in problems} == {("CK002", 1)}
    assert found.checks[-1].name == "names in pickles"


def test_bytes_without_a_checksum_that_are_gone_fail_the_check_of_checksums(tmp_path):
    file = tmp_path / "model.safetensors"
    save_file({"w": torch.ones(1000)}, file)
    ck = ckptools.open(file)
    os.truncate(file, 999)
    verified = ck.verify(deep=True, values=True)
    assert not verified.ok
    (checksums,) = [check for check in verified.checks if check.name.startswith("checksums")]
    assert checksums.result == "FAIL" and {p.code for p in checksums.problems} == {"CK002"}


def test_nan_and_infinity_are_named_with_their_global_index(composer):
    path, offset, _ = tensor_bytes(composer / "ep0-ba5-rank1.pt", "model.blocks.0.up.weight")
    overwrite(path, offset + 4 * 18, bytes.fromhex("0000c07f 0000807f 000080ff"))
    (problem,) = check(ckptools.verify(composer, values=True), "finite").problems
    assert (problem.code, problem.rank, problem.tensor) == ("CK201", 1, "state.model.model.blocks.0.up.weight")
    # Rank 1 has rows 8 to 16 of 17 columns: its element 18 is [9, 1] of the whole.
    assert problem.message == "1 NaN, 2 Inf, first at [9, 1]"


@pytest.mark.parametrize("dtype", ["float64", "float16", "bfloat16", "float8_e5m2", "float8_e4m3fn", "complex64"])
def test_nan_is_found_in_every_floating_dtype_and_large_numbers_are_not_taken_for_it(dtype, tmp_path):
    kind = getattr(torch, dtype)
    top = torch.finfo(kind).max
    torch.save({"good": torch.tensor([top, -top, 0.0], dtype=torch.float64).to(kind)}, tmp_path / "a.pt")
    torch.save({"bad": torch.tensor([1.0, 2.0, float("nan"), 3.0]).to(kind)}, tmp_path / "b.pt")
    assert ckptools.verify(tmp_path / "a.pt", values=True).ok
    (problem,) = ckptools.verify(tmp_path / "b.pt", values=True).problems
    assert (problem.tensor, problem.message) == ("bad", "1 NaN, first at [2]")


@pytest.mark.parametrize("at", [0, 7, (4 << 20) // 4 - 1, (4 << 20) // 4, 3_000_000 - 1])
def test_nan_is_found_wherever_in_a_large_tensor_it_is(at, tmp_path):
    values = torch.ones(1000, 3000)
    values.view(-1)[at] = float("nan")
    torch.save({"w": values}, tmp_path / "a.pt")
    (problem,) = ckptools.verify(tmp_path / "a.pt", values=True).problems
    assert (problem.code, problem.message) == ("CK201", f"1 NaN, first at {[at // 3000, at % 3000]}")


def test_nan_in_padding_that_no_tensor_sees_is_not_reported(tmp_path):
    storage = torch.tensor([1.0, 2.0, float("nan")])
    torch.save({"w": storage[:2], "b": storage[:1]}, tmp_path / "a.pt")
    assert ckptools.verify(tmp_path / "a.pt", values=True).ok


def test_numbers_that_cannot_be_nan_are_not_read(tmp_path):
    torch.save({"w": torch.ones(100), "ids": torch.ones(1000, dtype=torch.int64)}, tmp_path / "a.pt")
    found = ckptools.verify(tmp_path / "a.pt", values=True)
    assert found.ok and found.bytes_read == 400


def test_a_replica_with_other_bytes_is_named(hsdp):
    path, offset, length = tensor_bytes(hsdp / "rank2.pt", "conv.weight")
    overwrite(path, offset, bytes(length))
    (problem,) = check(ckptools.verify(hsdp), "copies").problems
    assert (problem.code, problem.rank, problem.tensor) == ("CK105", None, "model.conv.weight")
    said = r"rank 2 holds other bytes than rank 0 \(first at \[0, 0, 0\]: 0.0 and -?[\d.]+\)"
    assert re.search(said, problem.message)


def test_a_checkpoint_that_stores_nothing_twice_has_no_copies_that_are_equal():
    copies = check(ckptools.verify(FIXTURES / "torchsnapshot-fsdp1" / "ckpt"), "copies equal")
    assert copies.not_ok.startswith("not judged: nothing is stored twice; each rank has its own: ")


def test_what_an_interrupted_write_left_is_named(composer):
    (composer / ".model.pt.0a1b2c3d.partial").write_bytes(b"x")
    (problem,) = check(ckptools.verify(composer), "files").problems
    assert (problem.code, problem.severity) == ("CK008", "warning")


def snapshot(tmp_path: Path, change) -> Verification:
    """A small real snapshot with a change in its state."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(3, 5), torch.nn.Linear(5, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10)
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    scheduler.step()
    state = {"model": model.state_dict(), "opt": optimizer.state_dict(), "sched": scheduler.state_dict(), "step": 1}
    change(state)
    torch.save(state, tmp_path / "s.pt")
    return ckptools.verify(tmp_path / "s.pt")


def problems(found: Verification) -> list[tuple[str, str | None]]:
    return [(p.code, p.tensor) for p in found.problems]


def test_a_parameter_without_optimizer_state_is_a_warning(tmp_path):
    found = snapshot(tmp_path, lambda state: state["opt"]["state"].pop(3))
    assert (problems(found), found.ok) == ([("CK203", "1.bias")], True)


def test_a_moment_of_another_shape_is_an_error(tmp_path):
    found = snapshot(tmp_path, lambda state: state["opt"]["state"][0].update(exp_avg_sq=torch.zeros(3, 5)))
    assert problems(found) == [("CK209", "0.weight")]


def test_a_parameter_in_two_groups_is_an_error(tmp_path):
    found = snapshot(tmp_path, lambda state: state["opt"]["param_groups"].append({"lr": 0.1, "params": [3]}))
    assert ("CK207", "1.bias") in problems(found)


def test_step_counters_that_disagree_are_named(tmp_path):
    found = snapshot(tmp_path, lambda state: state["opt"]["state"][2].update(step=torch.tensor(7.0)))
    assert problems(found) == [("CK204", "1.weight")]
    assert problems(snapshot(tmp_path, lambda state: state.update(step=9))) == [("CK204", None)]


def test_an_archive_that_torch_would_refuse_is_named_with_the_reason(tmp_path):
    torch.save({"w": torch.ones(4)}, tmp_path / "whole.pt")
    with zipfile.ZipFile(tmp_path / "whole.pt") as whole, zipfile.ZipFile(tmp_path / "a.pt", "w") as less:
        for name in whole.namelist():
            if not name.endswith("version"):
                less.writestr(name, whole.read(name))
    with pytest.raises(RuntimeError):
        torch.load(tmp_path / "a.pt")
    messages = [p.message for p in ckptools.verify(tmp_path / "a.pt", deep=True).problems if p.code == "CK004"]
    assert messages == ["a.pt has no record version; torch.load may refuse it"]


def test_a_directory_that_is_damaged_while_it_is_checked_ends_no_check(tmp_path):
    torch.save({"w": torch.ones(4)}, tmp_path / "a.pt")
    ck = ckptools.open(tmp_path / "a.pt")
    data = (tmp_path / "a.pt").read_bytes()
    overwrite(tmp_path / "a.pt", data.index(b"PK\1\2", data.index(b"PK\1\2") + 1), bytes(4))
    found = ckptools.verify(ck, deep=True)
    assert found.checks[-1].name == "names in pickles"


@pytest.mark.parametrize("broken", [[2], [0, 1, 2, 3]], ids=["one", "all"])
def test_a_step_counter_that_is_no_number_is_a_warning(tmp_path, broken):
    def change(state):
        for key in broken:
            state["opt"]["state"][key].update(step=torch.tensor(float("nan")))

    found = snapshot(tmp_path, change)
    assert [p.code for p in found.problems] == ["CK204"]
    assert f"counts nan steps (of 4 parameters {len(broken)} have no number)" in found.problems[0].message


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64, torch.int32, torch.int64])
def test_step_counters_are_read_whatever_their_dtype(tmp_path, dtype):
    def change(state):
        for slots in state["opt"]["state"].values():
            slots["step"] = torch.tensor([[7]], dtype=dtype)

    assert "counts 7 steps" in check(snapshot(tmp_path, change), "step counters").problems[0].message


def test_a_learning_rate_that_the_scheduler_did_not_set_is_a_warning(tmp_path):
    found = snapshot(tmp_path, lambda state: state["opt"]["param_groups"][0].update(lr=0.5))
    assert problems(found) == [("CK205", "sched")]
    assert "are 0.09755, those of the param groups 0.5" in found.problems[0].message


def test_rng_states_are_counted_and_equal_ones_told():
    assert check(ckptools.verify(COMPOSER), "rng").detail.startswith("python 4 distinct of 4")
    assert [p.code for p in check(ckptools.verify(HSDP), "rng").problems] == ["CK206"]


def test_an_rng_state_that_some_ranks_share_is_a_warning_that_names_them(tmp_path):
    shutil.copytree(FIXTURES / "verl-fsdp1" / "ckpt" / "global_step_3" / "actor", tmp_path / "actor")
    file = str(tmp_path / "actor" / "extra_state_world_size_4_rank_{}.pt")
    sound = check(ckptools.verify(tmp_path / "actor"), "rng")
    shutil.copyfile(file.format(1), file.format(3))
    found = check(ckptools.verify(tmp_path / "actor"), "rng")
    (new,) = set(found.problems) - set(sound.problems)
    assert (new.code, new.severity) == ("CK206", "warning") and "ranks 1, 3 have the same numpy state (" in new.message
    assert "numpy 3 distinct of 4" in found.detail and "numpy 4 distinct of 4" in sound.detail


def test_generators_that_are_alike_on_all_ranks_are_one_problem(tmp_path):
    numbers = random.Random(0).getstate()
    for rank in range(3):
        state = {"model": {"w": torch.ones(2)}, "rng": {"python": numbers, "torch": torch.ones(8, dtype=torch.uint8)}}
        torch.save(state, tmp_path / f"rank{rank}.pt")
    (found,) = check(ckptools.verify(tmp_path), "rng").problems
    assert found.message.startswith("all 3 ranks have the same python, torch states, fingerprints ")


@pytest.mark.parametrize(("size", "warned"), [(4, False), (2, True)])
def test_ranks_may_draw_alike_only_where_a_tensor_is_replicated_on_all_of_them(tmp_path, size, warned):
    from torch.distributed.tensor import DTensor, Replicate

    for rank in range(4):
        with fake_group(rank, 4):
            first = rank // size * size
            mesh = torch.distributed.DeviceMesh("cpu", list(range(first, first + size)))
            bias = DTensor.from_local(torch.ones(3), mesh, [Replicate()], run_check=False)
            state = {"model": {"bias": bias}, "rng": {"torch": torch.zeros(8, dtype=torch.uint8)}}
            torch.save(state, tmp_path / f"rank{rank}.pt")
    found = check(ckptools.verify(tmp_path), "rng")
    assert [p.code for p in found.problems] == ["CK206"] * warned


@pytest.mark.parametrize(("seeds", "warned"), [([0, 0, 1, 1], 0), ([0, 1, 1, 2], 1), ([0, 1, 2, 3], 0)])
def test_rng_states_that_are_equal_in_groups_of_one_size_are_meant_to_be(tmp_path, seeds, warned):
    states = [{"torch": torch.Generator().manual_seed(seed).get_state()} for seed in seeds]
    torch.save({"state": {"step": 1}, "rng": states}, tmp_path / "all.pt")
    problems = check(ckptools.verify(tmp_path / "all.pt"), "rng").problems
    assert [p.code for p in problems] == ["CK206"] * warned


def test_rng_states_that_cannot_be_read_are_counted_nowhere_and_are_not_called_equal(tmp_path, monkeypatch):
    monkeypatch.setattr(random_states, "MAX_STATE", 4096)
    small = [torch.full((4096,), n, dtype=torch.uint8) for n in (0, 1)]
    large = [torch.full((4097,), n, dtype=torch.uint8) for n in (2, 3)]
    torch.save({"state": {"step": 1}, "rng": [{"torch": state} for state in (*small, *large)]}, tmp_path / "all.pt")
    found = check(ckptools.verify(tmp_path / "all.pt"), "rng")
    assert found.detail.startswith("torch 2 distinct of 2")
    assert [(p.code, p.rank) for p in found.problems] == [("CK005", 2), ("CK005", 3)]


def test_a_code_can_be_ignored_and_a_wrong_one_is_refused(composer):
    (composer / "ep0-ba5-rank2.pt").unlink()
    found = ckptools.verify(composer, ignore=["ck001", "CK101"])
    assert found.ok and found.ignored > 20
    with pytest.raises(UsageError, match="CK999: there is no such code"):
        ckptools.verify(composer, ignore=["CK999"])


@pytest.mark.parametrize(("command", "verdict"), [("inspect", "whole"), ("verify", "ok")])
def test_what_cannot_be_opened_has_its_verdict_in_json_and_its_line_on_stderr(tmp_path, command, verdict):
    done = CliRunner().invoke(app, [command, str(tmp_path / "nowhere.pt"), "--json"])
    told = json.loads(done.stdout)
    assert (done.exit_code, told[verdict], told["exit_code"]) == (3, False, 3)
    assert done.stderr == f"error: {told['error']}\n"


def test_files_written_hours_apart_are_warned_of(tmp_path):
    folder = shutil.copytree(FIXTURES / "torch2.4.1-fsdp2-w3", tmp_path / "run")
    now = (folder / "rank0.pt").stat().st_mtime
    for rank, ago in ((0, 0), (1, 3 * 3600), (2, 0)):
        os.utime(folder / f"rank{rank}.pt", (now - ago, now - ago))
    (problem,) = check(ckptools.verify(folder), "one save").problems
    assert (problem.code, problem.severity) == ("CK006", "warning") and problem.ranks == (1,)
    assert problem.message.startswith("written 3.0 hours before the others; they may be of two saves")
    assert "rank 1 perhaps of another save" in ckptools.verify(folder).verdict.headline


def test_files_of_which_no_few_stand_apart_are_not_named(tmp_path):
    folder = shutil.copytree(FIXTURES / "torch2.6.0-fsdp1-hsdp2x2-w4", tmp_path / "run")
    for rank in range(4):
        os.utime(folder / f"rank{rank}.pt", (1.7e9 + 7200 * (rank // 2),) * 2)
    (problem,) = check(ckptools.verify(folder), "one save").problems
    assert problem.message.startswith("files were written 2.0 hours apart") and not problem.ranks


def test_a_name_and_a_content_of_other_steps_are_warned_of(tmp_path):
    torch.save({"model": {"w": torch.ones(2)}, "global_step": 5}, tmp_path / "checkpoint-7.pt")
    found = ckptools.verify(tmp_path / "checkpoint-7.pt")
    assert [(p.code, p.severity) for p in found.problems] == [("CK010", "warning")]
    assert check(found, "files").result == "warn" and not check(found, "step counters").problems


def test_state_of_a_parameter_in_no_group_is_an_error(tmp_path):
    state = {name: {"exp_avg": torch.ones(2)} for name in ("a", "b")}
    tree = {"model": {"a": torch.ones(2), "b": torch.ones(2)}, "optimizer": {"state": state}}
    tree["optimizer"]["param_groups"] = [{"lr": 0.1, "params": ["a"]}]
    torch.save(tree, tmp_path / "x.pt")
    problems = check(ckptools.verify(tmp_path / "x.pt"), "optimizer covers params").problems
    assert [(p.code, p.tensor) for p in problems if p.severity == "error"] == [("CK207", "b")]


def test_a_file_name_of_another_world_than_the_content_is_an_error(tmp_path):
    for rank in range(3):
        shutil.copy(
            FIXTURES / "torch2.4.1-fsdp2-w3" / f"rank{rank}.pt", tmp_path / f"model_world_size_4_rank_{rank}.pt"
        )
    problems = ckptools.open(tmp_path, all_ranks=True).problems
    assert "world size 3 by content, 4 by file name" in [p.message for p in problems if p.code == "CK103"]


@pytest.mark.slow
@pytest.mark.parametrize("deep, values", [(True, False), (False, True), (True, True), (False, False)])
@pytest.mark.parametrize("folder", [COMPOSER, HSDP], ids=lambda p: p.name)
def test_what_will_be_read_is_known_before_it_is(folder, deep, values):
    ck, told = ckptools.open(folder, all_ranks=True), []
    found = ckptools.verify(ck, deep=deep, values=values, progress=lambda nbytes, name: told.append(nbytes))
    assert bytes_to_verify(ck, deep, values) == sum(told)
    assert bytes_to_read(ck, deep, values) == found.bytes_read
    assert (found.bytes_read > 0) == (deep or values)


def test_what_is_only_a_note_is_no_finding_of_verify():
    ck = ckptools.open(FIXTURES / "megatron-tp2pp2-fp32" / "legacy", all_ranks=True)
    assert {p.severity for p in ck.problems} == {"note"}
    assert "anything else" not in [one.name for one in ckptools.verify(ck).checks]


def test_the_last_line_counts_what_failed_what_warns_and_what_is_ignored():
    checks = Rows([Check("files", "FAIL", ""), Check("steps", "warn", ""), Check("rng", "warn", "")])
    verdict = ckptools.open(COMPOSER).verify().verdict
    found = Verification(COMPOSER, checks, verdict, ignored=1, bytes_read=2048, seconds=1.5)
    expected = "1 check failed, 2 warnings, 1 problem ignored; 2.0 KiB read for checksums and values, 1.50 s"
    assert summary(found) == expected
    assert summary(replace(found, checks=Rows(), ignored=0)).startswith("no check failed; ")


def test_progress_names_each_record_by_its_file_and_each_copy_by_its_tensor():
    ck, named = ckptools.open(HSDP, all_ranks=True), set()
    ckptools.verify(ck, deep=True, progress=lambda nbytes, name: named.add((name, nbytes > 0)))
    files = {(path.name, True) for path in {f.path for f in ck.files}}
    assert files <= named
    assert {name for name, read in named if not read} - {name for name, _ in files} >= {"model.emb.weight"}


def test_an_infinite_score_of_a_callback_is_a_warning_and_an_infinite_weight_is_an_error(tmp_path):
    scores = {"ModelCheckpoint": {"kth_value": torch.tensor(math.inf), "history": torch.tensor([math.inf])}}
    torch.save({"state_dict": {"w": torch.tensor(math.inf)}, "callbacks": scores}, tmp_path / "x.ckpt")
    found = ckptools.verify(tmp_path / "x.ckpt", values=True)
    severities = {p.tensor: p.severity for p in found.problems if p.code == "CK201"}
    assert severities == {
        "state_dict.w": "error",
        "callbacks.ModelCheckpoint.history": "error",
        "callbacks.ModelCheckpoint.kth_value": "warning",
    }


def test_people_read_titles_in_plain_words_and_programs_the_names():
    found = ckptools.verify(COMPOSER)
    names = [check["name"] for check in json.loads(verification_json(found))["checks"]]
    assert {"lr: scheduler = groups", "rng"} <= set(names) and set(TITLES) <= {*names}
    shown = str(found)
    assert all(check.title in shown for check in found.checks) and not re.search(r"\w = \w|lr:", shown)
