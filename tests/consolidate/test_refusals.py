"""What consolidate refuses, what it says then, and that nothing is left behind."""

from __future__ import annotations

import functools
import json
import os
import shutil
from collections import Counter
from pathlib import Path

import pytest
import torch

import ckptools
from ckptools.errors import (
    CkptoolsError,
    NoSpaceError,
    NotWholeError,
    OutputExistsError,
    ReadError,
    RefusedError,
    UsageError,
)
from tests.truth import FIXTURES

COMPOSER = FIXTURES / "composer-0.13.5-torch1.13.1-sharded-w4"
HSDP = FIXTURES / "torch2.6.0-fsdp1-hsdp2x2-w4"
FSDP2 = FIXTURES / "torch2.4.1-fsdp2-w3"


@pytest.fixture
def composer(tmp_path) -> Path:
    """A copy whose files can be broken."""
    folder = tmp_path / "run"
    shutil.copytree(COMPOSER, folder, ignore=shutil.ignore_patterns("truth*", "HOW.md"))
    return folder


def leftovers(folder: Path) -> list[str]:
    return [p.name for p in folder.iterdir() if p.name not in ("run",)]


def test_a_file_that_is_one_foreign_object_is_refused_with_its_class(tmp_path):
    torch.save(functools.partial(int, base=2), tmp_path / "args.pt")
    with pytest.raises(RefusedError, match="nothing that can be written, but an object of class functools"):
        ckptools.consolidate(tmp_path / "args.pt", tmp_path / "out.pt", only="all")
    assert leftovers(tmp_path) == ["args.pt"]


def flip(path: Path, record: str) -> None:
    """Change one byte of a record's payload."""
    from ckptools.files.opening import File
    from ckptools.files.zip_archive import Container

    with File(path) as file:
        offset, _ = Container(file).payload(record)
    data = bytearray(path.read_bytes())
    data[offset] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize("rank", [0, 1, 3])
def test_a_missing_rank_is_named_with_every_gap_and_nothing_is_written(composer, tmp_path, rank):
    (composer / f"ep0-ba5-rank{rank}.pt").unlink()
    with pytest.raises(NotWholeError, match=rf"NOT WHOLE: rank {rank} missing; \d+ tensors have gaps;") as error:
        ckptools.consolidate(composer, tmp_path / "out.pt")
    assert Counter(p.code for p in error.value.problems)["CK001"] == 1
    assert {p.code for p in error.value.problems} == {"CK001", "CK101"} and len(error.value.problems) > 20
    assert leftovers(tmp_path) == []


def test_allow_missing_leaves_out_what_has_holes_and_lists_it(composer, tmp_path):
    (composer / "ep0-ba5-rank3.pt").unlink()
    done = ckptools.consolidate(composer, tmp_path / "m.pt", only="model", allow_missing=True)
    state = torch.load(tmp_path / "m.pt", weights_only=True)
    listed = json.loads((tmp_path / "m.pt.left-out.json").read_text())["left_out"]
    assert {row["name"] for row in listed} == set(done.left_out)
    assert "model.emb.weight" in done.left_out and "model.emb.weight" not in state
    # Three rows on ranks 0 to 2: rank 3 never held any of it.
    assert "model.gate" in state


def test_copies_that_differ_are_refused_by_name_where_no_checksum_may_tell_which_is_right(tmp_path):
    shutil.copytree(HSDP, tmp_path / "run")
    ck = ckptools.open(tmp_path / "run" / "rank3.pt", only_this_file=True)
    record = ck.model["emb.weight"].on_rank(3)[0].source.record
    flip(tmp_path / "run" / "rank3.pt", record)
    with pytest.raises(NotWholeError, match=r"CK105.*emb\.weight.*rank 3 holds other bytes than rank 1"):
        ckptools.consolidate(tmp_path / "run", tmp_path / "out.pt", only="model", unchecked=True)
    ckptools.consolidate(tmp_path / "run", tmp_path / "out.pt", only="model", prefer_rank=1)


