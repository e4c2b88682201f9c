"""Write one file for each scheme: config, parts of quantized weights, and the values that the library makes of them.

python make.py OUT AUTOAWQ/awq/utils/packing_utils.py
python make.py OUT    # with compressed-tensors 0.10.2: `weight_g_idx`
python make.py OUT exports    # AutoRound, ModelOpt and DeepSeek's own names
"""

import importlib.util
import json
import sys
from pathlib import Path

import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from compressed_tensors.quantization.utils import calculate_qparams
from safetensors.torch import save_file

OUT = Path(sys.argv[1])
CT, FP8 = "compressed-tensors", torch.float8_e4m3fn


def written(name, config, parts, truth, dtype="bfloat16"):
    """Parts as `in/NAME`, values as `out/NAME`, the config in the metadata."""
    content = {"model_type": "llama", "dtype": dtype, "quantization_config": config}
    tensors = {f"in/{k}": v for k, v in parts.items()} | {f"out/{k}": v for k, v in truth.items()}
    tensors = {key: value.detach().contiguous() for key, value in tensors.items()}
    save_file(tensors, OUT / f"{name}.safetensors", {"config": json.dumps(content)})


def compressed(name, form, shapes, dtype=torch.bfloat16, **weights):
    """Weights that compressed-tensors compresses, with scales from its own observers' rule, and decompresses."""
    args = QuantizationArgs(**weights)
    scheme = QuantizationScheme(targets=["Linear"], weights=args, format=form)
    compressor = BaseCompressor.get_value_from_registry(form)
    parts, truth = {}, {}
    for number, shape in enumerate(shapes):
        state = parts_of(torch.randn(shape).to(dtype), args)
        made = compressor.compress(state, scheme)
        parts |= {f"layers.{number}.{key}": value for key, value in made.items()}
        truth[f"layers.{number}.weight"] = compressor.decompress(made, scheme)["weight"]
    group = {"targets": ["Linear"], "format": form, "weights": json.loads(args.model_dump_json())}
    config = {
        "quant_method": CT,
        "quantization_status": "compressed",
        "format": form,
        "config_groups": {"group_0": group},
    }
    written(name, config, parts, truth, str(dtype).removeprefix("torch."))


def parts_of(weight, args):
    """The weight with scales and zero points of its strategy."""
    rows, columns = weight.shape
    if args.strategy in ("group", "tensor_group"):
        split = weight.unflatten(-1, (-1, args.group_size))
        low, high = split.amin(-1), split.amax(-1)
    elif args.strategy == "channel":
        low, high = weight.amin(-1, keepdim=True), weight.amax(-1, keepdim=True)
    elif args.strategy == "block":
        high_, wide = args.block_structure
        padded = torch.nn.functional.pad(weight, (0, -columns % wide, 0, -rows % high_))
        blocks = padded.unflatten(0, (-1, high_)).unflatten(-1, (-1, wide))
        low, high = blocks.amin((1, 3)), blocks.amax((1, 3))
    else:
        low, high = weight.amin().reshape(1), weight.amax().reshape(1)
    state = {"weight": weight}
    if args.strategy == "tensor_group":
        state["weight_global_scale"] = (448 * 6 / weight.abs().max().float()).reshape(1)
    scale, zero = calculate_qparams(low, high, args, global_scale=state.get("weight_global_scale"))
    if args.scale_dtype == torch.uint8:
        scale = 2.0 ** torch.floor(torch.log2(torch.maximum(-low, high).float() / 4)).clamp(-126, 120)
    return {
        **state,
        "weight_scale": scale.to(weight.dtype) if args.scale_dtype is None else scale,
        "weight_zero_point": zero,
    }


