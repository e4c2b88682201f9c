"""DTensors: where torch puts every element, on every mesh, and forged ones."""

from __future__ import annotations

from inspect import signature
from itertools import product
from math import prod

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, _dtensor_spec, _utils, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard

import ckptools
from ckptools.errors import ReadError
from ckptools.model.cover import cover
from ckptools.model.regions import grid_boxes
from ckptools.model.shards import Shard as Piece
from ckptools.model.shards import in_rank_order
from ckptools.model.tree import tensors_in
from ckptools.pickles import reader
from ckptools.pickles.classes.sharded import DTensorLayout, Placement, _all_shards, _spans, local_runs
from ckptools.pickles.machine import Machine
from ckptools.pickles.objects import Mesh
from tests.fake_world import fake_group
from tests.pickles.forge import contradiction, number, one_line, storage, tensor, text, with_pickle
from tests.torch_engine.test_describe import assert_both_ways_agree
from tests.truth import FIXTURES
from tests.versions import TORCH

# -- the rule -----------------------------------------------------------------------------------------------------

meshes = st.lists(st.integers(1, 4), min_size=1, max_size=3)
shapes = st.lists(st.integers(0, 11), min_size=1, max_size=3)


@st.composite
def layouts(draw, strided):
    """A shape, a mesh, and a placement for every mesh dimension."""
    shape, mesh = draw(shapes), draw(meshes)
    dims = st.integers(0, len(shape) - 1)
    kinds = [st.just(Placement("Replicate")), dims.map(lambda dim: Placement("Shard", dim))]
    if strided:
        kinds.append(st.tuples(dims, st.integers(1, 4)).map(lambda cut: Placement("_StridedShard", *cut)))
    return tuple(shape), tuple(mesh), tuple(draw(st.one_of(kinds)) for _ in mesh)


def brute(shape, sizes, coordinate, placements):
    """The same with lists of every index, cut by torch.chunk."""
    lists = [torch.arange(n) for n in shape]
    for size, c, placement in zip(sizes, coordinate, placements, strict=True):
        indices = lists[placement.dim]
        if placement.kind == "Replicate":
            continue
        pieces = split(indices, placement.split_factor if placement.kind == "_StridedShard" else 1)
        lists[placement.dim] = torch.cat([split(piece, size)[c] for piece in pieces])
    return [x.tolist() for x in lists]


def split(indices, parts):
    chunks = list(indices.chunk(parts)) if len(indices) else []
    return chunks + [indices[:0]] * (parts - len(chunks))


def indices_of(runs):
    return [i for start, n in runs for i in range(start, start + n)]


@pytest.mark.slow
@settings(max_examples=300, deadline=None)
@given(layout=layouts(strided=True))
def test_every_rank_holds_the_indices_that_torch_chunk_gives_it(layout):
    shape, mesh, placements = layout
    for coordinate in product(*map(range, mesh)):
        runs = local_runs(shape, mesh, coordinate, placements)
        assert [indices_of(r) for r in runs] == brute(shape, mesh, coordinate, placements)


@pytest.mark.slow
@settings(max_examples=200, deadline=None)
@given(layout=layouts(strided=False))
def test_plain_shards_are_where_torch_computes_them(layout):
    shape, mesh, placements = layout
    compute = getattr(_utils, "_compute_local_shape_and_global_offset", None)
    if compute is None:
        pytest.skip(f"{TORCH} has no _compute_local_shape_and_global_offset")
    theirs = [Shard(p.dim) if p.kind == "Shard" else Replicate() for p in placements]
    for coordinate in product(*map(range, mesh)):
        runs = local_runs(shape, mesh, coordinate, placements)
        size, offset = compute(shape, mesh, list(coordinate), theirs)
        assert tuple(sum(n for _, n in r) for r in runs) == size
        if prod(size):
            assert tuple(r[0][0] for r in runs) == offset


