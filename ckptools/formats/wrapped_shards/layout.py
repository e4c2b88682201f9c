"""The layout in `shard_metadata`: which parameters, in order, are in each flattened one, and what each rank pads.

fairscale (`FullyShardedDataParallel.local_metadata_dict`), saved by metaseq, fairseq, VISSL and their like:

    {"param_metadata": [{"fsdp_path": "block", "params": {"flat_param_0": {"names", "shapes", "numels", "padding"}},
                         "no_broadcast_optim_state": False, "shared_param_info": [(first, other)]}],
     "buffer_names": [...]}

A wrapper's names are below its path. Each flattened parameter is cut into as many chunks as there are ranks, of which
all but the last are full; `padding` is what this rank has behind its own elements. In `shared_param_info` the last
parts of the two names are exchanged, as that of one comes with the module of the other. Its rank no file states.
Source: fairscale/nn/data_parallel/fully_sharded_data_parallel.py (`_get_shard`, `local_metadata_dict`,
`consolidate_shard_weights`); checked on files of 0.4.13.

torch_xla (`XlaFullyShardedDataParallel.get_shard_metadata`):

    {"shard_info": {"path": {"_fsdp_shard…": {"_orig_name", "_orig_size"}}}, "flatten_info": {"path.flat_param_0":
     (names, shapes, numels)}, "buffer_info": {}, "world_size": 4, "rank": 0}

Every rank has equally many elements, and what lies behind the last one is padding. Source:
torch_xla/distributed/fsdp/xla_fully_sharded_data_parallel.py, state_dict_utils.py; checked on files made by hand.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from math import prod
from typing import Any, NamedTuple

from ckptools.model.regions import Ints
from ckptools.training_state.parameter_names import without_wrappers

SHARD_METADATA = "shard_metadata"
MAX_NAMES = 1 << 20
MAX_DIMS = 64
MAX_SIZE = 1 << 62


class ShardMetadataError(ValueError):
    """`shard_metadata` is not what its writers write; the message says why."""


class FlattenedParameter(NamedTuple):
    """A parameter of a wrapper, as it is in the model's state dict, and the parameters in it.

    Attributes:
        key: its name in the state dict.
        names: of the parameters in it, in order.
        shapes: of these, in order.
        tied: other names of some, with the first.
        padding: elements behind this rank's own; None where that is not stated.
        own: whether each rank has one of its own, of which nothing says which it is.
    """

    key: str
    names: tuple[str, ...]
    shapes: tuple[Ints, ...]
    tied: Mapping[str, str]
    padding: int | None = None
    own: bool = False

    @property
    def numel(self) -> int:
        """Elements without padding."""
        return sum(map(prod, self.shapes))


class ShardMetadata(NamedTuple):
    """The content of `shard_metadata`.

    Attributes:
        writer: whose it is, in words.
        parameters: by their names in the state dict, in the order of the module where `ordered`.
        world_size: None where it is not stated.
        ordered: whether its order is that of `model.parameters()`.
    """

    writer: str
    parameters: Mapping[str, FlattenedParameter]
    world_size: int | None
    ordered: bool


def has_shard_metadata(tree: Any) -> bool:
    """Whether a file's content has the metadata of fairscale or torch_xla."""
    stated = tree.get(SHARD_METADATA) if isinstance(tree, Mapping) else None
    return isinstance(stated, Mapping) and ("param_metadata" in stated or "shard_info" in stated)


def stated_claim(tree: Any) -> tuple[int, int] | None:
    """Rank and world size in a file's metadata, as torch_xla states them; None where it states none."""
    stated = tree.get(SHARD_METADATA) if isinstance(tree, Mapping) else None
    rank, world = (stated.get("rank"), stated.get("world_size")) if isinstance(stated, Mapping) else (None, None)
    return (rank, world) if type(rank) is int and type(world) is int and 0 <= rank < world <= MAX_NAMES else None


