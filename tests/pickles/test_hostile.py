"""Pickles made to run something, to exhaust the reader, or to be misread; none does any of it."""

from __future__ import annotations

import ast
import sys
import time
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import ckptools
from ckptools.errors import CkptoolsError
from ckptools.model.tree import Opaque, walk
from ckptools.pickles import reader
from ckptools.pickles.machine import Machine
from tests.memory import forget_peak, peak
from tests.pickles.forge import in_stream, in_tar, number, one_line, text, with_pickle
from tests.truth import FIXTURES

PACKAGE = Path(ckptools.__file__).parent

# -- nothing runs ----------------------------------------------------------------------------------------------

TRAP = "ckptools_trap"
"""A module whose import, and whose every attribute, leaves a file behind."""

EVIL = f"c{TRAP}\nrun\n".encode()
NAMED = text(TRAP) + text("run") + b"\x93"
ONCE = b"(" + text("x") + b"t"

ROUTES = {
    "GLOBAL": EVIL,
    "STACK_GLOBAL": NAMED,
    "STACK_GLOBAL of a nested name": text(TRAP) + text("a.b.run") + b"\x93" + ONCE + b"R",
    "REDUCE": EVIL + ONCE + b"R",
    "REDUCE of a stacked name": NAMED + ONCE + b"R",
    "INST": b"(" + text("x") + f"i{TRAP}\nrun\n".encode(),
    "OBJ": b"(" + EVIL + text("x") + b"o",
    "NEWOBJ": EVIL + ONCE + b"\x81",
    "NEWOBJ_EX": EVIL + ONCE + b"}" + b"\x92",
    "BUILD": EVIL + b")\x81}" + text("__setstate__") + NAMED + b"sb",
    "BUILD on the name": EVIL + b"}" + text("__reduce__") + NAMED + b"sb",
    "BUILD with slots": EVIL + b")\x81N}" + text("x") + NAMED + b"s\x86b",
    "APPEND": EVIL + b")R" + text("x") + b"a",
    "APPENDS": EVIL + b")R(" + text("x") + b"e",
    "ADDITEMS": EVIL + b")R(" + text("x") + b"\x90",
    "SETITEM": EVIL + b")R" + text("x") + text("y") + b"s",
    "SETITEMS": EVIL + b")R(" + text("x") + text("y") + b"u",
    "EXT1": b"\x82\x01" + ONCE + b"R",
    "EXT2": b"\x83\x01\x01" + ONCE + b"R",
    "EXT4": b"\x84\x01\x01\x01\x01" + ONCE + b"R",
    "getattr": b"c__builtin__\ngetattr\n(" + EVIL + text("run") + b"tR" + ONCE + b"R",
    "getattr of ShardedTensor": b"cbuiltins\ngetattr\n(ctorch.distributed._shard.sharded_tensor.api\nShardedTensor\n"
    + text("__init__") + b"tR" + ONCE + b"R",
    "a class in the place of a size": b"ctorch\nSize\n(" + EVIL + ONCE + b"RtR",
    "a dict key": b"}" + EVIL + ONCE + b"R" + text("x") + b"s",
    "a defaultdict's factory": b"ccollections\ndefaultdict\n" + EVIL + b"\x85R" + text("a") + b"Ns",
    "an OrderedDict's pair": b"ccollections\nOrderedDict\n](" + EVIL + ONCE + b"R" + b"N\x86e\x85R",
    "a set's item": b"c__builtin__\nset\n](" + EVIL + ONCE + b"Re\x85R",
    "a hook": b"ctorch._utils\n_rebuild_parameter\n(N\x89" + EVIL + ONCE + b"RtR",
    "a numpy object array": b"cnumpy.core.multiarray\n_reconstruct\n)R(K\x01(K\x01tN\x89](" + EVIL + ONCE + b"Retb",
    "a subclass": b"ctorch._tensor\n_rebuild_from_type_v2\n(" + EVIL + EVIL + ONCE + b"}tR",
    "a call of a call": EVIL + ONCE + b"R" + ONCE + b"R",
    "codecs": b"c_codecs\nencode\n(" + text("x") + text("punycode") + b"tR",
    "eval": b"c__builtin__\neval\n(" + text("open('ran','w')") + b"tR",
}  # fmt: skip

PERSISTENT = {
    "BINPERSID": EVIL + ONCE + b"RQ",
    "PERSID": f"P{TRAP}\n".encode(),
    "a storage class": b"(" + text("storage") + EVIL + text("0") + text("cpu") + b"K\x01tQ",
}


