"""Every check says how much it looked at: `ok` covers only that, and nothing that nobody looked at."""

from __future__ import annotations

import shutil
import warnings
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

import ckptools
from ckptools.doctor.answers import FACTS, IN_STEP, VALUES
from ckptools.model.problems import Code, Problem
from ckptools.verify.record import Check, judged, not_judged, without
from tests.thorough import examples
from tests.truth import FIXTURES


def check(path: Path, name: str, **how: bool) -> Check:
    return next(c for c in ckptools.verify(path, **how).checks if c.name.startswith(name))


@pytest.mark.parametrize(
    ("looked_at", "of", "result"), [(3, 3, "ok"), (2, 3, "partly"), (0, 3, "not judged"), (0, 0, "not judged")]
)
def test_a_check_without_problems_is_ok_only_if_it_looked_at_everything(looked_at, of, result):
    found = judged("rng", [], "2 states", looked_at=looked_at, of=of, rest="no file has the others")
    assert (found.result, found.looked_at, found.of) == (result, looked_at, of)


def test_the_reason_for_the_rest_is_in_the_detail():
    found = judged("rng", [], "2 states", looked_at=2, of=3, rest="no file has the others")
    assert found.detail == "2 states; 2 of 3 looked at: no file has the others"
    assert found.not_ok == f"partly: {found.detail}"
    assert not_judged("rng", "no RNG state").not_ok == "not judged: no RNG state"


@pytest.mark.parametrize(("severity", "result"), [("error", "FAIL"), ("warning", "warn"), ("note", "not judged")])
def test_a_problem_counts_whatever_was_looked_at(severity, result):
    problem = Problem(Code.VALUE_LOST, "", severity=severity)
    assert judged("rng", [problem], "", looked_at=0, of=0).result == result


def test_a_check_whose_problems_are_ignored_is_not_ok():
    found = judged("rng", [Problem(Code.VALUE_LOST, "")], "2 states", looked_at=2, of=2)
    assert without(found, {"CK005"}).result == "partly"
    assert without(found, {"CK005"}).detail == "1 problem ignored; 2 states"
    assert without(found, {"CK001"}) is found


def test_checksums_of_safetensors_are_not_judged(tmp_path):
    save_file({"a": torch.rand(4)}, tmp_path / "a.safetensors")
    found = check(tmp_path / "a.safetensors", "checksums", deep=True)
    assert (found.not_ok, found.looked_at, found.of) == ("not judged: no checksum in this format", 0, 1)


def test_integers_have_no_values_that_are_not_finite(tmp_path):
    torch.save({"a": torch.arange(4)}, tmp_path / "a.pt")
    found = check(tmp_path / "a.pt", "finite", values=True)
    assert (found.not_ok, found.of) == ("not judged: integers are always finite", 0)


def test_an_infinity_in_complex_halves_is_found(tmp_path):
    with warnings.catch_warnings(action="ignore"):  # torch says once for each process that it is experimental
        torch.save({"a": torch.tensor([1, float("inf")], dtype=torch.complex32)}, tmp_path / "a.pt")
    found = check(tmp_path / "a.pt", "finite", values=True)
    assert [str(p) for p in found.problems] == ["CK201  a  1 NaN, first at [1]"]


def test_empty_tensors_have_nothing_to_look_at(tmp_path):
    torch.save({"a": torch.empty(0)}, tmp_path / "a.pt")
    for name in ("checksums", "finite"):
        found = check(tmp_path / "a.pt", name, deep=True, values=True)
        assert (found.not_ok, found.of) == ("not judged: no tensor has bytes here", 0)


def test_what_a_lost_file_held_was_not_looked_at(tmp_path):
    for path in (FIXTURES / "torch2.13.0-fsdp1-sharded-w4").glob("rank[0-2].pt"):
        shutil.copy(path, tmp_path)
    results = {c.name: c.result for c in ckptools.verify(tmp_path, deep=True, values=True).checks}
    partly = ("one save", "ranks agree on layout", "checksums (CRC-32)", "finite values", "values in range")
    assert [results[name] for name in partly] == ["partly"] * 5
    rows = {row.question: row for row in ckptools.doctor(tmp_path, deep=True).rows}
    assert (rows[FACTS].answer, rows[VALUES].answer) == ("partly", "partly")
    assert "ranks agree on layout: partly: 3 of 4 looked at" in rows[FACTS].evidence


# -- whatever a checkpoint holds --------------------------------------------------------------------------------------


class Parts(NamedTuple):
    """What a drawn checkpoint holds; checks have nothing to look at where it is not there."""

    layers: int
    integers: bool
    optimizer: str
    scheduler: bool
    step: bool
    named: bool
    rng: bool
    ranks: int
    container: str