@pytest.mark.slow
@settings(max_examples=200, deadline=None)
@given(layout=layouts(strided=True))
def test_the_boxes_of_all_ranks_cover_the_tensor_once_per_replica(layout):
    shape, mesh, placements = layout
    copies = prod(n for n, p in zip(mesh, placements, strict=True) if p.kind == "Replicate")
    boxes = [b for c in product(*map(range, mesh)) for b, _ in grid_boxes(local_runs(shape, mesh, c, placements))]
    assert sum(b.numel for b in boxes) == copies * prod(shape)
    assert cover(shape, dict.fromkeys(boxes)).missing == 0


# -- real DTensors, cut by torch itself ---------------------------------------------------------------------------

FULL = torch.arange(77.0).reshape(11, 7)
LAYOUTS = {
    "rows over 4": ((4,), [Shard(0)]),
    "columns over 3": ((3,), [Shard(1)]),
    "fewer rows than ranks": ((16,), [Shard(0)]),
    "replicated": ((2,), [Replicate()]),
    "HSDP": ((2, 3), [Replicate(), Shard(0)]),
    "FSDP and TP": ((2, 3), [Shard(0), Shard(1)]),
    "twice along one dimension": ((2, 3), [Shard(0), Shard(0)]),
    "three dimensions": ((2, 2, 2), [Shard(1), Replicate(), Shard(0)]),
}


def save_ranks(folder, mesh_shape, make):
    """One file per rank with what `make(mesh)` gives there."""
    world = prod(mesh_shape)
    for rank in range(world):
        with fake_group(rank, world):
            mesh = init_device_mesh("cpu", mesh_shape, mesh_dim_names=tuple("abc"[: len(mesh_shape)]))
            torch.save({"model": make(mesh)}, folder / f"rank{rank}.pt")
    return folder / "rank0.pt"


def distributed(mesh, placements):
    if "src_data_rank" not in signature(distribute_tensor).parameters:
        pytest.skip(f"{TORCH} has no src_data_rank")
    return distribute_tensor(FULL, mesh, placements, src_data_rank=None)


@pytest.mark.parametrize(("mesh", "placements"), LAYOUTS.values(), ids=LAYOUTS)
def test_what_torch_cuts_is_put_together_again(tmp_path, mesh, placements):
    path = save_ranks(tmp_path, mesh, lambda m: {"w": distributed(m, placements), "b": torch.ones(2)})
    ck = ckptools.open(path, all_ranks=True)
    assert ck.whole and ck.world_size.value == prod(mesh)
    assert torch.equal(ck.model["w"].load(), FULL)
    assert torch.equal(ckptools.open(path).model["w"].load(), FULL)
    assert torch.equal(ck.model["w"][3:9, 2], FULL[3:9, 2])


@pytest.mark.parametrize(("mesh", "placements"), LAYOUTS.values(), ids=LAYOUTS)
def test_each_rank_reads_back_its_own_local_tensor(tmp_path, mesh, placements):
    locals_ = {}

    def make(m):
        value = distributed(m, placements)
        locals_[m.get_rank()] = value.to_local().clone()
        return {"w": value, "b": torch.ones(2)}

    ck = ckptools.open(save_ranks(tmp_path, mesh, make), all_ranks=True)
    for rank, local in locals_.items():
        if local.numel():
            assert torch.equal(ck.model["w"].load(rank=rank), local)


@pytest.mark.parametrize("name", "ab")
def test_a_slice_of_a_mesh_is_put_together_from_its_own_ranks(tmp_path, name):
    path = save_ranks(tmp_path, (2, 3), lambda m: {"w": distributed(m[name], [Shard(0)]), "b": torch.ones(2)})
    saved = reader.read(path)
    assert saved.claims == {(0, 6)}
    ranks = {s.rank for _, t in tensors_in(saved.tree) for s in t.shards if t.sharded}
    assert ranks == ({0, 3} if name == "a" else {0, 1, 2})
    assert torch.equal(ckptools.open(path, all_ranks=True).model["w"].load(), FULL)


