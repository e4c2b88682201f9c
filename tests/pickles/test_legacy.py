"""Files that torch.save wrote before torch 1.6: a row of pickles, then raw storages."""

from __future__ import annotations

import pickle
import struct
import warnings
from collections import OrderedDict
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import ckptools
from ckptools.errors import CkptoolsError
from ckptools.files.opening import LEGACY_MAGIC
from ckptools.formats import options as limits
from ckptools.model.tensor import Tensor
from ckptools.model.tree import Opaque, tensors_in
from ckptools.pickles import legacy, reader
from ckptools.tensor_io import read
from tests.fake_world import fake_group
from tests.pickles.forge import in_stream, number, numbers, one_line, stream, tensor, text
from tests.pickles.test_tensors import same_bits
from tests.truth import WHOLE

BASE = torch.arange(40, dtype=torch.float32).reshape(5, 8)

TREES = {
    "dtypes": {str(d): torch.ones(3, dtype=d) for d in (torch.float64, torch.float16, torch.bfloat16, torch.bool)}
    | {str(d): torch.arange(5, dtype=d) for d in (torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64)}
    | {"uint16": torch.tensor([1, 65535], dtype=torch.uint16), "fp8": torch.ones(3).to(torch.float8_e4m3fn)}
    | {"c64": torch.tensor([1 + 2j]), "c128": torch.tensor([1 + 2j], dtype=torch.complex128)},
    "views": {"a": BASE, "rows": BASE[1:3], "columns": BASE[:, 2:5], "t": BASE.t(), "expanded": BASE[0].expand(3, 8)},
    "tied": OrderedDict(emb=BASE, head=BASE, other=BASE.clone()),
    "shapes": {"0-d": torch.tensor(7), "empty": torch.empty(0, 4), "empty view": BASE[5:], "1": torch.ones(1, 1)},
    "parameters": {"p": torch.nn.Parameter(torch.ones(2)), "frozen": torch.nn.Parameter(torch.ones(2), False)},
    "nothing": {},
    "no tensors": {"step": 3, "name": "x", "list": [1, (2.0, None)]},
}


def old(tree: object, path: Path, protocol: int = 2) -> Path:
    torch.save(tree, path, pickle_protocol=protocol, _use_new_zipfile_serialization=False)
    return path


def alike(found: object, made: object) -> None:
    """Compare what the reader described with what was saved, tensors bit for bit."""
    if isinstance(made, torch.Tensor):
        assert isinstance(found, Tensor)
        same_bits(read.load(found), made.detach())
        assert found.requires_grad == made.requires_grad
    elif isinstance(made, dict):
        assert isinstance(found, dict) and list(found) == list(made)
        for key, value in made.items():
            alike(found[key], value)
    else:
        assert found == made


@pytest.mark.parametrize("protocol", [1, 2, 3, 4, 5])
@pytest.mark.parametrize("name", TREES)
def test_what_torch_saved_is_read_bit_for_bit(name, protocol, tmp_path):
    alike(reader.read(old(TREES[name], tmp_path / "old.pt", protocol)).tree, TREES[name])


def test_it_is_described_as_a_zip_archive_of_the_same_would_be(tmp_path):
    torch.save(TREES["views"], tmp_path / "new.pt")
    one, two = reader.read(old(TREES["views"], tmp_path / "old.pt")), reader.read(tmp_path / "new.pt")
    assert (one.names, one.claims, list(one.tree)) == (two.names, two.claims, list(two.tree))
    assert one.tree == {k: v for k, v in one.tree.items() if two.tree[k].shape == v.shape}
    assert (one.form, two.form) == ("pickle stream of before torch 1.6", "")


def test_tied_tensors_have_one_source(tmp_path):
    tree = reader.read(old(TREES["tied"], tmp_path / "old.pt")).tree
    assert tree["emb"].shards == tree["head"].shards != tree["other"].shards


