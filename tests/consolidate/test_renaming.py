"""What is written under new names: bit for bit what it was, with the optimizer's state along, or refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch.distributed import checkpoint as dcp

import ckptools
from ckptools.errors import NotWholeError, OutputExistsError, ReadError, RefusedError, UsageError
from tests.truth import FIXTURES, WHOLE, load_truth

STATE = "model"


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.norm = nn.Linear(4, 6), nn.BatchNorm1d(6)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.emb = nn.Embedding(8, 4)
        self.blocks = nn.ModuleList([Block(), Block()])
        self.head = nn.Linear(4, 8, bias=False)


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(bits(one[k]), bits(other[k])) for k in one)


def ddp(model: nn.Module, prefix: str = "module.") -> dict[str, Any]:
    """The state dict as DDP's is called, module versions included."""
    return model.state_dict(prefix=prefix)


@pytest.fixture
def saved(tmp_path: Path) -> tuple[Path, Model]:
    """A model in a wrapper with its optimizer, whose state has the names of the model."""
    torch.manual_seed(0)
    model = Model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    for parameter in model.parameters():
        parameter.grad = torch.rand_like(parameter)
    optimizer.step()
    names = [f"module.{name}" for name, _ in model.named_parameters()]
    own = optimizer.state_dict()
    named = {
        "state": {names[i]: entry for i, entry in own["state"].items()},
        "param_groups": [{**group, "params": [names[i] for i in group["params"]]} for group in own["param_groups"]],
    }
    torch.save({STATE: ddp(model), "optimizer": named, "step": 3}, tmp_path / "saved.pt")
    return tmp_path / "saved.pt", model


def bare(model: nn.Module) -> dict[str, torch.Tensor]:
    return dict(model.state_dict())


RENAMED = (
    {"strip_prefix": "module."},
    {"strip_prefix": "module"},
    {"rename": ["module.="]},
)


@pytest.mark.parametrize("how", RENAMED, ids=str)
def test_a_pt_loads_strictly_into_the_module_that_it_is_of(saved, tmp_path, how):
    path, model = saved
    ckptools.consolidate(path, tmp_path / "out.pt", only="model", **how)
    state = torch.load(tmp_path / "out.pt")
    assert same(dict(state), bare(model)) and list(state) == list(model.state_dict())
    Model().load_state_dict(state, strict=True)
    assert state._metadata == model.state_dict()._metadata


def test_what_match_finds_is_a_map_that_makes_it_load(saved, tmp_path):
    path, model = saved
    ck = ckptools.open(path)
    with torch.device("meta"):
        found = ck.match(Model())
    assert not found.loads and found.renamed == len(bare(model))
    ck.consolidate(tmp_path / "out.safetensors", map=found.fix)
    assert same(load_file(tmp_path / "out.safetensors"), bare(model))
    assert ckptools.open(tmp_path / "out.safetensors").match(Model()).loads


def test_the_state_of_the_optimizer_follows_in_every_output(saved, tmp_path):
    path, model = saved
    was = torch.load(path)["optimizer"]
    ckptools.consolidate(path, tmp_path / "out.pt", strip_prefix="module")
    now = torch.load(tmp_path / "out.pt")["optimizer"]
    parameters = [name for name, _ in model.named_parameters()]
    assert list(now["state"]) == now["param_groups"][0]["params"] == parameters
    for name, entry in now["state"].items():
        assert same(entry, was["state"][f"module.{name}"])
    ckptools.consolidate(path, tmp_path / "o.safetensors", only="optimizer", strip_prefix="module")
    flat = load_file(tmp_path / "o.safetensors")
    assert {key for key in flat if key.endswith("exp_avg")} == {f"state.{name}.exp_avg" for name in parameters}


def test_a_dcp_has_the_new_names_too(saved, tmp_path):
    path, model = saved
    ckptools.consolidate(path, tmp_path / "out.dcp", strip_prefix="module", rename=["blocks=layers"])
    with torch.device("cpu"):
        state = {"model": {n.replace("blocks", "layers"): torch.zeros_like(t) for n, t in bare(model).items()}}
    dcp.load(state, checkpoint_id=tmp_path / "out.dcp")
    assert same(state["model"], {n.replace("blocks", "layers"): t for n, t in bare(model).items()})
    keys = dcp.FileSystemReader(tmp_path / "out.dcp").read_metadata().state_dict_metadata
    assert "optimizer.state.layers.0.up.weight.exp_avg" in keys and not any("blocks" in key for key in keys)


def test_state_that_goes_by_number_keeps_its_numbers_and_is_named_anew_where_names_are_written(tmp_path):
    model = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model.weight.grad, model.bias.grad = torch.ones(2, 3), torch.ones(2)
    optimizer.step()
    torch.save({"model": ddp(model), "optimizer": optimizer.state_dict()}, tmp_path / "n.pt")
    ckptools.consolidate(tmp_path / "n.pt", tmp_path / "out.pt", strip_prefix="module")
    optimizer.load_state_dict(torch.load(tmp_path / "out.pt")["optimizer"])
    ckptools.consolidate(tmp_path / "n.pt", tmp_path / "o.safetensors", only="optimizer", strip_prefix="module")
    assert set(load_file(tmp_path / "o.safetensors")) == {f"state.{n}.momentum_buffer" for n in ("weight", "bias")}


