"""Every key of a checkpoint as a row."""

from __future__ import annotations

from datetime import timedelta

import pytest

from ckptools.contents.tree import keys_of, totals
from ckptools.keys.entries import Selection, entries_of
from ckptools.model.tree import NumpyArray, Opaque
from ckptools.training_state.sections import measure
from tests.display.made import checkpoint, plain, sharded
from tests.truth import WHOLE

KNOWN = pytest.mark.parametrize("known", WHOLE, ids=lambda known: f"{known.name}/{known.path}-{known.weights}")


def rows_of(tree, **wanted):
    return {row.name: row for row in keys_of(checkpoint(tree), Selection(**wanted)).rows}


@pytest.mark.slow
@KNOWN
def test_one_ranks_structure_tells_of_every_key_what_all_ranks_do(known):
    assert keys_of(known.open(all_ranks=False)).rows == keys_of(known.open(all_ranks=True)).rows


@pytest.mark.slow
@KNOWN
def test_every_entry_has_a_row_and_sections_are_counted_as_inspect_does(known):
    ck = known.open(all_ranks=False)
    keys = keys_of(ck, private=True)
    assert [row.name for row in keys.rows] == [entry.name for entry in entries_of(ck)]
    counted = {s.name: (s.tensors, s.params, s.bytes) for s in keys.sections}
    for section in ck.sections:
        size = measure(section.value)
        assert counted[section.name] == (size.tensors, size.params, size.nbytes), section.name


def test_a_row_tells_a_tensors_shape_dtype_size_and_layout():
    row = rows_of({"model": {"w": sharded(8, 4, ranks=4, dtype="bfloat16")}})["w"]
    assert (row.type, row.shape, row.dtype, row.params, row.bytes) == ("tensor", (8, 4), "bfloat16", 32, 64)
    assert row.layout == "dim 0 over 4 ranks" and (row.section, row.kind) == ("model", "model")


def test_a_row_tells_a_short_value_itself_and_what_a_longer_one_is():
    args = Opaque("argparse.Namespace")
    array = NumpyArray("<u4", (624,), False, bytes(2496))
    other = {"a": 1, "b": None, "t": timedelta(seconds=2), "l": [0.9, 0.95], "run": list(range(625)), "args": args}
    rows = rows_of({"model": {"w": plain(2)}, "other": {**other, "np": array, "x": "y" * 300, "e": {}}})
    told = {name.partition(".")[2]: (row.type, row.value, row.note) for name, row in rows.items()}
    assert told["a"] == ("int", 1, "") and told["b"] == ("null", None, "") and told["t"] == ("timedelta", 2.0, "")
    assert told["l"] == ("list", [0.9, 0.95], "") and told["e"] == ("dict", {}, "")
    assert told["run"][:2] == ("list", None) and told["run"][2].startswith("625 integers, crc ")
    assert told["args"] == ("object", None, "argparse.Namespace")
    assert told["np"][2].startswith("numpy <u4 [624], crc ") and rows["other.np"].shape == (624,)
    assert told["x"][1] is None and told["x"][2].startswith("300 characters: yyy")


def test_tied_weights_name_the_first_and_count_once():
    tied = plain(4, 2, record="7")
    keys = keys_of(checkpoint({"model": {"emb": tied, "up": plain(3, record="8"), "head": tied}}))
    assert [(row.name, row.tied) for row in keys.rows] == [("emb", ""), ("up", ""), ("head", "emb")]
    assert (keys.tensors, keys.params, keys.bytes) == (3, 11, 44)
    assert totals([keys.rows[2]]) == (1, 8, 32)


def test_a_tensor_of_another_section_is_not_tied():
    one = plain(4, 2, record="7")
    rows = keys_of(checkpoint({"model": {"w": one, "b": plain(2)}, "ema": {"w": one, "c": plain(2, record="9")}})).rows
    assert len({row.section for row in rows}) == 2 and not any(row.tied for row in rows)


def test_a_tied_weight_counts_where_the_other_was_not_asked_for():
    tied = plain(4, 2, record="7")
    keys = keys_of(checkpoint({"model": {"emb": tied, "head": tied}}), Selection(("head",)))
    assert (keys.tensors, keys.params) == (1, 8)
