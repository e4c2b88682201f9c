"""OLMo's local checkpoints: folders `model`, `optim` and `train` with a file for each rank, and a `metadata.yaml`.

`metadata.yaml` states `world_size: N`. Folders of the same names with ordinary state dicts are put side by side too,
each part merged like rank files. Otherwise FSDP1's flat parameters are in a rank's `model` and `optim` file.

The model is `{"modules": [{"name", "handles": [{"flat_param.data", "flat_param._fqns", …}]}]}`: for each FSDP unit the
rank's piece of its flat parameter, with torch's own list of the parameters in it. Since torch 2.1 that is one
`_ShardParamInfo(in_shard, offset_in_shard, numel_in_shard, intra_param_start_idx, intra_param_end_idx)` per parameter;
before, `_shard_indices` (first and last parameter) and one `_shard_param_offsets` (first and last element) for each of
those, which follow each other in the piece. Last elements are inclusive. So every run has its exact place, and shapes
are in the file: nothing is guessed.

The optimizer is a plain `state_dict()`: numbers, whose names are in the groups' `param_names`, and 1-D moments that are
cut like their parameters.

OLMo's other checkpoints: `rank3.pt` (`torch_legacy`) is read by `rank_files`, `model_and_optim/` (`torch_new`) is DCP.
Source: olmo/checkpoint.py (`LocalShardedCheckpointer`), torch/distributed/fsdp/_flat_param.py.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

from ckptools.errors import ReadError
from ckptools.files.opening import head_at
from ckptools.formats.flat_parameters.units import FlatRun, shards_of
from ckptools.formats.options import Options
from ckptools.formats.rank_search import rank_checks
from ckptools.formats.rank_search.rank_names import RankName, check_links, names_in, parse, siblings
from ckptools.formats.shared.checkpoint_builder import CheckpointBuilder, SavedFiles
from ckptools.formats.shared.merge import Merge
from ckptools.model.checkpoint import Checkpoint
from ckptools.model.facts import FILES_FOUND, Fact, RankFile
from ckptools.model.regions import Ints
from ckptools.model.tensor import Tensor
from ckptools.model.tree import Opaque, describe_for_error, tensors_in
from ckptools.pickles.reader import Saved
from ckptools.training_state.optimizers import AS_SAVED, BY_UNIT
from ckptools.training_state.sections import find_sections
from ckptools.training_state.steps import find_step
from ckptools.training_state.wrappers import without_wrappers

NAME = "olmo_local"
READS = "OLMo's local checkpoints: model/rankN.pt, optim/rankN.pt, train/rankN.pt"
KNOWN_BY = "folders model and optim with one rankN.pt per rank in each"
TRIED = ()
BY_HAND = ("OLMo",)
JOINS = ("model", "optimizer", "rest")


PARTS = ("model", "optim", "train")
METADATA = "metadata.yaml"
WORLD = re.compile(rb"(?m)^world_size:\s*(\d{1,7})\s*$")
MAX_METADATA = 1 << 16
MAX_WORLD = 1 << 16


def detect(path: Path) -> bool:
    """Whether a path is a folder with rank files in its `model` and `optim`, or one of those folders or files."""
    return _root(path) is not None


def _root(path: Path) -> Path | None:
    below = path.parent if path.is_file() and parse(path) else path
    for folder in (path, below.parent) if below.name in PARTS else (path,):
        if all((folder / part / "rank0.pt").is_file() for part in PARTS[:2]):
            return folder
    return None


def read(path: Path, options: Options) -> Checkpoint:
    """Open the checkpoint of a folder or a file.

    Raises:
        ReadError: the file that is read first is unreadable, or not OLMo's.
    """
    builder = CheckpointBuilder(NAME, path)
    root = _root(path)
    if root is None:
        raise ReadError(path, "no folders model and optim with rank files")
    return _OlmoFolder(builder, root, options).checkpoint()


class _OlmoFolder:
    def __init__(self, builder: CheckpointBuilder, root: Path, options: Options) -> None:
        self.builder, self.root, self.options = builder, root, options
        path = builder.path
        self.files = dict(self._found())
        self.found = tuple(dict.fromkeys(part for part, _ in self.files))
        ranks = sorted({rank for _, rank in self.files})
        named = parse(path) if path.is_file() else None
        asked = named.rank if named else ranks[0]
        self.all_ranks = options.all_ranks or len(ranks) == 1
        self.contents = SavedFiles(options.read_file)
        self.saved: dict[tuple[str, int], Saved] = {}
        for key, name in self.files.items():
            if options.all_ranks or key[1] == asked:
                saved = self.contents.read(name.path, must=key[1] == asked)
                if saved is not None:
                    self.saved[key] = saved

    def _found(self) -> Iterator[tuple[tuple[str, int], RankName]]:
        for part in PARTS:
            folder = self.root / part
            self.options.check_link(folder, self.root)
            first = next((n for n in names_in(folder) if n.path.name == "rank0.pt"), None) if folder.is_dir() else None
            group = siblings(first) if first else []
            if not self.options.follow_symlinks:
                check_links(group, asked=self.builder.path)
            for name in group:
                yield (part, name.rank), name

    def checkpoint(self) -> Checkpoint:
        merge, world = Merge(), self._world_size()
        placed = {rank: self._of_rank(rank) for rank in sorted({rank for _, rank in self.saved})}
        tree = {p: merge.trees([(r, t[p]) for r, t in placed.items() if p in t], (p,)) for p in self.found}
        found = rank_checks.compare_ranks(merge, tree)
        tree = found.tree
        sections, tensors = find_sections(tree), list(tensors_in(tree))
        ranks = sorted({*range(min(world.value, MAX_WORLD)), *(rank for _, rank in self.files)})
        files = tuple(self._file(part, rank) for rank in ranks for part in self.found)
        flat = any(t.kind == "flat_pieces" for _, t in tensors)
        self.builder.problems += rank_checks.check_files(files, self.contents.faults, world.value, flat)
        self.builder.add_rank_values(found)
        self.builder.add_saved(self.saved.values())
        return self.builder.checkpoint(
            name=self.root.name or "checkpoint",
            saved_as=f"OLMo local, {'FSDP flat parameters and their shapes' if flat else 'every tensor whole'}",
            tree=tree,
            files=files,
            world_size=world,
            step=find_step(self.root, sections),
            module_order=BY_UNIT if flat else AS_SAVED,
            all_ranks=self.all_ranks,
            bytes_expected=rank_checks.expected_bytes(files),
        )

    def _of_rank(self, rank: int) -> dict[str, Any]:
        """A rank's parts, with the model's and the optimizer's runs in their places."""
        trees = {part: self.saved[part, rank].tree for part in self.found if (part, rank) in self.saved}
        model = trees.get("model")
        if model is None and "model" in self.found:
            trees.pop("optim", None)  # without the model's runs, the parameters of its moments are unknown
        if not _is_flat_model(model):
            return trees
        path = self.files["model", rank].path
        try:
            pieces = {fqn: piece for fqn, piece, _ in _parameter_runs(model)}
            trees["model"] = read_model(model, rank, self.all_ranks)
            optim = trees.get("optim")
            if isinstance(optim, dict) and {"state", "param_groups"} <= optim.keys():
                path = self.files["optim", rank].path
                trees["optim"] = _read_optimizer(optim, pieces, rank, self.all_ranks)
        except (ValueError, TypeError) as error:
            raise ReadError(path, f"is not what OLMo writes: {error}") from error
        return trees

    def _world_size(self) -> Fact:
        path = self.root / METADATA
        if path.is_file():
            stated = WORLD.search(head_at(path, MAX_METADATA))
            if stated and int(stated[1]) > 0:
                return Fact(int(stated[1]), (METADATA,))
        return Fact(len({rank for _, rank in self.files}), (FILES_FOUND,))

    def _file(self, part: str, rank: int) -> RankFile:
        name = self.files.get((part, rank))
        if name is None:
            return RankFile(self.root / part / f"rank{rank}.pt", rank, part, "missing", 0, None)
        return self.contents.listed(name.path, rank, part, len(self.files))