@pytest.fixture
def trap(tmp_path, monkeypatch):
    """A folder with the trap in it, as the current folder and the first on the path; returns what it leaves."""
    (tmp_path / f"{TRAP}.py").write_text("open('ran', 'w')\ndef run(*a): open('ran', 'w')\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    return tmp_path / "ran"


FORMS = {"zip": with_pickle, "stream": in_stream, "tar": in_tar}


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
@pytest.mark.parametrize("route", ROUTES.values(), ids=ROUTES)
def test_nothing_that_a_pickle_names_is_imported_or_called(route, form, tmp_path, trap):
    saved = reader.read(form(tmp_path / "rank0.pt", b"\x80\x02]" + route + b"a."))
    assert TRAP not in sys.modules and not trap.exists()
    assert any(
        TRAP in name or name.startswith(("copyreg", "_codecs", "__builtin__", "builtins")) for name in saved.names
    )


@pytest.mark.parametrize("route", ROUTES.values(), ids=ROUTES)
def test_what_it_names_is_shown_and_the_rest_is_read(route, tmp_path, trap):
    path = with_pickle(tmp_path / "rank0.pt", b"\x80\x02}" + text("bad") + route + b"s" + text("step") + b"K\x07s.")
    ck = ckptools.open(path)
    assert ck.tree["step"] == 7 and ck.names
    repr(ck), list(walk(ck.tree)), ck.sections, ck.optimizers
    assert TRAP not in sys.modules and not trap.exists()


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
@pytest.mark.parametrize("route", PERSISTENT.values(), ids=PERSISTENT)
def test_a_persistent_id_that_is_not_torchs_is_refused(route, form, tmp_path, trap):
    assert one_line(form(tmp_path / "p.pt", b"\x80\x02" + route + b"."))
    assert TRAP not in sys.modules and not trap.exists()


def test_a_foreign_call_is_an_opaque_with_its_dotted_name(tmp_path):
    tree = reader.read(with_pickle(tmp_path / "o.pt", EVIL + ONCE + b"R.")).tree
    assert isinstance(tree, Opaque)
    assert (tree.name, tree.args) == (f"{TRAP}.run", ("x",))


def test_a_stand_in_cannot_be_called_compared_or_given_attributes():
    tree = Machine(EVIL + b".").load()
    assert not callable(tree) and not hasattr(tree, "__dict__") and not callable(Opaque("x"))
    with pytest.raises(AttributeError):
        tree.other = 1


def test_only_the_stream_of_data_pkl_is_interpreted(tmp_path):
    saved = reader.read(with_pickle(tmp_path / "t.pt", b"N." + EVIL + ONCE + b"R."))
    assert (saved.tree, saved.names) == (None, ())


FORBIDDEN = {"eval", "exec", "__import__", "import_module", "import_string"}
UNPICKLERS = {"pickle", "_pickle", "cloudpickle", "dill", "joblib", "shelve", "marshal"}


def calls_in(path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            owner = node.func.value
            yield (owner.id if isinstance(owner, ast.Name) else ""), node.func.attr
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            yield "", node.func.id


@pytest.mark.slow
@pytest.mark.parametrize("path", sorted(PACKAGE.rglob("*.py")), ids=lambda p: str(p.relative_to(PACKAGE)))
def test_no_module_can_load_a_pickle_or_run_a_name(path):
    calls = set(calls_in(path))
    if path in (PACKAGE / "formats" / "registry.py", PACKAGE / "cli" / "start.py"):
        calls.discard(("", "import_module"))  # of the names in its own table, which tests/test_imports.py pins
    if path == PACKAGE / "torch_engine" / "module_shapes.py":
        calls.discard(("", "import_module"))  # of the module that the user typed, which tests/test_imports.py pins too
    assert not {call for call in calls if call[1] in FORBIDDEN and call[0] != "re"}
    assert not {call for call in calls if call[0] in UNPICKLERS and call[1] in ("load", "loads", "Unpickler")}
    assert not {call for call in calls if call[0] in ("np", "numpy") and call[1] in ("load", "fromfile", "loadtxt")}
    # The demo checks what consolidate wrote against torch; everything else asks the torch loader.
    if path.name not in ("offline.py", "demo.py"):
        assert ("torch", "load") not in calls


# -- nothing is exhausted ----------------------------------------------------------------------------------------

MANY = 50_000


def unfolding(levels: int, opcodes: bytes) -> bytes:
    """A container made by `opcodes` from two of the one below it, and so on; left on the stack."""
    return b"K\x01q\x00" + (b"0" + opcodes + b"q\x00") * levels


def lists(levels: int) -> bytes:
    return unfolding(levels, b"](h\x00h\x00e")


def tuples(levels: int) -> bytes:
    return unfolding(levels, b"h\x00h\x00\x86")


def dicts(levels: int) -> bytes:
    return unfolding(levels, b"}(K\x00h\x00K\x01h\x00u")


META = b"ctorch._utils\n_rebuild_meta_tensor_no_storage\n("
PIECE = b"(" + text("storage") + b"ctorch\nFloatStorage\n" + text("0") + text("cpu")
HUGE = b"\x8b" + (300_000).to_bytes(4, "little") + b"\x7f" * 300_000
LONG = b"\x8b" + (1024).to_bytes(4, "little") + b"\x7f" * 1024
PAIR_LIST = b"](" + b"".join(number(i) + b"N\x86" for i in range(50_000)) + b"eq\x01"
TUPLE_KEYS = b"".join(b"(" + number(i) + number(-i) + number(i * 7) + b"tN" for i in range(20_000))

BOMBS = {
    "a memo number of 2^32": b"N" + b"r\xff\xff\xff\xff" + b"q\x00.",
    "BINBYTES8 that lies": b"\x8e" + b"\xff" * 7 + b"\x7f.",
    "BYTEARRAY8 that lies": b"\x96" + b"\xff" * 7 + b"\x7f.",
    "BINUNICODE8 that lies": b"\x8d" + b"\xff" * 8 + b".",
    "LONG4 that lies": b"\x8b\xff\xff\xff\x7f.",
    "FRAME that lies": b"\x80\x04\x95" + b"\xff" * 8 + b"N.",
    "many frames": b"\x80\x04"
    + b"".join(b"\x95" + (9 * (99_999 - i)).to_bytes(8, "little") for i in range(100_000)) + b"N.",
    "100 000 lists deep": b"]" * 100_000 + b"a" * 99_999 + b".",
    "100 000 tuples deep": b")" + b"\x85" * 100_000 + b".",
    "100 000 calls deep": b"N" + b"q\x01cfoo\nbar\nh\x01\x85R" * 100_000 + b".",
    "lists that unfold to 10^9": lists(30) + b".",
    "dicts that unfold to 2^40": dicts(40) + b".",
    "lists that unfold to 4 million": lists(22) + b".",
    "a tuple key of 2^40 steps": b"}" + tuples(40) + b"Ns.",
    "a set item of 2^40 steps": b"\x8f(" + tuples(40) + b"\x90.",
    "a frozenset item of 2^40 steps": b"(" + tuples(40) + b"\x91.",
    "a size of 2^40 steps": b"ctorch\nSize\n" + tuples(40) + b"\x85R.",
    "a persistent id of 2^40 steps": tuples(40) + b"Q.",
    "a storage class of 2^40 steps": b"(" + text("storage") + tuples(40) + text("0") + text("cpu") + b"K\x01tQ.",
    "a storage length of 2^40 steps": PIECE + tuples(40) + b"tQ.",
    "a dtype of 2^40 steps": META + tuples(40) + b"))NtR.",
    "a shape of 2^40 steps": META + b"ctorch\nfloat32\n" + tuples(40) + b")NtR.",
    "a list in itself": b"]q\x00h\x00a.",
    "a dict in itself": b"}q\x00K\x01h\x00s.",
    "a tuple in itself": b"]q\x00h\x00\x85a.",
    "an object in itself": b"cfoo\nbar\n)Rq\x00h\x00b.",
    "marks": b"(" * 1_000_000 + b".",
    "values on the stack": b"N" * 4_500_000 + b".",
    "marks and values": b"(N" * 1_000_000 + b".",
    "an int of 300 kB": HUGE + b".",
    "a text of an int of 300 kB": b"I" + b"7" * 300_000 + b"\n.",
    "an int of 300 kB as a key": b"}" + HUGE + b"Ns.",
    "ints that collide": b"}(" + b"".join(number(i * (2**61 - 1)) + b"N" for i in range(MANY)) + b"u.",
    "negative ints that collide": b"}(" + b"".join(number(-i * (2**61 - 1) - 1) + b"N" for i in range(MANY)) + b"u.",
    "tuple keys": b"}(" + TUPLE_KEYS + b"u.",
    "a dict made again and again": PAIR_LIST + b"0](" + b"ccollections\nOrderedDict\nh\x01\x85R" * 5_000 + b"e.",
    "a set made again and again": PAIR_LIST + b"0](" + b"cbuiltins\nset\nh\x01\x85R" * 5_000 + b"e.",
    "bytes made again and again": text("x" * 1_000_000)
    + b"q\x010]("
    + (b"c_codecs\nencode\n(h\x01" + text("latin1") + b"tR") * 5_000
    + b"e.",
    "an OrderedDict of pairs of OrderedDicts": b"N"
    + b"q\x01]K\x00h\x01\x86aq\x020ccollections\nOrderedDict\nh\x02\x85R" * 50_000
    + b".",
    "a key of 1 MB": b"}" + text("k" * 1_000_000) + b"Ns.",
    "a name of 1 MB": b"c" + b"m" * 1_000_000 + b"\n" + b"n" * 1_000_000 + b"\n.",
    "a float of 1 MB": b"F" + b"1" * 1_000_000 + b"\n.",
    "a float that is none of 1 MB": b"F" + b"x" * 1_000_000 + b"\n.",
    "a bad number of 1 MB": b"Ng" + b"9" * 1_000_000 + b"\n.",
    "a timedelta of 4096 digits": b"cdatetime\ntimedelta\n(" + LONG + b"K\0K\0tR.",
    "shard classes without records": b"cx\nShardMetadata\nq\x000" + b"(" + b"h\x00" * MANY + b"t.",
    "a million dims": META + b"ctorch\nfloat32\n(" + LONG * 2_000 + b"t)NtR.",
    "sets": b"\x8f" * 2_000_000 + b".",
    "a big list a hundred thousand times": b"](" + b"N" * 100_000 + b"eq\x000](" + b"h\x00" * 100_000 + b"e.",
}  # fmt: skip

ACCEPTED = {
    "a memo number of 2^32", "an int of 300 kB", "a text of an int of 300 kB", "an int of 300 kB as a key",
    "ints that collide", "negative ints that collide", "tuple keys", "a key of 1 MB", "a name of 1 MB",
    "a float of 1 MB", "an object in itself", "a list in itself", "a dict in itself", "a tuple in itself",
    "a tuple key of 2^40 steps", "a set item of 2^40 steps",
    "a frozenset item of 2^40 steps", "a size of 2^40 steps", "shard classes without records", "100 000 calls deep",
    "marks and values", "many frames", "a dtype of 2^40 steps",
}  # fmt: skip
"""Harmless once read carefully; all others are refused."""


GIGABYTE = 1 << 20
"""In KiB."""

FORMED = [(name, "zip") for name in BOMBS] + [(name, "stream") for name, data in BOMBS.items() if len(data) < 50_000]
"""A stream's pickle goes through the same machine, twice; the bigger bombs would show nothing more."""


@pytest.mark.slow
@pytest.mark.parametrize(("name", "form"), FORMED)
def test_a_bomb_is_read_or_refused_quickly_below_a_gigabyte_and_in_one_line(name, form, tmp_path):
    path = FORMS[form](tmp_path / "rank0.pt", b"\x80\x02" + BOMBS[name])
    forget_peak()
    before, started = peak(), time.process_time()
    if name in ACCEPTED:
        ck = ckptools.open(path)
        repr(ck), ck.sections, ck.optimizers, ck.model
    else:
        assert one_line(path)
    assert time.process_time() - started < 10
    assert peak() - before < GIGABYTE


def test_a_tree_may_be_200_levels_deep_and_everything_still_works(tmp_path):
    tree: object = torch.ones(2)
    for _ in range(150):
        tree = {"a": [tree]} if _ % 2 else {"a": tree}
        if _ > 120:
            break
    for rank in range(2):
        torch.save(tree, tmp_path / f"rank{rank}.pt")
    ck = ckptools.open(tmp_path / "rank0.pt", all_ranks=True)
    assert sum(1 for _ in walk(ck.tree)) == 1


# -- a real file, damaged where it matters -----------------------------------------------------------------------

PICKLES = {}
for _path in sorted(FIXTURES.glob("*/*rank0.pt")):
    import zipfile

    with zipfile.ZipFile(_path) as _zipped:
        PICKLES[_path.parent.name] = (
            _zipped.read(next(n for n in _zipped.namelist() if n.endswith("data.pkl"))),
            {n.partition("/data/")[2]: _zipped.read(n) for n in _zipped.namelist() if "/data/" in n},
        )


@settings(max_examples=250, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_a_damaged_pickle_with_a_right_checksum_is_read_or_refused_in_one_line(tmp_path, data):
    from tests.pickles.forge import Member, archive

    pickled, storages = PICKLES[data.draw(st.sampled_from(sorted(PICKLES)))]
    damaged = bytearray(pickled)
    for _ in range(data.draw(st.integers(1, 3))):
        damaged[data.draw(st.one_of(st.integers(0, 3000), st.integers(0, len(pickled) - 1)))] = data.draw(
            st.integers(0, 255)
        )
    members = [Member(b"a/data.pkl", bytes(damaged)), *(Member(f"a/data/{k}".encode(), v) for k, v in storages.items())]
    path = archive(tmp_path / "rank0.pt", members)
    try:
        ck = ckptools.open(path)
        repr(ck), ck.sections, ck.optimizers
    except CkptoolsError as error:
        assert str(error).isprintable() and len(str(error)) < 700