def test_names_may_change_places(saved, tmp_path):
    path, _ = saved
    swap = {"module.emb.weight": "module.head.weight", "module.head.weight": "module.emb.weight"}
    ckptools.consolidate(path, tmp_path / "out.pt", map=swap)
    now, was = torch.load(tmp_path / "out.pt"), torch.load(path)
    assert torch.equal(now[STATE]["module.head.weight"], was[STATE]["module.emb.weight"])
    moments = {k: v["exp_avg"] for k, v in now["optimizer"]["state"].items()}
    assert torch.equal(moments["module.head.weight"], was["optimizer"]["state"]["module.emb.weight"]["exp_avg"])


@pytest.mark.slow
@pytest.mark.parametrize("suffix", ["pt", "safetensors"])
@pytest.mark.parametrize("known", [k for k in WHOLE if k.world_size > 1][:6:2], ids=lambda k: k.name)
def test_ranks_are_joined_bit_for_bit_under_new_names(known, suffix, tmp_path):
    out = tmp_path / f"out.{suffix}"
    known.open().consolidate(out, only="model", rename=["=new."])
    state = torch.load(out) if suffix == "pt" else load_file(out)
    truth = load_truth(known.name)
    for name, tensor in state.items():
        _, data, shape = truth["model/" + name.removeprefix("new.").removeprefix(known.prefix)]
        assert name.startswith("new.") and tensor.shape == shape and bits(tensor).numpy().tobytes() == data


# -- part of the model ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("glob", ["module.blocks.0.*", "model.module.blocks.0.*"])
def test_a_glob_writes_the_names_that_match_and_counts_the_others(saved, tmp_path, glob):
    path, model = saved
    done = ckptools.consolidate(path, tmp_path / "out.pt", only=glob, strip_prefix="module")
    expected = {name: t for name, t in bare(model).items() if name.startswith("blocks.0.")}
    assert same(dict(torch.load(tmp_path / "out.pt")), expected)
    others = len(bare(model)) - len(expected)
    assert f"only={glob!r}: {len(expected)} names of the model, without {others} others" in done.notes


def test_what_is_missing_elsewhere_does_not_keep_a_glob_from_being_written(tmp_path):
    for rank in (0, 2, 3):
        (tmp_path / f"rank{rank}.pt").write_bytes(
            (FIXTURES / f"torch2.13.0-fsdp1-sharded-w4/rank{rank}.pt").read_bytes()
        )
    with pytest.raises(NotWholeError):
        ckptools.consolidate(tmp_path, tmp_path / "out.pt", only="[eh]*")
    ckptools.consolidate(tmp_path, tmp_path / "out.pt", only="se*")
    _, data, _ = load_truth("torch2.13.0-fsdp1-sharded-w4")["model/seen"]
    state = torch.load(tmp_path / "out.pt")
    assert list(state) == ["seen"] and state["seen"].numpy().tobytes() == data


def test_the_dtype_that_is_asked_for_is_that_of_the_model_under_new_names_too(saved, tmp_path):
    ckptools.consolidate(saved[0], tmp_path / "out.pt", strip_prefix="module", dtype="bf16")
    state = torch.load(tmp_path / "out.pt")
    assert {t.dtype for t in state[STATE].values() if t.is_floating_point()} == {torch.bfloat16}
    assert {e["exp_avg"].dtype for e in state["optimizer"]["state"].values()} == {torch.float32}


def test_a_glob_that_fits_nothing_is_a_mistake(saved, tmp_path):
    with pytest.raises(UsageError, match=r"only='blocks.\*': choose one of model, optimizer, all; or a glob"):
        ckptools.consolidate(saved[0], tmp_path / "out.pt", only="blocks.*")


# -- what is refused -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("how", "kind", "words"),
    [
        ({"rename": ["module.emb.weight=module.head.weight"]}, RefusedError, "'module.emb.weight' and 'module.head"),
        ({"map": {"module.emb.weight": "x", "module.head.weight": "x"}}, RefusedError, "would both be called 'x'"),
        ({"strip_prefix": "modul"}, UsageError, "strip_prefix modul: fits no name of the model; its names are such"),
        ({"strip_prefix": ""}, UsageError, "strip_prefix is empty"),
        ({"rename": ["block=layer"]}, UsageError, "rename block=layer: fits no name"),
        ({"rename": ["blocks"]}, UsageError, "rename blocks: expected OLD=NEW"),
        ({"rename": ["a.=b"]}, UsageError, "end b with a dot too"),
        ({"rename": ["a=b."]}, UsageError, "a is a whole name"),
        ({"rename": ["a="]}, UsageError, "a is a whole name"),
        ({"map": {"nothing": "x"}}, UsageError, "map: the model has none of its 1 names"),
        ({"map": {"module.emb.weight": ""}}, UsageError, "expected a name for 'module.emb.weight'"),
    ],
    ids=str,
)
def test_what_makes_no_sense_is_refused_and_nothing_is_written(saved, tmp_path, how, kind, words):
    with pytest.raises(kind) as error:
        ckptools.consolidate(saved[0], tmp_path / "out.pt", **how)
    assert words in str(error.value) and not (tmp_path / "out.pt").exists()


