"""FSDP of fairscale and torch_xla: chunks and padding, tied names, several wrappers, and metadata that lies."""

from __future__ import annotations

import copy
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import ckptools
from ckptools.errors import NotWholeError, ReadError, SeveralError
from ckptools.formats import fsdp_shards
from ckptools.formats.wrapped_shards import shard_metadata
from tests.truth import FIXTURES

TIED = FIXTURES / "fairscale-fsdp-tied-w3" / "ckpt"

Wrappers = Mapping[str, Mapping[str, tuple[int, ...]]]
"""Shapes by name, by the path of each wrapper."""

TWO: Wrappers = {"": {"embed.weight": (5, 3), "scale": (1,)}, "block": {"weight": (4, 3), "bias": (4,)}}


def values(wrappers: Wrappers) -> dict[str, torch.Tensor]:
    """Recognisable values of every parameter, by its full name."""
    shapes = {f"{p}.{n}" if p else n: s for p, of in wrappers.items() for n, s in of.items()}
    return {n: torch.randn(s, generator=torch.Generator().manual_seed(k)) for k, (n, s) in enumerate(shapes.items())}


def chunk(flat: torch.Tensor, world: int, rank: int) -> tuple[torch.Tensor, int]:
    """A rank's part as fairscale's `_get_shard` cuts it, and its padding."""
    chunks = [*flat.chunk(world), *[flat[:0]] * world][:world]
    padding = chunks[0].numel() - chunks[rank].numel()
    return torch.nn.functional.pad(chunks[rank], [0, padding]), padding


def fairscale(wrappers: Wrappers, world: int, rank: int) -> dict[str, Any]:
    """The content of a rank's file, with an optimizer over the flat parameters."""
    full, model, listed, state = values(wrappers), {}, [], {}
    for number, (path, shapes) in enumerate(wrappers.items()):
        flat = torch.cat([full[f"{path}.{n}" if path else n].reshape(-1) for n in shapes])
        model[f"{path}.flat_param_0" if path else "flat_param_0"], padding = chunk(flat, world, rank)
        sizes = {"names": list(shapes), "shapes": [torch.Size(s) for s in shapes.values()]}
        numels = [torch.Size(s).numel() for s in shapes.values()]
        params = {"flat_param_0": {**sizes, "numels": numels, "padding": padding}}
        listed.append({"fsdp_path": path, "params": params, "no_broadcast_optim_state": False, "shared_param_info": []})
        state[number] = {"step": torch.tensor(7.0), "exp_avg": chunk(flat * 3, world, rank)[0]}
    metadata = {"param_metadata": listed, "buffer_names": []}
    optimizer = {"state": state, "param_groups": [{"lr": 0.1, "params": list(state)}]}
    return {"model": model, "shard_metadata": metadata, "last_optimizer_state": optimizer}


