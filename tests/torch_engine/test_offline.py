from __future__ import annotations

import io
import os
import sys
import threading
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from ckptools.errors import CkptoolsError, ForeignClassError, ReadError, UnsafePathError
from ckptools.model.tree import tensors_in
from ckptools.pickles import reader
from ckptools.torch_engine.offline import load_shard, offline
from tests.training.forked import forkserver
from tests.truth import FIXTURES, load_truth
from tests.versions import TORCH, torch_that_loads

pytestmark = pytest.mark.filterwarnings("ignore:Please use DTensor instead")

COMPOSER = FIXTURES / "composer-0.13.5-torch1.13.1-sharded-w4"
DTENSORS = (
    "torch2.2.2-fsdp1-dtensor-w3",
    "torch2.4.1-fsdp2-w3",
    "torch2.6.0-fsdp1-hsdp2x2-w4",
    "torch2.13.0-fsdp2-tp2x2-w4",
)


def held_by_torch() -> tuple[object, ...]:
    """Everything that offline() changes, as it is now."""
    methods = [
        vars(c).get(n) for c in (ShardedTensor, DeviceMesh, DTensorSpec) for n in ("__setstate__", "__getstate__")
    ]
    allowed = frozenset(torch.serialization.get_safe_globals())
    return (*methods, allowed, dist.is_initialized(), sys.excepthook, dict(os.environ))


def leaves(tree, kind):
    if isinstance(tree, kind):
        return [tree]
    inside = tree.values() if isinstance(tree, dict) else tree if isinstance(tree, (list, tuple)) else ()
    return [leaf for child in inside for leaf in leaves(child, kind)]


def test_the_lines_that_people_use_today_work():
    shard = load_shard(COMPOSER / "ep0-ba5-rank0.pt")
    assert shard["state"]["schedulers"]["LambdaLR"]["last_epoch"] == 5
    (group,) = shard["state"]["optimizers"]["DecoupledAdamW"]["param_groups"]
    assert (group["initial_lr"], group["betas"], len(group["params"])) == (0.003, (0.9, 0.95), 16)
    np.random.RandomState().set_state(shard["rng"][3]["numpy"])
    torch.Generator().set_state(shard["rng"][3]["torch"])


@pytest.mark.slow
@pytest.mark.parametrize("rank", range(4))
def test_a_sharded_tensor_works_after_the_group_is_gone(rank):
    shard = load_shard(COMPOSER / f"ep0-ba5-rank{rank}.pt")
    st = shard["state"]["model"]["model.emb.weight"]
    assert not dist.is_initialized()
    assert (st._ckptools_rank, st._ckptools_world_size) == (rank, 4)
    assert (st.dtype, st.size(), len(st.metadata().shards_metadata)) == (torch.float32, torch.Size([33, 17]), 4)
    assert [s.metadata.shard_offsets for s in st.local_shards()] == [[rank * 9, 0]]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["composer-0.13.5-torch1.13.1-sharded-w4", "torch1.13.1-fsdp1-sharded-w3"])
def test_the_local_shards_of_all_ranks_are_the_truth(name):
    truth, compared = load_truth(name), 0
    for path in sorted((FIXTURES / name).glob("*.pt")):
        shard = load_shard(path)
        model = shard["state"]["model"] if "state" in shard else shard["model"]
        for fqn, st in model.items():
            dtype, data, shape = truth.get(f"model/{fqn}", ("", b"", ()))
            for piece in leaves(st, ShardedTensor) and st.local_shards():
                whole = torch.frombuffer(bytearray(data), dtype=getattr(torch, dtype)).reshape(shape)
                places = zip(piece.metadata.shard_offsets, piece.metadata.shard_sizes, strict=True)
                assert torch.equal(piece.tensor, whole[tuple(slice(o, o + n) for o, n in places)])
                compared += 1
    assert compared > 30


def test_torch_load_works_inside():
    with offline():
        shard = torch.load(COMPOSER / "ep0-ba5-rank2.pt", map_location="cpu", weights_only=False)
    assert shard["state"]["model"]["model.emb.weight"]._ckptools_rank == 2


def test_without_it_torch_refuses_the_file():
    with pytest.raises(RuntimeError, match="process group"):
        torch.load(COMPOSER / "ep0-ba5-rank2.pt", map_location="cpu", weights_only=False)


def test_everything_is_undone_on_exit():
    before = held_by_torch()
    with offline():
        assert dist.is_initialized()
        assert held_by_torch() != before
    assert held_by_torch() == before


def test_everything_is_undone_after_an_exception():
    before = held_by_torch()
    with pytest.raises(KeyError), offline():
        load_shard(COMPOSER / "ep0-ba5-rank1.pt")["nope"]
    with pytest.raises(ReadError):
        load_shard(COMPOSER / "HOW.md")
    assert held_by_torch() == before


