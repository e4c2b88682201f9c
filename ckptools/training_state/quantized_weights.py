"""Weights that are stored quantized in several tensors of a state dict: codes, and the tensors that decode them.

    layers.0.up.weight             the codes: fp8 or int8, or several to an element of uint8, int32 or uint32
    layers.0.up.weight_scale_inv   their companions: scales, zero points, the table of the codes, a JSON ...

Codes look like any other tensor, but casting, averaging or comparing them without their scales gives wrong results. So
each part is marked once a checkpoint has been read, whatever its format (`Tensor.coded`), and all code that reads
values checks the mark. Quantized weights are found by the names of the companions and by the codes' dtype alone;
`config.json` only names the method. Tensor classes that hold their own scales (torchao's) are handled in
`pickles.classes.codings`.

Scales of activations and of the KV cache (`input_scale`, `k_scale`, `v_scale`) belong to no weight.

Sources: transformers 5.24 (utils/quantization_config.py, quantizers/, integrations/finegrained_fp8.py, mxfp4.py,
eetq.py, bitnet.py, fbgemm_fp8.py, higgs.py); compressed-tensors 0.20.1 (`compression_param_names` in compressors/);
AutoGPTQ 0.7.1 and GPTQModel (`qlinear_*.py`: `qweight`, `qzeros`, `scales`, `g_idx`; marlin: `B`, `s`); AutoAWQ 0.2
(`WQLinear_GEMM`); bitsandbytes 0.50.2 (`QuantState.as_dict`, `Linear8bitLt._save_to_state_dict`); NVIDIA ModelOpt
(torch/export/quant_utils.py, convert_hf_config.py: `weight_scale_2`); AutoRound 0.16 (export/export_to_autoround,
inference/convert_model.py: `packing_format`); TensorRT-LLM (layers/quantized: `weights_scaling_factor`); quanto 0.2
(`WeightQBytesTensor.save_to_state_dict`); HQQ 0.2 (`HQQLinear.state_dict_keys`); AQLM 1.1 (`QuantizedLinear`); torchao
0.18 (prototype/safetensors); mlx 0.20 (`nn.QuantizedLinear`); vLLM (mistral's `qscale_weight`); DeepSeek-V3
(inference/convert.py: `scale`); QuIP# (lib/linear/quantized_linear.py: `Qidxs`); ComfyUI (`scale_weight`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any, NamedTuple

from ckptools.dtypes import ITEMSIZE, is_floating, short
from ckptools.errors import ReadError
from ckptools.files.opening import File, is_remote
from ckptools.model.checkpoint import Checkpoint
from ckptools.model.facts import ModelConfig, Scheme
from ckptools.model.problems import Code, Problem, Severity
from ckptools.model.tensor import CODES, Coded, Tensor
from ckptools.model.tree import nodes_in, of_kinds, rebuilt
from ckptools.text import and_others, few, fqn_of, plural
from ckptools.training_state.sections import Section, sections_of_kind

FP8 = ("float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz")
FP4 = "float4_e2m1fn_x2"
BYTES = ("int8", "uint8")
WORDS = ("int32", "uint32", "int16", "int64")


class Layout(NamedTuple):
    """The names of a quantized weight's parts, and the dtypes of its codes, as one library writes them.

    In a name `*` stands for the weight's own name, such as `layers.0.up.weight`; without it, the name is that of a
    module's tensor, below any module name.

    Attributes:
        words: its common name.
        methods: the `quant_method`s of configs that write it.
        codes: the name of the codes.
        scales: the name of the companion by which the codes are detected.
        beside: names of other companions.
        needed: those of `beside` that every weight has if another weight of the same layout has them.
        bits: bits of a code, if the layout fixes them; 0 for the width of an element; None if only a config or the
            shapes determine them.
        only_weights: whether integer tensors count as codes only under the name `weight`.
        decoder: the rule by which ckptools decodes the codes; "" if it knows none.
        decoded: the methods whose codes it decodes; "" stands for no config. Empty for all methods.
    """

    words: str
    methods: tuple[str, ...]
    codes: str
    scales: str
    beside: tuple[str, ...] = ()
    needed: tuple[str, ...] = ()
    dtypes: tuple[str, ...] = (*FP8, FP4, *BYTES)
    bits: int | None = 0
    only_weights: bool = False
    decoder: str = ""
    decoded: tuple[str, ...] = ()


QUANT_STATE = "*.quant_state.bitsandbytes__"
"""Prefix of the name of bitsandbytes' JSON in 4 bits; the kind follows it."""

