"""A folder that is opened: the one checkpoint in or below it, what its tracker names, and what else is there."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from typer.testing import CliRunner

import ckptools
from ckptools.cli import app
from ckptools.doctor.answers import NEWEST
from ckptools.errors import ReadError, SeveralError, UnknownFormatError
from ckptools.formats import folder_search
from tests.truth import FIXTURES

DCP = FIXTURES / "torch2.13.0-fsdp2-dcp-w3" / "ckpt"
RANKS = FIXTURES / "torch2.4.1-fsdp2-w3"
STATE = {"model": {"w": torch.arange(6.0).reshape(2, 3)}, "step": 5}


def ranks(folder: Path, head: str = "", only: tuple[int, ...] = (0, 1, 2)) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for rank in only:
        shutil.copy(RANKS / f"rank{rank}.pt", folder / f"{head}rank{rank}.pt")
    return folder


def one(path: Path, state: object = STATE) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    torch.save(state, path)
    return path


@pytest.mark.parametrize(
    "name", ["snapshot.pt", "last.ckpt", "checkpoint-5/x.pth", "a/b/c/epoch=1-step=5.ckpt", "step_5/state"]
)
def test_the_only_file_below_is_opened(tmp_path, name):
    one(tmp_path / name)
    assert ckptools.open(tmp_path).path == tmp_path / name
    assert ckptools.open(str(tmp_path)).model["w"].load().equal(STATE["model"]["w"])


def test_only_checkpoints_are_proposed(tmp_path):
    one(tmp_path / "data.pt", {"sampler": [1, 2], "rng": torch.get_rng_state()})
    one(tmp_path / "indices.pt", torch.arange(5))
    one(tmp_path / "optimizer.pt")
    (tmp_path / "notes.zip").write_bytes(b"PK\3\4" + bytes(100))
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "train.jsonl").write_text("{}")
    with pytest.raises(UnknownFormatError):
        ckptools.open(tmp_path)
    one(tmp_path / "model.pth")
    assert ckptools.open(tmp_path).path == tmp_path / "model.pth"


def test_an_optimizer_alone_that_lies_deeper_is_no_reason_to_ask_which_one_is_meant(tmp_path):
    one(tmp_path / "model.pth")
    one(tmp_path / "a" / "b" / "c" / "d" / "optimizer.pt", {"w": torch.ones(2)})
    assert ckptools.open(tmp_path).path == tmp_path / "model.pth"
    one(tmp_path / "a" / "b" / "c" / "d" / "other.pt")
    with pytest.raises(UnknownFormatError, match=r"weights lie deeper too .*d/other\.pt"):
        ckptools.open(tmp_path)


def test_a_link_that_lies_deeper_is_not_followed(tmp_path):
    one(tmp_path / "elsewhere" / "other.pt")
    one(tmp_path / "run" / "model.pth")
    deep = tmp_path / "run" / "a" / "b" / "c" / "d"
    deep.mkdir(parents=True)
    (deep / "link").symlink_to(tmp_path / "elsewhere")
    assert ckptools.open(tmp_path / "run").path == tmp_path / "run" / "model.pth"


def test_a_damaged_file_counts_by_its_name(tmp_path):
    data = one(tmp_path / "last.ckpt").read_bytes()
    (tmp_path / "last.ckpt").write_bytes(data[:-50])
    with pytest.raises(ReadError, match=r"last\.ckpt: is cut short"):
        ckptools.open(tmp_path)


@pytest.mark.parametrize(
    ("names", "listed"),
    [
        (
            ["epoch=0-step=90.ckpt", "epoch=1-step=180.ckpt"],
            "number in the name first): epoch=1-step=180.ckpt, epoch=0",
        ),
        (["step-9/x.pt", "step-10/x.pt"], "number in the name first): step-10/x.pt, step-9/x.pt"),
        (["model_9.pt", "model_10.pt"], "number in the name first): model_10.pt, model_9.pt"),
        (["a.pt", "b.pt"], "name the one you mean: a.pt, b.pt"),
    ],
    ids=str,
)
def test_of_several_the_highest_number_is_named_first_and_no_newest_is_claimed(tmp_path, names, listed):
    for order, later in ((names, 100), (names[::-1], 100), (names, 0)):
        for n, name in enumerate(order):
            os.utime(one(tmp_path / name), (10**9 + later * n,) * 2)
        with pytest.raises(SeveralError, match="holds 2 checkpoints") as error:
            ckptools.open(tmp_path)
        assert listed in str(error.value) and error.value.exit_code == 2


def test_of_many_the_newest_are_named(tmp_path):
    for n in range(20):
        one(tmp_path / f"step-{n}.pt")
    with pytest.raises(SeveralError, match=r"step-19\.pt, step-18\.pt, .* and 14 more$"):
        ckptools.open(tmp_path)


def test_folders_beyond_the_limit_are_said_to_be_skipped_by_both_searches(tmp_path, monkeypatch):
    monkeypatch.setattr(folder_search, "MAX_FOLDERS", 2)
    one(tmp_path / "a" / "x.pt")
    for name in "bc":
        (tmp_path / name).mkdir()
    (noted,) = ckptools.open(tmp_path).problems
    assert noted.message.endswith(": only 2 folders were looked into")
    assert ckptools.checkpoints_in(tmp_path).notes == ("only 2 folders were looked into",)


def test_rank_files_of_two_steps_name_the_newest(tmp_path):
    ranks(tmp_path, "ep0-ba5-")
    ranks(tmp_path, "ep0-ba15-")
    with pytest.raises(
        SeveralError, match=r"2 checkpoints.*number in the name first\): ep0-ba15-rank0\.pt, ep0-ba5-rank0\.pt"
    ):
        ckptools.open(tmp_path)


# -- trackers ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("tracker", "text", "target"),
    [
        ("latest", "step-10\n", "step-10"),
        ("latest_checkpointed_iteration.txt", "10", "step-10"),
        ("latest_checkpointed_iteration.txt", "release", "release"),
        ("last_checkpoint", "model_final.pth", "model_final.pth"),
    ],
)
def test_a_tracker_leads_to_what_it_names(tmp_path, tracker, text, target):
    for folder in ("step-9", "step-10", "release"):
        ranks(tmp_path / folder / "actor")
    one(tmp_path / "model_final.pth")
    (tmp_path / tracker).write_text(text)
    opened = ckptools.open(tmp_path).path
    assert opened == tmp_path / target or opened == tmp_path / target / "actor"


def test_a_tracker_chooses_between_steps_of_a_run(tmp_path):
    for step in (5, 6):
        shutil.copytree(DCP, tmp_path / f"step-{step}")
    (tmp_path / "latest").write_text("step-5")
    assert ckptools.open(tmp_path).path == tmp_path / "step-5"


def test_a_link_called_latest_is_a_tracker(tmp_path):
    for step in (5, 6):
        shutil.copytree(DCP, tmp_path / f"step-{step}")
    (tmp_path / "latest").symlink_to("step-5")
    assert ckptools.open(tmp_path).path == tmp_path / "step-5"


def test_composers_links_to_the_newest_lead_there(tmp_path):
    ranks(tmp_path, "ep0-ba5-")
    for rank in range(3):
        (tmp_path / f"latest-rank{rank}.pt").symlink_to(f"ep0-ba5-rank{rank}.pt")
    assert ckptools.open(tmp_path).name == "ep0-ba5"
    ranks(tmp_path, "ep0-ba4-")
    (tmp_path / "latest-rank1.pt").unlink()
    (tmp_path / "latest-rank2.pt").unlink()
    assert ckptools.open(tmp_path).name == "ep0-ba5"


@pytest.mark.parametrize(
    ("text", "why"),
    [
        *((text, "is not the plain name") for text in ("../elsewhere", "/etc/passwd", "", "a\0b", "..")),
        *((text, "is not here") for text in ("step-7", "7", "latest", "x" * 5000)),
    ],
)
def test_a_tracker_that_leads_nowhere_is_one_line_with_what_it_names_and_what_is_here(tmp_path, text, why):
    run = tmp_path / "run"
    one(run / "step-5" / "x.pt")
    one(tmp_path / "elsewhere" / "x.pt")
    (run / "latest").write_text(text)
    with pytest.raises(
        ReadError, match=rf"latest: names .*, which {why}.*; name the one you mean.*: step-5/x\.pt"
    ) as error:
        ckptools.open(run)
    assert "\n" not in str(error.value) and len(str(error.value)) < len(str(run)) + 400


def test_a_link_that_leads_out_is_no_tracker(tmp_path):
    one(tmp_path / "elsewhere" / "x.pt")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "latest").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(UnknownFormatError):
        ckptools.open(tmp_path / "run")


def links_to(folder: Path, target: str) -> None:
    (folder / "latest").symlink_to(target)


def links_of_ranks(folder: Path, target: str) -> None:
    ranks(folder, "ep0-ba5-")
    shutil.rmtree(folder / "step-5")
    (folder / "latest-rank0.pt").symlink_to("ep0-ba9-rank0.pt")


def text_of_a_store(folder: Path, target: str) -> None:
    links_of_ranks(folder, target)
    (folder / "latest-rank0.pt").unlink()
    (folder / "latest-rank0.pt.symlink").write_text("runs/1/ep0-ba9-rank0.pt")


def names_an_empty_folder(folder: Path, target: str) -> None:
    (folder / target).mkdir()
    (folder / "latest").write_text(target)


def writes(name: str, text: str) -> Callable[[Path, str], object]:
    return lambda folder, _: (folder / name).write_text(text)


@pytest.mark.slow
@pytest.mark.parametrize(
    "astray",
    [
        writes("latest", "step-9"),
        writes("latest_checkpointed_iteration.txt", "9"),
        writes("dlrover_latest.txt", "9"),
        links_to,
        links_of_ranks,
        text_of_a_store,
        names_an_empty_folder,
    ],
)
@pytest.mark.parametrize("command", ["inspect", "verify", "consolidate"])
def test_no_command_takes_the_only_checkpoint_where_the_tracker_names_another(tmp_path, astray, command):
    run = tmp_path / "run"
    shutil.copytree(DCP, run / "step-5")
    astray(run, "step-9")
    more = ["-o", str(tmp_path / "out.safetensors")] if command == "consolidate" else []
    result = CliRunner().invoke(app, [command, str(run), *more])
    assert result.exit_code == 3 and "CK016" in result.stderr and "name the one you mean: " in result.stderr
    assert result.stderr.count("\n") == 1 and not (tmp_path / "out.safetensors").exists()
    assert "CK016" in next(row.evidence for row in ckptools.doctor(run).rows if row.question == NEWEST)


def test_a_tracker_of_something_else_beside_the_files_of_a_checkpoint_is_left_alone(tmp_path):
    shutil.copytree(DCP, tmp_path / "c")
    (tmp_path / "c" / "latest").write_text("best")
    assert ckptools.open(tmp_path / "c").whole


# -- an export beside -----------------------------------------------------------------------------------------------


def notes(ck: ckptools.Checkpoint) -> list[str]:
    return [p.message for p in ck.problems if p.code == "CK013"]


def test_rank_files_go_before_an_export_of_them_which_is_named(tmp_path):
    run = ranks(tmp_path / "run7")
    ckptools.consolidate(run, run / "model.safetensors")
    ck = ckptools.open(run)
    assert ck.format == "rank_files" and ck.world_size.value == 3
    assert notes(ck) == ["also here, and not read: model.safetensors; open it by its name"]
    assert ckptools.open(run / "model.safetensors").format == "hugging_face"


def test_a_file_with_an_optimizer_goes_before_an_export_of_it_which_is_named(tmp_path):
    shutil.copy(FIXTURES / "torch2.13.0-ddp-w4" / "snapshot.pt", tmp_path)
    ckptools.consolidate(tmp_path / "snapshot.pt", tmp_path / "model.safetensors")
    ck = ckptools.open(tmp_path)
    assert (ck.path.name, ck.format, bool(ck.optimizers)) == ("snapshot.pt", "torch_file", True)
    assert "model.safetensors" in notes(ck)[0]


def test_a_file_of_weights_alone_does_not_go_before_other_weights(tmp_path):
    one(tmp_path / "old.pt")
    save_file({"w": torch.ones(2)}, tmp_path / "model.safetensors")
    assert ckptools.open(tmp_path).format == "hugging_face"


def test_an_export_does_not_hide_a_missing_rank(tmp_path):
    run = ranks(tmp_path / "run7")
    ckptools.consolidate(run, run / "model.safetensors")
    (run / "rank1.pt").unlink()
    done = CliRunner().invoke(app, ["inspect", str(run)])
    assert done.exit_code == 1 and "NOT WHOLE: rank 1 missing" in done.stdout and "model.safetensors" in done.stdout
    assert CliRunner().invoke(app, ["verify", str(run)]).exit_code == 1


@pytest.mark.parametrize("below", ["", "step-5"])
@pytest.mark.parametrize("slash", ["", "/"])
def test_an_output_is_not_put_beside_its_source_unless_it_is_named(tmp_path, below, slash):
    ranks(tmp_path / "run7" / below)
    done = CliRunner().invoke(app, ["consolidate", str(tmp_path / "run7"), "-o", f"{tmp_path / 'run7'}{slash}"])
    assert done.exit_code == 4 and done.stderr.count("\n") == 1
    assert f"-o {tmp_path / 'run7' / 'model.safetensors'}" in done.stderr
    assert not list(tmp_path.rglob("*.safetensors"))


def test_checkpoints_below_a_model_are_named(tmp_path):
    save_file({"w": torch.ones(2)}, tmp_path / "model.safetensors")
    one(tmp_path / "checkpoint-500" / "x.pt")
    shutil.copytree(DCP, tmp_path / "runs" / "step-3")
    assert notes(ckptools.open(tmp_path)) == ["also here, and not read: checkpoint-500/x.pt, runs; open it by its name"]


@pytest.mark.parametrize("known", ["accelerate-fsdp2", "lightning-fabric-fsdp2", "dcp-multifile", "deepspeed-z3-bf16"])
def test_parts_of_a_checkpoint_are_no_others(known):
    assert notes(ckptools.open(FIXTURES / known / "ckpt")) == []


def test_other_models_of_a_folder_are_told_once_however_many_they_are(tmp_path):
    for name in ("model", *(f"ema{n}" for n in range(12))):
        save_file({"w": torch.arange(4.0)}, tmp_path / f"{name}.safetensors")
    (note,) = notes(ckptools.open(tmp_path))
    assert note.startswith("not read, since model.safetensors is here: ema0.safetensors") and "and 6 more" in note
