from __future__ import annotations

import collections
import datetime
import pickle
import struct

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ckptools.model.tree import NumpyArray, NumpyScalar, Opaque
from ckptools.pickles import machine_state
from ckptools.pickles.machine import Machine
from ckptools.pickles.machine_state import PickleError
from tests.pickles.forge import storage


def load(data: bytes):
    return Machine(data).load()


numbers = st.one_of(
    st.integers(-(2**70), 2**70),
    st.integers(-300, 300),
    st.integers(-(2**4000), 2**4000),
    st.floats(),
    st.booleans(),
    st.none(),
    st.complex_numbers(),
)
words = st.one_of(st.text(), st.text(st.characters()), st.binary(), st.binary(min_size=250, max_size=300))
zones = st.just(datetime.timezone.utc) | st.integers(-1439, 1439).map(
    lambda minutes: datetime.timezone(datetime.timedelta(minutes=minutes))
)
times = st.one_of(
    st.datetimes(), st.dates(), st.timedeltas(), st.datetimes().map(lambda d: d.replace(fold=1)), st.just("long " * 60)
)
times |= st.datetimes(timezones=zones) | st.times() | st.times(timezones=zones).map(lambda t: t.replace(fold=1)) | zones
ends = st.integers(-(2**60), 2**60)
spans = st.builds(range, ends, ends, ends.filter(bool)) | st.builds(
    slice, st.none() | ends, st.none() | ends, st.none() | ends
)
keys = st.one_of(
    st.text(),
    st.binary(),
    st.integers(-(2**60), 2**60),
    st.floats(allow_nan=False),
    st.none(),
    st.dates(),
    st.tuples(st.text(), st.integers(0, 9)),
)
leaves = st.one_of(
    numbers,
    words,
    words.filter(lambda w: isinstance(w, bytes)).map(bytearray),
    times,
    spans,
    st.sets(keys),
    st.frozensets(keys),
    st.dictionaries(st.text(), st.integers()).map(collections.Counter),
)
trees = st.recursive(
    leaves,
    lambda inner: st.one_of(
        st.lists(inner),
        st.lists(inner).map(tuple),
        st.dictionaries(keys, inner),
        st.lists(st.tuples(keys, inner)).map(collections.OrderedDict),
        st.dictionaries(st.text(), inner).map(lambda d: collections.defaultdict(list, d)),
        inner.map(lambda x: [x, x, {"again": x}]),
    ),
    max_leaves=25,
)


def spelled(node):
    """A tree as text that tells types, signs of zero and NaN apart."""
    if isinstance(node, dict):
        factory = getattr(node, "default_factory", None)
        return f"{type(node).__name__}({factory}, {[(spelled(k), spelled(v)) for k, v in node.items()]})"
    if isinstance(node, (list, tuple)):
        return f"{type(node).__name__}({list(map(spelled, node))})"
    if isinstance(node, (set, frozenset)):
        return f"{type(node).__name__}({sorted(map(spelled, node))})"
    if isinstance(node, int) and not isinstance(node, bool):
        return hex(node)
    return f"{node!r} {getattr(node, 'fold', '')}"


@settings(max_examples=250, deadline=None)
@given(tree=trees, protocol=st.integers(0, 5))
def test_plain_trees_are_what_pickle_makes_of_them(tree, protocol):
    data = pickle.dumps(tree, protocol)
    assert spelled(load(data)) == spelled(pickle.loads(data))


class Called:
    """Is pickled as a call."""

    def __init__(self, function, *args):
        self.call = function, args

    def __reduce__(self):
        return self.call


CALLS = [
    (int,), (int, 5), (float,), (float, 0.5), (bool,), (str,), (str, "x"), (bytes,), (complex,), (complex, 1.5),
    (list,), (list, [1, "a"]), (list, (1,)), (tuple,), (tuple, [1]), (dict,), (dict, {"a": 1}), (dict, [("a", 1)]),
    (set,), (frozenset, [1]), (bytearray,), (range, 0, 3, 1), (slice, 1, None, None),
]  # fmt: skip


@pytest.mark.parametrize("call", CALLS, ids=repr)
@pytest.mark.parametrize("protocol", [0, 2, 4])
def test_a_builtin_that_a_pickle_calls_is_the_value_that_it_makes(call, protocol):
    data = pickle.dumps(Called(*call), protocol)
    assert spelled(load(data)) == spelled(pickle.loads(data))


@pytest.mark.parametrize(
    "call", [(int, "5"), (list, "ab"), (dict, [1]), (range, 0, 9, 0), (range, 0, 2**70, 1), (str, 5)]
)
def test_a_builtin_that_would_work_on_its_argument_is_kept_as_a_call(call):
    assert isinstance(load(pickle.dumps(Called(*call), 2)), Opaque)


