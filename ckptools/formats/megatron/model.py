"""The model of a Megatron checkpoint, joined from its model-parallel ranks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from ckptools.formats.megatron.folders import Coordinates, Grid, setting
from ckptools.formats.megatron.layers import (
    EXPERT,
    EXPERTS,
    LAYER,
    QKV,
    Layers,
    chunks_of,
    expert_counts,
    module_order_in,
    rule_of,
)
from ckptools.formats.options import Weights
from ckptools.formats.shared.tensor_parallel import (
    REPLICATED,
    GivenRules,
    JoinRule,
    RankPiece,
    UnlikeError,
    join,
    unjoined_tensor,
)
from ckptools.model.problems import Code, Problem
from ckptools.model.rank_vote import same_value, vote
from ckptools.model.tensor import Tensor
from ckptools.model.tree import tensors_in
from ckptools.tensor_io.copied_files import may_be_a_copy, perhaps_copied, stated_checksum, stated_sources

GROUPED = "weights of experts in one tensor of each rank (grouped GEMM) that are spread over ranks are not joined"
SPREAD = "experts are tensor-parallel over {} ranks and everything else over {}; not joined"
EXTRA_STATE = "_extra_state"
INPUT = ("embedding.word_embeddings.weight", "language_model.embedding.word_embeddings.weight")
HEADS = ("output_layer.weight", "word_embeddings_for_head.weight")

ValuesByRank = list[tuple[Coordinates, Any]]
"""The ranks' values under one name."""


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
        self.names = self._names()
        self._check_number()
        self.problems += [*self._check_experts(chunks), *self._check_copies(chunks)]

    def _check_copies(self, chunks: Mapping[Coordinates, Sequence[Mapping[str, Any]]]) -> Iterator[Problem]:
        """Two expert-parallel ranks whose experts have the same bytes, by their checksums: one may be a copy.

        Experts that were all made of one dense layer are the same on a rank too, and prove nothing.
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
        """Compare each rank's experts with the rows of their layer's router, which counts those of all ranks."""
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
        """Compare the counted layers with the saved arguments, where there is one kind of layers."""
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

    def _names(self) -> list[str]:
        """Every name as ranks list them, but each block's layers by their numbers."""
        place: dict[str, tuple[int, int, int]] = {}
        blocks: dict[str, int] = {}
        for n, fqn in enumerate(dict.fromkeys(fqn for values in self.local.values() for fqn, _ in values)):
            layer = LAYER.fullmatch(fqn)
            place[fqn] = (blocks.setdefault(layer["block"], n), int(layer["index"]), n) if layer else (n, -1, n)
        return sorted(place, key=place.__getitem__)

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
        """Join the pieces of a weight, or of its optimizer state; add a note where that is impossible."""
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
        """The pieces that were read, and for a cut weight those of other ranks."""
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
    """Notes on what Megatron saves in its own way, and problems where values contradict the saved arguments."""
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
    """Notes on a tied output layer that has no name of its own, and on the order of fused QKV rows by version."""
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


# -- half-precision weights, or the optimizer's fp32 master copies ----------------------------------------------------


HALF = ("float16", "bfloat16")
MASTER = "fp32_param"
"""The slot of the optimizer's state that holds the master copy."""


class ChosenWeights(NamedTuple):
    """The requested weights, and a note on the chosen copy where there are two.

    `masters_whole` means that every half-precision weight has a master copy; true where there are none of them.
    """

    weights: dict[str, Any]
    masters_whole: bool = True
    masters_taken: bool = False
    problems: tuple[Problem, ...] = ()


def choose_weights(weights: Mapping[str, Any], masters: Mapping[str, Tensor], wanted: Weights) -> ChosenWeights:
    """Choose the master copies where they are wanted and every half-precision weight has one; else the module's own."""
    half = [name for name, value in weights.items() if isinstance(value, Tensor) and value.dtype in HALF]
    if not half:
        return ChosenWeights({**weights})
    whole = all(name in masters and not masters[name].note for name in half)
    taken = whole and wanted == "fp32"
    chosen = {name: masters.get(name, value) if taken else value for name, value in weights.items()}
    if not whole:
        how = "have no fp32 master copy here that is sure; the module's own are taken"
    elif wanted == "module":
        how = "as the module had them; --weights fp32 takes the master copies"
    else:
        how = "in their fp32 master copies; --weights module takes the module's own"
    note = Problem(Code.KEPT_AS_SAVED, f"{len(half)} half-precision weights {how}")
    return ChosenWeights(chosen, whole, taken, (note,))


def masters_of(tree: Any) -> dict[str, Tensor]:
    """The joined master copies in a merged optimizer, by parameter."""
    slots = ((path[-3:], tensor) for path, tensor in tensors_in(tree) if len(path) > 2)
    return {str(fqn): tensor for (state, fqn, slot), tensor in slots if (state, slot) == ("state", MASTER)}