FOUR_BITS = ("nf4", "fp4")
BITSANDBYTES = ("bitsandbytes",)
FP8_METHODS = (
    "fp8", "fbgemm_fp8", "compressed-tensors", "modelopt", "quark", "gemma", "mxfp8", "nvfp4", "bitnet",
    "blockwise_int8", "w8a8_int8", "w8a8_fp8", "fouroversix",
)  # fmt: skip
AUTO_ROUND = ("auto-round", "intel/auto-round", "auto_round")
COMPRESSED = ("*_shape", "*_zero_point", "*_g_idx", "*_global_scale")

LAYOUTS = (
    *(
        Layout(
            f"bitsandbytes {kind}", BITSANDBYTES, "*", f"{QUANT_STATE}{kind}",
            ("*.absmax", "*.quant_map", "*.nested_absmax", "*.nested_quant_map"), ("*.absmax", "*.quant_map"),
            tuple(ITEMSIZE), 4, decoder="bitsandbytes",
        )
        for kind in FOUR_BITS
    ),
    Layout("bitsandbytes int8", BITSANDBYTES, "weight", "SCB", ("weight_format",), dtypes=("int8",),
           decoder="bitsandbytes"),
    Layout("bitsandbytes, 4 bits", BITSANDBYTES, "*", "*.absmax", ("*.quant_map", "*.nested_absmax"),
           dtypes=BYTES, bits=4),
    Layout("compressed-tensors, packed", ("compressed-tensors",), "*_packed", "*_scale", COMPRESSED,
           ("*_shape", "*_global_scale"), ("int32", "uint8", FP4), None, decoder="compressed-tensors",
           decoded=("", "compressed-tensors")),
    Layout("compressed-tensors, marlin-24", ("compressed-tensors",), "*_packed", "scale_packed", ("meta",),
           dtypes=("int32",), bits=None),
    Layout("nvfp4", ("modelopt", "nvfp4"), "*", "*_scale_2", ("*_scale",), ("*_scale",), ("uint8", FP4), 4,
           decoder="modelopt", decoded=("modelopt",)),
    Layout("", FP8_METHODS, "*", "*_scale_inv", ("*_activation_scale",), decoder="fp8", decoded=("", "fp8")),
    Layout("", FP8_METHODS, "*", "*_scale", ("*_zero_point", "*_g_idx"), only_weights=True,
           decoder="compressed-tensors", decoded=("compressed-tensors",)),
    Layout("", ("fp8",), "weight", "scale", dtypes=FP8, decoder="fp8", decoded=("", "fp8")),
    Layout("", ("fp8",), "weight", "qscale_weight", dtypes=FP8),
    Layout("", (), "weight", "scale_weight", dtypes=FP8),
    Layout("mxfp4", ("mxfp4",), "*_blocks", "*_scales", dtypes=("uint8",), bits=4, decoder="mxfp4",
           decoded=("", "mxfp4")),
    Layout("gptq or awq", ("gptq", "awq", *AUTO_ROUND, "fp_quant"), "qweight", "scales", ("qzeros", "g_idx"),
           ("qzeros",), (*WORDS, *BYTES), None, decoder="gptq", decoded=("gptq", "awq", *AUTO_ROUND)),
    Layout("marlin", ("marlin", "gptq"), "B", "s", ("workspace",), dtypes=("int32",), bits=None),
    Layout("eetq int8", ("eetq",), "weight", "weight_scales", dtypes=BYTES),
    Layout("quanto", ("quanto",), "*._data", "*._scale", ("*._shift", "*._zeropoint"), bits=None),
    Layout("hqq", ("hqq", "sinq"), "W_q", "scale", ("zero", "nbits", "group_size", "shape", "axis", "packing", "meta"),
           dtypes=(*BYTES, *WORDS), bits=None),
    Layout("hqq", ("hqq", "sinq"), "W_q", "meta", dtypes=(*BYTES, *WORDS), bits=None),
    Layout("aqlm", ("aqlm",), "codes", "codebooks", ("scales",), dtypes=(*BYTES, *WORDS), bits=None),
    Layout("vptq", ("vptq",), "indices", "weight_scale", ("weight_bias", "perm"), dtypes=(*WORDS, "uint16"),
           bits=None),
    Layout("quip#", (), "Qidxs", "Wscale", ("SU", "SV", "codebook_id"), ("SU", "SV"), (*BYTES, *WORDS), None),
    Layout("affine (mlx)", ("mlx", "metal", "higgs"), "weight", "scales", ("biases", "qbiases", "tables", "tables2"),
           dtypes=("uint32", "int16", "uint8"), bits=None),
    Layout("torchao, without its description", ("torchao",), "*_qdata", "*_scale", ("*_zero_point",), bits=None),
    Layout("tensorrt-llm", (), "weight", "weights_scaling_factor", ("weights_scaling_factor_2",), bits=None),
    Layout("tensorrt-llm", (), "weight", "per_channel_scale", dtypes=BYTES, bits=None),
)  # fmt: skip
"""The layouts in the order in which they are tried: several may share the name of a companion."""

