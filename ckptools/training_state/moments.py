"""The moments in an optimizer's state of one parameter: the tensors that are laid out as the parameter is."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ckptools.model.tensor import Tensor

FACTORS = {("row_var", "col_var"): 1, ("exp_avg_sq_row", "exp_avg_sq_col"): 0}
"""Slots of a factored second moment: means over the last and over the last but one dimension, kept as 1 or left out.

Source: torch/optim/_adafactor.py, `_init_group`; transformers/optimization.py, `Adafactor.step`.
"""

QUANT_STATE = "__bnb_optimizer_quant_state__"
"""Slot in which bitsandbytes 0.48 on packs its tensors, so that FSDP leaves them alone."""

OF_BITSANDBYTES = ("state1", "state2")
"""Its moments, in 8 or 32 bits; beside them are scales of blocks, tables and norms.

Source: bitsandbytes/optim/optimizer.py, `Optimizer8bit.state_dict`, `Optimizer2State.init_state`.
"""


def moments_of(entry: Any) -> list[Tensor]:
    """The moments as they are stored."""
    return list(_by_slot(entry).values())


def in_full(entry: Any) -> list[Tensor]:
    """The moments, with one of the shape that they stand for in place of two factors."""
    slots = _by_slot(entry)
    for names, cut in FACTORS.items():
        row, column = (slots.get(name) for name in names)
        if row is None or column is None or not (row.shape and column.shape):
            continue
        above = row.shape[: len(row.shape) - cut]
        if row.shape == (*above, *(1,) * cut) and column.shape == (*above[:-1], *(1,) * cut, column.shape[-1]):
            slots = {k: v for k, v in slots.items() if k not in names}
            slots[names[0]] = Tensor((*above, column.shape[-1]), row.dtype, ())
    return list(slots.values())


def _by_slot(entry: Any) -> dict[Any, Tensor]:
    """The tensors without the step counter; of bitsandbytes' only the moments."""
    slots = entry if isinstance(entry, Mapping) else {}
    packed = slots.get(QUANT_STATE)
    slots = packed if isinstance(packed, Mapping) else slots
    own = {slot: slots[slot] for slot in OF_BITSANDBYTES if slot in slots}
    return {slot: value for slot, value in (own or slots).items() if isinstance(value, Tensor) and slot != "step"}
