"""Reading back, manifests, and holes that are filled on request: what is said of an output is true."""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

import ckptools
from ckptools.consolidate.publishing import read_back
from ckptools.consolidate.writers import dcp
from ckptools.errors import ReadError, UsageError, WriteError
from tests.truth import FIXTURES, WHOLE, Known, load_truth

SOURCE = FIXTURES / "torch2.4.1-fsdp2-w3"
OUTPUTS = ("out.pt", "out.safetensors", "out.dcp")
CHECKED = (
    "torch2.4.1-fsdp2-w3",
    "composer-0.13.5-torch1.13.1-sharded-w4",
    "torch2.6.0-fsdp1-hsdp2x2-w4",
    "lightning-trainer-ddp",
    "hf-gpt2-bin-tied-fp32",
)


@pytest.fixture
def holed(tmp_path):
    """A checkpoint whose second rank is missing."""
    folder = Path(shutil.copytree(SOURCE, tmp_path / "run"))
    (folder / "rank1.pt").unlink()
    return folder


LIBRARIES = {"out.pt": "torch 2", "out.safetensors": "safetensors 0", "out.dcp": "torch.distributed.checkpoint 2"}


@pytest.mark.slow
@pytest.mark.parametrize("out", OUTPUTS)
@pytest.mark.parametrize("run", CHECKED)
def test_an_output_is_read_back_by_its_formats_own_library_and_equals_its_shards(out, run, tmp_path):
    done = ckptools.consolidate(FIXTURES / run, tmp_path / out, check=True)
    assert re.match(rf"\d+ tensors read back by {re.escape(LIBRARIES[out])}[^ ]*, all equal$", done.read_back)
    assert int(done.read_back.split()[0]) >= done.tensors > 10 and (tmp_path / out).exists()


def test_a_read_back_output_keeps_tied_weights_scalars_and_empty_tensors(tmp_path):
    weight = torch.randn(5, 3)
    state = {
        "a": weight,
        "b": weight,
        "one": torch.tensor(1.5),
        "none": torch.zeros(0, 4),
        "flag": torch.tensor([True]),
    }
    torch.save(state, tmp_path / "x.pt")
    for out in OUTPUTS:
        done = ckptools.consolidate(tmp_path / "x.pt", tmp_path / out, check=True)
        assert done.read_back.startswith("5 tensors read back by ")


@pytest.mark.parametrize("out", OUTPUTS)
def test_a_large_output_is_read_back_in_several_turns(out, tmp_path, monkeypatch):
    monkeypatch.setattr(read_back, "AT_ONCE", 5000)
    assert ckptools.consolidate(SOURCE, tmp_path / out, check=True).read_back.endswith("all equal")


def test_an_output_that_plain_torch_load_does_not_accept_is_read_back_with_what_is_harmless(tmp_path):
    done = ckptools.consolidate(FIXTURES / CHECKED[1], tmp_path / "out.pt", keep_types=True, check=True)
    assert "numpy.ndarray" in done.needs and done.read_back.endswith("all equal")


def rot_when_read(monkeypatch, harm) -> None:
    """The one thing that no disk here does on its own: bytes that change between writing and reading."""
    forget = read_back._forget

    def rot(descriptor: int) -> None:
        forget(descriptor)
        for at in harm(os.pread(descriptor, os.fstat(descriptor).st_size, 0)):
            os.pwrite(descriptor, b"\xa5", at)

    monkeypatch.setattr(read_back, "_forget", rot)


@pytest.mark.parametrize("out", OUTPUTS)
def test_a_disk_that_gives_back_other_values_leaves_no_output(out, tmp_path, monkeypatch):
    _, values, _ = load_truth(SOURCE.name)["model/emb.weight"]
    rot_when_read(monkeypatch, lambda data: [data.index(values) + 100] if values in data else [])
    with pytest.raises(WriteError, match=r"emb\.weight: read back by .* with other values from byte 0 on"):
        ckptools.consolidate(SOURCE, tmp_path / out, check=True)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("out", OUTPUTS)
def test_a_disk_that_gives_back_what_no_library_reads_leaves_no_output(out, tmp_path, monkeypatch):
    rot_when_read(monkeypatch, lambda data: range(0, len(data), 7))
    with pytest.raises(WriteError, match="cannot be read back: ") as error:
        ckptools.consolidate(SOURCE, tmp_path / out, check=True)
    assert list(tmp_path.iterdir()) == [] and "\n" not in str(error.value)


@pytest.mark.parametrize("out", OUTPUTS)
def test_a_disk_that_fails_after_the_copy_is_one_line_with_the_name_of_the_output(out, tmp_path, monkeypatch):
    def fail(descriptor: int) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(read_back, "_forget", fail)
    with pytest.raises(WriteError, match="cannot write: input/output error") as error:
        ckptools.consolidate(SOURCE, tmp_path / out, check=True)
    assert str(error.value.path).startswith(str(tmp_path / out)) and list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("out", OUTPUTS)