def test_a_flattened_mesh_is_put_together(tmp_path):
    path = save_ranks(tmp_path, (2, 2), lambda m: {"w": distributed(m._flatten("ab"), [Shard(0)]), "b": torch.ones(2)})
    assert torch.equal(ckptools.open(path, all_ranks=True).model["w"].load(), FULL)


@pytest.mark.parametrize(
    ("mesh", "cut", "holding"),
    [
        ((2, 2, 2), lambda m: m["a", "c"]._flatten("ac"), {0, 1, 4, 5}),
        ((2, 1, 2), lambda m: m["b", "c"]._flatten("bc"), {0, 1}),
        ((2, 1, 2), lambda m: m["a", "b"]._flatten("ab"), {0, 2}),
    ],
    ids=["the first and the last", "one of one rank", "of one rank, the last"],
)
def test_dimensions_of_a_larger_mesh_that_were_flattened_are_put_together(tmp_path, mesh, cut, holding):
    path = save_ranks(tmp_path, mesh, lambda m: {"w": distributed(cut(m), [Shard(0)]), "b": torch.ones(2)})
    assert {s.rank for s in reader.read(path).tree["model"]["w"].shards} == holding
    assert torch.equal(ckptools.open(path, all_ranks=True).model["w"].load(), FULL)


def test_strided_shards_scatter_rows_and_are_put_together(tmp_path):
    placements = [_StridedShard(0, split_factor=3), Shard(0)]
    described = (Placement("_StridedShard", 0, 3), Placement("Shard", 0))

    def make(mesh):
        rows, columns = brute(FULL.shape, (2, 3), mesh.get_coordinate(), described)
        local = FULL[rows][:, columns]
        return {"w": DTensor.from_local(local, mesh, placements, run_check=False, shape=FULL.shape, stride=(7, 1))}

    ck = ckptools.open(save_ranks(tmp_path, (2, 3), make), all_ranks=True)
    assert ck.model["w"].placements == ("_StridedShard(0, sf=3)", "Shard(0)")
    assert torch.equal(ck.model["w"].load(), FULL)


def ordered_last_first(mesh):
    """Rows that the last mesh dimension cuts first."""
    placements, meta = (Shard(0),) * mesh.ndim, _dtensor_spec.TensorMeta(FULL.shape, FULL.stride(), FULL.dtype)
    rows = torch.arange(len(FULL))
    for n in reversed(range(mesh.ndim)):
        rows = split(rows, mesh.size(n))[mesh.get_coordinate()[n]]
    order = (_dtensor_spec.ShardOrderEntry(0, tuple(reversed(range(mesh.ndim)))),)
    spec = _dtensor_spec.DTensorSpec(mesh, placements, meta, shard_order=order)
    return DTensor(FULL[rows], spec, requires_grad=False)


@pytest.mark.skipif(not hasattr(_dtensor_spec, "ShardOrderEntry"), reason=f"{TORCH} has no order of shards")
@pytest.mark.parametrize(("mesh", "placed"), [((2, 3), (1, 0)), ((2, 2, 2), (2, 1, 0))])
def test_a_dimension_that_mesh_dimensions_cut_in_another_order_is_put_together(tmp_path, mesh, placed):
    path = save_ranks(tmp_path, mesh, lambda m: {"w": ordered_last_first(m), "b": torch.ones(2)})
    ck = ckptools.open(path, all_ranks=True)
    assert ck.whole and torch.equal(ck.model["w"].load(), FULL)
    assert ck.model["w"].placements == tuple(f"Shard(0)[{turn}]" for turn in placed)
    assert_both_ways_agree(path)


