from __future__ import annotations

import json
import os
import pickle
import re
import shutil
import subprocess
import sys
import zipfile
from collections import OrderedDict
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

import ckptools
from ckptools.cli import app
from ckptools.inspect.record import inspect_report, report_text
from ckptools.model.tree import tensors_in
from tests.truth import FIXTURES, LOCAL, WHOLE, Known, load_truth

COMPOSER = FIXTURES / "composer-0.13.5-torch1.13.1-sharded-w4"
RANK_0 = COMPOSER / "ep0-ba5-rank0.pt"
SAMPLES = (*WHOLE, *LOCAL)

DOUBTS = {
    "bytecheckpoint-fsdp2": "whole, 1 warning: 1 file missing",
    "dcp-hf": "8 files, each whole in itself; files that are not here may hold more; 1 warning: ",
    "dcp-ddp-number-plain-w2": "whole, 1 warning: optimizer state without a sure name: optim",
    "deepspeed-z3-bf16": (
        "whole, 1 warning: copies that should be equal differ: model.stats.running_mean (ranks 1..3)"
    ),
    "lightning-trainer-ddp": "whole, 1 warning: optimizer state without a sure name: ",
    "torch2.6.0-fsdp1-local-w4": "whole, not joinable: ",
}
"""How the verdict begins on samples that are whole and of which something is doubtful."""


def run(*args: object) -> tuple[int, str, str]:
    result = CliRunner().invoke(app, ["inspect", *map(str, args)])
    return result.exit_code, result.stdout, result.stderr


def process(*args: object, **more: Any) -> subprocess.CompletedProcess[bytes]:
    command = [sys.executable, "-m", "ckptools", "inspect", *map(str, args)]
    return subprocess.run(command, capture_output=True, timeout=60, **more)


def as_json(*args: object) -> dict[str, Any]:
    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is no JSON")

    made: dict[str, Any] = json.loads(run(*args, "--json")[1], parse_constant=refuse)
    return made


def composer_copy(folder: Path, *ranks: int) -> Path:
    for rank in ranks:
        shutil.copy(COMPOSER / f"ep0-ba5-rank{rank}.pt", folder)
    return folder / f"ep0-ba5-rank{ranks[0]}.pt"


def write_pt(file: Path, tree: Any) -> Path:
    """A torch.save file without tensors, made without torch."""
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("archive/data.pkl", pickle.dumps(tree, protocol=2))
        archive.writestr("archive/version", "3\n")
    return file


# -- real checkpoints --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("known", SAMPLES, ids=lambda known: known.name)
def test_every_sample_is_shown(known):
    code, out, err = run(known.file)
    assert code == 0, err
    step = "not found" if known.step is None else known.step
    assert out.splitlines()[2].startswith(DOUBTS.get(known.name, "whole: ")) and re.search(rf"\n  step +{step}\s", out)
    assert err.splitlines()[1].startswith("read the metadata of ")


def truth_of(known: Known) -> tuple[dict[str, Any], set[int]]:
    """What the framework itself said: `truth.json`, where there is one, and the elements of the model, tied ones once.

    DCP writes a tied tensor under each of its names, so the other number is right as well.
    """
    file = FIXTURES / known.name / "truth.json"
    told = json.loads(file.read_text()) if file.exists() else {}
    twice = tuple(name for tied in told.get("tied", []) for name in tied[1:])
    buffers = [k for k in load_truth(known.name) if k.startswith("buffer/") and not k.startswith(known.absent or "-")]
    shapes = {k: shape for k, (_, _, shape) in load_truth(known.name).items() if k.startswith(("model/", *buffers))}
    once = sum(prod(shape) for name, shape in shapes.items() if not name.endswith(twice or "/"))
    return told, {once, sum(map(prod, shapes.values()))}


# Its moments are beside no param groups, so that no torch optimizer saved them; they are told as a section.
NO_GROUPS = "torch2.15.0-checkpointable-tensor-w4"