def test_an_optimizers_state_is_read(tmp_path):
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    saved = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": 1}
    ck = ckptools.open(old(saved, tmp_path / "old.pt"))
    assert [s.kind for s in ck.sections][:2] == ["model", "optimizer"] and ck.whole
    same_bits(
        ck.optimizers["optimizer"].state["weight"]["exp_avg"].load(), optimizer.state_dict()["state"][0]["exp_avg"]
    )


def test_a_whole_module_names_its_class_and_uses_no_source(tmp_path):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        old(torch.nn.Linear(2, 1), tmp_path / "module.pt")
    saved = reader.read(tmp_path / "module.pt")
    assert isinstance(saved.tree, Opaque) and saved.tree.name == "torch.nn.modules.linear.Linear"
    assert "torch.nn.modules.linear.Linear" in saved.names
    assert [t.shape for _, t in tensors_in(saved.tree.state)] == [(1, 2), (1,)]


@pytest.mark.slow
def test_sharded_tensors_of_every_rank_are_joined(tmp_path):
    known = next(k for k in WHOLE if k.name == "torch2.13.0-fsdp1-sharded-w4")
    with ckptools.offline():
        for path in sorted(known.file.parent.glob("rank*.pt")):
            old(ckptools.load_shard(path), tmp_path / path.name)
    one, two = ckptools.open(tmp_path, all_ranks=True), ckptools.open(known.file, all_ranks=True)
    assert (one.whole, one.world_size.value) == (True, 4) and "before torch 1.6" in one.saved_as
    for (path, found), (same, wanted) in zip(tensors_in(one.tree), tensors_in(two.tree), strict=True):
        assert path == same
        assert found.numpy().tobytes() == wanted.numpy().tobytes()