@pytest.mark.skipif(not hasattr(_dtensor_spec, "ShardOrderEntry"), reason=f"{TORCH} has no order of shards")
def test_an_order_that_a_split_factor_says_too_counts_once(tmp_path):
    """As torch 2.10 wrote it; the rows of two ranks would change places without a sign, as sizes are the same."""
    placements, full = (_StridedShard(0, split_factor=2), Shard(0)), torch.arange(16.0).reshape(8, 2)

    def make(mesh):
        rows, columns = brute(
            full.shape, (2, 2), mesh.get_coordinate(), (Placement("_StridedShard", 0, 2), Placement("Shard", 0))
        )
        w = DTensor.from_local(full[rows][:, columns], mesh, placements, run_check=False, shape=(8, 2), stride=(2, 1))
        w._spec.shard_order = (_dtensor_spec.ShardOrderEntry(0, (1, 0)),)
        return {"w": w}

    ck = ckptools.open(save_ranks(tmp_path, (2, 2), make), all_ranks=True)
    assert ck.model["w"].placements == ("_StridedShard(0, sf=2)", "Shard(0)")
    assert torch.equal(ck.model["w"].load(), full)


@pytest.mark.parametrize("reduce_op", ["sum", "avg"])
def test_partial_is_named_and_refused(tmp_path, reduce_op):
    path = save_ranks(
        tmp_path, (2,), lambda m: {"w": DTensor.from_local(FULL, m, [Partial(reduce_op)], run_check=False)}
    )
    ck = ckptools.open(path, all_ranks=True)
    assert ck.model["w"].placements == (f"Partial({reduce_op})",)
    with pytest.raises(ReadError, match="Partial"):
        ck.model["w"].load()
    assert any(p.code == "CK106" for p in ck.problems)


@pytest.mark.parametrize(
    "name", ["torch2.13.0-fsdp2-tp2x2-w4", "torch2.2.2-fsdp1-dtensor-w3", "torch2.6.0-fsdp1-hsdp2x2-w4"]
)
def test_every_rank_of_a_fixture_lists_the_same_boxes(name):
    ranks = [reader.read(p) for p in sorted((FIXTURES / name).glob("rank*.pt"))]
    assert [saved.claims for saved in ranks] == [{(r, len(ranks))} for r in range(len(ranks))]
    lists = [
        {p: {(s.box, s.rank) for s in t.shards} for p, t in tensors_in(saved.tree) if t.sharded} for saved in ranks
    ]
    own = [{s.rank for _, t in tensors_in(saved.tree) if t.sharded for s in t.found} for saved in ranks]
    assert own == [{r} for r in range(len(ranks))]
    assert all({b for b, _ in boxes} == {b for b, _ in lists[0][p]} for other in lists for p, boxes in other.items())


# -- forged -------------------------------------------------------------------------------------------------------


def dict_of(**fields):
    return b"}(" + b"".join(text(k) + v for k, v in fields.items()) + b"u"


def thing(name, **fields):
    return f"ct\n{name}\n".encode() + b")\x81" + dict_of(**fields) + b"b"


def ints(*values):
    return b"](" + b"".join(map(number, values)) + b"e"


def shard(dim=0):
    return thing("Shard", dim=number(dim))


def mesh_of(sizes=(2,), coordinate=(0,), ranks=(0, 1), **more):
    axes = b"](" + b"".join(thing("_FlatLayout", shape=ints(n), stride=ints(1)) for n in sizes) + b"e"
    layout = thing("_MeshLayout", axes=axes)
    known = {"_layout": layout, "_coordinate_on_dim": ints(*coordinate), "_flatten_rank_map": ints(*ranks)}
    return thing("DeviceMesh", **{**known, "_rank": number(0), **more})


def made(size=(4,), placements=None, mesh=None, local=None, state=None, order=b"N"):
    name = b"ctorch.distributed.tensor\nDTensor\n"
    placed = b"](" + (shard() if placements is None else placements) + b"e"
    spec = thing("DTensorSpec", mesh=mesh or mesh_of(), placements=placed, shard_order=order)
    held = state or b"N" + dict_of(_local_tensor=local or tensor((2,)), _spec=spec) + b"\x86"
    inner = b"(" + name + b"ctorch\nfloat32\n(" + b"".join(map(number, size)) + b"tNNNN\x89t"
    return (
        b"ctorch._tensor\n_rebuild_from_type_v2\n(ctorch._utils\n_rebuild_wrapper_subclass\n"
        + name
        + inner
        + held
        + b"tR."
    )