def test_nested_use_keeps_the_group_until_the_outer_one_ends():
    with offline():
        with offline():
            load_shard(COMPOSER / "ep0-ba5-rank1.pt")
        assert dist.is_initialized()
        load_shard(COMPOSER / "ep0-ba5-rank1.pt")
    assert not dist.is_initialized()


def test_an_existing_group_is_used_and_left_alone():
    dist.init_process_group("gloo", store=torch._C._distributed_c10d.HashStore(), world_size=1, rank=0)
    try:
        group = dist.group.WORLD
        st = load_shard(COMPOSER / "ep0-ba5-rank1.pt")["state"]["model"]["model.emb.weight"]
        assert dist.group.WORLD is group is st._process_group
    finally:
        dist.destroy_process_group()


def test_a_group_that_the_user_ended_is_not_ended_again():
    with offline():
        dist.destroy_process_group()
    assert not dist.is_initialized()


@pytest.mark.slow
def test_threads_share_one_group():
    before, found = held_by_torch(), []

    def work(rank: int) -> None:
        st = load_shard(COMPOSER / f"ep0-ba5-rank{rank}.pt")["state"]["model"]["model.emb.weight"]
        found.append(st._ckptools_rank)

    threads = [threading.Thread(target=work, args=(i % 4,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(found) == [0, 0, 1, 1, 2, 2, 3, 3]
    assert held_by_torch() == before


def load_once_both_are_here(meeting):
    with offline():
        meeting.wait(timeout=60)
        load_shard(COMPOSER / "ep0-ba5-rank1.pt")
        meeting.wait(timeout=60)


@pytest.mark.slow
def test_two_processes_at_once_do_not_collide():
    meeting = forkserver().Barrier(2)
    both = [forkserver().Process(target=load_once_both_are_here, args=(meeting,)) for _ in range(2)]
    for process in both:
        process.start()
    for process in both:
        process.join()
    assert [process.exitcode for process in both] == [0, 0]


def test_a_sharded_tensor_saved_again_says_who_saved_it_first():
    buffer = io.BytesIO()
    with offline():
        shard = load_shard(COMPOSER / "ep0-ba5-rank3.pt")
        torch.save(shard["state"]["model"], buffer)
        again = torch.load(io.BytesIO(buffer.getvalue()), weights_only=False)
    st = again["model.emb.weight"]
    assert (st._ckptools_rank, st._ckptools_world_size, type(st._process_group).__name__) == (3, 4, "ProcessGroup")


# -- DTensor -------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("name", DTENSORS)
@pytest.mark.parametrize("trust", [False, True])
def test_a_dtensor_of_any_torch_works_in_this_one(name, trust):
    torch_that_loads(FIXTURES / name / "rank1.pt")
    dtensors = leaves(load_shard(FIXTURES / name / "rank1.pt", trust=trust), DTensor)
    assert len(dtensors) > 20
    for d in dtensors:
        mesh = d.device_mesh
        assert (mesh._ckptools_rank, 1 in mesh.mesh.tolist() or mesh.ndim > 1) == (1, True)
        assert int(mesh.mesh[tuple(mesh.get_coordinate())]) == 1
        assert "DTensor" in repr(d)
        assert torch.equal((d + 1).to_local(), d.to_local() + 1)
        assert hash(d._spec) == hash(d.detach()._spec)


@pytest.mark.parametrize("name", DTENSORS)
def test_torch_itself_places_a_dtensor_where_the_inert_reader_does(name):
    path = FIXTURES / name / "rank1.pt"
    torch_that_loads(path)
    loaded = leaves(load_shard(path), DTensor)
    inert = [t for _, t in tensors_in(reader.read(path).tree) if t.kind == "dtensor"]
    assert len(loaded) == len(inert)
    for d, t in zip(loaded, inert, strict=True):
        own = [s.box for s in t.shards if s.source is not None]
        sizes, offsets = compute_local_shape_and_global_offset(d.shape, d.device_mesh, d.placements)
        assert [(b.sizes, b.offsets) for b in own[:1]] == ([(tuple(sizes), tuple(offsets))] if 0 not in sizes else [])


def test_a_slice_of_a_larger_mesh_keeps_its_own_ranks():
    torch_that_loads(FIXTURES / DTENSORS[3] / "rank1.pt")
    meshes = [d.device_mesh for d in leaves(load_shard(FIXTURES / DTENSORS[3] / "rank1.pt"), DTensor)]
    (dp,) = {tuple(m.mesh.tolist()) for m in meshes if m.mesh_dim_names == ("dp",)}
    assert dp == (1, 3)
    assert {m._ckptools_world_size for m in meshes} == {4}


def test_what_needs_the_other_ranks_is_refused_in_words():
    d = leaves(load_shard(FIXTURES / DTENSORS[1] / "rank1.pt"), DTensor)[0]
    with offline(), pytest.raises(RuntimeError, match="loaded offline by ckptools"):
        d.full_tensor()


@pytest.mark.parametrize(
    ("shape", "stride", "place", "ranks"),
    [
        ((2, 2), (2, 1), (1, 0), [[0, 1], [2, 3]]),
        (4, 1, (2,), [0, 1, 2, 3]),
        (((2, 2),), ((4, 1),), (0,), [2, 3, 6, 7]),
    ],
    ids=["two dimensions", "flattened", "flattened from the first and the last of three"],
)
def test_a_mesh_layout_of_shape_and_stride_is_read(shape, stride, place, ranks):
    layouts = pytest.importorskip("torch.distributed._mesh_layout", reason=f"{TORCH} has no _mesh_layout")
    layout = layouts._MeshLayout.__new__(layouts._MeshLayout)
    layout.__dict__.update(shape=shape, stride=stride)
    root = tuple(range(8 if 7 in ranks else 4))
    state = {"_device_type": "cpu", "_layout": layout, "_flatten_rank_map": root, "_rank": 2}
    mesh = DeviceMesh.__new__(DeviceMesh)
    names = tuple("ab"[: len(place)])
    with offline():
        mesh.__setstate__({**state, "_mesh_dim_names": names, "_coordinate_on_dim": place})
    assert (mesh.mesh.tolist(), mesh.get_coordinate(), mesh._ckptools_world_size) == (ranks, place, 4)


# -- files ---------------------------------------------------------------------------------------------------


def test_the_file_is_mapped_not_read(tmp_path):
    path = tmp_path / "mapped.pt"
    torch.save({"w": torch.arange(1000)}, path)
    shard = load_shard(path)
    if sys.platform == "linux":
        assert str(path) in Path("/proc/self/maps").read_text()
    assert shard["w"].sum() == 499500


def test_tensors_go_where_map_location_says():
    torch_that_loads(FIXTURES / DTENSORS[3] / "rank0.pt")
    shard = load_shard(FIXTURES / DTENSORS[3] / "rank0.pt", map_location="meta")
    d = leaves(shard, DTensor)[0]
    assert (d.to_local().device.type, d.device_mesh.size()) == ("meta", 2)


def test_a_file_of_before_torch_1_6_is_loaded(tmp_path):
    path = tmp_path / "old.pt"
    torch.save({"w": torch.arange(5), "n": 3}, path, _use_new_zipfile_serialization=False)
    assert load_shard(path)["w"].tolist() == [0, 1, 2, 3, 4]
    torch.save({"w": torch.arange(5), "x": os.getcwd}, path, _use_new_zipfile_serialization=False)
    with pytest.raises(ForeignClassError) as caught:
        load_shard(path)
    assert caught.value.names == ("posix.getcwd",) or sys.platform == "win32"


def test_torch_is_not_heard():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        load_shard(FIXTURES / "torch2.0.1-fsdp1-hsdp2x2-st-w4" / "rank1.pt")
        load_shard(FIXTURES / "lightning-trainer-ddp" / "ckpt" / "last.ckpt")


def bad_files(folder: Path) -> dict[str, bytes]:
    whole = (COMPOSER / "ep0-ba5-rank0.pt").read_bytes()
    old = io.BytesIO()
    torch.save({"w": torch.arange(5)}, old, _use_new_zipfile_serialization=False)
    return {
        "cut": whole[: len(whole) // 2],
        "empty": b"",
        "text": b"not a checkpoint at all\n" * 20,
        "zip": b"PK\3\4" + bytes(200),
        "pickle": b"\x80\x02}q\x00.",
        "old_cut": old.getvalue()[:60],
        "old_cut_later": old.getvalue()[:-10],
    }


@pytest.mark.parametrize("trust", [False, True])
@pytest.mark.parametrize("kind", sorted(bad_files(Path())))
def test_a_bad_file_is_one_line_that_names_it(tmp_path, kind, trust):
    path = tmp_path / f"{kind}.pt"
    path.write_bytes(bad_files(tmp_path)[kind])
    with pytest.raises(ReadError) as caught:
        load_shard(path, trust=trust)
    message = str(caught.value)
    assert message.startswith(f"{path}: ") and "\n" not in message and "weights_only" not in message
    assert len(message) < len(str(path)) + 260


def test_what_is_no_file_is_one_line(tmp_path):
    with pytest.raises(ReadError, match="no such file"):
        load_shard(tmp_path / "missing.pt", trust=True)
    with pytest.raises(UnsafePathError, match="not a regular file"):
        load_shard(tmp_path)


def test_a_pickle_that_torch_cannot_read_safely_is_one_line(tmp_path):
    path = tmp_path / "protocol4.pt"
    torch.save({"a": 1}, path, pickle_protocol=4)
    with pytest.raises(CkptoolsError) as caught:
        load_shard(path)
    assert (
        str(caught.value)
        == f"{path}: torch cannot load it: Unsupported operand 149, in trusted files only (trust=True)"
    )
    assert load_shard(path, trust=True) == {"a": 1}
