"""Records of origin as a stranger may write them: bounded, data only, and never a reason to call something whole."""

from __future__ import annotations

import io
import json
import shutil
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from typer.testing import CliRunner

import ckptools
from ckptools.cli import app
from ckptools.model.provenance import MAX_NAMED, Filled, LeftOut, Origin, Provenance
from tests.truth import FIXTURES

SOUND = Provenance("0.1.0", "model", (Origin("ep0-ba5", "rank_files", 5, 4),))
FORMS = ("x.pt", "x.safetensors", "x.dcp", "x.bin.left-out.json")
DCP = FIXTURES / "dcp-multifile" / "ckpt"


def written(folder: Path, form: str, text: str | bytes) -> Path:
    """A checkpoint that says this of itself."""
    data = text if isinstance(text, bytes) else text.encode()
    state = {"w": torch.arange(4.0), "v": torch.ones(2)}
    path = folder / form
    if form == "x.safetensors":
        save_file(state, path, metadata={"format": "pt", "ckptools": data.decode("utf-8", "replace")})
    elif form == "x.dcp":
        shutil.copytree(next(p.parent for p in DCP.parent.rglob(".metadata")), path)
        (path / "ckptools.json").write_bytes(data)
    elif form == "x.pt":
        saved = io.BytesIO()
        torch.save(state, saved)
        path.write_bytes(saved.getvalue())
        with zipfile.ZipFile(path, "a") as archive:
            root = archive.namelist()[0].partition("/")[0]
            archive.writestr(f"{root}/ckptools.json", data)
    else:
        path.write_bytes(data)
        path = folder / "x.bin"
        torch.save(state, path)
    return path


def side_file(record: Provenance) -> str:
    """What the side file of an output says that has such a record."""
    missing = [
        {"name": f.name, "filled_with": f.fill, "regions": [{"offsets": [0], "sizes": [f.elements]}]}
        for f in record.filled
    ]
    left_out = [one._asdict() for one in record.left_out]
    return json.dumps({"schema": "ckptools/left-out/1", "left_out": left_out, "missing": missing})


def told(folder: Path, form: str, record: Provenance) -> ckptools.Checkpoint:
    text = side_file(record) if form.endswith("left-out.json") else record.to_json()
    return ckptools.open(written(folder, form, text))


def errors(path: Path) -> list[str]:
    return [p.code for p in ckptools.open(path).problems if p.severity == "error"]


@pytest.mark.parametrize("form", FORMS[:3])
def test_a_sound_record_is_read(form: str, tmp_path: Path) -> None:
    opened = told(tmp_path, form, SOUND)
    assert opened.whole and opened.provenance == SOUND


@pytest.mark.parametrize("form", FORMS)
def test_fills_and_losses_are_errors_of_their_own_codes(form: str, tmp_path: Path) -> None:
    filled, lost = (Filled("w", "nan", 3, 4),), (LeftOut("u", "gap", True), LeftOut("f", "foreign", False))
    record = Provenance("0.1.0", "all", SOUND.sources, filled, lost)
    opened = told(tmp_path, form, record)
    found = [(p.code, p.severity) for p in opened.problems if p.code in ("CK019", "CK020")]
    assert found == [("CK019", "error"), ("CK020", "error"), ("CK020", "warning")]
    assert opened.whole is False


HOSTILE: tuple[str | bytes, ...] = (
    "",
    "{",
    "[]",
    "null",
    '"whole"',
    b"\xff\xfe{}",
    "[" * 100_000,
    '{"a":' * 5_000,
    "9" * 10_000,
    '{"schema":"ckptools/provenance/1"}',
    '{"schema":"ckptools/provenance/1","schema":"ckptools/provenance/1"}',
    '{"schema":"ckptools/left-out/1","left_out":5,"missing":{}}',
    '{"schema":"ckptools/left-out/1","left_out":[{"name":5,"why":1}],"missing":[{"name":[]}]}',
    '{"schema":"ckptools/provenance/99","whole":true}',
    '{"schema":"x\\u001b[31m"}',
    " " * (2 << 20),
)


@pytest.mark.slow
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("text", HOSTILE, ids=range(len(HOSTILE)))
def test_a_record_that_is_none_is_one_clear_line_and_not_whole(form: str, text: str | bytes, tmp_path: Path) -> None:
    path = written(tmp_path, form, text)
    assert errors(path) == ["CK021"]
    done = CliRunner().invoke(app, ["inspect", str(path)])
    (line,) = [line for line in done.stdout.splitlines() if "CK021" in line]
    assert done.exit_code == 1 and "NOT WHOLE" in done.stdout
    assert "what it says of where it comes from cannot be read" in line and "\x1b" not in line and len(line) < 700


def changed(**fields: Any) -> str:
    return json.dumps({**json.loads(SOUND.to_json()), **fields})


@pytest.mark.parametrize(
    "fields",
    [
        {"sources": {}},
        {"sources": [5]},
        {"sources": [{"name": "a"}]},
        {"sources": [{"name": "a", "format": "b", "step": True, "world_size": 1}]},
        {"sources": [{"name": "a", "format": "b", "step": 1 << 80, "world_size": 1}]},
        {"filled": [{"name": "w", "fill": "right", "elements": 1, "numel": 4}]},
        {"filled": [{"name": "w", "fill": ["zero"], "elements": 1, "numel": 4}]},
        {"filled": [{"name": "w", "fill": "zero", "elements": -1, "numel": 4}]},
        {"filled": [{"name": "w"}] * 5_000},
        {"left_out": [{"name": "w", "why": "", "lost": "no"}]},
        {"more_filled": -1},
        {"more_lost": "none"},
        {"ckptools": None},
    ],
)
def test_a_record_with_one_odd_field_is_no_record(fields: dict[str, Any], tmp_path: Path) -> None:
    assert errors(written(tmp_path, "x.safetensors", changed(**fields))) == ["CK021"]


