"""Documented names of weights in trainers and libraries, and how these fuse, transpose and stack the weights."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import NamedTuple

from ckptools.model.tensor import Tensor
from ckptools.tensor_io.slicing import RowBlock, joined_rows, split_rows, stacked, transposed, unstacked
from ckptools.training_state.wrappers import without_ddp

# -- forms: how a stored tensor is made of an architecture's weights, its parts ----------------------------------------
# A part is a weight as `nn.Linear` has it: rows are outputs. Each form divides a stored tensor into its parts, and
# joins parts into one; the two are inverse to each other.


class Sizes(NamedTuple):
    """Sizes of a model that its config states; 0 for a size that it lacks.

    Attributes:
        groups: heads of keys and values; `heads` without grouped queries.
    """

    heads: int
    groups: int
    experts: int


class UnfitError(ValueError):
    """A tensor does not have the shape that its form requires."""


Blocks = Callable[[int, Sizes], list[RowBlock]]
"""The blocks of rows of a stored matrix, by its number of rows."""


@dataclass(frozen=True)
class Form:
    """How a stored tensor contains its parts.

    Attributes:
        words: the steps from the stored tensor to its parts, for people.
        blocks: which rows belong to which part; None for a single part with the same rows.
        turned: whether matrices are stored as [inputs, outputs].
        experts: whether dim 0 counts experts, each of which is divided by itself; parts come expert by expert.
    """

    words: str = ""
    blocks: Blocks | None = None
    turned: bool = False
    experts: bool = False

    def split(self, tensor: Tensor, sizes: Sizes) -> list[Tensor]:
        """Divide a stored tensor into its parts.

        Raises:
            UnfitError: its shape does not fit the form.
        """
        if self.experts and (len(tensor.shape) < 2 or tensor.shape[0] != sizes.experts):
            raise UnfitError(f"{list(tensor.shape)} is not a tensor of {sizes.experts} experts")
        found: list[Tensor] = []
        for one in unstacked(tensor) if self.experts else [tensor]:
            whole = transposed(one) if self.turned else one
            found += [whole] if self.blocks is None else split_rows(whole, self.blocks(whole.shape[0], sizes))
        return found

    def join(self, parts: Sequence[Tensor], sizes: Sizes) -> Tensor:
        """Join parts into a stored tensor.

        Raises:
            UnfitError: their shapes do not fit the form.
        """
        count = sizes.experts if self.experts else 1
        each = len(parts) // max(count, 1)
        whole = [self._joined(parts[n * each : (n + 1) * each], sizes) for n in range(count)]
        return stacked(whole) if self.experts else whole[0]

    def _joined(self, parts: Sequence[Tensor], sizes: Sizes) -> Tensor:
        if self.blocks is None:
            whole = parts[0]
        else:
            if len({(part.shape[1:], part.dtype) for part in parts}) > 1:
                shapes = ", ".join(f"{part.dtype} {list(part.shape)}" for part in parts)
                raise UnfitError(f"{shapes}: parts of different widths or dtypes cannot be joined")
            blocks = self.blocks(sum(part.shape[0] for part in parts), sizes)
            for number, part in enumerate(parts):
                if sum(b.rows for b in blocks if b.part == number) != part.shape[0]:
                    raise UnfitError(f"a part has {part.shape[0]} rows, which is not what {sizes.heads} heads make")
            whole = joined_rows(parts, blocks)
        return transposed(whole) if self.turned else whole


def _cut(rows: int, by: int, what: str) -> int:
    if not by or rows % by:
        raise UnfitError(f"{rows} rows cannot be divided into {by} {what}")
    return rows // by


def _in_order(counts: Sequence[int]) -> list[RowBlock]:
    starts = [sum(counts[:n]) for n in range(len(counts))]
    return [RowBlock(start, count, n, 0) for n, (start, count) in enumerate(zip(starts, counts, strict=True))]


def _halves(rows: int, _: Sizes) -> list[RowBlock]:
    return _in_order([_cut(rows, 2, "halves")] * 2)


def _queries_keys_values(rows: int, sizes: Sizes) -> list[RowBlock]:
    head = _cut(rows, sizes.heads + 2 * sizes.groups, "heads of queries, keys and values")
    return _in_order([sizes.heads * head, sizes.groups * head, sizes.groups * head])


def _grouped(rows: int, sizes: Sizes) -> list[RowBlock]:
    head = _cut(rows, sizes.heads + 2 * sizes.groups, "heads of queries, keys and values")
    queries = _cut(sizes.heads, sizes.groups, "query groups") * head
    found = []
    for group in range(sizes.groups):
        at = group * (queries + 2 * head)
        found.append(RowBlock(at, queries, 0, group * queries))
        found += [RowBlock(at + queries + n * head, head, n + 1, group * head) for n in range(2)]
    return found


def _pairs(heads: int, rows: int) -> list[RowBlock]:
    head = _cut(rows, heads, "heads")
    half = _cut(head, 2, "halves of a head")
    return [RowBlock(h * head + j, half, 0, h * head + j * half, 2) for h in range(heads) for j in range(2)]


PLAIN = Form()
TURNED = Form("transposed: stored as [inputs, outputs]", turned=True)
FUSED_QKV = Form("q, k and v one behind the other", _queries_keys_values)
TURNED_QKV = Form("q, k and v one behind the other, transposed", _queries_keys_values, turned=True)
GROUPED_QKV = Form("for each query group the rows of its queries, its key and its value", _grouped)
GATE_UP = Form("gate and up one behind the other", _halves)
EXPERTS = Form("one tensor of all experts", experts=True)
EXPERTS_GATE_UP = Form("one tensor of all experts, gate and up one behind the other", _halves, experts=True)
PAIRED_QUERIES = Form("rows of each head from pairs into halves (rotary)", lambda rows, s: _pairs(s.heads, rows))
PAIRED_KEYS = Form("rows of each head from pairs into halves (rotary)", lambda rows, s: _pairs(s.groups, rows))


# -- the names of an architecture's weights, and the form in which each is stored --------------------------------------
# `{}` in a name stands for a layer's number, `{e}` for an expert's. Parts have names of their own, which no file has:
# `layers.{}.q.weight` is the query projection of a layer in every layout.
#
# Sources: transformers' models `llama`, `mixtral`, `qwen2_moe`, `qwen3_moe`, `gpt2` (`Conv1D` is stored as [inputs,
# outputs]), `phi3` (fused `qkv_proj` and `gate_up_proj`), and `conversion_mapping.py` for experts in one tensor (5.x)
# and one by one (4.x, and every file); torchtitan `models/{llama3,qwen3}/state_dict_adapter.py`, whose Llama (like
# Meta's own files) has rotary pairs next to each other and whose Qwen has not, and whose experts were called
# `moe.experts.w{1,2,3}` in 2025; Megatron `core/transformer/{attention,mlp}.py`, `core/transformer/moe/experts.py`, and
# `tools/checkpoint/schema_core.py` for the two spellings of norms (local, and fused into Transformer Engine's layers).


class StoredTensor(NamedTuple):
    """A stored tensor of a layout: its name, the names of its parts, and its form."""

    name: str
    parts: tuple[str, ...]
    form: Form = PLAIN


class NamedLayout(NamedTuple):
    """The names of weights in a trainer or a library.

    Attributes:
        stored: every tensor that may occur.
        model_types: types of models, by config, to which it applies; empty for all.
        recomputed: ends of names of buffers that the model computes anew, which are not written.
    """

    name: str
    stored: tuple[StoredTensor, ...]
    model_types: tuple[str, ...] = ()
    recomputed: tuple[str, ...] = ()


def _wb(name: str, parts: tuple[str, ...], form: Form = PLAIN) -> tuple[StoredTensor, ...]:
    """A weight and its bias."""
    return tuple(
        StoredTensor(f"{name}.{end}", tuple(f"{part}.{end}" for part in parts), form) for end in ("weight", "bias")
    )


def _one(name: str, part: str, form: Form = PLAIN) -> tuple[StoredTensor, ...]:
    return _wb(name, (part,), form)


def _experts(*parts: str) -> tuple[str, ...]:
    return tuple(f"layers.{{}}.experts.{{e}}.{part}.weight" for part in parts)


QKV = ("layers.{}.q", "layers.{}.k", "layers.{}.v")
GATED = ("layers.{}.gate", "layers.{}.up")
SHARED = ("layers.{}.shared.gate", "layers.{}.shared.up")

_ROTARY = ("rotary_emb.inv_freq",)
_ATTENTION = "model.layers.{}.self_attn."
_MLP = "model.layers.{}.mlp."
_MIXTRAL = "model.layers.{}.block_sparse_moe."

HUGGING_FACE = NamedLayout(
    "Hugging Face (Llama, Qwen)",
    (
        *_one("model.embed_tokens", "embed"),
        *_one("model.norm", "norm"),
        *_one("lm_head", "head"),
        *(s for n in "qkvo" for s in _one(f"{_ATTENTION}{n}_proj", f"layers.{{}}.{n}")),
        *_wb(f"{_ATTENTION}qkv_proj", QKV, FUSED_QKV),
        *(s for n in "qk" for s in _one(f"{_ATTENTION}{n}_norm", f"layers.{{}}.{n}_norm")),
        *_one("model.layers.{}.input_layernorm", "layers.{}.norm1"),
        *_one("model.layers.{}.post_attention_layernorm", "layers.{}.norm2"),
        *(s for n in ("gate", "up", "down") for s in _one(f"{_MLP}{n}_proj", f"layers.{{}}.{n}")),
        *_wb(f"{_MLP}gate_up_proj", GATED, GATE_UP),
        *_one(f"{_MLP}gate", "layers.{}.router"),
        *(
            StoredTensor(f"{_MLP}experts.{{e}}.{n}_proj.weight", (f"layers.{{}}.experts.{{e}}.{n}.weight",))
            for n in ("gate", "up", "down")
        ),
        StoredTensor(f"{_MLP}experts.gate_up_proj", _experts("gate", "up"), EXPERTS_GATE_UP),
        StoredTensor(f"{_MLP}experts.down_proj", _experts("down"), EXPERTS),
        *(s for n in ("gate", "up", "down") for s in _one(f"{_MLP}shared_expert.{n}_proj", f"layers.{{}}.shared.{n}")),
        *_one(f"{_MLP}shared_expert_gate", "layers.{}.shared_gate"),
        *_one(f"{_MIXTRAL}gate", "layers.{}.router"),
        *(
            StoredTensor(f"{_MIXTRAL}experts.{{e}}.{w}.weight", (f"layers.{{}}.experts.{{e}}.{n}.weight",))
            for w, n in (("w1", "gate"), ("w2", "down"), ("w3", "up"))
        ),
    ),
    ("llama", "mistral", "mixtral", "phi3", "qwen2", "qwen3", "qwen2_moe", "qwen3_moe"),
    _ROTARY,
)

_GPT2 = (
    *_one("transformer.wte", "embed"),
    *_one("transformer.wpe", "positions"),
    *_one("transformer.ln_f", "norm"),
    *_one("transformer.h.{}.ln_1", "layers.{}.norm1"),
    *_one("transformer.h.{}.ln_2", "layers.{}.norm2"),
    *_wb("transformer.h.{}.attn.c_attn", QKV, TURNED_QKV),
    *_one("transformer.h.{}.attn.c_proj", "layers.{}.o", TURNED),
    *_one("transformer.h.{}.mlp.c_fc", "layers.{}.up", TURNED),
    *_one("transformer.h.{}.mlp.c_proj", "layers.{}.down", TURNED),
)
_GPT2_BUFFERS = (".attn.bias", ".attn.masked_bias")

GPT2 = NamedLayout("Hugging Face (GPT-2)", (*_GPT2, *_one("lm_head", "head")), ("gpt2",), _GPT2_BUFFERS)
GPT2_BASE = NamedLayout(
    "Hugging Face (GPT-2 without its head)",
    tuple(s._replace(name=s.name.removeprefix("transformer.")) for s in _GPT2),
    ("gpt2",),
    _GPT2_BUFFERS,
)


def _torchtitan(paired: bool) -> tuple[StoredTensor, ...]:
    queries, keys = (PAIRED_QUERIES, PAIRED_KEYS) if paired else (PLAIN, PLAIN)
    forms = {"q": queries, "k": keys, "v": PLAIN}
    experts = ("moe.experts.{}", "moe.routed_experts.inner_experts.{}")
    named = (("w1", "gate", "w1_EFD"), ("w2", "down", "w2_EDF"), ("w3", "up", "w3_EFD"))
    return (
        *_one("tok_embeddings", "embed"),
        *_one("norm", "norm"),
        *_one("output", "head"),
        *_one("lm_head", "head"),
        *(
            s
            for between in ("", "qkv_linear.")
            for n, form in forms.items()
            for s in _one(f"layers.{{}}.attention.{between}w{n}", f"layers.{{}}.{n}", form)
        ),
        *_one("layers.{}.attention.wo", "layers.{}.o"),
        *(s for n in "qk" for s in _one(f"layers.{{}}.attention.{n}_norm", f"layers.{{}}.{n}_norm")),
        *_one("layers.{}.attention_norm", "layers.{}.norm1"),
        *_one("layers.{}.ffn_norm", "layers.{}.norm2"),
        *(s for w, n, _ in named for s in _one(f"layers.{{}}.feed_forward.{w}", f"layers.{{}}.{n}")),
        *_one("layers.{}.moe.router.gate", "layers.{}.router"),
        *(
            StoredTensor(f"layers.{{}}.{where.format(name)}", _experts(n), EXPERTS)
            for w, n, suffixed in named
            for where, name in zip(experts, (w, suffixed), strict=True)
        ),
    )


_COMPUTED = ("freqs_cis", "rope.freqs", "rope.cache", "rope_cache", "moe.tokens_per_expert")
TORCHTITAN_LLAMA = NamedLayout("torchtitan (Llama)", _torchtitan(True), ("llama",), _COMPUTED)
TORCHTITAN_QWEN = NamedLayout("torchtitan (Qwen)", _torchtitan(False), ("qwen3", "qwen3_moe"), _COMPUTED)

_LAYER = "decoder.layers.{}."


def _megatron_mlp(gated: bool) -> tuple[StoredTensor, ...]:
    """The MLPs; whether the first layer is gated depends on the model, not on the name."""
    first = _wb(f"{_LAYER}mlp.linear_fc1", GATED, GATE_UP) if gated else _one(f"{_LAYER}mlp.linear_fc1", GATED[1])
    down = ("layers.{}.experts.{e}.down.weight",)
    spelled = (
        ("local_experts.{e}.linear_fc1.weight", _EXPERT_GATE_UP, GATE_UP),
        ("linear_fc1.weight{e}", _EXPERT_GATE_UP, GATE_UP),
        ("local_experts.{e}.linear_fc2.weight", down, PLAIN),
        ("linear_fc2.weight{e}", down, PLAIN),
        ("experts.linear_fc1.weight", _experts("gate", "up"), EXPERTS_GATE_UP),
        ("experts.linear_fc2.weight", _experts("down"), EXPERTS),
    )
    return (
        *first,
        *_one(f"{_LAYER}mlp.linear_fc2", "layers.{}.down"),
        *_one(f"{_LAYER}mlp.router", "layers.{}.router"),
        *(StoredTensor(f"{_LAYER}mlp.experts.{name}", parts, form) for name, parts, form in spelled),
        *_wb(f"{_LAYER}mlp.shared_experts.linear_fc1", SHARED, GATE_UP),
        *_one(f"{_LAYER}mlp.shared_experts.linear_fc2", "layers.{}.shared.down"),
        StoredTensor(f"{_LAYER}mlp.shared_experts.gate_weight", ("layers.{}.shared_gate.weight",)),
    )


_EXPERT_GATE_UP = ("layers.{}.experts.{e}.gate.weight", "layers.{}.experts.{e}.up.weight")
_FUSED_NORMS = (
    ("self_attention.linear_qkv.layer_norm_", "layers.{}.norm1."),
    ("mlp.linear_fc1.layer_norm_", "layers.{}.norm2."),
)
_MEGATRON = (
    *_one("embedding.word_embeddings", "embed"),
    *_one("embedding.position_embeddings", "positions"),
    *_one("output_layer", "head"),
    *_one("decoder.final_layernorm", "norm"),
    *_wb(f"{_LAYER}self_attention.linear_qkv", QKV, GROUPED_QKV),
    *_one(f"{_LAYER}self_attention.linear_proj", "layers.{}.o"),
    *(s for n in "qk" for s in _one(f"{_LAYER}self_attention.{n}_layernorm", f"layers.{{}}.{n}_norm")),
    *_one(f"{_LAYER}input_layernorm", "layers.{}.norm1"),
    *_one(f"{_LAYER}pre_mlp_layernorm", "layers.{}.norm2"),
    *(
        StoredTensor(f"{_LAYER}{name}{end}", (f"{part}{end}",))
        for name, part in _FUSED_NORMS
        for end in ("weight", "bias")
    ),
)
_MEGATRON_STATE = ("._extra_state", "rotary_pos_emb.inv_freq", "router.local_tokens_per_expert")
MEGATRON = NamedLayout(
    "Megatron",
    (*_MEGATRON, *_megatron_mlp(True)),
    ("llama", "mistral", "mixtral", "qwen2", "qwen3", "qwen2_moe", "qwen3_moe"),
    _MEGATRON_STATE,
)
MEGATRON_GPT2 = NamedLayout("Megatron (GPT-2)", (*_MEGATRON, *_megatron_mlp(False)), ("gpt2",), _MEGATRON_STATE)

LAYOUTS = (HUGGING_FACE, GPT2, GPT2_BASE, TORCHTITAN_LLAMA, TORCHTITAN_QWEN, MEGATRON, MEGATRON_GPT2)
"""Every layout; layouts of Hugging Face models come first."""

HUB = (HUGGING_FACE, GPT2, GPT2_BASE)
"""Layouts of Hugging Face models."""


# -- recognise the layout of some names, and assign each tensor its parts ----------------------------------------------


MAX_NUMBER = 6
"""Digits of a layer's or an expert's number."""


class Placed(NamedTuple):
    """A tensor of a layout: its row in the table, and the names of its parts with the layer's number."""

    stored: StoredTensor
    parts: tuple[str, ...]


