"""What an output says of where it comes from, and that holes and fills are problems whoever opens it again."""

from __future__ import annotations

import json
import shutil
import zipfile
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from typer.testing import CliRunner

import ckptools
from ckptools._version import __version__
from ckptools.cli import app
from ckptools.consolidate.provenance import record_of
from ckptools.consolidate.writers.layout import OutputContents
from ckptools.errors import NotWholeError, OutputExistsError
from ckptools.model.provenance import Origin
from tests.consolidate import dcp_resume
from tests.truth import FIXTURES

FSDP2 = FIXTURES / "torch2.4.1-fsdp2-w3"
OUTPUTS = ("out.pt", "out.safetensors", "out.dcp")
FILLS = {"zero": "CK019", "nan": "CK019", None: "CK020"}
"""What stands in holes, and the code that says so; None for tensors that are left out."""


@pytest.fixture(scope="module")
def broken(tmp_path_factory):
    """A run that lacks a rank."""
    run = Path(shutil.copytree(FSDP2, tmp_path_factory.mktemp("broken") / "run-7"))
    next(run.glob("*rank2*.pt")).unlink()
    return run


@pytest.fixture(scope="module")
def outputs(broken, tmp_path_factory):
    """Every form of output with every kind of fill, without its side file."""
    made = {}
    for out in OUTPUTS:
        for fill in FILLS:
            path = tmp_path_factory.mktemp("outputs") / out
            ckptools.consolidate(broken, path, allow_missing=True, fill=fill)
            path.with_name(f"{out}.left-out.json").unlink()
            made[out, fill] = path
    return made


def run(*arguments: object) -> tuple[int, str]:
    done = CliRunner().invoke(app, list(map(str, arguments)))
    return done.exit_code, done.output


def codes(path: Path, **how: bool) -> set[str]:
    return {p.code for p in ckptools.open(path, **how).problems if p.severity == "error"}


@pytest.mark.slow
@pytest.mark.parametrize("fill", FILLS)
@pytest.mark.parametrize("out", OUTPUTS)
def test_no_command_calls_an_output_with_holes_or_fills_whole(outputs, out, fill, tmp_path):
    path, code = outputs[out, fill], FILLS[fill]
    for command in (["inspect"], ["inspect", "--all-ranks"], ["verify", "--deep", "--values"], ["doctor"]):
        exit_code, shown = run(*command, path)
        assert (command, exit_code, code in shown) == (command, 1, True)
    exit_code, shown = run("ls", path.parent)
    assert (exit_code, "NONE IS WHOLE" in shown, code in shown) == (1, True, True)
    exit_code, shown = run("report", path, "-o", tmp_path / "r.html")
    assert (exit_code, code in (tmp_path / "r.html").read_text()) == (1, True)
    exit_code, shown = run("consolidate", path, "-o", tmp_path / "again.pt")
    assert (exit_code, code in shown) == (4, True)
    assert ckptools.open(path).whole is False and not ckptools.verify(path).ok
    own = set() if out.endswith(".safetensors") else {"CK020"}  # beside a model there are the states of the lost rank
    assert codes(path) == codes(path, all_ranks=True) == {code, *own}


@pytest.mark.slow
def test_the_json_of_inspect_and_verify_says_the_same(outputs):
    for path in outputs.values():
        assert json.loads(run("inspect", "--json", path)[1].partition("\nread")[0].strip())["whole"] is False
        assert json.loads(run("verify", "--json", path)[1])["ok"] is False


@pytest.mark.slow
@pytest.mark.parametrize("out", OUTPUTS)
def test_a_sound_output_says_its_origin_in_one_line(out, tmp_path):
    ckptools.consolidate(FSDP2, tmp_path / out)
    opened = ckptools.open(tmp_path / out)
    assert opened.whole and opened.provenance is not None
    assert opened.provenance.sources == (Origin("torch2.4.1-fsdp2-w3", "rank_files", 5, 3),)
    text = run("inspect", tmp_path / out)[1]
    (line,) = [line for line in text.splitlines() if line.startswith("  from ")]
    assert line.split(None, 1)[1].split("   ")[0].strip().startswith("torch2.4.1-fsdp2-w3, step 5, 3 ranks")
    assert line.endswith(f"by ckptools {__version__}")


