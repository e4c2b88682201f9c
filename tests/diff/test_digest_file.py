"""Files of digests, for places that do not see each other."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest
import torch
from jsonschema import Draft202012Validator

import ckptools
from ckptools.errors import OutputExistsError, ReadError, UsageError
from tests.diff.test_compare import SHARDED, copied, saved, state, subject
from tests.schemas import SCHEMAS
from tests.truth import FIXTURES

FOLDERS = [
    "torch2.13.0-fsdp1-sharded-w4/rank0.pt", "torchtitan-fsdp-tp/ckpt/step-5", "deepspeed-z3-bf16/ckpt/global_step5",
    "lightning-trainer-ddp/ckpt/last.ckpt", "foreign-objects", "hf-llama-safetensors-bf16/ckpt",
]  # fmt: skip


@pytest.fixture
def digests(tmp_path: Path) -> Path:
    return ckptools.open(SHARDED).write_digests(tmp_path / "digests.json")


@pytest.mark.slow
@pytest.mark.parametrize("path", FOLDERS)
def test_what_is_written_is_what_the_schema_says(path, tmp_path):
    out = ckptools.open(FIXTURES / path).write_digests(tmp_path / "x.json")
    schema = json.loads(SCHEMAS["digests"].read_text())
    Draft202012Validator.check_schema(schema)
    assert [e.message for e in Draft202012Validator(schema).iter_errors(json.loads(out.read_text()))] == []
    found = ckptools.diff(out, FIXTURES / path)
    assert found.same is True or "lightning" in path


def test_a_digest_is_the_sha256_of_the_values_in_row_major_order(tmp_path):
    tensor = torch.arange(6.0).reshape(2, 3)
    out = ckptools.open(saved(tmp_path / "a.pt", {"w": tensor})).write_digests(tmp_path / "x.json")
    told = json.loads(out.read_text())["tensors"][0]
    assert told["sha256"] == hashlib.sha256(tensor.numpy().tobytes()).hexdigest()


@pytest.mark.slow
def test_the_layout_makes_no_difference(digests, tmp_path):
    ckptools.open(SHARDED).consolidate(tmp_path / "all.pt", only="all")
    found = ckptools.diff(digests, tmp_path / "all.pt")
    assert found.same is True and found.a.digests and found.values_compared
    assert {row.detail for row in found.tensors} == {"SHA-256"} and found.bytes_read > 10_000


@pytest.mark.slow
def test_two_files_of_digests_are_compared_too(digests, tmp_path):
    other = ckptools.open(SHARDED).write_digests(tmp_path / "other.json")
    assert ckptools.diff(digests, other).same is True
    told = json.loads(other.read_text())
    told["tensors"][0]["sha256"] = "0" * 64
    other.write_text(json.dumps(told))
    found = ckptools.diff(digests, other)
    assert [(r.name, r.verdict) for r in found.tensors if r.verdict != "same"] == [
        (told["tensors"][0]["name"], "differs")
    ]


def test_a_value_that_changed_is_told_with_both(tmp_path):
    other = state(step=4)
    other["optimizer"]["param_groups"][0]["lr"] = 0.3
    out = ckptools.open(saved(tmp_path / "a.pt", state())).write_digests(tmp_path / "x.json")
    found = ckptools.diff(out, saved(tmp_path / "b.pt", other))
    assert subject(found, "lr") == ("differs", "lr 0.1 → 0.3") and subject(found, "counters")[1] == "step 3 → 4"
    assert subject(found, "weights")[0] == "same"


def test_what_was_damaged_when_digests_were_taken_cannot_be_compared(tmp_path):
    folder = copied(tmp_path)
    (folder / "rank2.pt").unlink()
    out = ckptools.open(folder).write_digests(tmp_path / "x.json")
    found = ckptools.diff(out, SHARDED)
    lost = [row for row in found.tensors if row.verdict == "cannot be compared"]
    assert found.same is False and lost and all("A: gap" in row.detail for row in lost)
    assert subject(found, "files")[0] == "cannot be compared"


@pytest.mark.slow
def test_a_file_that_is_there_is_not_overwritten_unless_told(digests):
    before = digests.read_bytes()
    with pytest.raises(OutputExistsError, match="--force"):
        ckptools.open(SHARDED).write_digests(digests)
    assert digests.read_bytes() == before
    assert ckptools.open(SHARDED).write_digests(digests, force=True) == digests


def test_where_nothing_can_be_written_nothing_is_left(tmp_path):
    with pytest.raises(UsageError, match="there is no folder"):
        ckptools.open(SHARDED).write_digests(tmp_path / "nowhere" / "x.json")
    assert list(tmp_path.iterdir()) == []


def broken(told, what):
    if what == "schema":
        return told | {"schema": "ckptools/digests/9"}
    if what == "tensors":
        return told | {"tensors": [{"name": "w"}]}
    if what == "sha256":
        return told | {"tensors": [told["tensors"][0] | {"sha256": "abc"}]}
    if what == "identity":
        return told | {"values": [told["values"][0] | {"identity": "model"}]}
    if what == "by_rank":
        return told | {"by_rank": [[]]}
    if what == "contents":
        return told | {"values": [told["values"][0] | {"contents": []}]}
    return told | {"groups": [{"section": "x", "number": "y", "params": [], "settings": {}}]}


@pytest.mark.slow
@pytest.mark.parametrize("what", ["schema", "tensors", "sha256", "identity", "by_rank", "contents", "groups"])
def test_a_file_that_is_none_is_refused_in_a_line(digests, what):
    digests.write_text(json.dumps(broken(json.loads(digests.read_text()), what)))
    with pytest.raises(ReadError, match=r"digests\.json: is no file of digests") as caught:
        ckptools.diff(digests, SHARDED)
    assert "\n" not in str(caught.value)
