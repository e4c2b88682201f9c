"""The chunks of a Megatron model in one file: nested state dicts become one, numbered chunks are kept in order."""

from __future__ import annotations

import pytest

from ckptools.formats.megatron.model import chunks_of


@pytest.mark.parametrize(
    ("tree", "chunks"),
    [
        ({"model": {"a": 1, "b": {"c": 2, "d": {"e": 3}}}}, [{"a": 1, "b.c": 2, "b.d.e": 3}]),
        ({"model": {}, "model0": {"x": 1}}, [{}]),
        ({"model1": {"b": 2}, "model0": {"a": {"c": 1}}}, [{"a.c": 1}, {"b": 2}]),
        ({f"model{n}": {"w": n} for n in range(11)}, [{"w": n} for n in range(11)]),
        ({"model0": {"a": 1}, "model2": {"b": 2}}, []),
        ({"model1": {"a": 1}}, []),
        ({"model0": [1, 2], "model1": {"a": {}}}, [{}, {}]),
        ({"model": 5}, []),
        ({1: {"a": 1}, "models": {}}, []),
    ],
)
def test_a_file_has_the_chunks_that_it_numbers(tree, chunks):
    assert chunks_of(tree) == chunks
