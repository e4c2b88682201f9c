"""A `.pt` holds what plain torch.load makes: the nearest to what the source held, and the rest is listed."""

from __future__ import annotations

import datetime
import json
from collections import Counter, OrderedDict, defaultdict

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import ckptools
from ckptools.consolidate.writers.pickle_emitter import LEFT_OUT, TORCH_DTYPE, Loadable
from ckptools.errors import CkptoolsError
from ckptools.model.tree import Device, NumpyArray, NumpyScalar, Size, TorchName
from tests.formats.test_merge import trees
from tests.truth import FIXTURES

COMPOSER = FIXTURES / "composer-0.13.5-torch1.13.1-sharded-w4"
WHEN = datetime.datetime(2026, 11, 20, 23, 54, 52, 7)


def written(tree, folder, **options):
    """What plain torch.load has of a tree that was saved and consolidated, and what consolidate said."""
    torch.save({"w": torch.ones(1), "x": tree}, folder / "in.pt")
    done = ckptools.consolidate(folder / "in.pt", folder / "out.pt", force=True, **options)
    loaded = torch.load(folder / "out.pt", weights_only=not options.get("keep_types"))
    return loaded.get("x"), done


BECOMES = {
    "timedelta": (datetime.timedelta(days=2, microseconds=3), 172800.000003),
    "datetime": (WHEN, "2026-11-20T23:54:52.000007"),
    "date": (WHEN.date(), "2026-11-20"),
    "numpy float": (np.float64(0.1), 0.1),
    "numpy half": (np.float16(0.5), 0.5),
    "numpy int": (np.uint64(2**64 - 1), 2**64 - 1),
    "numpy bool": (np.bool_(True), True),
    "numpy text": (np.str_("näh"), "näh"),
    "numpy texts": (np.array([["a", "bc"]]), [["a", "bc"]]),
    "frozenset": (frozenset({1, 2}), {1, 2}),
    "defaultdict": (defaultdict(list, a=1), {"a": 1}),
    "numpy key": ({np.int64(5): 1}, {5: 1}),
    "range": (range(0, 9, 2), "range(0, 9, 2)"),
    "slice": (slice(1, None), "slice(1, None, None)"),
    "time": (datetime.time(1, 2), "01:02:00"),
    "datetime of a zone": (WHEN.replace(tzinfo=datetime.timezone.utc), "2026-11-20T23:54:52.000007+00:00"),
    "timezone": (datetime.timezone(datetime.timedelta(hours=1)), "UTC+01:00"),
    "huge integer": (-(10**700), hex(-(10**700))),
}
STAYS = {
    "text": "\ud800 näh\x00",
    "bytes": b"\xff\x00",
    "bytearray": bytearray(b"\xff"),
    "complex": complex(1, float("inf")),
    "set": {1, (2, "a")},
    "ordered": OrderedDict(b=1, a=2),
    "counter": Counter("aab"),
    "size": torch.Size([2, 0]),
    "device": torch.device("cuda", 3),
    "dtype": torch.float8_e5m2,
    "layout": torch.sparse_csr,
    "long integer": 10**600,
    "odd keys": {None: 1, True: 2, (1, "a"): 3, b"k": 4, 1.5: 5, float("-inf"): 6},
}


@pytest.mark.parametrize(("value", "expected"), BECOMES.values(), ids=BECOMES)
def test_a_value_that_plain_torch_load_refuses_becomes_the_nearest_and_is_said(value, expected, tmp_path):
    found, done = written(value, tmp_path)
    assert (type(found), found) == (type(expected), expected)
    assert len(done.notes) == 1 and "became" in done.notes[0] and done.left_out == {}


@pytest.mark.parametrize("value", STAYS.values(), ids=STAYS)
def test_a_value_that_plain_torch_load_knows_stays_what_it_was(value, tmp_path):
    found, done = written(value, tmp_path)
    assert (type(found), found) == (type(value), value)
    assert (done.notes, done.left_out) == ((), {})


ARRAYS = {
    **{letters: np.arange(6).reshape(2, 3).astype(letters) for letters in TORCH_DTYPE},
    "big-endian": np.arange(6, dtype=">i4").reshape(2, 3),
    "big-endian complex": np.array([1 + 2j, 3 - 4j], dtype=">c16"),
    "fortran": np.asfortranarray(np.arange(6.0).reshape(2, 3)),
    "both": np.asfortranarray(np.arange(6, dtype=">u2").reshape(2, 3)),
    "0-d": np.array(5),
    "empty": np.zeros((0, 3), "f4"),
    "empty and big-endian": np.zeros((3, 0), ">f4"),
}


@pytest.mark.parametrize("array", ARRAYS.values(), ids=ARRAYS)
def test_an_array_becomes_a_tensor_with_the_same_values(array, tmp_path):
    found, done = written(array, tmp_path)
    mapped = torch.load(tmp_path / "out.pt", mmap=True)["x"]
    for tensor in (found, mapped):
        assert tensor.numpy().dtype == array.dtype.newbyteorder("=")
        assert np.array_equal(tensor.numpy(), array)
    assert "1 numpy array became a tensor (x)" in done.notes[0]


