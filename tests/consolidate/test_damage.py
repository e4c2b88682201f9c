"""Damaged records: refused by default, left out or filled on request, and never written as if they were right."""

from __future__ import annotations

import json
import shutil
import zlib
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

import ckptools
from ckptools.cli import app
from ckptools.consolidate.source_records import CopiedBytes, SourceRecords, joined
from ckptools.consolidate.writers.layout import Job
from ckptools.errors import DamagedError, NotWholeError
from ckptools.files.opening import OpenFiles
from ckptools.model.shards import Shard
from ckptools.model.tensor import Tensor
from ckptools.model.tree import tensors_in
from ckptools.tensor_io.checksums import Record, crc32, stored_records
from ckptools.text import fqn_of
from tests.truth import FIXTURES

OUTPUTS = ("out.pt", "out.safetensors", "out.dcp")
FSDP2 = FIXTURES / "torch2.4.1-fsdp2-w3"
HSDP = FIXTURES / "torch2.6.0-fsdp1-hsdp2x2-w4"
FLAT = FIXTURES / "composer-0.14.1-torch2.0.1-local-w4"
EMB = "model.emb.weight"


@pytest.fixture
def copied(tmp_path):
    """Copies a fixture to a place where it can be harmed."""
    return lambda source: Path(shutil.copytree(source, tmp_path / "run"))


def shard_of(run: Path, fqn: str, rank: int) -> Shard:
    tensors = {fqn_of(p): t for p, t in tensors_in(ckptools.open(run, all_ranks=True).tree)}
    return next(s for s in tensors[fqn].found if s.rank == rank)


