"""The model of a Megatron checkpoint, joined from its model-parallel ranks."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import product
from typing import Any, NamedTuple

from ckptools.formats.megatron.folders import Coordinates, Grid, setting
from ckptools.formats.options import Weights
from ckptools.formats.shared.tensor_parallel import (
    COLUMNS,
    GATED,
    REPLICATED,
    ROWS,
    GivenRules,
    JoinRule,
    RankPiece,
    UnlikeError,
    given_rule,
    join,
    no_rule,
    unjoined_tensor,
)
from ckptools.model.facts import ModuleOrder
from ckptools.model.problems import Code, Problem
from ckptools.model.rank_vote import same_value, vote
from ckptools.model.tensor import Tensor
from ckptools.model.tree import tensors_in
from ckptools.option import spelled
from ckptools.tensor_io.copies import may_be_a_copy, perhaps_copied, stated_checksum, stated_sources
from ckptools.training_state.optimizers import CONFIRMED, order_of

# -- weights of a GPT-style Megatron model: the dimension along which each is cut, and its name over all stages --------
# A column-parallel layer cuts its output rows (dim 0), a row-parallel one its input columns (dim 1); norms, position
# embeddings and the biases of row-parallel layers are the same on every rank. Source: megatron/core/tensor_parallel/
# layers.py, megatron/core/transformer/{attention,mlp}.py, and the `mpu` layers of v1.0 to v3.0.
#
# A fused QKV weight has, for each query group, the rows of its queries, then of its key, then of its value; a rank
# has whole groups (with fewer groups than ranks, a plain part of the same rows), so concatenating the ranks gives the
# order of a run without tensor parallelism. A gated first MLP layer (SwiGLU, GeGLU) is `[gate; up]` on every
# rank, and is joined half by half into `[all gates; all ups]`, as torch_dist stores it too
# (`apply_swiglu_sharded_factory`).
#
# Each stage numbers its layers from 0, in each of its chunks when the pipeline is interleaved (`model0`, `model1`, …).
# Layers follow each other chunk by chunk, and within a chunk stage by stage, however many each has: even and uneven
# pipelines, `pipeline_model_parallel_layout`, embedding and loss counted as layers or stages of their own. So the
# number of a stage's first layer is the number of layers before it, which the files themselves show. Source:
# megatron/core/transformer/transformer_layer.py (`get_transformer_layer_offset`); arguments.py for older versions.
#  Experts are numbered from 0 on each expert-parallel rank too, with an equal number on each: local expert i of rank e
# is expert e x (experts on a rank) + i. Routers, shared experts and all other weights are the same on every
# expert-parallel rank. With Transformer Engine all experts of a rank are in one module, as `linear_fc1.weight0`,
# `weight1` and so on. The experts' own tensor-parallel size may differ (`expert_tensor_parallel_size`); with 1 each is
# whole in its file. Source: megatron/core/transformer/moe/{moe_layer,experts,router,shared_experts}.py.
#
# Old versions (`megatron/model`, up to v3.0 and core 0.5) nest the model's state dict (`language_model`, `encoder`);
# its keys are joined with dots here.

_MODEL = r"(?:language_model\.)?"
_LAYER = _MODEL + r"(?:encoder|decoder|transformer)\.layers\.\d+\."
_ATTENTION = r"(?:self_attention|attention|cross_attention|inter_attention)\."
_WB = r"(?:weight|bias)"
_EXPERT = r"mlp\.(?:shared_experts|experts(?:\.(?:local_experts|experts)\.\d+)?)\."

BUILT_IN: tuple[tuple[str, JoinRule], ...] = (
    (_MODEL + r"embedding\.word_embeddings\.weight|word_embeddings_for_head\.weight", ROWS),
    (_MODEL + r"output_layer\." + _WB + r"|lm_head\.bias", ROWS),
    (_LAYER + r"(?:self_attention|attention)\.(?:linear_qkv|query_key_value)\." + _WB, ROWS),
    (_LAYER + r"cross_attention\.(?:linear_q|linear_kv)\." + _WB, ROWS),
    (_LAYER + r"inter_attention\.(?:query|key_value)\." + _WB, ROWS),
    (_LAYER + _ATTENTION + r"(?:linear_proj|dense)\.weight", COLUMNS),
    (_LAYER + r"mlp\.(?:linear_fc2|dense_4h_to_h)\.weight", COLUMNS),
    (_LAYER + _EXPERT + r"linear_fc2\.weight\d*", COLUMNS),
    (_LAYER + _EXPERT + r"linear_fc2\.bias\d*", REPLICATED),
    (_LAYER + r"mlp\.router\.(?:weight|bias|expert_bias|local_tokens_per_expert)", REPLICATED),
    (_LAYER + r"mlp\.shared_experts\.gate_weight", REPLICATED),
    (_LAYER + _ATTENTION + r"(?:linear_proj|dense)\.bias", REPLICATED),
    (_LAYER + r"mlp\.(?:linear_fc2|dense_4h_to_h)\.bias", REPLICATED),
    (_LAYER + r"(?:input|post_attention|post_inter_attention)_(?:layer)?norm\." + _WB, REPLICATED),
    (_LAYER + r"(?:pre_mlp|pre_cross_attn|post_self_attn|post_mlp)_layernorm\." + _WB, REPLICATED),
    (_LAYER + _ATTENTION + r"(?:linear_qkv|linear_q)\.layer_norm_" + _WB, REPLICATED),
    (_LAYER + r"mlp\.linear_fc1\.layer_norm_" + _WB, REPLICATED),
    (_LAYER + _ATTENTION + r"[qk]_layernorm\." + _WB, REPLICATED),
    (_MODEL + r"embedding\.(?:position|tokentype)_embeddings\.weight", REPLICATED),
    (_MODEL + r"(?:encoder|decoder|transformer)\.final_(?:layer)?norm\." + _WB, REPLICATED),
    (_MODEL + r"pooler\.dense\." + _WB + r"|binary_head\." + _WB, REPLICATED),
    (r"lm_head\.(?:dense|layernorm|layer_norm)\." + _WB + r"|rotary_pos_emb\.inv_freq", REPLICATED),
)
FC1 = re.compile(rf"(?P<mlp>{_LAYER}(?:mlp\.|{_EXPERT}))(?P<name>linear_fc1|dense_h_to_4h)\.{_WB}(?P<number>\d*)")
FC2 = {"linear_fc1": "linear_fc2", "dense_h_to_4h": "dense_4h_to_h"}
QKV = re.compile(r".*\.(?:linear_qkv|query_key_value|linear_kv|key_value)\.(?:weight|bias)")


def rule_of(fqn: str, pieces: Mapping[str, Any], given: GivenRules) -> JoinRule | str:
    """The user's rule for a weight, else the built-in one, or why there is none.

    `pieces` is one rank's part of the model, whose shapes show whether a layer is gated.
    """
    rule = given_rule(given, fqn)
    if rule is not None:
        return rule
    found = FC1.fullmatch(fqn)
    if found:
        first, after = pieces.get(fqn), pieces.get(f"{found['mlp']}{FC2[found['name']]}.weight{found['number']}")
        if isinstance(first, Tensor) and isinstance(after, Tensor) and first.shape and len(after.shape) == 2:
            rows, columns = first.shape[0], after.shape[1]
            if rows == 2 * columns and rows:
                return GATED
            if rows == columns:
                return ROWS
        return (
            "its rows, with the columns of the second layer, do not show whether it is gated; "
            f"say it with {spelled('rules')} FILE"
        )
    return next((rule for pattern, rule in BUILT_IN if re.fullmatch(pattern, fqn)), no_rule())


# -- names over pipeline stages ----------------------------------------------------------------------------------------

Chunk = Mapping[str, Any]
"""Part of the model on one rank: values by that rank's names."""

