"""Tensors of Transformer Engine, pickled as its `__reduce_ex__` does: it cannot be installed without a GPU."""

from __future__ import annotations

import sys
from types import ModuleType

import pytest
import torch
from safetensors.torch import load_file

import ckptools
from ckptools.errors import NotWholeError, ReadError
from tests.other_classes import Wrapper

HOME = "transformer_engine.pytorch.tensor"
CODES = torch.arange(-96, 96, dtype=torch.float32).view(6, 32).to(torch.float8_e4m3fn)
SCALE = torch.tensor([0.0137])


class Reduced(Wrapper):
    """A tensor that pickles as a call."""

    call: tuple = ()

    def __reduce_ex__(self, protocol):
        return self.call


def module(patch, name):
    """A module that pickle finds by its dotted name."""
    for n in range(1, name.count(".") + 2):
        place = ".".join(name.split(".")[:n])
        patch.setitem(sys.modules, place, sys.modules.get(place) or ModuleType(place))
    return sys.modules[name]


def dtype_number(patch, number, as_state):
    """`DType`: with the number as an argument, or, before pybind_helper.h said so, as its state."""
    home = module(patch, "transformer_engine_torch")
    made = type("DType", (), {"__module__": home.__name__, "__setstate__": lambda self, state: None})
    patch.setattr(home, "DType", made, raising=False)
    made.__reduce_ex__ = lambda self, _: (made, (), number) if as_state else (made, (number,))
    return made()


def _make_in_reduce_ex(cls, *_):
    """The class method that pickle looks for by its name."""


def tensor_of(patch, file, name, shape, dtype, args, as_method=False):
    home = module(patch, f"{HOME}.{file}")
    cls = type(name, (Reduced,), {"__module__": home.__name__})
    patch.setattr(home, name, cls, raising=False)
    function = f"_make_{file}_in_reduce_ex"
    cls._make_in_reduce_ex = classmethod(_make_in_reduce_ex)
    made = lambda *_: None  # noqa: E731
    made.__module__, made.__qualname__ = home.__name__, function
    patch.setattr(home, function, made, raising=False)
    tensor = torch.Tensor._make_wrapper_subclass(cls, shape, dtype=dtype)
    tensor.call = (cls._make_in_reduce_ex if as_method else made, args)
    return tensor


def fp8(patch, dtype=torch.bfloat16, number=7, as_method=False, shape=((6, 32),)):
    """A tensor as 2.17 and later pickle it; `as_method`, as versions before, without a shape as those before 2.0."""
    sizes = [None if one is None else torch.Size(one) for one in shape]
    args = (CODES.view(torch.uint8), dtype_number(patch, number, as_method), SCALE, dtype, *sizes)
    return tensor_of(patch, "float8_tensor", "Float8Tensor", (6, 32), dtype, args, as_method)


def saved(tmp_path, tensor):
    torch.save({"l.weight": tensor, "l.bias": torch.ones(6)}, tmp_path / "m.pt")
    return ckptools.open(tmp_path / "m.pt")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("as_method", [True, False])
def test_fp8_has_the_values_that_the_library_computes_on_a_cpu(tmp_path, monkeypatch, dtype, as_method):
    form = {"as_method": True, "number": 6, "shape": ()} if as_method else {"shape": ((6, 32), None)}
    ck = saved(tmp_path, fp8(monkeypatch, dtype, **form))
    ck.consolidate(tmp_path / "out.safetensors", dequantize=True)
    found, expected = load_file(tmp_path / "out.safetensors")["l.weight"], (CODES.float() * SCALE).to(dtype)
    assert found.dtype == dtype and torch.equal(found, expected)


@pytest.mark.parametrize("form", [{}, {"as_method": True}, {"as_method": True, "number": 7, "shape": ()}])
def test_e5m2_is_told_by_its_number(tmp_path, monkeypatch, form):
    found = saved(tmp_path, fp8(monkeypatch, torch.float32, **{"number": 8, **form})).model["l.weight"].dequantize()
    expected = CODES.view(torch.uint8).view(torch.float8_e5m2).float() * SCALE
    assert torch.equal(found.nan_to_num(1), expected.nan_to_num(1))


def test_a_number_that_versions_disagree_about_is_refused(tmp_path, monkeypatch):
    ck = saved(tmp_path, fp8(monkeypatch, number=7, as_method=True))  # 2.0 to 2.3: E5M2, 2.4 to 2.16: E4M3
    with pytest.raises(ReadError, match=r"class transformer_engine.Float8Tensor, which holds data, scale_inv"):
        ck.model["l.weight"].dequantize()


def test_a_weight_in_fp8_is_not_left_out_unasked(tmp_path, monkeypatch):
    ck = saved(tmp_path, fp8(monkeypatch, number=6, as_method=True))
    assert [p.code for p in ck.problems] == ["CK106"]  # nor is the class method one that could run code
    with pytest.raises(NotWholeError, match=r"transformer_engine Float8Tensor \(data, scale_inv\)"):
        ck.consolidate(tmp_path / "out.safetensors")


@pytest.mark.parametrize("number", [0, 9])
def test_a_number_of_another_dtype_is_refused(tmp_path, monkeypatch, number):
    with pytest.raises(ReadError, match=r"class transformer_engine.Float8Tensor, which holds data, scale_inv"):
        saved(tmp_path, fp8(monkeypatch, number=number)).model["l.weight"].dequantize()


def test_a_tensor_with_scales_for_blocks_is_shown_by_its_parts_and_refused(tmp_path, monkeypatch):
    parts = (CODES.view(torch.uint8), torch.full((6, 1), 127, dtype=torch.uint8), None, None)
    args = (*parts, dtype_number(monkeypatch, 7, False), torch.bfloat16, torch.Size((6, 32)), None, False)
    ck = saved(tmp_path, tensor_of(monkeypatch, "mxfp8_tensor", "MXFP8Tensor", (6, 32), torch.bfloat16, args))
    text = "class transformer_engine.MXFP8Tensor, which holds rowwise_data, rowwise_scale_inv"
    assert (ck.model["l.weight"].shape, text in ck.problems[0].message) == ((6, 32), True)


def test_an_identity_is_the_tensor_that_it_holds(tmp_path, monkeypatch):
    args = (torch.arange(12.0).view(3, 4), None, torch.float32, torch.Size((3, 4)))
    ck = saved(tmp_path, tensor_of(monkeypatch, "identity_tensor", "IdentityTensor", (3, 4), torch.float32, args))
    assert ck.model["l.weight"].load().tolist() == args[0].tolist()
