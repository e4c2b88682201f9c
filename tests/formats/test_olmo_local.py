"""OLMo's local checkpoints: the pieces of real FSDP1 flat parameters, saved with what torch says of them.

The fake process group makes each rank of a world that is not there; a rank's piece is its true part of the seeded
parameters, for FSDP cuts them before any collective.
"""

from __future__ import annotations

import warnings
from collections import namedtuple
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel

import ckptools
from ckptools.errors import CkptoolsError, NotWholeError, ReadError
from ckptools.formats import olmo_local
from ckptools.formats import options as limits
from ckptools.model.regions import Box
from ckptools.model.shards import Shard, Source
from ckptools.model.tensor import Tensor
from ckptools.training import strategies
from tests.fake_world import fake_group
from tests.pickles.test_tensors import same_bits

WORLD = 3
KEPT = ("_fqns", "_shapes", "_numels", "_numels_with_padding", "_shard_numel_padded", "_shard_param_infos")


class Unit(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(5, 7)
        self.scale = nn.Parameter(torch.tensor([2.5]))
        self.down = nn.Linear(7, 3, bias=False)


def net() -> nn.Module:
    torch.manual_seed(0)
    model = nn.Module()
    model.blocks = nn.ModuleList(Unit() for _ in range(2))
    model.emb = nn.Embedding(11, 5)
    return model


def flat_state(model: nn.Module) -> dict[str, Any]:
    """What OLMo's LocalShardedCheckpointer saves of a model."""
    modules = []
    for name, module in model.named_modules():
        if isinstance(module, FullyShardedDataParallel):
            flat = module._handle.flat_param
            handle = {f"flat_param.{key}": getattr(flat, key) for key in KEPT if hasattr(flat, key)}
            modules.append({"handles": [{"flat_param.data": flat.detach(), **handle}], "name": name})
    return {"modules": modules}


def optimizer_state(model: nn.Module) -> dict[str, Any]:
    """A plain optimizer state dict with OLMo's names; moments that are ten times the parameters."""
    names, params = zip(*model.named_parameters(), strict=True)
    state = {i: {"step": torch.tensor(4.0), "exp_avg": 10 * p.detach()} for i, p in enumerate(params) if p.numel()}
    return {
        "state": state,
        "param_groups": [{"lr": 0.1, "params": list(range(len(params))), "param_names": list(names)}],
    }


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> Path:
    root = tmp_path_factory.mktemp("olmo") / "step1000"
    for part in ("model", "optim", "train"):
        (root / part).mkdir(parents=True)
    for rank in range(WORLD):
        with warnings.catch_warnings(), fake_group(rank, WORLD):
            warnings.simplefilter("ignore")
            model = strategies.wrap_units(net(), Unit)
            torch.save(flat_state(model), root / "model" / f"rank{rank}.pt")
            torch.save(optimizer_state(model), root / "optim" / f"rank{rank}.pt")
            trainer = {"epoch": 0, "global_step": 1000, "rng": {"torch": torch.full((4,), rank)}}
            torch.save(trainer, root / "train" / f"rank{rank}.pt")
    (root / "metadata.yaml").write_text(f"world_size: {WORLD}\n")
    return root


@pytest.fixture
def root(made, tmp_path) -> Path:
    import shutil

    return shutil.copytree(made, tmp_path / "step1000")


def change(path: Path, how: Any) -> None:
    """Load a file with torch, change what it holds, save it again."""
    tree = torch.load(path, weights_only=False)
    how(tree)
    torch.save(tree, path)


@pytest.mark.parametrize("opened", [".", "model", "optim", "train/rank2.pt", "model/rank1.pt"])
def test_every_parameter_and_moment_is_put_together(made, opened):
    ck = ckptools.open(made / opened, all_ranks=True)
    wanted = {name: p.detach() for name, p in net().named_parameters()}
    assert (ck.whole, ck.format, ck.world_size.value, ck.step.value) == (True, "olmo_local", WORLD, 1000)
    assert set(ck.model) == set(wanted)
    for fqn, tensor in wanted.items():
        same_bits(ck.model[fqn].load(), tensor)
        same_bits(ck.optimizers["optim"].state[fqn]["exp_avg"].load(), 10 * tensor)


def test_the_files_of_few_ranks_are_all_read_for_what_they_do_not_tell_at_a_glance(made):
    ck = ckptools.open(made)
    assert (ck.all_ranks, ck.whole, ck.cost.files) == (True, True, 9)


def test_one_ranks_files_tell_every_shape_and_find_the_others(made, monkeypatch):
    monkeypatch.setattr(limits, "MAX_RANKS", 1)
    ck = ckptools.open(made)
    assert (ck.all_ranks, ck.whole, ck.cost.files) == (False, None, 3)
    assert {k: t.shape for k, t in ck.model.items()} == {k: tuple(p.shape) for k, p in net().named_parameters()}
    same_bits(ck.model["emb.weight"].load(), net().emb.weight.detach())
    same_bits(ck.model["emb.weight"][3:5], net().emb.weight.detach()[3:5])


@pytest.mark.parametrize("part", ["model", "optim"])
def test_a_missing_rank_is_named_and_nothing_is_written(root, part, tmp_path):
    (root / part / "rank1.pt").unlink()
    ck = ckptools.open(root)
    assert [(p.code, p.rank) for p in ck.problems] == [("CK001", 1)]
    with pytest.raises(NotWholeError):
        ckptools.consolidate(root, tmp_path / "out.pt")


def test_a_missing_last_rank_is_known_by_the_metadata(root):
    for part in ("model", "optim", "train"):
        (root / part / "rank2.pt").unlink()
    assert [(p.code, p.rank) for p in ckptools.open(root).problems] == [("CK001", 2)] * 3


def test_ordinary_state_dicts_in_such_folders_are_put_side_by_side(tmp_path):
    for part, tree in (("model", {"w": torch.ones(3)}), ("optim", {"state": {}, "param_groups": []})):
        (tmp_path / part).mkdir()
        for rank in range(2):
            torch.save(tree, tmp_path / part / f"rank{rank}.pt")
    ck = ckptools.open(tmp_path, all_ranks=True)
    assert (list(ck.tree), ck.whole, ck.model["w"].load().tolist()) == (["model", "optim"], True, [1, 1, 1])


Info = namedtuple("Info", "in_shard offset_in_shard numel_in_shard intra_param_start_idx intra_param_end_idx")


def infos(*changed: Info) -> Any:
    def how(tree: dict[str, Any]) -> None:
        handle = tree["modules"][1]["handles"][0]
        handle["flat_param._shard_param_infos"] = (*changed, *handle["flat_param._shard_param_infos"][len(changed) :])

    return how


def handle(**fields: Any) -> Any:
    return lambda tree: tree["modules"][1]["handles"][0].update({f"flat_param.{k}": v for k, v in fields.items()})


WRONG = {
    "a run outside the piece": infos(Info(True, 10_000, 4, 0, 3)),
    "a run outside the parameter": infos(Info(True, 0, 4, 33, 36)),
    "a run of another length": infos(Info(True, 0, 4, 0, 9)),
    "a negative start": infos(Info(True, -4, 4, 0, 3)),
    "a start that is no number": infos(Info(True, "0", 4, 0, 3)),
    "no account of the shards": handle(_shard_param_infos=None),
    "fewer shapes than names": handle(_shapes=()),
    "a shape that is none": handle(_shapes=("x",) * 4),
    "a name that is none": handle(_fqns=(1, 2, 3, 4)),
    "no data": handle(data=3),
    "a parameter twice": lambda tree: tree["modules"].append(tree["modules"][1]),
    "handles that are none": lambda tree: tree["modules"][1].update(handles=3),
}


@pytest.mark.parametrize("wrong", WRONG.values(), ids=WRONG)
def test_a_model_that_contradicts_itself_is_refused_in_one_line(root, wrong):
    change(root / "model" / "rank0.pt", wrong)
    with pytest.raises(ReadError, match="is not what OLMo writes") as caught:
        ckptools.open(root)
    assert "\n" not in str(caught.value) and str(caught.value).startswith(str(root / "model" / "rank0.pt"))


def test_a_run_that_covers_what_another_rank_has_is_refused(root, tmp_path):
    import shutil

    shutil.copy(root / "model" / "rank0.pt", root / "model" / "rank1.pt")
    with pytest.raises(CkptoolsError):
        ckptools.consolidate(root, tmp_path / "out.pt")


OPTIMIZERS = {
    "no names": lambda tree: tree["param_groups"][0].pop("param_names"),
    "fewer names": lambda tree: tree["param_groups"][0]["param_names"].pop(),
    "a name that is none": lambda tree: tree["param_groups"][0]["param_names"].__setitem__(0, 7),
    "a state of nobody": lambda tree: tree["state"].update({99: {}}),
    "a moment of another length": lambda tree: tree["state"][0].update(exp_avg=torch.ones(999)),
}


@pytest.mark.parametrize("wrong", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_an_optimizer_that_contradicts_the_model_is_refused_in_one_line(root, wrong):
    rank = next(r for r in range(WORLD) if 0 in torch.load(root / "optim" / f"rank{r}.pt")["state"])
    change(root / "optim" / f"rank{rank}.pt", wrong)
    with pytest.raises(ReadError, match="is not what OLMo writes") as caught:
        ckptools.open(root, all_ranks=True)
    assert str(caught.value).startswith(str(root / "optim" / f"rank{rank}.pt"))


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_file_that_is_a_link_out_of_the_folder_is_refused_unless_it_is_named(root, tmp_path, rank):
    file = root / "model" / f"rank{rank}.pt"
    file.rename(tmp_path / "elsewhere.pt")
    file.symlink_to(tmp_path / "elsewhere.pt")
    with pytest.raises(CkptoolsError, match="follow_symlinks"):
        ckptools.open(root)
    assert ckptools.open(file).whole


# -- torch before 2.1 --------------------------------------------------------------------------------------------


def held(numel: int) -> Tensor:
    source = Source(Path("x"), 100, "float32", (numel,), (1,), "data/0", (100, 4 * numel))
    return Tensor((numel,), "float32", (Shard(Box.whole((numel,)), None, source),))


def before(indices: object, offsets: object) -> dict[str, Any]:
    """A unit of three parameters, of 4, 6 and 2 elements, as torch 2.0 tells of a rank's 5 elements."""
    fields = {"data": held(5), "_fqns": ("a", "b", "c"), "_shapes": ((4,), (2, 3), (2,))}
    fields |= {"_shard_indices": indices, "_shard_param_offsets": offsets}
    return {
        "modules": [{"name": "_fsdp_wrapped_module.m", "handles": [{f"flat_param.{k}": v for k, v in fields.items()}]}]
    }


def test_the_account_of_torch_2_0_is_understood():
    found = olmo_local.read_model(before((1, 2), [(2, 5), (0, 0)]), 1, all_ranks=True)
    assert {k: t.shape for k, t in found.items()} == {"m.a": (4,), "m.b": (2, 3), "m.c": (2,)}
    assert [(str(s.box), s.source.offset) for s in found["m.b"].shards] == [("[0:1, 2:3]", 100), ("[1:2, 0:3]", 104)]
    assert [(str(s.box), s.source.offset) for s in found["m.c"].shards] == [("[0:1]", 116)]
    assert found["m.a"].shards == ()


@pytest.mark.parametrize(
    ("indices", "offsets"),
    [((2, 3), [(0, 1), (0, 1)]), ((-1, 0), [(0, 0)]), ((0, 0), [(0, 9)]), (None, []), ((0, 0), [(0,)]), (("a", 0), [])],
)
def test_an_account_of_torch_2_0_that_does_not_fit_is_refused(indices, offsets):
    with pytest.raises(ValueError):
        olmo_local.read_model(before(indices, offsets), 0, all_ranks=True)


def test_of_many_ranks_the_one_that_is_named_is_read_or_the_lowest(root, monkeypatch):
    monkeypatch.setattr(limits, "MAX_RANKS", 0)
    for path, rank in ((root, 0), (root / "optim" / "rank2.pt", 2), (root / "model" / "rank1.pt", 1)):
        ck = ckptools.open(path)
        assert [(f.rank, f.part) for f in ck.files if f.status == "read"] == [
            (rank, p) for p in ("model", "optim", "train")
        ]
        assert not ck.all_ranks and len(ck.files) == 9
    (root / "optim" / "rank2.pt").write_bytes(b"")
    with pytest.raises(ReadError, match="is empty"):
        ckptools.open(root / "model" / "rank2.pt")
    assert ckptools.open(root).format == "olmo_local"