def flip(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


def harm(run: Path, fqn: str, rank: int) -> Shard:
    """Flip a bit of what a rank holds of a tensor."""
    shard = shard_of(run, fqn, rank)
    flip(shard.source.path, shard.source.offset)
    return shard


def content(path: Path) -> dict[str, bytes]:
    tree = ckptools.open(path, all_ranks=True).tree
    return {fqn_of(p): t.numpy().tobytes() for p, t in tensors_in(tree)}


@pytest.mark.slow
@pytest.mark.parametrize("out", OUTPUTS)
def test_a_flipped_bit_is_refused_in_one_line_that_names_all_there_is_to_know(out, copied, tmp_path):
    shard = harm(copied(FSDP2), EMB, 1)
    result = CliRunner().invoke(app, ["consolidate", str(tmp_path / "run"), "-o", str(tmp_path / out)])
    assert (result.exit_code, result.stdout, result.stderr.count("\n")) == (4, "", 1)
    for word in ("rank1.pt", "emb.weight", shard.source.record, f"{shard.source.crc:08x}", "--allow-missing"):
        assert word in result.stderr
    assert [p.name for p in tmp_path.iterdir()] == ["run"]


@pytest.mark.slow
@pytest.mark.parametrize("out", OUTPUTS)
def test_unchecked_takes_the_flipped_bit_over_and_says_that_nothing_was_compared(out, copied, tmp_path):
    harm(copied(FSDP2), EMB, 1)
    ckptools.consolidate(FSDP2, tmp_path / f"right-{out}", only="all")
    arguments = ["consolidate", str(tmp_path / "run"), "-o", str(tmp_path / out), "--only", "all", "--unchecked"]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0 and "source checksums: not compared (--unchecked)" in result.stdout
    right, wrong = content(tmp_path / f"right-{out}"), content(tmp_path / out)
    assert [name for name in right if right[name] != wrong[name]] == [EMB]


@pytest.mark.slow
@pytest.mark.parametrize("out", OUTPUTS)
def test_what_a_damaged_record_touches_is_left_out_and_listed_and_nothing_else(out, copied, tmp_path):
    shard = harm(copied(FSDP2), EMB, 1)
    ckptools.consolidate(FSDP2, tmp_path / f"right-{out}", only="all")
    done = ckptools.consolidate(tmp_path / "run", tmp_path / out, only="all", allow_missing=True)
    right, written = content(tmp_path / f"right-{out}"), content(tmp_path / out)
    assert right.pop(EMB) and written == right
    assert list(done.missing) == [EMB] and "is damaged" in done.left_out[EMB]
    row = json.loads((tmp_path / f"{out}.left-out.json").read_text())["missing"][0]
    assert row["regions"] == [{"offsets": list(shard.box.offsets), "sizes": list(shard.box.sizes)}]


def test_a_damaged_region_is_filled_and_the_rest_of_the_tensor_stays(copied, tmp_path):
    box = harm(copied(FSDP2), EMB, 1).box
    ckptools.consolidate(FSDP2, tmp_path / "right.pt", only="model")
    ckptools.consolidate(tmp_path / "run", tmp_path / "out.pt", only="model", allow_missing=True, fill="nan")
    right, written = (torch.load(tmp_path / name, weights_only=True) for name in ("right.pt", "out.pt"))
    right["emb.weight"][tuple(slice(o, o + n) for o, n in zip(box.offsets, box.sizes, strict=True))] = float("nan")
    for name in right:
        torch.testing.assert_close(written[name], right[name], rtol=0, atol=0, equal_nan=True)


@pytest.mark.slow
def test_every_tensor_of_a_damaged_flat_parameter_is_touched(copied, tmp_path):
    run = copied(FLAT)
    tensors = [(fqn_of(p), t) for p, t in tensors_in(ckptools.open(run, all_ranks=True).tree)]
    flat = max(stored_records(tensors), key=lambda found: len(found.owners))
    flip(flat.record.path, flat.record.end - 1)
    done = ckptools.consolidate(run, tmp_path / "out.pt", allow_missing=True)
    assert len(flat.owners) > 2 and set(done.missing) == {fqn for fqn, _ in flat.owners}


def test_tied_weights_are_both_touched(tmp_path):
    weight = torch.ones(8, 8)
    torch.save({"a": weight, "b": weight, "c": torch.zeros(3)}, tmp_path / "x.pt")
    source = next(t.shards[0].source for _, t in tensors_in(ckptools.open(tmp_path / "x.pt").tree))
    flip(tmp_path / "x.pt", source.offset)
    done = ckptools.consolidate(tmp_path / "x.pt", tmp_path / "y.safetensors", allow_missing=True)
    assert set(done.missing) == {"a", "b"} and list(content(tmp_path / "y.safetensors")) == ["c"]


@pytest.mark.slow
def test_another_ranks_right_copy_is_taken_in_the_place_of_a_damaged_one(copied, tmp_path):
    harm(copied(HSDP), EMB, 1)
    verdict = ckptools.verify(tmp_path / "run", deep=True).verdict
    assert (verdict.whole, verdict.recoverable, verdict.joinable) == (False, True, True)
    ckptools.consolidate(HSDP, tmp_path / "right.pt", only="model")
    done = ckptools.consolidate(tmp_path / "run", tmp_path / "out.pt", only="model")
    assert content(tmp_path / "out.pt") == content(tmp_path / "right.pt")
    assert not done.missing and any("another rank's copy is right" in note for note in done.notes)


def test_a_value_of_one_rank_is_no_copy_of_another_ranks(tmp_path):
    for rank in (0, 1):
        torch.save({"model": {"w": torch.ones(2)}, "noise": torch.full((4,), float(rank))}, tmp_path / f"rank{rank}.pt")
    harm(tmp_path, "noise", 0)
    done = ckptools.consolidate(tmp_path, tmp_path / "out.pt", allow_missing=True)
    assert list(done.missing) == ["noise.0"] and list(content(tmp_path / "out.pt")) == ["model.w", "noise.1"]


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 2])
@pytest.mark.parametrize("harm", [Path.unlink, lambda path: flip(path, 4482)], ids=["missing", "damaged"])
def test_what_a_rank_has_for_itself_is_not_lost_in_silence(harm, rank, copied, tmp_path):
    folder = copied(FIXTURES / "verl-fsdp2-bf16") / "ckpt/global_step_3/actor"
    harm(folder / f"extra_state_world_size_4_rank_{rank}.pt")
    done = ckptools.consolidate(folder, tmp_path / "all.pt")
    ((name, why),) = done.left_out.items()
    assert name == f"extra_state.rng.{rank}" and why.startswith(f"what rank {rank} had for itself: ")
    assert f"extra_state_world_size_4_rank_{rank}.pt" in why and why in (tmp_path / "all.pt.left-out.json").read_text()
    assert (done.verdict.whole, done.verdict.recoverable) == (False, True)
    assert not ckptools.consolidate(folder, tmp_path / "model.safetensors").left_out


