"""One rank's file of another framework is a part: nobody calls it whole, and nothing is written from it unasked."""

from __future__ import annotations

import json
import pickle
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

import ckptools
from ckptools.errors import NotWholeError, SeveralError, UnknownFormatError
from ckptools.formats.rank_search import signs_of_parts
from tests.truth import FIXTURES

NAMES = {
    "vLLM": "model-rank-{}-part-0.safetensors",
    "DeepSeek": "model{}-mp4.safetensors",
    "TensorRT-LLM": "rank{}.safetensors",
    "torch's examples": "model_{}.safetensors",
    "fairseq": "checkpoint_5-shard{}.pt",
    "tp": "tp_0{}.pt",
    "tp and pp": "tp_0{}_00.pt",
    "NeMo": "dp_rank_00_tp_rank_0{}.pt",
    "NeMo with stages": "dp_rank_00_tp_rank_0{}_pp_rank_00.pt",
    "Megatron": "mp_rank_0{}/model_weights.ckpt",
}
"""What frameworks call the files of ranks."""


def slices(rank: int) -> dict[str, torch.Tensor]:
    """What a rank holds: slices of the weights, all of the norms."""
    values = torch.arange(24.0).reshape(6, 4) + 100 * rank
    return {"a.weight": values, "b.weight": values.T.contiguous() / 7, "norm.weight": torch.ones(4)}


def save(path: Path, tree: dict[str, torch.Tensor]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".safetensors":
        save_file(tree, path)
    else:
        torch.save(tree, path)
    return path


@pytest.fixture(params=NAMES)
def files(request, tmp_path):
    return [save(tmp_path / NAMES[request.param].format(rank), slices(rank)) for rank in range(4)]


def is_a_part(opened: ckptools.Checkpoint) -> bool:
    return not opened.whole and "how they join is not known" in next(str(p) for p in opened.problems)


def test_a_file_that_ranks_share_by_its_name_is_a_part_of_all_of_them(files, tmp_path):
    opened = ckptools.open(files[1])
    assert is_a_part(opened)
    assert "part of 4 files" in str(opened.problems[0])
    with pytest.raises(NotWholeError, match="part of 4 files"):
        ckptools.consolidate(files[1], tmp_path / "out.safetensors")


def test_a_folder_of_parts_is_one_checkpoint_that_is_not_whole(files, tmp_path):
    opened = ckptools.open(tmp_path)
    assert is_a_part(opened)
    assert len(opened.files) == 4
    assert opened.world_size.value == 4
    with pytest.raises(NotWholeError, match="part of 4 files"):
        ckptools.consolidate(tmp_path, tmp_path / "out.safetensors")


def test_parts_in_folders_of_their_own_are_one_checkpoint_of_a_run(tmp_path):
    for rank in range(2):
        save(tmp_path / f"run/step-7/mp_rank_0{rank}/model_weights.ckpt", slices(rank))
    found = ckptools.checkpoints_in(tmp_path / "run")
    assert [(row.name, row.whole, row.files) for row in found.rows] == [("step-7", False, 2)]


def test_what_each_part_holds_is_under_its_own_name(tmp_path):
    for rank in range(2):
        save(tmp_path / f"model{rank}-mp2.safetensors", slices(rank))
    opened = ckptools.open(tmp_path)
    assert opened.tree["model1-mp2"]["a.weight"].load()[0, 0] == 100


def test_parts_of_several_saves_are_told_apart(tmp_path):
    for step in (4, 5):
        for rank in range(2):
            save(tmp_path / f"checkpoint_{step}-shard{rank}.pt", slices(rank))
    with pytest.raises(SeveralError, match=r"holds 2 checkpoints.*checkpoint_5-shard0.pt, checkpoint_4-shard0.pt"):
        ckptools.open(tmp_path)


def test_a_damaged_part_is_named_beside_the_others(tmp_path):
    for rank in range(2):
        save(tmp_path / f"tp_0{rank}.pt", slices(rank))
    (tmp_path / "tp_01.pt").write_bytes((tmp_path / "tp_01.pt").read_bytes()[:300])
    assert {p.code for p in ckptools.open(tmp_path).problems} == {"CK011", "CK002"}


def test_models_of_one_run_and_saves_of_several_epochs_are_no_parts(tmp_path):
    for name in ("model", "model_1"):
        save(tmp_path / "accelerate" / f"{name}.safetensors", slices(0))
    assert ckptools.open(tmp_path / "accelerate").whole
    for epoch in range(3):
        save(tmp_path / "epochs" / f"model_{epoch}.pt", slices(epoch))
    assert ckptools.open(tmp_path / "epochs" / "model_1.pt").whole


def test_a_numbered_safetensors_file_alone_is_a_part(tmp_path):
    path = save(tmp_path / "model_0.safetensors", slices(0))
    for opened in (ckptools.open(path), ckptools.open(tmp_path)):
        assert is_a_part(opened)
        assert "part of several files by its name (model_*.safetensors)" in str(opened.problems[0])
    with pytest.raises(NotWholeError, match="part of several files"):
        ckptools.consolidate(path, tmp_path / "out.safetensors")


def test_numbered_files_with_other_names_or_with_a_gap_between_them_are_parts(tmp_path):
    for folder, rank, name in (("gap", 1, "a"), ("gap", 3, "a"), ("names", 0, "a"), ("names", 1, "b")):
        save(tmp_path / folder / f"model_{rank}.safetensors", {name: slices(rank)["a.weight"]})
    assert all(is_a_part(ckptools.open(tmp_path / folder)) for folder in ("gap", "names"))


def test_a_numbered_file_of_which_something_tells_that_it_is_whole_is_no_part(tmp_path):
    for step in (500, 1000):
        save(tmp_path / "steps" / f"model_{step}.safetensors", slices(step))
    for copy in range(2):
        save(tmp_path / "copies" / f"model_{copy}.safetensors", slices(0))
    (tmp_path / "ours").mkdir()
    ckptools.consolidate(save(tmp_path / "x.pt", slices(0)), tmp_path / "ours/model_1.safetensors")
    for path in ("steps/model_500", "copies/model_1", "ours/model_1"):
        assert ckptools.open(tmp_path / f"{path}.safetensors").whole


def test_the_rank_of_an_adapter_is_no_rank_of_a_process(tmp_path):
    assert ckptools.open(save(tmp_path / "my_lora_rank64.safetensors", slices(0))).whole
    tree = {"layer.lora_A.weight": torch.ones(64, 4)}
    assert ckptools.open(save(tmp_path / "style_rank64.safetensors", tree)).whole


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("config.json", json.dumps({"mapping": {"world_size": 2, "tp_size": 2}}).encode()),
        ("metadata.yaml", b"world_size: 2\n"),
        ("metadata.pkl", pickle.dumps({"device_mesh": [0, 1]})),
    ],
)
@pytest.mark.parametrize("model", ["model.pt", "model.safetensors"])
def test_what_lies_beside_a_file_may_tell_that_it_is_a_part(tmp_path, name, content, model):
    path = save(tmp_path / model, slices(0))
    assert ckptools.open(path).whole
    (tmp_path / name).write_bytes(content)
    opened = ckptools.open(path)
    assert not opened.whole
    assert name in str(opened.problems[0])


