"""Pieces of flattened parameters: FSDP1's local state, and its optimizer state under `use_orig_params`.

FSDP1 flattens the parameters of a unit and cuts the result over the ranks, so that a rank holds a run of consecutive
elements of some parameters and nothing of others. In a plain `optimizer.state_dict()` such runs are 1-D tensors
without their place. They can be placed when the parameter's shape is known (from a DTensor model saved beside it, as
verl does): in rank order they follow each other and together have as many elements as the parameter. Where the shape is
unknown, or equal lengths may be pieces or replicas, they stay unplaced: nothing is joined by guessing. Source:
torch/distributed/fsdp/_flat_param.py; checked on verl 0.9.1 files.
A local state dict holds the model itself so; see `parameters.py`.
"""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping, Sequence
from dataclasses import replace
from math import prod
from typing import TYPE_CHECKING, Any

from ckptools.formats.flat_parameters.flat_runs import FlatRun, is_ragged, shards_of, storage_of
from ckptools.model.checkpoint import GivenNames
from ckptools.model.regions import Ints
from ckptools.model.shard import Shard
from ckptools.model.tensor import Tensor
from ckptools.model.tree import KeyPath
from ckptools.tensor_io.copied_files import is_constant
from ckptools.training_state.optimizer_names import group_ids
from ckptools.training_state.optimizers import name_with
from ckptools.training_state.parameter_names import AS_SAVED, believed, is_flat_parameter
from ckptools.training_state.sections import find_sections, is_flat_optimizer

if TYPE_CHECKING:
    from ckptools.formats.shared.given import Shapes

LOCAL = "FSDP1 local state: a piece of a flattened parameter"
NO_SHAPES = (
    f"{LOCAL}, and the file holds no shapes to place it by; give them with --shapes (another checkpoint, or a JSON of "
    "name to shape in module order), or save with SHARDED_STATE_DICT"
)
UNPLACED = "a 1-D piece in a sharded checkpoint whose parameter's shape is not known, so it may be a replica or a part"
ADVICE = "consolidate the model with --only model"


def resolve_flat_shards(
    tree: Any,
    all_ranks: bool,
    shapes: Shapes | None = None,
    by_name: Shapes | None = None,
    given: GivenNames | None = None,
) -> tuple[bool, dict[KeyPath, str], set[str]]:
    """Place the flat shards of a merged tree that can be placed, and note the others; changes the tree's dicts.

    Without all ranks a piece's place is not known yet; its tensor then has the parameter's shape and no shards. Shapes
    are given from outside, or come from an optimizer state elsewhere (`by_name`); given names are for numbers.

    Returns:
        Whether the model was saved as flat parameters; notes for the user, by the key path of an optimizer; and the
        parameters that stand in the place of a number, by the model's order.

    Raises:
        RefusedError: the names that were given do not fit.
    """
    sections = find_sections(tree)
    models = [s.value for s in sections if s.kind == "model"]
    optimizers = {s.path: s.value for s in sections if s.kind == "optimizer"}
    local = [m for m in models if any(map(is_flat_parameter, m))]
    if len(local) == 1 and _take_apart(local[0], list(optimizers.values()), shapes, by_name, all_ranks, given):
        return True, {}, set()
    for model in local:
        _mark_local(model, NO_SHAPES)
    notes, assumed = dict[KeyPath, str](), set[str]()
    model = models[0] if len(models) == 1 else None
    for path, optimizer in optimizers.items():
        note = _resolve_optimizer(optimizer, model, all_ranks, given)
        if note:
            notes[path] = note
            assumed |= {name for names in group_ids(optimizer) for name in names}
    return bool(local), notes, assumed


def _take_apart(
    model: MutableMapping[str, Any],
    optimizers: Sequence[MutableMapping[str, Any]],
    shapes: Shapes | None,
    by_name: Shapes | None,
    all_ranks: bool,
    given: GivenNames | None,
) -> bool:
    """Take a local state dict apart; if that is not possible, mark it with the reason, when shapes were given."""
    # Most rank files have no flat parameters, and need none of this.
    from ckptools.formats.flat_parameters import parameters
    from ckptools.formats.flat_parameters import units as flat_units

    found = [named for o in optimizers if (named := parameters.shapes_by_name(o)) is not None]
    try:
        units = flat_units.infer_flat_layout(model, shapes, found[0] if len(found) == 1 else by_name)
    except flat_units.UnknownLayoutError as error:
        if shapes is not None:
            _mark_local(model, f"{LOCAL}; {error}{'' if all_ranks else ' (known from one rank only; try --all-ranks)'}")
        return False
    parameters.take_apart(model, units, NO_SHAPES, shapes.shapes if shapes and shapes.ordered else ())
    for optimizer in optimizers:
        parameters.resolve_optimizer(optimizer, model, units, given)
    return True


