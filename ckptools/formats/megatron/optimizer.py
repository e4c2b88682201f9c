"""The optimizer of a legacy Megatron checkpoint, by parameter name where that is certain.

Without the distributed optimizer each model-parallel rank saves a plain `optimizer.state_dict()` keyed by number: under
`optimizer` itself (FP32Optimizer), or under `optimizer.optimizer` beside `fp32_from_fp16_params`, the fp32 copies of
each group's half-precision parameters in the group's order (Float16OptimizerWithFloat16Params; `optimizer_state_dict`
and `fp32_from_fp16` up to v1.1). Several chained optimizers are a list. A group lists its parameters in the order of
`named_parameters()`, which is that of the model's state dict, so names follow from order and shapes as in other formats
(`ckptools.training_state.optimizers`). Source: megatron/core/optimizer/{__init__,optimizer}.py;
megatron/optimizer/optimizer.py.

The distributed optimizer keeps its state in `distrib_optim.pt`: for each gradient buffer flat tensors `param`,
`exp_avg`, `exp_avg_sq` of all parameters in the reverse order of their use, aligned and padded, without names. They are
shown, but not joined.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from ckptools.formats.megatron.folders import Coordinates
from ckptools.formats.megatron.model import HALF, MASTER, Model, ValuesByRank
from ckptools.formats.shared.merge import Merge
from ckptools.formats.shared.tensor_parallel import REPLICATED, RankPiece, UnlikeError, join
from ckptools.model.problems import Code, Problem
from ckptools.model.tensor import Tensor
from ckptools.model.tree import Opaque, describe_for_error, tensors_in
from ckptools.option import spelled
from ckptools.text import KeyPath, fqn_of
from ckptools.training_state.optimizers import name_parameters

FP32_COPIES = ("fp32_from_fp16_params", "fp32_from_fp16")
STRIDE = 10_000_000
"""Difference between the first group ids of two chained optimizers."""

UNNAMED = "its number could be more than one parameter's, or none's"
UNLIKE = "its shape is not its parameter's, so no rule joins its pieces"
FLAT = "distributed optimizer: flat buffers without names or shapes, not joined"


class RankOptimizer(NamedTuple):
    """One optimizer of one rank: its state by number, its groups, and the fp32 copies of each group's parameters.

    `rest` has the other values that its wrapper saves, such as `grad_scaler`; None without a wrapper.
    """

    state: Mapping[Any, Any]
    groups: list[Mapping[str, Any]]
    masters: list[list[Tensor]]
    rest: dict[str, Any] | None


def rank_optimizer(value: Any) -> RankOptimizer | None:
    """Parse one rank's optimizer; None if its form is unknown."""
    if not isinstance(value, Mapping):
        return None
    key = next((k for k in ("optimizer", "optimizer_state_dict") if isinstance(value.get(k), Mapping)), None)
    inner = value if key is None else value[key]
    groups, state = inner.get("param_groups"), inner.get("state", {})
    if not (isinstance(groups, list) and all(isinstance(g, Mapping) for g in groups) and isinstance(state, Mapping)):
        return None
    if key is None:
        return RankOptimizer(state, groups, [], None)
    masters: Any = next((value[k] for k in FP32_COPIES if k in value), None)
    listed = [group for group in masters if isinstance(group, list)] if isinstance(masters, list) else []
    kept = [[t for t in group if isinstance(t, Tensor)] for group in listed]
    return RankOptimizer(state, groups, kept, {k: v for k, v in value.items() if k not in (key, *FP32_COPIES)})