Place = tuple[int, int]
"""`(chunk, stage)`: layers are sorted by these."""

LAYER = re.compile(r"(?P<block>(?:.*?\.)?layers)\.(?P<index>\d{1,6})\.(?P<rest>.+)", re.DOTALL)
CHUNK = re.compile(r"model(\d{1,4})")


def chunks_of(tree: Mapping[Any, Any]) -> list[Chunk]:
    """The model in one file: one chunk under `model`, or several under `model0`, `model1` and so on."""
    return [dict(_flat(part, "")) for part in _parts(tree)]


def _parts(tree: Mapping[Any, Any]) -> list[Any]:
    if isinstance(tree.get("model"), dict):
        return [tree["model"]]
    numbers = {int(m[1]): tree[k] for k in tree if isinstance(k, str) and (m := CHUNK.fullmatch(k))}
    return [numbers[i] for i in sorted(numbers)] if sorted(numbers) == list(range(len(numbers))) else []


def _flat(node: Any, prefix: str) -> Iterator[tuple[str, Any]]:
    """Join nested keys with dots. The reader's budget bounds the depth."""
    for key, value in node.items() if isinstance(node, dict) else ():
        if isinstance(value, dict):
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


EXPERT = re.compile(
    r"(?P<prefix>(?:.*\.)?(?:local_experts\.|experts\.linear_fc[12]\.(?:weight|bias)))(?P<number>\d{1,6})(?P<rest>|\..+)",
    re.DOTALL,
)
EXPERTS = re.compile(r"(?:.*\.)?(?:local_)?experts\..*", re.DOTALL)
"""Weights of routed experts; names that match `EXPERT` are of one expert, with its number on its rank."""