def fp8_blocks():
    """DeepSeek's blocks: `weight_dequant` is a kernel for GPUs; transformers' rule is the same where blocks divide."""
    from compressed_tensors.entrypoints.convert.converters.fp8block_dequantizer import FP8BlockDequantizer
    from transformers.integrations.finegrained_fp8 import Fp8Dequantize

    parts, truth = {}, {}
    for number, (rows, columns) in enumerate([(64, 48), (40, 24)]):
        parts[f"layers.{number}.weight"] = (torch.randn(rows, columns) * 100).to(FP8)
        parts[f"layers.{number}.weight_scale_inv"] = torch.rand(-(-rows // 16), -(-columns // 16)) / 100
        both = parts[f"layers.{number}.weight"], parts[f"layers.{number}.weight_scale_inv"]
        truth[f"layers.{number}.weight"] = FP8BlockDequantizer(weight_block_size=(16, 16))._create_dequantized_weight(
            *both
        )
        if rows % 16 == 0:
            theirs = Fp8Dequantize(None)._dequantize_one(*both, torch.bfloat16)
            assert torch.equal(theirs, truth[f"layers.{number}.weight"])
    parts["layers.2.experts.up"] = (torch.randn(3, 32, 48) * 100).to(FP8)
    parts["layers.2.experts.up_scale_inv"] = torch.rand(3, 2, 3) / 100
    truth["layers.2.experts.up"] = Fp8Dequantize(None)._dequantize_one(
        parts["layers.2.experts.up"], parts["layers.2.experts.up_scale_inv"], torch.bfloat16
    )
    written("fp8-scale-inv", {"quant_method": "fp8", "weight_block_size": [16, 16]}, parts, truth)


def gpt_oss():
    """Every code with every exponent, through the function of transformers."""
    from transformers.integrations.mxfp4 import _convert_moe_packed_tensors

    codes = torch.arange(256, dtype=torch.uint8).reshape(16, 16)
    blocks = torch.stack([codes.roll(n, 0) for n in range(16)]).reshape(2, 8, 16, 16)
    scales = torch.arange(256, dtype=torch.uint8).reshape(2, 8, 16)
    parts = {"mlp.experts.gate_up_proj_blocks": blocks, "mlp.experts.gate_up_proj_scales": scales}
    for dtype in (torch.bfloat16, torch.float16):
        values = _convert_moe_packed_tensors(blocks, scales, dtype=dtype)
        name = "gpt-oss" if dtype is torch.bfloat16 else "gpt-oss-fp16"
        written(
            name,
            {"quant_method": "mxfp4"},
            parts,
            {"mlp.experts.gate_up_proj": values},
            str(dtype).removeprefix("torch."),
        )


def gptq():
    """GPTQModel packs and dequantizes; groups in an order of their own are permuted."""
    from gptqmodel.nn_modules.qlinear.torch import TorchLinear
    from gptqmodel.quantization.config import QuantizeConfig
    from gptqmodel.utils.model import convert_gptq_v1_to_v2_format_module, convert_gptq_v2_to_v1_format_module

    for bits in (2, 3, 4, 8):
        for form in ("gptq", "gptq_v2"):
            inputs, outputs, group = 64, 96, 32
            layer = TorchLinear(
                bits=bits,
                group_size=group,
                sym=False,
                desc_act=True,
                in_features=inputs,
                out_features=outputs,
                bias=False,
                pack_dtype=torch.int32,
                register_buffers=True,
            )
            layer.optimized = True  # torch.compile wants a compiler
            order = (
                (torch.arange(inputs) // group)[torch.randperm(inputs)] if bits != 2 else torch.arange(inputs) // group
            )
            scales = (torch.rand(inputs // group, outputs) * 0.1 + 0.01).half()
            zeros = torch.randint(1 if form == "gptq" else 0, 1 << bits, scales.shape)
            codes = torch.randint(0, 1 << bits, (inputs, outputs))
            values = scales.float()[order] * (codes - zeros[order])
            linear = torch.nn.Linear(inputs, outputs, bias=False)
            linear.weight.data = values.T.contiguous()
            layer.pack_block(linear, scales.T.contiguous(), zeros.T.contiguous(), order.int())
            layer.eval()
            found = layer.super_dequantize() if hasattr(layer, "super_dequantize") else layer.dequantize_weight()
            if form == "gptq":
                convert_gptq_v2_to_v1_format_module(layer, QuantizeConfig(bits=bits))
            parts = {f"layers.0.{n}": getattr(layer, n).clone() for n in ("qweight", "qzeros", "scales", "g_idx")}
            again = found
            if form == "gptq":
                convert_gptq_v1_to_v2_format_module(layer, bits, torch.int32)
                layer.clear_weight_cache() if hasattr(layer, "clear_weight_cache") else None
                again = layer.dequantize_weight()
            assert torch.equal(found, again)
            assert (found.float() - values).abs().max() < 0.05 * (1 << bits)
            config = {
                "quant_method": "gptq",
                "bits": bits,
                "group_size": group,
                "desc_act": True,
                "sym": False,
                "checkpoint_format": form,
            }
            written(f"{form}-int{bits}", config, parts, {"layers.0.weight": again.T}, "float16")


def awq(source):
    """`dequantize_gemm` of AutoAWQ, whose module is taken from its source: the package wants a GPU."""
    spec = importlib.util.spec_from_file_location("packing_utils", source)
    awq = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(awq)
    full = lambda *shape: torch.randint(-(2**31), 2**31 - 1, shape, dtype=torch.int64).to(torch.int32)  # noqa: E731
    parts = {"qweight": full(64, 5), "qzeros": full(2, 5), "scales": (torch.rand(2, 40) * 0.1).half()}
    values = awq.dequantize_gemm(parts["qweight"], parts["qzeros"], parts["scales"], 4, 32)
    config = {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "version": "gemm"}
    written("awq", config, {f"layers.0.{k}": v for k, v in parts.items()}, {"layers.0.weight": values.T}, "float16")


def every_exponent():
    """Every code of mxfp4 with every power of two, and the zero points of int8 without packing."""
    parts = {
        "weight_packed": torch.arange(256, dtype=torch.uint8).reshape(16, 16).repeat(16, 1).reshape(16, 256),
        "weight_scale": torch.arange(256, dtype=torch.uint8).reshape(16, 16),
    }
    args = QuantizationArgs(num_bits=4, type="float", group_size=32, scale_dtype=torch.uint8)
    form = "mxfp4-pack-quantized"
    scheme = QuantizationScheme(targets=["Linear"], weights=args, format=form)
    values = BaseCompressor.get_value_from_registry(form).decompress(parts, scheme)["weight"]
    group = {"targets": ["Linear"], "format": form, "weights": json.loads(args.model_dump_json())}
    config = {"quant_method": CT, "format": form, "config_groups": {"group_0": group}}
    written("mxfp4-all", config, {f"layers.0.{k}": v for k, v in parts.items()}, {"layers.0.weight": values})


def ordered():
    """Groups in an order of their own: compressed-tensors 0.10.2 applies `weight_g_idx`, 0.20.1 passes over it."""
    from compressed_tensors.compressors.quantized_compressors.pack_quantized import PackedQuantizationCompressor

    args = QuantizationArgs(num_bits=4, group_size=32)
    compressor, order = PackedQuantizationCompressor(config=None), (torch.arange(96) // 32)[torch.randperm(96)].int()
    scale = (torch.rand(8, 3) * 0.1 + 0.01).to(torch.bfloat16)
    zeros = torch.zeros(8, 3, dtype=torch.int8)
    parts = compressor.compress_weight(torch.randn(8, 96).to(torch.bfloat16), scale, args, zeros, order)
    parts = {**parts, "weight_scale": scale, "weight_g_idx": order}
    values = compressor.decompress_weight(parts, args)
    group = {"targets": ["Linear"], "weights": json.loads(args.model_dump_json())}
    config = {"quant_method": CT, "format": "pack-quantized", "config_groups": {"group_0": group}}
    written("int4-g-idx", config, {f"layers.0.{k}": v for k, v in parts.items()}, {"layers.0.weight": values})


def auto_round():
    """AutoRound unpacks its own layers: a layer's output for the unit matrix is its weight."""
    from auto_round.export.export_to_awq.utils import WQLinear_GEMM
    from auto_round_extension.torch import qlinear_torch, qlinear_torch_zp

    full = lambda *shape: torch.randint(-(2**31), 2**31 - 1, shape, dtype=torch.int64).to(torch.int32)  # noqa: E731
    forms = {"auto_round:auto_gptq": qlinear_torch_zp.QuantLinear, "auto_round": qlinear_torch.QuantLinear}
    for form, kind in {**forms, "auto_round:auto_awq": WQLinear_GEMM}.items():
        for bits in (4,) if "awq" in form else (2, 3, 4):
            inputs, outputs = 96, 32
            layer = kind(bits, 32, inputs, outputs, False, *(["cpu"] if "awq" in form else []))
            layer.qweight.copy_(full(*layer.qweight.shape))
            layer.scales.copy_((torch.rand(layer.scales.shape) * 0.1 + 0.01).half())
            zeros = torch.randint(0, (1 << bits) - 1, (3, outputs))  # 1 more than the largest does not fit
            stream = [sum(int(z) << bits * n for n, z in enumerate(row)) for row in zeros]
            words = [[row >> 32 * n & 0xFFFFFFFF for n in range(layer.qzeros.shape[1])] for row in stream]
            layer.qzeros.copy_(torch.tensor(words).to(torch.int32))
            layer.eval()
            values = layer(torch.eye(inputs, dtype=torch.float16))
            config = {"quant_method": "auto-round", "packing_format": form, "bits": bits, "group_size": 32}
            config |= {"sym": False, "data_type": "int", "autoround_version": "0.16.1"}
            parts = {f"layers.0.{n}": getattr(layer, n) for n in ("qweight", "qzeros", "scales")}
            name = f"{form.replace('auto_round', 'auto-round').replace(':auto_', '-')}-int{bits}"
            written(name, config, parts, {"layers.0.weight": values.T}, "float16")


def modelopt():
    """NVFP4 as `export_hf_checkpoint` writes it, in `config.json` and in `hf_quant_config.json` alike."""
    from modelopt.torch.quantization.qtensor.nvfp4_tensor import NVFP4QTensor

    weight = torch.randn(24, 64).to(torch.bfloat16)
    made, scale, double = NVFP4QTensor.quantize(weight, 16)
    values = made.dequantize(scale=scale, double_scale=double, block_sizes={-1: 16})
    parts = {"weight": made._quantized_data, "weight_scale": scale, "weight_scale_2": double}
    config = {"quant_method": "modelopt", "quant_algo": "NVFP4", "group_size": 16, "producer": {"name": "modelopt"}}
    written("modelopt-nvfp4", config, {f"layers.0.{k}": v for k, v in parts.items()}, {"layers.0.weight": values})


def deepseek():
    """Names as DeepSeek-V3's `convert.py` writes them, for blocks of 128 x 128."""
    from compressed_tensors.entrypoints.convert.converters.fp8block_dequantizer import FP8BlockDequantizer

    codes, scale = (torch.randn(140, 16) * 100).to(FP8), torch.rand(2, 1) / 100
    values = FP8BlockDequantizer(weight_block_size=(128, 128))._create_dequantized_weight(codes, scale)
    parts = {"layers.0.attn.wq.weight": codes, "layers.0.attn.wq.scale": scale}
    written("deepseek-scale", {}, parts, {"layers.0.attn.wq.weight": values})


torch.manual_seed(45)
if len(sys.argv) == 2:
    ordered()
elif sys.argv[2] == "exports":
    auto_round()
    modelopt()
    deepseek()
else:
    compressed("int4-group", "pack-quantized", [(16, 64), (9, 96)], num_bits=4, group_size=32)
    compressed("int4-zero-points", "pack-quantized", [(16, 64), (9, 96)], num_bits=4, group_size=32, symmetric=False)
    compressed(
        "int8-channel-fp16", "pack-quantized", [(5, 33)], torch.float16, num_bits=8, strategy="channel", symmetric=False
    )
    compressed("int3-tensor", "pack-quantized", [(8, 70)], torch.float32, num_bits=3, strategy="tensor")
    compressed("int5-channel", "pack-quantized", [(8, 70)], num_bits=5, strategy="channel")
    compressed("int8", "int-quantized", [(16, 24)], num_bits=8, strategy="channel", symmetric=False)
    compressed("fp8-tensor", "naive-quantized", [(16, 24)], num_bits=8, type="float", strategy="tensor")
    compressed("fp8-channel", "float-quantized", [(16, 24)], num_bits=8, type="float", strategy="channel")
    compressed(
        "fp8-block",
        "float-quantized",
        [(40, 24), (64, 32)],
        torch.float32,
        num_bits=8,
        type="float",
        strategy="block",
        block_structure=[16, 16],
    )
    compressed(
        "mxfp4", "mxfp4-pack-quantized", [(16, 64)], num_bits=4, type="float", group_size=32, scale_dtype=torch.uint8
    )
    compressed("mxfp8", "mxfp8-quantized", [(16, 64)], num_bits=8, type="float", group_size=32, scale_dtype=torch.uint8)
    compressed(
        "nvfp4",
        "nvfp4-pack-quantized",
        [(16, 64)],
        num_bits=4,
        type="float",
        strategy="tensor_group",
        group_size=16,
        scale_dtype=FP8,
    )
    fp8_blocks()
    gpt_oss()
    every_exponent()
    awq(sys.argv[2])
    gptq()