PARTS = st.builds(
    Parts,
    layers=st.integers(0, 6),
    integers=st.booleans(),
    optimizer=st.sampled_from(["", "SGD", "Adam"]),
    scheduler=st.booleans(),
    step=st.booleans(),
    named=st.booleans(),
    rng=st.booleans(),
    ranks=st.sampled_from([1, 2]),
    container=st.sampled_from(["pt", "safetensors"]),
)


def saved(parts: Parts, folder: Path) -> Path:
    """Save it; of safetensors the tensors of the model alone."""
    torch.manual_seed(0)
    layers = torch.nn.ModuleDict({str(n): torch.nn.Linear(4, 4) for n in range(parts.layers)})
    model = {f"layers.{name}": tensor for name, tensor in layers.state_dict().items()}
    model |= {"ids": torch.arange(9).reshape(3, 3)} if parts.integers or not model else {}
    if parts.container == "safetensors":
        save_file(model, folder / "model.safetensors")
        return folder / "model.safetensors"
    optimizer = getattr(torch.optim, parts.optimizer or "SGD")(
        layers.parameters() if parts.layers else [torch.nn.Parameter(torch.ones(2))], lr=0.1
    )
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: 1.0)
    for _ in range(3):
        for parameter in optimizer.param_groups[0]["params"]:
            parameter.grad = torch.ones_like(parameter)
        optimizer.step()
        scheduler.step()
    whole: dict[str, Any] = {"model": model}
    whole |= {"optimizer": optimizer.state_dict()} if parts.optimizer else {}
    whole |= {"scheduler": scheduler.state_dict()} if parts.scheduler else {}
    whole |= {"global_step": 3} if parts.step else {}
    for rank in range(parts.ranks):
        own = {"rng": {"torch": torch.Generator().manual_seed(rank).get_state()}} if parts.rng else {}
        name = f"{'step3-' if parts.named else ''}rank{rank}.pt" if parts.ranks > 1 else "step3.pt"
        torch.save({**whole, **own}, folder / (name if parts.named or parts.ranks > 1 else "x.pt"))
    return folder if parts.ranks > 1 else next(folder.iterdir())


def empty_checks(parts: Parts) -> set[str]:
    """The checks that cannot look at everything, as nothing is there for them or not enough."""
    pickled = parts.container == "pt"
    adam, schedule = pickled and parts.optimizer == "Adam", pickled and parts.scheduler
    counting = adam + schedule + (pickled and (parts.step or parts.named))
    several = pickled and parts.ranks > 1
    floats = bool(parts.layers) or adam or (pickled and parts.optimizer)
    there = {
        "ranks agree on layout": several,
        "checksums (CRC-32)": pickled,
        "finite values": floats,
        "values in range": bool(parts.layers),
        "values in line": parts.layers >= 5,
        "copies equal": several,
        "optimizer covers params": adam,
        "step counters": counting > 1,
        "lr: scheduler = groups": schedule and bool(parts.optimizer),
        "rng": several and parts.rng,
        "names in pickles": pickled,
    }
    return {name for name, here in there.items() if not here}


@given(parts=PARTS)
@settings(deadline=None, max_examples=examples(90), suppress_health_check=list(HealthCheck))
def test_nothing_is_called_ok_that_nobody_looked_at(parts, tmp_path_factory):
    path = saved(parts, tmp_path_factory.mktemp("drawn"))
    found = ckptools.verify(path, deep=True, values=True)
    for check in found.checks:
        assert check.result != "ok" or check.looked_at == check.of > 0, check
        assert not (check.name in empty_checks(parts) and check.result in ("ok", "partly")), check
    results = {check.name: check.result for check in found.checks}
    behind = {
        VALUES: ("checksums (CRC-32)", "finite values", "values in range", "values in line"),
        IN_STEP: ("optimizer covers params", "step counters", "lr: scheduler = groups"),
    }
    for row in ckptools.doctor(path, deep=True).rows:
        good = row.ok or row.answer == "yes"
        assert not good or all(results[name] == "ok" for name in behind.get(row.question, ())), row
        stated = (parts.step + parts.named + parts.scheduler) * (parts.container == "pt")
        assert not (good and row.question == FACTS and stated < 2), row


def test_of_safetensors_nobody_says_that_every_byte_was_read(tmp_path):
    save_file({"a.weight": torch.rand(4, 4)}, tmp_path / "a.safetensors")
    found = ckptools.verify(tmp_path / "a.safetensors", deep=True)
    assert found.verdict.depth == "structure"
    (whole, *_) = ckptools.doctor(tmp_path / "a.safetensors", deep=True).rows
    assert whole.evidence.endswith("every rank read; checksums (CRC-32): not judged: no checksum in this format")