def test_a_manifest_fits_its_output_and_the_shards_that_it_was_made_of(out, tmp_path):
    ckptools.consolidate(SOURCE, tmp_path / out, only="model", manifest=True)
    manifest = tmp_path / f"{out}.manifest.json"
    told = json.loads(manifest.read_text())
    assert len(told["tensors"]) >= 21 and len(told["files"]) == (3 if out.endswith("dcp") else 1)
    if not out.endswith("dcp"):
        assert check(ckptools.verify(SOURCE, manifest=manifest)) == "ok"
    assert check(ckptools.verify(tmp_path / out, manifest=manifest)) == "ok"


def test_a_tensor_in_several_items_has_one_row_in_the_manifest(tmp_path):
    with mock.patch.object(dcp, "ITEM_BYTES", 500):
        ckptools.consolidate(SOURCE, tmp_path / "out.dcp", only="model", manifest=True)
    rows = json.loads((tmp_path / "out.dcp.manifest.json").read_text())["tensors"]
    with ckptools.open(tmp_path / "out.dcp") as ck:
        assert max(len(ck.model[name].shards) for name in ck.model) > 1
        assert {n: tuple(row["shape"]) for n, row in rows.items()} == {n: t.shape for n, t in ck.model.items()}
    assert check(ckptools.verify(tmp_path / "out.dcp", manifest=tmp_path / "out.dcp.manifest.json")) == "ok"


def check(found) -> str:
    return next(c.result for c in found.checks if c.name.startswith("manifest"))


@pytest.mark.slow
@pytest.mark.parametrize("known", [k for k in WHOLE if "hsdp" in k.name or "titan" in k.name], ids=lambda k: k.name)
def test_a_manifest_fits_replicas_and_flattened_optimizers_too(known: Known, tmp_path):
    ckptools.consolidate(known.file, tmp_path / "out.pt", manifest=True)
    assert check(ckptools.verify(known.file, manifest=tmp_path / "out.pt.manifest.json")) == "ok"


def test_a_changed_value_is_found_by_the_manifest_though_the_format_has_no_checksum(tmp_path):
    out = tmp_path / "out.safetensors"
    ckptools.consolidate(SOURCE, out, manifest=True)
    data = bytearray(out.read_bytes())
    data[-1] ^= 1
    out.write_bytes(data)
    found = ckptools.verify(out, manifest=tmp_path / "out.safetensors.manifest.json")
    assert {(p.code, p.tensor is None) for p in found.problems} == {("CK014", True), ("CK014", False)}


@pytest.mark.parametrize(
    "text", ["[]", "{", '{"schema": "other/1", "tensors": {}, "files": {}}', '{"tensors": {"a": 1}}']
)
def test_what_is_no_manifest_is_refused_in_one_line(text, tmp_path):
    (tmp_path / "m.json").write_text(text)
    with pytest.raises(ReadError, match="is no manifest"):
        ckptools.verify(SOURCE, manifest=tmp_path / "m.json")


def test_a_tensor_with_a_hole_is_left_out_and_its_hole_is_listed(holed, tmp_path):
    done = ckptools.consolidate(holed, tmp_path / "out.pt", allow_missing=True)
    told = json.loads((tmp_path / "out.pt.left-out.json").read_text())
    rows = {row["name"]: row for row in told["missing"]}
    assert rows["model.up.weight" if "model.up.weight" in rows else next(iter(rows))]["filled_with"] is None
    assert set(rows) <= set(done.left_out) and all(row["regions"][0]["sizes"] for row in rows.values())


@pytest.mark.parametrize(("fill", "value"), [("nan", float("nan")), ("zero", 0.0)])
@pytest.mark.parametrize("out", ["out.pt", "out.safetensors"])
def test_holes_are_filled_when_that_is_asked_for_and_nothing_else_changes(fill, value, out, holed, tmp_path):
    done = ckptools.consolidate(holed, tmp_path / out, only="model", allow_missing=True, fill=fill, check=True)
    written = load_file(tmp_path / out) if out.endswith("s") else torch.load(tmp_path / out, weights_only=True)
    truth = {k[6:]: v for k, v in load_truth(SOURCE.name).items() if k.startswith("model/")}
    regions = {r["name"]: r["regions"] for r in json.loads((tmp_path / f"{out}.left-out.json").read_text())["missing"]}
    assert len(regions) > 10 and set(regions) == set(done.missing)
    for name, boxes in regions.items():
        dtype, data, shape = truth[name]
        if dtype == "float32":
            expected = np.frombuffer(data, "f4").reshape(shape).copy()
            for box in boxes:
                expected[tuple(slice(o, o + n) for o, n in zip(box["offsets"], box["sizes"], strict=True))] = value
            np.testing.assert_array_equal(written[name].numpy(), expected)


def test_filling_is_refused_where_nothing_may_be_missing_and_for_other_words(tmp_path):
    with pytest.raises(UsageError, match=r"^fill: nothing that has a hole is written; add allow_missing=True"):
        ckptools.consolidate(SOURCE, tmp_path / "out.pt", fill="zero")
    with pytest.raises(UsageError, match="choose nan or zero"):
        ckptools.consolidate(SOURCE, tmp_path / "out.pt", allow_missing=True, fill="ones")