def test_dtensors_of_every_rank_are_joined(tmp_path):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Shard

    for rank in range(4):
        with fake_group(rank, 4):
            mesh = init_device_mesh("cpu", (2, 2))
            local = BASE.chunk(2)[rank // 2].chunk(2, 1)[rank % 2].clone()
            shards = DTensor.from_local(local, mesh, [Shard(0), Shard(1)], shape=BASE.shape, stride=BASE.stride())
            old({"w": shards}, tmp_path / f"rank{rank}.pt")
    ck = ckptools.open(tmp_path, all_ranks=True)
    assert (ck.whole, ck.world_size.value) == (True, 4)
    same_bits(ck.model["w"].load(), BASE)


def test_it_is_consolidated_into_a_new_file(tmp_path):
    ckptools.consolidate(old({"model": TREES["views"]}, tmp_path / "old.pt"), tmp_path / "new.pt")
    alike_dense = {k: v.contiguous() for k, v in TREES["views"].items()}
    alike(reader.read(tmp_path / "new.pt").tree["model"], alike_dense)


def test_only_the_pickles_are_read_however_much_lies_behind_them(tmp_path):
    saved = reader.read(old({"w": torch.zeros(1_000_000), "v": torch.zeros(1_000_000)}, tmp_path / "old.pt"))
    assert saved.bytes_read < 100_000 < saved.nbytes


@pytest.mark.parametrize("front", [1, 7, 100, 1000])
def test_a_pickle_longer_than_what_is_read_at_first_is_read_on(tmp_path, monkeypatch, front):
    monkeypatch.setattr(legacy, "FRONT", front)
    monkeypatch.setattr(legacy, "GROWTH", 2)
    tree = {f"layer.{i}.weight": torch.full((3,), float(i)) for i in range(40)}
    alike(reader.read(old(tree, tmp_path / "old.pt", 1 if front == 7 else 2)).tree, tree)


# -- by hand -----------------------------------------------------------------------------------------------------

FLOATS = struct.pack("<4f", 1, 2, 3, 4)


def pid(key: str = "0", numel: int = 4, view: bytes = b"N", kind: str = "FloatStorage", module: str = "torch") -> bytes:
    """Opcodes of a storage as these files name it: with a view, or None."""
    head = b"(" + text("storage") + f"c{module}\n{kind}\n".encode() + text(key) + text("cpu") + number(numel)
    return head + view + b"tQ"


def view(key: str, first: int, numel: int) -> bytes:
    return b"(" + text(key) + number(first) + number(numel) + b"t"


def values(path: Path) -> list[float]:
    return reader.read(path).tree.load().tolist()


def test_a_hand_written_stream_is_as_good_as_torchs(tmp_path):
    path = in_stream(tmp_path / "a.pt", b"\x80\x02" + tensor(of=pid()) + b".", FLOATS)
    assert values(path) == [1, 2, 3, 4] == torch.load(path, weights_only=False).tolist()


@pytest.mark.parametrize("module", ["torch", "torch.cuda"])
def test_the_spellings_of_torch_0_are_read(module, tmp_path):
    old_rebuild = b"ctorch._utils\n_rebuild_tensor\n(" + pid(module=module) + b"K\x00(K\x02K\x02t(K\x02K\x01ttR."
    assert values(in_stream(tmp_path / "a.pt", old_rebuild, FLOATS)) == [[1, 2], [3, 4]]


def test_a_view_of_a_storage_begins_where_it_says(tmp_path):
    seen = tensor(size=(2,), of=pid(view=view("9", 1, 3)), offset=1)
    path = in_stream(tmp_path / "a.pt", b"\x80\x02" + seen + b".", FLOATS)
    assert values(path) == [3, 4] == torch.load(path, weights_only=False).tolist()


def test_two_views_of_one_key_are_one(tmp_path):
    same = tensor(size=(3,), of=pid(view=view("9", 1, 3)))
    assert len(reader.read(in_stream(tmp_path / "a.pt", b"](" + same + same + b"e.", FLOATS)).tree) == 2


def seen(size: int, key: str, first: int, numel: int) -> bytes:
    return tensor(size=(size,), of=pid(view=view(key, first, numel)))


def both(one: bytes, other: bytes) -> bytes:
    return b"](" + one + other + b"e."


STORAGE = tensor(of=pid("1"))
BACKWARDS = b"ctorch._utils\n_rebuild_tensor\n(" + pid() + b"K\x00" + numbers((2,)) + numbers((-1,)) + b"tR."
LARGE = tensor(size=(1 << 62, 4), stride=(0, 1), of=pid(), offset=1) + b"."
PICKLES = (
    (both(seen(3, "9", 1, 3), seen(2, "9", 2, 2)), "two ways"),
    (both(seen(2, "1", 1, 3), STORAGE), "two ways"),
    (both(STORAGE, seen(2, "1", 1, 3)), "two ways"),
    (both(tensor(of=pid()), tensor(of=pid(numel=5))), "two ways"),
    *((seen(1, "9", *place) + b".", "view") for place in ((2, 3), (-1, 3), (0, 1 << 80))),
    *((tensor(size=(1,), of=pid(view=bad)) + b".", "view") for bad in (b"K\x01", b")")),
    (seen(3, "9", 2, 2) + b".", "which has 2"),
    (LARGE, "element 4 of storage '0', which has 4"),
    (BACKWARDS, "strides of a tensor"),
    (b"(" + text("module") + b"K\x01NNtQ.", "persistent id"),
    (b"(" + text("module") + b"tQ.", "persistent id"),
    (b"(" + text("else") + b"tQ.", "persistent id"),
)


@pytest.mark.parametrize(("data", "told"), PICKLES)
def test_a_pickle_that_contradicts_itself_is_refused(data, told, tmp_path):
    assert told in one_line(in_stream(tmp_path / "a.pt", data, FLOATS, FLOATS))


PICKLED = tensor(of=pid()) + b"."
WHOLE_STREAM = stream(PICKLED, FLOATS)
STREAMS = (
    (stream(PICKLED, FLOATS, back=b"x"), "has 1 bytes behind"),
    (stream(PICKLED, FLOATS, FLOATS, keys=()), "'0' has no bytes"),
    (stream(PICKLED, FLOATS, FLOATS, keys=("0", "0")), "'0' more than once"),
    (stream(PICKLED, FLOATS, FLOATS, keys=("1", "0")), "'1' that no tensor uses"),
    (stream(PICKLED, FLOATS, FLOATS, keys=("x" * 5000,)), "no tensor uses"),
    *(
        (WHOLE_STREAM.replace(pickle.dumps(["0"], 2), pickle.dumps(listed, 2)), "storage")
        for listed in (7, "0", {"0": 1}, [0], [["0"]], None)
    ),
    *(
        (WHOLE_STREAM[:-24] + struct.pack("<q", n) + FLOATS, f"'0' has {n} elements, its tensors expect 4")
        for n in (0, 3, 5, -1, 1 << 62)
    ),
    (WHOLE_STREAM.replace(pickle.dumps(1001, 2), pickle.dumps(1002, 2)), "version 1002; 1001"),
)


@pytest.mark.parametrize(("data", "told"), STREAMS)
def test_a_stream_that_its_tensors_contradict_is_refused(data, told, tmp_path):
    (tmp_path / "a.pt").write_bytes(data)
    assert told in one_line(tmp_path / "a.pt")


@pytest.mark.parametrize("numel", [1 << 40, 1 << 70, 10**400])
def test_a_storage_that_claims_more_than_the_file_has_is_refused(numel, tmp_path):
    data = tensor(size=(4,), of=pid(numel=numel)) + b"."
    whole = stream(data, FLOATS)
    (tmp_path / "a.pt").write_bytes(whole[:-24] + struct.pack("<q", min(numel, (1 << 63) - 1)) + FLOATS)
    assert one_line(tmp_path / "a.pt")


def test_a_big_endian_writer_is_refused(tmp_path):
    head = pickle.dumps(LEGACY_MAGIC, 2) + pickle.dumps(1001, 2)
    for system, told in (({"little_endian": False}, "big-endian"), ({}, "what system"), (3, "what system")):
        (tmp_path / "a.pt").write_bytes(head + pickle.dumps(system, 2) + pickle.dumps({}, 2) + pickle.dumps([], 2))
        assert told in one_line(tmp_path / "a.pt")


# -- cut and damaged ---------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def good(tmp_path_factory):
    return old({"w": BASE, "v": BASE[1:], "step": 3}, tmp_path_factory.mktemp("old") / "old.pt").read_bytes()


@settings(max_examples=80, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(cut=st.integers(0, 10_000))
def test_a_file_cut_anywhere_is_refused(good, tmp_path, cut):
    (tmp_path / "cut.pt").write_bytes(good[: cut % len(good)])
    told = one_line(tmp_path / "cut.pt")
    assert cut % len(good) < 30 or "is cut short" in told


@pytest.mark.slow
@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(at=st.integers(0, 10_000), byte=st.integers(0, 255))
def test_a_damaged_file_is_read_or_refused_in_one_line(good, tmp_path, at, byte):
    damaged = bytearray(good)
    damaged[at % len(good)] = byte
    (tmp_path / "rank0.pt").write_bytes(damaged)
    try:
        ck = ckptools.open(tmp_path / "rank0.pt")
        repr(ck), ck.sections, [t.load() for _, t in tensors_in(ck.tree) if not t.note]
    except CkptoolsError as error:
        assert str(error).isprintable() and len(str(error)) < 700


def test_a_big_damaged_file_is_not_read_to_its_end(tmp_path):
    path = in_stream(tmp_path / "a.pt", b"\x80\x02}" + text("a") + b"\xff", FLOATS)
    with path.open("ab") as file:
        file.truncate(50 << 30)
    with pytest.raises(CkptoolsError, match="unknown pickle opcode"):
        reader.read(path)


def test_a_sibling_of_this_form_is_looked_at(tmp_path, monkeypatch):
    monkeypatch.setattr(limits, "MAX_RANKS", 1)
    for rank in range(2):
        old({"w": BASE}, tmp_path / f"rank{rank}.pt")
    assert [f.status for f in ckptools.open(tmp_path / "rank0.pt").files] == ["read", "seen"]
    (tmp_path / "rank1.pt").write_bytes((tmp_path / "rank1.pt").read_bytes()[:50])
    (problem,) = ckptools.open(tmp_path / "rank0.pt").problems
    assert (problem.code, problem.rank) == ("CK002", 1) and "cut short" in problem.message
