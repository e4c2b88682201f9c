"""DCP folders that consolidate writes, loaded by torch.distributed.checkpoint itself, at several world sizes."""

from __future__ import annotations

import json
import pickletools
from collections import OrderedDict
from functools import cache
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint import DefaultLoadPlanner, FileSystemReader
from torch.distributed.checkpoint._nested_dict import flatten_state_dict
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict

import ckptools
from ckptools.consolidate.writers import dcp as writer
from ckptools.errors import RefusedError
from ckptools.model.tree import tensors_in
from tests.consolidate import dcp_resume
from tests.consolidate.test_outputs import raw
from tests.truth import WHOLE, Known, load_truth
from tests.versions import TORCH

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


def number(fixture: Known) -> int:
    """A name for its output; some samples are there in two forms."""
    return WHOLE.index(fixture)


def known(name: str) -> Known:
    return next(k for k in WHOLE if k.name.startswith(name))


@cache
def opened(fixture: Known) -> ckptools.Checkpoint:
    """A fixture, opened once: to be written, and to name what its optimizers hold."""
    return fixture.open(all_ranks=True)


COMPOSER, DDP = known("composer-0.13"), known("torch2.13.0-ddp")


@pytest.fixture(scope="module")
def loaded(tmp_path_factory) -> Path:
    """A DCP of every fixture, and beside each what three ranks loaded from it; one start of the ranks for all."""
    folder = tmp_path_factory.mktemp("dcp")
    for fixture in WHOLE:
        ckptools.consolidate(opened(fixture), folder / f"{number(fixture)}.dcp", layout="flat")
    with mock.patch.object(writer, "ITEM_BYTES", 100):
        ckptools.consolidate(COMPOSER.file, folder / "cut.dcp", max_shard_size=40_000, layout="flat")
    assert dcp_resume.start(folder) == [0] * dcp_resume.RANKS
    return folder


def read(path: Path) -> dict[str, object]:
    return torch.load(path, weights_only=False)


def truth_of(fixture: Known) -> dict[str, tuple[str, bytes, tuple[int, ...]]]:
    """The truth under the names that a DCP has."""
    kept = {k: v for k, v in load_truth(fixture.name).items() if not k.startswith((*fixture.absent, "buffer/"))}
    names = {k: k.replace("model/", "model.", 1) for k in kept if k.startswith("model/")}
    key = numbers_of(fixture)
    of_optimizer = {k: k.split("/")[1:] for k in kept if k.startswith("optim/")}
    # Without param groups it is no optimizer's state, and keeps its name.
    optimizers = opened(fixture).optimizers.values()
    at = dict.fromkeys((name for name, *_ in of_optimizer.values()), "optimizer" if optimizers else "optim")
    if len(optimizers) > 1:
        at |= {name: ".".join(map(str, o.path)) for o in optimizers for name in o.state}
    names |= {k: ".".join([at[name], "state", key.get(name, name), *slot]) for k, (name, *slot) in of_optimizer.items()}
    if fixture.weights == "module" and fixture.name != "megatron-ep2dp2-bf16-legacy":  # call master copies otherwise
        names = {k: name.replace(".fp32_param", ".param") for k, name in names.items()}
    return {name: kept[k] for k, name in names.items()}


def numbers_of(fixture: Known) -> dict[str, str]:
    """The number of each parameter by its name, of an optimizer of which one has no sure name; else nothing."""
    optimizers = opened(fixture).optimizers.values()
    numbered = [o.naming.names.items() for o in optimizers if o.naming.unnamed and o.naming.by != "fqn"]
    return {name: str(number) for names in numbered for number, name in names}


def wrong(found: dict[str, object], truth: dict[str, tuple[str, bytes, tuple[int, ...]]]) -> list[str]:
    return [k for k, v in truth.items() if k not in found or not same(found[k], v)]


def same(value: object, truth: tuple[str, bytes, tuple[int, ...]]) -> bool:
    if isinstance(value, torch.Tensor):
        return raw(value) == truth
    return value == int.from_bytes(truth[1], "little", signed=True)


def equal(a: object, b: object) -> bool:
    if isinstance(a, (list, tuple)) and isinstance(b, (list, tuple)):
        return len(a) == len(b) and all(map(equal, a, b))
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        return raw(a) == raw(b)
    return np.array_equal(a, b) if isinstance(a, np.ndarray) else type(a) is type(b) and a == b


@pytest.mark.slow
@pytest.mark.parametrize("fixture", WHOLE, ids=lambda k: k.name)
def test_three_ranks_load_every_value_bit_for_bit(fixture, loaded):
    truth = truth_of(fixture)
    assert wrong(read(loaded / f"{number(fixture)}.pt"), truth) == []
    assert len(truth) > 6


