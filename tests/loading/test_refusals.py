"""A checkpoint that is damaged, does not fit, or changes while it is read is refused on every rank, and told by one."""

from __future__ import annotations

import itertools
import json
import math
import re
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import ckptools
from ckptools.errors import DamagedError, RefusedError
from tests.loading import refused
from tests.loading.refused import WAYS, WORLD, Ended
from tests.training.forked import exit_codes_of_ranks, run_ranks
from tests.truth import FIXTURES

SOON = 30
"""Seconds within which a load ends, however busy the machine is; gloo would wait for 60."""

Outcomes = dict[str, list[Ended]]

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


# -- four ranks --------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> Outcomes:
    """How every load ended on each of four ranks."""
    out = tmp_path_factory.mktemp("refused")
    run_ranks(WORLD, refused.load_all, out)
    found = json.loads((out / "ended.json").read_text())
    return {case: [Ended(*ended) for ended in of_ranks] for case, of_ranks in found.items()}


def told(outcomes: Outcomes, case: str, way: str) -> tuple[int, str]:
    """The rank that says why a load was refused, and its message; the others must point to it, and all end soon."""
    ended = outcomes[f"{case}: {way}"]
    assert all(one.error and one.seconds < SOON for one in ended)
    if all(one.error == "CheckpointException" for one in ended):
        # torch hands what one rank raised to all of them, and prints it with the lines of code on the way.
        (rank,) = {int(re.fullmatch(r".*dict_keys\(\[(\d)\]\)", one.text.splitlines()[0])[1]) for one in ended}  # type: ignore[index]
        return rank, ended[rank].text.strip().splitlines()[-1]
    silent = [n for n, one in enumerate(ended) if "says why" in one.text]
    (rank,) = set(range(WORLD)).difference(silent)
    assert all(ended[n].text.endswith(f": is not loaded; rank {rank} says why") for n in silent)
    return rank, f"{ended[rank].error}: {ended[rank].text}"


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
def test_a_sound_checkpoint_is_loaded_beside_them(outcomes: Outcomes, way: str) -> None:
    assert all(not one.error and not one.same for one in outcomes[f"sound: {way}"])


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    ("case", "words"),
    [
        ("a rank file is missing", "NOT WHOLE: rank 2 missing; 18 tensors have gaps; allow_missing=True loads what is"),
        ("a .distcp is missing", "NOT WHOLE: rank 2 missing; 4 values are lost, 20 tensors have gaps; allow_missing=T"),
        (
            "a rank file is cut",
            "NOT WHOLE: rank 1 cut short or damaged; 18 tensors have gaps; allow_missing=True loads",
        ),
        ("a .distcp is cut", "__1_0.distcp is cut short: "),
        ("a rank file is a pipe", "NOT WHOLE: rank 3 cut short or damaged"),
        ("a rank file is of another step", "NOT WHOLE: rank 2 of another save (step 4, others 3)"),
    ],
)
def test_what_rank_0_sees_as_it_opens_it_leaves_every_model_as_it_was(
    outcomes: Outcomes, case: str, words: str, way: str
) -> None:
    rank, text = told(outcomes, case, way)
    assert rank == 0
    assert text.startswith("NotWholeError: ")
    assert words in text
    assert all(one.same for one in outcomes[f"{case}: {way}"])


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    ("case", "words"),
    [
        ("a bit is flipped in a record of one rank", r"rank1.pt: \S+: record data/\d+"),
        ("a bit is flipped in a .distcp", r"__1_0.distcp: \S+: record data/0"),
        ("a bit is flipped in a record of all ranks", r"of all ranks: model.\d.weight: record data/\d"),
    ],
)
def test_a_flipped_bit_is_told_when_all_is_read(outcomes: Outcomes, case: str, words: str, way: str) -> None:
    rank, text = told(outcomes, case, way)
    assert rank == 0
    assert re.search(rf"DamagedError: .*{words}: CRC-32 is \w{{8}}, expected \w{{8}}; the file is damaged: take", text)
    assert text.endswith("load it as it is with unchecked=True; the tensors here may be filled in part")


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    ("case", "words"),
    [
        ("a file is cut while it is read", "rank1.pt: changed since it was opened: is a run still writing it?"),
        ("a file is rewritten while it is read", "rank1.pt: changed since it was opened: is a run still writing it?"),
        ("a file is replaced while it is read", "rank1.pt: changed since it was opened: is a run still writing it?"),
        (
            "a file is deleted while it is read",
            "rank1.pt: is not here, though rank 0 has opened it: was it deleted, or",
        ),
        ("one rank cannot read a file without checksums", "model.safetensors: cannot be read: input/output error"),
        ("a disk fails", ".pt: cannot be read: input/output error"),
    ],
)
def test_what_happens_while_it_is_read_is_told_once(outcomes: Outcomes, case: str, words: str, way: str) -> None:
    _, text = told(outcomes, case, way)
    assert "ReadError: " in text
    assert words in text
    assert text.endswith("; the tensors here may be filled in part")


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    ("case", "error"),
    [
        ("rank 0 has no memory to open it", "MemoryError"),
        ("rank 0 meets a bug as it opens it", "ZeroDivisionError"),
        ("rank 0 is interrupted as it opens it", "KeyboardInterrupt"),
    ],
)
def test_no_rank_waits_for_a_rank_0_that_failed(outcomes: Outcomes, case: str, error: str, way: str) -> None:
    rank, text = told(outcomes, case, way)
    assert rank == 0
    assert text.startswith(f"{error}: ")
    assert {one.error for one in outcomes[f"{case}: {way}"][1:]} == {"RefusedError"}


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    ("case", "error"),
    [("rank 2 has no memory to read it", "MemoryError"), ("rank 2 is interrupted as it reads it", "KeyboardInterrupt")],
)
def test_no_rank_waits_for_one_that_failed_as_it_read(outcomes: Outcomes, case: str, error: str, way: str) -> None:
    rank, text = told(outcomes, case, way)
    assert rank == 2
    assert error in text


