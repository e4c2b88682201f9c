"""OLMo's local checkpoints: FSDP1's flat parameters in a rank's `model` and `optim` file.

The model is `{"modules": [{"name", "handles": [{"flat_param.data", "flat_param._fqns", …}]}]}`: for each FSDP unit the
rank's piece of its flat parameter, with torch's own list of the parameters in it. Since torch 2.1 that is one
`_ShardParamInfo(in_shard, offset_in_shard, numel_in_shard, intra_param_start_idx, intra_param_end_idx)` per parameter;
before, `_shard_indices` (first and last parameter) and one `_shard_param_offsets` (first and last element) for each of
those, which follow each other in the piece. Last elements are counted in. So every run has its exact place, and shapes
are in the file: nothing is guessed.

The optimizer is a plain `state_dict()`: numbers, whose names are in the groups' `param_names`, and 1-D moments that are
cut as their parameters are.

Source: olmo/checkpoint.py (`LocalShardedCheckpointer`), torch/distributed/fsdp/_flat_param.py.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from math import prod
from typing import Any, NamedTuple

from ckptools.formats.flat_parameters.units import FlatRun, shards_of
from ckptools.model.regions import Ints
from ckptools.model.tensor import Tensor
from ckptools.model.tree import Opaque, describe_for_error
from ckptools.training_state.optimizers import without_wrappers


class ParameterRun(NamedTuple):
    """The run of consecutive elements that a rank holds of one parameter; of none where it holds no part.

    Attributes:
        shape: of the whole parameter.
        start: index of the run's first element in the flattened parameter.
        at: index of that element in the rank's piece of the flat parameter.
    """

    shape: Ints
    start: int
    at: int
    numel: int


def is_flat_model(tree: Any) -> bool:
    """Whether this is the model of a local checkpoint."""
    modules = tree.get("modules") if isinstance(tree, dict) else None
    return isinstance(modules, list) and all(isinstance(m, dict) and "handles" in m for m in modules)


def parameter_runs(tree: Any) -> Iterator[tuple[str, ParameterRun, Tensor]]:
    """The parameters in a rank's model: fqn, the run that the rank holds, and the flat tensor with it.

    Raises:
        ValueError: the file is not what OLMo writes, or contradicts itself.
    """
    for module in tree["modules"]:
        name, handles = module.get("name"), module["handles"]
        if not isinstance(name, str) or not isinstance(handles, list):
            raise ValueError("an FSDP module without a name and handles")
        prefix = without_wrappers(name)
        for handle in handles:
            fields = {k.removeprefix("flat_param."): v for k, v in handle.items()} if isinstance(handle, dict) else {}
            data = fields.get("data")
            if not isinstance(data, Tensor) or len(data.shape) != 1 or not data.shards:
                raise ValueError(f"no flat parameter in module {describe_for_error(prefix)}")
            for fqn, piece in _pieces(fields, data.numel):
                yield f"{prefix}.{fqn}" if prefix else fqn, piece, data


def _pieces(fields: Mapping[str, Any], room: int) -> Iterator[tuple[str, ParameterRun]]:
    fqns, shapes = fields.get("_fqns"), fields.get("_shapes")
    if not isinstance(fqns, (list, tuple)) or not isinstance(shapes, (list, tuple)) or len(fqns) != len(shapes):
        raise ValueError("a flat parameter without names and shapes")
    runs = list(_runs_before_2_1(fields, len(fqns)) if "_shard_indices" in fields else _runs(fields, len(fqns)))
    for fqn, shape, (start, at, numel) in zip(fqns, shapes, runs, strict=True):
        ok = isinstance(shape, tuple) and all(type(n) is int and n >= 0 for n in shape)
        if not isinstance(fqn, str) or not ok or min(start, at, numel) < 0:
            raise ValueError(f"parameter {describe_for_error(fqn)} of shape {describe_for_error(shape)}")
        if at + numel > room or start + numel > prod(shape):
            text = (
                f"parameter {describe_for_error(fqn)} of shape {describe_for_error(shape)} "
                f"has {numel} elements from {start}, at {at} of {room}"
            )
            raise ValueError(text)
        yield without_wrappers(fqn), ParameterRun(tuple(shape), start, at, numel)


def _runs(fields: Mapping[str, Any], count: int) -> Iterator[Ints]:
    """`(start, at, numel)` of each parameter, as torch 2.1 and later state them."""
    infos = fields.get("_shard_param_infos")
    if not isinstance(infos, (list, tuple)) or len(infos) != count:
        raise ValueError("a flat parameter without an account of its shards")
    for info in infos:
        args = info.args if isinstance(info, Opaque) and isinstance(info.args, tuple) else ()
        if len(args) != 5 or (args[0] is True and not all(type(n) is int for n in args[1:])):
            raise ValueError("a flat parameter with an unknown account of its shards")
        in_shard, at, numel, start, last = args
        if in_shard is not True:
            yield 0, 0, 0
            continue
        if last - start + 1 != numel:
            raise ValueError(f"a shard of {numel} elements from {start} to {last}")
        yield start, at, numel


def _runs_before_2_1(fields: Mapping[str, Any], count: int) -> Iterator[Ints]:
    indices, offsets = fields["_shard_indices"], fields.get("_shard_param_offsets")
    if not isinstance(offsets, (list, tuple)) or not all(map(_is_pair, (indices, *offsets))):
        raise ValueError("a flat parameter with an unknown account of its shards")
    first, at = indices[0], 0
    if first < 0 or first + len(offsets) > count:
        raise ValueError(f"shards of parameters {first} to {first + len(offsets)} of {count}")
    for index in range(count):
        start, last = offsets[index - first] if first <= index < first + len(offsets) else (0, -1)
        numel = max(last - start + 1, 0)
        yield start, at if numel else 0, numel
        at += numel


def _is_pair(value: Any) -> bool:
    return isinstance(value, (list, tuple)) and len(value) == 2 and all(type(n) is int for n in value)


def read_model(tree: Any, rank: int, all_ranks: bool) -> dict[str, Tensor]:
    """The parameters of a rank's model: whole shapes, and the rank's runs where all ranks are read.

    Raises:
        ValueError: the file is not what OLMo writes, or contradicts itself.
    """
    found: dict[str, Tensor] = {}
    for fqn, piece, data in parameter_runs(tree):
        if fqn in found:
            raise ValueError(f"parameter {describe_for_error(fqn)} is in two flat parameters")
        found[fqn] = _placed(data, piece, piece.at, rank, all_ranks)
    return found


def _placed(data: Tensor, piece: ParameterRun, at: int, rank: int, all_ranks: bool) -> Tensor:
    shards = []
    if all_ranks and piece.numel:
        source = data.shards[0].source
        if source is None or not source.contiguous:
            raise ValueError("a flat parameter that is not contiguous")
        shards = shards_of(piece.shape, FlatRun(piece.start, piece.numel, source, rank, at))
    return replace(data, shape=piece.shape, shards=tuple(shards), kind="flat_pieces", parameter=False)


def read_optimizer(tree: Any, pieces: Mapping[str, ParameterRun], rank: int, all_ranks: bool) -> dict[str, Any]:
    """A rank's optimizer state by name, its moments placed as their parameters are.

    Raises:
        ValueError: the groups name no parameters, or a moment is not cut as its parameter.
    """
    groups, state = tree["param_groups"], tree["state"]
    names: dict[Any, str] = {}
    named = []
    for group in groups:
        listed = group.get("param_names") if isinstance(group, dict) else None
        ids = group.get("params") if isinstance(group, dict) else None
        if not isinstance(listed, list) or not isinstance(ids, list) or len(listed) != len(ids):
            raise ValueError("a param group without a name for each of its parameters")
        clean = [without_wrappers(name) for name in listed if isinstance(name, str)]
        names |= dict(zip(ids, clean, strict=True))
        named.append({**group, "params": clean, "param_names": clean})
    if set(state) - set(names):
        raise ValueError("a state of a parameter that no group names")
    placed = {names[i]: _state(names[i], slots, pieces, rank, all_ranks) for i, slots in state.items()}
    return {"state": placed, "param_groups": named}


def _state(fqn: str, slots: Any, pieces: Mapping[str, ParameterRun], rank: int, all_ranks: bool) -> Any:
    if not isinstance(slots, dict):
        return slots
    found = {}
    for slot, value in slots.items():
        run = isinstance(value, Tensor) and len(value.shape) == 1
        if run and (fqn not in pieces or pieces[fqn].numel != value.numel):
            raise ValueError(
                f"{describe_for_error(slot)} of {describe_for_error(fqn)} has "
                f"{value.numel} elements, its parameter another number"
            )
        found[slot] = _placed(value, pieces[fqn], 0, rank, all_ranks) if run else value
    return found