def expert_counts(names: Iterable[str]) -> dict[str, int]:
    """The number of experts of each layer on a rank, by the layer's prefix; none where their numbers have gaps."""
    found: dict[str, set[int]] = {}
    for expert in filter(None, map(EXPERT.fullmatch, names)):
        found.setdefault(expert["prefix"], set()).add(int(expert["number"]))
    return {prefix: len(numbers) for prefix, numbers in found.items() if numbers == set(range(len(numbers)))}


def module_order_in(tree: Mapping[Any, Any]) -> ModuleOrder:
    """Whether the model in one file has the order of its modules, chunk by chunk.

    Older versions put the state dicts of embedding, encoder and output layer into dicts by hand, in that order.
    """
    parts = (part for part in _parts(tree) if isinstance(part, dict))
    orders = (order_of(dict(_flat(part, "")), dict(_modules(part, ""))) for part in parts)
    return next((order for order in orders if not order.kept), CONFIRMED)


def _modules(node: Any, prefix: str) -> Iterator[tuple[str, None]]:
    """Yield every module that the state dicts in a part of the model list."""
    listed = getattr(node, "_metadata", None)
    for module in listed if isinstance(listed, dict) else ():
        yield f"{prefix}{module}".removesuffix("."), None
    for key, value in node.items() if listed is None else ():
        if isinstance(value, dict):
            yield from _modules(value, f"{prefix}{key}.")


def is_chunk(key: Any) -> bool:
    """Whether a key of a file holds the model, or a part of it."""
    return isinstance(key, str) and (key == "model" or CHUNK.fullmatch(key) is not None)


