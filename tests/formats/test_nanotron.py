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


NAMES = {0: "model.fused.weight", 1: "model.row.weight", 2: "model.norm.weight"}


def save(folder: Path, tp: int = 2, dp: int = 1, zero_1: bool = False) -> dict[str, torch.Tensor]:
    """A model of one stage: a fused weight of two parts, a row-parallel one, a norm; returns the full values."""
    shapes = {
        "model.fused.weight": (2 * (2 * tp + 1), 3),
        "model.row.weight": (3, 2 * tp + 1),
        "model.norm.weight": (3,),
    }
    full = {n: torch.randn(s, generator=torch.Generator().manual_seed(k)) for k, (n, s) in enumerate(shapes.items())}
    widths = [3, *([2] * (tp - 1))]
    (folder / "optimizer").mkdir(exist_ok=True)
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
        for cut in range(dp if zero_1 else 1):
            run = zero_1_offsets(own, dp) if zero_1 else None
            middle = f"_dp-{cut}-of-{dp}" if zero_1 else ""
            file = folder / "optimizer" / f"optimizer_pp-0-of-1{middle}_tp-{rank}-of-{tp}_exp-0-of-1.pt"
            torch.save(optimizer_state(own, run, cut), file)
        if zero_1 and rank == 0:
            offsets = {n: {str(d): [str(a), str(b)] for d, (a, b) in of.items()} for n, of in (run or {}).items()}
            config = {"type": "ZeroDistributedOptimizer", "configs": {"param_name_to_dp_rank_offsets": offsets}}
            (folder / "optimizer" / "optimizer_config.json").write_text(json.dumps(config))
    (folder / "model/model/norm").mkdir()
    save_file({"data": full["model.norm.weight"]}, folder / "model/model/norm/model_weight.safetensors")
    metadata = {"version": "1.2", "tp": tp, "dp": dp, "metas": {"last_train_step": 4}}
    (folder / "checkpoint_metadata.json").write_text(json.dumps(metadata))
    (folder / "lr_scheduler").mkdir()
    torch.save({"last_epoch": 4, "_last_lr": [0.1]}, folder / "lr_scheduler/lr_scheduler.pt")
    return full