@pytest.mark.parametrize("kind", ["M8[ns]", "m8[s]"])
def test_what_torch_has_nothing_near_to_is_left_out_and_kept_on_demand(kind, tmp_path):
    found, done = written([np.array([1, 2], kind), 5], tmp_path)
    assert found == [None, 5]
    assert list(done.left_out) == ["x.0"] and "keep_types" in done.left_out["x.0"]
    listed = json.loads((tmp_path / "out.pt.left-out.json").read_text())["left_out"]
    assert [row["name"] for row in listed] == ["x.0"]


@pytest.mark.parametrize("name", [n for n in BECOMES if "huge" not in n])
def test_types_are_kept_when_asked_for(name, tmp_path):
    value = BECOMES[name][0]
    found, done = written(value, tmp_path, keep_types=True)
    assert type(found) is type(value) and np.array_equal(found, value)
    assert done.load.endswith(", weights_only=False)") and done.needs


def test_two_keys_that_would_be_one_are_not_made_one():
    loadable = Loadable()
    for tree in ({1.0: "a", datetime.timedelta(seconds=1): "b"}, {datetime.timedelta(seconds=1): "b", 1.0: "a"}):
        assert loadable.value(tree) == {1.0: "a"}
    assert set(loadable.left_out.values()) == {"its key would be 1.0, as another one is"}


ODD = (
    (Device("npu", 0), "npu:0"),
    (Device("cuda", 300), "cuda:300"),
    (TorchName("sparse_moo"), "torch.sparse_moo"),
    (Size((1 << 70,)), (1 << 70,)),
    ({frozenset({2, 1})}, {(1, 2)}),
)


@pytest.mark.parametrize(("value", "expected"), ODD, ids=repr)
def test_small_types_that_torch_does_not_make_here_become_plain(value, expected):
    loadable = Loadable()
    assert loadable.value({"x": value}) == {"x": expected} and "became" in loadable.note()


@pytest.mark.parametrize(
    "value",
    [NumpyArray("<f16", (1,), False, bytes(16)), NumpyScalar("<V3", b"abc"), NumpyScalar("<f8", b"ab")],
    ids=repr,
)
def test_numbers_that_torch_lacks_are_left_out(value):
    loadable = Loadable()
    assert loadable.value(value) is LEFT_OUT and list(loadable.left_out) == [()]


def test_text_that_is_none_is_left_out_and_not_an_error():
    loadable = Loadable()
    assert loadable.value({"x": NumpyArray("<U1", (1,), False, b"\xff" * 4)}) == {} and loadable.left_out


@pytest.mark.parametrize("key", [NumpyScalar("<V3", b"abc"), NumpyArray("<U1", (1,), False, b"a\0\0\0")], ids=repr)
def test_a_key_that_torch_has_nothing_near_to_becomes_text_and_its_value_stays(key):
    loadable = Loadable()
    assert loadable.value({"x": {key: 5}}) == {"x": {repr(key): 5}}
    assert loadable.left_out == {} and "1 odd key became text (x." in loadable.note()


@pytest.mark.slow
def test_every_converted_value_of_a_real_checkpoint_is_what_the_source_held(tmp_path):
    ckptools.consolidate(COMPOSER, tmp_path / "all.pt")
    kept = ckptools.consolidate(COMPOSER, tmp_path / "kept.pt", keep_types=True)
    plain, typed = torch.load(tmp_path / "all.pt"), torch.load(tmp_path / "kept.pt", weights_only=False)
    times = typed["state"]["timestamp"]["Timestamp"]
    for name in ("total_wct", "epoch_wct", "batch_wct"):
        assert plain["state"]["timestamp"]["Timestamp"][name] == times[name].total_seconds()
    for rank in range(4):
        assert np.array_equal(plain["rng"][rank]["numpy"][1].numpy(), typed["rng"][rank]["numpy"][1])
    assert kept.needs == ("datetime.timedelta", "numpy._core.multiarray._reconstruct", "numpy.ndarray", "numpy.dtype")


@pytest.mark.slow
@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(ranks=st.lists(trees, min_size=1, max_size=3), more=st.booleans())
def test_any_trees_that_are_written_are_read_by_plain_torch_load(tmp_path, ranks, more):
    for old in tmp_path.glob("rank*.pt"):
        old.unlink()
    for rank, tree in enumerate(ranks):
        torch.save(
            {"model": {"w": torch.ones(2)}, "rng": tree, "x": tree} if more else tree, tmp_path / f"rank{rank}.pt"
        )
    try:
        ckptools.consolidate(tmp_path / "rank0.pt", tmp_path / "out.pt", force=True, only="all")
    except CkptoolsError:
        return
    torch.load(tmp_path / "out.pt")
    torch.load(tmp_path / "out.pt", mmap=True)
