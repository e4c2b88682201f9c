"""A `.pt` that is cut in the middle: what is in front of the cut is read bit for bit, and the rest is a gap."""

from __future__ import annotations

import io
import random
import shutil
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch

import ckptools
from ckptools.display.next_command import next_command
from ckptools.errors import NotWholeError, ReadError
from tests.truth import FIXTURES

# Of its 80,298 bytes rank 2's file has the pickle in the first 50,618, and ten storages before byte 53,500.
FSDP = FIXTURES / "torch2.13.0-fsdp1-sharded-w4"


def saved() -> tuple[dict[str, torch.Tensor], bytes]:
    """A model of ten tensors, and the bytes that torch.save writes of it."""
    torch.manual_seed(0)
    model = {f"layer.{n}.weight": torch.randn(40 + n, 33) for n in range(10)}
    out = io.BytesIO()
    torch.save({"model": model, "step": 7}, out)
    return model, out.getvalue()


def ends(data: bytes) -> dict[str, int]:
    """Where the payload of each record ends."""
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        infos = archive.infolist()
    names = [info.filename.partition("/")[2] for info in infos]
    return {
        name: info.header_offset + 30 + sum(lengths(data, info.header_offset)) + info.file_size
        for name, info in zip(names, infos, strict=True)
    }


def lengths(data: bytes, at: int) -> tuple[int, int]:
    return int.from_bytes(data[at + 26 : at + 28], "little"), int.from_bytes(data[at + 28 : at + 30], "little")


def opened(folder: Path, data: bytes) -> Any:
    (folder / "cut.pt").write_bytes(data)
    return ckptools.open(folder / "cut.pt", salvage=True, only_this_file=True)


@pytest.mark.parametrize("seed", range(12))
def test_every_tensor_in_front_of_the_cut_is_read_and_no_other(seed, tmp_path):
    model, data = saved()
    at = random.Random(seed).randrange(ends(data)["data/0"] + 40, len(data) - 1)
    ck = opened(tmp_path, data[:at])
    complete = [f"layer.{n}.weight" for n in range(10) if ends(data)[f"data/{n}"] + 24 <= at]
    found = {name: tensor for name, tensor in ck.model.items() if tensor.found}
    assert set(ck.model) == set(model) and set(found) >= set(complete)
    assert len(found) - len(complete) <= 1  # a descriptor of 16 bytes may be complete where one of 24 is not
    assert all(torch.equal(tensor.load(), model[name]) for name, tensor in found.items())
    assert ck.step.value == 7


def test_it_is_never_whole_even_if_only_the_directory_is_gone(tmp_path):
    model, data = saved()
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        ck = opened(tmp_path, data[: archive.start_dir])
    assert all(torch.equal(tensor.load(), model[name]) for name, tensor in ck.model.items())
    assert ck.verify(deep=True).verdict.whole is False
    with pytest.raises(NotWholeError, match="CK002"):
        ck.consolidate(tmp_path / "x.pt")


def test_the_output_has_what_is_here_names_what_is_lost_and_says_so_when_it_is_opened_again(tmp_path):
    model, data = saved()
    ck = opened(tmp_path, data[: ends(data)["data/5"] - 100])
    done = ck.consolidate(tmp_path / "x.safetensors", allow_missing=True, check=True)
    assert {name for name in done.left_out if "layer" in name} == {f"layer.{n}.weight" for n in range(5, 10)}
    again = ckptools.open(tmp_path / "x.safetensors")
    assert {name: bool(torch.equal(tensor.load(), model[name])) for name, tensor in again.model.items()} == {
        f"layer.{n}.weight": True for n in range(5)
    }
    assert again.verify().verdict.whole is False and any(p.code == "CK020" for p in again.problems)