@pytest.mark.slow
def test_all_tensors_of_another_shape_are_told_at_once(outcomes: Outcomes) -> None:
    rank, text = told(outcomes, "other sizes", "load")
    assert rank == 0
    assert "has 18 values of another shape: model.0.weight is [64, 64] there and [32, 32] here, model.0.bias is" in text
    assert all(one.same for one in outcomes["other sizes: load"])
    # Beside torch's own planner, torch refuses the first of them, on every rank.
    raw = outcomes["other sizes: dcp"]
    assert all("Size mismatch between saved torch.Size([64, 64])" in one.text and one.same for one in raw)


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
def test_all_tensors_of_another_dtype_are_told_at_once(outcomes: Outcomes, way: str) -> None:
    _, text = told(outcomes, "other dtypes", way)
    assert "has 18 values of another dtype: model.0.weight is float32 there and bfloat16 here, model.0.bias is" in text
    assert "cast=True converts while loading" in text
    assert all(one.same for one in outcomes[f"other dtypes: {way}"])


@pytest.mark.slow
@pytest.mark.parametrize(("when", "victim"), [("opening", 0), ("planning", 2), ("reading", 1)])
def test_no_rank_waits_for_one_that_was_killed(tmp_path: Path, when: str, victim: int) -> None:
    codes = exit_codes_of_ranks(WORLD, refused.lose_a_rank, tmp_path, when)
    assert codes == [-signal.SIGKILL if rank == victim else 0 for rank in range(WORLD)]
    for rank in {*range(WORLD)} - {victim}:
        ended = Ended(*json.loads((tmp_path / f"{when}-{rank}.json").read_text()))
        assert ended.error == "RendezvousError"
        assert ended.text.endswith("lost the connection to another rank, which ended first; its node says why")
        assert ended.seconds < SOON


@pytest.mark.slow
def test_a_key_that_one_rank_asks_for_and_the_checkpoint_lacks_is_refused_on_all(outcomes: Outcomes) -> None:
    rank, text = told(outcomes, "rank 1 asks for more", "dcp")
    assert rank == 0
    assert "lacks 1 key: model.more" in text
    assert all(one.same for one in outcomes["rank 1 asks for more: dcp"])


