"""A folder of parts by their names: what makes it one checkpoint, what is named, and what stays refused."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch

import ckptools
from ckptools.errors import CkptoolsError, UnsafePathError
from ckptools.formats import composite
from ckptools.formats.registry import FORMATS, recognised
from tests.truth import FIXTURES

SAMPLE = FIXTURES / "composite-dcp-fsdp2" / "ckpt" / "step_5"


@pytest.fixture
def step(tmp_path) -> Path:
    return Path(shutil.copytree(SAMPLE, tmp_path / "run" / "step_5"))


def of(ck: ckptools.Checkpoint, severity: str) -> list[str]:
    return [p.message for p in ck.problems if p.severity == severity]


def test_no_key_of_a_part_is_renamed(step):
    names = {f"optim.{key}" for key in ckptools.open(step / "optim").raw["optim"]["state"]}
    assert names == {f"optim.{key}" for key in ckptools.open(step).raw["optim"]["state"]}
    (step / "optim").rename(step / "optimizer")
    assert list(ckptools.open(step).raw["optimizer"]) == ["optim"]  # under the name that the part has inside


def test_a_flat_model_keeps_keys_that_begin_as_its_part_is_called(tmp_path):
    torch.save({"model.weight": torch.ones(2), "model.bias": torch.ones(1)}, tmp_path / "model.pt")
    (tmp_path / "rng").mkdir()
    torch.save({"torch": torch.get_rng_state()}, tmp_path / "rng" / "rng_rank_0.pt")
    ck = ckptools.open(tmp_path)
    assert (ck.format, list(ck.model)) == ("composite", ["model.weight", "model.bias"])


def test_plain_files_beside_a_folder_of_a_part_are_one_checkpoint(tmp_path):
    (tmp_path / "rng").mkdir()
    torch.save({"torch": torch.get_rng_state()}, tmp_path / "rng" / "rng_rank_0.pt")
    net = torch.nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(net.parameters())
    net(torch.ones(3)).sum().backward()
    optimizer.step()
    torch.save(net.state_dict(), tmp_path / "model.pt")
    torch.save(optimizer.state_dict(), tmp_path / "optimizer.pt")
    ck = ckptools.open(tmp_path)
    assert ck.whole and set(ck.optimizers["optimizer"].state) == {"weight", "bias"}
    assert torch.equal(ck.model["weight"].load(), net.weight)


def test_the_model_may_be_of_hugging_face(step):
    shutil.rmtree(step / "model")
    shutil.copytree(FIXTURES / "hf-llama-safetensors-bf16" / "ckpt", step / "model")
    ck = ckptools.open(step)
    assert ck.format == "composite" and "lm_head.weight" in ck.model


def test_a_rank_without_a_random_state_is_an_error(step):
    (step / "rng/rng_rank_1.pt").unlink()
    ck = ckptools.open(step)
    assert ck.whole is False and of(ck, "error") == ["no file rng/rng_rank_1.pt"]


@pytest.mark.parametrize("harm", ["missing", "cut"])
def test_only_the_lost_part_of_a_rank_is_said_to_be_lost(step, harm, tmp_path):
    file = step / "rng/rng_rank_0.pt"
    file.unlink() if harm == "missing" else file.write_bytes(file.read_bytes()[:-9])
    ck = ckptools.open(step)
    fate = "missing" if harm == "missing" else "cut short or damaged"
    assert ck.verdict.headline == f"NOT WHOLE: rng of rank 0 {fate}"
    assert ck.verdict.remark.startswith("recoverable: ")
    assert ck.verdict.lost == ("what rank 0 had for itself: rng",)
    done = ck.consolidate(tmp_path / "out.pt", only="all")
    assert list(done.left_out) == ["rng.0"] and not any("shared" in note for note in done.notes)
    assert set(torch.load(tmp_path / "out.pt", weights_only=True)["dataloader"]) == {0, 1}


def test_a_file_in_the_place_of_another_parts_is_a_warning(step):
    assert not of(ckptools.open(step), "warning")
    shutil.copy(step / "dataloader/dataloader_rank_0.pt", step / "rng/rng_rank_0.pt")
    (text,) = of(ckptools.open(step), "warning")
    assert text == "files of one part hold different things: epoch, position of rank 0; torch of rank 1"


def test_consolidate_repeats_what_may_be_wrong_with_the_parts_that_it_writes(step, tmp_path):
    shutil.copy(step / "dataloader/dataloader_rank_0.pt", step / "rng/rng_rank_0.pt")
    notes = ckptools.consolidate(step, tmp_path / "all.pt", only="all").notes
    assert any(note.startswith("warning of the source: CK010 rng: files of one part") for note in notes)
    assert not any("warning" in note for note in ckptools.consolidate(step, tmp_path / "m.pt", only="model").notes)


def test_what_none_may_have_lost_is_a_warning(step):
    (step / "dataloader/dataloader_rank_1.pt").unlink()  # there may be one data-parallel rank
    shutil.rmtree(step / "optim")
    ck = ckptools.open(step)
    assert [text.partition(",")[0] for text in of(ck, "warning")] == [
        "no file dataloader/dataloader_rank_1.pt",
        "no optimizer",
    ]


def test_an_optimizer_that_no_format_recognises_is_named(step):
    (step / "optim").rename(step / "x")
    (step / "optim").mkdir()
    (step / "x").rename(step / "optim" / "step_5")
    ck = ckptools.open(step)
    assert ck.whole is False and "no folder optim with anything in it of a format" in of(ck, "error")[0]


def test_what_belongs_to_no_part_is_named(step):
    (step / "other.yaml").write_text("a: 1")
    (step / "rng" / "notes.txt").write_text("a")
    notes = of(ckptools.open(step), "note")
    assert any("other.yaml" in text for text in notes) and any("notes.txt" in text for text in notes)


def test_settings_and_counters_in_yaml_are_parts(step):
    (step / "config.yaml").write_text("train: {steps: 9}\n")
    (step / "meta.yml").write_text("step: 5\n")
    ck = ckptools.open(step)
    assert (ck.tree["config"], ck.tree["meta"]) == ({"train": {"steps": 9}}, {"step": 5})
    assert "meta.step" in ck.step.sources


def test_parts_of_different_steps_are_a_warning(step):
    (step / "train_state.json").write_text(json.dumps({"step": 5}))
    torch.save({"step": 4}, step / "extra_state.pt")
    assert "extra_state.step 4, train_state.step 5" in of(ckptools.open(step), "warning")[0]


def test_a_part_that_is_a_link_out_of_the_folder_is_refused(step):
    (step / "model").rename(step.parent / "m")
    (step / "model").symlink_to(step.parent / "m")
    with pytest.raises(UnsafePathError):
        ckptools.open(step)


def only_the_model(step: Path) -> None:
    for entry in step.iterdir():
        if entry.name != "model":
            shutil.rmtree(entry) if entry.is_dir() else entry.unlink()


def no_model(step: Path) -> None:
    shutil.rmtree(step / "model")


def two_of_one_name(step: Path) -> None:
    torch.save({"lr": 1.0}, step / "optim.pt")


def runs(step: Path) -> None:
    for name in ("model", "optim"):
        (step / name).rename(step / "x")
        (step / name).mkdir()
        (step / "x").rename(step / name / "step_5")


def a_format_of_its_own(step: Path) -> None:
    shutil.rmtree(step / "optim")
    shutil.copytree(FIXTURES / "deepspeed-z1-fp32" / "ckpt", step / "optim")


@pytest.mark.parametrize("change", [only_the_model, no_model, two_of_one_name, runs, a_format_of_its_own])
def test_what_is_not_sure_to_be_one_checkpoint_is_none(step, change):
    change(step)
    try:
        found = recognised(step, FORMATS)
    except CkptoolsError:
        return
    assert found is None or found.NAME != "composite"


def test_every_format_is_one_of_a_part_or_one_that_is_opened_by_itself():
    around = {"nemo_automodel", "olmo_local", "step_files", *(format_.NAME for format_ in FORMATS if format_.recipe)}
    known = {module.__name__.rpartition(".")[2] for module in (*composite.READERS, *composite.OWN)}
    assert {format_.NAME for format_ in FORMATS} == known | around | {"composite"}
