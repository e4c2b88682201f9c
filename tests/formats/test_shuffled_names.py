"""Whatever order the parameters of one shape are stored in, a state by number gets its own name or none.

A real module is trained by a real optimizer, so that it is known whose state each number is. Its state dict is written
with parameters of one shape in each other's places, in every format that may hold a state by number. Where the groups
have the order of the module no name may be wrong, called assumed or not. Where the groups are in any order no name may
be wrong that is not called assumed.
"""

from __future__ import annotations

import json
import random
from collections import OrderedDict
from collections.abc import Callable, Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file
from torch import nn

import ckptools
from ckptools.model.tensor import Tensor
from ckptools.training_state.optimizers import believed, name_with
from ckptools.training_state.sections import storage_identity
from tests.formats.megatron_runs import Run, file_tree, full_model, save
from tests.truth import WHOLE

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

State = Mapping[str, Any]


class Block(nn.Module):
    """A norm whose weight and bias have one shape, and a matrix; a frozen norm has a buffer of that shape too."""

    def __init__(self, width: int, frozen: bool) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, width, bias=False)
        self.norm.requires_grad_(not frozen)
        if frozen:
            self.register_buffer("mean", torch.zeros(width))


class Model(nn.Module):
    """Blocks, some of them alike, and a head that may be tied to the embedding."""

    def __init__(self, blocks: list[tuple[int, bool]], tied: bool) -> None:
        super().__init__()
        self.emb = nn.Embedding(7, 4)
        self.blocks = nn.ModuleList(Block(*one) for one in blocks)
        self.head = nn.Linear(4, 7, bias=False)
        if tied:
            self.head.weight = self.emb.weight


@st.composite
def models(draw: st.DrawFn) -> Model:
    block = st.tuples(st.sampled_from([2, 3]), st.booleans())
    return Model(draw(st.lists(block, min_size=1, max_size=4)), draw(st.booleans()))


def trained(model: Model, groups: list[list[nn.Parameter]]) -> tuple[State, dict[bytes, str]]:
    """An optimizer's state dict, and whose each state is, told by its values."""
    optimizer = torch.optim.Adam([{"params": group} for group in groups if group])
    names = {p: name for name, p in model.named_parameters()}
    for p in model.parameters():
        p.grad = torch.randn_like(p)
    optimizer.step()
    return optimizer.state_dict(), {s["exp_avg"].numpy().tobytes(): names[p] for p, s in optimizer.state.items()}


def shuffled(values: State, seed: int, keep_list: bool) -> OrderedDict[str, Any]:
    """The same dict with entries of one shape in each other's places; its list of modules may be kept."""
    by_shape: dict[Any, list[str]] = {}
    for name, value in values.items():
        by_shape.setdefault(tuple(value.shape), []).append(name)
    for names in by_shape.values():
        random.Random(seed).shuffle(names)
    made = OrderedDict((name, values[name]) for name in (by_shape[tuple(v.shape)].pop() for v in values.values()))
    if keep_list:
        made._metadata = values._metadata  # type: ignore[attr-defined]
    return made


def torch_file(model: State, optimizer: State, to: Path) -> Path:
    torch.save({"model": model, "optimizer": optimizer}, to / "all.pt")
    return to / "all.pt"


def rank_files(model: State, optimizer: State, to: Path) -> Path:
    for rank in (0, 1):
        torch.save({"state": {"model": model, "optimizers": {"Adam": optimizer}}}, to / f"ep0-ba1-rank{rank}.pt")
    return to


def dcp_folder(model: State, optimizer: State, to: Path) -> Path:
    dcp.save({"model": dict(model), "optim": optimizer}, checkpoint_id=to)
    return to


def bin_files(model: State, optimizer: State, to: Path) -> Path:
    torch.save(model, to / "pytorch_model.bin")
    torch.save(optimizer, to / "optimizer.pt")
    return to


def safetensors(model: State, optimizer: State, to: Path) -> Path:
    save_file({k: v.clone() for k, v in model.items()}, to / "model.safetensors")
    torch.save(optimizer, to / "optimizer.pt")
    return to


def accelerate(model: State, optimizer: State, to: Path) -> Path:
    torch.save(model, to / "pytorch_model_fsdp.bin")
    torch.save(optimizer, to / "optimizer.bin")
    return to


def composer_folder(model: State, optimizer: State, to: Path) -> Path:
    for name, value in (("model", model), ("optim", optimizer)):
        (to / name).mkdir()
        torch.save(value, to / name / f"{name}.pt")
    (to / "composer_metadata.json").write_text(json.dumps({"num_gpus": 1}))
    return to


def olmo_local(model: State, optimizer: State, to: Path) -> Path:
    for name, value in (("model", model), ("optim", optimizer), ("train", {"global_step": 1})):
        (to / name).mkdir()
        torch.save(value, to / name / "rank0.pt")
    return to


def deepspeed(model: State, optimizer: State, to: Path) -> Path:
    told = {"module": model, "optimizer": optimizer, "buffer_names": [], "ds_version": "0.19.8", "global_steps": 1}
    (to / "global_step1").mkdir()
    torch.save(told, to / "global_step1" / "mp_rank_00_model_states.pt")
    (to / "latest").write_text("global_step1")
    return to


WRITERS: tuple[Callable[[State, State, Path], Path], ...] = (
    torch_file, rank_files, dcp_folder, bin_files, safetensors, accelerate, composer_folder, olmo_local, deepspeed,
)  # fmt: skip


