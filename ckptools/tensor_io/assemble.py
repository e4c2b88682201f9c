"""Regions of a tensor put together in memory, with the dtype that the output wants."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ckptools.dtypes import NAN_BITS
from ckptools.model.regions import Box
from ckptools.model.tensor import Seen, Tensor

if TYPE_CHECKING:
    from ckptools.files.opening import OpenFiles


def assemble(tensor: Tensor, box: Box, dtype: str, files: OpenFiles, seen: Seen | None = None) -> memoryview:
    """Return the bytes of a region, row-major, converted to `dtype`.

    Conversion is torch's own, so that rounding is what a training script would get (to nearest even). `seen` is called
    with all that is read on the way.
    """
    import numpy as np

    from ckptools.tensor_io.numbers import raw_dtype
    from ckptools.tensor_io.read import fill

    raw = np.zeros(box.sizes, raw_dtype(tensor.dtype))
    if tensor.fill == "nan":
        raw.fill(NAN_BITS[tensor.dtype])
    fill(raw, box, tensor.shards, files, seen)
    as_bytes = raw.reshape(-1).view("u1") if raw.size else np.empty(0, "u1")
    if dtype == tensor.dtype:
        return as_bytes.data
    import torch

    typed = torch.from_numpy(as_bytes).view(getattr(torch, tensor.dtype))
    converted = typed.to(getattr(torch, dtype)).view(torch.uint8).numpy()
    data: memoryview = converted.data
    return data