def test_an_entry_of_a_map_that_matches_nothing_is_said(saved, tmp_path):
    done = ckptools.consolidate(saved[0], tmp_path / "out.pt", map={"module.emb.weight": "e", "module.nope": "n"})
    assert "map: the model has no 'module.nope'" in done.notes


def test_an_optimizer_that_knows_other_names_cannot_follow(tmp_path):
    weight = torch.zeros(2)
    optimizer = {"state": {"other.weight": {"exp_avg": weight}}, "param_groups": [{"params": ["other.weight"]}]}
    torch.save({"model": {"a.weight": weight, "a.bias": weight}, "optimizer": optimizer}, tmp_path / "s.pt")
    with pytest.raises(RefusedError, match=r"has no 'other.weight', of which the optimizer has state"):
        ckptools.consolidate(tmp_path / "s.pt", tmp_path / "out.pt", rename=["a=b"])
    ckptools.consolidate(tmp_path / "s.pt", tmp_path / "out.pt", rename=["a=b"], only="model")
    assert list(torch.load(tmp_path / "out.pt")) == ["b.weight", "b.bias"]


def test_a_model_beside_its_optimizer_at_the_root_is_renamed_alone(tmp_path):
    weight = torch.arange(2.0)
    optimizer = {"state": {"a.w": {"m": weight}}, "param_groups": [{"params": ["a.w"]}]}
    torch.save({"a.w": weight, "a.v": weight + 1, "optim": optimizer, "a.step": 7}, tmp_path / "s.pt")
    ckptools.consolidate(tmp_path / "s.pt", tmp_path / "out.pt", rename=["a=b"])
    state = torch.load(tmp_path / "out.pt")
    assert list(state) == ["b.w", "b.v", "optim", "a.step"] and list(state["optim"]["state"]) == ["b.w"]


# -- maps in files -------------------------------------------------------------------------------------------------


def test_a_map_in_a_file_is_read_with_its_schema_or_without(saved, tmp_path):
    names = {name: name.removeprefix("module.") for name in torch.load(saved[0])[STATE]}
    for n, content in enumerate((names, {"schema": "ckptools/map/1", "map": names})):
        (tmp_path / "map.json").write_text(json.dumps(content))
        ckptools.consolidate(saved[0], tmp_path / f"{n}.pt", only="model", map=tmp_path / "map.json")
        assert same(dict(torch.load(tmp_path / f"{n}.pt")), bare(saved[1]))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[1]", "expected a JSON object of old name to new"),
        ("{}", "expected a JSON object of old name to new"),
        ('{"a": 1}', "expected a new name for 'a', found 1"),
        ('{"a": ""}', "expected a new name for 'a'"),
        ('{"a": "b", "a": "c"}', "'a' is twice in one object"),
        ('{"schema": "ckptools/map/9", "map": {"a": "b"}}', "found schema 'ckptools/map/9'"),
        ("{", "is no JSON"),
    ],
)
def test_what_is_no_map_is_one_line(saved, tmp_path, text, words):
    (tmp_path / "map.json").write_text(text)
    with pytest.raises(ReadError) as error:
        ckptools.consolidate(saved[0], tmp_path / "out.pt", map=tmp_path / "map.json")
    assert words in str(error.value) and "\n" not in str(error.value)


def test_a_map_that_is_there_is_not_overwritten(tmp_path):
    from ckptools.keys.renames import read_map, write_map

    write_map(tmp_path / "m.json", {"ä\n": "b"})
    assert read_map(tmp_path / "m.json") == {"ä\n": "b"}
    with pytest.raises(OutputExistsError):
        write_map(tmp_path / "m.json", {"a": "b"})


def test_a_flattened_optimizer_follows_the_names_of_the_model(tmp_path):
    moments = {f"state.a.{name}.{slot}": torch.ones(2) for name in ("w", "b.c") for slot in ("exp_avg", "exp_avg_sq")}
    groups = {f"param_groups.a.{name}.lr": rate for name, rate in (("w", 0.1), ("b.c", 0.2))}
    tree = {"model": {"a.w": torch.zeros(2), "a.b.c": torch.ones(2)}, "optim": {**moments, **groups}}
    torch.save(tree, tmp_path / "flat.pt")
    ckptools.consolidate(tmp_path / "flat.pt", tmp_path / "new.pt", rename=["a.=z.y."])
    found = torch.load(tmp_path / "new.pt")
    assert list(found["model"]) == ["z.y.w", "z.y.b.c"]
    assert list(found["optim"]) == [key.replace(".a.", ".z.y.") for key in tree["optim"]]
    assert found["optim"]["param_groups.z.y.b.c.lr"] == 0.2