@pytest.mark.slow
@pytest.mark.parametrize("known", WHOLE, ids=lambda known: known.name)
def test_json_agrees_with_the_truth(known):
    made = as_json(known.file, "--all-ranks")
    told, params = truth_of(known)
    assert made["step"]["value"] == known.step
    assert made["world_size"]["value"] in (
        (told.get("world_size", known.world_size),) if known.world_size > 1 else (1, None)
    )
    (model,) = [s for s in made["sections"] if s["kind"] == "model"]
    assert model["params"] in params
    has_state = any(key.startswith("optim/") for key in load_truth(known.name)) and known.name != NO_GROUPS
    assert bool(made["optimizers"]) == (has_state and "optim/" not in known.absent)
    if made["optimizers"] and "param_groups" in told:
        check_optimizers(made, told)


def check_optimizers(made: dict[str, Any], told: dict[str, Any]) -> None:
    groups = [group for optimizer in made["optimizers"] for group in optimizer["param_groups"]]
    assert [g["lr"] for g in groups] == [g["lr"] for g in told["param_groups"]]
    assert [g["weight_decay"] for g in groups] == [g["weight_decay"] for g in told["param_groups"]]
    if not told.get("scheduler"):
        return
    scheduler = told["scheduler"].get("LambdaLR", told["scheduler"])
    step = next(k for k in ("last_epoch", "num_steps", "last_batch_iteration") if k in scheduler)
    assert made["schedulers"][0]["state"][step] == scheduler[step]


# Of compressed items no bytes are a tensor's own; that they are not unpacked is a test of DCP.
PLAIN = [known for known in SAMPLES if known.name != "dcp-zstd"]


@pytest.mark.slow
@pytest.mark.parametrize("known", PLAIN, ids=lambda known: known.name)
def test_no_tensor_bytes_are_read(known, tmp_path):
    """The report of a copy whose tensor bytes are all wrong is the same, byte for byte."""
    original = FIXTURES / known.name
    folder = tmp_path / "fixtures" / known.name
    shutil.copytree(original, folder)
    ck = ckptools.open(known.file, all_ranks=True)
    before = report_text(inspect_report(ck))
    for source in (s.source for _, t in tensors_in(ck.tree) for s in t.found):
        overwrite(folder / source.path.relative_to(original), *source.record_span)
    again = ckptools.open(folder / known.path, all_ranks=True)
    assert without_places(report_text(inspect_report(again))) == without_places(before)
    assert again.cost.nbytes < sum(f.nbytes for f in again.files)


def overwrite(file: Path, start: int, size: int) -> None:
    with file.open("r+b") as raw:
        raw.seek(start)
        raw.write(b"\xff" * size)


def without_places(report: str) -> list[str]:
    """All but the lines that a copy has of its own: its folder and its time."""
    # Columns are as wide as the times need.
    return [" ".join(line.split()) for line in report.splitlines()[1:] if not line.startswith("  saved")]


def test_little_of_a_large_file_is_read(tmp_path):
    import torch

    torch.save({"model": {"w": torch.zeros(1 << 20)}}, tmp_path / "large.pt")
    assert as_json(tmp_path / "large.pt")["read"]["bytes"] < 4096


# -- whole or not ------------------------------------------------------------------------------------------------


def test_a_missing_rank_is_named_first(tmp_path):
    code, out, _ = run(composer_copy(tmp_path, 0, 1, 2))
    assert code == 1
    assert out.splitlines()[2:4] == ["NOT WHOLE: rank 3 missing", "  CK001  rank 3: no file ep0-ba5-rank3.pt"]


def test_a_cut_rank_is_named_first(tmp_path):
    path = composer_copy(tmp_path, 0, 1, 2, 3)
    cut = tmp_path / "ep0-ba5-rank2.pt"
    cut.write_bytes(cut.read_bytes()[:20_000])
    code, out, _ = run(path)
    assert code == 1
    assert "NOT WHOLE: rank 2 cut short or damaged\n  CK002  rank 2: ep0-ba5-rank2.pt is cut short: 20000 bytes" in out


