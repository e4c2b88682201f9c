"""Tensors of classes that are not installed, saved as torch saves them: class, attributes, no values."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

import pytest
import torch


class Wrapper(torch.Tensor):
    """A wrapper subclass that holds whatever its attributes are."""

    __torch_function__ = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        view: Any = torch.Tensor._make_wrapper_subclass(cls, args[0].shape, dtype=args[0].dtype)
        view.__dict__.update(args[0].__dict__)  # all that a DTensor makes of it
        return view


def of_class(patch: pytest.MonkeyPatch, dotted: str, shape: Any, dtype: torch.dtype, **attributes: Any) -> torch.Tensor:
    """A tensor of a class by its dotted name, which can be pickled as long as the test runs."""
    module, _, name = dotted.rpartition(".")
    packages = module.split(".")
    for n in range(len(packages)):
        place = ".".join(packages[: n + 1])
        patch.setitem(sys.modules, place, sys.modules.get(place) or ModuleType(place))
    home = sys.modules[module]
    cls: Any = getattr(home, name, None) or type(name, (Wrapper,), {"__module__": module})
    patch.setattr(home, name, cls, raising=False)
    tensor: torch.Tensor = torch.Tensor._make_wrapper_subclass(cls, shape, dtype=dtype)
    tensor.__dict__.update(attributes)
    return tensor


def with_pieces(tensor: Any, shape: tuple[int, ...], *pieces: tuple[tuple[int, ...], ...]) -> Any:
    """The tensor with the attributes of torch's CheckpointableTensor; each piece is `(global, local, sizes)`."""
    tensor.global_shape = shape
    tensor.global_offsets, tensor.local_offsets, tensor.local_sizes = zip(*pieces, strict=True) if pieces else [()] * 3
    return tensor


OPTIM = "torchao.optim.subclass_{}.OptimState{}"


def adam_state(
    patch: pytest.MonkeyPatch,
    shape: tuple[int, ...],
    block: int = 256,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
) -> torch.Tensor:
    """An `OptimState8bit` with random codes, and negative, tiny and large scales."""
    made = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, 256, shape, dtype=torch.uint8, generator=made)
    scale = torch.randn(codes.numel() // block, generator=made) * 10.0 ** torch.randint(-20, 20, (1,), generator=made)
    qmap = torch.linspace(-1, 1, 256)
    return of_class(patch, OPTIM.format("8bit", "8bit"), shape, dtype, codes=codes, scale=scale, qmap=qmap, signed=True)
