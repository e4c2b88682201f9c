"""Find missing layers and weights by the numbers in the model's names and by the `config.json` beside it.

Numbers in names are evidence by themselves (see `modules`); a config makes it proof. A config may be of another model,
or older than the weights, so it is believed only where its hidden size is a size of the model. It never forbids a
tensor: a vocabulary may be padded, an output layer stored although it is tied, a layer for several tokens lie beyond
the last (`num_nextn_predict_layers`), a model have an encoder or a part alone, layers be shared.

Source of keys: transformers/models/*/configuration_*.py of 5.23 (`attribute_map` has the names of older models).
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from itertools import product
from typing import Any, NamedTuple

from ckptools.dtypes import is_floating
from ckptools.model.checkpoint import Checkpoint
from ckptools.model.facts import ADAPTER_CONFIG, ModelConfig
from ckptools.model.problems import Code, Problem, Severity
from ckptools.model.regions import Ints
from ckptools.model.tensor import Tensor
from ckptools.text import few, first_few, fqn_of, plural
from ckptools.training_state.adapters import PREFIX
from ckptools.training_state.models import trained_model
from ckptools.training_state.modules import Stack, absent_layers, experts_of, holes_in, lacking_layers, stacks_of
from ckptools.training_state.sections import sections_of_kind

LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "depth")
ENCODER = ("encoder_layers", "num_encoder_layers")
DECODER = ("decoder_layers", "num_decoder_layers")
MORE_LAYERS = ("num_nextn_predict_layers", "mtp_num_layers", "num_mtp_layers", "mtp_num_hidden_layers")
"""Config keys that count layers beyond the last, which predict further tokens: DeepSeek, GLM, Qwen3-Next."""
HIDDEN = ("hidden_size", "n_embd", "d_model", "dim", "hidden_dim", "embed_dim", "n_embed")
VOCABULARY = ("vocab_size", "n_vocab")
EXPERTS = ("num_local_experts", "n_routed_experts", "num_experts", "moe_num_experts")
BY_DESIGN = ("block_configs", "num_hidden_groups", "num_kv_shared_layers", "depths")
"""Config keys of models whose layers are shared, left out or different by design: DeciLM, ALBERT, Gemma 3n, Swin."""

CONTAINERS = ("layers", "layer", "h", "blocks", "block")
"""Names of modules that hold the layers of a transformer."""

EMBEDDING = re.compile(
    r"(?:^|\.)(?:embed_tokens|wte|word_embeddings|tok_embeddings|embed_in|shared|embeddings)\.weight$"
)
CAUSAL = re.compile(r".*ForCausalLM")

ALIKE = ("llama", "mistral", "qwen2", "qwen3", "gemma", "gemma2", "phi3", "gpt2", "gpt_neox", "bert", "roberta", "opt")
"""Model types whose layers all have the same names. Source: transformers/models/*/modeling_*.py."""

LISTED = "layers_to_transform"
NUMBERED = re.compile(r"(?:^|\.)\d+(?:\.|$)")
"""Matches a target module's name that contains the number of a layer."""


def model_problems(ck: Checkpoint) -> Iterator[Problem]:
    """Find missing layers, parts of layers, experts, embeddings and output layers that names or the config count."""
    if any(p.kind in (Code.ONE_OF_SEVERAL, Code.PLACEHOLDERS) for p in ck.problems):
        return  # the model is a part whose config counts the whole
    lost = any(p.severity == "error" and p.kind.lacks in ("file", "part") for p in ck.problems)
    named = {p.tensor for p in ck.problems if p.kind is Code.MODEL_PART_MISSING and p.tensor}
    for section in sections_of_kind(ck, "model"):
        tensors = {k: v for k, v in section.value.items() if isinstance(k, str) and isinstance(v, Tensor)}
        at = f"{fqn_of(section.path)}." if section.path else ""
        if any(name.startswith(PREFIX) for name in tensors):
            # The user of an adapter may choose the layers that have one.
            stated = ck.config.adapter if ck.config else {}
            yield from _Model(tensors, at, {}, "", lost, named).problems_of_adapter(stated)
        else:
            trained = trained_model(ck)
            mine = trained is not None and trained.path == section.path
            config = ck.config.content if ck.config and mine else {}
            yield from _Model(tensors, at, config, ck.config.name if ck.config else "", lost, named).problems()


class Scope(NamedTuple):
    """A part of a config, and the key under which it lies; "" for the outermost."""

    key: str
    values: Mapping[str, Any]

    def number(self, keys: Collection[str]) -> int | None:
        """The first positive number under one of the keys."""
        return next((v for k in keys if type(v := self.values.get(k)) is int and v > 0), None)


def scopes_of(config: Mapping[str, Any]) -> list[Scope]:
    """A config and its nested configs: `text_config`, `vision_config`, and `encoder` and `decoder` of pairs."""
    inside = [Scope(k, v) for k, v in config.items() if _is_config(k, v)]
    return [*inside, Scope("", config)]


def _is_config(key: str, value: Any) -> bool:
    if not isinstance(value, Mapping):
        return False
    return "model_type" in value or (key.endswith("_config") and any(k in value for k in (*LAYERS, *HIDDEN)))


WORDS = {
    "vision": ("vision", "visual", "image", "vit"),
    "audio": ("audio", "speech"),
    "text": ("text", "language", "llm", "lm"),
    "llm": ("text", "language", "llm", "lm"),
}
"""Words in the names of modules that a nested config describes."""


class _Model:
    """A model: its tensors by name, its config, and whether files of it are already reported lost."""

    def __init__(
        self,
        tensors: Mapping[str, Tensor],
        at: str,
        config: Mapping[str, Any],
        config_name: str,
        lost: bool,
        named: Collection[str],
    ) -> None:
        self.tensors, self.at, self.config, self.name = tensors, at, config, config_name
        self.lost, self.named = lost, named
        self.scopes = scopes_of(config) if config else []
        self.stacks = stacks_of(tensors.keys())
        self.of_scope = self._main_stacks()

    def problems(self) -> Iterator[Problem]:
        by_config = {stack.name: list(self._counted(scope, stack)) for scope, stack in self.of_scope}
        for stack in self.stacks:
            yield from by_config.get(stack.name, ())
            absent = [] if by_config.get(stack.name) else absent_layers(stack)
            if absent:
                numbers = first_few(sorted(stack.layers), 6)
                yield from self._absent(stack, absent, f"{stack.name} has the numbers {numbers}", self.lost)
            yield from self._lacking(stack)
        yield from self._experts()
        yield from self._tables()

    def problems_of_adapter(self, stated: Mapping[str, Any]) -> Iterator[Problem]:
        """Find layers that an adapter lacks although its config lists them, or, without a list, gaps in their numbers.

        Source: peft/utils/other.py and tuners/tuners_utils.py (`check_target_module_exists`).
        """
        stacks = [stack for stack in self.stacks if stack.name.rpartition(".")[2] in CONTAINERS]
        layers, targets = stated.get(LISTED), [stated.get("target_modules"), stated.get("exclude_modules")]
        listed = [n for n in (layers if isinstance(layers, list) else [layers]) if type(n) is int and n >= 0]
        if listed and len(stacks) == 1:
            absent = sorted(set(listed) - stacks[0].layers.keys())
            why = f"{ADAPTER_CONFIG} states {LISTED} {first_few(sorted(set(listed)), 6)}"
            yield from self._absent(stacks[0], absent, why, proven=False)
        elif not layers and layers != 0 and not any(map(_chooses_layers, targets)):
            for stack in stacks:
                why = f"{stack.name} has the numbers {first_few(sorted(stack.layers), 6)}"
                yield from self._absent(stack, holes_in(stack), why, proven=False)

    def _problem(self, severity: Severity, text: str, name: str) -> Problem:
        return Problem(Code.MODEL_PART_MISSING, text, None, self.at + name, severity)

    # -- layers

    def _main_stacks(self) -> list[tuple[Scope, Stack]]:
        """For each config that counts layers, the stack of modules with the most layers."""
        found: dict[tuple[str, str], tuple[Scope, Stack]] = {}
        for stack in self.stacks:
            if stack.name.rpartition(".")[2] not in CONTAINERS:
                continue
            scope = self._scope_of(stack)
            place = scope.key, self._side(stack)
            if place not in found or len(found[place][1].layers) < len(stack.layers):
                found[place] = scope, stack
        return list(found.values())

    def _scope_of(self, stack: Stack) -> Scope:
        words = set(re.split(r"[._]", stack.name))
        for scope in self.scopes:
            kind = scope.key.removesuffix("_config")
            if kind and words.intersection(WORDS.get(kind, (kind,))):
                return scope
        text = [s for s in self.scopes if s.key.removesuffix("_config") in ("text", "llm", "language")]
        return (text or self.scopes or [Scope("", {})])[-1]

    def _side(self, stack: Stack) -> str:
        words = stack.name.split(".")
        return "encoder" if "encoder" in words else "decoder" if "decoder" in words else ""

    def _counted(self, scope: Scope, stack: Stack) -> Iterator[Problem]:
        """Compare a stack's layers with the number in the config."""
        side = self._side(stack)
        keys = ENCODER if side == "encoder" else DECODER if side == "decoder" else ()
        count, here = scope.number((*keys, *LAYERS)), stack.layers.keys()
        if count is None or not self._is_of_this_model(scope, stack):
            return
        if max(here) + 1 != count and self._states(max(here) + 1):
            return
        absent = sorted(set(range(count)) - here) if count <= MAX_LAYERS else []
        more = [number for number in here if number >= count]
        whose = f"layers in {scope.key}" if scope.key else "layers"
        if absent:
            proven = not any(self.config.get(key) for key in BY_DESIGN) and self._is_more_than_a_part(count, here)
            tail = absent[0] > max(here)
            proven &= not (tail and scope.key and scope.key.removesuffix("_config") not in ("text", "llm", "language"))
            yield from self._absent(stack, absent, f"{self.name} states {count} {whose}", self.lost or proven)
        elif more and len(more) > (scope.number(MORE_LAYERS) or 0):
            text = f"{self.name} states {count} {whose}, and {stack.name} has {len(here)}"
            yield Problem(Code.METADATA_CONTRADICTS, text, None, self.at + stack.name, "warning")

    def _states(self, count: int) -> bool:
        """Whether a config states this number of layers of any kind: a model of several parts has a key for each."""
        values = ((k, v) for scope in self.scopes for k, v in scope.values.items())
        return any(type(v) is int and v == count and re.search("layer|depth|block", k) for k, v in values)

    def _is_of_this_model(self, scope: Scope, stack: Stack) -> bool:
        """Whether the hidden size of a config is a size of many tensors in a stack."""
        hidden = scope.number(HIDDEN)
        if hidden is None:
            return False
        some = next(iter(stack.layers.items()))
        shapes = [self.tensors[f"{stack.whole_name(some[0])}.{name}"].shape for name in some[1]]
        return 4 * sum(hidden in shape for shape in shapes) >= len(shapes)

    def _is_more_than_a_part(self, count: int, here: Collection[int]) -> bool:
        """Whether this is a whole model, with its embedding or most layers, not an extract such as an adapter."""
        return any(map(EMBEDDING.search, self.tensors)) or 2 * len(here) > count

    def _absent(self, stack: Stack, absent: list[int], why: str, proven: bool) -> Iterator[Problem]:
        for number in absent[:MAX_NAMED]:
            name = stack.whole_name(number)
            if not any(f"{lost}.".startswith(f"{self.at}{name}.") for lost in self.named):
                yield self._problem("error" if proven else "warning", f"no tensor of it is here, and {why}", name)

    def _lacking(self, stack: Stack) -> Iterator[Problem]:
        alike = self.config.get("model_type") in ALIKE
        for number, names in lacking_layers(stack).items():
            name = stack.whole_name(number)
            lacking = [n for n in names if f"{self.at}{name}.{n}" not in self.named]
            if lacking:
                text = f"lacks {few(lacking, 3)}, which other layers of {stack.name} have"
                yield self._problem("error" if self.lost or alike else "warning", text, name)

    # -- experts

    def _experts(self) -> Iterator[Problem]:
        found = list(experts_of(self.tensors))
        whole = {one.rows for one in found if not one.absent}
        stated = {n for scope in self.scopes if (n := scope.number(EXPERTS)) is not None}
        for one in found:
            if one.absent and not any(f"{one.name}." in name for name in self.named):
                proven = self.lost or one.rows in whole | stated or one.absent[0] < max(one.here)
                if one.stacked and one.rows not in whole:
                    continue  # a router may have rows for entries that are not experts
                text = f"{plural(len(one.here), 'expert')} here, and the router has {one.rows} rows: no expert "
                yield self._problem("error" if proven else "warning", text + first_few(one.absent, 6), one.name)

    # -- tables

    def _tables(self) -> Iterator[Problem]:
        """Compare the embedding and the output layer with the config."""
        scope = next((s for s in self.scopes if s.number(VOCABULARY)), None)
        if scope is None or len({s.number(VOCABULARY) for s in self.scopes} - {None}) > 1:
            return
        hidden, rows = scope.number(HIDDEN), scope.number(VOCABULARY) or 0
        tables = {n: t for n, t in self.tensors.items() if len(t.shape) == 2 and is_floating(t.dtype)}
        embeddings = [name for name in tables if EMBEDDING.search(name) and "position" not in name]
        numbers = {v for v in scope.values.values() if type(v) is int}
        for name in embeddings[:1]:
            shape = tables[name].shape
            if shape[0] < rows and shape[0] not in numbers:
                text = f"has {shape[0]} rows, and {self.name} states a vocabulary of {rows}"
                yield Problem(Code.METADATA_CONTRADICTS, text, None, self.at + name, "warning")
            elif hidden and shape[1] != hidden and shape[1] not in numbers:
                text = f"has {shape[1]} columns, and {self.name} states a hidden size of {hidden}"
                yield Problem(Code.METADATA_CONTRADICTS, text, None, self.at + name, "warning")
        yield from self._heads(scope, tables, embeddings, rows)

    def _heads(self, scope: Scope, tables: Mapping[str, Tensor], embeddings: list[str], rows: int) -> Iterator[Problem]:
        """Find a missing embedding or output layer of a causal language model."""
        architectures = self.config.get("architectures")
        causal = isinstance(architectures, list) and any(
            isinstance(a, str) and CAUSAL.fullmatch(a) for a in architectures
        )
        stacks = [stack for of, stack in self.of_scope if of.number(LAYERS) == len(stack.layers)]
        large = [name for name, tensor in tables.items() if rows <= max(tensor.shape)]
        if not causal or not stacks or self.lost or any(t.note for t in self.tensors.values()):
            return
        if not large and not embeddings:
            yield self._problem("error", f"no tensor of {rows} rows is here, which {self.name} states", "embeddings")
        tied = scope.values.get("tie_word_embeddings", self.config.get("tie_word_embeddings"))
        if tied is False and len(large) == 1 and (not embeddings or large == embeddings):
            lost, other = ("lm_head", "embedding") if embeddings else ("embeddings", "output layer")
            text = f"{self.name} states that it is not tied to the {other}, and no tensor here is it"
            yield self._problem("error", text, lost)


def _chooses_layers(targets: Any) -> bool:
    """Whether an adapter's targets select layers by number: in names, or in a pattern."""
    if isinstance(targets, str):
        return re.search(r"\d", targets) is not None
    return isinstance(targets, list) and any(isinstance(name, str) and NUMBERED.search(name) for name in targets)


MAX_LAYERS = 1 << 12
MAX_NAMED = 64
"""At most this many absent layers get a problem each."""


# -- tensor shapes that a `config.json` states: of the vocabulary, and of the layers of well-known models --------------
# A config is believed only where its hidden size is the second size of a quarter of the matrices, which FSDP leaves
# unchanged when it cuts the first. A vocabulary may be padded, so a stated size is a lower bound. Sizes that a config
# leaves to a default are not stated, except a `head_dim` that the code of a model works out.
#
# Source: transformers/models/*/modeling_*.py and configuration_*.py of 5.23.


