"""One rank's file of another framework is a part: nobody calls it whole, and nothing is written from it unasked."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

import ckptools
from ckptools.errors import NotWholeError, SeveralError, UnknownFormatError

NAMES = {
    "vLLM": ("model-rank-{}-part-0.safetensors", "vLLM"),
    "DeepSeek": ("model{}-mp4.safetensors", "DeepSeek"),
    "TensorRT-LLM": ("rank{}.safetensors", "TensorRT-LLM"),
    "Fast-LLM": ("rank_{}.safetensors", "Fast-LLM"),
    "torch's examples": ("model_{}.safetensors", ""),
    "fairseq": ("checkpoint_5-shard{}.pt", ""),
    "tp": ("tp_0{}.pt", ""),
    "tp and pp": ("tp_0{}_00.pt", ""),
    "NeMo": ("dp_rank_00_tp_rank_0{}.pt", ""),
    "NeMo with stages": ("dp_rank_00_tp_rank_0{}_pp_rank_00.pt", ""),
    "Megatron": ("mp_rank_0{}/model_weights.ckpt", "NeMo or Megatron"),
}
"""What frameworks call the files of ranks, and whose they are said to look like."""


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


@pytest.mark.parametrize("framework", NAMES)
def test_files_that_ranks_share_by_their_names_are_parts_alone_together_and_in_a_list(framework, tmp_path):
    name, writer = NAMES[framework]
    files = [save(tmp_path / "run/step-7" / name.format(rank), slices(rank)) for rank in range(4)]
    folder = tmp_path / "run/step-7"
    for path in (files[1], folder):
        opened = ckptools.open(path)
        message = opened.problems[0].message
        assert (opened.whole, opened.problems[0].code) == (False, "CK011")
        assert "part of 4 files" in message and "how they join is not known" in message
        assert f"they look like those of {writer}" in message if writer else "look like" not in message
        assert "; rules FILE joins" in message and "\n" not in message
        with pytest.raises(NotWholeError, match="part of 4 files"):
            ckptools.consolidate(path, tmp_path / "out.safetensors")
    found, opened = ckptools.checkpoints_in(tmp_path / "run"), ckptools.open(folder)
    assert (len(opened.files), opened.world_size.value) == (4, 4)
    assert [(row.name, row.whole, row.files) for row in found.rows] == [("step-7", False, 4)]
    for file in files[1:]:
        file.unlink()
    alone = ckptools.open(files[0])
    assert alone.whole is False and "part of several files by its name" in alone.problems[0].message


@pytest.mark.parametrize("name", ["model{}-mp3.safetensors", "model_{}.safetensors"])
def test_what_each_part_holds_is_under_its_own_name_and_a_damaged_one_is_named(name, tmp_path):
    files = [save(tmp_path / name.format(rank), slices(rank)) for rank in range(3)]
    files[2].write_bytes(files[2].read_bytes()[:100])
    opened = ckptools.open(tmp_path)
    assert opened.tree[files[1].stem]["a.weight"].load()[0, 0] == 100
    assert {p.code for p in opened.problems} == {"CK011", "CK002"}


def test_parts_of_several_saves_are_told_apart(tmp_path):
    for step in (4, 5):
        for rank in range(2):
            save(tmp_path / f"checkpoint_{step}-shard{rank}.pt", slices(rank))
    with pytest.raises(SeveralError, match=r"holds 2 checkpoints.*checkpoint_5-shard0.pt, checkpoint_4-shard0.pt"):
        ckptools.open(tmp_path)


CONTENTS = {
    "slices": slices(0),
    "flat": {"model": {"decoder.flat_param_0": torch.arange(9.0)}},
    "metadata": {"model": {"w": torch.arange(9.0)}, "shard_metadata": {"param_metadata": []}},
    "adapter": {"layer.lora_A.weight": torch.ones(4, 64), "layer.lora_B.weight": torch.ones(64, 4)},
}


@pytest.mark.parametrize(
    ("files", "content", "whole"),
    [
        # a name that counts ranks, steps or models
        (["model_0.safetensors"], "slices", False),
        (["model_1.safetensors", "model_3.safetensors"], "slices", False),
        (["model_500.safetensors", "model_1000.safetensors"], "slices", True),
        (["model_1.safetensors", "model.safetensors"], "slices", True),
        (["model_1.pt", "model_0.pt", "model_2.pt"], "slices", True),
        (["my_lora_rank64.safetensors"], "slices", True),
        (["lora_rank_0_step5.pt"], "slices", False),
        (["style_rank64.safetensors"], "adapter", True),
        (["mp_rank_00_model.pt.part"], "slices", False),
        # what the file states itself
        (["model.pt"], "slices", True),
        (["model.pt"], "flat", False),
        (["model.pt"], "metadata", False),
    ],
)
def test_a_file_is_a_part_by_its_name_or_by_what_it_states(tmp_path, files, content, whole):
    for name in files:
        save(tmp_path / name, CONTENTS[content])
    opened = ckptools.open(tmp_path / files[0])
    assert opened.whole is whole
    assert whole or opened.problems[0].code == "CK011"
    if not whole:
        with pytest.raises(NotWholeError):
            ckptools.consolidate(tmp_path / files[0], tmp_path / "out.safetensors")


def test_what_consolidate_wrote_is_no_part_whatever_it_is_called(tmp_path):
    (tmp_path / "ours").mkdir()
    ckptools.consolidate(save(tmp_path / "x.pt", slices(0)), tmp_path / "ours/model_1.safetensors")
    assert ckptools.open(tmp_path / "ours/model_1.safetensors").whole and ckptools.open(tmp_path / "ours").whole


@pytest.mark.parametrize("model", ["model.pt", "model.safetensors"])
def test_the_mapping_beside_a_file_may_tell_that_it_is_a_part(tmp_path, model):
    path = save(tmp_path / model, slices(0))
    for text, whole in (('{"mapping": {"world_size": 2, "tp_size": 2}}', False), ('{"mapping": [1, 2]}', True)):
        (tmp_path / "config.json").write_text(text)
        opened = ckptools.open(path)
        assert opened.whole is whole and (whole or "config.json" in str(opened.problems[0]))


def test_rank_files_with_other_bytes_for_the_same_names_are_not_whole(tmp_path):
    for rank in range(2):
        save(tmp_path / f"rank{rank}.pt", slices(rank))
    opened = ckptools.open(tmp_path)
    assert not opened.whole
    assert "2 of 3 tensors of the model have other bytes on each of 2 ranks" in str(opened.problems[0])
    for rank in range(2):
        save(tmp_path / f"rank{rank}.pt", {**slices(0), "a.weight": slices(rank)["a.weight"]})
    assert "CK011" not in {p.code for p in ckptools.open(tmp_path).problems}


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