def test_one_rank_alone_is_not_whole_and_is_shown(tmp_path):
    code, out, err = run(composer_copy(tmp_path, 2))
    assert (code, out.splitlines()[2]) == (1, "NOT WHOLE: ranks 0, 1, 3 missing")
    assert "dim 0 over 4 ranks" in out and err.splitlines()[-1].endswith(
        " # to consolidate, put the other rank files beside it"
    )


def test_a_folder_of_one_rank_is_not_whole(tmp_path):
    composer_copy(tmp_path, 2)
    code, out, _ = run(tmp_path)
    assert (code, "NOT WHOLE: ranks 0, 1, 3 missing\n  CK001  ranks 0, 1, 3" in out) == (1, True)


def test_a_monolithic_file_is_whole_though_its_name_has_a_rank(tmp_path):
    path = tmp_path / "ep0-ba5-rank0.pt"
    shutil.copy(FIXTURES / "torch2.13.0-ddp-w4" / "snapshot.pt", path)
    code, out, _ = run(path)
    assert (code, "\nwhole: one file, rank 0's by its name; " in out) == (0, True)


def test_what_was_read_is_said():
    assert "read the metadata of 4 ranks in" in run(RANK_0)[2]


def test_what_was_not_read_of_a_large_world_is_said(large_world):
    code, out, err = run(RANK_0)
    assert (code, out.splitlines()[2]) == (0, "all 4 rank files are here; contents not compared (verify)")
    assert "read the metadata of 1 rank in" in err
    assert "of 3 others only that the file is there and ends well (--all-ranks: all of them)" in err
    assert err.splitlines()[-1] == f"next: ckptools verify {RANK_0}"
    every = run(RANK_0, "--all-ranks")
    assert "whole: all 4 rank files are here, all read" in every[1] and "read the metadata of 4 ranks in" in every[2]


def test_an_unreadable_file_is_one_line_and_exit_code_3(tmp_path):
    (tmp_path / "x.pt").write_bytes(b"not a checkpoint")
    for path in (tmp_path / "x.pt", tmp_path / "nothing.pt"):
        code, out, err = run(path)
        assert (code, out, err.count("\n")) == (3, "", 1)
        assert path.name in err


# -- options -----------------------------------------------------------------------------------------------------


def test_one_section_can_be_shown_in_full():
    code, out, _ = run(RANK_0, "--section", "model")
    assert (code, out.splitlines()[0]) == (0, "model in ep0-ba5")
    assert "model.emb.weight               [33, 17]  fp32   2.2 KiB  dim 0 over 4 ranks" in out
    assert "16 distinct" not in out and "DecoupledAdamW" not in out


def test_a_section_can_be_named():
    assert "Timestamp.batch            5" not in run(RANK_0, "--section", "model")[1]
    assert "timestamp.Timestamp.batch            5" in run(RANK_0, "--section", "timestamp")[1]


def test_random_states_are_listed_and_who_holds_them_against_each_other_is_said():
    out = run(RANK_0, "--section", "rng")[1]
    assert re.search(r"\b0\.python\.1 +625 integers, crc [0-9a-f]{8}$", out, re.M)
    assert "0.numpy.2" in out and out.splitlines()[-1] == "which ranks have states of their own: ckptools show PATH rng"


def test_a_section_that_is_not_there_is_a_usage_error_that_lists_them():
    code, out, err = run(RANK_0, "--section", "modle")
    assert (code, out) == (2, "")
    assert "has no section 'modle'; it has model, optimizer" in err


def test_trust_is_refused_where_there_is_nothing_to_trust():
    code, _, err = run(RANK_0, "--trust")
    assert (code, "--engine torch" in err) == (2, True)


@pytest.mark.slow
@pytest.mark.parametrize("known", [WHOLE[0], WHOLE[7]], ids=lambda known: known.name)
def test_torch_gives_the_same_report(known):
    assert run(known.file, "--engine", "torch")[:2] == run(known.file)[:2]


# -- hostile files -----------------------------------------------------------------------------------------------


class Bomb:
    def __init__(self, trace: Path) -> None:
        self.trace = trace

    def __reduce__(self) -> Any:
        return os.system, (f"touch {self.trace}",)