def zero_1_offsets(own: dict[str, torch.Tensor], dp: int) -> dict[str, dict[int, tuple[int, int]]]:
    """`param_name_to_dp_rank_offsets` as `_partition_parameters` counts them."""
    found: dict[str, dict[int, tuple[int, int]]] = {}
    for name, tensor in own.items():
        sizes = [(tensor.numel() - 1) // dp + 1] * dp
        for rank in range(dp - (sum(sizes) - tensor.numel()), dp):
            sizes[rank] -= 1
        ends = [sum(sizes[: rank + 1]) for rank in range(dp)]
        found[name] = {rank: (end - n, end) for rank, (end, n) in enumerate(zip(ends, sizes, strict=True)) if n}
    return found


def optimizer_state(
    own: dict[str, torch.Tensor], runs: dict[str, dict[int, tuple[int, int]]] | None, dp: int
) -> dict[str, object]:
    """One rank's optimizer file: moments like its weights, or the run of each that is its own; fp32 copies by name."""
    held = {n: t for n, t in own.items() if runs is None or dp in runs[n]}
    cut = {n: t if runs is None else t.reshape(-1)[slice(*runs[n][dp])].clone() for n, t in held.items()}
    ids = {n: k for k, n in enumerate(name for name in NAMES.values() if name in cut)}
    state = {ids[n]: {"step": torch.tensor(4.0), "exp_avg": cut[n] * 3} for n in ids}
    copies = {n: t * 5 for n, t in cut.items()}
    groups = [{"lr": 0.1, "params": list(ids.values())}]
    return {
        "state": state,
        "param_groups": groups,
        "names": {k: n for n, k in ids.items()},
        "gradient_accumulator": copies,
    }


@pytest.mark.slow
@pytest.mark.parametrize(("dp", "zero_1"), [(2, False), (1, True), (2, True), (5, True)])
@pytest.mark.parametrize("tp", [1, 2, 3])
def test_slices_are_joined_as_their_headers_say_and_so_is_the_optimizer(tmp_path, tp, dp, zero_1):
    full = save(tmp_path, tp, dp, zero_1)
    ck = ckptools.open(tmp_path)
    assert (ck.whole, ck.world_size.value, ck.step.value, ck.problems) == (True, dp * tp, 4, ())
    state = ck.optimizers["optimizer"].state
    for name, tensor in full.items():
        assert torch.equal(ck.model[name].load(), tensor)
        assert torch.equal(state[name]["exp_avg"].load(), tensor * 3)
        assert torch.equal(ck.tree["optimizer"]["gradient_accumulator"][name].load(), tensor * 5)
    ckptools.consolidate(tmp_path, tmp_path / "out.pt")
    saved = torch.load(tmp_path / "out.pt", weights_only=True)["model"]
    assert all(torch.equal(saved[name], tensor) for name, tensor in full.items())


def test_a_file_without_any_other_slice_is_noticed_when_it_is_missing(tmp_path):
    save(tmp_path)
    for file in sorted(p for part in ("model", "optimizer") for p in (tmp_path / part).rglob("*.*")):
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
    found = [(p.rank, p.found) for p in ckptools.open(tmp_path).problems if p.code == "CK009"]
    assert found == ([(0, 1), (1, 0)] if kind == "swap" else [(1, 0)])
    with pytest.raises(NotWholeError, match="row"):
        ckptools.consolidate(tmp_path, tmp_path / "out.pt")


def zero_1_files(folder: Path) -> list[Path]:
    return sorted((folder / "optimizer").glob("*.pt"))


def test_a_rank_of_zero_1_that_is_missing_or_a_copy_is_named(tmp_path):
    save(tmp_path, dp=2, zero_1=True)
    for file in zero_1_files(tmp_path):
        away = file.rename(tmp_path / "away")
        (problem,) = (p for p in ckptools.open(tmp_path).problems if p.code == "CK001")
        assert file.name in problem.message
        away.rename(file)
    shutil.copy(*zero_1_files(tmp_path)[:2])
    with pytest.raises(NotWholeError):
        ckptools.consolidate(tmp_path, tmp_path / "out.pt")


def test_optimizer_files_of_two_ranks_that_are_swapped_are_known_by_their_saved_names(tmp_path):
    save(tmp_path, 3)
    second, third = zero_1_files(tmp_path)[1:]
    away = second.rename(tmp_path / "away")
    third.rename(second)
    away.rename(third)
    assert [f"{second.name} was saved as {third.name}" in p.message for p in ckptools.open(tmp_path).problems] == [
        True,
        False,
    ]
    with pytest.raises(NotWholeError, match="was saved as"):
        ckptools.consolidate(tmp_path, tmp_path / "out.pt")


def test_moments_of_zero_1_in_another_place_than_the_configuration_says_are_not_joined(tmp_path):
    save(tmp_path, dp=2, zero_1=True)
    config = tmp_path / "optimizer/optimizer_config.json"
    config.write_text(config.read_text().replace('["0", ', '["1", '))
    with pytest.raises(NotWholeError, match=r"optimizer_config.json says"):
        ckptools.consolidate(tmp_path, tmp_path / "out.pt")
    ckptools.consolidate(tmp_path, tmp_path / "model.pt", only="model")


def test_moments_of_zero_1_of_another_length_are_not_joined(tmp_path):
    save(tmp_path, tp=1, dp=2, zero_1=True)
    file = zero_1_files(tmp_path)[1]
    content = torch.load(file, weights_only=True)
    content["state"][0]["exp_avg"] = content["state"][0]["exp_avg"][:-1].clone()
    torch.save(content, file)
    with pytest.raises(NotWholeError, match="elements expected"):
        ckptools.consolidate(tmp_path, tmp_path / "out.pt")


@pytest.mark.parametrize(
    "names", [["lr_scheduler.pt"], [f"lr_scheduler_pp-0-of-1_tp-{r}-of-2_exp-0-of-1.pt" for r in (0, 1)]]
)
def test_a_scheduler_that_is_missing_is_noticed(tmp_path, names):
    save(tmp_path)
    first = tmp_path / "lr_scheduler/lr_scheduler.pt"
    for name in names:
        shutil.copy(first, tmp_path / "kept")
        (tmp_path / "kept").rename(tmp_path / "lr_scheduler" / name)
    for name in {"lr_scheduler.pt", names[0]}:
        (tmp_path / "lr_scheduler" / name).unlink()
    (problem,) = ckptools.open(tmp_path).problems
    assert (problem.code, problem.severity) == ("CK001", "warning" if len(names) == 1 else "error")
    assert "lr_scheduler/" in problem.message


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