@pytest.mark.slow
def test_two_ranks_and_one_load_the_same(loaded):
    truth = truth_of(WHOLE[0])
    assert wrong(read(loaded / "two ranks.pt"), truth) == []
    assert wrong(dcp_resume.load_sharded(loaded / "0.dcp", None), truth) == []


@pytest.mark.slow
def test_tensors_cut_into_many_items_in_several_files_are_joined_by_every_rank(loaded):
    assert wrong(read(loaded / "cut.pt"), truth_of(COMPOSER)) == []
    described = FileSystemReader(loaded / "cut.dcp").read_metadata().state_dict_metadata
    assert len(described["model.model.emb.weight"].chunks) > 10
    files = sorted((loaded / "cut.dcp").glob("*.distcp"))
    assert len(files) > 3 and all(f.stat().st_size <= 40_000 for f in files)


@pytest.mark.slow
def test_a_run_goes_on_as_if_nothing_had_happened(loaded):
    if not dcp_resume.CAN_TRAIN:
        pytest.skip(f"{TORCH} has no record_event")
    resumed = json.loads((loaded / "resumed.json").read_text())
    assert resumed["differ"] == []
    assert resumed["losses"][0] == resumed["losses"][1]
    assert resumed["lrs"][0] == resumed["lrs"][1]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["composer-0.13", "lightning-trainer", "verl-fsdp1", "torch2.13.0-ddp"])
def test_everything_else_is_flattened_as_torch_flattens_it(name, loaded, tmp_path):
    ck = ckptools.open(known(name).file, all_ranks=True)
    ckptools.consolidate(ck, tmp_path / "all.pt", keep_types=True)  # as a DCP does
    flat, _ = flatten_state_dict(torch.load(tmp_path / "all.pt", weights_only=False))
    moved = tuple(".".join(map(str, s.path)) + "." for s in ck.sections if s.kind in ("model", "optimizer"))
    expected = {k: v for k, v in flat.items() if not k.startswith(moved)}
    found = read(loaded / f"{number(known(name))}.pt")
    others = {k: v for k, v in found.items() if not k.startswith(("model.", "optimizer."))}
    assert list(others) == list(expected)
    assert [k for k, v in expected.items() if not equal(v, others[k])] == []


@pytest.mark.slow
def test_torchs_own_converter_gives_the_tree_of_the_state_dict_api(loaded, tmp_path):
    dcp_to_torch_save(loaded / f"{number(DDP)}.dcp", tmp_path / "all.pt")
    tree = torch.load(tmp_path / "all.pt", weights_only=False)
    names = [n for group in tree["optimizer"]["param_groups"] for n in group["params"]]
    assert sorted(names) == sorted(tree["optimizer"]["state"]) and set(names) <= set(tree["model"])
    assert tree["optimizer"]["param_groups"][1]["lr"] == ckptools.open(DDP.file).tree["SCHEDULER"]["_last_lr"][1]


def tensors_that_ranks_share(ck: ckptools.Checkpoint) -> int:
    return sum(1 for s in ck.sections if s.kind != "rng" for _ in tensors_in(s.value))


@pytest.mark.slow
@pytest.mark.parametrize("fixture", WHOLE, ids=lambda k: k.name)
def test_ckptools_opens_it_again_and_finds_the_same(fixture, loaded):
    before, after = fixture.open(all_ranks=True), ckptools.open(loaded / f"{number(fixture)}.dcp", all_ranks=True)
    # A DCP tells no order of names, so that what is keyed by number in the source keeps no name here.
    expected = [p.code for p in before.problems if p.code == "CK210"]
    expected += ["CK020"] if fixture.name == "dcp-objects" else []  # its BytesIO, which no DCP holds
    assert (after.format, after.whole) == ("dcp", True)
    assert [p.code for p in after.problems if p.severity != "note"] == expected
    assert tensors_that_ranks_share(before) == tensors_that_ranks_share(after)
    assert sorted(s.kind for s in before.sections if s.kind in ("model", "optimizer")) == sorted(
        s.kind for s in after.sections if s.kind in ("model", "optimizer")
    )


def test_only_the_model_or_only_the_optimizer_under_their_keys(tmp_path):
    ckptools.consolidate(DDP.file, tmp_path / "m.dcp", only="model", layout="flat")
    ckptools.consolidate(DDP.file, tmp_path / "o.dcp", only="optimizer", layout="flat")
    model, optimizer = (dcp_resume.load_sharded(tmp_path / name, None) for name in ("m.dcp", "o.dcp"))
    assert {k.split(".")[0] for k in model} == {"model"} and {k.split(".")[0] for k in optimizer} == {"optimizer"}
    assert wrong(model | optimizer, truth_of(DDP)) == []