# -- a rank's model and optimizer: the runs of parameters in its pieces of flat ones -----------------------------------


class ParameterRun(NamedTuple):
    """One rank's run of consecutive elements of a parameter; empty if the rank has none.

    Attributes:
        shape: of the whole parameter.
        start: index of the run's first element in the flattened parameter.
        at: index of that element in the rank's piece of the flat parameter.
    """

    shape: Ints
    start: int
    at: int
    numel: int


def _is_flat_model(tree: Any) -> bool:
    """Whether a tree is the model of a local checkpoint."""
    modules = tree.get("modules") if isinstance(tree, dict) else None
    return isinstance(modules, list) and all(isinstance(m, dict) and "handles" in m for m in modules)


def _parameter_runs(tree: Any) -> Iterator[tuple[str, ParameterRun, Tensor]]:
    """Yield the parameters in a rank's model: fqn, the rank's run, and the flat tensor with the run."""
    for module in tree["modules"]:
        name, handles = module.get("name"), module["handles"]
        if not isinstance(name, str) or not isinstance(handles, list):
            raise ValueError("an FSDP module without a name and handles")
        prefix = without_wrappers(name)
        for handle in handles:
            fields = {k.removeprefix("flat_param."): v for k, v in handle.items()} if isinstance(handle, dict) else {}
            data = fields.get("data")
            if not isinstance(data, Tensor) or len(data.shape) != 1 or not data.shards:
                raise ValueError(f"no flat parameter in module {describe_for_error(prefix)}")
            for fqn, piece in _pieces(fields, data.numel):
                yield f"{prefix}.{fqn}" if prefix else fqn, piece, data