@pytest.mark.parametrize("out", OUTPUTS)
def test_no_folder_of_the_source_is_in_an_output(out, broken, tmp_path):
    ckptools.consolidate(broken, tmp_path / out, allow_missing=True, fill="zero")
    path = tmp_path / out
    content = b"".join(file.read_bytes() for file in ([path] if path.is_file() else path.iterdir()))
    assert b"run-7" in content and str(broken.parent).encode() not in content


def test_reasons_in_a_record_name_files_without_their_folders(broken):
    opened = ckptools.open(broken, all_ranks=True)
    gone = {("a",): f"{opened.files[0].path}: cut", ("b",): f"see {broken}/x and {broken.parent}/y; data{broken}/7"}
    record = record_of(OutputContents({}, left_out=gone, source=opened))
    assert [one.why for one in record.left_out] == [f"{opened.files[0].path.name}: cut", f"see x and y; data{broken}/7"]


@pytest.mark.slow
@pytest.mark.parametrize("out", OUTPUTS)
def test_without_provenance_only_the_side_file_tells(out, broken, tmp_path):
    ckptools.consolidate(broken, tmp_path / out, allow_missing=True, fill="zero", provenance=False)
    opened = ckptools.open(tmp_path / out)
    own = set() if out.endswith(".safetensors") else {"CK020"}
    assert codes(tmp_path / out) == {"CK019", *own} and opened.whole is False
    names = {p.tensor for p in opened.problems if p.code == "CK019"}
    assert names == {p.tensor for p in _with_record(broken, tmp_path / "other" / out).problems if p.code == "CK019"}
    (tmp_path / f"{out}.left-out.json").unlink()
    assert codes(tmp_path / out) == set()


def _with_record(source: Path, out: Path) -> ckptools.Checkpoint:
    out.parent.mkdir()
    ckptools.consolidate(source, out, allow_missing=True, fill="zero")
    return ckptools.open(out)


def test_the_side_file_of_several_safetensors_is_found_by_each(broken, tmp_path):
    out = tmp_path / "m.safetensors"
    options = {"allow_missing": True, "fill": "zero", "provenance": False}
    ckptools.consolidate(broken, out, max_shard_size=4000, **options)
    assert codes(tmp_path / "m.safetensors.index.json") == {"CK019"} == codes(next(tmp_path.glob("m-00002-of-*")))


def test_every_one_of_several_safetensors_carries_the_record(tmp_path):
    ckptools.consolidate(FSDP2, tmp_path / "m.safetensors", max_shard_size=4000)
    files = sorted(tmp_path.glob("m-*.safetensors"))
    told = set()
    for file in files:
        with safe_open(file, "pt") as opened:
            assert set(opened.metadata()) == {"format", "ckptools"}
            told.add(opened.metadata()["ckptools"])
    assert len(files) > 2 and len(told) == 1


@pytest.mark.slow
def test_what_loads_an_output_does_not_see_the_record(tmp_path):
    for out in OUTPUTS:
        ckptools.consolidate(FSDP2, tmp_path / out, only="model")
        ckptools.consolidate(FSDP2, tmp_path / f"bare.{out}", only="model", provenance=False)
    for how in ({"mmap": True}, {"weights_only": True}, {"weights_only": False}):
        assert same(torch.load(tmp_path / "out.pt", **how), torch.load(tmp_path / "bare.out.pt", **how))
    assert same(load_file(tmp_path / "out.safetensors"), load_file(tmp_path / "bare.out.safetensors"))
    folders = [dcp_resume.load_sharded(tmp_path / name, None) for name in ("out.dcp", "bare.out.dcp")]
    assert same(*folders)
    assert zipfile.ZipFile(tmp_path / "out.pt").testzip() is None


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return list(one) == list(other) and all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize("out", OUTPUTS)
def test_the_option_leaves_nothing_of_it(out, tmp_path):
    assert run("consolidate", FSDP2, "-o", tmp_path / out, "--no-provenance")[0] == 0
    path = tmp_path / out
    content = b"".join(file.read_bytes() for file in ([path] if path.is_file() else path.iterdir()))
    assert b"ckptools" not in content and b"torch2.4.1-fsdp2" not in content
    assert ckptools.open(path).provenance is None