@pytest.mark.slow
def test_a_key_that_one_rank_does_not_ask_for_is_no_problem(outcomes: Outcomes) -> None:
    assert all(not one.error for one in outcomes["rank 1 asks for less: dcp"])


@pytest.mark.slow
def test_one_rank_of_several_loads_alone(outcomes: Outcomes) -> None:
    assert [one.error for one in outcomes["alone: load"]] == [""] * WORLD
    assert [one.same for one in outcomes["alone: load"]] == [True, True, False, True]


# -- one process -------------------------------------------------------------------------------------------------------


def saved(path: Path, model: nn.Module, **more: Any) -> Path:
    torch.save({"model": model.state_dict(), "step": 3, **more}, path)
    return path


def layers(*sizes: int) -> nn.Sequential:
    return nn.Sequential(*(nn.Linear(rows, columns) for rows, columns in itertools.pairwise(sizes)))


def refusal(model: nn.Module, path: Path, **options: Any) -> str:
    """The message with which a load into a model is refused; the model must be as it was."""
    before = [parameter.detach().clone() for parameter in model.parameters()]
    with pytest.raises(RefusedError) as refused:
        ckptools.load(model, path, **options)
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    return str(refused.value)


def test_missing_unexpected_and_misshapen_tensors_are_one_message_before_anything_is_read(tmp_path: Path) -> None:
    path = saved(tmp_path / "a.pt", nn.ModuleDict({"body": nn.Linear(3, 4), "head": nn.Linear(4, 2)}))
    running = nn.ModuleDict({"body": nn.Linear(3, 5), "top": nn.Linear(4, 2)})
    assert refusal(running, path) == (
        f"{path}: lacks 2 keys: model.top.bias, model.top.weight (the nearest to the first is model.head.bias); "
        "has 2 keys: model.head.weight, model.head.bias that nothing here asks for; "
        "rename='head.=top.' mends 2 of 2; "
        "has 2 values of another shape: model.body.weight is [4, 3] there and [5, 3] here, "
        "model.body.bias is [4] there and [5] here"
    )


def test_other_dtypes_are_refused_unless_casting_is_asked_for(tmp_path: Path) -> None:
    path, running = saved(tmp_path / "a.pt", layers(3, 4)), layers(3, 4).bfloat16()
    text = refusal(running, path)
    assert text.endswith(
        "has 2 values of another dtype: model.0.weight is float32 there and bfloat16 here, "
        "model.0.bias is float32 there and bfloat16 here; cast=True converts while loading"
    )
    ckptools.load(running, path, cast=True)
    assert torch.equal(running[0].weight, torch.load(path)["model"]["0.weight"].bfloat16())


def test_a_number_of_another_dtype_is_taken_only_if_it_stays_the_same(tmp_path: Path) -> None:
    """A count of steps may be an integer on one side; a weight of one element is not rounded without being asked."""

    def scaled(value: float, dtype: torch.dtype) -> nn.Module:
        model = nn.Module()
        model.register_parameter("scale", nn.Parameter(torch.tensor(value, dtype=dtype)))
        return model

    path, running = saved(tmp_path / "a.pt", scaled(0.1, torch.float32)), scaled(7.0, torch.bfloat16)
    with pytest.raises(RefusedError, match=r"model.scale is 0\.1\d*, which bfloat16 does not hold exactly; cast=True"):
        ckptools.load(running, path)
    ckptools.load(running, path, cast=True)
    assert running.scale == torch.tensor(0.1).bfloat16()
    ckptools.load(running, saved(tmp_path / "b.pt", scaled(0.25, torch.float32)))
    assert running.scale == 0.25


def test_other_shapes_are_refused_also_where_names_may_differ(tmp_path: Path) -> None:
    path = saved(tmp_path / "a.pt", layers(3, 4, 5))
    text = refusal(layers(3, 4, 6), path, strict=False)
    assert text.endswith(
        "has 2 values of another shape: model.1.weight is [5, 4] there and [6, 4] here, "
        "model.1.bias is [5] there and [6] here"
    )