def _pieces(fields: Mapping[str, Any], room: int) -> Iterator[tuple[str, ParameterRun]]:
    fqns, shapes = fields.get("_fqns"), fields.get("_shapes")
    if not isinstance(fqns, (list, tuple)) or not isinstance(shapes, (list, tuple)) or len(fqns) != len(shapes):
        raise ValueError("a flat parameter without names and shapes")
    runs = list(_runs_before_2_1(fields, len(fqns)) if "_shard_indices" in fields else _runs(fields, len(fqns)))
    for fqn, shape, (start, at, numel) in zip(fqns, shapes, runs, strict=True):
        ok = isinstance(shape, tuple) and all(type(n) is int and n >= 0 for n in shape)
        if not isinstance(fqn, str) or not ok or min(start, at, numel) < 0:
            raise ValueError(f"parameter {describe_for_error(fqn)} of shape {describe_for_error(shape)}")
        if at + numel > room or start + numel > prod(shape):
            text = (
                f"parameter {describe_for_error(fqn)} of shape {describe_for_error(shape)} "
                f"has {numel} elements from {start}, at {at} of {room}"
            )
            raise ValueError(text)
        yield without_wrappers(fqn), ParameterRun(tuple(shape), start, at, numel)


def _runs(fields: Mapping[str, Any], count: int) -> Iterator[Ints]:
    """`(start, at, numel)` of each parameter, as torch 2.1 and later state them."""
    infos = fields.get("_shard_param_infos")
    if not isinstance(infos, (list, tuple)) or len(infos) != count:
        raise ValueError("a flat parameter without an account of its shards")
    for info in infos:
        args = info.args if isinstance(info, Opaque) and isinstance(info.args, tuple) else ()
        if len(args) != 5 or (args[0] is True and not all(type(n) is int for n in args[1:])):
            raise ValueError("a flat parameter with an unknown account of its shards")
        in_shard, at, numel, start, last = args
        if in_shard is not True:
            yield 0, 0, 0
            continue
        if last - start + 1 != numel:
            raise ValueError(f"a shard of {numel} elements from {start} to {last}")
        yield start, at, numel


