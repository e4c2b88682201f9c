"""Files of one step are one checkpoint: in a folder with all steps, or in a folder of their own."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

import ckptools
from ckptools.errors import CkptoolsError, RefusedError
from ckptools.formats.rank_search.step_names import files_of_step


def trained() -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 4), torch.nn.Linear(4, 2))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 8)).sum().backward()
    optimizer.step()
    return dict(model.state_dict()), optimizer.state_dict()


def by_rank(folder: Path, step: int, ranks: int = 2) -> None:
    """As nanochat saves a step: the optimizer of each rank has the state of the parameters that the rank updates."""
    model, optimizer = trained()
    torch.save(model, folder / f"model_{step:06}.pt")
    (folder / f"meta_{step:06}.json").write_text(json.dumps({"step": step, "val_bpb": 1.2}))
    for rank in range(ranks):
        numbers = [n for n in optimizer["state"] if n % ranks == rank]
        groups = [{**optimizer["param_groups"][0], "params": list(range(len(numbers)))}]
        state = {n: optimizer["state"][number] for n, number in enumerate(numbers)}
        torch.save({"state": state, "param_groups": groups}, folder / f"optim_{step:06}_rank{rank}.pt")


def of_numbers(folder: Path) -> Path:
    model, optimizer = trained()
    torch.save(model, folder / "model_10.pt")
    torch.save(optimizer, folder / "optimizer_10.pt")
    (folder / "state_10.json").write_text(json.dumps({"global_step": 10}))
    return folder / "model_10.pt"


def without_a_word(folder: Path) -> Path:
    model, optimizer = trained()
    torch.save({"model": model, "step": 1000}, folder / "ckpt_001000.pt")
    torch.save(optimizer, folder / "ckpt_001000_optim.pt")
    (folder / "ckpt_001000.json").write_text(json.dumps({"step": 1000}))
    return folder / "ckpt_001000.pt"


def in_safetensors(folder: Path) -> Path:
    model, optimizer = trained()
    save_file(model, folder / "step_10.safetensors")
    torch.save(optimizer, folder / "optimizer_10.pt")
    (folder / "step_10.json").write_text(json.dumps({"step": 10}))
    return folder / "step_10.safetensors"


def in_a_folder_of_the_step(folder: Path) -> Path:
    model, optimizer = trained()
    step = folder / "step_10"
    step.mkdir()
    torch.save(model, step / "model.pt")
    torch.save(optimizer, step / "optim.pt")
    (step / "meta.json").write_text(json.dumps({"step": 10}))
    return step


def with_a_flattened_optimizer(folder: Path) -> Path:
    model, optimizer = trained()
    step = folder / "000010"
    step.mkdir()
    save_file(model, step / "weights.safetensors")
    flat = {f"state/{n}/{name}": value for n, state in optimizer["state"].items() for name, value in state.items()}
    save_file(flat, step / "optimizer.safetensors")
    (step / "optimizer.json").write_text(json.dumps({"param_groups": optimizer["param_groups"]}))
    (step / "train_state.json").write_text(json.dumps({"step": 10}))
    return step


def with_yaml(folder: Path) -> Path:
    model, optimizer = trained()
    torch.save(model, folder / "weights_10.pt")
    torch.save(optimizer, folder / "opt_10.pt")
    (folder / "train_state_10.yaml").write_text("global_step: 10\ndata: {shard: 3}\n")
    (folder / "training_args_10.yml").write_text("steps: 1000\nbatch: 8\n")
    return folder / "weights_10.pt"


def with_an_epoch_in_the_names(folder: Path) -> Path:
    model, optimizer = trained()
    torch.save(model, folder / "model_epoch2_step10.pth")
    torch.save(optimizer, folder / "optimizer_epoch2_step10.pth")
    (folder / "info_epoch2_step10.json").write_text(json.dumps({"global_step": 10}))
    return folder / "model_epoch2_step10.pth"


def in_two_folders(folder: Path) -> Path:
    model, optimizer = trained()
    policy, state = folder / "step_000010/policy", folder / "step_000010/train_state"
    policy.mkdir(parents=True)
    state.mkdir()
    save_file(model, policy / "model.safetensors")
    flat = {f"state.{n}.{name}": value for n, one in optimizer["state"].items() for name, value in one.items()}
    save_file(flat, state / "optim.safetensors")
    (state / "optim_param_groups.json").write_text(json.dumps(optimizer["param_groups"]))
    (state / "step.json").write_text(json.dumps({"step": 10}))
    save_file({"torch": torch.get_rng_state()}, state / "rng.safetensors")
    return policy.parent


FORMS = [
    of_numbers, without_a_word, in_safetensors, in_a_folder_of_the_step, with_a_flattened_optimizer, with_yaml,
    with_an_epoch_in_the_names, in_two_folders,
]  # fmt: skip


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.__name__)
def test_a_step_is_opened_with_its_optimizer_and_counters(form: Callable[[Path], Path], tmp_path: Path) -> None:
    path = form(tmp_path)
    model, optimizer = trained()
    ck = ckptools.open(path)
    assert ck.format == "step_files" and ck.whole and ck.step.value in (10, 1000)
    assert {name: ck.model[name].load().tolist() for name in model} == {k: v.tolist() for k, v in model.items()}
    (found,) = ck.optimizers.values()
    moments = {name: state["exp_avg"].load().tolist() for name, state in found.state.items()}
    assert list(moments.values()) == [state["exp_avg"].tolist() for state in optimizer["state"].values()]
    assert set(moments) == set(model), "each shape is that of one parameter"


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.__name__)
def test_every_file_of_a_step_opens_all_of_it(form: Callable[[Path], Path], tmp_path: Path) -> None:
    path = form(tmp_path)
    files = {file.path for file in ckptools.open(path).files}
    for file in files if path.is_file() else ():
        assert {one.path for one in ckptools.open(file).files} == files


def test_a_link_to_a_step_in_two_folders_opens_it(tmp_path):
    step = in_two_folders(tmp_path)
    (tmp_path / "latest").symlink_to(step.name)
    ck = ckptools.open(tmp_path / "latest")
    assert (ck.format, ck.step.value, len(ck.files)) == ("step_files", 10, 5)
    (row,) = ckptools.checkpoints_in(tmp_path).rows
    assert (row.step, row.name, row.files) == (10, "step_000010", 5)


def test_models_of_several_steps_beside_other_files_are_checkpoints_of_a_run(tmp_path):
    for step in (1, 2):
        save_file(trained()[0], tmp_path / f"iter_{step:07}_weights.safetensors")
        (tmp_path / f"iter_{step:07}.log").write_text("x")
    assert [row.step for row in ckptools.checkpoints_in(tmp_path).rows] == [2, 1]


def test_a_run_has_a_checkpoint_for_each_step(tmp_path):
    by_rank(tmp_path, 5)
    by_rank(tmp_path, 10)
    run = ckptools.checkpoints_in(tmp_path)
    assert [(row.step, row.name, row.ranks, row.files) for row in run.rows] == [
        (10, "model_000010.pt", 2, 4),
        (5, "model_000005.pt", 2, 4),
    ]
    assert ckptools.open(tmp_path / "meta_000010.json").step.value == 10


def test_a_rank_that_only_another_step_has_is_missing(tmp_path):
    by_rank(tmp_path, 5)
    by_rank(tmp_path, 10)
    (tmp_path / "optim_000010_rank1.pt").unlink()
    ck = ckptools.open(tmp_path / "model_000010.pt")
    assert ck.verdict.headline.startswith("NOT WHOLE: optimizer of rank 1 missing")
    assert ckptools.verify(ck).to_fetch == ("optim_000010_rank1.pt",)
    assert ckptools.checkpoints_in(tmp_path).newest_whole == str(tmp_path / "model_000005.pt")


def test_a_part_that_only_another_step_has_is_a_warning(tmp_path):
    by_rank(tmp_path, 5)
    by_rank(tmp_path, 10)
    (tmp_path / "meta_000010.json").unlink()
    (problem,) = (p for p in ckptools.open(tmp_path / "model_000010.pt").problems if p.code == "CK001")
    assert (problem.severity, problem.message.partition(",")[0]) == ("warning", "no meta_000010.json")


def test_a_folder_with_what_is_left_of_another_step_is_not_one_step(tmp_path):
    by_rank(tmp_path, 5)
    by_rank(tmp_path, 10)
    (tmp_path / "model_000010.pt").unlink()
    assert files_of_step(tmp_path) == []
    assert {row.step for row in ckptools.checkpoints_in(tmp_path).rows} == {5, 10}


def test_a_cut_first_rank_leaves_the_others_to_be_read(tmp_path):
    by_rank(tmp_path, 10)
    first = tmp_path / "optim_000010_rank0.pt"
    first.write_bytes(first.read_bytes()[:900])
    ck = ckptools.open(tmp_path / "model_000010.pt")
    assert ck.verdict.headline.startswith("NOT WHOLE: rank 0 cut short") and ck.optimizers


def test_a_file_whose_content_is_of_another_part_is_told(tmp_path):
    path = of_numbers(tmp_path)
    torch.save(trained()[1], path)
    assert "holds nothing that is known to be a model" in {p.message for p in ckptools.open(path).problems}


def test_a_damaged_file_of_a_step_is_named_and_the_rest_is_read(tmp_path):
    by_rank(tmp_path, 10)
    meta = tmp_path / "meta_000010.json"
    meta.write_text(meta.read_text()[:9])
    ck = ckptools.open(tmp_path / "model_000010.pt")
    assert ck.verdict.headline.startswith("NOT WHOLE: meta_000010.json cut short") and ck.step.value == 10
    assert len(ck.model) == 4


def test_a_json_of_another_step_is_told(tmp_path):
    by_rank(tmp_path, 10)
    (tmp_path / "meta_000010.json").write_text(json.dumps({"step": 5}))
    ck = ckptools.open(tmp_path / "model_000010.pt")
    assert ck.step.value is None and "CK010" in {problem.code for problem in ck.problems}


def test_a_file_alone_is_opened_alone(tmp_path):
    by_rank(tmp_path, 10)
    ck = ckptools.open(tmp_path / "model_000010.pt", only_this_file=True)
    assert len(ck.files) == 1 and ck.format == "torch_file"


NOT_OF_ONE_STEP = {
    "numbers that may be ranks": ("model_3.pt", "optimizer_3.pt"),
    "parts of one model": ("model-00001-of-00002.safetensors", "optimizer-00001-of-00002.safetensors"),
    "ranks of one model": ("model_world_size_4_rank_00000.pt", "optim_world_size_4_rank_00000.pt"),
    "other runs": ("a_model_000010.pt", "b_optim_000010.pt"),
    "no model": ("optim_000010.pt", "meta_000010.json"),
    "two models": ("model_000010.pt", "weights_000010.pt", "optim_000010.pt"),
}


@pytest.mark.parametrize("names", NOT_OF_ONE_STEP.values(), ids=NOT_OF_ONE_STEP)
def test_files_are_taken_for_one_step_only_where_names_prove_it(names: tuple[str, ...], tmp_path: Path) -> None:
    for name in names:
        (tmp_path / name).write_text("{}")
    assert all(files_of_step(tmp_path / name) == [] for name in names)


def test_a_link_out_of_the_folder_is_not_followed(tmp_path):
    (tmp_path / "run").mkdir()
    by_rank(tmp_path / "run", 10)
    meta = tmp_path / "run" / "meta_000010.json"
    meta.rename(tmp_path / "secret.json")
    meta.symlink_to(tmp_path / "secret.json")
    with pytest.raises(CkptoolsError, match="link"):
        ckptools.open(tmp_path / "run" / "model_000010.pt")


def test_a_lost_model_is_not_called_a_checkpoint_without_one(tmp_path):
    path = of_numbers(tmp_path)
    path.write_bytes(path.read_bytes()[:900])
    with pytest.raises(RefusedError, match=r"NOT WHOLE: model_10\.pt cut short or damaged; holds no model"):
        ckptools.consolidate(path, tmp_path / "out.pt", only="model")