OWN = {"*_scale_inv": "*", "qzeros": "qweight", "SCB": "weight"}
"""Companions with unmistakable names, and the name of their codes: they are evidence even without codes."""

OWN_CODES = ("qweight", "W_q", "Qidxs", "weight_packed", "gate_up_proj_blocks", "down_proj_blocks")
"""Codes with unmistakable names."""

COMMON = ("scale", "s", "meta")
"""Companions whose names other modules have too, such as a norm; without codes beside them they prove nothing."""


class QuantizedWeight(NamedTuple):
    """A quantized weight: its layout, and the keys of its parts in its state dict, `codes` first."""

    layout: Layout
    keys: Mapping[str, str]


# -- the parts, by name ------------------------------------------------------------------------------------------------


_STARRED = tuple(dict.fromkeys(one.scales[1:] for one in LAYOUTS if one.scales.startswith("*")))
_NAMED = frozenset(one.scales for one in LAYOUTS if not one.scales.startswith("*"))
_BY_SCALES = {
    end: tuple((n, one) for n, one in enumerate(LAYOUTS) if one.scales in (end, f"*{end}"))
    for end in (*_STARRED, *_NAMED)
}


def weights_in(node: Mapping[Any, Any]) -> dict[str, QuantizedWeight]:
    """The quantized weights of a state dict by the keys of their codes."""
    found: dict[str, tuple[int, QuantizedWeight]] = {}
    known: dict[str, tuple[str, ...]] = {}  # millions of tensors' names have few distinct ends
    for key in node:
        if not isinstance(key, str):
            continue
        end = key.rpartition(".")[2]
        ends = known.get(end)
        if ends is None:
            ends = known[end] = tuple(one for one in _BY_SCALES if _may_end(end, one))
        if not ends:
            continue
        for order, layout in (one for name in ends for one in _BY_SCALES[name]):
            own = _stem(key, layout.scales)
            codes = None if own is None else _name(own, layout.codes)
            if own is None or codes is None or not _are_codes(node.get(codes), layout, codes):
                continue
            if codes not in found or order < found[codes][0]:
                beside = {_part(name): _name(own, name) for name in (layout.scales, *layout.beside)}
                parts = {part: key for part, key in beside.items() if key in node}
                found[codes] = order, QuantizedWeight(layout, {CODES: codes, **parts})
    return {codes: weight for codes, (_, weight) in found.items()}


def _may_end(end: str, name: str) -> bool:
    """Whether the last word of a key may name a companion."""
    return end == name.rpartition(".")[2] if "." in name or name in _NAMED else end.endswith(name)


def _stem(key: str, name: str) -> str | None:
    """The part of a key before a companion's name: the weight's name, or its module's with a dot; else None."""
    end = name.removeprefix("*")
    stem = key[: len(key) - len(end)]
    fits = key.endswith(end) and (bool(stem) if name.startswith("*") else not stem or stem.endswith("."))
    return stem if fits else None


def own_name(codes: str, layout: Layout) -> str:
    """The key that the weight would have without quantization."""
    stem = _stem(codes, layout.codes) or ""
    return stem if layout.codes.startswith("*") else f"{stem}weight"


def _name(stem: str, name: str) -> str:
    return stem + name.removeprefix("*")


def _part(name: str) -> str:
    """The short name of a companion: `weight_scale` is `scale`."""
    return "quant_state" if name.startswith(QUANT_STATE) else name.lstrip("*._")


def _are_codes(value: Any, layout: Layout, name: str) -> bool:
    if not isinstance(value, Tensor) or value.dtype not in layout.dtypes or value.kind in ("quantized", "unreadable"):
        return False
    if not layout.only_weights or value.dtype in (*FP8, FP4):
        return True
    return name.rpartition(".")[2].endswith("weight") and len(value.shape) > 1