def test_preferring_a_rank_settles_tensors_and_not_hyperparameters(tmp_path):
    for rank in (0, 1):
        groups = [{"lr": 0.1 * (rank + 1), "params": [0]}]
        optimizer = {"state": {0: {"exp_avg": torch.full((2,), float(rank))}}, "param_groups": groups}
        torch.save({"model": {"w": torch.full((2,), float(rank))}, "optim": optimizer}, tmp_path / f"rank{rank}.pt")
    with pytest.raises(NotWholeError, match=r"CK105.*param_groups\.0\.lr"):
        ckptools.consolidate(tmp_path, tmp_path / "all.pt", prefer_rank=1)
    ckptools.consolidate(tmp_path, tmp_path / "m.pt", only="model", prefer_rank=1)
    assert torch.load(tmp_path / "m.pt", weights_only=True)["w"].tolist() == [1.0, 1.0]


def test_a_preferred_rank_that_is_not_here_is_a_usage_error(tmp_path):
    with pytest.raises(UsageError, match="no file of that rank"):
        ckptools.consolidate(HSDP, tmp_path / "out.pt", prefer_rank=9)


def test_a_missing_replica_group_is_no_loss(tmp_path):
    shutil.copytree(HSDP, tmp_path / "run")
    (tmp_path / "run" / "rank2.pt").unlink()
    ckptools.consolidate(HSDP, tmp_path / "whole.safetensors", provenance=False)
    ckptools.consolidate(tmp_path / "run", tmp_path / "three.safetensors", provenance=False)
    assert (tmp_path / "whole.safetensors").read_bytes() == (tmp_path / "three.safetensors").read_bytes()


def test_an_existing_output_is_kept_unless_forced(tmp_path):
    (tmp_path / "out.pt").write_text("mine")
    with pytest.raises(OutputExistsError, match="force"):
        ckptools.consolidate(FSDP2, tmp_path / "out.pt")
    assert (tmp_path / "out.pt").read_text() == "mine"
    ckptools.consolidate(FSDP2, tmp_path / "out.pt", force=True)
    assert ckptools.open(tmp_path / "out.pt").whole


def test_an_output_in_one_file_is_in_the_way_of_one_in_several(tmp_path):
    (tmp_path / "m.safetensors").write_text("mine")
    with pytest.raises(OutputExistsError, match=r"m\.safetensors: exists; force=True overwrites it"):
        ckptools.consolidate(FSDP2, tmp_path / "m.safetensors", max_shard_size=2000)
    assert [path.name for path in tmp_path.iterdir()] == ["m.safetensors"]


def test_force_removes_nothing_that_is_read_or_called_otherwise(tmp_path):
    ckptools.consolidate(FSDP2, tmp_path / "m.safetensors", max_shard_size=2000)
    index = tmp_path / "m.safetensors.index.json"
    others = {"m-00001-of-00002.pt", "m-1-of-2.safetensors", "mm-00001-of-00002.safetensors"}
    for name in others:
        (tmp_path / name).write_text("mine")
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    with pytest.raises(OutputExistsError, match="is a file of the checkpoint itself"):
        ckptools.consolidate(index, tmp_path / "m.safetensors", max_shard_size=4000, force=True)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before
    done = ckptools.consolidate(FSDP2, tmp_path / "m.safetensors", max_shard_size=4000, force=True)
    assert {path.name for path in tmp_path.iterdir()} == {*others, *(path.name for path in done.files)}


@pytest.mark.parametrize("name", ["out.pt", "out.safetensors", "out.dcp"])
def test_a_link_that_leads_nowhere_is_an_existing_output(tmp_path, name):
    (tmp_path / name).symlink_to(tmp_path / "nowhere")
    with pytest.raises(OutputExistsError):
        ckptools.consolidate(FSDP2, tmp_path / name)
    assert (tmp_path / name).is_symlink() and not (tmp_path / name).exists()


def test_a_source_file_is_never_an_output(composer):
    before = (composer / "ep0-ba5-rank0.pt").read_bytes()
    with pytest.raises(OutputExistsError, match="checkpoint itself"):
        ckptools.consolidate(composer, composer / "ep0-ba5-rank0.pt", force=True)
    with pytest.raises(OutputExistsError, match="one more rank file"):
        ckptools.consolidate(composer, composer / "ep0-ba5-rank9.pt")
    assert (composer / "ep0-ba5-rank0.pt").read_bytes() == before


def test_an_output_that_does_not_fit_is_refused_before_anything_is_written(tmp_path):
    # One stored element that stands for 2**50: 4 PiB when written out.
    torch.save({"w": torch.zeros(1).expand(2**50)}, tmp_path / "run")
    with pytest.raises(NoSpaceError, match="needs 45035996273"):
        ckptools.consolidate(tmp_path / "run", tmp_path / "out.safetensors")
    assert leftovers(tmp_path) == []