class Layers:
    """Numbers the layers of the whole model, counted over the pipeline stages."""

    def __init__(self, chunks: Mapping[Place, Chunk], stages: int, number: int | None) -> None:
        self.virtual, self.stages = 1 + max((chunk for chunk, _ in chunks), default=0), stages
        # Whether the files here cover every place; and layers per block, such as `decoder.layers`, and place.
        self.complete = len(chunks) == self.virtual * stages
        self.counts: dict[str, dict[Place, set[int]]] = {}
        for place, names in chunks.items():
            for layer in filter(None, map(LAYER.fullmatch, names)):
                self.counts.setdefault(layer["block"], {p: set() for p in chunks})[place].add(int(layer["index"]))
        self.starts = {block: dict(self._starts(counts, number)) for block, counts in self.counts.items()}

    def _starts(self, counts: Mapping[Place, set[int]], number: int | None) -> Iterator[tuple[Place, int]]:
        """Yield the first layer number of each (chunk, stage), up to the first unknown one."""
        lengths = {len(indices) for indices in counts.values()}
        even = number == max(lengths) * self.virtual * self.stages and len(lengths) == 1
        start = 0
        for place in product(range(self.virtual), range(self.stages)):
            if counts.get(place, set()) != set(range(len(counts.get(place, ())))):
                return
            yield place, start
            if place not in counts and not even:
                return
            start += len(counts[place]) if place in counts else max(lengths)

    def name(self, name: str, place: Place) -> tuple[str, str]:
        """The name of a tensor in the whole model, and why its layer's number is unknown, or ""."""
        found = LAYER.fullmatch(name)
        if found is None:
            return name, ""
        block, index, rest = found["block"], int(found["index"]), found["rest"]
        start = self.starts[block].get(place)
        if start is not None:
            return f"{block}.{start + index}.{rest}", ""
        why = f"the layers before pipeline stage {place[1]} cannot be counted, so this one's number is not known"
        return f"{block}.?{index} of stage {place[1]}.{rest}", why


# -- the model of all ranks --------------------------------------------------------------------------------------------


GROUPED = "weights of experts in one tensor of each rank (grouped GEMM) that are spread over ranks are not joined"
SPREAD = "experts are tensor-parallel over {} ranks and everything else over {}; not joined"
EXTRA_STATE = "_extra_state"
INPUT = ("embedding.word_embeddings.weight", "language_model.embedding.word_embeddings.weight")
HEADS = ("output_layer.weight", "word_embeddings_for_head.weight")

ValuesByRank = list[tuple[Coordinates, Any]]
"""The ranks' values of one name."""