def test_weights_of_half_precision_do_not_take_the_place_of_damaged_master_copies(copied, tmp_path):
    run = copied(FIXTURES / "megatron-tp2dp2-distopt") / "ckpt"
    flip(next(run.rglob("__2_0.distcp")), 3800)
    with pytest.raises(NotWholeError, match=r"the fp32 master copies are lost: .* weights='module'"):
        ckptools.consolidate(run, tmp_path / "out.safetensors")
    module = ckptools.open(run, all_ranks=True, weights="module")
    assert ckptools.consolidate(module, tmp_path / "out.safetensors").tensors == 20


def test_a_dry_run_with_check_lists_all_that_is_damaged_and_one_without_says_what_it_did_not_do(copied, tmp_path):
    run = copied(FSDP2)
    for fqn, rank in ((EMB, 0), (EMB, 2), ("model.conv.weight", 1)):
        harm(run, fqn, rank)
    with pytest.raises(NotWholeError, match="CK004") as error:
        ckptools.consolidate(run, tmp_path / "out.pt", dry_run=True, check=True)
    assert {(p.code, p.tensor) for p in error.value.problems} == {("CK004", EMB), ("CK004", "model.conv.weight")}
    result = CliRunner().invoke(app, ["consolidate", str(run), "-o", str(tmp_path / "out.pt"), "--dry-run"])
    assert result.exit_code == 0 and "source checksums: not compared; --check" in result.stdout


@pytest.mark.parametrize("place", ["before", "after"])
@pytest.mark.parametrize("out", OUTPUTS)
def test_a_bit_that_no_tensor_sees_counts_as_the_records_own(out, place, tmp_path):
    storage = torch.arange(1000, dtype=torch.float32)
    torch.save({"w": storage[300:700]}, tmp_path / "x.pt")
    source = next(t.shards[0].source for _, t in tensors_in(ckptools.open(tmp_path / "x.pt").tree))
    start, nbytes = source.record_span
    assert nbytes == 4000 and source.offset == start + 1200
    flip(tmp_path / "x.pt", start if place == "before" else start + nbytes - 1)
    with pytest.raises(DamagedError, match="w: record data/0: CRC-32 is"):
        ckptools.consolidate(tmp_path / "x.pt", tmp_path / out)


@settings(max_examples=60)
@given(data=st.data(), content=st.binary(min_size=2, max_size=300))
def test_pieces_that_overlap_are_judged_as_the_record_that_they_are_of(tmp_path_factory, data, content):
    path = tmp_path_factory.mktemp("pieces") / "file"
    path.write_bytes(b"head" + content)
    place = st.integers(0, len(content) - 1).flatmap(lambda a: st.tuples(st.just(a), st.integers(a, len(content))))
    for stated, right in ((crc32(content), True), (crc32(content) ^ 1, False)):
        with OpenFiles() as files:
            records = SourceRecords(files, [Job("w", None, "uint8", 0, 0)])  # type: ignore[arg-type]  # its name is told
            record = Record(path, "data/0", 4, len(content), stated)
            try:
                for a, b in data.draw(st.lists(place, min_size=1, max_size=6)):
                    records.add(record, CopiedBytes(0, 4 + a, b - a, crc32(content[a:b])))
                records.compare()
            except DamagedError:
                assert not right
            else:
                assert right and records.right == {record}