def test_a_tensor_that_no_disk_holds_is_named_with_its_bytes(tmp_path):
    torch.save({"w": torch.zeros(1).expand(2**59)}, tmp_path / "run")
    with pytest.raises(RefusedError, match=f"w would take {2**61} bytes; no disk holds that") as error:
        ckptools.consolidate(tmp_path / "run", tmp_path / "out.safetensors")
    assert error.value.path == tmp_path / "run" and leftovers(tmp_path) == []


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"only": "weights"}, "choose one of model, optimizer, all"),
        ({"dtype": "int8"}, "floating-point dtype"),
        ({"tied": "twice"}, "keep or drop"),
    ],
)
def test_options_that_mean_nothing_are_said_in_one_line(tmp_path, options, told):
    with pytest.raises(UsageError, match=told):
        ckptools.consolidate(FSDP2, tmp_path / "out.pt", **options)


def test_an_unknown_suffix_and_an_absent_folder_are_usage_errors(tmp_path):
    with pytest.raises(UsageError, match="no output format"):
        ckptools.consolidate(FSDP2, tmp_path / "out.xyz")
    with pytest.raises(UsageError, match="there is no folder"):
        ckptools.consolidate(FSDP2, tmp_path / "nowhere" / "out.pt")


def test_names_that_collide_when_joined_are_refused_for_safetensors(tmp_path):
    torch.save({"model": {"a": {"b": torch.ones(1)}, "a.b": torch.ones(2), "c": torch.ones(3)}}, tmp_path / "x.pt")
    with pytest.raises(RefusedError, match=r"two tensors would be called model\.a\.b"):
        ckptools.consolidate(tmp_path / "x.pt", tmp_path / "x.safetensors", only="all")


def test_a_dtype_that_safetensors_lacks_is_refused(tmp_path):
    torch.save({"w": torch.ones(2, dtype=torch.complex128)}, tmp_path / "x.pt")
    with pytest.raises(RefusedError, match="complex128, which safetensors cannot hold"):
        ckptools.consolidate(tmp_path / "x.pt", tmp_path / "x.safetensors")


LIMITED = """
import resource, sys
resource.setrlimit(resource.RLIMIT_FSIZE, (40_000, 40_000))
from ckptools.cli import run
sys.argv = ["ckptools", "consolidate", sys.argv[1], "-o", sys.argv[2]]
run()
"""


def test_local_pieces_without_their_shapes_are_refused_in_one_line(tmp_path):
    with pytest.raises(CkptoolsError, match="shapes") as error:
        ckptools.consolidate(FIXTURES / "torch2.6.0-fsdp1-local-w4", tmp_path / "out.pt")
    assert "\n" not in str(error.value)
    assert leftovers(tmp_path) == []


def test_a_source_whose_time_alone_changed_is_refused(tmp_path):
    torch.save({"w": torch.ones(3)}, tmp_path / "x.pt")
    ck = ckptools.open(tmp_path / "x.pt")
    os.utime(tmp_path / "x.pt", (1, 1))
    for out in ("m.pt", "m.safetensors", "m.dcp"):
        with pytest.raises(ReadError, match="changed since it was opened: it was written to"):
            ckptools.consolidate(ck, tmp_path / out)
    assert [p.name for p in tmp_path.iterdir()] == ["x.pt"]


def test_what_is_wrong_with_model_ema_does_not_forbid_the_model(tmp_path):
    for rank in range(2):
        optimizer = {"state": {0: {"m": torch.ones(2)}}, "param_groups": [{"lr": 0.1, "params": [0]}]}
        tree = {"model": {"w": torch.ones(2)}, "model_ema": {"w": torch.ones(2), "updates": rank}, "optim": optimizer}
        tree["optim_ema"] = {"updates": rank}
        torch.save(tree, tmp_path / f"rank{rank}.pt")
    found = {p.tensor for p in ckptools.open(tmp_path, all_ranks=True).problems}
    assert found == {"model_ema.updates", "optim_ema.updates"}
    for part in ("model", "optimizer"):
        ckptools.consolidate(tmp_path / "rank0.pt", tmp_path / f"{part}.safetensors", only=part)
    with pytest.raises(NotWholeError, match="model_ema"):
        ckptools.consolidate(tmp_path / "rank0.pt", tmp_path / "all.pt", only="all")
