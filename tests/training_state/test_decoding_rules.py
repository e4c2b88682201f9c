"""Weights in codes of each library become its own values, bit for bit; parts that do not fit are refused by name."""

from __future__ import annotations

import json
import shutil
import tempfile
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

import ckptools
from ckptools.cli import app
from ckptools.errors import CkptoolsError, NotWholeError, ReadError, RefusedError
from ckptools.files.opening import OpenFiles
from ckptools.formats.open import open_checkpoint
from ckptools.model.regions import Box, contiguous_strides
from ckptools.model.shards import Packing, Source
from ckptools.tensor_io.read import dequantized, read_box, unpacked
from ckptools.training_state import packed_values
from ckptools.training_state.decoding_rules import AWQ_ORDER

DECODED = Path(__file__).parent / "decoded"
NAMES = sorted(path.stem for path in DECODED.glob("*.safetensors"))


class Case(NamedTuple):
    """The tensors of a scheme as a checkpoint has them, its config, and the library's values."""

    parts: dict[str, torch.Tensor]
    config: dict
    truth: dict[str, torch.Tensor]

    def folder(self, path, config=True, **changed):
        """Write a Hugging Face folder; `changed` replaces parts of layer 0, None removes one."""
        state = {**self.parts, "embed.weight": torch.ones(4, 8)}
        for name, value in changed.items():
            key = next(key for key in [*state, f"layers.0.{name}"] if key.endswith(name))
            state = {k: v for k, v in state.items() if k != key} | ({} if value is None else {key: value})
        path.mkdir()
        save_file({k: v.contiguous() for k, v in state.items()}, path / "model.safetensors", {"format": "pt"})
        if config:
            (path / "config.json").write_text(json.dumps(self.config if config is True else config))
        return path

    def stated(self, **changes):
        """The config with other statements about the quantization."""
        return {**self.config, "quantization_config": {**self.config["quantization_config"], **changes}}


def case(name):
    with safe_open(DECODED / f"{name}.safetensors", "pt") as file:
        tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118  # it is no dict
        config = json.loads(file.metadata()["config"])
    parts, truth = ({k[len(at) :]: v for k, v in tensors.items() if k.startswith(at)} for at in ("in/", "out/"))
    return Case(parts, config, truth)


def same(one, other):
    """Whether two tensors have the same dtype, shape and bits; any NaN equals any other."""
    if (one.dtype, one.shape) != (other.dtype, other.shape):
        return False
    nan = one.isnan()
    return nan.equal(other.isnan()) and one[~nan].view(torch.uint8).equal(other[~nan].view(torch.uint8))


def written(path, out, **options):
    ckptools.open(path).consolidate(out, dequantize=True, **options)
    return ckptools.open(out).model


# -- values ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
def test_values_are_those_of_the_library_bit_for_bit(tmp_path, name):
    known = case(name)
    written(known.folder(tmp_path / "m"), tmp_path / "o.safetensors")
    found = load_file(tmp_path / "o.safetensors")
    assert found.keys() == {*known.truth, "embed.weight"}
    assert [key for key, value in known.truth.items() if not same(found[key], value)] == []


@pytest.mark.parametrize("form", ["pt", "dcp"])
@pytest.mark.parametrize("name", ["int4-zero-points", "gptq-int3", "gpt-oss"])
def test_every_output_has_them(tmp_path, name, form):
    known = case(name)
    model = written(known.folder(tmp_path / "m"), tmp_path / f"o.{form}")
    assert model.keys() == {*known.truth, "embed.weight"}
    assert all(same(model[key].load(), value) for key, value in known.truth.items())


@pytest.mark.parametrize(
    "name", ["int4-group", "int5-channel", "mxfp4", "nvfp4", "fp8-scale-inv", "gpt-oss", "deepseek-scale"]
)
def test_parts_with_unmistakable_names_need_no_config(tmp_path, name):
    known = case(name)
    torch.save({"model": known.parts, "step": 3}, tmp_path / "m.pt")
    if name == "fp8-scale-inv":
        known = known._replace(truth={k: v for k, v in known.truth.items() if not k.startswith("layers.1.")})
        torch.save({k: v for k, v in known.parts.items() if not k.startswith("layers.1.")}, tmp_path / "m.pt")
    model = written(tmp_path / "m.pt", tmp_path / "o.safetensors")
    assert all(same(model[key].load(), value) for key, value in known.truth.items())