HEADS = ("lm_head.weight", "embed_out.weight")
MAX_SIZE = 1 << 32
MAX_WORDS = 5
"""At most this many words at the end of a name identify a tensor."""

Sizes = tuple[str, ...]
"""The name of each size of a tensor; `_numbers` gives its value."""

H = "hidden"
LLAMA: Mapping[str, Sizes] = {
    "self_attn.q_proj.weight": ("query", H),
    "self_attn.k_proj.weight": ("key", H),
    "self_attn.v_proj.weight": ("key", H),
    "self_attn.o_proj.weight": (H, "query"),
    "self_attn.q_proj.bias": ("query",),
    "self_attn.k_proj.bias": ("key",),
    "self_attn.v_proj.bias": ("key",),
    "self_attn.qkv_proj.weight": ("query + 2 key", H),
    "mlp.gate_proj.weight": ("inner", H),
    "mlp.up_proj.weight": ("inner", H),
    "mlp.gate_up_proj.weight": ("2 inner", H),
    "mlp.down_proj.weight": (H, "inner"),
    "input_layernorm.weight": (H,),
    "post_attention_layernorm.weight": (H,),
    "pre_feedforward_layernorm.weight": (H,),
    "post_feedforward_layernorm.weight": (H,),
    "model.norm.weight": (H,),
}
GPT2: Mapping[str, Sizes] = {
    "attn.c_attn.weight": (H, "3 hidden"),
    "attn.c_attn.bias": ("3 hidden",),
    "attn.c_proj.weight": (H, H),
    "attn.c_proj.bias": (H,),
    "mlp.c_fc.weight": (H, "inner"),
    "mlp.c_fc.bias": ("inner",),
    "mlp.c_proj.weight": ("inner", H),
    "mlp.c_proj.bias": (H,),
    **{f"{name}.{kind}": (H,) for name, kind in product(("ln_1", "ln_2", "ln_f"), ("weight", "bias"))},
}
GPT_NEOX: Mapping[str, Sizes] = {
    "attention.query_key_value.weight": ("3 hidden", H),
    "attention.query_key_value.bias": ("3 hidden",),
    "attention.dense.weight": (H, H),
    "mlp.dense_h_to_4h.weight": ("inner", H),
    "mlp.dense_4h_to_h.weight": (H, "inner"),
    "input_layernorm.weight": (H,),
    "post_attention_layernorm.weight": (H,),
    "final_layer_norm.weight": (H,),
}
BERT: Mapping[str, Sizes] = {
    **{f"attention.self.{name}.weight": (H, H) for name in ("query", "key", "value")},
    **{f"attention.self.{name}.bias": (H,) for name in ("query", "key", "value")},
    "attention.output.dense.weight": (H, H),
    "intermediate.dense.weight": ("inner", H),
    "output.dense.weight": (H, "inner"),
    "LayerNorm.weight": (H,),
    "LayerNorm.bias": (H,),
}
LAYERS_OF: Mapping[str, Mapping[str, Sizes]] = {
    **dict.fromkeys(("llama", "mistral", "qwen2", "qwen3", "gemma", "gemma2", "phi3"), LLAMA),
    **dict.fromkeys(("bert", "roberta"), BERT),
    "gpt2": GPT2,
    "gpt_neox": GPT_NEOX,
}
"""The tensors of models by the ends of their names; layers of other models may differ by design."""