class Model:
    """The whole model: the names and pieces that the model-parallel ranks saved."""

    def __init__(
        self, grid: Grid, trees: Mapping[Coordinates, Mapping[Any, Any]], given: GivenRules, args: Mapping[str, Any]
    ) -> None:
        self.grid, self.given, self.args = grid, given, args
        self.problems: list[Problem] = []
        self.odd_layers: dict[str, str] = {}  # why layers have no sure number, by name
        chunks = {at: chunks_of(tree) for at, tree in sorted(trees.items())}
        counts = sorted(set(map(len, chunks.values())))
        if len(counts) > 1:
            text = f"stages have different numbers of model chunks: {counts}"
            self.problems.append(Problem(Code.LAYOUT_DISAGREES, text))
        first = {(v, at.pp): chunk for at, c in reversed(chunks.items()) for v, chunk in enumerate(c)}
        self.layers = Layers(first, grid.pp, setting(args, "num_layers"))
        # On each rank that was read: names in the whole model with values, the tensors of these, the order in its file.
        self.local = {at: list(self._named(at, c)) for at, c in chunks.items()}
        self.pieces = {at: {n: v for n, v in c if isinstance(v, Tensor)} for at, c in self.local.items()}
        self.orders = {at: module_order_in(tree) for at, tree in trees.items()}
        # Every name as ranks list them, but each block's layers by their numbers.
        place: dict[str, tuple[int, int, int]] = {}
        blocks: dict[str, int] = {}
        for n, fqn in enumerate(dict.fromkeys(fqn for values in self.local.values() for fqn, _ in values)):
            layer = LAYER.fullmatch(fqn)
            place[fqn] = (blocks.setdefault(layer["block"], n), int(layer["index"]), n) if layer else (n, -1, n)
        self.names = sorted(place, key=place.__getitem__)
        self._check_number()
        self.problems += [*self._check_experts(chunks), *self._check_copies(chunks)]

    def _check_copies(self, chunks: Mapping[Coordinates, Sequence[Mapping[str, Any]]]) -> Iterator[Problem]:
        """Find two expert-parallel ranks whose experts have equal checksums: one may be a copy.

        Experts that were all made from one dense layer are equal on a rank too, and prove nothing.
        """
        seen: dict[Any, Coordinates] = {}
        for at, parts in chunks.items() if self.grid.ep > 1 else ():
            named = [(n, stated_checksum(v)) for part in parts for n, v in part.items() if EXPERTS.fullmatch(n)]
            sums = tuple((name, stated) for name, stated in named if stated is not None)
            alike = len({stated for _, stated in sums}) < len(sums)
            if alike or not may_be_a_copy(stated for _, stated in sums):
                continue
            twin = seen.setdefault((at.pp, at.tp, sums), at)
            if twin.ep != at.ep:
                here, there = (stated_sources(v for part in chunks[a] for v in part.values()) for a in (at, twin))
                yield from perhaps_copied(here[0].path, there[0].path, self.grid.rank(at), here)

    def _check_experts(self, chunks: Mapping[Coordinates, Sequence[Mapping[str, Any]]]) -> Iterator[Problem]:
        """Compare each rank's experts with the rows of their layer's router, which counts the experts of all ranks."""
        parts = (
            (at, chunk, prefix, n)
            for at, c in chunks.items()
            for chunk in c
            for prefix, n in expert_counts(chunk).items()
        )
        for at, chunk, prefix, count in parts:
            mlp = prefix.partition("experts.")[0].removesuffix("local_")
            router = chunk.get(f"{mlp}router.weight")
            if isinstance(router, Tensor) and router.shape[:1] not in ((), (count * self.grid.ep,)):
                has = f"{self.grid.folder(at)} has {count} experts and {self.grid.ep} ranks share them"
                text = f"{has}, the router has {router.shape[0]}; experts are missing, or the files are not of one run"
                yield Problem(Code.MODEL_PART_MISSING, text, self.grid.rank(at), f"model.{mlp}router.weight")

    def _check_number(self) -> None:
        """Compare the number of layers with the saved arguments, if all layers are of one kind."""
        blocks = [b for b in self.layers.counts if not b.startswith("mtp.")]
        stated = setting(self.args, "num_layers")
        if len(blocks) != 1 or stated is None or not self.layers.complete:
            return
        counted = sum(map(len, self.layers.counts[blocks[0]].values()))
        if counted != stated:
            text = f"the stages hold {counted} layers, args.num_layers is {stated}"
            self.problems.append(Problem(Code.LAYOUT_DISAGREES, text, None, f"model.{blocks[0]}"))

    def _named(self, at: Coordinates, chunks: Sequence[Mapping[str, Any]]) -> Iterator[tuple[str, Any]]:
        for number, chunk in enumerate(chunks):
            counts = expert_counts(chunk) if self.grid.ep > 1 else {}
            for name, value in chunk.items():
                expert = EXPERT.fullmatch(name) if counts else None
                if expert and expert["prefix"] in counts:
                    first = at.ep * counts[expert["prefix"]]
                    name = f"{expert['prefix']}{first + int(expert['number'])}{expert['rest']}"
                fqn, why = self.layers.name(name, (number, at.pp))
                if why:
                    self.odd_layers[fqn] = why
                yield fqn, value

    def tree(self) -> tuple[dict[str, Any], dict[str, list[Any]]]:
        """The state dict, and each rank's own extra states."""
        gathered: dict[str, ValuesByRank] = {fqn: [] for fqn in self.names}
        for at, local in self.local.items():
            for fqn, value in local:
                gathered[fqn].append((at, value))
        whole: dict[str, Any] = {}
        extra: dict[str, list[Any]] = {}
        for fqn, values in gathered.items():
            if fqn.endswith(EXTRA_STATE) and len(values) > 1 and any(v is not None for _, v in values):
                extra[fqn] = [v for _, v in values]
            elif any(isinstance(v, Tensor) for _, v in values):
                whole[fqn] = self.joined(fqn, values)
            else:
                whole[fqn] = self.agreed(f"model.{fqn}", values)
        return self.with_tied_head(whole), extra

    def joined(self, fqn: str, values: ValuesByRank, slot: str = "") -> Tensor:
        """Join the pieces of a weight, or of its optimizer state; add a note if that is impossible."""
        tensors = [(at, v) for at, v in values if isinstance(v, Tensor)]
        first, ranked = tensors[0][1], [(self.grid.rank(at), tensor) for at, tensor in tensors]
        rule = self.rule(fqn, tensors[0][0]) if len(tensors) == len(values) else "ranks hold it and something else"
        if not isinstance(rule, str) and any(t.note or t.kind != "plain" for _, t in tensors):
            rule = first.note or f"a {first.kind} tensor, whose pieces are not joined"
        if isinstance(rule, str):
            return unjoined_tensor(ranked, rule)
        try:
            return join(list(self._pieces(tensors, rule)), rule, self.grid.tp)
        except UnlikeError as error:
            about = f"optimizer.{slot}.{fqn}" if slot else f"model.{fqn}"
            self.problems.append(Problem(Code.LAYOUT_DISAGREES, str(error), None, about))
            return unjoined_tensor(ranked, str(error))

    def rule(self, fqn: str, at: Coordinates) -> JoinRule | str:
        """The rule for a weight, or why there is none."""
        if fqn in self.odd_layers:
            return self.odd_layers[fqn]
        own = self.grid.etp
        if EXPERTS.fullmatch(fqn) and own not in (1, self.grid.tp):
            return SPREAD.format(own, self.grid.tp)
        if EXPERTS.fullmatch(fqn) and self.grid.ep > 1 and not EXPERT.fullmatch(fqn):
            return GROUPED
        whole = self.grid.tp == 1 or (own == 1 and EXPERTS.fullmatch(fqn))
        return REPLICATED if whole else rule_of(fqn, self.pieces[at], self.given)

    def _pieces(self, tensors: Sequence[tuple[Coordinates, Tensor]], rule: JoinRule) -> Iterator[RankPiece]:
        """The pieces that were read, and for a cut weight also the unread pieces of other ranks."""
        for at, tensor in tensors:
            yield RankPiece(at.tp, self.grid.rank(at), tensor)
        here = {(at.pp, at.tp) for at, _ in tensors}
        ep = tensors[0][0].ep
        for stage in dict.fromkeys(at.pp for at, _ in tensors) if rule.dim is not None else ():
            for tp in range(self.grid.tp):
                if (stage, tp) not in here:
                    yield RankPiece(tp, self.grid.rank(Coordinates(stage, ep, tp)), None)

    def agreed(self, path: str, values: ValuesByRank) -> Any:
        """The value that ranks agree on."""
        found = vote([(self.grid.rank(at), value) for at, value in values], same_value)
        if not found.agree:
            text = f"differs between ranks ({found.by_rank()})"
            own = found.differing(path.rpartition(".")[2])
            self.problems.append(Problem(Code.COPIES_DIFFER, text, None, path, ranks=found.odd, differing=own))
        return values[0][1]

    def with_tied_head(self, whole: dict[str, Any]) -> dict[str, Any]:
        """Add the input embedding to a tied output layer as a replica, so that consolidating compares the two."""
        source = next((whole[n] for n in INPUT if isinstance(whole.get(n), Tensor)), None)
        for head in HEADS:
            own = whole.get(head)
            tied = head == "word_embeddings_for_head.weight" or _is_tied(self.args)
            if not tied or source is None or not isinstance(own, Tensor) or own.note or source.note:
                continue
            if (own.shape, own.dtype) == (source.shape, source.dtype):
                whole[head] = replace(own, shards=(*own.shards, *source.shards))
                continue
            text = f"{own.dtype} {list(own.shape)}, but tied to the embedding of {source.dtype} {list(source.shape)}"
            self.problems.append(Problem(Code.LAYOUT_DISAGREES, text, None, f"model.{head}"))
        return whole


