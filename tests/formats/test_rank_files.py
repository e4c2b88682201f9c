"""Sets of rank files: which belong together, which are missing, cut, stray or swapped, and what the content says."""

from __future__ import annotations

import io
import shutil
from pathlib import Path

import pytest
import torch

import ckptools
from ckptools.errors import ReadError
from ckptools.formats.rank_search import rank_checks
from ckptools.model.facts import RankFile
from ckptools.model.problems import Code
from tests.truth import FIXTURES

COMPOSER = FIXTURES / "composer-0.13.5-torch1.13.1-sharded-w4"
VERL = FIXTURES / "verl-fsdp2-bf16" / "ckpt" / "global_step_3" / "actor"
FSDP2 = FIXTURES / "torch2.4.1-fsdp2-w3"


@pytest.fixture
def composer(tmp_path) -> Path:
    return copy(COMPOSER, tmp_path / "run")


def copy(folder: Path, to: Path) -> Path:
    shutil.copytree(folder, to, ignore=shutil.ignore_patterns("truth*", "HOW.md"))
    return to


def codes(ck: ckptools.Checkpoint) -> list[str]:
    return [p.code for p in ck.problems]


def test_the_file_that_was_asked_for_must_be_readable(composer):
    (composer / "ep0-ba5-rank0.pt").write_bytes(b"PK\3\4 and no more")
    with pytest.raises(ReadError, match="cut short"):
        ckptools.open(composer / "ep0-ba5-rank0.pt")


def test_swapped_names_are_told_and_the_content_is_believed(composer):
    one, two = composer / "ep0-ba5-rank1.pt", composer / "ep0-ba5-rank2.pt"
    one.rename(composer / "x")
    two.rename(one)
    (composer / "x").rename(two)
    ck = ckptools.open(composer, all_ranks=True)
    assert codes(ck) == ["CK022", "CK022"] and ck.whole and ck.verdict.resumable is False
    straight = ckptools.open(COMPOSER, all_ranks=True)
    fqn = "model.emb.weight"
    assert ck.model[fqn].numpy().tobytes() == straight.model[fqn].numpy().tobytes()


@pytest.mark.parametrize("nbytes", [0, 30_000])
def test_a_folder_whose_first_file_is_damaged_is_told_by_the_others(composer, nbytes):
    first = composer / "ep0-ba5-rank0.pt"
    first.write_bytes(first.read_bytes()[:nbytes])
    ck = ckptools.open(composer)
    assert (ck.whole, [(p.code, p.rank) for p in ck.problems], ck.step.value) == (False, [("CK002", 0)], 5)


def test_a_folder_of_damaged_files_alone_is_unreadable(composer):
    for file in composer.glob("*.pt"):
        file.write_bytes(file.read_bytes()[:30_000])
    with pytest.raises(ReadError, match=r"ep0-ba5-rank0\.pt: is cut short"):
        ckptools.open(composer)


@pytest.mark.parametrize("value", ["trained", 0, 1, 1e-5])
def test_equal_files_for_different_places_may_be_copies_unless_their_values_are_all_alike(tmp_path, value):
    actor = copy(FIXTURES / "verl-fsdp1", tmp_path / "run") / "ckpt" / "global_step_3" / "actor"
    files = [actor / f"optim_world_size_4_rank_{rank}.pt" for rank in range(4)]
    state, memory = torch.load(files[0], weights_only=False), io.BytesIO()  # an archive without the name of its file
    torch.save(state if value == "trained" else _filled(state, value), memory)
    files[0].write_bytes(memory.getvalue())
    shutil.copyfile(files[0], files[1])
    ck = ckptools.open(actor, all_ranks=True)
    found = [(p.code, p.severity, p.rank, p.files) for p in ck.problems if p.kind is Code.STRAY_FILE]
    assert found == ([("CK009", "warning", 1, (files[1].name, files[0].name))] if value == "trained" else [])


def _filled(tree, value):
    if isinstance(tree, torch.Tensor):
        return torch.full_like(tree, value) if tree.dim() else tree
    return {k: _filled(v, value) for k, v in tree.items()} if isinstance(tree, dict) else tree


def test_a_rank_beyond_the_world_is_stray(composer):
    shutil.copy(composer / "ep0-ba5-rank1.pt", composer / "ep0-ba5-rank9.pt")
    stray, _ = problems = ckptools.open(composer).problems
    assert [(p.code, p.rank) for p in problems] == [("CK009", 9), ("CK010", 9)]
    assert "2 files say they are rank 1" in stray.message


def test_a_rank_beyond_the_world_is_stray_by_its_name_alone(composer, large_world):
    shutil.copy(composer / "ep0-ba5-rank1.pt", composer / "ep0-ba5-rank9.pt")
    assert [(p.code, p.rank) for p in ckptools.open(composer).problems] == [("CK009", 9)]


def test_ranks_of_another_run_are_refused_by_shape_or_layout(composer, tmp_path):
    shutil.copy(FSDP2 / "rank1.pt", composer / "ep0-ba5-rank1.pt")
    ck = ckptools.open(composer, all_ranks=True)
    assert not ck.whole and "CK103" in codes(ck)