def xla(wrappers: Wrappers, world: int, rank: int, multiple: int = 128) -> dict[str, Any]:
    """The content of a rank's file as torch_xla's examples save it."""
    full, model, info, flattened = values(wrappers), {}, {}, {}
    for path, shapes in wrappers.items():
        flat = torch.cat([full[f"{path}.{n}" if path else n].reshape(-1) for n in shapes])
        name, numels = "_fsdp_wrapped_module.flat_param_0", [torch.Size(s).numel() for s in shapes.values()]
        each = -(-flat.numel() // (world * multiple)) * multiple
        padded = torch.nn.functional.pad(flat, [0, each * world - flat.numel()])
        # The root wrapper is around the module whose child is wrapped.
        outer = f"_fsdp_wrapped_module.{path}" if path else ""
        suffix = f"_fsdp_shard.{name}".replace(".", "_FSDP_SHARD_SEPARATOR_")
        model[f"{outer}.{suffix}" if outer else suffix] = padded[each * rank : each * (rank + 1)].clone()
        info[outer] = {suffix: {"_orig_size": flat.shape, "_orig_name": name}}
        shapes_of = [torch.Size(s) for s in shapes.values()]
        flattened[f"{outer}.{name}" if outer else name] = (list(shapes), shapes_of, numels)
    stated = {"shard_info": info, "flatten_info": flattened, "buffer_info": {}, "world_size": world, "rank": rank}
    return {"model": model, "shard_metadata": stated}


def save(folder: Path, contents: list[dict[str, Any]], name: str = "checkpoint_7-shard{}.pt") -> Path:
    folder.mkdir(exist_ok=True)
    for rank, content in enumerate(contents):
        torch.save(content, folder / name.format(rank))
    return folder


def saved(folder: Path, world: int = 3) -> Path:
    return save(folder, [fairscale(TWO, world, rank) for rank in range(world)])


def test_a_weight_under_other_names_is_known_by_all_of_them():
    model = ckptools.open(TIED).model
    assert all(torch.equal(model[n].load(), model["embed.weight"].load()) for n in ("head.weight", "out.kernel"))


def test_numbers_of_the_optimizer_are_named_past_a_frozen_wrapper():
    (optimizer,) = ckptools.open(TIED).optimizers.values()
    assert "tail.bias" in optimizer.state and "frozen.weight" not in optimizer.state
    assert set(optimizer.param_groups[0]["params"]) == set(optimizer.state)


@given(st.integers(1, 6), st.lists(st.integers(1, 9), min_size=1, max_size=3), st.integers(1, 5))
@settings(deadline=None, max_examples=25)
def test_chunks_of_any_size_are_joined_without_their_padding(tmp_path_factory, world, rows, width):
    wrappers = {f"b{n}": {"weight": (count, width), "bias": (count,)} for n, count in enumerate(rows)}
    contents = [fairscale(wrappers, world, rank) for rank in range(world)]
    ck = ckptools.open(save(tmp_path_factory.mktemp("f") / "x", contents))
    (optimizer,) = ck.optimizers.values()
    assert (ck.whole, ck.world_size.value) == (True, world)
    for name, tensor in values(wrappers).items():
        assert torch.equal(ck.model[name].load(), tensor)
        assert name not in optimizer.state or torch.equal(optimizer.state[name]["exp_avg"].load(), tensor * 3)


@pytest.mark.parametrize("world", [1, 2, 5])
@pytest.mark.parametrize("name", ["x_rank-0000000{}-of-0000000W.pth", "model-rank{}.pt", "shard{}.pt"])
def test_files_of_torch_xla_are_joined_and_trimmed(tmp_path, world, name):
    contents = [xla(TWO, world, rank) for rank in range(world)]
    ck = ckptools.open(save(tmp_path / "x", contents, name.replace("W", str(world))))
    assert (ck.whole, ck.world_size.value, set(ck.model)) == (True, world, set(values(TWO)))
    assert all(torch.equal(ck.model[n].load(), tensor) for n, tensor in values(TWO).items())


def test_ranks_of_torch_xla_are_known_by_their_content(tmp_path):
    save(tmp_path / "x", [xla(TWO, 3, rank) for rank in (1, 0, 2)], "model-rank{}.pt")
    ck = ckptools.open(tmp_path / "x")
    assert {p.code for p in ck.problems} == {"CK022"}
    assert all(torch.equal(ck.model[n].load(), tensor) for n, tensor in values(TWO).items())


def test_a_parameter_of_torch_xla_that_was_cut_by_rows_is_joined(tmp_path):
    full = torch.arange(15.0).reshape(5, 3)
    rows = torch.cat([full, torch.zeros(1, 3)]).chunk(2)
    info = {"": {"_fsdp_shard_w": {"_orig_size": full.shape, "_orig_name": "_fsdp_wrapped_module._fpw_module.w"}}}
    stated = {"shard_info": info, "flatten_info": {}, "buffer_info": {}, "world_size": 2}
    contents = [
        {"model": {"_fsdp_shard_w": rows[r].clone()}, "shard_metadata": {**stated, "rank": r}} for r in range(2)
    ]
    assert torch.equal(ckptools.open(save(tmp_path / "x", contents, "m-rank{}.pt")).model["w"].load(), full)


def test_an_average_of_the_weights_is_taken_apart_too(tmp_path):
    contents = [fairscale(TWO, 3, rank) for rank in range(3)]
    for content in contents:
        content["extra_state"] = {"ema": {k: t * 2 for k, t in content["model"].items()}}
    ck = ckptools.open(save(tmp_path / "x", contents))
    assert torch.equal(ck.tree["extra_state"]["ema"]["block.weight"].load(), values(TWO)["block.weight"] * 2)


def test_a_copy_and_a_rank_whose_padding_is_anothers_are_noticed(tmp_path):
    folder = saved(tmp_path / "x")
    last, kept = folder / "checkpoint_7-shard2.pt", (folder / "checkpoint_7-shard2.pt").read_bytes()
    shutil.copy(folder / "checkpoint_7-shard0.pt", last)
    assert "CK009" in {p.code for p in ckptools.open(folder).problems}
    last.write_bytes((folder / "checkpoint_7-shard1.pt").read_bytes())
    (folder / "checkpoint_7-shard1.pt").write_bytes(kept)
    with pytest.raises(NotWholeError, match="padding"):
        ckptools.consolidate(folder, tmp_path / "out.pt")


def test_experts_that_each_rank_has_for_itself_are_not_joined(tmp_path):
    contents = [fairscale(TWO, 2, rank) for rank in range(2)]
    for content in contents:
        content["shard_metadata"]["param_metadata"][1]["no_broadcast_optim_state"] = True
    ck = ckptools.open(save(tmp_path / "x", contents))
    assert "no_broadcast" in ck.model["block.flat_param_0"].note
    with pytest.raises(NotWholeError, match="block"):
        ckptools.consolidate(tmp_path / "x", tmp_path / "out.pt")


def test_a_part_of_a_model_parallel_run_is_never_whole(tmp_path):
    for part in range(2):
        names = f"checkpoint_7-model_part-{part}-shard{{}}.pt"
        save(tmp_path / "x", [fairscale(TWO, 2, rank) for rank in range(2)], names)
    with pytest.raises(SeveralError):
        ckptools.open(tmp_path / "x")
    ck = ckptools.open(tmp_path / "x" / "checkpoint_7-model_part-1-shard0.pt")
    assert (ck.whole, ck.problems[0].code, ck.world_size.value) == (False, "CK011", 2)


def test_a_parameter_that_the_metadata_lists_and_no_file_has_is_missing(tmp_path):
    contents = [fairscale(TWO, 2, rank) for rank in range(2)]
    for content in contents:
        del content["model"]["block.flat_param_0"]
    assert "CK107" in {p.code for p in ckptools.open(save(tmp_path / "x", contents)).problems}


def test_ranks_of_two_runs_are_refused(tmp_path):
    other = fairscale({**TWO, "block": {"weight": (2, 6), "bias": (4,)}}, 2, 1)
    ck = ckptools.open(save(tmp_path / "x", [fairscale(TWO, 2, 0), other]))
    assert (ck.whole, {p.code for p in ck.problems}) == (False, {"CK104"})


def lies() -> dict[str, Any]:
    """Changes of the first wrapper that make its metadata one that fairscale does not write."""
    return {
        "numels": [15, 2],
        "names": ["one"],
        "shapes": [(5, 3), (-1,)],
        "padding": "none",
    }


@pytest.mark.parametrize("key", lies())
def test_metadata_that_lies_is_refused_in_one_line(tmp_path, key):
    content = copy.deepcopy(fairscale(TWO, 1, 0))
    content["shard_metadata"]["param_metadata"][0]["params"]["flat_param_0"][key] = lies()[key]
    with pytest.raises(ReadError, match="shard_metadata that cannot be understood") as error:
        ckptools.open(save(tmp_path / "x", [content]))
    assert "\n" not in str(error.value)


def test_the_parameters_of_a_wrapper_are_listed_once():
    content = fairscale(TWO, 1, 0)
    content["shard_metadata"]["param_metadata"] *= 2
    with pytest.raises(ValueError, match="twice"):
        shard_metadata(content)


def test_of_other_rank_files_a_few_are_searched_and_no_more(tmp_path, monkeypatch):
    folder = save(tmp_path / "run", [{"model": {}} for _ in range(20)])
    searched, search = [], fsdp_shards._is_shard
    monkeypatch.setattr(fsdp_shards, "_is_shard", lambda path: (searched.append(path), search(path))[1])
    assert not fsdp_shards.detect(folder) and len(searched) == fsdp_shards.MAX_TRIED