def test_a_checkpoint_without_an_optimizer_says_so(tmp_path: Path) -> None:
    path, running = saved(tmp_path / "a.pt", layers(3, 4)), layers(3, 4)
    text = refusal(running, path, optimizer=torch.optim.AdamW(running.parameters()))
    assert re.search(r"lacks \d+ keys: optimizer.state.0.bias.exp_avg, ", text)
    assert text.endswith("; it holds no optimizer: load the model alone")


def test_a_tensor_in_the_place_of_another_value_is_refused(tmp_path: Path) -> None:
    class Counting(nn.Module):
        def __init__(self, state: object) -> None:
            super().__init__()
            self.state = state

        def get_extra_state(self) -> object:
            return self.state

    path = saved(tmp_path / "a.pt", Counting(torch.ones(3)))
    assert "has 1 value of another kind: model._extra_state is a tensor there and a str here" in refusal(
        Counting("a"), path
    )
    path = saved(tmp_path / "b.pt", Counting("a"))
    text = refusal(Counting(torch.ones(3)), path)
    assert "has 1 value of another kind: model._extra_state is no tensor there and a tensor here" in text


def test_a_missing_rank_leaves_a_model_on_the_meta_device(tmp_path: Path) -> None:
    """It is refused before memory is taken."""
    for rank in (0, 2):
        torch.save({"model": {f"{rank}.weight": torch.ones(2)}, "step": 3}, tmp_path / f"rank{rank}.pt")
    with torch.device("meta"):
        model = layers(3, 4)
    with pytest.raises(RefusedError):
        ckptools.load(model, tmp_path)
    assert model[0].weight.is_meta


def test_a_flipped_bit_is_loaded_if_checksums_are_not_wanted(tmp_path: Path) -> None:
    model = layers(64, 64)
    path = saved(tmp_path / "a.pt", model)
    refused.flip_a_bit(path)
    with pytest.raises(DamagedError, match=r"model.0.weight: record .*unchecked=True; the tensors here may be filled"):
        ckptools.load(layers(64, 64), path)
    with pytest.raises(DamagedError):
        ckptools.load_state_dict(path)
    running = layers(64, 64)
    ckptools.load(running, path, unchecked=True)
    assert (running[0].weight != model[0].weight).sum() == 1


def test_a_file_that_may_be_a_copy_of_another_is_warned_of(tmp_path: Path) -> None:
    shutil.copytree(FIXTURES / "megatron-tp2pp2-fp32" / "legacy", tmp_path / "a")
    first, second = (
        next((tmp_path / "a").rglob(f"mp_rank_{rank}/model_optim_rng.pt")) for rank in ("00_001", "01_001")
    )
    shutil.copy(first, second)
    with pytest.warns(UserWarning, match=r"warning of the source: CK009 rank 3: .* one may be a copy of the other"):
        ckptools.load_state_dict(tmp_path / "a")


def test_a_flipped_bit_is_noticed_also_in_a_record_of_which_nobody_keeps_the_padding(tmp_path: Path) -> None:
    shutil.copytree(FIXTURES / "fairscale-fsdp-nested", tmp_path / "a")
    path = tmp_path / "a" / "ckpt" / "checkpoint_5-shard3.pt"
    source = ckptools.open(path, all_ranks=True).model["lm_head.weight"].on_rank(3)[0].source
    assert source is not None and source.record_span[1] > 4 * math.prod(source.shape)
    data = bytearray(path.read_bytes())
    data[source.offset] ^= 1
    path.write_bytes(data)
    with pytest.raises(DamagedError, match=r"checkpoint_5-shard3\.pt: "):
        ckptools.load_state_dict(path)


def test_a_failed_load_may_leave_half_of_the_values(tmp_path: Path) -> None:
    """As its docstring says: what was read before the damaged record stays."""
    model = layers(8, 64, 64)
    path = saved(tmp_path / "a.pt", model)
    refused.flip_a_bit(path)
    running = layers(8, 64, 64)
    with pytest.raises(DamagedError, match="may be filled in part"):
        ckptools.load(running, path)
    assert torch.equal(running[0].weight, model[0].weight)
    assert (running[1].weight != model[1].weight).sum() == 1