def _runs_before_2_1(fields: Mapping[str, Any], count: int) -> Iterator[Ints]:
    indices, offsets = fields["_shard_indices"], fields.get("_shard_param_offsets")
    if not isinstance(offsets, (list, tuple)) or not all(map(_is_pair, (indices, *offsets))):
        raise ValueError("a flat parameter with an unknown account of its shards")
    first, at = indices[0], 0
    if first < 0 or first + len(offsets) > count:
        raise ValueError(f"shards of parameters {first} to {first + len(offsets)} of {count}")
    for index in range(count):
        start, last = offsets[index - first] if first <= index < first + len(offsets) else (0, -1)
        numel = max(last - start + 1, 0)
        yield start, at if numel else 0, numel
        at += numel


def _is_pair(value: Any) -> bool:
    return isinstance(value, (list, tuple)) and len(value) == 2 and all(type(n) is int for n in value)


def read_model(tree: Any, rank: int, all_ranks: bool) -> dict[str, Tensor]:
    """The parameters of a rank's model: whole shapes, and the rank's runs if all ranks are read.

    Raises:
        ValueError: the file is not as OLMo writes it, or contradicts itself.
    """
    found: dict[str, Tensor] = {}
    for fqn, piece, data in _parameter_runs(tree):
        if fqn in found:
            raise ValueError(f"parameter {describe_for_error(fqn)} is in two flat parameters")
        found[fqn] = _placed(data, piece, piece.at, rank, all_ranks)
    return found


def _placed(data: Tensor, piece: ParameterRun, at: int, rank: int, all_ranks: bool) -> Tensor:
    shards = []
    if all_ranks and piece.numel:
        source = data.shards[0].source
        if source is None or not source.contiguous:
            raise ValueError("a flat parameter that is not contiguous")
        shards = shards_of(piece.shape, FlatRun(piece.start, piece.numel, source, rank, at))
    return replace(data, shape=piece.shape, shards=tuple(shards), kind="flat_pieces", parameter=False)


def _read_optimizer(tree: Any, pieces: Mapping[str, ParameterRun], rank: int, all_ranks: bool) -> dict[str, Any]:
    """A rank's optimizer state by name, with its moments placed like their parameters."""
    groups, state = tree["param_groups"], tree["state"]
    names: dict[Any, str] = {}
    named = []
    for group in groups:
        listed = group.get("param_names") if isinstance(group, dict) else None
        ids = group.get("params") if isinstance(group, dict) else None
        if not isinstance(listed, list) or not isinstance(ids, list) or len(listed) != len(ids):
            raise ValueError("a param group without a name for each of its parameters")
        clean = [without_wrappers(name) for name in listed if isinstance(name, str)]
        names |= dict(zip(ids, clean, strict=True))
        named.append({**group, "params": clean, "param_names": clean})
    if set(state) - set(names):
        raise ValueError("a state of a parameter that no group names")
    placed = {names[i]: _state(names[i], slots, pieces, rank, all_ranks) for i, slots in state.items()}
    return {"state": placed, "param_groups": named}


def _state(fqn: str, slots: Any, pieces: Mapping[str, ParameterRun], rank: int, all_ranks: bool) -> Any:
    if not isinstance(slots, dict):
        return slots
    found = {}
    for slot, value in slots.items():
        run = isinstance(value, Tensor) and len(value.shape) == 1
        if run and (fqn not in pieces or pieces[fqn].numel != value.numel):
            raise ValueError(
                f"{describe_for_error(slot)} of {describe_for_error(fqn)} has "
                f"{value.numel} elements, its parameter another number"
            )
        found[slot] = _placed(value, pieces[fqn], 0, rank, all_ranks) if run else value
    return found