@dataclass(frozen=True)
class Recognised:
    """The names of a state dict in a layout.

    Attributes:
        prefix: prefix of every name, apart from wrappers.
        placed: tensors of the layout, by their name in the state dict.
        recomputed: buffers that a model computes anew.
    """

    layout: NamedLayout
    prefix: str
    placed: Mapping[str, Placed] = field(repr=False)
    recomputed: Sequence[str] = ()


def recognise(names: Collection[str], sizes: Sizes, layouts: Iterable[NamedLayout] = LAYOUTS) -> Recognised:
    """Choose the layout that has most of the names, for a model of these sizes; the first among equals."""
    bare = {name: without_ddp(name) for name in names}
    tries = [_in_layout(layout, prefix, bare, sizes) for layout in layouts for prefix in _prefixes(layout, bare)]
    return max(tries, key=lambda found: (len(found.placed), len(found.recomputed)))


def _prefixes(layout: NamedLayout, bare: Mapping[str, str]) -> list[str]:
    """Possible prefixes of a layout's names: texts before its names without a number, the empty one first."""
    ends = [stored.name for stored in layout.stored if "{" not in stored.name]
    found = {name[: -len(end)] for name in bare.values() for end in ends if name.endswith(f".{end}")}
    return ["", *sorted(found)]


