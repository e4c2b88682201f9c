"""numpy dtypes with fields: read with all that they state, and written as they were."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import ckptools
from ckptools.pickles import reader
from ckptools.torch_engine import describe

DTYPES = {
    "plain fields": [("a", "<i4"), ("b", "<f8")],
    "aligned": np.dtype([("a", "i1"), ("b", "<f8")], align=True),
    "titles": [(("told", "a"), "<i4")],
    "big-endian and subarrays": [("a", ">f4", (2, 3)), ("n", [("x", "<U3"), ("y", "S2")])],
    "offsets that overlap": {"names": ["a", "b"], "formats": ["<i4", "<i4"], "offsets": [0, 2], "itemsize": 10},
    "times": [("t", "<M8[25us]"), ("d", "<m8[s]")],
    "records": np.dtype((np.record, [("a", "<i4")])),
    "void": "V7",
    "no fields": [],
}


@pytest.mark.slow
@pytest.mark.parametrize("zipped", [True, False])
@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
def test_a_dtype_with_fields_is_written_as_it_was_or_named_as_left_out(dtype, zipped, tmp_path):
    array = np.zeros((2, 3), dtype)
    saved = {"w": torch.ones(1), "array": array, "dtype": array.dtype, "one": array[1, 2]}
    torch.save(saved, tmp_path / "in.pt", _use_new_zipfile_serialization=zipped)
    done = ckptools.consolidate(tmp_path / "in.pt", tmp_path / "kept.pt", only="all", keep_types=True)
    found = torch.load(tmp_path / "kept.pt", weights_only=False)
    assert found["array"].dtype == found["dtype"] == found["one"].dtype == array.dtype and not done.left_out
    assert found["array"].dtype.isalignedstruct == array.dtype.isalignedstruct
    assert found["array"].tobytes() == array.tobytes() and found["array"].shape == (2, 3)
    plain = ckptools.consolidate(tmp_path / "in.pt", tmp_path / "plain.pt", only="all")
    assert "array" in plain.left_out and "Python objects" not in plain.left_out["array"]


def test_both_ways_in_spell_a_dtype_with_fields_alike(tmp_path):
    saved = {name: np.zeros(2, dtype) for name, dtype in DTYPES.items()} | {"sub": np.dtype(("<f4", (2,)))}
    torch.save(saved, tmp_path / "in.pt")
    ways = [reader.read(tmp_path / "in.pt").tree, describe.read(tmp_path / "in.pt", trust=True).tree]
    inert, loaded = ({name: value.dtype for name, value in way.items()} for way in ways)
    assert inert == loaded