def decoded_in(node: Mapping[Any, Any], config: ModelConfig | None) -> dict[str, tuple[str, QuantizedWeight]]:
    """The weights of a state dict that `packed_values` can decode, each with the name of the rule."""
    found = {key: (decoder_of(one, node, config), one) for key, one in weights_in(node).items()}
    return {key: (rule, one) for key, (rule, one) in found.items() if rule}


def decoder_of(weight: QuantizedWeight, node: Mapping[str, Any], config: ModelConfig | None) -> str:
    """The name of the rule by which `consolidate --dequantize` decodes a weight; "" if ckptools knows no rule."""
    layout, codes = weight.layout, node[weight.keys[CODES]]
    method, said = method_of(config), config.quantization if config is not None else {}
    if not layout.decoder or (layout.decoded and method not in layout.decoded):
        return ""
    if layout.decoder == "compressed-tensors":
        # Rotated weights and weights with zeros cut out need more than their scales.
        sparse = said.get("sparsity_config")
        plain = not said.get("transform_config") and (not isinstance(sparse, Mapping) or not sparse.get("format"))
        scale = node[weight.keys["scale"]]
        four_bits = codes.dtype == "uint8" and _bits_by_shape(codes, scale, None) == 4
        known = codes.dtype in ("int32", "int8", *FP8) or four_bits
        return layout.decoder if plain and known else ""
    if layout.decoder == "fp8":
        return layout.decoder if codes.dtype in FP8 else ""
    if layout.decoder == "modelopt":
        # Other algorithms scale the inputs of a layer too, or take its weight apart.
        module = weight.keys[CODES][: -len(_end(weight.keys[CODES]))]
        plain = said.get("quant_algo") in MODELOPT_NVFP4 and f"{module}pre_quant_scale" not in node
        return layout.decoder if plain and codes.dtype == "uint8" else ""
    if layout.decoder != "gptq":
        return layout.decoder
    form = gptq_format(method, said) if codes.dtype == "int32" else ""
    return "awq" if form == "gemm" else "gptq" if form else ""


MODELOPT_NVFP4 = ("NVFP4", "W4A16_NVFP4")


def gptq_format(method: str, said: Mapping[str, Any]) -> str:
    """The format of codes of GPTQ or AWQ that a config states; "" if ckptools does not decode it, as of one kernel."""
    if method in AUTO_ROUND:
        plain = said.get("data_type", "int") == "int" and said.get("act_bits") in (None, 16, 32)
        plain = plain and not any(said.get(key) for key in AUTO_ROUND_MORE)
        return AUTO_ROUND_FORMATS.get(str(said.get("packing_format")), "") if plain else ""
    keys, formats = GPTQ_FORMATS[method]
    stated = {str(said[key]).lower() for key in keys if said.get(key) is not None} or set(formats[:1])
    if method == "awq" and (said.get("zero_point") is False or said.get("backend") == "llm-awq"):
        return ""
    return stated.pop() if len(stated) == 1 and stated <= set(formats) else ""


GPTQ_FORMATS = {
    "gptq": (("checkpoint_format", "format"), ("gptq", "gptq_v2")),
    "awq": (("version", "checkpoint_format", "format"), ("gemm",)),
}
"""The keys of a config that state the format of codes, and the formats that ckptools decodes.

The first format is that of configs that state none, as older versions of the libraries write them.
"""

AUTO_ROUND_FORMATS = {
    "auto_round:auto_gptq": "gptq",
    "auto_round:gptqmodel": "gptq_v2",
    "auto_round": "gptq_v2",
    "auto_round:auto_awq": "gemm",
}
"""The format of codes by the `packing_format` that AutoRound states."""

AUTO_ROUND_MORE = ("rotation_config", "rotation_configs", "spinquant_config", "super_bits")
"""Settings of AutoRound with which a weight is more than its codes and scales."""


# -- the marks ---------------------------------------------------------------------------------------------------------


def with_quantized(ck: Checkpoint) -> Checkpoint:
    """Mark every part of the checkpoint's quantized weights, and list the schemes that occur."""
    found = {id(node): weights for node in _dicts_in(ck.tree) if (weights := weights_in(node))}
    if not found:
        return ck
    schemes: dict[tuple[str, str, bool], Counter[str]] = {}

    def marked(node: dict[Any, Any]) -> dict[Any, Tensor]:
        made: dict[Any, Tensor] = {}
        for codes, weight in found.get(id(node), {}).items():
            words, stated_by = scheme_of(weight, node, ck.config)
            decoded = bool(decoder_of(weight, node, ck.config))
            known = schemes.setdefault((words, stated_by, decoded), Counter())
            known.update([CODES, *(key.rpartition(".")[2] for part, key in weight.keys.items() if part != CODES)])
            numel, own = _numel(weight, node, ck.config), own_name(codes, weight.layout)
            for part, key in weight.keys.items():
                if isinstance(node[key], Tensor):
                    made[key] = replace(node[key], coded=Coded(part, words, own, numel if part == CODES else 0))
        return made

    tree = rebuilt(ck.tree, marked)
    ways = (Scheme(w, parts.pop(CODES), stated, tuple(parts), known) for (w, stated, known), parts in schemes.items())
    return replace(ck, tree=tree, quantized=tuple(ways))