@pytest.mark.parametrize("protocol", range(6))
def test_shared_values_stay_shared(protocol):
    inner = [1]
    tree = load(pickle.dumps({"a": inner, "b": (inner, inner)}, protocol))
    assert tree["a"] is tree["b"][0] is tree["b"][1]


@settings(max_examples=60, deadline=None)
@given(
    shape=st.lists(st.integers(0, 4), max_size=3),
    dtype=st.sampled_from(["<f4", ">f8", "<i2", "|u1", "|b1", "<c16", "<U5", "|S3", "<M8[s]", ">m8[25us]", "<f2"]),
    order=st.sampled_from("CF"),
    protocol=st.integers(0, 5),
)
def test_numpy_arrays_are_described_with_every_byte(shape, dtype, order, protocol):
    array = np.asarray(np.arange(int(np.prod(shape))).reshape(shape).astype(dtype), order=order)
    found = load(pickle.dumps(array, protocol))
    assert isinstance(found, NumpyArray)
    again = np.ndarray(found.shape, found.dtype, found.data, order="F" if found.fortran_order else "C")
    assert (again.dtype.kind, again.tolist()) == (array.dtype.kind, array.tolist())


@pytest.mark.parametrize("protocol", range(6))
@pytest.mark.parametrize("value", [np.float32(1.5), np.int64(-3), np.bool_(True), np.complex64(1j)], ids=repr)
def test_numpy_scalars_are_described_with_their_bytes(value, protocol):
    found = load(pickle.dumps(value, protocol))
    assert isinstance(found, NumpyScalar)
    assert np.frombuffer(found.data, found.dtype)[0] == value


@pytest.mark.parametrize(
    "value", [np.zeros(2, "O"), np.zeros(2, [("a", "i4"), ("b", "f8")])], ids=["objects", "records"]
)
def test_numpy_arrays_of_objects_and_records_are_shown_by_their_shape(value):
    assert load(pickle.dumps(value, 2)).shape == (2,)


OLD = [
    (b"S'a\\x41\\'b'\n.", "aA'b"),
    (b'S"q"\n.', "q"),
    (b"U\x03abc.", "abc"),
    (b"U\x02\xc3\xa9.", "é"),
    (b"U\x01\xe9.", "é"),
    (b"T\x03\0\0\0abc.", "abc"),
    (b"I01\n.", True),
    (b"I00\n.", False),
    (b"I-7\n.", -7),
    (b"L12345678901234567890L\n.", 12345678901234567890),
    (b"F1.5\n.", 1.5),
    (b"Vk\\u00e9\n.", "ké"),
    (b"(I1\nI2\nl.", [1, 2]),
    (b"(S'a'\nI1\nd.", {"a": 1}),
    (b"(I1\nI2\nt.", (1, 2)),
    (b"]p0\nI1\nag0\n0.", [1]),
    (b"I1\nI2\n(I3\n1\x86.", (1, 2)),
    (b"I1\n(0.", 1),
    (b"K\x012\x86.", (1, 1)),
    (b"\x8f(K\x01K\x02\x90.", {1, 2}),
    (b"(K\x01\x91.", frozenset({1})),
    (b"\x8a\x00.", 0),
    (b"\x8b\x01\0\0\0\xff.", -1),
]


@pytest.mark.parametrize(("data", "value"), OLD, ids=range(len(OLD)))
def test_opcodes_that_picklers_no_longer_write_are_understood(data, value):
    assert load(data) == value == pickle.loads(data, encoding="utf-8") if b"\xe9" not in data else load(data) == value


MALFORMED = {
    "empty": b"",
    "nothing to stop with": b".",
    "no stop": b"N",
    "pop from nothing": b"0.",
    "tuple of nothing": b"t.",
    "unknown opcode": b"\xff.",
    "memo without a number": b"h\x05.",
    "append to a number": b"K\x01K\x02a.",
    "set on a list": b"]K\x01K\x02s.",
    "odd items": b"}(K\x01u.",
    "items on a text": b"X\0\0\0\0(K\x01K\x02u.",
    "put of nothing": b"q\x00.",
    "int that is none": b"Iabc\n.",
    "float that is none": b"Fabc\n.",
    "text cut": b"V",
    "text without quotes": b"Sabc\n.",
    "a bad escape": b"S'\\x1'\n.",
    "utf-8": b"X\x01\0\0\0\xff.",
    "global that is no text": b"K\x01K\x02\x93.",
    "persistent id": b"K\x01Q.",
    "persistent id by line": b"Pabc\n.",
    "memo that is no number": b"Np\xc2\xa0\n.",
    "a timedelta too long": b"cdatetime\ntimedelta\n(K\x00K\x00\x8a\x14" + b"\x7f" * 20 + b"tR.",
    "a date that is none": b"cdatetime\ndate\n(C\x04\0\0\0\0tR.",
    "an array without state": b"cnumpy.core.multiarray\n_reconstruct\n)RNb.",
    "an array of minus one": b"cnumpy.core.multiarray\n_reconstruct\n)R(K\x01(J\xff\xff\xff\xfftNNNtb.",
    "a tensor of nothing": b"ctorch._utils\n_rebuild_tensor_v2\n)R.",
    "a tensor of a number": b"ctorch._utils\n_rebuild_tensor_v2\n(K\x01K\x00)))NtR.",
    "stopped by nothing": b"K\x01.."[1:],
}