def test_a_lone_shard_of_a_bigger_world_is_read_and_its_siblings_are_told(composer, tmp_path):
    (tmp_path / "one").mkdir()
    shutil.copy(composer / "ep0-ba5-rank2.pt", tmp_path / "one")
    ck = ckptools.open(tmp_path / "one" / "ep0-ba5-rank2.pt")
    assert (ck.world_size.value, ck.world_size.sources, ck.ranks) == (4, ("layout",), (2,))
    assert ck.model["model.emb.weight"].shape == (33, 17)
    assert [p.rank for p in ck.problems] == [0, 1, 3]


def test_a_monolithic_rank0_file_is_whole(tmp_path):
    torch.save({"state": {"model": {"w": torch.ones(3)}}, "rng": []}, tmp_path / "ep0-ba5-rank0.pt")
    ck = ckptools.open(tmp_path / "ep0-ba5-rank0.pt")
    assert (ck.whole, ck.problems, ck.step.value) == (True, (), 5)
    assert "every tensor whole" in ck.saved_as


def test_the_three_files_of_a_verl_rank_are_one_checkpoint(tmp_path):
    ck = ckptools.open(VERL / "optim_world_size_4_rank_2.pt")
    assert [s.kind for s in ck.sections] == ["model", "optimizer", "scheduler", "rng"]
    folder = copy(VERL, tmp_path / "actor")
    (folder / "optim_world_size_4_rank_3.pt").unlink()
    (problem,) = ckptools.open(folder).problems
    assert (problem.code, problem.rank) == ("CK001", 3)
    assert "optim_world_size_4_rank_3.pt" in problem.message


def test_a_file_that_is_opened_alone_says_of_which_ranks_others_are_beside_it(composer, tmp_path):
    ck = ckptools.open(composer / "ep0-ba5-rank0.pt", only_this_file=True)
    (note,) = (p for p in ck.problems if p.code == "CK013")
    assert note.message == "files beside it are of ranks 1..3 by their names; left out by only_this_file=True"
    assert note.files == ("ep0-ba5-rank1.pt", "ep0-ba5-rank2.pt", "ep0-ba5-rank3.pt")
    lone = shutil.copy(composer / "ep0-ba5-rank0.pt", tmp_path)
    assert not any(p.code == "CK013" for p in ckptools.open(lone, only_this_file=True).problems)


def test_equal_valued_shards_are_not_taken_for_replicas():
    ck = ckptools.open(FSDP2, all_ranks=True)
    norm = ck.model["blocks.0.ln.weight"]
    assert norm.shape == (17,) and len({s.box for s in norm.shards}) == 3


@pytest.mark.slow
def test_a_forged_world_size_costs_little(tmp_path):
    torch.save({"w": torch.ones(2)}, tmp_path / "model_world_size_9999999_rank_0.pt")
    ck = ckptools.open(tmp_path / "model_world_size_9999999_rank_0.pt")
    assert len(ck.files) <= 1 << 16


def test_a_file_copied_over_anothers_is_said_to_hold_another_rank(tmp_path):
    folder = shutil.copytree(FSDP2, tmp_path / "run")
    shutil.copy(folder / "rank0.pt", folder / "rank2.pt")
    problems = ckptools.open(folder, all_ranks=True).problems
    told = {p.code: p.message for p in problems}
    assert {p.rank for p in problems} == {2}
    assert told["CK001"] == "no file holds it; rank2.pt holds another"
    assert told["CK009"] == "2 files say they are rank 0: rank0.pt, rank2.pt"


def found(*sizes: int, world: int) -> list[str]:
    """Codes of what is wrong with files of so many bytes, one of each rank."""
    files = [RankFile(Path(f"rank{r}.pt"), r, "", "read", nbytes, 0.0) for r, nbytes in enumerate(sizes)]
    return [problem.code for problem in rank_checks.check_files(files, {}, world, sharded=True)]


def test_a_file_of_the_first_rank_behind_its_world_is_stray():
    assert (found(9, 9, world=2), found(9, 9, 9, world=2)) == ([], ["CK009"])


def test_a_file_of_less_than_half_the_usual_size_is_odd():
    assert (found(100, 100, 50, world=3), found(100, 100, 49, world=3)) == ([], ["CK003"])


def test_a_name_that_one_rank_lacks_is_an_error_with_the_ranks(tmp_path):
    for rank in range(4):
        model = {"a": torch.ones(2), **({"b": torch.ones(2)} if rank != 2 else {})}
        torch.save({"model": model}, tmp_path / f"rank{rank}.pt")
    (problem,) = [p for p in ckptools.open(tmp_path, all_ranks=True).problems if p.tensor == "model.b"]
    assert (problem.rank, problem.ranks) == (2, (2,))
    assert problem.message == "rank 2 lacks it; the other 3 ranks have it"


def test_a_file_that_is_far_smaller_than_the_others_is_named_with_both_sizes(tmp_path):
    for rank in range(3):
        torch.save({"model": {"a": torch.ones(8 if rank == 1 else 50_000)}}, tmp_path / f"rank{rank}.pt")
    sizes = [(tmp_path / f"rank{rank}.pt").stat().st_size for rank in range(3)]
    (message,) = [p.message for p in ckptools.open(tmp_path, all_ranks=True).problems if "bytes, others" in p.message]
    assert message == f"rank1.pt has {sizes[1]} bytes, others {sizes[0]}"
