"""Experts in legacy Megatron checkpoints: numbered on each expert-parallel rank, maybe cut over ranks of their own."""

from __future__ import annotations

from argparse import Namespace
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

import ckptools
from ckptools.errors import NotWholeError
from tests.state_dicts import state_dict

LAYER = "decoder.layers.0.mlp."


@dataclass
class Spread:
    """A layer of experts over `tp` tensor- and `ep` expert-parallel ranks, each expert cut over `etp`."""

    tp: int = 1
    ep: int = 2
    etp: int = 1
    experts: int = 4
    engine: bool = False
    gated: bool = True

    def name(self, number: int, fc: int) -> str:
        module = f"linear_fc{fc}.weight"
        return f"{LAYER}experts.{module}{number}" if self.engine else f"{LAYER}experts.local_experts.{number}.{module}"

    def full(self) -> dict[str, torch.Tensor]:
        shapes = {"embedding.word_embeddings.weight": (8, 4), f"{LAYER}router.weight": (self.experts, 4)}
        for n in range(self.experts):
            shapes |= {self.name(n, 1): (12 if self.gated else 6, 4), self.name(n, 2): (4, 6)}
        return {
            k: torch.randn(s, generator=torch.Generator().manual_seed(n)) for n, (k, s) in enumerate(shapes.items())
        }

    def cut(self, full: torch.Tensor, fc: int, rank: int) -> torch.Tensor:
        halves = full.chunk(2) if fc == 1 and self.gated else [full]
        return torch.cat([half.chunk(self.etp, 0 if fc == 1 else 1)[rank] for half in halves])

    def save(self, folder: Path) -> dict[str, torch.Tensor]:
        """Write what each rank of the first expert-data-parallel group writes."""
        full, each = self.full(), self.experts // self.ep
        args = {"tensor_model_parallel_size": self.tp, "expert_model_parallel_size": self.ep, "num_layers": 1}
        args |= {"expert_tensor_parallel_size": self.etp, "pipeline_model_parallel_size": 1, "world_size": 8}
        for rank in range(max(self.etp * self.ep, self.tp)):
            tp, ep = rank % self.tp, rank // self.etp % self.ep
            model = {"embedding.word_embeddings.weight": full["embedding.word_embeddings.weight"].chunk(self.tp)[tp]}
            model[f"{LAYER}router.weight"] = full[f"{LAYER}router.weight"]
            for i in range(each):
                for fc in (1, 2):
                    model[self.name(i, fc)] = self.cut(full[self.name(ep * each + i, fc)], fc, rank % self.etp)
            tree = {"args": Namespace(**args, rank=rank), "checkpoint_version": 3.0, "iteration": 3}
            place = folder / "iter_0000003" / (f"mp_rank_{tp:02d}" + (f"_{ep:03d}" if self.ep > 1 else ""))
            place.mkdir(parents=True)
            tree["model"] = state_dict({k: t.clone() for k, t in model.items()})
            torch.save(tree, place / "model_optim_rng.pt")
        return full


SPREADS = [
    Spread(),
    Spread(engine=True),
    Spread(ep=4, gated=False),
    Spread(tp=2, etp=2, ep=2),
    Spread(tp=2, etp=2, ep=4, engine=True),
    Spread(tp=2, etp=1, ep=2),
    Spread(tp=2, etp=1, ep=4),
    Spread(tp=4, etp=1, ep=2, engine=True),
    Spread(tp=2, etp=2, ep=1),
    Spread(tp=2, etp=1, ep=1),
]


@pytest.mark.parametrize("spread", SPREADS)
def test_experts_have_the_models_numbers_and_no_file_is_missed(tmp_path, spread):
    full = spread.save(tmp_path)
    ck = ckptools.open(tmp_path, all_ranks=True)
    assert (ck.whole, [str(p) for p in ck.problems if p.severity != "note"]) == (True, [])
    assert sorted(ck.model) == sorted(full)
    assert all(torch.equal(ck.model[name].load(), tensor) for name, tensor in full.items())