def _mark_local(model: MutableMapping[str, Any], note: str) -> None:
    tensors = {k: t for k, t in model.items() if isinstance(t, Tensor)}
    flat = {k for k in tensors if is_flat_parameter(k)}
    storages = {storage_of(s) for k in flat for s in tensors[k].found}
    for key, tensor in tensors.items():
        views = any(storage_of(s) in storages for s in tensor.found)
        run = tensor.kind == "plain" and len(tensor.shape) == 1 and (views or is_ragged(tensor))
        if not tensor.note and (key in flat or run):
            model[key] = replace(tensor, kind="flat_pieces", note=note)


def _resolve_optimizer(
    optimizer: Any, model: Mapping[str, Any] | None, all_ranks: bool, given: GivenNames | None
) -> str | None:
    """Place the pieces of one optimizer, or mark them; return a note for the user."""
    if is_flat_optimizer(optimizer):
        return None
    naming = name_with(optimizer, model, believed(AS_SAVED, model or {}), given)
    sharded = model is None or any(isinstance(t, Tensor) and t.sharded for t in model.values())
    if model is not None and sharded and naming.by != "fqn":
        from ckptools.formats.flat_parameters import unit_optimizer

        note, resolved = unit_optimizer.resolve_units(optimizer, model, all_ranks)
        if resolved:
            return note
    unplaced: list[tuple[MutableMapping[Any, Any], Any, Tensor]] = []
    for key, entry in optimizer["state"].items():
        parameter = model.get(naming.names[key]) if model is not None and key in naming.names else None
        shape = parameter.shape if isinstance(parameter, Tensor) and not parameter.note else None
        for slot, tensor in entry.items() if isinstance(entry, MutableMapping) else ():
            if isinstance(tensor, Tensor) and tensor.kind == "plain" and tensor.shape and not tensor.note:
                placed = _placed(tensor, shape, sharded, all_ranks)
                entry[slot] = placed or tensor
                unplaced += [] if placed else [(entry, slot, tensor)]
    if unplaced and not (all_ranks and _is_copied_whole(optimizer["state"])):
        why = UNPLACED if model is None else f"{UNPLACED}; {ADVICE}"
        for entry, slot, tensor in unplaced:
            if not (all_ranks and _are_copies(tensor) and _varies(tensor)):
                entry[slot] = replace(tensor, kind="flat_pieces", note=why)
    return None


def _placed(tensor: Tensor, shape: Ints | None, sharded: bool, all_ranks: bool) -> Tensor | None:
    """A tensor with its pieces in their places; itself where it is whole, None where nothing tells."""
    if not is_ragged(tensor) and (tensor.shape == shape or not sharded or len(tensor.shape) != 1):
        return tensor
    if shape is not None and not all_ranks and tensor.numel <= prod(shape):
        return replace(tensor, shape=shape, shards=(), kind="flat_pieces")
    pieces = _pieces(tensor.shards, shape) if shape is not None else None
    if pieces is None or shape is None:
        return None
    return replace(tensor, shape=shape, shards=tuple(pieces), kind="flat_pieces")


# Moments whose checksums are equal on all ranks are replicas, not pieces. A data-parallel part beside sharded tables is
# one: torchrec shards tables and leaves the rest to DDP. So is a full optimizer state, which FSDP1 lets every rank save
# (`full_optim_state_dict(rank0_only=False)`); its moments are views of one storage for each unit.


def _is_copied_whole(state: Mapping[Any, Any]) -> bool:
    """Whether each rank saved the same optimizer state: every moment is a copy, and one is neither zeros nor ones.

    Pieces of parameters that are nothing else would be equal too; then nothing tells.
    """
    entries = (entry for entry in state.values() if isinstance(entry, Mapping))
    tensors = [t for entry in entries for t in entry.values() if isinstance(t, Tensor) and t.shape]
    return all(map(_are_copies, tensors)) and any(t.kind == "plain" and _varies(t) for t in tensors)


def _are_copies(tensor: Tensor) -> bool:
    """Whether ranks have a tensor at the same place of records with one name, size and checksum."""
    sources = [source for shard in tensor.found for source in shard.sources]
    stated = {(s.record, s.offset - s.record_span[0], s.strides, s.crc, s.record_span[1]) for s in sources}
    return len(stated) == 1 and len(sources) > 1 and bool(sources[0].crc)


def _varies(tensor: Tensor) -> bool:
    """Whether a tensor that ranks have copies of is not all zeros or all ones."""
    source = tensor.found[0].sources[0]
    return tensor.numel > 1 and not is_constant(source.dtype, source.crc, source.record_span[1])


def _pieces(shards: Sequence[Shard], shape: Ints) -> list[Shard] | None:
    """Lay the ranks' runs end to end, starting over where the parameter is complete (replica groups)."""
    total = prod(shape)
    start, placed = 0, []
    for shard in sorted(shards, key=lambda s: -1 if s.rank is None else s.rank):
        source, length = shard.source, shard.box.numel
        if source is None or not source.contiguous or len(source.shape) != 1 or start + length > total:
            return None
        placed += shards_of(shape, FlatRun(start, length, source, shard.rank))
        start = (start + length) % total if total else 0
    return placed if start == 0 else None