@pytest.mark.parametrize("text", [b"license: mit\n", b"{}"])
def test_what_else_lies_beside_a_file_tells_nothing(tmp_path, text):
    path = save(tmp_path / "model.pt", slices(0))
    (tmp_path / "metadata.yaml").write_bytes(text)
    (tmp_path / "config.json").write_bytes(b'{"mapping": [1, 2]}')
    assert ckptools.open(path).whole


@pytest.mark.parametrize(
    "tree",
    [
        {"model": {"decoder.flat_param_0": torch.arange(9.0)}},
        {"model": {"w": torch.arange(9.0)}, "shard_metadata": {"param_metadata": []}},
    ],
)
def test_a_file_may_say_itself_that_it_is_a_part(tmp_path, tree):
    torch.save(tree, tmp_path / "model.pt")
    opened = ckptools.open(tmp_path / "model.pt")
    assert not opened.whole
    assert opened.problems[0].code == "CK011"


def flat(path: Path, rank: int) -> Path:
    return save(path, {"decoder.flat_param_0": torch.arange(9.0) + rank, "step": torch.tensor(7.0)})


def test_files_that_say_themselves_that_they_are_parts_are_one_checkpoint_whatever_they_are_called(tmp_path):
    for rank in range(4):
        flat(tmp_path / f"checkpoint_{rank}.pt", rank)
    opened = ckptools.open(tmp_path)
    assert is_a_part(opened)
    assert "part of 4 files" in str(opened.problems[0])
    assert [row.whole for row in ckptools.checkpoints_in(tmp_path).rows] == [False]


def test_parts_of_two_steps_by_their_contents_are_two_checkpoints(tmp_path):
    for step in (100, 200):
        for rank in range(2):
            flat(tmp_path / f"checkpoint_{step}_{rank}.pt", rank)
    with pytest.raises(SeveralError, match=r"holds 2 checkpoints.*checkpoint_200_0.pt, checkpoint_100_0.pt"):
        ckptools.open(tmp_path)