class Optimizers:
    """The optimizers of all ranks that were read.

    Args:
        model: for names, rules and shapes.
        saved: the value under `optimizer` of each rank.
        flat: the content of each rank's distributed optimizer file, by file.
    """

    def __init__(self, model: Model, saved: Mapping[Coordinates, Any], flat: Mapping[str, Any]) -> None:
        self.model, self.flat = model, flat
        self.merge = Merge()
        self.problems: list[Problem] = []
        self.assumed: set[str] = set()  # parameters whose state is named by order
        self.chained = any(isinstance(v, list) for v in saved.values())
        self.saved = {at: v if isinstance(v, list) else [v] for at, v in sorted(saved.items())}
        self.inner = {at: [rank_optimizer(one) for one in every] for at, every in self.saved.items()}
        self.names = {at: self._names(at, inners) for at, inners in self.inner.items()}

    def _names(self, at: Coordinates, inners: Sequence[RankOptimizer | None]) -> dict[tuple[int, Any], str]:
        """Name of each parameter of one rank, by optimizer and number."""
        state: dict[Any, Any] = {}
        groups: list[dict[str, Any]] = []
        for k, inner in enumerate(inners):
            if inner is None:
                continue
            for g, ids in enumerate(map(_ids, inner.groups)):
                groups.append({"params": [k * STRIDE + i for i in ids]})
                masters = inner.masters[g] if g < len(inner.masters) else []
                for n, i in enumerate(ids):
                    entry = inner.state.get(i)
                    master = {MASTER: masters[n]} if len(masters) == len(ids) else {}
                    state[k * STRIDE + i] = {**master, **entry} if isinstance(entry, Mapping) else master
        naming = name_parameters({"state": state, "param_groups": groups}, self.model.pieces[at], self.model.orders[at])
        self.assumed |= {naming.names[i] for i in naming.assumed}
        return {divmod(i, STRIDE): fqn for i, fqn in naming.names.items()}

    def tree(self) -> Any:
        """The merged optimizer, or a list of chained ones; None if no rank has one."""
        count = max(map(len, self.saved.values()), default=0)
        trees = [self._one(k) for k in range(count)]
        if self.flat:
            trees = trees or [{}]
            trees[0] = self._with_flat(trees[0])
        return trees if self.chained and trees else next(iter(trees), None)

    def _one(self, k: int) -> Any:
        inners = {at: every[k] for at, every in self.inner.items() if k < len(every)}
        known = {at: inner for at, inner in inners.items() if inner is not None}
        if len(known) < len(inners):
            return self.merge.trees([(self.model.grid.rank(at), v[k]) for at, v in self.saved.items() if k < len(v)])
        gathered: dict[str, dict[str, ValuesByRank]] = {fqn: {} for fqn in self.model.names}
        for at, inner in known.items():
            for fqn, slot, value in self._entries(k, at, inner):
                gathered.setdefault(fqn, {}).setdefault(slot, []).append((at, value))
        saved = {fqn: slots for fqn, slots in gathered.items() if slots}
        slotted = {fqn: {s: self._slot(fqn, s, values) for s, values in slots.items()} for fqn, slots in saved.items()}
        state = {"state": slotted, "param_groups": self._groups(k, known)}
        rests = [(self.model.grid.rank(at), i.rest) for at, i in known.items() if i.rest is not None]
        return {"optimizer": state, **self.merge.trees(rests, ("optimizer",))} if rests else state

    def _entries(self, k: int, at: Coordinates, inner: RankOptimizer) -> Iterator[tuple[str, str, Any]]:
        masters = self._masters(k, at, inner)
        ids = [i for group in inner.groups for i in _ids(group)]
        for i in dict.fromkeys([*ids, *(key for key in inner.state if type(key) is int)]):
            fqn = self._name(k, at, i)
            if i in masters:
                yield fqn, MASTER, masters[i]
            entry = inner.state.get(i)
            for slot, value in entry.items() if isinstance(entry, Mapping) else ():
                yield fqn, slot, value

    def _name(self, k: int, at: Coordinates, number: Any) -> str:
        known = self.names[at].get((k, number))
        return known or f"?{number} of {self.model.grid.folder(at)}" + (f", optimizer {k}" if k else "")

    def _masters(self, k: int, at: Coordinates, inner: RankOptimizer) -> dict[Any, Tensor]:
        """The master copy of each number: a group's copies belong to its half-precision parameters, in order."""
        model = self.model.pieces[at]
        found: dict[Any, Tensor] = {}
        for group, masters in zip(inner.groups, inner.masters, strict=False):
            names = [(i, self.names[at].get((k, i))) for i in _ids(group)]
            half = [(i, model[n]) for i, n in names if n is not None and model[n].dtype in HALF]
            named = all(n is not None for _, n in names)
            if named and [t.shape for _, t in half] == [t.shape for t in masters]:
                found.update({i: master for (i, _), master in zip(half, masters, strict=True)})
        return found

    def _slot(self, fqn: str, slot: str, values: ValuesByRank) -> Any:
        tensors = [v for _, v in values if isinstance(v, Tensor)]
        if not tensors:
            return self.model.agreed(f"optimizer.{fqn}.{slot}", values)
        if fqn.startswith("?"):
            return replace(tensors[0], note=f"{UNNAMED}; {spelled('only', 'model')} writes the model")
        own = [self.model.pieces[at].get(fqn) for at, _ in values]
        if all(p is not None and p.shape == t.shape for p, t in zip(own, tensors, strict=False)):
            return self.model.joined(fqn, values, slot)
        if not all(t.numel == 1 for t in tensors):
            return replace(tensors[0], note=f"{UNLIKE}; {spelled('only', 'model')} writes the model")
        # A value such as `step`, of which every rank has its own.
        pieces = [RankPiece(at.tp, self.model.grid.rank(at), v) for at, v in values if isinstance(v, Tensor)]
        try:
            return join(pieces, REPLICATED, self.model.grid.tp)
        except UnlikeError as error:
            return replace(tensors[0], note=str(error))

    def _groups(self, k: int, inners: Mapping[Coordinates, RankOptimizer]) -> list[dict[str, Any]]:
        """Param groups by their settings: stages hold different parameters of one group."""
        found: dict[str, dict[str, Any]] = {}
        of_stage: dict[int, str] = {}
        for at, inner in inners.items():
            # Tensor-parallel ranks of a stage have the same parameters in the same groups.
            groups = repr([dict(g) for g in inner.groups])
            if of_stage.setdefault(at.pp, groups) != groups and self.model.grid.ep == 1:
                text = f"{self.model.grid.folder(at)} has other param groups than the stage's first rank"
                self.problems.append(Problem(Code.COPIES_DIFFER, text, self.model.grid.rank(at), "optimizer"))
            for group in inner.groups:
                settings = {key: v for key, v in group.items() if key != "params"}
                merged = found.setdefault(repr(settings), {**settings, "params": {}})
                merged["params"].update(dict.fromkeys(self._name(k, at, i) for i in _ids(group)))
        order = {fqn: n for n, fqn in enumerate(self.model.names)}
        for group in found.values():
            group["params"] = sorted(group["params"], key=lambda fqn: order.get(fqn, len(order)))
        return list(found.values())

    def _with_flat(self, tree: Any) -> Any:
        """Put the flat buffers in place of the state, so that the optimizer does not look stateless."""
        state: dict[str, dict[str, Tensor]] = {}
        note = f"{FLAT}; {spelled('only', 'model')} writes the model"
        for file, content in self.flat.items():
            for path, tensor in tensors_in(content):
                *above, slot = path or ("tensor",)  # a file may hold a bare tensor
                name = f"{file}: {dotted_path(tuple(above))}" if above else file
                state.setdefault(name, {})[str(slot)] = replace(tensor, kind="flat_pieces", note=note)
        if isinstance(tree, Mapping) and isinstance(tree.get("optimizer"), Mapping):
            return {**tree, "optimizer": {**tree["optimizer"], "state": state}}
        return {**(tree if isinstance(tree, Mapping) else {}), "state": state, "param_groups": []}


def _ids(group: Mapping[str, Any]) -> list[Any]:
    params = group.get("params")
    listed = list(params) if isinstance(params, (list, tuple)) else []
    return listed if all(type(i) is int and 0 <= i < STRIDE for i in listed) else []


def dotted_path(path: KeyPath) -> str:
    """A key path joined with dots, also where a pair of dtypes is a key."""
    return fqn_of(tuple(describe_for_error(k.state) if isinstance(k, Opaque) else k for k in path))