def check_values(args: Mapping[str, Any], tree: Mapping[Any, Any], grid: Grid) -> Iterator[Problem]:
    """Note how Megatron stores some weights, and find values that contradict the saved arguments."""
    model = tree.get("model", {})
    rows = next((model[n].shape[0] for n in INPUT if isinstance(model.get(n), Tensor) and not model[n].note), None)
    padded = setting(args, "padded_vocab_size")
    if rows is not None and padded is not None:
        if rows != padded:
            text = f"{rows} rows, args.padded_vocab_size is {padded}"
            yield Problem(Code.LAYOUT_DISAGREES, text, None, f"model.{next(n for n in INPUT if n in model)}")
        text = f"embedding and output layer keep the padded vocabulary of {rows} rows (args.padded_vocab_size)"
        yield Problem(Code.KEPT_AS_SAVED, text)
    yield from notes_on_model(args, model, tree.get("checkpoint_version", 0))


def notes_on_model(args: Mapping[str, Any], model: Mapping[str, Any], version: Any) -> Iterator[Problem]:
    """Note a tied output layer without a name of its own, and the order of fused QKV rows, by version."""
    embedding = next((name for name in INPUT if name in model), None)
    stored = any(name.endswith("output_layer.weight") or name in HEADS for name in model)
    if _is_tied(args) and embedding is not None and not stored:
        text = f"the output layer is tied to {embedding} and stored under that name only"
        yield Problem(Code.KEPT_AS_SAVED, text)
    if not any(QKV.fullmatch(name) for name in model):
        return
    how = "all queries, all keys, all values of each rank" if not version else "per head, with q, k and v interleaved"
    text = f"checkpoint_version {version}: fused QKV weights keep that version's row order ({how})"
    if isinstance(version, (int, float)) and version >= 2:
        text = "fused QKV weights keep Megatron's row order: for each query group its queries, key and value"
    yield Problem(Code.KEPT_AS_SAVED, text)