@pytest.mark.parametrize("out", ["out.pt", "out.safetensors"])
def test_views_that_overlap_in_one_storage_are_written_whole(out, tmp_path):
    storage = torch.arange(50_000, dtype=torch.float32)
    torch.save({"a": storage[:40_000], "b": storage[10_000:], "c": storage[20_000:30_000]}, tmp_path / "x.pt")
    done = ckptools.consolidate(tmp_path / "x.pt", tmp_path / out)
    assert (done.checksums.right, done.checksums.without) == (1, 0)
    assert content(tmp_path / out) == content(tmp_path / "x.pt")


def test_there_is_no_nan_to_fill_integers_with(tmp_path):
    torch.save({"model": {"n": torch.arange(6), "w": torch.ones(6)}}, tmp_path / "x.pt")
    flip(tmp_path / "x.pt", _offset(tmp_path / "x.pt", "model.n"))
    options = {"only": "model", "allow_missing": True}
    done = ckptools.consolidate(tmp_path / "x.pt", tmp_path / "nan.pt", fill="nan", **options)
    assert "there is no NaN in int64" in done.left_out["n"] and list(content(tmp_path / "nan.pt")) == ["w"]
    ckptools.consolidate(tmp_path / "x.pt", tmp_path / "zero.pt", fill="zero", **options)
    assert torch.load(tmp_path / "zero.pt", weights_only=True)["n"].tolist() == [0] * 6


def _offset(path: Path, fqn: str) -> int:
    tensors: dict[str, Tensor] = {fqn_of(p): t for p, t in tensors_in(ckptools.open(path).tree)}
    return tensors[fqn].shards[0].source.offset


@pytest.mark.parametrize("out", OUTPUTS)
def test_a_source_without_checksums_is_told_once(out, tmp_path):
    torch.save({"w": torch.ones(3)}, tmp_path / "old.bin", _use_new_zipfile_serialization=False)
    result = CliRunner().invoke(app, ["consolidate", str(tmp_path / "old.bin"), "-o", str(tmp_path / out)])
    assert result.stdout.count("source checksums: there are none in the source") == 1


@pytest.mark.parametrize("out", OUTPUTS)
def test_the_records_that_were_compared_are_counted(out, tmp_path):
    done = ckptools.consolidate(FSDP2, tmp_path / out, only="model")
    shards = [s for job in done.layout.jobs for s in job.tensor.shards if s.source]
    read = {(s.source.path, s.source.record) for s in shards if s.source.record_span[1]}
    assert (done.checksums.right, done.checksums.without) == (len(read), 0) and len(read) > 40


@pytest.mark.parametrize("out", OUTPUTS)
def test_numbers_that_are_not_finite_are_told_in_one_line(out, tmp_path):
    odd = {"a": torch.tensor([1.0, float("nan")]), "b": torch.tensor([float("inf")]).bfloat16()}
    torch.save({**odd, "c": torch.ones(3)}, tmp_path / "x.pt")
    result = CliRunner().invoke(app, ["consolidate", str(tmp_path / "x.pt"), "-o", str(tmp_path / out)])
    assert result.exit_code == 0 and result.stderr.count("NaN or infinity seen in 2 tensors: a, b\n") == 1


def test_numbers_that_a_narrower_dtype_cannot_hold_are_told_too(tmp_path):
    torch.save({"big": torch.tensor([1e30]), "small": torch.tensor([1.0])}, tmp_path / "x.pt")
    done = ckptools.consolidate(tmp_path / "x.pt", tmp_path / "y.pt", dtype="float16")
    assert done.odd == ("big",) and np.isinf(ckptools.open(tmp_path / "y.pt").tree["big"].numpy()).all()


def test_bytes_of_a_record_that_follow_each_other_are_one_piece_with_one_checksum():
    parts = [CopiedBytes(0, at, len(data), zlib.crc32(data)) for at, data in ((10, b"cd"), (7, b"abc"), (20, b"x"))]
    assert joined(parts) == [CopiedBytes(0, 7, 5, zlib.crc32(b"abccd")), parts[2]]
