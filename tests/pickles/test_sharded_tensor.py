"""ShardedTensors of torch 1.13 to 2.13, and forged ones."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptools.model.cover import cover
from ckptools.model.tree import tensors_in
from ckptools.pickles import reader
from ckptools.pickles.machine import Machine
from ckptools.pickles.machine_state import PickleError
from tests.pickles.forge import contradiction, number, tensor, text, with_pickle
from tests.truth import FIXTURES

NAMES = (
    "composer-0.13.5-torch1.13.1-sharded-w4",
    "torch1.13.1-fsdp1-sharded-w3",
    "torch2.0.1-fsdp1-hsdp2x2-st-w4",
    "torch2.13.0-fsdp1-sharded-w4",
)


def ranks_of(name):
    return [reader.read(p) for p in sorted((FIXTURES / name).glob("*rank*.pt"))]


def sharded(saved):
    return {path: t for path, t in tensors_in(saved.tree) if t.kind == "sharded_tensor"}


@pytest.mark.parametrize("name", NAMES)
def test_every_rank_knows_its_rank_and_world(name):
    claims = [saved.claims for saved in ranks_of(name)]
    assert claims == [{(rank, len(claims))} for rank in range(len(claims))]


@pytest.mark.parametrize("name", [n for n in NAMES if "hsdp" not in n])
def test_boxes_follow_torchs_chunk_rule_and_name_their_owner(name):
    import torch

    ranks = ranks_of(name)
    for tensor_ in sharded(ranks[0]).values():
        if len(tensor_.shape) == 0:
            continue
        starts, at = {}, 0
        for rank, chunk in enumerate(torch.empty(tensor_.shape[0]).chunk(len(ranks))):
            starts[rank] = (at, len(chunk))
            at += len(chunk)
        assert {s.rank: (s.box.offsets[0], s.box.sizes[0]) for s in tensor_.shards} == starts


@pytest.mark.parametrize("name", NAMES)
def test_the_boxes_of_one_file_cover_the_tensor_exactly(name):
    for tensor_ in sharded(ranks_of(name)[0]).values():
        assert cover(tensor_.shape, [s.box for s in tensor_.shards]).exact


@pytest.mark.parametrize("name", [n for n in NAMES if "hsdp" not in n])
def test_a_rank_has_the_bytes_of_its_own_shards_and_of_no_other(name):
    for rank, saved in enumerate(ranks_of(name)):
        for tensor_ in sharded(saved).values():
            assert {s.rank for s in tensor_.found} <= {rank}
            assert all(s.source.shape == s.box.sizes for s in tensor_.found)


def test_some_rank_owns_nothing_of_a_small_tensor():
    owners = [len(t.found) for saved in ranks_of(NAMES[0]) for t in sharded(saved).values()]
    assert set(owners) == {0, 1}


def test_under_hsdp_two_ranks_hold_the_same_box_and_only_the_file_tells_which():
    first, _, third, _ = (sharded(s) for s in ranks_of("torch2.0.1-fsdp1-hsdp2x2-st-w4"))
    for path, one in first.items():
        assert [s.box for s in one.found] == [s.box for s in third[path].found]
        assert {s.rank for s in one.shards} <= {None, 0} and {s.rank for s in third[path].shards} <= {None, 2}


# -- forged -------------------------------------------------------------------------------------------------------


def dict_of(**fields):
    return b"}(" + b"".join(text(k) + v for k, v in fields.items()) + b"u"


def ints(values):
    return b"](" + b"".join(map(number, values)) + b"e"


def entry(offsets, sizes, rank=0):
    placement = b"cr\n_remote_device\n)\x81" + dict_of(_rank=number(rank)) + b"b"
    state = dict_of(shard_offsets=ints(offsets), shard_sizes=ints(sizes), placement=placement)
    return b"cm\nShardMetadata\n)\x81N" + state + b"\x86b"


def local(offsets, sizes, held):
    return b"cs\nShard\n)\x81" + dict_of(tensor=held, metadata=entry(offsets, sizes)) + b"b"


def made(size=(4,), listed=b"", own=b"", rank=0, world=2, dtype=b"ctorch\nfloat32\n", state=None, listing=None):
    """A ShardedTensor as torch pickles it."""
    name = b"ctorch.distributed._shard.sharded_tensor.api\nShardedTensor\n"
    shape = b"(" + b"".join(map(number, size)) + b"t"
    meta = b"cm\nShardedTensorMetadata\n)\x81" + dict_of(shards_metadata=listing or b"](" + listed + b"e") + b"b"
    names = ("local_rank", "global_rank", "local_world_size", "global_world_size")
    values = (number(rank), number(rank), number(world), number(world))
    group = b"cm\nProcessGroupState\n)\x81" + dict_of(**dict(zip(names, values, strict=True))) + b"b"
    told = state or b"(](" + own + b"e" + meta + group + b"NNt"
    inner = b"(" + name + dtype + shape + b"NNNN\x88t"
    return (
        b"ctorch._tensor\n_rebuild_from_type_v2\n(ctorch._utils\n_rebuild_wrapper_subclass\n"
        + name
        + inner
        + told
        + b"tR."
    )


HALF = entry([0], [2]) + entry([2], [2], 1)


def test_a_sharded_tensor_is_read_and_knows_that_it_wants_gradients(tmp_path):
    path = with_pickle(tmp_path / "s.pt", made(listed=HALF, own=local([0], [2], tensor((2,)))), bytes(16))
    found = reader.read(path).tree
    assert (found.kind, found.shape, found.world_size, found.requires_grad) == ("sharded_tensor", (4,), 2, True)
    assert [(s.box.offsets, s.rank, s.source is None) for s in found.shards] == [((0,), 0, False), ((2,), 1, True)]


def test_local_shards_that_do_not_lie_together_have_their_places_in_the_list(tmp_path):
    listed = entry([0], [2]) + entry([2], [2], 1) + entry([4], [2])
    own = local([0], [2], tensor((2,))) + local([4], [2], tensor((2,)))
    found = reader.read(with_pickle(tmp_path / "s.pt", made((6,), listed, own), bytes(16))).tree
    assert [(s.box.offsets, s.rank, s.source is None) for s in found.shards] == [
        ((0,), 0, False),
        ((2,), 1, True),
        ((4,), 0, False),
    ]


ODD = {
    "a state of another form": {"state": b"(]t"},
    "a shard outside the tensor": {"listed": entry([0], [2]) + entry([2], [3], 1)},
    "a shard of more dimensions": {"listed": entry([0, 0], [2, 2])},
    "a negative offset": {"listed": entry([-1], [2])},
    "a negative size": {"listed": entry([0], [4]) + entry([4], [-2])},
    "an offset of 300 bits": {"listed": entry([1 << 300], [2])},
    "a shard without sizes": {"listed": b"cm\nShardMetadata\n)\x81}b"},
    "a shard that is a number": {"listed": b"K\x01"},
    "a list that is a number": {"state": b"(]cm\nX\n)\x81" + dict_of(shards_metadata=b"K\x01") + b"bNNNt"},
    "local shards that are a number": {"state": b"(K\x01NNNNt"},
    "a local shard without a tensor": {"listed": HALF, "own": local([0], [2], b"N")},
    "a local shard of another size": {"listed": HALF, "own": local([0], [2], tensor((1,)))},
    "a shard of another dtype": {"listed": HALF, "own": local([0], [2], tensor((2,))), "dtype": b"ctorch\nint32\n"},
    "a local shard that is not listed": {"listed": HALF, "own": local([1], [2], tensor((2,)))},
    "a local shard given twice": {"listed": HALF, "own": local([0], [2], tensor((2,))) * 2},
    "a rank outside its world": {"rank": 2},
    "a negative rank": {"rank": -1},
    "a world of 300 bits": {"world": 1 << 300},
    "a world of nobody": {"world": 0},
}  # fmt: skip


@pytest.mark.parametrize("odd", ODD.values(), ids=ODD)
def test_a_sharded_tensor_that_contradicts_itself_says_so_in_one_line(tmp_path, odd):
    assert contradiction(with_pickle(tmp_path / "o.pt", made(**odd), bytes(16)))


@given(rows=st.integers(1, 40), world=st.integers(1, 12))
def test_the_chunk_rule_covers_every_length_on_every_world(rows, world):
    import torch

    chunks = torch.arange(rows).chunk(world)
    listed = b"".join(entry([int(c[0])], [len(c)], r) for r, c in enumerate(chunks))
    found = Machine(made((rows,), listed, world=world)).load()
    assert cover((rows,), [s.box for s in found.shards]).exact


@pytest.mark.slow
def test_a_shard_list_named_again_and_again_is_refused():
    once = b"](" + b"".join(entry([i], [1]) for i in range(3000)) + b"eq\x010]("
    with pytest.raises(PickleError, match="unfold"):
        Machine(once + made((3000,), listing=b"h\x01")[:-1] * 2000 + b"e.").load()