def _in_layout(layout: NamedLayout, prefix: str, bare: Mapping[str, str], sizes: Sizes) -> Recognised:
    placed, recomputed, table = dict[str, Placed](), list[str](), _table(layout)
    for name, short in bare.items():
        found = _place(table, short[len(prefix) :], sizes) if short.startswith(prefix) else None
        if found is not None:
            placed[name] = found
        elif short.removeprefix(prefix).endswith(layout.recomputed):
            recomputed.append(name)
    return Recognised(layout, prefix, placed, recomputed)


_NUMBERS = re.compile(r"\d+")


@lru_cache(maxsize=len(LAYOUTS))
def _table(layout: NamedLayout) -> Mapping[str, tuple[tuple[re.Pattern[str], StoredTensor], ...]]:
    """The rows of a layout with their patterns, by their names without numbers."""
    found: dict[str, list[tuple[re.Pattern[str], StoredTensor]]] = {}
    for stored in layout.stored:
        key = _NUMBERS.sub("", stored.name.replace("{}", "").replace("{e}", ""))
        pattern = re.escape(stored.name).replace(r"\{\}", "(?P<layer>N)").replace(r"\{e\}", "(?P<expert>N)")
        number = rf"(?:0|[1-9]\\d{{0,{MAX_NUMBER - 1}}})"
        found.setdefault(key, []).append((re.compile(re.sub(r"(?<=>)N(?=\))", number, pattern)), stored))
    return {key: tuple(rows) for key, rows in found.items()}


def _place(
    table: Mapping[str, tuple[tuple[re.Pattern[str], StoredTensor], ...]], name: str, sizes: Sizes
) -> Placed | None:
    for pattern, stored in table.get(_NUMBERS.sub("", name), ()):
        if found := pattern.fullmatch(name):
            return Placed(stored, parts_of(stored, found.groupdict(), sizes))
    return None


def parts_of(stored: StoredTensor, numbers: Mapping[str, str], sizes: Sizes) -> tuple[str, ...]:
    """The names of the parts in a stored tensor: of one expert, or of all experts in order."""
    layer, expert = numbers.get("layer", ""), numbers.get("expert")
    experts = range(sizes.experts) if stored.form.experts else [expert]
    parts = (part.replace("{}", layer).replace("{e}", f"{e}") for e in experts for part in stored.parts)
    return tuple(parts)
