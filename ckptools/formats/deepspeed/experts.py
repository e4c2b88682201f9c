"""Parameters of experts: which ranks hold which experts, and their names in the whole model.

Expert parameters have param groups of their own, with `moe: True`. Ranks that share the same experts cut them over
their expert-data-parallel group alone, so `partition_count` of such a group is smaller: data-parallel size / expert-
parallel size. Expert-parallel rank e of rank r is r modulo the expert-parallel size, and its partition the quotient;
with `use_data_before_expert_parallelism` the other way round. `param_shapes` and `param_slice_mappings` count the
experts of one rank only: local expert i of expert-parallel rank e is expert e x local + i of the model. The experts'
own files have the model's numbers in their names and keys, one expert a file, as the module had them.

AutoEP (0.18 on) fuses the experts of a rank into one tensor, `<prefix>.experts.w1` with a leading dimension;
`ds_autoep_layers` names the prefix, and since 0.19.8 `expert_placement` says which experts each rank has. Its experts'
files have `<prefix>.experts.w1.<expert>`. Source: runtime/engine.py (`_save_moe_checkpoint`), utils/groups.py
(`_create_expert_and_data_parallel`), moe/utils.py, checkpoint/autoep_universal.py, runtime/zero/stage_1_and_2.py of
0.19.6 and 0.19.8; checked on real files of 0.19.8.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any

from ckptools.formats.deepspeed.names import StateName
from ckptools.formats.deepspeed.states import ModelStates, Shapes
from ckptools.formats.deepspeed.zero_stages import PartitionRun
from ckptools.model.problems import Code, Problem
from ckptools.model.regions import Box, Ints
from ckptools.model.shard import Shard
from ckptools.model.tensor import Tensor

NATIVE = re.compile(
    r"(?P<prefix>(?:.*\.)?deepspeed_moe\.experts\.deepspeed_experts\.)(?P<number>\d{1,7})(?P<rest>\..*)"
)
FUSED = re.compile(r"(?P<name>.*\.w[123])\.(?P<number>\d{1,7})")

EP_SIZE = re.compile(r"ep_size_(\d{1,5})")
"""The name of a param group of experts that are spread over so many groups of ranks."""

MAX_EXPERTS = 1 << 16
"""Most experts that a layer may have; no model has more."""

UNKNOWN = (
    "a parameter of experts that are spread over {ep} groups of ranks, and no file says how many experts its layer has"
)


class ExpertError(Exception):
    """Why expert parameters cannot be put together."""


@dataclass
class ExpertLayout:
    """The experts of a checkpoint, from its model states and the experts' own files.

    Attributes:
        counts: number of experts by layer prefix of DeepSpeed's own MoE layers.
        stated: `num_experts` of every layer of experts, in order; empty without.
        layers: layers of AutoEP, by prefix.
        data_first: whether ranks of one expert-data-parallel group follow each other.
    """

    counts: dict[str, int] = field(default_factory=dict)
    stated: tuple[int, ...] = ()
    layers: dict[str, dict[Any, Any]] = field(default_factory=dict)
    data_first: bool = False

    @classmethod
    def of(cls, model: ModelStates, files: Iterable[tuple[StateName, Mapping[Any, Any]]]) -> ExpertLayout:
        """Gather what model states and the experts' files say."""
        found = model.tree.get("num_experts")
        listed = found if isinstance(found, (list, tuple)) else [found]
        stated = tuple(n for n in listed if type(n) is int and 0 < n <= MAX_EXPERTS)
        autoep = model.tree.get("ds_autoep_layers")
        layers = [layer for layer in (autoep if isinstance(autoep, (list, tuple)) else ()) if isinstance(layer, dict)]
        prefixes = {str(layer.get("expert_key_prefix")): layer for layer in layers}
        first = model.config("use_data_before_expert_parallelism") is True
        one = cls({}, stated if len(stated) == len(listed) else (), prefixes, first)
        for name, tree in files:
            for native in (NATIVE.fullmatch(key) for key in tree if isinstance(key, str)):
                number = name.layer if name.layer is not None else 0
                if native and number < len(one.stated):
                    one.counts.setdefault(native["prefix"], one.stated[number])
        return one

    def ranks(self, dp: int, count: int) -> list[list[int]]:
        """Data-parallel ranks of each expert-parallel rank, in the order of their partitions.

        Raises:
            ExpertError: `count` partitions do not divide the ranks.
        """
        if count <= 0 or dp % count:
            raise ExpertError(f"partition_count {count} of a param group does not divide {dp} data-parallel ranks")
        size = dp // count
        if self.data_first:
            return [list(range(e * count, (e + 1) * count)) for e in range(size)]
        return [list(range(e, dp, size)) for e in range(size)]

    def placed(self, fqn: str, shape: Ints, size: int, locally: Mapping[str, int]) -> list[list[int]]:
        """The experts of every expert-parallel rank, by their number in the model, in local order.

        `size` is the number of expert-parallel ranks, `locally` how many experts each layer's rank has at least.

        Raises:
            ExpertError: nothing says it, or the files contradict each other.
        """
        native = NATIVE.fullmatch(fqn)
        if native:
            local = locally[native["prefix"]]
            total = self.counts.get(native["prefix"]) or next((n for n in self.stated if n == local * size), 0)
            if not total or total % size or total // size < local:
                known = f"{total} experts over {size} ranks with {local} each" if total else UNKNOWN.format(ep=size)
                raise ExpertError(f"{fqn}: {known}; the files are not of one run" if total else f"{fqn}: {known}")
            each = total // size
            return [list(range(e * each, (e + 1) * each)) for e in range(size)]
        layer = self.layers.get(fqn.rpartition(".")[0])
        if layer is None:
            raise ExpertError(f"{fqn}: cut over fewer ranks than others, and no expert of DeepSpeed's by its name")
        return _autoep_placement(fqn, layer, shape, size)