def test_numbered_files_are_several_checkpoints_where_one_does_not_say_that_it_is_a_part(tmp_path):
    flat(tmp_path / "checkpoint_0.pt", 0)
    save(tmp_path / "checkpoint_1.pt", slices(1))
    with pytest.raises(SeveralError, match="holds 2 checkpoints"):
        ckptools.open(tmp_path)


def test_rank_files_with_other_bytes_for_the_same_names_are_not_whole(tmp_path):
    for rank in range(2):
        save(tmp_path / f"rank{rank}.pt", slices(rank))
    opened = ckptools.open(tmp_path)
    assert not opened.whole
    assert "2 of 3 tensors of the model have other bytes on each of 2 ranks" in str(opened.problems[0])


def nanotron(folder: Path, stem: str = "model_weight") -> Path:
    """A checkpoint of Nanotron: a file for each slice of a parameter, deep below."""
    for at, names in {"decoder/0/pp_block/attn/o_proj": ("_tp-rank-0-of-2", "_tp-rank-1-of-2"), "norm": ("",)}.items():
        for rank, name in enumerate(names):
            save(folder / "model/model" / at / f"{stem}{name}.safetensors", {"data": slices(rank)["a.weight"]})
    return folder


def test_a_folder_of_nanotron_without_sizes_is_refused_and_so_is_all_that_lies_in_it(tmp_path):
    folder = nanotron(tmp_path / "10")
    (folder / "checkpoint_metadata.json").write_text("{}")
    inside = folder / "model/model"
    for path in (folder, tmp_path, inside, inside / "norm", inside / "norm/model_weight.safetensors"):
        with pytest.raises(UnknownFormatError, match=r"a Nanotron checkpoint whose .* states no number of ranks"):
            ckptools.open(path)


def test_checkpoints_of_nanotron_are_listed_once_each_and_their_folders_are_none(tmp_path):
    for step in ("10", "20"):
        folder = nanotron(tmp_path / step)
        (folder / "checkpoint_metadata.json").write_text("{}")
        (folder / "optimizer").mkdir()
        torch.save({"state": {0: {"exp_avg": torch.ones(2)}}}, folder / "optimizer" / "optimizer_tp-0-of-2.pt")
    rows = ckptools.checkpoints_in(tmp_path).rows
    assert sorted(row.name for row in rows) == ["10", "20"]
    assert all(row.whole is not True and "states no number of ranks" in row.why for row in rows)


def test_a_folder_with_weights_deeper_than_is_searched_is_not_taken_for_the_one_file_found(tmp_path):
    folder = nanotron(tmp_path / "10", "weight_of")
    with pytest.raises(UnknownFormatError, match=r"weights lie deeper too .*o_proj/weight_of_tp-rank-0-of-2"):
        ckptools.open(folder)
    assert ckptools.open(folder / "model/model/norm").whole


@pytest.mark.parametrize("other", ["model.weights.h5", "m.gguf", "layers/0/weight.npy", "x.data-00000-of-00001"])
@pytest.mark.parametrize("stray", ["norm/weight.safetensors", "extra/ema.pt"])
def test_one_file_below_a_folder_with_weights_that_nobody_reads_is_not_opened_for_the_folder(tmp_path, other, stray):
    save(tmp_path / stray, slices(0))
    assert ckptools.open(tmp_path).whole
    (tmp_path / other).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / other).write_bytes(b"weights")
    with pytest.raises(UnknownFormatError, match=rf"weights of another format lie there too \({other}\); name the one"):
        ckptools.open(tmp_path)
    assert ckptools.open(tmp_path / stray).whole


def test_a_step_beside_an_export_is_the_checkpoint_of_its_folder(tmp_path):
    save(tmp_path / "step-5/model.safetensors", slices(0))
    (tmp_path / "model.gguf").write_bytes(b"GGUF")
    assert ckptools.open(tmp_path).whole


def test_files_that_are_named_one_by_one_are_ranks_by_their_contents(tmp_path):
    source = FIXTURES / "torch2.13.0-fsdp2-tp2x2-w4"
    files = [tmp_path / f"x{number}.pt" for number in (3, 10, 17, 24)]
    for rank, file in enumerate(files):
        file.write_bytes((source / f"rank{rank}.pt").read_bytes())
    assert ckptools.open(files).whole
    assert ckptools.open(files[:3]).whole is False


