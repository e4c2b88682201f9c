"""The model of a Megatron checkpoint, joined from its model-parallel ranks."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ckptools.formats.megatron.folders import Coordinates, Grid, setting
from ckptools.formats.megatron.layers import LAYER, Layers, Rules, chunks_of, module_order_in
from ckptools.formats.options import Weights
from ckptools.formats.shared.tensor_parallel import REPLICATED, JoinRule, RankPiece, UnlikeError, join, unjoined_tensor
from ckptools.model.problems import Code, Problem
from ckptools.model.rank_vote import same_value, vote
from ckptools.model.tensor import Tensor

EXPERT = re.compile(r"(?:.*\.)?(?:local_)?experts\..*", re.DOTALL)
EXPERTS = "weights of experts that are spread over expert-parallel ranks are not joined"
EXTRA_STATE = "_extra_state"
INPUT = ("embedding.word_embeddings.weight", "language_model.embedding.word_embeddings.weight")
HEADS = ("output_layer.weight", "word_embeddings_for_head.weight")

ValuesByRank = list[tuple[Coordinates, Any]]
"""The ranks' values under one name."""


class Model:
    """The whole model: the names and pieces that the model-parallel ranks saved.

    Args:
        grid: the model-parallel grid.
        trees: the saved tree of each rank that was read.
        rules: how pieces are joined.
        args: the saved arguments.

    Attributes:
        local: name in the whole model and value, on each rank that was read.
        pieces: its tensors, by name.
        orders: whether each rank's file has its names in the order of the module.
        names: every name, layer by layer.
        problems: where ranks contradict each other.
        odd_layers: why layers have no sure number, by name.
    """

    def __init__(
        self, grid: Grid, trees: Mapping[Coordinates, Mapping[Any, Any]], rules: Rules, args: Mapping[str, Any]
    ) -> None:
        self.grid, self.rules, self.args = grid, rules, args
        self.problems: list[Problem] = []
        self.odd_layers: dict[str, str] = {}
        chunks = {at: chunks_of(tree) for at, tree in sorted(trees.items())}
        self._check_chunks({at: len(c) for at, c in chunks.items()})
        first = {(v, at.pp): chunk for at, c in reversed(chunks.items()) for v, chunk in enumerate(c)}
        self.layers = Layers(first, grid.pp, setting(args, "num_layers"))
        self.local = {at: list(self._named(at, c)) for at, c in chunks.items()}
        self.pieces = {at: {n: v for n, v in c if isinstance(v, Tensor)} for at, c in self.local.items()}
        self.orders = {at: module_order_in(tree) for at, tree in trees.items()}
        self.names = self._names()
        self._check_number()

    def _check_chunks(self, counts: Mapping[Coordinates, int]) -> None:
        if len(set(counts.values())) > 1:
            text = f"stages have different numbers of model chunks: {sorted(set(counts.values()))}"
            self.problems.append(Problem(Code.LAYOUT_DISAGREES, text))

    def _check_number(self) -> None:
        """Compare the counted layers with the saved arguments, where there is one kind of layers."""
        blocks = [b for b in self.layers.counts if not b.startswith("mtp.")]
        stated = setting(self.args, "num_layers")
        if len(blocks) != 1 or stated is None or not self.layers.complete or self.layers.total(blocks[0]) == stated:
            return
        text = f"the stages hold {self.layers.total(blocks[0])} layers, args.num_layers is {stated}"
        self.problems.append(Problem(Code.LAYOUT_DISAGREES, text, None, f"model.{blocks[0]}"))

    def _named(self, at: Coordinates, chunks: Sequence[Mapping[str, Any]]) -> Iterator[tuple[str, Any]]:
        for number, chunk in enumerate(chunks):
            for name, value in chunk.items():
                fqn, why = self.layers.name(name, (number, at.pp))
                if why:
                    self.odd_layers[fqn] = why
                yield fqn, value

    def _names(self) -> list[str]:
        found: dict[str, None] = {}
        for at in self.local:
            found.update(dict.fromkeys(fqn for fqn, _ in self.local[at]))
        return sorted(found, key=_layer_order(found))

    def by_name(self) -> dict[str, ValuesByRank]:
        """The ranks' values by name in the whole model."""
        gathered: dict[str, ValuesByRank] = {fqn: [] for fqn in self.names}
        for at, values in self.local.items():
            for fqn, value in values:
                gathered[fqn].append((at, value))
        return gathered

    def tree(self) -> tuple[dict[str, Any], dict[str, list[Any]]]:
        """The state dict, and each rank's own extra states."""
        whole: dict[str, Any] = {}
        extra: dict[str, list[Any]] = {}
        for fqn, values in self.by_name().items():
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
        first = tensors[0][1]
        rule = self.rule(fqn, tensors[0][0]) if len(tensors) == len(values) else "ranks hold it and something else"
        if not isinstance(rule, str) and any(t.note or t.kind != "plain" for _, t in tensors):
            rule = first.note or f"a {first.kind} tensor, whose pieces are not joined"
        if isinstance(rule, str):
            return unjoined_tensor(self._ranked(tensors), rule)
        try:
            return join(list(self._pieces(tensors, rule)), rule, self.grid.tp)
        except UnlikeError as error:
            about = f"optimizer.{slot}.{fqn}" if slot else f"model.{fqn}"
            self.problems.append(Problem(Code.LAYOUT_DISAGREES, str(error), None, about))
            return unjoined_tensor(self._ranked(tensors), str(error))

    def _ranked(self, tensors: Iterable[tuple[Coordinates, Tensor]]) -> Iterator[tuple[int, Tensor]]:
        yield from ((self.grid.rank(at), tensor) for at, tensor in tensors)

    def rule(self, fqn: str, at: Coordinates) -> JoinRule | str:
        """The rule for a weight, or why there is none."""
        if fqn in self.odd_layers:
            return self.odd_layers[fqn]
        if EXPERT.fullmatch(fqn) and (self.grid.ep > 1 or self._experts_differ()):
            return EXPERTS
        return REPLICATED if self.grid.tp == 1 else self.rules.of(fqn, self.pieces[at])

    def _experts_differ(self) -> bool:
        return setting(self.args, "expert_tensor_parallel_size") not in (None, self.grid.tp)

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
            self.problems.append(Problem(Code.COPIES_DIFFER, text, None, path, ranks=found.odd))
        return values[0][1]

    def with_tied_head(self, whole: dict[str, Any]) -> dict[str, Any]:
        """Add the input embedding to a tied output layer as a replica, so that consolidating compares the two."""
        source = next((whole[n] for n in INPUT if isinstance(whole.get(n), Tensor)), None)
        for head in HEADS:
            tied = head == "word_embeddings_for_head.weight" or (
                self.args.get("untie_embeddings_and_output_weights") is False
            )
            own = whole.get(head)
            if tied and source is not None and isinstance(own, Tensor) and not (own.note or source.note):
                whole[head] = self._with_copies(head, own, source)
        return whole

    def _with_copies(self, head: str, own: Tensor, source: Tensor) -> Tensor:
        if (own.shape, own.dtype) == (source.shape, source.dtype):
            return replace(own, shards=(*own.shards, *source.shards))
        text = f"{own.dtype} {list(own.shape)}, but tied to the embedding of {source.dtype} {list(source.shape)}"
        self.problems.append(Problem(Code.LAYOUT_DISAGREES, text, None, f"model.{head}"))
        return own