def _autoep_placement(fqn: str, layer: Mapping[Any, Any], shape: Ints, size: int) -> list[list[int]]:
    """Which experts each expert-parallel rank of an AutoEP layer has."""
    total, local, ep = (layer.get(key) for key in ("num_experts", "num_local_experts", "ep_size"))
    if type(total) is not int or ep != size or not shape or shape[0] != local or not 0 < total <= MAX_EXPERTS:
        raise ExpertError(f"{fqn}: ds_autoep_layers has {local} of {total} experts over {ep} ranks, not {list(shape)}")
    placement = layer.get("expert_placement")
    if placement is None:
        placed = [list(range(e * local, (e + 1) * local)) for e in range(size)]
    else:
        entries = placement.get("ranks") if isinstance(placement, dict) else None
        by_rank = {entry.get("rank"): entry.get("experts") for entry in entries or () if isinstance(entry, dict)}
        placed = [list(by_rank.get(e) or ()) for e in range(size)]
    if {len(own) for own in placed} != {local} or sorted(n for own in placed for n in own) != list(range(total)):
        raise ExpertError(f"{fqn}: experts are not spread evenly over the ranks, each on one; not joined")
    return placed


def globally(run: PartitionRun, numbers: Sequence[int], shape: Ints) -> Iterator[PartitionRun]:
    """A run of one rank's parameter, in the parameters of the whole model; `numbers` are the rank's experts.

    An expert of its own gets the model's number in its name. Of a fused tensor of `shape`, whose first dimension
    counts experts, the elements of each expert move to its place.
    """
    native = NATIVE.fullmatch(run.fqn)
    if native:
        yield run._replace(fqn=f"{native['prefix']}{numbers[int(native['number'])]}{native['rest']}")
        return
    each, end = prod(shape[1:]), run.start + run.length
    for i in range(run.start // each if each else 0, -(-end // each) if each else 0):
        low, high = max(run.start, i * each), min(end, (i + 1) * each)
        start = low - i * each + numbers[i] * each
        yield run._replace(start=start, length=high - low, at=run.at + low - run.start)


def global_shapes(shapes: Shapes, placed: Mapping[str, Sequence[Sequence[int]]]) -> Shapes:
    """Names and shapes in the whole model, of those that each rank has of its own experts."""
    found: Shapes = {}
    for e in range(max(map(len, placed.values()), default=0)):
        for fqn, shape in shapes.items():
            native = NATIVE.fullmatch(fqn)
            if native:
                found[f"{native['prefix']}{placed[fqn][e][int(native['number'])]}{native['rest']}"] = shape
            else:
                found[fqn] = (sum(map(len, placed[fqn])), *shape[1:])
    return found


def local_counts(names: Iterable[str]) -> dict[str, int]:
    """How many experts of its own each layer's rank names at least, by the layer's prefix."""
    counts: dict[str, int] = {}
    for native in filter(None, map(NATIVE.fullmatch, names)):
        counts[native["prefix"]] = max(counts.get(native["prefix"], 0), int(native["number"]) + 1)
    return counts


def own_weights(files: Iterable[tuple[StateName, Mapping[Any, Any]]]) -> dict[str, Any]:
    """The module's weights of all experts, from their own files; those of a fused tensor are its rows."""
    found: dict[str, Any] = {}
    rows: dict[str, dict[int, Tensor]] = {}
    for _, tree in files:
        for key, tensor in tree.items():
            fused = FUSED.fullmatch(key) if isinstance(key, str) and isinstance(tensor, Tensor) else None
            if fused and not NATIVE.fullmatch(key):
                rows.setdefault(fused["name"], {})[int(fused["number"])] = tensor
            elif isinstance(key, str) and isinstance(tensor, Tensor):
                found[key] = tensor
    return found | {fqn: _stacked(experts) for fqn, experts in rows.items()}


def _stacked(experts: Mapping[int, Tensor]) -> Tensor:
    """One tensor of the experts' weights, in the order of their numbers."""
    first = experts[min(experts)]
    odd = next((n for n, t in experts.items() if (t.shape, t.dtype) != (first.shape, first.dtype)), None)
    shape = (max(experts) + 1, *first.shape)
    if odd is not None or first.note:
        return Tensor(shape, first.dtype, (), note=first.note or f"expert {odd} has another shape or dtype than others")
    shards: list[Shard] = []
    for number in range(shape[0]):
        box = Box((number, *(0 for _ in first.shape)), (1, *first.shape))
        tensor = experts.get(number)
        source = tensor.shards[0].source if tensor is not None and len(tensor.shards) == 1 else None
        row = source and source.reshaped(box.sizes) if source is not None and source.contiguous else None
        shards.append(Shard(box, None, row))
    return Tensor(shape, first.dtype, tuple(shards), "chunks")


def check_files(files: Iterable[tuple[StateName, Mapping[Any, Any]]]) -> Iterator[Problem]:
    """Files of experts that hold another expert's or layer's weights than their name says."""
    layers: dict[str, int] = {}
    for name, tree in files:
        keys = ((key, NATIVE.fullmatch(key) or FUSED.fullmatch(key)) for key in tree if isinstance(key, str))
        for key, named in keys:
            if named is None or name.layer is None:
                continue
            prefix = named.groupdict().get("prefix") or named["name"].rpartition(".")[0]
            if int(named["number"]) != name.expert or layers.setdefault(prefix, name.layer) != name.layer:
                yield Problem(Code.STRAY_FILE, f"{name.path.name} holds {key}, another expert's; one is a copy")
                break


def missing_files(names: Iterable[StateName], experts: ExpertLayout) -> Iterator[str]:
    """Names of experts' files that are not here."""
    here = {(name.layer, name.expert) for name in names}
    for layer, count in enumerate(experts.stated):
        for expert in range(count):
            if (layer, expert) not in here and (None, expert) not in here:
                yield f"layer_{layer}_expert_{expert}_mp_rank_00_model_states.pt"


def missing_optimizers(names: Iterable[StateName], optimizer: Any) -> Iterator[str]:
    """Names of experts' optimizer states that are not here; the groups of the largest size say how many there are."""
    here = {name.expert for name in names if name.expert is not None}
    groups = optimizer.get("param_groups") if isinstance(optimizer, dict) else None
    sizes = (
        EP_SIZE.fullmatch(str(g.get("name"))) for g in groups or () if isinstance(g, dict) and g.get("moe") is True
    )
    stated = max((int(size[1]) for size in sizes if size), default=0)
    for expert in range(min(max([stated, *(n + 1 for n in here)]), MAX_EXPERTS)):
        if expert not in here:
            yield f"expp_rank_{expert}_mp_rank_00_optim_states.pt"