def test_a_hand_made_dtensor_is_read(tmp_path):
    found = reader.read(with_pickle(tmp_path / "d.pt", made(), bytes(16))).tree
    assert [(s.box.offsets, s.box.sizes, s.rank) for s in found.shards] == [((0,), (2,), 0), ((2,), (2,), 1)]


OLD = {"mesh": tensor((2,), of=storage("1", kind="IntStorage")), "_coordinate_on_dim": ints(1)}
"""A mesh as torch wrote it up to 2.8."""


@pytest.mark.parametrize(
    ("ranks", "world", "at_least"), [((0, 1), 2, False), ((0, 2), 3, True), ((5, 1), 6, True), ((1, 0), 2, False)]
)
def test_the_largest_rank_of_an_older_slice_is_no_world_size(tmp_path, ranks, world, at_least):
    mesh = thing("DeviceMesh", **OLD, _flatten_mesh_list=ints(*ranks))
    saved = reader.read(with_pickle(tmp_path / "d.pt", made(mesh=mesh), bytes(16), bytes(16)))
    assert (saved.claims, saved.at_least) == ({(ranks[1], world)}, at_least)
    assert saved.tree.world_size == (None if at_least else world)


@pytest.mark.parametrize("slices", [((2, 0), (1, 3)), ((1, 0), (2, 3))], ids=str)
def test_rank_files_of_slices_alone_do_not_contradict_each_other(tmp_path, slices):
    for rank, ranks in zip((0, 3), slices, strict=True):
        mesh = thing("DeviceMesh", **OLD, _flatten_mesh_list=ints(*ranks))
        with_pickle(tmp_path / f"rank{rank}.pt", made(mesh=mesh), bytes(16), bytes(16))
    ck = ckptools.open(tmp_path, all_ranks=True)
    assert (ck.world_size.value, [p.code for p in ck.problems]) == (4, ["CK001", "CK001"])


def test_a_slice_that_reaches_beyond_what_is_here_tells_what_the_world_has_at_least(tmp_path):
    mesh = thing("DeviceMesh", **OLD, _flatten_mesh_list=ints(0, 6))
    world = ckptools.open(with_pickle(tmp_path / "rank6.pt", made(mesh=mesh), bytes(16), bytes(16))).world_size
    assert (world.value, world.sources) == (7, ("at least, by its layout",))


def test_an_unknown_placement_is_named_and_its_text_stays_on_one_line(tmp_path):
    strange = made(placements=thing("Spiral\x1b[2J"))
    found = reader.read(with_pickle(tmp_path / "d.pt", strange, bytes(16))).tree
    assert found.shards == () and "placement" in found.note and found.note.isprintable()