def test_a_bit_that_flipped_in_front_of_the_cut_is_found_by_its_checksum(tmp_path):
    _, data = saved()
    broken = bytearray(data[: ends(data)["data/5"]])
    broken[ends(data)["data/1"] - 50] ^= 4
    ck = opened(tmp_path, bytes(broken))
    done = ck.consolidate(tmp_path / "x.pt", only="model", allow_missing=True)
    assert "CK004" not in done.left_out and "damaged" in done.left_out["layer.1.weight"]


def test_bytes_of_a_tensor_that_look_like_the_end_of_a_record_do_not_end_it(tmp_path):
    fake = b"PK\7\x08" + bytes(4) + (64).to_bytes(8, "little") * 2 + b"PK\3\4"
    values = torch.frombuffer(bytearray(bytes(32) + fake + bytes(512 - 32 - len(fake))), dtype=torch.uint8)
    torch.save({"a": values, "b": torch.ones(1000)}, tmp_path / "x.pt")
    data = (tmp_path / "x.pt").read_bytes()
    ck = opened(tmp_path, data[:-1000])
    assert torch.equal(ck.model["a"].load(), values)


@pytest.mark.parametrize("nbytes", [0, 3, 29, 100, 300])
def test_a_file_that_is_cut_in_its_pickle_has_no_names_and_is_refused(nbytes, tmp_path):
    _, data = saved()
    with pytest.raises(ReadError):
        opened(tmp_path, data[:nbytes])


def test_the_next_command_has_the_option_too(tmp_path):
    _, data = saved()
    following = next_command(opened(tmp_path, data[: ends(data)["data/5"]]))
    assert following is not None and "--salvage" in following.line and "--allow-missing" in following.line


def test_without_the_option_nothing_changes(tmp_path):
    _, data = saved()
    (tmp_path / "cut.pt").write_bytes(data[:-500])
    with pytest.raises(ReadError, match="zip directory at its end is absent"):
        ckptools.open(tmp_path / "cut.pt")


def test_a_file_with_bytes_behind_it_is_not_taken_for_one_that_is_cut(tmp_path):
    with pytest.raises(ReadError, match="extra byte"):
        opened(tmp_path, saved()[1] + b"more")


@pytest.mark.slow
def test_what_a_cut_rank_file_still_has_is_used_beside_the_others(tmp_path):
    run = Path(shutil.copytree(FSDP, tmp_path / "run"))
    whole = {n: t.load() for n, t in ckptools.open(run / "rank0.pt", all_ranks=True).model.items()}
    cut = run / "rank2.pt"
    cut.write_bytes(cut.read_bytes()[:53_500])
    lost = ckptools.open(run / "rank0.pt", all_ranks=True)
    ck = ckptools.open(run / "rank0.pt", all_ranks=True, salvage=True)
    more = [n for n, t in ck.model.items() if len(t.found) > len(lost.model[n].found)]
    assert more and [f.status for f in ck.files].count("cut") == 1
    done = ck.consolidate(tmp_path / "x.pt", only="model", allow_missing=True)
    written = torch.load(tmp_path / "x.pt", weights_only=True)
    assert set(more) & set(written) and all(torch.equal(written[name], whole[name]) for name in written)
    assert set(written) | set(done.left_out) >= set(whole) and ck.verify().verdict.whole is False


def test_a_cut_rank_file_is_filled_from_another_save_where_it_ends(tmp_path):
    run, older = (Path(shutil.copytree(FSDP, tmp_path / name)) for name in ("run", "older"))
    cut = run / "rank2.pt"
    cut.write_bytes(cut.read_bytes()[:53_500])
    ck = ckptools.open(run / "rank0.pt", all_ranks=True, salvage=True)
    done = ck.consolidate(tmp_path / "x.pt", only="model", fill_from=older / "rank0.pt", allow_missing=True)
    whole = {n: t.load() for n, t in ckptools.open(older / "rank0.pt", all_ranks=True).model.items()}
    written = torch.load(tmp_path / "x.pt", weights_only=True)
    assert done.borrowed and all(torch.equal(written[name], whole[name]) for name in whole)
