"""Rules on tensors: gaps, overlaps, shards that cannot be joined, copies that differ, placeholders."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

from ckptools.dtypes import ITEMSIZE, is_floating
from ckptools.model.checkpoint import Checkpoint
from ckptools.model.cover import cover_problem
from ckptools.model.problems import Code, Problem, worst_first
from ckptools.model.rank_vote import vote
from ckptools.model.records import grouped
from ckptools.model.regions import Box
from ckptools.model.shards import Shard
from ckptools.model.tensor import Tensor
from ckptools.model.tree import tensors_in, with_leaves
from ckptools.rules.verdict import is_placed
from ckptools.text import KeyPath, few, fqn_of
from ckptools.training_state.optimizers import optimizers_of
from ckptools.training_state.rank_values import Shared
from ckptools.training_state.sections import sections_of, sections_of_kind, tensors_of

OF_TENSORS = (Code.TENSOR_GAP, Code.TENSOR_OVERLAP, Code.TENSOR_NOT_JOINED, Code.LAYOUT_DISAGREES, Code.COPIES_DIFFER)
"""Kinds of problems after which a tensor is not reported again."""


def cover_problems(ck: Checkpoint) -> Iterator[Problem]:
    """Find tensors with gaps or overlaps: one problem for each section and kind, as there may be thousands.

    A gap in a lost file follows from that loss, which has its own problem.
    """
    known = {p.tensor for p in ck.problems if p.kind in OF_TENSORS}
    causes = [p for p in ck.problems if p.severity == "error" and p.kind.lacks in ("file", "part")]
    lost = {None, *(p.rank for p in causes)} if causes else set()
    if None in lost:
        lost |= {rank for _, t in tensors_in(ck.tree) for rank in t.every_shard.ranks} - set(ck.ranks)
    for section in sections_of(ck):
        groups: dict[Code, list[Problem]] = {}
        for path, tensor in tensors_of([section]):
            fqn = fqn_of(path)
            if fqn in known or tensor.note or tensor.kind == "meta" or not is_placed(ck, tensor):
                continue
            problem = cover_problem(tensor, fqn)
            if problem is not None and not (problem.kind is Code.TENSOR_GAP and problem.rank in lost):
                groups.setdefault(problem.kind, []).append(problem)
        for first, *others in groups.values():
            more = f"; and {len(others)} more tensors of {section.name or 'it'}" if others else ""
            yield replace(first, message=f"{first.message}{more}")


def unjoined_problems(ck: Checkpoint) -> Iterator[Problem]:
    """Yield one warning for each reason why tensors cannot be put together."""
    messages = [p.message for p in ck.problems if p.kind is Code.TENSOR_NOT_JOINED]
    reasons: dict[str, list[str]] = {}
    for path, tensor in tensors_of(sections_of(ck)):
        if tensor.note in ("", PLACEHOLDER) or tensor.kind == "meta":
            continue
        if not any(tensor.note in text for text in messages):
            reasons.setdefault(tensor.note, []).append(fqn_of(path))
    for why, names in reasons.items():
        yield Problem(Code.TENSOR_NOT_JOINED, f"{few(names, 1)}: {why}")


# -- copies of a tensor, by the checksums that files state of their own entries ----------------------------------------


def copy_problems(ck: Checkpoint) -> Iterator[Problem]:
    """Find tensors that ranks should share but whose copies have different CRC-32s in their files."""
    if any(p.kind is Code.ONE_OF_SEVERAL for p in ck.problems):
        return  # there, slices of tensors look like copies that differ
    shared = Shared(sections_of(ck))
    for section in sections_of(ck):
        found = [p for path, tensor in tensors_of([section]) if shared.holds(path) for p in _of_tensor(path, tensor)]
        for odd in dict.fromkeys(p.ranks for p in found):
            first, *others = (p for p in found if p.ranks == odd)
            more = f"; and {len(others)} more regions or tensors of {section.name or 'it'}" if others else ""
            yield replace(first, message=f"{first.message}{more}")


def _of_tensor(path: KeyPath, tensor: Tensor) -> Iterator[Problem]:
    if not tensor.note and tensor.has_copies and not tensor.extents.states_one_crc:
        by_box = grouped(tensor.found, lambda shard: shard.box)
        yield from (p for box, shards in by_box.items() for p in _differing(fqn_of(path), box, shards))


def _differing(fqn: str, box: Box, shards: Sequence[Shard]) -> Iterator[Problem]:
    stated = [(shard.rank, crc) for shard in shards if shard.rank is not None and (crc := _stated(shard))]
    found = vote(stated, lambda a, b: a == b)
    if not found.agree:
        text = f"{box.label}copies differ by the CRC-32 that their files state ({found.by_rank(_in_hex)})"
        rank, own = found.odd[0] if found.odd else None, found.differing("stated CRC-32", _in_hex, plain=False)
        yield Problem(Code.COPIES_DIFFER, text, rank, fqn, ranks=found.odd, differing=own)


def _in_hex(crc: int) -> str:
    return f"{crc:08x}"


def _stated(shard: Shard) -> int:
    """The CRC-32 of a shard that fills its whole zip entry; 0 if it does not, or states none."""
    source = shard.source
    if source is None or shard.encoded is not None or not source.contiguous:
        return 0
    return source.crc if source.record_span[1] == shard.box.numel * ITEMSIZE[source.dtype] else 0


# -- placeholders that DeepSpeed's ZeRO-3 leaves in a module: parameters without elements, in place of the sharded ones
# --
# Under ZeRO-3 `model.state_dict()` has the shape [0] for every parameter that is spread over the ranks, unless the
# parameters were gathered first. Small parameters (`stage3_param_persistence_threshold`) and buffers are whole on every
# rank. Saving the state dict of one rank (torch.save, `save_pretrained`, PEFT) therefore saves names without values.
#
# A parameter may have no elements by design, so the pattern must prove placeholders: most tensors of the model are
# empty; or the weight of a module is, and its bias is not; or weights are, and no matrix is left; or an optimizer has
# moments for an empty parameter. Source: deepspeed/runtime/zero/partition_parameters.py (`free_param`,
# `_convert_to_deepspeed_param`); checked on files of DeepSpeed 0.19.8 and PEFT 0.21.

EMPTY = (0,)
PLACEHOLDER = "a ZeRO-3 placeholder without elements"
"""The note of a placeholder tensor."""

WHERE = "whose values are in the ranks' *_optim_states.pt and *_model_states.pt"


def with_placeholders(ck: Checkpoint) -> Checkpoint:
    """Add a note to each placeholder, and a problem to each model that has placeholders."""
    problems, noted = list[Problem](), dict[KeyPath, Tensor]()
    for section in sections_of_kind(ck, "model"):
        tensors = {
            name: value
            for name, value in section.value.items()
            if isinstance(value, Tensor) and value.kind != "meta" and not value.note and is_floating(value.dtype)
        }
        empty = [name for name, tensor in tensors.items() if tensor.shape == EMPTY]
        if empty and _are_placeholders(ck, tensors, empty):
            noted |= {section.place_of((name,)): replace(tensors[name], note=PLACEHOLDER) for name in empty}
            text = f"{len(empty)} of {len(tensors)} tensors are [0]: ZeRO-3 placeholders, {WHERE}"
            problems.append(Problem(Code.PLACEHOLDERS, text, None, fqn_of(section.path) or None))
    if not noted:
        return ck
    return replace(ck, tree=with_leaves(ck.tree, noted), problems=worst_first([*ck.problems, *problems]))


def _are_placeholders(ck: Checkpoint, tensors: Mapping[str, Tensor], empty: Iterable[str]) -> bool:
    empty = list(empty)
    if len(empty) > 1 and 2 * len(empty) >= len(tensors):
        return True
    weights = [name for name in empty if name.rpartition(".")[2] == "weight"]
    if len(weights) > 1 and not any(len(tensor.shape) > 1 for tensor in tensors.values()):
        return True
    if any(_has_a_bias(tensors, name) for name in weights):
        return True
    states = [o.state.get(name) for o in optimizers_of(ck).values() for name in empty]
    slots = [value for state in states if isinstance(state, Mapping) for value in state.values()]
    return any(isinstance(value, Tensor) and value.shape and value.numel for value in slots)


def _has_a_bias(tensors: Mapping[str, Tensor], weight: str) -> bool:
    """Whether a module has a bias with elements, and no other tensor that may be the weight in another form."""
    module = weight.removesuffix("weight")
    bias = tensors.get(f"{module}bias")
    return bias is not None and bias.numel > 0 and sum(name.startswith(module) for name in tensors) == 2