ODD = {
    "no spec": {"state": b"N" + dict_of(_local_tensor=tensor((2,))) + b"\x86"},
    "no local tensor": {"local": b"N"},
    "a local tensor of another size": {"local": tensor((3,))},
    "a local tensor of another dtype": {"local": tensor((2,), of=storage(kind="IntStorage"))},
    "a dim outside": {"placements": shard(1)},
    "a negative dim": {"placements": shard(-1)},
    "a dim of 300 bits": {"placements": shard(1 << 300)},
    "a dim that is a text": {"placements": thing("Shard", dim=text("0"))},
    "two placements on one mesh dimension": {"placements": shard() + shard()},
    "no placements": {"placements": b""},
    "a split factor of none": {"placements": thing("_StridedShard", dim=number(0), split_factor=number(0))},
    "a split factor of 2^62": {
        "size": (1 << 62,),
        "placements": thing("_StridedShard", dim=number(0), split_factor=number(1 << 62)),
    },
    "pieces scattered over 2^40 runs": {
        "size": (1 << 50,),
        "mesh": mesh_of((1, 1, 1), (0, 0, 0), (0,)),
        "placements": thing("_StridedShard", dim=number(0), split_factor=number(1 << 14)) * 3,
    },
    "a mesh of 2^40 ranks": {"mesh": mesh_of((1 << 20, 1 << 20), (0, 0)), "placements": shard() * 2},
    "a mesh of a million dimensions": {"mesh": mesh_of((1,) * 1000, (0,) * 1000), "placements": shard()},
    "a mesh layout of texts": {"mesh": mesh_of(_layout=thing("_MeshLayout", shape=text("2"), stride=text("1")))},
    "a mesh layout of a shape alone": {"mesh": mesh_of(_layout=thing("_MeshLayout", shape=ints(2)))},
    "a mesh without layout": {"mesh": thing("DeviceMesh")},
    "a mesh of another form": {"mesh": thing("DeviceMesh", mesh=text("2"))},
    "a coordinate outside": {"mesh": mesh_of(coordinate=(2,))},
    "an order of shards that is a number": {"order": number(0)},
    "an order of shards without mesh dimensions": {"order": b"]" + ints(0) + b"a"},
    "an order of shards by no such mesh dimension": {"order": b"](" + number(0) + b"(" + number(1) + b"t\x86e"},
    "an order of shards that has one twice": {"order": b"](" + number(0) + b"(" + number(0) * 2 + b"t\x86e"},
    "a coordinate that is a text": {"mesh": mesh_of(_coordinate_on_dim=b"]" + text("0") + b"a")},
}  # fmt: skip


@pytest.mark.parametrize("odd", ODD.values(), ids=ODD)
def test_a_dtensor_that_contradicts_itself_says_so_in_one_line(tmp_path, odd):
    assert contradiction(with_pickle(tmp_path / "o.pt", made(**odd), bytes(16)))


@pytest.mark.parametrize(
    ("odd", "why"),
    [
        ("a dim outside", "of 1 dimensions is sharded along 1"),
        ("a split factor of 2^62", "split factor 4611686018427387904"),
        ("pieces scattered over 2^40 runs", "scattered over 4398046511104 runs"),
    ],
)
def test_a_placement_that_cannot_be_is_named_before_it_is_worked_out(tmp_path, odd, why):
    assert why in contradiction(with_pickle(tmp_path / "o.pt", made(**ODD[odd]), bytes(16)))


def test_a_mesh_dimension_without_a_placement_is_named(tmp_path):
    odd = made(mesh=mesh_of((2, 1), (0, 0)))
    assert "1 placements on a mesh of 2 dimensions" in contradiction(with_pickle(tmp_path / "o.pt", odd, bytes(16)))


def test_many_big_meshes_are_refused_before_they_are_listed(tmp_path):
    mesh = mesh_of((1 << 20,), (0,), (0,))
    many = b"".join(made((n,), mesh=b"h\x01", local=tensor((1,)))[:-1] for n in range(2, 100))
    assert "unfold" in one_line(with_pickle(tmp_path / "m.pt", mesh + b"q\x010](" + many + b"e.", bytes(16)))


@pytest.mark.parametrize("home", ["torch.distributed._tensor.api", "torch.distributed.tensor"])
def test_both_spellings_of_the_class_are_read(home):
    data = made().replace(b"ctorch.distributed.tensor\nDTensor", b"c" + home.encode() + b"\nDTensor")
    assert Machine(data).load().kind == "dtensor"


def test_views_of_one_storage_on_every_rank_are_no_copies(tmp_path):
    """As `distribute_tensor(..., src_data_rank=None)` of torch 2.9 leaves them."""
    values = torch.arange(32.0)
    for rank in (0, 1):
        mesh = mesh_of(_rank=number(rank), _coordinate_on_dim=ints(rank))
        local = tensor((16,), (1,), 16 * rank, storage(numel=32))
        data = b"\x80\x02}" + text("model") + b"}" + text("w") + made((32,), mesh=mesh, local=local)[:-1] + b"ss."
        with_pickle(tmp_path / f"rank{rank}.pt", data, values.numpy().tobytes())
    ck = ckptools.open(tmp_path, all_ranks=True)
    assert ck.problems == () and ck.whole and torch.equal(ck.model["w"].load(), values)