def shard_metadata(tree: Mapping[str, Any]) -> ShardMetadata:
    """Read the metadata in a file's content.

    Raises:
        ShardMetadataError: it is not what its writers write.
    """
    stated = tree[SHARD_METADATA]
    try:
        if "param_metadata" in stated:
            listed = list(_of_fairscale(stated["param_metadata"]))
            flat = all(p.key.rpartition(".")[2].startswith("flat_param_") for p in listed)
            return ShardMetadata("fairscale", _by_key(listed), None, flat)
        claim = stated_claim(tree)
        if claim is None:
            raise ShardMetadataError("it states no rank of a world size")
        return ShardMetadata("torch_xla", _by_key(list(_of_xla(stated))), claim[1], False)
    except (KeyError, TypeError, AttributeError) as error:
        raise ShardMetadataError(f"expected names, shapes and numels of each wrapper ({error})") from error


def _by_key(listed: Sequence[FlattenedParameter]) -> dict[str, FlattenedParameter]:
    found = {parameter.key: parameter for parameter in listed}
    names = [name for parameter in listed for name in parameter.names]
    if len(found) < len(listed) or len(set(names)) < len(names):
        raise ShardMetadataError("it lists a parameter twice")
    return found


def _of_fairscale(wrappers: Sequence[Mapping[str, Any]]) -> Iterator[FlattenedParameter]:
    for wrapper in wrappers:
        path = str(wrapper["fsdp_path"])
        tied = [(str(first), str(other)) for first, other in wrapper["shared_param_info"]]
        for backing, stated in wrapper["params"].items():
            names, shapes = _parameters(stated["names"], stated["shapes"], stated["numels"])
            padding = stated["padding"]
            if type(padding) is not int or not 0 <= padding < MAX_SIZE:
                raise ShardMetadataError(f"{backing} has no padding")
            full = tuple(_below(path, name) for name in names)
            of_names = dict(_tied(names, tied))
            shared = {_below(path, other): _below(path, first) for other, first in of_names.items()}
            own = wrapper["no_broadcast_optim_state"] is not False
            yield FlattenedParameter(_below(path, str(backing)), full, shapes, shared, padding, own)


def _tied(names: Sequence[str], stated: Sequence[tuple[str, str]]) -> Iterator[tuple[str, str]]:
    """Other names of a wrapper's parameters with the first, from pairs whose last parts are exchanged."""
    for first, other in stated:
        (path_of_first, _, last_of_other), (path_of_other, _, last_of_first) = (
            first.rpartition("."),
            other.rpartition("."),
        )
        kept = _below(path_of_first, last_of_first)
        if kept in names:
            yield _below(path_of_other, last_of_other), kept


def _of_xla(stated: Mapping[str, Any]) -> Iterator[FlattenedParameter]:
    flattened = stated["flatten_info"]
    for path, shards in stated["shard_info"].items():
        for suffix, shard in shards.items():
            name, size = _below(str(path), str(shard["_orig_name"])), _shape(shard["_orig_size"])
            names: tuple[str, ...] = (name,)
            shapes: tuple[Ints, ...] = (size,)
            if name in flattened:
                listed, shapes = _parameters(*flattened[name])
                names = tuple(_below(name.rpartition(".")[0], one) for one in listed)
                if sum(map(prod, shapes)) != prod(size):
                    raise ShardMetadataError(f"{name} has {prod(size)} elements, the parameters in it have others")
            yield FlattenedParameter(_below(str(path), str(suffix)), tuple(map(without_wrappers, names)), shapes, {})


def _parameters(names: Any, shapes: Any, numels: Any) -> tuple[tuple[str, ...], tuple[Ints, ...]]:
    """The names and shapes in one flattened parameter, which have as many elements as is stated."""
    found = tuple(map(_shape, shapes))
    if not len(names) == len(found) == len(numels) or len(names) > MAX_NAMES or not names:
        raise ShardMetadataError("it has not as many names as shapes")
    if [prod(shape) for shape in found] != list(numels) or not all(isinstance(name, str) for name in names):
        raise ShardMetadataError(f"the shapes of {str(names[0])[:100]} and others have not as many elements as it says")
    return tuple(names), found


def _shape(stated: Any) -> Ints:
    shape = tuple(stated)
    if len(shape) > MAX_DIMS or not all(type(n) is int and 0 <= n < MAX_SIZE for n in shape):
        raise ShardMetadataError("it states a shape that is none")
    return shape


def _below(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name
