"""The optimizer of a Nanotron checkpoint: a file of torch.save for each rank, by number, with names.

A moment has the shape of the rank's slice of its parameter. Under ZeRO-1 (`ZeroDistributedOptimizer`; `_dp-D-of-DPS` in
the file's name) that slice is flattened and cut over the data-parallel ranks: all have as many elements, but the last
ones may have one fewer, or none, and then no entry. `gradient_accumulator` has fp32 copies of the parameters by name,
cut likewise. `param_name_to_dp_rank_offsets` in `optimizer_config.json` states the cuts of the first rank's slices; the
others follow the same rule, which the lengths of the moments confirm.

Source: nanotron/optim/zero.py (`_partition_parameters`, `merge_dp_shard_in_zero1_optimizer`), named_optimizer.py,
gradient_accumulator.py (`state_dict`), serialize/optimizer.py.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from math import prod
from typing import Any, NamedTuple

from ckptools.errors import ReadError
from ckptools.files.json_file import read_json
from ckptools.formats.nanotron.files import CONFIG, NanotronFiles
from ckptools.formats.nanotron.slices import Slice
from ckptools.formats.nanotron.weights import EXPERTS, Weights, joined
from ckptools.formats.shared.checkpoint_builder import file_now
from ckptools.formats.shared.merge import Merge
from ckptools.model.checkpoint import RankFile
from ckptools.model.problems import Code, Problem
from ckptools.model.shard import Shard
from ckptools.model.tensor import Tensor
from ckptools.model.tree import leaf_at
from ckptools.pickles.reader import Saved
from ckptools.text import few

FILE = re.compile(
    r"optimizer_pp-(?P<pp>\d{1,5})-of-(?P<pps>\d{1,5})(?:_dp-(?P<dp>\d{1,5})-of-(?P<dps>\d{1,5}))?"
    r"_tp-(?P<tp>\d{1,5})-of-(?P<tps>\d{1,5})_exp-(?P<exp>\d{1,5})-of-(?P<exps>\d{1,5})\.pt"
)
COPIES = "gradient_accumulator"
NO_PARAMETER = "its parameter has no file, so nothing says how it was cut"


class OptimizerRank(NamedTuple):
    """The ranks that wrote an optimizer file; `dp` is None without ZeRO-1."""

    pp: int
    dp: int | None
    tp: int


Ranked = list[tuple[OptimizerRank, Any]]


class OptimizerFiles:
    """The optimizer files, read when this is made.

    Attributes:
        trees: their contents.
        zero_1: whether moments are cut over data-parallel ranks.
        note: why no moment is joined, if so.
    """

    def __init__(self, folder: NanotronFiles) -> None:
        self.folder, self.problems = folder, folder.builder.problems
        self.found = [(p, m) for p in folder.below("optimizer", ".pt") if (m := FILE.fullmatch(p.name))]
        self.zero_1 = any(found["dp"] for _, found in self.found)
        self.note = EXPERTS if any(int(found["exps"]) > 1 for _, found in self.found) else ""
        self.offsets = self._stated_offsets() if self.zero_1 else {}
        self.saved: list[Saved] = []
        self.trees = dict(self._read())
        folder.builder.add_saved(self.saved)

    def _stated_offsets(self) -> Mapping[Any, Any]:
        """The cuts in the configuration: first element and one past the last, as text, by name and rank."""
        path = self.folder.folder / "optimizer" / CONFIG
        found = read_json(path) if path.is_file() else {}
        stated = leaf_at(found, ("configs", "param_name_to_dp_rank_offsets"))
        if not isinstance(stated, dict):
            text = f"optimizer/{CONFIG} has no param_name_to_dp_rank_offsets, which ZeRO-1 writes"
            self.problems.append(Problem(Code.FILE_MISSING, text, severity="warning"))
        return stated if isinstance(stated, dict) else {}

    def _read(self) -> Iterator[tuple[OptimizerRank, dict[Any, Any]]]:
        folder = self.folder
        for path, found in self.found:
            rank = OptimizerRank(int(found["pp"]), int(found["dp"]) if found["dp"] else None, int(found["tp"]))
            folder.has_stages(int(found["pps"]))
            try:
                if (rank.dp is not None) != self.zero_1:
                    raise ReadError(path, "is with ZeRO-1 by its name and others are not, or the other way round")
                if (int(found["tps"]), int(found["dps"] or folder.dp)) != (folder.tp, folder.dp):
                    raise ReadError(path, f"is of other sizes than tp {folder.tp} and dp {folder.dp} of the metadata")
                saved = folder.options.read_file(path)
                if not isinstance(saved.tree, dict) or not isinstance(saved.tree.get("state"), dict):
                    raise ReadError(path, "has no state; not an optimizer of Nanotron, or damaged")
            except ReadError as error:
                folder.add_fault(path, error, self._rank(rank))
                continue
            self.saved.append(saved)
            folder.files.append(file_now(path, self._rank(rank), folder.part(path), "read"))
            yield rank, saved.tree

    def _rank(self, rank: OptimizerRank) -> int:
        return self.folder.rank((rank.pp, rank.tp), rank.dp or 0) or 0

    def lost_files(self) -> Iterator[RankFile]:
        """The files of ranks that wrote none."""
        here = {(int(m["pp"]), int(m["dp"] or 0), int(m["tp"])) for _, m in self.found}
        folder, dps = self.folder, self.folder.dp if self.zero_1 else 1
        for pp, dp, tp in ((p, d, t) for p in range(folder.pp) for d in range(dps) for t in range(folder.tp)):
            if (pp, dp, tp) not in here and not self.note:
                cut = f"_dp-{dp}-of-{dps}" if self.zero_1 else ""
                name = f"optimizer/optimizer_pp-{pp}-of-{folder.pp}{cut}_tp-{tp}-of-{folder.tp}_exp-0-of-1.pt"
                rank = self._rank(OptimizerRank(pp, dp, tp))
                yield RankFile(folder.folder / name, rank, name, "missing", 0, None)

    # -- joined

    def state_dict(self, weights: Weights) -> dict[str, Any]:
        """The optimizer's state dict by name, its moments cut as the weights are."""
        merge, groups = Merge(), dict[str, dict[str, Any]]()
        moments: dict[str, dict[str, Ranked]] = {}
        copies: dict[str, Ranked] = {}
        for rank, tree in sorted(self.trees.items()):
            names = tree.get("names")
            names = names if isinstance(names, dict) else {}
            for number, entry in tree["state"].items():
                fqn = str(names.get(number, f"?{number} of pp {rank.pp}, tp {rank.tp}"))
                for slot, value in entry.items() if isinstance(entry, dict) else ():
                    moments.setdefault(fqn, {}).setdefault(str(slot), []).append((rank, value))
            for fqn, value in tree[COPIES].items() if isinstance(tree.get(COPIES), dict) else ():
                copies.setdefault(str(fqn), []).append((rank, value))
            for group in tree.get("param_groups") or ():
                kept = {k: v for k, v in group.items() if k != "params"}
                listed = groups.setdefault(repr(kept), {**kept, "params": {}})
                listed["params"] |= dict.fromkeys(str(names.get(i, f"?{i}")) for i in group.get("params") or ())
        lost = sorted(fqn for fqn in {*moments, *copies} if fqn not in weights.slices and not fqn.startswith("?"))
        if lost:
            text = f"{len(lost)} parameters that the optimizer names have no file in model/: {few(lost, 3)}"
            self.problems.append(Problem(Code.MODEL_PART_MISSING, text))
        made: dict[str, Any] = {
            "state": {
                f: {s: self._slot(merge, weights, ("state", f, s), v) for s, v in slots.items()}
                for f, slots in moments.items()
            },
            "param_groups": [{**group, "params": list(group["params"])} for group in groups.values()],
        }
        if copies:
            made[COPIES] = {f: self._slot(merge, weights, (COPIES, f), values) for f, values in copies.items()}
        self.problems += merge.problems
        return made

    def _slot(self, merge: Merge, weights: Weights, path: tuple[str, ...], values: Ranked) -> Any:
        """One slot of a parameter's state: cut as the parameter is, or the same on every rank that has it."""
        first, fqn = values[0][1], path[1]
        if not isinstance(first, Tensor) or not first.shape:
            return merge.trees([(self._rank(r), v) for r, v in values], ("optimizer", *path))
        cut, shards, note = weights.cut_of(fqn), list[Shard](), self.note
        for rank, value in values:
            own = cut.get(rank.tp) or cut.get(None)
            found = self._shards(fqn, own, rank, value) if own and value.dtype == first.dtype else NO_PARAMETER
            if isinstance(found, str):
                note = note or found
            else:
                shards += found
        if note or not cut:
            return Tensor(first.shape, first.dtype, (), first.kind, note=note or NO_PARAMETER)
        some = next(iter(cut.values()))
        return joined(replace(some, place=some.place or (0, 0)), first.dtype, shards, self.folder.tp)

    def _shards(self, fqn: str, own: Slice, rank: OptimizerRank, value: Any) -> Sequence[Shard] | str:
        """The shards of one rank's moment, or why they have no place."""
        source = value.shards[0].source if isinstance(value, Tensor) and len(value.shards) == 1 else None
        of = f"of {list(value.shape) if isinstance(value, Tensor) else value}"
        if source is None:
            return f"{of}, which is no dense tensor"
        if rank.dp is None:
            fits = value.shape == own.source.shape
            return list(own.shards(source, self._rank(rank))) if fits else f"{of}, unlike its parameter"
        start, end = zero_1_run(prod(own.source.shape), self.folder.dp, rank.dp)
        stated = leaf_at(self.offsets, (fqn, str(rank.dp))) if (rank.pp, rank.tp) == (0, 0) else None
        if isinstance(stated, (list, tuple)) and list(map(str, stated)) != [str(start), str(end)]:
            return f"{CONFIG} says that rank {rank.dp} has {list(stated)} of it, not {start} to {end}"
        if value.shape != (end - start,) or not source.contiguous:
            return f"{of} on data-parallel rank {rank.dp}, {end - start} elements expected"
        return list(own.shards_of_run(source, start, self._rank(rank)))


def zero_1_run(numel: int, ranks: int, rank: int) -> tuple[int, int]:
    """First element, and one past the last, of a flattened parameter on a data-parallel rank: `_partition_parameters`.

    The first ranks have ceil(numel / ranks) elements, the last ones one fewer.
    """
    full = -(-numel // ranks)
    shorter = full * ranks - numel
    start = rank * full - max(rank - (ranks - shorter), 0)
    return start, start + full - (rank >= ranks - shorter)
