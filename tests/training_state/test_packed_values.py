"""Weights that bitsandbytes packed: their values are its own, and what is in another form is refused by name."""

from __future__ import annotations

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

import ckptools
from ckptools.errors import CkptoolsError, NotWholeError, RefusedError
from ckptools.files.opening import OpenFiles
from ckptools.formats.open import open_checkpoint
from ckptools.model.regions import Box
from ckptools.tensor_io.read import dequantized, load, read_box
from ckptools.training_state.packed_values import unpacked
from tests.truth import FIXTURES

PACKED = FIXTURES / "bitsandbytes-w4w8/ckpt"
TRUTH = {name.removeprefix("model/"): value for name, value in load_file(PACKED.parent / "truth.safetensors").items()}
STATE = load_file(PACKED / "model.safetensors")
NF4 = "nf4.weight.quant_state.bitsandbytes__nf4"


def written(tmp_path, state, **options):
    save_file(state, tmp_path / "in.safetensors")
    ckptools.open(tmp_path / "in.safetensors").consolidate(tmp_path / "out.safetensors", dequantize=True, **options)
    return load_file(tmp_path / "out.safetensors")


def restated(**changes):
    """The state dict with another description of the weight `nf4`."""
    text = json.dumps({**json.loads(bytes(STATE[NF4].tolist())), **changes})
    return {**STATE, NF4: torch.tensor(list(text.encode()), dtype=torch.uint8)}


@pytest.mark.parametrize("name", ["model.pt", "model.safetensors"])
@pytest.mark.parametrize("form", ["safetensors", "pt", "dcp"])
def test_values_are_those_of_bitsandbytes_bit_for_bit(tmp_path, name, form):
    ckptools.open(PACKED / name).consolidate(tmp_path / f"out.{form}", dequantize=True, only="model")
    found = ckptools.open(tmp_path / f"out.{form}").model
    assert found.keys() == TRUTH.keys()
    for key, value in TRUTH.items():
        loaded = found[key].load()
        assert (loaded.dtype, loaded.shape) == (value.dtype, value.shape) and torch.equal(loaded, value)


def test_without_the_option_every_tensor_is_written_as_it_is(tmp_path):
    ckptools.open(PACKED / "model.pt").consolidate(tmp_path / "out.safetensors")
    found = load_file(tmp_path / "out.safetensors")
    assert found.keys() == STATE.keys() and all(torch.equal(found[key], value) for key, value in STATE.items())


@pytest.mark.parametrize(
    ("name", "box"), [("nf4", Box((3, 5), (9, 70))), ("fp4", Box((120, 1), (10, 129))), ("int8", Box((2, 0), (3, 9)))]
)
def test_any_region_is_that_of_the_whole(name, box):
    with OpenFiles() as files:
        tree = unpacked(open_checkpoint(PACKED / "model.pt"), files, compare=True).tree
    found, truth = dequantized(tree[f"{name}.weight"]), TRUTH[f"{name}.weight"]
    part = truth[tuple(slice(o, o + n) for o, n in zip(box.offsets, box.sizes, strict=True))]
    assert torch.equal(load(found), truth)
    assert read_box(found, box).tobytes() == part.contiguous().view(torch.uint8).numpy().tobytes()


def test_codes_are_never_converted_as_if_they_were_values(tmp_path):
    with pytest.raises(RefusedError, match=r"in codes of bitsandbytes nf4 .*no values to convert; add dequantize"):
        ckptools.open(PACKED / "model.pt").consolidate(tmp_path / "out.safetensors", dtype="float32")
    assert not list(tmp_path.iterdir())
    found = written(tmp_path, STATE, dtype="float32")
    assert all(torch.equal(found[key], value.float()) for key, value in TRUTH.items())


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(key for key in STATE if key.startswith(("nf4.weight", "int8.SCB", "int8.w"))))
def test_a_flipped_bit_in_any_part_is_noticed(tmp_path, name):
    path = shutil.copy(PACKED / "model.pt", tmp_path)
    (shard,) = ckptools.open(path).model[name].found
    with open(path, "r+b") as file:
        file.seek(shard.source.offset)
        (byte,) = file.read(1)
        file.seek(shard.source.offset)
        file.write(bytes([byte ^ 8]))
    with pytest.raises(CkptoolsError, match=rf"{name.partition('.')[0]}\.weight.*damaged"):
        ckptools.open(path).consolidate(tmp_path / "out.safetensors", dequantize=True)
    done = ckptools.open(path).consolidate(tmp_path / "out.pt", dequantize=True, allow_missing=True)
    assert [key.rpartition("model.")[2] for key in done.left_out] == [f"{name.partition('.')[0]}.weight"]