def test_a_folder_of_rank_files_is_not_read_to_find_out_that_it_holds_none(monkeypatch):
    monkeypatch.setattr(signs_of_parts, "reader", None)  # whoever asks it is told by an AttributeError
    ck = ckptools.open(FIXTURES / "torch2.13.0-fsdp1-sharded-w4", all_ranks=True)
    assert ck.format == "rank_files" and ck.cost.files == 4


RULED = {
    "vLLM": "model-rank-{}-part-0.safetensors",
    "DeepSeek": "model{}-mp3.safetensors",
    "NeMo": "mp_rank_0{}/w.ckpt",
}


def ruled(folder: Path, name: str, ranks: int = 3) -> tuple[Path, dict[str, torch.Tensor]]:
    """Rows, columns, halves, a norm, an expert of one rank, in `ranks` files, with rules; returns the whole values."""
    full = {n: torch.randn(6, 12, generator=torch.Generator().manual_seed(k)) for k, n in enumerate(("up", "down"))}
    full |= {"norm": torch.ones(4), "expert": torch.arange(5.0)}
    gate, up = torch.randn(3, 4), torch.randn(3, 4)
    for rank in range(ranks):
        own = {"up": full["up"].chunk(ranks)[rank], "down": full["down"].chunk(ranks, 1)[rank], "norm": full["norm"]}
        own["gated"] = torch.cat([gate.chunk(ranks)[rank], up.chunk(ranks)[rank]])
        own |= {"expert": full["expert"]} if rank == 1 else {}
        save(folder / name.format(rank), {n: t.contiguous() for n, t in own.items()})
    rules = {"up": {"dim": 0}, "down": {"dim": 1}, "gated": {"dim": 0, "halves": 2}, "norm": "replicated"}
    path = folder.parent / "rules.json"
    path.write_text(json.dumps({**rules, "expert": "replicated"}))
    return path, {**full, "gated": torch.cat([gate, up])}


@pytest.mark.parametrize("writer", RULED)
def test_parts_are_joined_by_the_rules_that_are_given(tmp_path, writer):
    rules, full = ruled(tmp_path / "run", RULED[writer])
    ckptools.open(tmp_path / "run", rules=rules).consolidate(tmp_path / "out.pt")
    saved = torch.load(tmp_path / "out.pt", weights_only=True)
    assert saved.keys() == full.keys() and all(torch.equal(saved[name], tensor) for name, tensor in full.items())


def test_parts_of_one_rank_are_joined_with_those_of_others(tmp_path):
    rules, full = ruled(tmp_path / "run", "model-rank-{}-part-0.safetensors")
    for rank in range(3):
        save(
            tmp_path / "run" / f"model-rank-{rank}-part-1.safetensors", {"up2": full["up"].chunk(3)[rank].contiguous()}
        )
    rules.write_text(rules.read_text().replace('"up"', '"up*"'))
    assert torch.equal(ckptools.open(tmp_path / "run", rules=rules).model["up2"].load(), full["up"])


def test_a_rank_that_is_missing_by_a_name_that_counts_them_is_named(tmp_path):
    rules, _ = ruled(tmp_path / "run", "model{}-mp4.safetensors")
    assert ("CK001", 3) in {(p.code, p.rank) for p in ckptools.open(tmp_path / "run", rules=rules).problems}
    with pytest.raises(NotWholeError, match="rank 3 missing"):
        ckptools.open(tmp_path / "run", rules=rules).consolidate(tmp_path / "out.pt")


def test_a_weight_without_a_rule_is_not_joined(tmp_path):
    rules, _ = ruled(tmp_path / "run", "model{}-mp3.safetensors")
    rules.write_text('{"down": {"dim": 1}}')
    with pytest.raises(NotWholeError, match="no rule says"):
        ckptools.open(tmp_path / "run", rules=rules).consolidate(tmp_path / "out.pt")


@pytest.mark.parametrize(
    ("name", "writer"),
    [
        ("model-rank-{}-part-0.safetensors", "vLLM"),
        ("model{}-mp4.safetensors", "DeepSeek"),
        ("rank_{}.safetensors", "Fast-LLM"),
        ("rank{}.safetensors", "TensorRT-LLM"),
        ("t_partial/model_tp_rank_{}.pt", "SageMaker"),
    ],
)
def test_whose_parts_they_are_is_said_with_what_to_do(tmp_path, name, writer):
    files = [save(tmp_path / name.format(rank), slices(rank)) for rank in range(2)]
    message = ckptools.open(files[0].parent).problems[0].message
    assert writer in message and "--rules FILE" in message and "\n" not in message