def _dicts_in(tree: Any) -> Iterator[dict[Any, Any]]:
    """Yield every dict of a tree, once; lists of numbers are skipped as a whole."""
    seen: set[int] = set()
    stack = [tree]
    while stack:
        node = stack.pop()
        if id(node) in seen or not isinstance(node, (dict, list, tuple)):
            continue
        seen.add(id(node))
        if isinstance(node, dict):
            yield node
        stack += of_kinds(node.values() if isinstance(node, dict) else node, (dict, list, tuple))


def scheme_of(weight: QuantizedWeight, node: Mapping[str, Any], config: ModelConfig | None) -> tuple[str, str]:
    """How a weight is quantized, in words, and the file that states it; "" if only its parts show it."""
    codes, layout = node[weight.keys[CODES]], weight.layout
    method = method_of(config)
    if config is not None and method and (method in layout.methods or not layout.methods):
        # bitsandbytes states the kind of 4 bits for each weight; the config may be of another weight.
        said = layout.words if layout.methods == BITSANDBYTES else stated_words(config, codes)
        if said:
            return said, config.quantization_in
    scale = node[weight.keys[_part(layout.scales)]]
    words = layout.words or ("int8" if codes.dtype in BYTES else short(codes.dtype).replace("fp8e", "fp8 e"))
    if not layout.words and isinstance(scale, Tensor):
        of_blocks = scale.shape[-1:] > (1,) or layout.scales in ("*_scale_inv", "scale")
        in_rows = len(scale.shape) == len(codes.shape) > 1 and of_blocks
        words += ", one scale" if scale.numel == 1 else ", block scales" if in_rows else ", scales per channel"
    return words, ""


def method_of(config: ModelConfig | None) -> str:
    """The quantization method that a config states; "" if it states none."""
    if config is None or not config.quantization:
        return ""
    said = config.quantization
    method = said.get("quant_method")
    if isinstance(method, str):
        return method.lower()
    if "load_in_4bit" in said or "load_in_8bit" in said or "_load_in_4bit" in said:  # transformers before 4.39
        return "bitsandbytes"
    if "quant_algo" in said:
        return "modelopt"
    return "mlx" if "group_size" in said and "bits" in said else "unknown"


def stated_words(config: ModelConfig, codes: Tensor | None = None) -> str:
    """A config's quantization in words: `compressed-tensors, pack-quantized int4, groups of 32`.

    Of several groups, only groups with codes of this dtype are described; "" if there is none.
    """
    said, method = config.quantization, method_of(config)
    words, groups = [method], said.get("group_size", said.get("q_group_size"))
    if method == "compressed-tensors":
        schemes = [s for s in _values_of(said.get("config_groups")) if isinstance(s, Mapping)]
        fit = [s for s in schemes if codes is None or codes.dtype in _compressed_dtypes(s, said.get("format"))]
        if schemes and not fit:
            return ""
        kinds = dict.fromkeys(filter(None, (_compressed_words(s, said.get("format")) for s in fit)))
        return ", ".join([method, " and ".join(kinds) or str(said.get("format", ""))[:MAX_WORD]]).rstrip(", ")
    bits = bits_of(config)
    algorithm = said.get("quant_algo")
    if isinstance(algorithm, str):
        words = [f"{method} {algorithm[:MAX_WORD]}"]
    elif method in ("gptq", "awq", "mlx", "auto-round", "hqq", "aqlm") and bits:
        words = [f"{method} int{bits}"]
    sizes = said.get("weight_block_size")
    if isinstance(sizes, (list, tuple)) and sizes and all(type(n) is int for n in sizes):
        words.append(f"block scales {' x '.join(map(str, sizes))}")
    elif method == "mxfp4":
        words.append("blocks of 32")
    elif type(groups) is int and groups > 0:
        words.append(f"groups of {groups}")
    return ", ".join(words)


MAX_WORD = 40
"""At most this many characters of a config's word are shown."""


