"""Problems that a checkpoint's structure shows in any format: gaps, overlaps, optimizers, steps, classes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from ckptools.dtypes import is_floating
from ckptools.formats.shared.merge import empty_like
from ckptools.model.checkpoint import Checkpoint
from ckptools.model.problems import Code, Problem, worst_first
from ckptools.model.shards import shard_ranks
from ckptools.model.tensor import Tensor, cover_problem
from ckptools.model.tree import KeyPath, fqn_of, tensors_in
from ckptools.pickles.foreign_names import unsafe_names
from ckptools.tensor_io.copies import check_copies
from ckptools.text import few
from ckptools.training_state.judgement import copy_problems, is_placed, optimizer_problems, step_problems
from ckptools.training_state.optimizers import optimizers_of
from ckptools.training_state.quantized_weights import quantization_problems, with_quantized
from ckptools.training_state.sections import sections_of, sections_of_kind, tensors_of
from ckptools.training_state.stated_model import model_problems

OF_TENSORS = (Code.TENSOR_GAP, Code.TENSOR_OVERLAP, Code.TENSOR_NOT_JOINED, Code.LAYOUT_DISAGREES, Code.COPIES_DIFFER)
"""Kinds of problems that already report a tensor."""


def with_structure_problems(ck: Checkpoint) -> Checkpoint:
    """Add the problems that the structure shows; those of tensors once every rank was read."""
    ck = with_quantized(with_placeholders(ck))
    found = [*ck.problems, *quantization_problems(ck)]
    found += _tensor_problems(ck, {p.tensor for p in found if p.kind in OF_TENSORS}) if ck.structure_read else []
    found += check_copies(tensors_in(ck.tree)) if ck.structure_read else []
    found += _unjoined(ck, [p.message for p in found if p.kind is Code.TENSOR_NOT_JOINED])
    found += copy_problems(ck)
    found += optimizer_problems(ck)
    found += step_problems(ck)
    found += model_problems(ck)
    found += unsafe_names(ck.names, ck.tree)
    seen = set(ck.problems)
    new = dict.fromkeys(p for p in found[len(ck.problems) :] if p not in seen)
    made = replace(ck, problems=worst_first(_without_proven_copies([*ck.problems, *new])))
    made.worked_out.update(ck.worked_out)
    made.worked_out.pop("verdict", None)
    return made


def _tensor_problems(ck: Checkpoint, known: set[str | None]) -> Iterator[Problem]:
    """Incomplete tensors: a line for each section and kind, as there may be thousands.

    A gap in a lost file follows from that loss, which has its own problem.
    """
    causes = [p for p in ck.problems if p.severity == "error" and p.kind.lacks in ("file", "part")]
    lost = {None, *(p.rank for p in causes)} if causes else set()
    if None in lost:
        lost |= {rank for _, t in tensors_in(ck.tree) for rank in shard_ranks(t.shards)} - set(ck.ranks)
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


def _without_proven_copies(problems: Sequence[Problem]) -> Iterator[Problem]:
    """Drop warnings that a file may be a copy where an error says whose file it is."""
    errors = [p for p in problems if p.kind is Code.STRAY_FILE and p.severity == "error"]
    ranks, names = {p.rank for p in errors} - {None}, {name for p in errors for name in p.files}
    for problem in problems:
        doubt = problem.kind is Code.STRAY_FILE and problem.severity == "warning" and problem.files
        if not (doubt and (problem.rank in ranks or not names.isdisjoint(problem.files))):
            yield problem


def _unjoined(ck: Checkpoint, messages: Iterable[str]) -> Iterator[Problem]:
    """One warning for each reason why tensors cannot be put together."""
    reasons: dict[str, list[str]] = {}
    for path, tensor in tensors_of(sections_of(ck)):
        if tensor.note in ("", PLACEHOLDER) or tensor.kind == "meta":
            continue
        if not any(tensor.note in text for text in messages):
            reasons.setdefault(tensor.note, []).append(fqn_of(path))
    for why, names in reasons.items():
        yield Problem(Code.TENSOR_NOT_JOINED, f"{few(names, 1)}: {why}")


# -- placeholders that DeepSpeed's ZeRO-3 leaves in a module: parameters without elements, in place of those that it cut
# Under ZeRO-3 `model.state_dict()` has the shape [0] for every parameter that is spread over the ranks, unless the
# parameters were gathered first. Small parameters (`stage3_param_persistence_threshold`) and buffers are whole on every
# rank. Who saves the state dict of one rank (torch.save, `save_pretrained`, PEFT) so saves names without values.
#
# A parameter may have no elements by design, so the pattern must prove placeholders: most tensors of the model are
# empty; or the weight of a module is, and its bias is not; or weights are, and no matrix is left; or an optimizer has
# moments for an empty parameter. Source: deepspeed/runtime/zero/partition_parameters.py (`free_param`,
# `_convert_to_deepspeed_param`); checked on files of DeepSpeed 0.19.8 and PEFT 0.21.

EMPTY = (0,)
PLACEHOLDER = "a ZeRO-3 placeholder without elements"
"""The note of such a tensor."""

WHERE = "whose values are in the ranks' *_optim_states.pt and *_model_states.pt"


def with_placeholders(ck: Checkpoint) -> Checkpoint:
    """The checkpoint with a note on each placeholder, and a problem for each model that has some."""
    problems, noted = list[Problem](), dict[KeyPath, Tensor]()
    for section in sections_of_kind(ck, "model"):
        tensors = {
            name: value
            for name, value in section.value.items()
            if isinstance(value, Tensor) and value.kind != "meta" and not value.note and is_floating(value.dtype)
        }
        empty = [name for name, tensor in tensors.items() if tensor.shape == EMPTY]
        if empty and _are_placeholders(ck, tensors, empty):
            noted |= {(*section.path, name): replace(tensors[name], note=PLACEHOLDER) for name in empty}
            text = f"{len(empty)} of {len(tensors)} tensors are [0]: ZeRO-3 placeholders, {WHERE}"
            problems.append(Problem(Code.PLACEHOLDERS, text, None, fqn_of(section.path) or None))
    if not noted:
        return ck
    return replace(ck, tree=_with_leaves(ck.tree, noted), problems=worst_first([*ck.problems, *problems]))


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
    """Whether a module has a bias with elements, and nothing beside it that may hold the weight in another form."""
    module = weight.removesuffix("weight")
    bias = tensors.get(f"{module}bias")
    return bias is not None and bias.numel > 0 and sum(name.startswith(module) for name in tensors) == 2


def _with_leaves(node: Any, leaves: Mapping[KeyPath, Any]) -> Any:
    """Copy a tree with other values at some key paths; what lies elsewhere is shared, not copied."""
    if () in leaves:
        return leaves[()]
    below: dict[Any, dict[KeyPath, Any]] = {}
    for (first, *rest), value in leaves.items():
        below.setdefault(first, {})[tuple(rest)] = value
    if isinstance(node, dict):
        made = empty_like(node)
        made.update((k, _with_leaves(v, below[k]) if k in below else v) for k, v in node.items())
        return made
    return type(node)(_with_leaves(v, below[i]) if i in below else v for i, v in enumerate(node))