EVEN_HEADS = ("llama", "mistral", "qwen2", "phi3")
"""Model types whose `head_dim` is the hidden size divided by the number of heads, unless stated."""


def stated_shapes(shapes: Mapping[str, Ints], config: ModelConfig) -> dict[str, Ints]:
    """The minimal shape of each tensor that a config states, by name; 0 for a size that it does not state.

    `shapes` are the shapes that the tensors seem to have.
    """
    scopes = scopes_of(config.content)
    scope = next((s for s in scopes if s.number(VOCABULARY)), None)
    if scope is None or config.quantization or len({s.number(VOCABULARY) for s in scopes} - {None}) > 1:
        return {}
    numbers = _numbers(scope)
    matrices = [shape for shape in shapes.values() if len(shape) == 2]
    if not numbers.get(H) or 4 * sum(shape[1] == numbers[H] for shape in matrices) < len(matrices):
        return {}
    known = {} if any(config.content.get(key) for key in (*BY_DESIGN, "pruned_heads")) or scope.key else LAYERS_OF
    of_layers = known.get(str(scope.values.get("model_type")), {})
    vocabularies = {v for s in scopes for k, v in s.values.items() if "vocab" in k and type(v) is int}
    found = {}
    for name, shape in shapes.items():
        words = name.split(".")[-MAX_WORDS:]
        ends = (".".join(words[n:]) for n in range(len(words)))
        sizes: Sizes = next((of_layers[end] for end in ends if end in of_layers), ())
        if (EMBEDDING.search(name) and "position" not in name) or name.endswith(HEADS):
            sizes = () if shape[:1] and shape[0] in vocabularies else ("vocabulary", H if of_layers else "")
        if len(sizes) == len(shape) and any(size in numbers for size in sizes):
            found[name] = tuple(numbers.get(size, 0) for size in sizes)
    return found


def _numbers(scope: Scope) -> dict[str, int]:
    """The value of each size name that a config states."""
    hidden, heads = scope.number(HIDDEN), scope.number(("num_attention_heads",))
    each = scope.number(("head_dim",))
    if each is None and hidden and heads and scope.values.get("model_type") in EVEN_HEADS:
        each = hidden // heads
    groups = scope.number(("num_key_value_heads",))
    inner = scope.number(("intermediate_size", "n_inner"))
    query, key = (each * n if each and n else None for n in (heads, groups))
    found = {
        H: hidden,
        "3 hidden": hidden and 3 * hidden,
        "vocabulary": scope.number(VOCABULARY),
        "query": query,
        "key": key,
        "query + 2 key": query and key and query + 2 * key,
        "inner": inner,
        "2 inner": inner and 2 * inner,
    }
    return {name: n for name, n in found.items() if n and n < MAX_SIZE}