def _values_of(value: Any) -> list[Any]:
    return list(value.values()) if isinstance(value, Mapping) else []


def compressed_weights(config: ModelConfig, dtype: str) -> list[Mapping[str, Any]]:
    """What a config of compressed-tensors states of weights with codes of a dtype, in each of its groups for them."""
    said = config.quantization
    schemes = [s for s in _values_of(said.get("config_groups")) if isinstance(s, Mapping)]
    fit = [s.get("weights") for s in schemes if dtype in _compressed_dtypes(s, said.get("format"))]
    return [weights for weights in fit if isinstance(weights, Mapping)]


def _compressed_dtypes(scheme: Mapping[str, Any], otherwise: Any) -> tuple[str, ...]:
    """The dtypes that codes of one group of a compressed-tensors config have."""
    form, weights = str(scheme.get("format") or otherwise), scheme.get("weights")
    kind = weights.get("type") if isinstance(weights, Mapping) else None
    if "pack" in form or form.startswith("marlin"):
        return ("uint8",) if form.startswith(("nvfp", "mxfp")) else ("int32",)
    return FP8 if kind == "float" else ("int8",) if kind == "int" else (*FP8, "int8", "uint8", "int32")


def _compressed_words(scheme: Mapping[str, Any], otherwise: Any) -> str:
    """One group of a compressed-tensors config in words."""
    form, weights = scheme.get("format") or otherwise, scheme.get("weights")
    weights = weights if isinstance(weights, Mapping) else {}
    kind = {"float": "fp", "int": "int"}.get(str(weights.get("type")), "")
    bits, groups = weights.get("num_bits"), weights.get("group_size")
    words = [str(form or "")[:MAX_WORD], f"{kind}{bits}" if kind and type(bits) is int else ""]
    blocks = weights.get("block_structure")
    if isinstance(blocks, (list, tuple)) and all(type(n) is int for n in blocks):
        return f"{' '.join(filter(None, words))}, blocks of {' x '.join(map(str, blocks))}"
    grouped = f", groups of {groups}" if type(groups) is int and groups > 0 else ""
    return " ".join(filter(None, words)) + grouped


def bits_of(config: ModelConfig | None) -> int | None:
    """The bits of a code that a config states for all weights; None if it states none, or several."""
    said = config.quantization if config is not None else {}
    found = {said[key] for key in ("bits", "w_bit", "nbits") if type(said.get(key)) is int}
    weights = [s.get("weights") for s in _values_of(said.get("config_groups")) if isinstance(s, Mapping)]
    found |= {w["num_bits"] for w in weights if isinstance(w, Mapping) and type(w.get("num_bits")) is int}
    named = said.get("weights")  # quanto
    found |= {int(named[-1])} if isinstance(named, str) and named[-1:].isdigit() else set()
    return found.pop() if len(found) == 1 else None


def _numel(weight: QuantizedWeight, node: Mapping[str, Any], config: ModelConfig | None) -> int | None:
    """The number of weights in the codes; None if neither shapes nor a config determine it."""
    codes: Tensor = node[weight.keys[CODES]]
    layout, scale = weight.layout, node[weight.keys[_part(weight.layout.scales)]]
    bits = layout.bits
    if bits == 0 and codes.dtype == "uint8":  # bitnet packs four codes to a byte, ModelOpt two
        bits = 2 if method_of(config) == "bitnet" else None
    if codes.dtype == FP4:
        bits = 4
    if bits is None:
        bits = _bits_by_shape(codes, scale, node.get(weight.keys.get("qzeros", "")))
    if bits is None and method_of(config) in layout.methods:
        bits = bits_of(config)
    if bits is None and codes.dtype in FP8:
        bits = 0
    width = ITEMSIZE[codes.dtype] * 8
    numel = None if bits is None else codes.numel * width // bits if bits else codes.numel
    if "shape" not in weight.keys:
        return numel
    groups = [one.get("group_size") for one in compressed_weights(config, codes.dtype)] if config is not None else []
    if isinstance(scale, Tensor) and any(type(n) is int and scale.numel * n == numel for n in groups):
        return numel
    stated = _product_of(node[weight.keys["shape"]])  # a row may end inside of an integer
    return stated if 0 < stated <= codes.numel * width else numel