@pytest.mark.slow
@pytest.mark.parametrize("out", OUTPUTS)
def test_the_same_source_gives_the_same_bytes(out, tmp_path):
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        ckptools.consolidate(FSDP2, tmp_path / name / out)
    one, two = (sorted((tmp_path / name).rglob("*")) for name in ("one", "two"))
    assert [p.read_bytes() for p in one if p.is_file()] == [p.read_bytes() for p in two if p.is_file()]


@pytest.mark.slow
@pytest.mark.parametrize("out", OUTPUTS)
@pytest.mark.parametrize("first", OUTPUTS)
def test_fills_are_carried_on_by_the_option_that_the_first_output_took(outputs, first, out, tmp_path):
    source = outputs[first, "zero"]
    with pytest.raises(NotWholeError, match=r"CK019.*allow_missing"):
        ckptools.consolidate(source, tmp_path / out, only="model")
    ckptools.consolidate(source, tmp_path / out, only="model", allow_missing=True, fill="zero")
    again = ckptools.open(tmp_path / out)
    before = [one for one in ckptools.open(source).provenance.filled if "exp_avg" not in one.name]
    assert sorted(f[2:] for f in again.provenance.filled) == sorted(f[2:] for f in before)
    assert codes(tmp_path / out) == {"CK019"}
    assert [origin.name for origin in again.provenance.sources] == ["out.dcp" if "dcp" in first else "out", "run-7"]


def test_filled_tensors_are_left_out_where_nothing_is_to_be_filled(outputs, tmp_path):
    done = ckptools.consolidate(outputs["out.safetensors", "zero"], tmp_path / "m.pt", allow_missing=True)
    filled = {one.name for one in ckptools.open(outputs["out.safetensors", "zero"]).provenance.filled}
    assert set(done.left_out) == filled and filled.isdisjoint(torch.load(tmp_path / "m.pt"))
    assert codes(tmp_path / "m.pt") == {"CK020"}


def test_a_fill_that_is_not_told_is_carried_on_by_the_side_file(outputs, tmp_path):
    options = {"allow_missing": True, "fill": "zero", "provenance": False}
    ckptools.consolidate(outputs["out.pt", "zero"], tmp_path / "m.pt", **options)
    assert codes(tmp_path / "m.pt") == {"CK019", "CK020"}


def test_new_names_are_those_of_the_record(broken, tmp_path):
    options = {"allow_missing": True, "fill": "zero", "rename": ["gate=head.gate"]}
    ckptools.consolidate(broken, tmp_path / "m.safetensors", **options)
    names = {p.tensor for p in ckptools.open(tmp_path / "m.safetensors").problems}
    assert "head.gate" in names and names <= set(load_file(tmp_path / "m.safetensors"))


def test_a_part_without_fills_is_written_without_an_option(outputs, tmp_path):
    whole = ckptools.open(outputs["out.safetensors", "zero"])
    name = next(n for n in whole.model if n not in {f.name for f in whole.provenance.filled})
    ckptools.consolidate(whole.path, tmp_path / "m.safetensors", only=name)
    assert codes(tmp_path / "m.safetensors") == set()


def test_what_an_earlier_output_lacked_is_not_told_of_a_new_one(broken, tmp_path):
    out = tmp_path / "m.safetensors"
    ckptools.consolidate(broken, out, allow_missing=True)
    out.unlink()
    with pytest.raises(OutputExistsError, match=r"m\.safetensors\.left-out\.json: lists what an earlier output lacks"):
        ckptools.consolidate(FSDP2, out, provenance=False)
    ckptools.consolidate(FSDP2, out, provenance=False, force=True)
    assert [p.name for p in tmp_path.iterdir()] == ["m.safetensors"] and codes(out) == set()


def test_a_dcp_with_a_record_is_replaced_by_force(tmp_path):
    for _ in range(2):
        ckptools.consolidate(FSDP2, tmp_path / "out.dcp", force=True)
    assert ckptools.verify(tmp_path / "out.dcp", deep=True).ok