@pytest.mark.parametrize(
    ("state", "why"),
    [
        (restated(shape=[24, 95]), "its codes do not fit its shape"),
        (restated(shape=[48, 96]), "its absmax does not fit its shape"),
        (restated(shape=None), "states no shape"),
        (restated(shape=7), "states no shape"),
        (restated(blocksize=128), "its absmax does not fit its shape"),
        (restated(blocksize="64"), "describes another form"),
        (restated(dtype="float64"), "describes another form"),
        (restated(quant_type="fp4"), "describes another form"),
        (restated(nested_blocksize=None), "does not describe its nested scales"),
        (restated(nested_offset="2"), "does not describe its nested scales"),
        ({**STATE, NF4: torch.zeros(9, dtype=torch.uint8)}, "is no JSON"),
        ({**STATE, NF4: torch.tensor([91, 93], dtype=torch.uint8)}, "is no JSON object"),
        ({**STATE, NF4: torch.zeros(9)}, "is no text"),
        ({**STATE, "nf4.weight.quant_map": STATE["fp4.weight.quant_map"].clone()}, "its quant_map is not that of nf4"),
        ({**STATE, "nf4.weight": STATE["nf4.weight"].reshape(1, -1).clone()}, "those of a transposed weight"),
        ({k: v for k, v in STATE.items() if k != "nf4.weight.nested_quant_map"}, "its nested_quant_map does not fit"),
        ({**STATE, "int8.SCB": torch.ones(9)}, "its SCB does not fit its shape"),
        ({**STATE, "int8.weight_format": torch.ones((), dtype=torch.uint8)}, "its weight_format is not row-major"),
    ],
)  # fmt: skip
def test_a_weight_in_another_form_is_refused_by_name(tmp_path, state, why):
    with pytest.raises(NotWholeError, match=rf"CK106  (nf4|int8)\.weight: packed by bitsandbytes as \w+, but .*{why}"):
        written(tmp_path, state)


def test_a_weight_without_a_part_that_others_have_is_not_whole(tmp_path):
    with pytest.raises(NotWholeError, match=r"CK107  nf4\.weight.*without their absmax, which 2 other weights have"):
        written(tmp_path, {k: v for k, v in STATE.items() if k != "nf4.weight.absmax"})


def test_each_rank_has_codes_with_scales_of_its_own(tmp_path):
    for rank in range(2):
        torch.save({**STATE, "own": torch.full((8,), rank)}, tmp_path / f"rank{rank}.pt")
    ckptools.open(tmp_path / "rank0.pt").consolidate(tmp_path / "o.safetensors", dequantize=True, prefer_rank=0)
    found = load_file(tmp_path / "o.safetensors")
    assert all(torch.equal(found[key], value) for key, value in TRUTH.items())
    torch.save({**STATE, "int8.SCB": STATE["int8.SCB"] * 2}, tmp_path / "rank1.pt")
    with pytest.raises(NotWholeError, match=r"CK105  int8\.SCB"):
        ckptools.open(tmp_path / "rank0.pt").consolidate(tmp_path / "o2.safetensors", dequantize=True)


def test_show_says_the_class_the_block_and_the_scales():
    (row,) = (row for row in ckptools.open(PACKED / "model.pt").show("nf4.weight").rows if row.name == "nf4.weight")
    assert (row.dtype, row.shape) == ("bfloat16", (24, 96))
    parts = {part.name: (part.dtype, part.shape, part.per) for part in row.shards[0].parts}
    assert parts["absmax"] == ("uint8", (36,), "64 elements") and parts["nested_absmax"][2] == "256 scales"
    assert row.shards[0].stored_as == "bitsandbytes.nf4"