def _product_of(sizes: Any) -> int:
    """The product of the two values of `weight_shape`; 0 where they are not at hand, such as in a store."""
    source = sizes.shards[0].source if isinstance(sizes, Tensor) and len(sizes.shards) == 1 else None
    if source is None or is_remote(source.path) or (source.shape, source.strides) != ((2,), (1,)):
        return 0
    width = ITEMSIZE[source.dtype]
    with suppress(ReadError), File(source.path) as file:
        data = file.read(source.offset, 2 * width)
        return int.from_bytes(data[:width], "little") * int.from_bytes(data[width:], "little")
    return 0


def _bits_by_shape(codes: Tensor, scale: Any, zeros: Any) -> int | None:
    """The bits of packed codes, inferred from the shapes of their companions."""
    if not isinstance(scale, Tensor) or not codes.shape or not scale.shape or not scale.shape[-1]:
        return None
    if isinstance(zeros, Tensor) and zeros.shape:  # GPTQ, AWQ: a zero point for each scale, packed like the codes
        found, rest = divmod(zeros.shape[-1] * ITEMSIZE[zeros.dtype] * 8, scale.shape[-1])
        return found if not rest and 0 < found <= 8 else None
    if codes.dtype != "uint8" or scale.dtype not in ("uint8", *FP8, "float8_e8m0fnu"):
        return None
    # Microscaling: nvfp4 has a scale for 16 codes, mxfp4 and mxfp6 for 32.
    return {8: 4, 16: 4, 24: 6}.get(codes.shape[-1] // scale.shape[-1])


# -- parts without each other, and without a config --------------------------------------------------------------------


def quantization_problems(ck: Checkpoint) -> Iterator[Problem]:
    """Find codes without scales, scales without codes, and contradictions between either and the config."""
    lost = any(p.severity == "error" and p.kind.lacks in ("file", "part") for p in ck.problems)
    if lost or (ck.provenance is not None and ck.provenance.left_out):
        return
    models = sections_of_kind(ck, "model")
    dicts = ((fqn_of(s.place_of(path)), node) for s in models for path, node in nodes_in(s.value, (dict,)))
    apart = [problem for name, node in dicts for problem in _apart(ck, name, node)]
    yield from apart or _unlike_config(ck, models)


def _unlike_config(ck: Checkpoint, models: Sequence[Section]) -> Iterator[Problem]:
    """Find a config that does not mention the weights' quantization, or states a quantization that they lack."""
    method, config = method_of(ck.config), ck.config
    # bitsandbytes describes each weight in the state dict itself.
    found = [scheme for scheme in ck.quantized if scheme.words not in DESCRIBED_BESIDE]
    if found and not method and (config is not None or (ck.format == "hugging_face" and ck.path.is_dir())):
        count = sum(scheme.weights for scheme in found)
        what = f"{plural(count, 'weight')} in codes of {found[0].words} (with {few(found[0].known_by, 2)})"
        says = f"{config.name} does not say so" if config is not None else "there is no config.json that says so"
        text = f"{what}, and {says}: who loads it takes codes for weights"
        yield Problem(Code.METADATA_CONTRADICTS, text, severity="warning")
    if config is None or method not in METHODS or ck.quantized or not _in_codes(config):
        return
    tensors = [tensor for section in models for _, tensor in nodes_in(section.value, (Tensor,))]
    if not tensors or any(t.kind in ("quantized", "unreadable") or t.encoded_as for t in tensors):
        return
    says = f"{config.quantization_in} says {stated_words(config)}"
    codes = [t for t in tensors if t.dtype in (*FP8, *BYTES) and len(t.shape) > 1]
    if codes:
        text = f"{says}, and no scales lie beside {plural(len(codes), 'tensor')} of {short(codes[0].dtype)}"
        yield Problem(Code.MODEL_PART_MISSING, text)
    else:
        yield Problem(Code.METADATA_CONTRADICTS, f"{says}, and no tensor here holds codes", severity="warning")


DESCRIBED_BESIDE = {layout.words for layout in LAYOUTS if layout.decoder == "bitsandbytes"}
"""Words for weights that need no config: their state dict describes them."""

METHODS = frozenset(method for layout in LAYOUTS for method in layout.methods) - {
    "bitsandbytes",
    "bitnet",
    "fp_quant",
    "torchao",
}
"""Methods that always leave codes in a file; the others may quantize when a model is loaded."""


def _in_codes(config: ModelConfig) -> bool:
    """Whether a config states that the weights are stored as codes.

    compressed-tensors keeps scales beside weights before it compresses them; transformers may dequantize while loading.
    """
    said = config.quantization
    compressed = said.get("quantization_status", "compressed") == "compressed" and said.get("format") != "dense"
    return compressed and said.get("dequantize") is not True


def _apart(ck: Checkpoint, section: str, node: Mapping[Any, Any]) -> Iterator[Problem]:
    """Find scales without codes and codes without scales, if other weights or the config show that they go together."""
    if ck.config is not None and not _in_codes(ck.config):
        return
    found = weights_in(node)
    method = method_of(ck.config)
    stated = [one for one in LAYOUTS if method in METHODS and method in one.methods]
    layouts = list(dict.fromkeys([*(one.layout for one in found.values()), *stated]))
    of_codes = {(_end(codes), node[codes].dtype) for codes in found}
    of_scales = {_end(one.keys[_part(one.layout.scales)]): one.layout for one in found.values()}
    floats = {dtype for _, dtype in of_codes if dtype in FP8}
    taken = {key for one in found.values() for key in one.keys.values()}
    own_ends = tuple(name.removeprefix("*") for name in (*OWN, *OWN_CODES))
    passed_over: set[str] = set()  # ends of names that prove nothing by themselves, seen without any proof
    alone: dict[str, list[str]] = {"codes": [], "scales": [], "cast": []}
    for key, value in node.items():
        if not isinstance(key, str) or key in taken or not isinstance(value, Tensor):
            continue
        end = _end(key)
        if end in passed_over:
            continue
        if not layouts and not end.endswith(own_ends):
            passed_over.add(end)
            continue
        own = next((_name(stem, codes) for name, codes in OWN.items() if (stem := _stem(key, name)) is not None), None)
        if own is None and end not in COMMON:
            own = _codes_of(key, [of_scales[end]] if end in of_scales else stated)
        if own is not None:
            codes = node.get(own)
            if isinstance(codes, Tensor) and (not is_floating(codes.dtype) or codes.dtype in FP8):
                continue  # these codes lack another companion
            alone["cast" if isinstance(codes, Tensor) else "scales"].append(key)
        elif (
            (end, value.dtype) in of_codes
            or value.dtype in floats
            or end in OWN_CODES
            or any(
                one.codes.startswith("*_") and _stem(key, one.codes) and value.dtype in one.dtypes for one in layouts
            )
        ):
            alone["codes"].append(key)
    before = f"{section}." if section else ""
    for kind, words in APART.items():
        if keys := alone[kind]:
            code = Code.METADATA_CONTRADICTS if kind == "cast" else Code.MODEL_PART_MISSING
            severity: Severity = "error" if layouts and kind != "cast" else "warning"
            yield Problem(code, f"{words}{and_others(len(keys) - 1)}", None, f"{before}{keys[0]}", severity)
    yield from _incomplete(node, found, before)


APART = {
    "codes": "codes without the scales that make weights of them",
    "scales": "scales without the codes that they belong to",
    "cast": "scales beside weights that are no codes; were codes cast, or scales left over?",
}


def _codes_of(key: str, layouts: Sequence[Layout]) -> str | None:
    """The name of the codes of scales, by the layouts that occur here; None if they belong to no weight."""
    for layout in layouts:
        stem = _stem(key, layout.scales)
        if stem is not None and (not layout.scales.startswith("*") or stem.endswith("weight") or len(layouts) == 1):
            return _name(stem, layout.codes)
    return None


def _end(key: str) -> str:
    return key.rpartition(".")[2]


def _incomplete(node: Mapping[str, Any], found: Mapping[str, QuantizedWeight], before: str) -> Iterator[Problem]:
    """Find weights without a companion that other weights with codes and scales of the same dtypes have."""
    alike: dict[tuple[str, str], list[QuantizedWeight]] = {}
    for codes, one in found.items():
        alike.setdefault((_end(codes), node[codes].dtype), []).append(one)

    def scale_dtype(weight: QuantizedWeight) -> str:
        scale = node.get(weight.keys.get("scale", ""))
        return scale.dtype if isinstance(scale, Tensor) else ""

    for weights in alike.values():
        layouts = {one.layout for one in weights if one.layout.needed}
        for part in sorted({_part(name) for layout in layouts for name in (layout.scales, *layout.needed)}):
            having = Counter(scale_dtype(one) for one in weights if part in one.keys)
            without = [one for one in weights if part not in one.keys]
            lost = [one for one in without if (having[own] if (own := scale_dtype(one)) else having)]
            if lost:
                text = f"codes without their {part}, which {plural(having.total(), 'other weight')} have"
                name = f"{before}{lost[0].keys[CODES]}"
                yield Problem(Code.MODEL_PART_MISSING, f"{text}{and_others(len(lost) - 1)}", None, name)
