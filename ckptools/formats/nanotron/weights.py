"""The model of a Nanotron checkpoint: a safetensors file for each parameter, and for each slice of one."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from ckptools.errors import ReadError
from ckptools.files.opening import File
from ckptools.files.safetensors_header import read_header, source_of
from ckptools.formats.nanotron.files import NanotronFiles
from ckptools.formats.nanotron.slices import Slice, SlicePair, pieces_of, shape_of
from ckptools.formats.shared.checkpoint_builder import file_now
from ckptools.model.problems import Code, Problem
from ckptools.model.regions import Box
from ckptools.model.shard import Shard, in_rank_order
from ckptools.model.source import Source
from ckptools.model.tensor import Tensor

RANKS = r"pp-rank-(?P<pp>\d{1,5})-of-(?P<pps>\d{1,5})_tp-rank-(?P<tp>\d{1,5})-of-(?P<tps>\d{1,5})"
WEIGHT = re.compile(rf"model_(?P<name>.+?)(?:_{RANKS}(?P<experts>_exp-rank-\d+-of-\d+)?)?\.safetensors")
EXPERTS = "experts that are spread over ranks are not joined"


class Weights:
    """The files of a model, read when this is made.

    Attributes:
        slices: the files of each parameter.
        notes: why some are not joined.
    """

    def __init__(self, folder: NanotronFiles) -> None:
        self.folder, self.problems = folder, folder.builder.problems
        self.slices: dict[str, list[Slice]] = {}
        self.notes: dict[str, str] = {}
        for path in folder.below("model", ".safetensors"):
            self._read(path)

    def _read(self, path: Path) -> None:
        named, folder = WEIGHT.fullmatch(path.name), self.folder
        if named is None:
            return
        fqn = ".".join([*path.parent.relative_to(folder.folder / "model").parts, named["name"]])
        place = (int(named["pp"]), int(named["tp"])) if named["pp"] is not None else None
        if place is not None:
            folder.has_stages(int(named["pps"]))
        try:
            with File(path) as file:
                header = read_header(file)
                if list(header.tensors) != ["data"]:
                    raise ReadError(path, "holds other tensors than `data`; not of Nanotron, or damaged")
                source = source_of(file, "data", header.tensors["data"])
                self._add(path, fqn, place, source, header.metadata, (int(named["tps"]) if place else 1))
        except ReadError as error:
            folder.add_fault(path, error, folder.rank(place))
            return
        if named["experts"]:
            self.notes[fqn] = EXPERTS
        folder.builder.add_read(1, header.size)
        folder.files.append(file_now(path, folder.rank(place), folder.part(path), "read"))

    def _add(
        self, path: Path, fqn: str, place: tuple[int, int] | None, source: Source, stated: Mapping[str, str], tps: int
    ) -> None:
        """Note one file of a parameter.

        Raises:
            ReadError: its name and its header contradict each other.
        """
        if place is None or "unsharded_shape" not in stated:
            if place is not None or "unsharded_shape" in stated:
                raise ReadError(path, "has a name of a slice and no unsharded_shape, or the other way round")
            whole = Box.whole(source.shape)
            self.slices.setdefault(fqn, []).append(Slice(None, source, source.shape, (SlicePair(whole, whole),)))
            return
        if tps != self.folder.tp:
            raise ReadError(
                path, f"is of {tps} tensor-parallel ranks by its name, the metadata states {self.folder.tp}"
            )
        try:
            shape = shape_of(stated["unsharded_shape"])
            pieces = pieces_of(stated["local_global_slices_pairs"], source.shape, shape)
        except (KeyError, ValueError, TypeError) as error:
            raise ReadError(path, f"says of no pieces where they are ({error})") from error
        self.slices.setdefault(fqn, []).append(Slice(place, source, shape, pieces))

    def state_dict(self) -> dict[str, Tensor]:
        """Every parameter, joined."""
        return {fqn: self._weight(fqn, self.slices[fqn]) for fqn in sorted(self.slices)}

    def _weight(self, fqn: str, slices: Sequence[Slice]) -> Tensor:
        first, folder = slices[0], self.folder
        odd = next((s for s in slices if (s.shape, s.source.dtype) != (first.shape, first.source.dtype)), None)
        if odd is not None:
            text = f"{odd.source.dtype} {list(odd.shape)}, another file says {first.source.dtype} {list(first.shape)}"
            self.problems.append(Problem(Code.LAYOUT_DISAGREES, text, folder.rank(odd.place), f"model.{fqn}"))
        # Tensor-parallel ranks have their slices in order, so a header in another rank's place is another rank's.
        placed = sorted((s.place, s.pieces[0].whole.offsets) for s in slices if s.place is not None)
        swapped = next((p for (_, a), (p, b) in pairwise(placed) if a >= b), None) if fqn not in self.notes else None
        if swapped is not None and odd is None:
            text = f"the file of tp-rank {swapped[1]} holds the slice of another rank than its name says"
            self.problems.append(Problem(Code.STRAY_FILE, text, folder.rank(swapped), f"model.{fqn}"))
        note = self.notes.get(fqn, "") or ("its files contradict each other" if odd is not None else "")
        shards = [s for cut in slices for s in cut.shards(cut.source, folder.rank(cut.place))]
        return joined(first, first.source.dtype, () if note else shards, folder.tp, note)

    def cut_of(self, fqn: str) -> Mapping[int | None, Slice]:
        """The slices of a parameter by tensor-parallel rank; none where its files contradict each other.

        A tied parameter is written by its first stage alone, and trained by others, cut over the same ranks.
        """
        slices = self.slices.get(fqn, ())
        distinct = len({s.place for s in slices}) == len(slices)
        return {s.place[1] if s.place else None: s for s in slices} if distinct else {}


def joined(cut: Slice, dtype: str, shards: Sequence[Shard], tp: int, note: str = "") -> Tensor:
    """A tensor of the shape of a parameter, from shards of it."""
    kind: Any = "tensor_parallel" if cut.place is not None else "plain"
    return Tensor(cut.shape, dtype, in_rank_order(shards), kind, world_size=tp, note=note)