def test_what_is_whole_can_be_written(tmp_path):
    full = Spread(tp=2, etp=1, ep=4).save(tmp_path)
    ckptools.consolidate(tmp_path, tmp_path / "out.pt")
    saved = torch.load(tmp_path / "out.pt", weights_only=True)["model"]
    assert all(torch.equal(saved[name], tensor) for name, tensor in full.items())


@pytest.mark.slow
@pytest.mark.parametrize("spread", SPREADS[:-1])
def test_every_file_that_is_missing_is_named(tmp_path, spread):
    spread.save(tmp_path)
    for file in (tmp_path / "iter_0000003").glob("*/*.pt"):
        away = file.rename(tmp_path / "away")
        assert any((tmp_path / "iter_0000003").glob("*/*.pt")), "the last one"
        ck = ckptools.open(tmp_path, all_ranks=True)
        assert not ck.whole and any(f"no file {file.parent.name}/" in str(p) for p in ck.problems)
        with pytest.raises(NotWholeError):
            ckptools.consolidate(tmp_path, tmp_path / "out.pt", only="model")
        away.rename(file)


@pytest.mark.parametrize("lost", [0, 1, 3])
def test_experts_that_only_the_router_knows_of_are_missed_without_arguments(tmp_path, lost):
    spread = Spread(ep=4)
    spread.save(tmp_path)
    for rank, file in enumerate(sorted((tmp_path / "iter_0000003").glob("*/*.pt"))):
        tree = torch.load(file, weights_only=False)
        tree["args"] = Namespace(tensor_model_parallel_size=1, pipeline_model_parallel_size=1)
        torch.save(tree, file)
        if rank >= 4 - lost:
            file.unlink()
    ck = ckptools.open(tmp_path, all_ranks=True)
    assert ck.whole is (lost == 0)
    assert {p.code for p in ck.problems if p.severity == "error"} <= {"CK001", "CK107"}


def test_files_of_two_expert_ranks_that_were_swapped_are_noticed_by_their_arguments(tmp_path):
    Spread().save(tmp_path)
    one, other = sorted((tmp_path / "iter_0000003").glob("*/*.pt"))
    kept = one.read_bytes()
    one.write_bytes(other.read_bytes())
    other.write_bytes(kept)
    problems = ckptools.open(tmp_path, all_ranks=True).problems
    assert sum("holds expert-parallel rank" in p.message for p in problems) == 2


def test_a_file_copied_over_another_expert_ranks_is_noticed_by_its_checksums(tmp_path):
    Spread().save(tmp_path)
    one, other = sorted((tmp_path / "iter_0000003").glob("*/*.pt"))
    other.write_bytes(one.read_bytes())
    problems = ckptools.open(tmp_path, all_ranks=True).problems
    assert {p.severity for p in problems if p.code == "CK009"} == {"warning"}  # a converter writes all as one rank


def test_experts_that_are_all_made_of_one_layer_are_no_copies(tmp_path):
    Spread().save(tmp_path)
    for file in (tmp_path / "iter_0000003").glob("*/*.pt"):
        tree = torch.load(file, weights_only=False)
        for name in (n for n in tree["model"] if "experts" in n):
            tree["model"][name] = torch.arange(float(tree["model"][name].numel())).view_as(tree["model"][name])
        torch.save(tree, file)
    assert ckptools.open(tmp_path, all_ranks=True).whole


def test_experts_cut_over_other_ranks_are_refused_by_name(tmp_path):
    Spread(tp=4, etp=2, ep=2).save(tmp_path)
    with pytest.raises(NotWholeError, match="experts are tensor-parallel over 2 ranks and everything else over 4"):
        ckptools.consolidate(tmp_path, tmp_path / "out.pt")


def test_routers_that_differ_between_expert_ranks_are_refused(tmp_path):
    Spread().save(tmp_path)
    file = tmp_path / "iter_0000003" / "mp_rank_00_001" / "model_optim_rng.pt"
    tree = torch.load(file, weights_only=False)
    tree["model"][f"{LAYER}router.weight"][0, 0] += 1
    torch.save(tree, file)
    with pytest.raises(NotWholeError, match=r"router\.weight"):
        ckptools.consolidate(tmp_path, tmp_path / "out.pt")