def test_a_dtype_is_for_the_model_alone(tmp_path):
    ckptools.consolidate(COMPOSER.file, tmp_path / "x.dcp", dtype="bf16", layout="flat")
    found = dcp_resume.load_sharded(tmp_path / "x.dcp", None)
    full = load_truth(COMPOSER.name)["model/model.emb.weight"]
    expected = torch.frombuffer(bytearray(full[1]), dtype=torch.float32).to(torch.bfloat16).reshape(full[2])
    assert raw(found["model.model.emb.weight"]) == raw(expected)
    assert found["optimizer.state.model.emb.weight.exp_avg"].dtype == torch.float32


def save(path: Path, model: dict[str, torch.Tensor], **more: object) -> Path:
    torch.save({"model": model, **more}, path)
    return path


def adam(*ids: object) -> dict[str, object]:
    """The state of an optimizer over parameters of shapes (1,), (2,) …"""
    state = {p: {"step": torch.tensor(3.0), "exp_avg": torch.ones(i + 1)} for i, p in enumerate(ids)}
    return {"state": state, "param_groups": [{"lr": 0.1, "params": list(ids)}]}


def flat(path: Path) -> dict[str, object]:
    return dcp_resume.load_sharded(path, None)


def test_names_of_wrappers_are_taken_out_where_torchs_api_takes_them_out(tmp_path):
    wrapped = {"module._orig_mod.a.weight": torch.ones(1), "module.b._checkpoint_wrapped_module.bias": torch.ones(2)}
    done = ckptools.consolidate(save(tmp_path / "x.pt", wrapped, optim=adam(0, 1)), tmp_path / "x.dcp", layout="flat")
    found = flat(tmp_path / "x.dcp")
    assert {"model.a.weight", "model.b.bias", "optimizer.state.b.bias.exp_avg"} <= set(found)
    assert found["optimizer.param_groups.0.params"] == ["a.weight", "b.bias"]
    assert any("'module._orig_mod.a.weight' is 'a.weight'" in note for note in done.notes)


def test_a_module_that_is_called_module_keeps_its_name(tmp_path):
    save(tmp_path / "x.pt", {"module.weight": torch.ones(1), "head.module.weight": torch.ones(2)})
    ckptools.consolidate(tmp_path / "x.pt", tmp_path / "x.dcp", layout="flat")
    assert set(flat(tmp_path / "x.dcp")) == {"model.module.weight", "model.head.module.weight"}


def test_where_one_parameter_has_no_sure_name_all_keep_their_numbers_and_dcp_loads_them(tmp_path):
    model = {"a": torch.ones(1), "b": torch.ones(1), "c": torch.ones(2)}
    done = ckptools.consolidate(save(tmp_path / "x.pt", model, optim=adam(0, 1)), tmp_path / "x.dcp", layout="flat")
    found = flat(tmp_path / "x.dcp")
    assert found["optimizer.param_groups.0.params"] == [0, 1]
    assert any("written under its number (2)" in note for note in done.notes)
    moments = {i: {"exp_avg": torch.full_like(found[f"optimizer.state.{i}.exp_avg"], 9.0)} for i in (0, 1)}
    dcp.load({"optimizer": {"state": moments}}, checkpoint_id=tmp_path / "x.dcp")
    assert all(torch.equal(s["exp_avg"], found[f"optimizer.state.{i}.exp_avg"]) for i, s in moments.items())


def test_an_optimizer_of_which_the_source_itself_has_names_and_numbers_is_refused(tmp_path):
    model = {"a": torch.ones(1), "b": torch.ones(1), "c": torch.ones(2)}
    save(tmp_path / "x.pt", model, optim=adam(0, "c"))
    with pytest.raises(RefusedError, match=r"have no name.* nothing loads a mix .*names FROM"):
        ckptools.consolidate(tmp_path / "x.pt", tmp_path / "x.dcp")
    assert [p.name for p in tmp_path.iterdir()] == ["x.pt"]
    ckptools.consolidate(tmp_path / "x.pt", tmp_path / "x.dcp", only="model")


def test_several_models_keep_their_own_places(tmp_path):
    states = {"encoder": {"w": torch.ones(2), "b": torch.ones(1)}, "decoder": {"w": torch.ones(3)}}
    torch.save(states, tmp_path / "x.pt")
    ckptools.consolidate(tmp_path / "x.pt", tmp_path / "x.dcp")
    assert set(flat(tmp_path / "x.dcp")) == {"encoder.w", "encoder.b", "decoder.w"}