OLDER = "torch.distributed._tensor.api"


@pytest.mark.parametrize(
    ("home", "last", "told"),
    [(OLDER, 0, True), (OLDER, 1, False), ("torch.distributed.tensor", 0, False)],
)
def test_the_order_in_which_an_older_torch_cut_a_dimension_twice_is_called_unsure(tmp_path, home, last, told):
    axes = b"](" + b"".join(thing("_FlatLayout", shape=ints(2), stride=ints(n)) for n in (2, 1)) + b"e"
    for rank in range(4):
        layout = {"_layout": thing("_MeshLayout", axes=axes), "_rank": number(rank)}
        mesh = mesh_of((2, 2), divmod(rank, 2), range(4), **layout)
        cut = made((4, 2), shard() + shard(last), mesh, tensor(*(((1, 2), (2, 1)) if last == 0 else ((2, 1), (1, 1)))))
        data = b"\x80\x02}" + text("model") + b"}" + text("w") + cut[:-1] + b"ss."
        with_pickle(tmp_path / f"rank{rank}.pt", data.replace(b"torch.distributed.tensor", home.encode()), bytes(16))
    ck = ckptools.open(tmp_path, all_ranks=True)
    assert [p.severity for p in ck.problems if p.code == "CK108"] == ["warning"] * told and ck.whole
    notes = " ".join(ckptools.consolidate(ck, tmp_path / "out.safetensors").notes)
    assert ("FSDP2 of torch 2.3" in notes) == told


def tuples(*parts):
    return b"(" + b"".join(parts) + b"t"


@pytest.mark.parametrize(
    ("shape", "stride", "root", "ranks"),
    [
        (number(4), number(1), 4, (0, 1, 2, 3)),
        (tuples(number(4)), tuples(number(2)), 8, (0, 2, 4, 6)),
        (tuples(tuples(number(2), number(2))), tuples(tuples(number(4), number(1))), 8, (0, 1, 4, 5)),
    ],
    ids=["flattened", "one dimension", "flattened from the first and the last of three"],
)
def test_a_mesh_layout_of_shape_and_stride_is_read(tmp_path, shape, stride, root, ranks):
    layout = thing("_MeshLayout", shape=shape, stride=stride)
    mesh = mesh_of(_layout=layout, _flatten_rank_map=ints(*range(root)))
    data = made((8,), mesh=mesh, local=tensor((2,)))
    found = reader.read(with_pickle(tmp_path / "d.pt", data, bytes(16))).tree
    assert [(s.box.offsets[0], s.rank) for s in found.shards] == list(zip((0, 2, 4, 6), ranks, strict=True))


@pytest.mark.parametrize("ranks", [(0, 1, 2), (2, 0, 1)])
@pytest.mark.parametrize("rank", [0, 1, 2, 9])
def test_shards_are_in_the_order_of_ranks_whether_or_not_the_mesh_is(ranks: tuple[int, ...], rank: int) -> None:
    at = (ranks.index(rank) if rank in ranks else 0,)
    mesh = Mesh((3,), at, rank, ranks, 10, 10)
    cells = _all_shards((6, 2), (3,), ranks, (Placement("Shard", 0, 1),))
    ordered = in_rank_order(shard for _, shards in cells for shard in shards)
    own = [Piece(cells[at[0]][1][0].box, rank, None)]
    others = [shard for coordinate, shards in cells if coordinate != at for shard in shards]
    found = DTensorLayout(cells, ordered, _spans(cells, ranks)).with_own(own, mesh)
    assert found == in_rank_order((*own, *others))


def test_ranks_that_a_mesh_names_twice_have_no_place_in_the_order_of_ranks() -> None:
    cells = _all_shards((6, 2), (3,), (1, 1, 0), (Placement("Shard", 0, 1),))
    assert _spans(cells, (1, 1, 0)) == {}
