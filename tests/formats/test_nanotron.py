"""Nanotron: slices that say where they belong, an optimizer by number with names, and what contradicts them."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

import ckptools
from ckptools.errors import NotWholeError
from ckptools.formats.nanotron import pieces_of
from tests.truth import FIXTURES

REAL = FIXTURES / "nanotron-tp2pp2" / "ckpt"


def pairs(full: tuple[int, ...], dim: int, widths: list[int], rank: int, parts: int) -> tuple[str, list[slice]]:
    """`local_global_slices_pairs` of one rank, for `parts` equal parts that are each cut, and its rows of the whole."""
    local, texts, rows, size = 0, [], [], full[dim] // parts
    for part in range(parts):
        start = part * size + sum(widths[:rank])
        ends = [(local, local + widths[rank]), (start, start + widths[rank])]
        spelled = [[f"{a},{b},None" if d == dim else "None,None,None" for d in range(len(full))] for a, b in ends]
        texts.append("#".join("|".join(words) for words in spelled))
        rows.append(slice(start, start + widths[rank]))
        local += widths[rank]
    return ";".join(texts), rows


def save(folder: Path, tp: int = 2, dp: int = 1) -> dict[str, torch.Tensor]:
    """A model of one stage: a fused weight of two parts, a row-parallel one, a norm; returns the full values."""
    shapes = {
        "model.fused.weight": (2 * (2 * tp + 1), 3),
        "model.row.weight": (3, 2 * tp + 1),
        "model.norm.weight": (3,),
    }
    full = {n: torch.randn(s, generator=torch.Generator().manual_seed(k)) for k, (n, s) in enumerate(shapes.items())}
    widths = [3, *([2] * (tp - 1))]
    names = {0: "model.fused.weight", 1: "model.row.weight", 2: "model.norm.weight"}
    for rank in range(tp):
        own = {"model.norm.weight": full["model.norm.weight"]}
        for name, dim, parts in (("model.fused.weight", 0, 2), ("model.row.weight", 1, 1)):
            text, rows = pairs(tuple(full[name].shape), dim, widths, rank, parts)
            own[name] = torch.cat([full[name].movedim(dim, 0)[r] for r in rows]).movedim(0, dim).contiguous()
            path = folder / "model" / Path(*name.split(".")[:-1])
            path.mkdir(parents=True, exist_ok=True)
            shape = str(tuple(full[name].shape))
            metadata = {"version": "1.2", "unsharded_shape": shape, "local_global_slices_pairs": text}
            file = path / f"model_weight_pp-rank-0-of-1_tp-rank-{rank}-of-{tp}.safetensors"
            save_file({"data": own[name]}, file, metadata)
        state = {k: {"step": torch.tensor(4.0), "exp_avg": own[name] * 3} for k, name in names.items()}
        groups = [{"lr": 0.1, "params": [0, 1, 2]}]
        (folder / "optimizer").mkdir(exist_ok=True)
        optimizer = {"state": state, "param_groups": groups, "names": names}
        torch.save(optimizer, folder / "optimizer" / f"optimizer_pp-0-of-1_tp-{rank}-of-{tp}_exp-0-of-1.pt")
    (folder / "model/model/norm").mkdir()
    save_file({"data": full["model.norm.weight"]}, folder / "model/model/norm/model_weight.safetensors")
    metadata = {"version": "1.2", "tp": tp, "dp": dp, "metas": {"last_train_step": 4}}
    (folder / "checkpoint_metadata.json").write_text(json.dumps(metadata))
    return full


@pytest.mark.parametrize("tp", [1, 2, 3])
def test_slices_are_joined_as_their_headers_say_and_so_is_the_optimizer(tmp_path, tp):
    full = save(tmp_path, tp, dp=2)
    ck = ckptools.open(tmp_path)
    assert (ck.whole, ck.world_size.value, ck.step.value, ck.problems) == (True, 2 * tp, 4, ())
    state = ck.optimizers["optimizer"].state
    for name, tensor in full.items():
        assert torch.equal(ck.model[name].load(), tensor)
        assert torch.equal(state[name]["exp_avg"].load(), tensor * 3)
    ckptools.consolidate(tmp_path, tmp_path / "out.pt")
    saved = torch.load(tmp_path / "out.pt", weights_only=True)["model"]
    assert all(torch.equal(saved[name], tensor) for name, tensor in full.items())


@pytest.mark.parametrize(
    "path", ["", "model", "model/model/final_layer_norm/pp_block/model_bias.safetensors", "checkpoint_metadata.json"]
)
def test_every_way_into_the_real_one(path):
    ck = ckptools.open(REAL / path)
    assert (ck.format, ck.whole, ck.step.value) == ("nanotron", True, 5)


def test_a_file_without_any_other_slice_is_noticed_when_it_is_missing(tmp_path):
    save(tmp_path)
    for file in sorted(p for p in tmp_path.rglob("*") if p.suffix in (".safetensors", ".pt")):
        away = file.rename(tmp_path / "away")
        assert not ckptools.open(tmp_path).whole, file.name
        with pytest.raises(NotWholeError):
            ckptools.consolidate(tmp_path, tmp_path / "out.pt")
        away.rename(file)


@pytest.mark.parametrize("kind", ["swap", "copy"])
def test_a_slice_under_another_ranks_name_is_noticed(tmp_path, kind):
    save(tmp_path)
    one, other = sorted((tmp_path / "model/model/row").iterdir())
    if kind == "swap":
        one.rename(tmp_path / "kept")
        other.rename(one)
        (tmp_path / "kept").rename(other)
    else:
        shutil.copy(one, other)
    assert "CK009" in {p.code for p in ckptools.open(tmp_path).problems}
    with pytest.raises(NotWholeError, match="row"):
        ckptools.consolidate(tmp_path, tmp_path / "out.pt")


def test_moments_of_zero_1_are_refused_by_name_and_the_model_is_written(tmp_path):
    full = save(tmp_path)
    for file in (tmp_path / "optimizer").glob("*.pt"):
        file.rename(file.with_name(file.name.replace("_tp-", "_dp-0-of-2_tp-")))
    with pytest.raises(NotWholeError, match="ZeRO-1 of Nanotron"):
        ckptools.consolidate(tmp_path, tmp_path / "out.pt")
    ckptools.consolidate(tmp_path, tmp_path / "model.pt", only="model")
    saved = torch.load(tmp_path / "model.pt", weights_only=True)
    assert torch.equal(saved["model.row.weight"], full["model.row.weight"])


def test_without_an_optimizer_nothing_shows_that_every_parameter_is_here(tmp_path):
    save(tmp_path)
    shutil.rmtree(tmp_path / "optimizer")
    (problem,) = ckptools.open(tmp_path).problems
    assert (problem.severity, "is not noticed" in problem.message) == ("warning", True)


@pytest.mark.parametrize(
    "text", ["", "0,1,2#0,1,None", "0,9,None#0,9,None", "0,1,None", "0,1,None#0,2,None", "-1,2,None#0,2,None"]
)
def test_pieces_that_are_no_boxes_are_refused(text):
    with pytest.raises(ValueError, match=""):
        pieces_of(text, (2,), (4,))


@given(st.lists(st.integers(0, 4), min_size=1, max_size=4), st.integers(1, 3), st.integers(0, 1))
@settings(deadline=None)
def test_pieces_of_all_ranks_cover_the_whole_once(widths, parts, dim):
    full = tuple(sum(widths) * parts if d == dim else 3 for d in range(2))
    seen = torch.zeros(full)
    for rank, width in enumerate(widths):
        local = tuple(width * parts if d == dim else 3 for d in range(2))
        for _, whole in pieces_of(pairs(full, dim, widths, rank, parts)[0], local, full):
            seen[tuple(slice(a, b) for a, b in zip(whole.offsets, whole.ends, strict=True))] += 1
    assert bool((seen == 1).all())