def test_no_record_makes_whole_what_is_not(tmp_path: Path) -> None:
    for form in FORMS[:2]:
        path = written(tmp_path, form, changed(whole=True, problems=[], filled=[]))
        path.write_bytes(path.read_bytes()[:-4])
        assert CliRunner().invoke(app, ["inspect", str(path)]).exit_code != 0


def test_names_of_a_record_reach_no_terminal_as_they_are(tmp_path: Path) -> None:
    odd = Provenance("\x1b[31m1", "all", (Origin("a\nCK000 whole\x1b[2J", "x"),), (Filled("w\x1b[1m", "zero", 1, 4),))
    path = written(tmp_path, "x.pt", odd.to_json())
    shown = CliRunner().invoke(app, ["inspect", str(path)]).stdout
    assert "\x1b" not in shown and "\nCK000" not in shown and "CK019" in shown
    assert "\x1b" not in CliRunner().invoke(app, ["inspect", "--json", str(path)]).stdout


def test_a_link_out_of_the_folder_is_not_followed(tmp_path: Path) -> None:
    path = written(tmp_path, "x.dcp", SOUND.to_json())
    (path / "ckptools.json").rename(tmp_path / "elsewhere.json")
    (path / "ckptools.json").symlink_to(tmp_path / "elsewhere.json")
    done = CliRunner().invoke(app, ["inspect", str(path)])
    assert (done.exit_code, "--follow-symlinks" in done.stderr) == (3, True)


def test_a_damaged_record_of_an_archive_says_so(tmp_path: Path) -> None:
    path = written(tmp_path, "x.pt", SOUND.to_json())
    path.write_bytes(path.read_bytes().replace(b"ep0-ba5", b"ep0-ba6"))
    (problem,) = [p for p in ckptools.open(path).problems if p.severity == "error"]
    assert problem.code == "CK021" and "CRC-32 is wrong" in problem.message


def test_a_model_beside_others_has_its_names_below_its_section(tmp_path: Path) -> None:
    record = Provenance("0.1.0", "model", SOUND.sources, (Filled("w", "zero", 1, 4),))
    written(tmp_path, "x.safetensors", record.to_json()).rename(tmp_path / "model.safetensors")
    torch.save({"state": {}, "param_groups": [{"lr": 0.1, "params": [0, 1]}]}, tmp_path / "optimizer.pt")
    opened = ckptools.open(tmp_path)
    assert [p.tensor for p in opened.problems if p.code == "CK019"] == ["model.w"]


def shard(path: Path, step: int, **tensors: torch.Tensor) -> None:
    record = Provenance("0.1.0", "model", (Origin(f"ep0-ba{step}", "rank_files", step, 4),))
    save_file(tensors, path, metadata={"format": "pt", "ckptools": record.to_json()})


def test_files_of_one_output_that_come_from_different_checkpoints_are_no_checkpoint(tmp_path: Path) -> None:
    shard(tmp_path / "m-00001-of-00002.safetensors", 5, a=torch.ones(2))
    shard(tmp_path / "m-00002-of-00002.safetensors", 7, b=torch.ones(2))
    index = {"metadata": {}, "weight_map": {n: f"m-0000{i}-of-00002.safetensors" for i, n in ((1, "a"), (2, "b"))}}
    (tmp_path / "m.safetensors.index.json").write_text(json.dumps(index))
    (problem,) = [p for p in ckptools.open(tmp_path / "m.safetensors.index.json").problems if p.severity == "error"]
    assert problem.code == "CK006" and "m-00002-of-00002.safetensors from ep0-ba7, step 7, 4 ranks" in problem.message


def test_a_model_beside_a_file_of_another_checkpoint_is_a_warning(tmp_path: Path) -> None:
    shard(tmp_path / "model.safetensors", 5, w=torch.ones(2))
    state = {"state": {}, "param_groups": [{"lr": 0.1, "params": [0]}]}
    torch.save(state, tmp_path / "optimizer.pt")
    other = Provenance("0.1.0", "optimizer", (Origin("ep0-ba7", "rank_files", 7, 4),))
    with zipfile.ZipFile(tmp_path / "optimizer.pt", "a") as archive:
        archive.writestr(f"{archive.namelist()[0].partition('/')[0]}/ckptools.json", other.to_json())
    found = [(p.code, p.severity) for p in ckptools.open(tmp_path).problems if p.code == "CK006"]
    assert found == [("CK006", "warning")]


def test_both_engines_read_the_record(tmp_path: Path) -> None:
    path = written(tmp_path, "x.pt", SOUND.to_json())
    done = CliRunner().invoke(app, ["inspect", "--json", "--engine", "torch", str(path)])
    assert json.loads(done.stdout)["provenance"]["sources"][0]["name"] == "ep0-ba5"


def test_more_names_than_a_record_holds_are_counted(tmp_path: Path) -> None:
    filled = tuple(Filled(f"layers.{n}.weight", "zero", 1, 2) for n in range(3 * MAX_NAMED))
    lost = tuple(LeftOut(f"layers.{n}.bias", "gap" * 1000, True) for n in range(3 * MAX_NAMED))
    record = Provenance("0.1.0", "all", SOUND.sources, filled, (*lost, LeftOut("x" * 10_000, "", True)))
    opened = told(tmp_path, "x.safetensors", record)
    found = opened.provenance
    assert found is not None and len(record.to_json()) < 200_000
    assert (len(found.filled), found.more_filled, found.more_lost) == (200, 400, 401)
    messages = [p.message for p in opened.problems]
    assert "400 more tensors with values that consolidate filled in" in messages