def _is_tied(args: Mapping[str, Any]) -> bool:
    return args.get("untie_embeddings_and_output_weights") is False


# -- half-precision weights, or the optimizer's fp32 master copies -----------------------------------------------------

HALF = ("float16", "bfloat16")
MASTER = "fp32_param"
"""The slot of the optimizer's state with the master copy."""


class ChosenWeights(NamedTuple):
    """The requested weights, and a note on the choice if there are two copies.

    `masters_whole` means that every half-precision weight has a master copy; true also without half-precision weights.
    """

    weights: dict[str, Any]
    masters_whole: bool = True
    masters_taken: bool = False
    problems: tuple[Problem, ...] = ()


def choose_weights(weights: Mapping[str, Any], masters: Mapping[str, Tensor], wanted: Weights) -> ChosenWeights:
    """Choose the master copies if wanted and complete for all half-precision weights; else the module's own."""
    half = [name for name, value in weights.items() if isinstance(value, Tensor) and value.dtype in HALF]
    if not half:
        return ChosenWeights({**weights})
    whole = all(name in masters and not masters[name].note for name in half)
    taken = whole and wanted == "fp32"
    chosen = {name: masters.get(name, value) if taken else value for name, value in weights.items()}
    if not whole:
        how = "have no fp32 master copy here that is sure; the module's own are taken"
    elif wanted == "module":
        how = f"as the module had them; {spelled('weights', 'fp32')} takes the master copies"
    else:
        how = f"in their fp32 master copies; {spelled('weights', 'module')} takes the module's own"
    note = Problem(Code.KEPT_AS_SAVED, f"{len(half)} half-precision weights {how}")
    return ChosenWeights(chosen, whole, taken, (note,))


def masters_of(tree: Any) -> dict[str, Tensor]:
    """The joined master copies in a merged optimizer, by parameter."""
    slots = ((path[-3:], tensor) for path, tensor in tensors_in(tree) if len(path) > 2)
    return {str(fqn): tensor for (state, fqn, slot), tensor in slots if (state, slot) == ("state", MASTER)}
