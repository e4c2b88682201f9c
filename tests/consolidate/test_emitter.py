"""The pickle that is written, read back by Python's own: every kind of value, at the edges of each opcode."""

from __future__ import annotations

import pickle
from collections import OrderedDict

import pytest

from ckptools.consolidate.writers.pickle_emitter import Emitter
from ckptools.model.regions import Box
from ckptools.model.tensor import Tensor

INTS = [
    n + d for n in (0, 255, 2**31, -(2**31), 2**63, 2**64, -(2**63), 2**2031, 2**2039, -(2**2039)) for d in (-1, 0, 1)
]


@pytest.mark.parametrize(
    "value",
    [
        *INTS,
        *(0.0, 1.5, float("inf")),
        *("", "a", "é", "x" * 300),
        *(b"", b"ab", None, True, False),
        [],
        [1, [2, "a"], ("a", "a")],
        {"a": 1, 2: {"b": []}},
        OrderedDict({"x": 1, "y": 2}),
        [f"text {n}" for n in range(300)] * 2,
        {1, 2},
    ],
    ids=lambda value: repr(value)[:20],
)
def test_what_is_written_is_what_python_reads(value):
    found = pickle.loads(Emitter().dump(value))
    assert (type(found), found) == (type(value), value)


def test_what_cannot_be_written_is_named():
    with pytest.raises(TypeError) as error:
        Emitter().dump({"a": [Box((0,), (1,)).__class__]})
    assert str(error.value) == "no way to write a type"
    with pytest.raises(TypeError) as error:
        Emitter().dump([Tensor((1,), "float32", ())])
    assert str(error.value) == "a tensor in a pickle that has no storages"