def test_a_bare_state_dict_is_the_model(tmp_path):
    torch.save(OrderedDict(w=torch.ones(2, 3), empty=torch.ones(0, 3), zero=torch.tensor(5)), tmp_path / "x.pt")
    ckptools.consolidate(tmp_path / "x.pt", tmp_path / "x.dcp", layout="flat")
    found = flat(tmp_path / "x.dcp")
    assert {k: tuple(v.shape) for k, v in found.items()} == {"model.w": (2, 3), "model.empty": (0, 3), "model.zero": ()}
    assert found["model.zero"] == 5


def test_tensors_in_a_tuple_stay_in_one_value_with_it(tmp_path):
    save(tmp_path / "x.pt", {"w": torch.ones(1)}, pair=(torch.arange(3), "x"), listed=[torch.arange(4), {}])
    done = ckptools.consolidate(tmp_path / "x.pt", tmp_path / "x.dcp")
    found = flat(tmp_path / "x.dcp")
    assert found["pair"][0].tolist() == [0, 1, 2] and found["listed.0"].tolist() == [0, 1, 2, 3]
    assert any(note.startswith("1 empty dict left out") for note in done.notes)


def test_every_dtype_survives(tmp_path):
    kinds = [torch.float8_e4m3fn, torch.bfloat16, torch.complex64, torch.uint16, torch.bool, torch.int8, torch.float64]
    model = {str(k): torch.arange(6).to(k).reshape(2, 3) for k in kinds}
    ckptools.consolidate(save(tmp_path / "x.pt", model), tmp_path / "x.dcp")
    found = flat(tmp_path / "x.dcp")
    assert {k: raw(found[f"model.{k}"]) for k in model} == {k: raw(v) for k, v in model.items()}


def test_a_step_that_was_a_plain_number_is_a_tensor_again_in_todays_adam(tmp_path):
    ckptools.consolidate(COMPOSER.file, tmp_path / "x.dcp", layout="flat")
    model = nn.ParameterDict({"model": nn.ParameterDict({"gate": nn.Parameter(torch.zeros(3))})})
    optimizer = torch.optim.AdamW(model.parameters())
    state = {"optimizer": get_optimizer_state_dict(model, optimizer)}
    # Hyperparameters that torch 1.13 did not have stay what the new optimizer says.
    dcp.load(state, checkpoint_id=tmp_path / "x.dcp", planner=DefaultLoadPlanner(allow_partial_load=True))
    state["optimizer"]["param_groups"][0]["params"] = ["model.gate"]
    set_optimizer_state_dict(model, optimizer, state["optimizer"])
    slots = optimizer.state[model["model"]["gate"]]
    assert torch.equal(slots["step"], torch.tensor(5.0)) and slots["exp_avg"].any()


def test_the_metadata_names_dataclasses_of_torch_and_nothing_else(tmp_path):
    ckptools.consolidate(COMPOSER.file, tmp_path / "x.dcp")
    pickle = (tmp_path / "x.dcp" / ".metadata").read_bytes()
    names = {arg for op, arg, _ in pickletools.genops(pickle) if op.name == "GLOBAL"}
    classes = ("ChunkStorageMetadata", "TensorStorageMetadata", "BytesStorageMetadata", "Metadata", "MetadataIndex")
    metadata = {f"torch.distributed.checkpoint.metadata {c}" for c in (*classes, "TensorProperties")}
    assert names == metadata | {
        "torch.distributed.checkpoint.metadata _MEM_FORMAT_ENCODING",
        "torch.distributed.checkpoint.filesystem _StorageInfo",
        "torch Size",
        "torch float32",
        "torch int64",
        "torch uint8",
        "torch.serialization _get_layout",
    }


def test_the_metadata_is_what_torch_would_have_written(tmp_path):
    tree = {"model": {"w": torch.ones(2, 3), "n": torch.tensor(1)}, "step": 5}
    torch.save(tree, tmp_path / "x.pt")
    ckptools.consolidate(tmp_path / "x.pt", tmp_path / "x.dcp")
    dcp.save(tree, checkpoint_id=tmp_path / "theirs")
    ours, theirs = (FileSystemReader(tmp_path / name).read_metadata() for name in ("x.dcp", "theirs"))
    assert ours.state_dict_metadata == theirs.state_dict_metadata
    assert ours.planner_data == theirs.planner_data
    assert not hasattr(theirs, "version") or ours.version == theirs.version  # torch 2.6 has none
    assert set(ours.storage_data) == set(theirs.storage_data)


def test_items_follow_each_other_without_gaps(tmp_path):
    ckptools.consolidate(COMPOSER.file, tmp_path / "x.dcp")
    places = FileSystemReader(tmp_path / "x.dcp").read_metadata().storage_data.values()
    at = 0
    for place in sorted(places, key=lambda p: p.offset):
        assert place.offset == at
        at += place.length
    assert at == (tmp_path / "x.dcp" / "__0_0.distcp").stat().st_size