@pytest.mark.parametrize(
    ("name", "box"),
    [
        ("int3-tensor", Box((3, 9), (2, 33))), ("int4-zero-points", Box((3, 30), (5, 9))),
        ("int4-g-idx", Box((1, 5), (3, 60))), ("fp8-block", Box((30, 3), (10, 20))), ("nvfp4", Box((2, 7), (1, 40))),
        ("gptq-int3", Box((9, 10), (70, 23))), ("gptq_v2-int8", Box((0, 63), (96, 1))), ("awq", Box((5, 2), (9, 60))),
        ("gpt-oss", Box((1, 31, 2), (1, 300, 5))),
    ],
)  # fmt: skip
def test_any_region_is_that_of_the_whole(tmp_path, monkeypatch, name, box):
    monkeypatch.setattr("ckptools.tensor_io.read.BAND", 37)
    known = case(name)
    key, truth = next(iter(known.truth.items()))
    with OpenFiles() as files:
        checkpoint = open_checkpoint(known.folder(tmp_path / "m"))
        tensor = dequantized(packed_values.unpacked(checkpoint, files, compare=True).tree[key])
    found = read_box(tensor, box)
    part = truth[tuple(slice(o, o + n) for o, n in zip(box.offsets, box.sizes, strict=True))]
    assert found.tobytes() == part.contiguous().view(torch.uint8).numpy().tobytes()


