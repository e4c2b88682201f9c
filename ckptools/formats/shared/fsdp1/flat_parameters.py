"""FSDP1 flat parameters (LOCAL_STATE_DICT), taken apart into the parameters that they are made of.

FSDP1 joins the parameters of a wrapped unit into one 1-D tensor and cuts that over the ranks. LOCAL_STATE_DICT saves it
so: `<path of the unit>._flat_param`, a 1-D ShardedTensor (`flat_param` in torch 1.13), and no word about what is in it.

- In it are the unit's parameters in module order, those of nested units left out, a parameter that is shared within
  the unit once. `use_orig_params=False`: one behind the other.
- `use_orig_params=True`: each begins at 16 bytes of the dtype that the forward pass uses, so that a float32 parameter
  under bfloat16 mixed precision begins at a multiple of 8 elements; the end is padded to a multiple of the ranks
  (torch 2.1 on; 2.0 pads nothing). Beside it the file holds every parameter under its own name, as the 1-D run of it
  that this rank has, empty where it has none; tied names hold the same run.
- Optimizer state by number: `use_orig_params=False` numbers the flat parameters, and the moments have every rank's
  padding; `use_orig_params=True` numbers the parameters, and ranks without elements have no entry. Saved by name
  (`FSDP.optim_state_dict`) it has full shapes, and the parameters of a unit in the order in which they were flattened.

Where parameters lie follows from their shapes and their order, and is accepted only when it explains every flat
parameter to the last element, and every run where it was found. Source: torch/distributed/fsdp/_flat_param.py
(`_init_flat_param_and_metadata`, `_get_aligned_numel`), _state_dict_utils.py (`_local_post_state_dict_hook`),
_optim_utils.py; checked on files of torch 2.0.1 (Composer 0.14.1), 2.6.0 and 2.13.0.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import replace
from typing import Any

from ckptools.formats.shared.flat_runs import FlatRun, joined
from ckptools.formats.shared.fsdp1.flat_layout import Member, overlap, run_of
from ckptools.formats.shared.fsdp1.units import Unit
from ckptools.model.tensor import Tensor
from ckptools.training_state.wrappers import without_wrappers


def runs_of_member(member: Member, runs: Iterable[FlatRun]) -> Iterator[FlatRun]:
    """The parts of the flat parameter's runs that lie in a member, counted from the member's first element."""
    for run in runs:
        low, high = overlap(member, run)
        if low < high:
            part = run.within(low, high)
            yield part._replace(start=low - member.start)


def runs_of(unit: Unit) -> list[FlatRun]:
    """The runs of a flat parameter that the ranks hold."""
    return [run_of(s) for s in unit.flat.shards]


def take_apart(model: MutableMapping[str, Any], units: Sequence[Unit], note: str, order: Iterable[str]) -> None:
    """Replace the flat parameters of a model by the parameters in them.

    Args:
        model: changed in place.
        units: as explained.
        note: for runs whose shape nothing tells.
        order: names of parameters in module order, as far as that is known.
    """
    made: dict[str, Any] = {}
    by_key = {u.key: u for u in units}
    named = {k: v for u in units if u.original for k, v in _parameters(u, model, note)}
    for key, value in model.items():
        if key in by_key:
            made |= {} if by_key[key].original else dict(_parameters(by_key[key], model, note))
        else:
            made[key] = named.get(key, value)
    places = {name: i for i, name in enumerate(order)}
    last = -1
    at: dict[str, int] = {}
    for key in made:
        at[key] = last = places.get(without_wrappers(key), last)
    model.clear()
    model.update((key, made[key]) for key in sorted(made, key=at.__getitem__))


def _parameters(unit: Unit, model: Mapping[str, Any], note: str) -> Iterator[tuple[str, Tensor]]:
    found: dict[str, Tensor] = {}
    runs = runs_of(unit)
    for member in unit.members:
        if member.shape is None:
            found[member.key] = replace(model[member.key], kind="flat_pieces", note=note)
        else:
            shards = joined(member.shape, runs_of_member(member, runs))
            found[member.key] = replace(unit.flat, shape=member.shape, shards=shards, kind="flat_pieces")
    yield from found.items()
    yield from ((name, found[first]) for name, first in unit.tied.items())