def hostile_file(folder: Path) -> Path:
    tree = OrderedDict()
    tree["\x1b[2J\n\nwhole: all 9 rank files are here"] = {"1e5": "00012", "<b>": "\u202eevil\x9b"}
    tree["bomb"] = Bomb(folder / "trace")
    return write_pt(folder / "x\x1b[31m\n.pt", tree)


def test_a_hostile_file_is_shown_and_does_nothing(tmp_path):
    code, out, err = run(hostile_file(tmp_path))
    assert code == 0, err
    assert all(line.isprintable() for line in (out + err).split("\n"))
    assert not any(line.startswith("whole: all 9") for line in out.split("\n"))
    assert "CK302  the pickle names posix.system, which could run code" in out
    assert not (tmp_path / "trace").exists()


def test_a_hostile_file_is_plain_json(tmp_path):
    made = as_json(hostile_file(tmp_path), "--section", "other")
    assert made["suspicious"] == ["posix.system"]
    assert made["details"][0]["values"][0]["value"] == "00012"
    assert run(hostile_file(tmp_path), "--json")[1].isascii()


# -- as a process ------------------------------------------------------------------------------------------------


def test_a_stream_that_knows_only_ascii_is_no_problem(tmp_path):
    path = tmp_path / "h\u00e9.pt"
    torch.save({"model": {"w": torch.ones(2)}, "\u6f22": {"\ud800": 1}, "step": 4}, path)
    done = process(path, env={"PYTHONIOENCODING": "ascii", "PATH": "/usr/bin"})
    assert done.returncode == 0, done.stderr
    assert b"\\u6f22" in done.stdout and b"\\ud800" in done.stdout
    assert b"h\\xe9.pt" in done.stderr


def test_an_error_is_ascii_on_a_stream_that_knows_only_that(tmp_path):
    done = process(tmp_path / "h\u00e9.pt", env={"PYTHONIOENCODING": "ascii", "PATH": "/usr/bin"})
    assert done.returncode == 3 and done.stderr.isascii() and b"h\\xe9.pt: no such file" in done.stderr


@pytest.mark.slow
def test_neither_torch_nor_numpy_is_imported():
    code = (
        "import sys\nfrom ckptools.cli import app\n"
        f"app(['inspect', {str(RANK_0)!r}, '--all-ranks'], standalone_mode=False)\n"
        "print([m for m in ('torch', 'numpy', 'rich', 'safetensors') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, timeout=60, text=True)
    assert done.stdout.splitlines()[-1] == "[]", done.stderr


def test_output_is_not_cut_in_a_pipe(tmp_path):
    path = write_pt(tmp_path / "many.pt", {f"key{'x' * 200}{n}": {"a": n} for n in range(60)})
    done = process(path)
    assert done.stdout.count(b"x" * 200) >= 60


def test_rules_that_cannot_be_read_are_an_error_where_none_are_needed_too(tmp_path):
    code, stdout, stderr = run(RANK_0, "--rules", tmp_path / "rules.json")
    assert (code, stdout, stderr.count("\n")) == (3, "", 1) and "rules.json: no such file" in stderr
    (tmp_path / "rules.json").write_text('{"*.weight": 1}')
    code, stdout, stderr = run(RANK_0, "--rules", tmp_path / "rules.json")
    assert (code, stdout, stderr.count("\n")) == (2, "", 1) and "rules.json" in stderr


def test_a_save_without_the_file_that_is_written_last_has_not_ended_or_died(tmp_path):
    folder = Path(shutil.copytree(FIXTURES / "torch2.13.0-fsdp2-dcp-w3" / "ckpt", tmp_path / "step-5"))
    (folder / ".metadata").unlink()
    for file in folder.iterdir():
        os.utime(file, (0, 0))  # a clone just made has files just written
    text = "which DCP writes last: the save has not ended, or it died, or the file was not copied"
    code, _, error = run(folder)
    assert code == 3 and error.rstrip().endswith(text)
    os.utime(folder / "__0_0.distcp")
    error = run(folder)[2]
    assert re.search(rf"{text}; last written \d+ s ago: it may not be finished$", error.rstrip())