def opened(write: Callable[[State, State, Path], Path], model: State, optimizer: State) -> dict[Any, bytes]:
    """Names, or numbers, of the states that ckptools finds, with their values; assumed names are marked."""
    with TemporaryDirectory() as folder:
        ck = ckptools.open(write(model, optimizer, Path(folder)), all_ranks=True)
        (found,) = ck.optimizers.values()
        assumed = {found.naming.names[i] for i in found.naming.assumed}
        values = {k: slots["exp_avg"].numpy().tobytes() for k, slots in found.state.items() if "exp_avg" in slots}
        return {("assumed", k) if k in assumed else k: v for k, v in values.items()}


def wrong(found: Mapping[Any, bytes], whose: Mapping[bytes, str]) -> list[Any]:
    """Names that are another parameter's; a tied one has two that are right."""
    tied = {"head.weight": "emb.weight"}
    named = {k: v for k, v in found.items() if isinstance(k, str) and not k.isdigit()}
    return [k for k, v in named.items() if tied.get(k, k) != whose[v] and k != whose[v]]


@pytest.mark.slow
@pytest.mark.parametrize("write", WRITERS, ids=lambda w: w.__name__)
@settings(max_examples=12, deadline=None)
@given(model=models(), decay=st.booleans(), seed=st.integers(0, 99), keep_list=st.booleans())
def test_no_name_is_wrong_when_equal_shapes_stand_in_each_others_places(write, model, decay, seed, keep_list):
    params = [p for p in model.parameters() if p.requires_grad]
    groups = [[p for p in params if p.ndim > 1], [p for p in params if p.ndim == 1]] if decay else [params]
    optimizer, whose = trained(model, groups)
    found = opened(write, shuffled(model.state_dict(), seed, keep_list), optimizer)
    assert len(found) == len(whose)
    assert wrong({k[1] if isinstance(k, tuple) else k: v for k, v in found.items()}, whose) == []


@pytest.mark.slow
@pytest.mark.parametrize("write", WRITERS, ids=lambda w: w.__name__)
@settings(max_examples=8, deadline=None)
@given(model=models(), seed=st.integers(0, 99))
def test_no_name_that_is_not_called_assumed_is_wrong_when_groups_are_in_any_order(write, model, seed):
    params = list(model.parameters())
    random.Random(seed).shuffle(params)
    optimizer, whose = trained(model, [params[::2], params[1::2]])
    found = opened(write, model.state_dict(), optimizer)
    assert wrong(found, whose) == []


@pytest.mark.parametrize("write", (torch_file, rank_files, accelerate), ids=lambda w: w.__name__)
def test_a_state_dict_as_its_module_gave_it_names_every_state(write):
    model = Model([(2, False), (2, False), (3, False)], tied=True)
    optimizer, whose = trained(model, [list(model.parameters())])
    found = opened(write, model.state_dict(), optimizer)
    names = [k[1] if isinstance(k, tuple) else k for k in found]
    assert names == list(dict(model.named_parameters())) and len(whose) == len(names)


@settings(max_examples=10, deadline=None)
@given(seed=st.integers(0, 999))
def test_no_rank_of_megatron_is_named_wrongly_when_its_parameters_stand_in_each_others_places(seed):
    run = Run(tp=2, layers=((3,),))
    with TemporaryDirectory() as folder:
        save(run, Path(folder))
        for rank in range(2):
            file = next(Path(folder).glob(f"*/mp_rank_0{rank}/model_optim_rng.pt"))
            tree = file_tree(run, full_model(run), 0, rank)
            torch.save({**tree, "model": shuffled(tree["model"], seed, keep_list=True)}, file)
        (found,) = ckptools.open(folder, all_ranks=True).optimizers.values()
        for name, slots in found.state.items():
            if not str(name).startswith("?"):
                assert torch.equal(slots["exp_avg"].load(), full_model(run)[name] * 3)


BY_NUMBER = (
    "dcp-ddp-number-plain-w2", "lightning-trainer-ddp", "torch2.13.0-ddp-w4", "verl-fsdp1-orig", "verl-fsdp2-bf16",
)  # fmt: skip


# There the reader put names in the place of numbers.
NAMED_WHEN_READ = (
    "megatron-tp2pp2-fp32", "megatron-tp2dp2-distopt", "megatron-ep2dp2-bf16-legacy", "verl-fsdp1",
    "fairscale-fsdp-tied-w3", "megatron-core0.20-ep2dp2-dpr", "megatron-core0.16-pp2dp2",
)  # fmt: skip


@pytest.mark.parametrize("known", [k for k in WHOLE if k.name in BY_NUMBER], ids=lambda k: k.name)
@pytest.mark.parametrize("keep_list", [True, False])
def test_no_state_of_a_fixture_is_named_wrongly_when_equal_shapes_stand_in_each_others_places(known, keep_list):
    ck = known.open(all_ranks=True)
    (section,), (told,), (model,) = ck.of_kind("optimizer"), ck.optimizers.values(), ck.of_kind("model")
    tensors = OrderedDict((k, t) for k, t in model.value.items() if isinstance(t, Tensor))
    tensors._metadata = getattr(model.value, "_metadata", None)  # type: ignore[attr-defined]
    same = {k: storage_identity(t) or k for k, t in tensors.items()}
    names = told.naming.names
    for seed in range(20):
        mixed = shuffled(tensors, seed, keep_list)
        found = name_with(section.value, mixed, believed(ck.module_order, mixed), ck.names_given).names
        assert [n for i, n in found.items() if i in names and same[names[i]] != same[n]] == []


@pytest.mark.slow
def test_every_fixture_that_has_states_by_number_is_tried():
    named = [(known.name, o.naming) for known in WHOLE for o in known.open().optimizers.values()]
    assert {name for name, naming in named if naming.by != "fqn"} == {*BY_NUMBER, *NAMED_WHEN_READ}