@pytest.mark.parametrize("data", MALFORMED.values(), ids=MALFORMED)
def test_a_malformed_pickle_is_one_line(data):
    with pytest.raises(PickleError) as told:
        load(data)
    assert str(told.value).isprintable()


@settings(max_examples=400, deadline=None)
@given(data=st.binary(max_size=60))
def test_any_bytes_are_a_tree_or_one_line(data):
    try:
        load(data + b".")
    except PickleError as error:
        assert str(error).isprintable()


@pytest.mark.slow
@settings(max_examples=300, deadline=None)
@given(tree=trees, protocol=st.integers(0, 5), at=st.integers(0), new=st.integers(0, 255))
def test_a_changed_byte_gives_a_tree_or_one_line(tree, protocol, at, new):
    data = bytearray(pickle.dumps(tree, protocol))
    data[at % len(data)] = new
    try:
        load(bytes(data))
    except PickleError as error:
        assert str(error).isprintable()


def test_what_follows_stop_is_never_read():
    machine = Machine(b"N.cos\nsystem\n.")
    assert (machine.load(), machine.stopped_at, machine.globals) == (None, 2, {})


def test_a_foreign_object_keeps_everything_the_file_says_of_it():
    found = load(b"cfoo\nBar\n(K\x01tR}S'x'\nK\x02sb(K\x03e.".replace(b"(K\x03e", b"(K\x03e"))
    assert isinstance(found, Opaque)
    assert (found.name, found.args, found.state, found.items) == ("foo.Bar", (1,), {"x": 2}, [3])


def test_ints_are_kept_while_python_can_print_them():
    data = b"\x8b" + struct.pack("<i", 1024) + b"\x7f" * 1024 + b"."
    assert str(load(data))
    assert load(b"\x8b" + struct.pack("<i", 1025) + b"\x7f" * 1025 + b".").name == "an int of 8200 bits"


def test_a_pickle_above_the_memo_budget_is_refused(monkeypatch):
    monkeypatch.setattr(machine_state, "MAX_MEMO", 6500)
    assert load(b"\x80\x04N" + b"\x94" * 6000 + b".") is None
    with pytest.raises(PickleError, match="more than 6500 memo entries"):
        load(b"\x80\x04N" + b"\x94" * 8000 + b".")


def test_tuples_above_their_budget_as_keys_are_kept_by_identity(monkeypatch):
    monkeypatch.setattr(machine_state, "MAX_TUPLE_KEYS", 2)
    found = list(load(pickle.dumps({("a", n): n for n in range(4)})))
    assert found[:2] == [("a", 0), ("a", 1)]
    assert [key.name for key in found[2:]] == ["a tuple used as a key"] * 2


@pytest.mark.parametrize("other", [storage(kind="IntStorage"), storage(numel=3)], ids=["dtype", "numel"])
def test_a_storage_that_is_described_in_two_ways_is_refused(other):
    assert [t.dtype for t in load(b"](" + (storage() + storage()) + b"e.")] == ["float32"] * 2
    with pytest.raises(PickleError, match="storage '0' is described in two ways"):
        load(b"](" + (storage() + other) + b"e.")


def test_a_pickle_above_the_stack_budget_is_refused(monkeypatch):
    monkeypatch.setattr(machine_state, "MAX_STACK", 3000)
    with pytest.raises(PickleError, match="stack"):
        load(b"\x80\x04" + b"N" * 5000 + b".")


@pytest.mark.parametrize("protocol", [6, 7, 255])
def test_a_protocol_that_no_python_writes_is_odd(protocol):
    with pytest.raises(PickleError, match=f"an odd pickle: of protocol {protocol}, and 5 is the newest"):
        load(bytes([0x80, protocol]) + b"N.")


ODD_STATES = {
    "an int": b"K\x01",
    "a float": b"F1.5\n",
    "a text": b"X\0\0\0\0",
    "bytes": b"C\0",
    "nothing": b"N",
    "a flag": b"\x88",
}


@pytest.mark.parametrize("target", ODD_STATES.values(), ids=ODD_STATES)
def test_a_state_for_a_value_that_has_none_is_odd(target):
    with pytest.raises(PickleError, match="an odd pickle: it gives a state to a value of type"):
        load(b"\x80\x04" + target + b"}b.")