@given(st.data())
def test_codes_are_unpacked_as_a_stream_of_bits(data):
    bits, width = data.draw(st.integers(1, 8)), data.draw(st.sampled_from([8, 32]))
    axis = data.draw(st.sampled_from([-1, -2]))
    order = AWQ_ORDER if (bits, width) == (4, 32) and data.draw(st.booleans()) else ()
    count, across = data.draw(st.integers(1, 5)) * 32, data.draw(st.integers(1, 3))
    codes = data.draw(st.lists(st.integers(0, (1 << bits) - 1), min_size=count * across, max_size=count * across))
    rows = np.array(codes).reshape(across, count)
    stored = rows.reshape(across, -1, 8)[:, :, np.argsort(order)].reshape(across, count) if order else rows
    streams = ["".join(f"{code:0{bits}b}"[::-1] for code in row) for row in stored.tolist()]
    words = [[int(one[at : at + width][::-1], 2) for at in range(0, len(one), width)] for one in streams]
    packed = np.array(words, f"<u{width // 8}")
    full, packed = (rows, packed) if axis == -1 else (rows.T, packed.T.copy())
    box = drawn_box(data, full.shape)
    source = Source(Path(), 0, f"uint{width}", packed.shape, contiguous_strides(packed.shape), "", (0, 0))

    def read(part):
        first = np.unravel_index(part.offset // (width // 8), packed.shape)
        return packed[tuple(slice(int(o), int(o) + n) for o, n in zip(first, part.shape, strict=True))]

    found = unpacked(source, Packing(bits, axis, order), box, read)
    assert found.tolist() == full[tuple(slice(o, o + n) for o, n in zip(box.offsets, box.sizes, strict=True))].tolist()


def drawn_box(data, shape):
    """A box in a shape."""
    offsets = [data.draw(st.integers(0, n - 1)) for n in shape]
    return Box(tuple(offsets), tuple(data.draw(st.integers(1, n - o)) for n, o in zip(shape, offsets, strict=True)))


def test_values_are_decoded_a_band_at_a_time(tmp_path, monkeypatch):
    sizes = []
    whole = np.take
    monkeypatch.setattr(np, "take", lambda a, *rest: sizes.append(a.size) or whole(a, *rest))
    monkeypatch.setattr("ckptools.tensor_io.read.BAND", 1 << 12)
    rows, columns = 256, 1024
    parts = {
        "qweight": torch.randint(-(2**31), 2**31 - 1, (columns // 8, rows)).to(torch.int32),
        "qzeros": torch.zeros(columns // 128, rows // 8, dtype=torch.int32),
        "scales": torch.ones(columns // 128, rows, dtype=torch.float16),
    }
    config = {"quantization_config": {"quant_method": "gptq", "bits": 4, "group_size": 128}}
    known = Case({f"layers.0.{k}": v for k, v in parts.items()}, config, {})
    known.folder(tmp_path / "m")
    sizes.clear()
    found = written(tmp_path / "m", tmp_path / "o.safetensors")["layers.0.weight"].load()
    assert max(sizes) <= 1 << 12 and len(sizes) > 64
    shifts = torch.arange(0, 32, 4)
    codes = (parts["qweight"][:, None] >> shifts[None, :, None] & 15).reshape(columns, rows)
    assert torch.equal(found, (codes - 1).T.half())


# -- what is written ---------------------------------------------------------------------------------------------------


def test_weights_have_their_own_names_in_their_own_places_and_companions_are_left_out(tmp_path):
    known = case("gptq-int4")
    state = {"a": torch.ones(2), **known.parts, "layers.0.bias": torch.ones(3)}
    torch.save(state, tmp_path / "m.pt")
    (tmp_path / "config.json").write_text(json.dumps(known.config))
    done = ckptools.open(tmp_path / "m.pt").consolidate(tmp_path / "o.pt", dequantize=True)
    assert list(torch.load(tmp_path / "o.pt")) == ["a", "layers.0.weight", "layers.0.bias"]
    assert "dequantized, as GPTQModel.int4 does: layers.0.weight" in done.notes


@pytest.mark.parametrize("name", NAMES)
def test_as_many_parameters_are_counted_as_are_written(tmp_path, name):
    known = case(name)
    written(known.folder(tmp_path / "m"), tmp_path / "o.safetensors")
    found = [CliRunner().invoke(app, ["inspect", str(tmp_path / n), "--json"]) for n in ("m", "o.safetensors")]
    before, after = (json.loads(one.stdout)["sections"][0]["params"] for one in found)
    assert before == after == 32 + sum(value.numel() for value in known.truth.values())


def test_another_dtype_may_be_asked_for(tmp_path):
    known = case("nvfp4")
    found = written(known.folder(tmp_path / "m"), tmp_path / "o.safetensors", dtype="fp32")
    assert all(same(found[key].load(), value.float()) for key, value in known.truth.items())


def test_show_says_the_shape_of_the_weight_and_the_groups_of_its_scales(tmp_path):
    known = case("int4-group")
    rows = ckptools.open(known.folder(tmp_path / "m")).show("layers.0.weight_packed").rows
    (row,) = (row for row in rows if row.shards)
    assert (row.shape, row.dtype) == ((16, 64), "bfloat16")
    assert {part.name: part.per for part in row.shards[0].parts}["scale"] == "[1, 32]"


# -- damage ------------------------------------------------------------------------------------------------------------


def ints(*shape, fill=0, dtype=torch.int32):
    return torch.full(shape, fill, dtype=dtype)


G_IDX = (torch.arange(64) // 32).int()

MISFITS = [
    (
        "fp8-scale-inv",
        {"0.weight_scale_inv": torch.ones(4, 4)},
        {},
        r"\[4, 4\], do not fit blocks of \[16, 16\]",
    ),
    ("fp8-scale-inv", {}, {"weight_block_size": [32, 16]}, r"do not fit blocks of \[32, 16\] of its shape, \[64, 48\]"),
    ("fp8-scale-inv", {"0.weight_scale_inv": torch.ones(4)}, {}, r"scales, \[4\], do not fit its shape"),
    ("fp8-scale-inv", {"0.weight_scale_inv": ints(4, 3)}, {}, r"its scale_inv is int32"),
    ("int4-group", {"0.weight_scale": torch.ones(16, 3)}, {}, r"its 64 columns are no multiple of its 3 groups"),
    ("int4-group", {"0.weight_scale": torch.ones(16, 4)}, {}, r"groups of 16, and the config says 32"),
    ("int4-group", {"0.weight_scale": torch.ones(15, 2)}, {}, r"scales, \[15, 2\], do not fit its shape, \[16, 64\]"),
    ("int4-group", {"0.weight_shape": torch.tensor([16, 65])}, {}, r"do not fit its shape, \[16, 65\]"),
    ("int4-group", {"0.weight_shape": torch.tensor([-16, 64])}, {}, r"do not fit its shape, \[-16, 64\]"),
    ("int4-group", {"0.weight_shape": torch.tensor([16, 2**62])}, {}, r"do not fit its shape"),
    ("int4-group", {"0.weight_shape": torch.ones(2)}, {}, r"its shape is float32"),
    ("int4-zero-points", {"0.weight_zero_point": ints(3, 2)}, {}, r"its zero_point does not fit its shape: \[3, 2\]"),
    ("int8", {"0.weight_zero_point": ints(15, 1, dtype=torch.int8)}, {}, r"its zero_point does not fit its shape"),
    ("int8", {"0.weight_zero_point": torch.ones(16, 1)}, {}, r"its zero_point is float32"),
    ("int4-g-idx", {"0.weight_g_idx": ints(96, fill=3)}, {}, r"does not name each of 3 groups 32 times"),
    ("int4-g-idx", {"0.weight_g_idx": ints(96, fill=-2)}, {}, r"does not name each of 3 groups 32 times"),
    ("int4-g-idx", {"0.weight_g_idx": ints(95)}, {}, r"its g_idx does not fit its shape"),
    ("mxfp4", {"0.weight_scale": ints(8, 2, dtype=torch.uint8)}, {}, r"its scale does not fit its shape: \[8, 2\]"),
    ("nvfp4", {"0.weight_global_scale": torch.ones(2)}, {}, r"its global_scale does not fit its shape"),
    ("gpt-oss", {"_proj_scales": ints(2, 8, 15, dtype=torch.uint8)}, {}, r"its scales does not fit its shape"),
    ("gptq-int4", {"0.scales": torch.ones(2, 95).half()}, {}, r"do not fit its scales, \[2, 95\]"),
    ("gptq-int4", {"0.scales": torch.ones(3, 96).half()}, {}, r"do not fit its scales, \[3, 96\]"),
    ("gptq-int4", {"0.qzeros": ints(2, 12, fill=-1)}, {}, r"a zero point is 15, and 1 more does not fit 4 bits"),
    ("gptq-int4", {"0.g_idx": G_IDX + 1}, {}, r"its g_idx names groups beyond its 2"),
    ("gptq-int4", {"0.g_idx": G_IDX - 1}, {}, r"its g_idx names groups beyond its 2"),
    ("gptq-int4", {"0.g_idx": G_IDX[:-9].clone()}, {}, r"its qweight, \[8, 96\], and qzeros, \[2, 12\], do not fit"),
    ("gptq-int4", {"0.g_idx": None}, {}, r"its g_idx is not here, and the config says desc_act"),
    ("gptq-int4", {}, {"group_size": 16}, r"64 inputs have 2 groups, and the config says groups of 16"),
    ("awq", {"0.scales": torch.ones(2, 41).half()}, {}, r"do not fit its scales, \[2, 41\]"),
    ("awq", {"0.scales": torch.ones(3, 40).half()}, {}, r"do not fit its scales, \[3, 40\]"),
    ("awq", {}, {"group_size": 64}, r"64 inputs have 2 groups, and the config says groups of 64"),
]


@pytest.mark.parametrize(("name", "changed", "stated", "why"), MISFITS)
def test_parts_that_do_not_fit_together_are_refused_by_name(tmp_path, name, changed, stated, why):
    known = case(name)
    path = known.folder(tmp_path / "m", known.stated(**stated), **changed)
    with pytest.raises(
        NotWholeError, match=rf"CK106  \S+.*: codes of .*, but .*{why}.*: ckptools does not know its values"
    ):
        ckptools.open(path).consolidate(tmp_path / "o.safetensors", dequantize=True)
    assert [one.name for one in tmp_path.iterdir()] == ["m"]


def test_columns_in_an_order_of_their_own_need_the_order(tmp_path):
    known = case("int4-g-idx")
    (group,) = known.config["quantization_config"]["config_groups"].values()
    groups = {"group_0": {**group, "weights": {**group["weights"], "actorder": "group"}}}
    path = known.folder(tmp_path / "m", known.stated(config_groups=groups), **{"0.weight_g_idx": None})
    with pytest.raises(
        NotWholeError, match="its g_idx is not here, and the config says that its columns have an order"
    ):
        written(path, tmp_path / "o.safetensors")


@pytest.mark.parametrize("stated", [{"checkpoint_format": "GPTQ"}, {"checkpoint_format": None}, {"format": "gptq"}])
def test_the_older_format_of_gptq_is_known_in_every_spelling(tmp_path, stated):
    known = case("gptq-int4")
    found = written(known.folder(tmp_path / "m", known.stated(**stated)), tmp_path / "o.safetensors")
    assert same(found["layers.0.weight"].load(), known.truth["layers.0.weight"])


@pytest.mark.parametrize(
    ("name", "part", "why"),
    [
        ("int4-zero-points", "0.weight_zero_point", "its zero_point is not here"),
        ("nvfp4", "0.weight_global_scale", "its global_scale is not here"),
        ("int4-group", "0.weight_shape", "without their shape|its shape is not here"),
        ("awq", "0.qzeros", "its qzeros is not here"),
    ],
)
def test_a_companion_that_is_lost_is_named(tmp_path, name, part, why):
    path = case(name).folder(tmp_path / "m", **{part: None})
    with pytest.raises(NotWholeError, match=why):
        ckptools.open(path).consolidate(tmp_path / "o.safetensors", dequantize=True)


def test_a_weight_beside_its_codes_is_not_chosen_in_silence(tmp_path):
    known = case("int4-group")
    path = known._replace(parts={**known.parts, "layers.0.weight": torch.ones(16, 64)}).folder(tmp_path / "m")
    with pytest.raises(NotWholeError, match=r"layers\.0\.weight: .*the weight itself lies beside its codes"):
        ckptools.open(path).consolidate(tmp_path / "o.safetensors", dequantize=True)


def test_blocks_that_two_sizes_fit_are_refused_without_a_statement(tmp_path):
    parts = {
        "layers.0.weight": torch.ones(192, 128).to(torch.float8_e4m3fn),
        "layers.0.weight_scale_inv": torch.ones(2, 1),
    }
    known = Case(parts, {"quantization_config": {"quant_method": "fp8"}}, {})
    with pytest.raises(NotWholeError, match=r"blocks of \[128, 128\] or \[96, 128\] alike, and no config says which"):
        written(known.folder(tmp_path / "m"), tmp_path / "o.safetensors")
    shutil.rmtree(tmp_path / "m")
    found = written(
        known.folder(tmp_path / "m", known.stated(weight_block_size=[128, 128])), tmp_path / "o.safetensors"
    )
    assert found["layers.0.weight"].load().eq(1).all()


def test_a_flipped_bit_in_a_part_that_is_looked_at_first_is_noticed(tmp_path):
    known = case("gptq-int4")
    torch.save(known.parts, tmp_path / "m.pt")
    (tmp_path / "config.json").write_text(json.dumps(known.config))
    (shard,) = ckptools.open(tmp_path / "m.pt").model["layers.0.g_idx"].found
    data = bytearray((tmp_path / "m.pt").read_bytes())
    data[shard.source.offset] ^= 1
    (tmp_path / "m.pt").write_bytes(data)
    with pytest.raises(NotWholeError, match=r"layers\.0\.weight.*damaged"):
        ckptools.open(tmp_path / "m.pt").consolidate(tmp_path / "o.safetensors", dequantize=True)


# -- what stays refused ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "stated", "words"),
    [
        ("gptq-int4", {"checkpoint_format": "marlin"}, "gptq int4, groups of 32"),
        ("gptq-int4", {"checkpoint_format": "gptq_p"}, "gptq int4, groups of 32"),
        ("gptq-int4", {"quant_method": "auto-round"}, "auto-round int4, groups of 32"),
        ("gptq-int4", {"format": "bitblas"}, "gptq int4, groups of 32"),
        ("gptq-int4", {"checkpoint_format": 2}, "gptq int4, groups of 32"),
        ("auto-round-int4", {"packing_format": "auto_round:mlx"}, "auto-round int4, groups of 32"),
        ("auto-round-int4", {"packing_format": None}, "auto-round int4, groups of 32"),
        ("auto-round-int4", {"data_type": "mx_fp"}, "auto-round int4, groups of 32"),
        ("auto-round-int4", {"act_bits": 8}, "auto-round int4, groups of 32"),
        ("auto-round-int4", {"rotation_config": {"block_size": 32}}, "auto-round int4, groups of 32"),
        ("modelopt-nvfp4", {"quant_algo": "NVFP4_AWQ"}, "modelopt NVFP4_AWQ, groups of 16"),
        ("modelopt-nvfp4", {"quant_algo": "MIXED_PRECISION"}, "modelopt MIXED_PRECISION, groups of 16"),
        ("awq", {"zero_point": False}, "awq int4, groups of 32"),
        ("awq", {"backend": "llm-awq"}, "awq int4, groups of 32"),
        ("awq", {"version": "gemv"}, "awq int4, groups of 32"),
        ("awq", {"version": "exllama"}, "awq int4, groups of 32"),
        ("fp8-channel", {"quant_method": "modelopt"}, "modelopt"),
        ("int4-group", {"transform_config": {"config_groups": {"R1": {}}}}, "compressed-tensors, pack-quantized int4"),
        ("int4-group", {"sparsity_config": {"format": "sparse-24-bitmask"}}, "compressed-tensors, pack-quantized int4"),
    ],
)
def test_forms_for_one_kernel_and_other_methods_are_refused_by_name(tmp_path, name, stated, words):
    known = case(name)
    with pytest.raises(RefusedError, match=f"in codes of {words}.*of which ckptools makes no values"):
        written(known.folder(tmp_path / "m", known.stated(**stated)), tmp_path / "o.safetensors")


def test_a_weight_of_modelopt_whose_inputs_are_scaled_too_is_refused(tmp_path):
    known = case("modelopt-nvfp4")
    parts = {**known.parts, "layers.0.pre_quant_scale": torch.ones(64)}
    with pytest.raises(
        RefusedError, match=r"in codes of modelopt NVFP4, groups of 16.*of which ckptools makes no values"
    ):
        written(known._replace(parts=parts).folder(tmp_path / "m"), tmp_path / "o.safetensors")


def test_a_scale_without_a_stated_block_is_of_deepseeks_blocks_or_refused(tmp_path):
    known = case("deepseek-scale")
    halved = torch.cat([known.parts["layers.0.attn.wq.scale"]] * 5)  # as blocks of 14 x 16 would have
    path = known.folder(tmp_path / "m", False, **{"wq.scale": halved})
    with pytest.raises(NotWholeError, match="do not fit blocks of"):
        written(path, tmp_path / "o.safetensors")
    with pytest.raises(NotWholeError, match="is not one for each block"):
        written(known.folder(tmp_path / "n", False, **{"wq.scale": torch.ones(())}), tmp_path / "o.safetensors")


def test_modelopts_own_file_states_the_quantization_too(tmp_path):
    known = case("modelopt-nvfp4")
    path = known.folder(tmp_path / "m", {"model_type": "llama", "dtype": "bfloat16"})
    (path / "hf_quant_config.json").write_text('{"quantization": {"quant_algo": "NVFP4", "group_size": 16}}')
    found = written(path, tmp_path / "o.safetensors")
    assert same(found["layers.0.weight"].load(), known.truth["layers.0.weight"])


def test_gptq_and_awq_without_a_config_are_not_told_apart(tmp_path):
    torch.save(case("gptq-int4").parts, tmp_path / "m.pt")
    with pytest.raises(RefusedError, match="in codes of gptq or awq"):
        written(tmp_path / "m.pt", tmp_path / "o.safetensors")


# -- a Hugging Face folder ---------------------------------------------------------------------------------------------


def test_a_folder_like_the_quantized_one_has_its_names_and_a_config_that_states_no_quantization(tmp_path):
    known = case("fp8-channel")
    path = known.folder(tmp_path / "m", {**known.config, "text_config": {"quantization_config": {"bits": 4}, "a": 1}})
    done = ckptools.open(path).consolidate(f"{tmp_path}/o/", like=path, dequantize=True, check=True)
    found = load_file(tmp_path / "o/model.safetensors")
    assert found.keys() == {*known.truth, "embed.weight"}
    assert all(same(found[key], value) for key, value in known.truth.items())
    config = json.loads((tmp_path / "o/config.json").read_text())
    assert config == {"model_type": "llama", "dtype": "bfloat16", "text_config": {"a": 1}}
    assert "config.json is written without its quantization_config" in done.notes
    assert ckptools.open(tmp_path / "o").problems == () and "quantization" in (path / "config.json").read_text()


def test_a_folder_like_a_plain_one_keeps_its_config_byte_for_byte(tmp_path):
    known = case("gptq-int4")
    path = known.folder(tmp_path / "m")
    plain = Case({**known.truth}, {"model_type": "llama", "dtype": "float16"}, {}).folder(tmp_path / "p")
    ckptools.open(path).consolidate(f"{tmp_path}/o/", like=plain, dequantize=True)
    assert same(load_file(tmp_path / "o/model.safetensors")["layers.0.weight"], known.truth["layers.0.weight"])
    assert (tmp_path / "o/config.json").read_bytes() == (plain / "config.json").read_bytes()


def test_like_without_dequantize_is_refused(tmp_path):
    path = case("fp8-channel").folder(tmp_path / "m")
    plain = Case(case("fp8-channel").truth, {"model_type": "llama"}, {}).folder(tmp_path / "p")
    with pytest.raises(CkptoolsError):
        ckptools.open(path).consolidate(f"{tmp_path}/o/", like=plain)
    assert not (tmp_path / "o").exists()


# -- in Python ---------------------------------------------------------------------------------------------------------


def test_a_dequantized_checkpoint_has_values_that_are_read_when_they_are_needed(tmp_path):
    known = case("int4-zero-points")
    ck = ckptools.open(known.folder(tmp_path / "m")).dequantized()
    assert ck.model.keys() == {*known.truth, "embed.weight"} and ck.quantized == ()
    tensor, truth = ck["layers.1.weight"], known.truth["layers.1.weight"]
    assert same(tensor.load(), truth) and same(tensor[2:7, ::3], truth[2:7, ::3]) and same(tensor.dequantize(), truth)
    assert [row.problem for row in ck.stats().rows if row.name in known.truth] == [
        "is stored as codes, of whose values no figures are made"
    ] * 2


def test_diff_compares_values_with_those_of_another_checkpoint(tmp_path):
    known = case("gptq-int3")
    ck = ckptools.open(known.folder(tmp_path / "m")).dequantized()
    plain = Case(dict(known.truth), {"model_type": "llama"}, {})
    assert ckptools.diff(ck, plain.folder(tmp_path / "same"), values=True).same
    changed = known.truth["layers.0.weight"].clone()
    changed[5, 6] += 1
    other = Case({"layers.0.weight": changed}, {"model_type": "llama"}, {}).folder(tmp_path / "other")
    (row,) = (row for row in ckptools.diff(ck, other, values=True).tensors if row.verdict != "same")
    assert (row.name, row.verdict) == ("layers.0.weight", "differs") and row.max == pytest.approx(1, abs=1e-3)


def test_what_cannot_be_decoded_keeps_its_codes_or_says_why(tmp_path):
    known = case("awq")
    codes = ckptools.open(known.folder(tmp_path / "m", known.stated(version="gemv"))).dequantized()
    assert codes["layers.0.qweight"].are_codes and len(codes.quantized) == 1
    path = known.folder(tmp_path / "n", **{"0.scales": torch.ones(3, 40).half()})
    tensor = ckptools.open(path).dequantized()["layers.0.weight"]
    assert "do not fit its scales" in tensor.note
    with pytest.raises(ReadError, match="do not fit its scales"):
        tensor.load()


# -- what lies beside --------------------------------------------------------------------------------------------------


def test_scales_of_activations_are_left_out_with_their_weights_and_that_is_said(tmp_path):
    known = case("nvfp4")
    beside = {"layers.0.input_global_scale": torch.ones(1), "layers.0.k_scale": torch.ones(1)}
    path = known._replace(parts={**known.parts, **beside, "other.input_scale": torch.ones(1)}).folder(tmp_path / "m")
    done = ckptools.open(path).consolidate(tmp_path / "o.safetensors", dequantize=True)
    found = load_file(tmp_path / "o.safetensors")
    assert found.keys() == {*known.truth, "embed.weight", "layers.0.k_scale", "other.input_scale"}
    assert "scales of activations are left out: layers.0.input_global_scale" in done.notes


@pytest.mark.parametrize("name", ["int4-group", "nvfp4", "gpt-oss"])
def test_parts_may_lie_in_different_files_and_in_dcp(tmp_path, name):
    known = case(name)
    names, parts = [f"model-0000{n}-of-00002.safetensors" for n in (1, 2)], sorted(known.parts.items())
    (tmp_path / "m").mkdir()
    for file, own in zip(names, (parts[::2], parts[1::2]), strict=True):
        save_file({key: value.contiguous() for key, value in own}, tmp_path / "m" / file, {"format": "pt"})
    index = {"weight_map": {key: names[n % 2] for n, (key, _) in enumerate(parts)}}
    (tmp_path / "m/model.safetensors.index.json").write_text(json.dumps(index))
    (tmp_path / "m/config.json").write_text(json.dumps(known.config))
    dcp.save({"model": known.parts}, checkpoint_id=tmp_path / "dcp", no_dist=True)
    for source in ("m", "dcp"):
        model = written(tmp_path / source, tmp_path / f"{source}.safetensors")
        assert all(same(model[key].load(), value) for key, value in known.truth.items())


def test_codes_that_are_cut_over_ranks_are_refused(tmp_path):
    known = case("int4-group")
    cut = {
        key: value.chunk(2) if key.endswith("weight_packed") else (value, value) for key, value in known.parts.items()
    }
    for rank in range(2):
        torch.save({"model": {key: value[rank].clone() for key, value in cut.items()}}, tmp_path / f"rank{rank}.pt")
    with pytest.raises(NotWholeError):
        ckptools.open(tmp_path / "rank0.pt").consolidate(tmp_path / "o.safetensors", dequantize=True)
    assert sorted(one.name for one in tmp_path.iterdir()) == ["rank0.pt", "rank1.pt"]


ODD = [None, True, -1, 0, 2**70, 1.5, "", "4", [], [128], [0, 0], [128, 128, 128], {}, {"a": 1}]


@given(st.data())
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
def test_any_statement_of_a_config_gives_the_right_values_or_an_error(tmp_path, data):
    known = case(data.draw(st.sampled_from(["fp8-scale-inv", "fp8-block", "int4-zero-points", "gptq-int4", "awq"])))
    stated = json.loads(json.dumps(known.config["quantization_config"]))
    weights = next(iter(stated.get("config_groups", {"": {"weights": {}}}).values()))["weights"]
    place = data.draw(st.sampled_from([stated, weights]))
    keys = ["bits", "group_size", "format", "checkpoint_format", "weight_block_size", "dynamic", "config_groups"]
    keys += ["num_bits", "block_structure", "symmetric", "actorder", "strategy", "type", "version", "quant_method"]
    place[data.draw(st.sampled_from(keys))] = data.draw(st.sampled_from(ODD))
    folder = Path(tempfile.mkdtemp(dir=tmp_path))
    try:
        model = written(known.folder(folder / "m", known.stated() | {"quantization_config": stated}), folder / "o.pt")
    except CkptoolsError:
        return
    assert all(same(model[key].load(), value) for key, value in known.truth.items())