def _layer_order(found: Iterable[str]) -> Any:
    """Sort names as ranks list them, but each block's layers by their numbers."""
    place: dict[str, tuple[int, int, int]] = {}
    blocks: dict[str, int] = {}
    for n, fqn in enumerate(found):
        layer = LAYER.fullmatch(fqn)
        if layer:
            place[fqn] = (blocks.setdefault(layer["block"], n), int(layer["index"]), n)
        else:
            place[fqn] = (n, -1, n)
    return place.__getitem__


# -- half-precision weights, or the optimizer's fp32 master copies ----------------------------------------------------


HALF = ("float16", "bfloat16")
MASTER = "fp32_param"
"""The slot of the optimizer's state that holds the master copy."""


@dataclass(frozen=True)
class ChosenWeights:
    """The requested weights.

    Attributes:
        weights: the model's state dict.
        masters_whole: whether every half-precision weight has a master copy; true where there are none of them.
        masters_taken: whether the master copies are in `weights`.
        problems: a note on the chosen copy, where there are two.
    """

    weights: dict[str, Any]
    masters_whole: bool = True
    masters_taken: bool = False
    problems: tuple[Problem, ...] = ()


def choose_weights(weights: Mapping[str, Any], masters: Mapping[str, Tensor], wanted: Weights) -> ChosenWeights:
    """Choose the master copies where they are wanted and every half-precision weight has one; else the module's own.

    Args:
        weights: the module's own, by name.
        masters: the master copies, by name.
        wanted: `fp32` for the master copies, `module` for the module's own.
    """
    half = [name for name, value in weights.items() if isinstance(value, Tensor) and value.dtype in HALF]
    if not half:
        return ChosenWeights({**weights})
    whole = all(name in masters and not masters[name].note for name in half)
    taken = whole and wanted == "fp32"
    chosen = {name: masters.get(name, value) if taken else value for name, value in weights.items()}
    return ChosenWeights(chosen, whole, taken, (_note(wanted, whole, len(half)),))


def _note(wanted: Weights, whole: bool, count: int) -> Problem:
    if not whole:
        text = f"{count} half-precision weights have no fp32 master copy here that is sure; the module's own are taken"
    elif wanted == "module":
        text = f"{count} half-precision weights as the module had them; --weights fp32 takes the master copies"
    else:
        text = f"{count} half-precision weights in their fp32 master copies; --weights module takes the module's own"
    return Problem(Code.KEPT_AS_SAVED, text)


def masters_of(tree: Any) -> dict[str, Tensor]:
    """The joined master copies in a merged optimizer, by parameter."""
    found: dict[str, Tensor] = {}
    for one in tree if isinstance(tree, list) else [tree]:
        inner = one.get("optimizer", one) if isinstance(one, Mapping) else {}
        state = inner.get("state", {}) if isinstance(inner, Mapping) else {}
        for fqn, slots in state.items():
            master = slots.get(MASTER) if isinstance(slots, Mapping) else None
            if isinstance(master, Tensor):
                found[fqn] = master
    return found
