"""Names of Hugging Face weight files: their grouping, and the choice among several models in a folder.

    model.safetensors                               one file
    model-00001-of-00004.safetensors                one of several, listed in model.safetensors.index.json
    pytorch_model-00001-of-00004.bin                the same as torch.save files, pytorch_model.bin.index.json
    model.fp16.safetensors                          a variant; its index is model.safetensors.index.fp16.json
    model.fp16-00001-of-00002.safetensors           a variant in several files (transformers)
    diffusion_pytorch_model-00001-of-00002.fp16.safetensors   the same (older diffusers)
    model_1.safetensors                             the second model of an Accelerate run

Source: transformers/utils/__init__.py and modeling_utils.py, diffusers/utils/constants.py, peft/utils/constants.py,
accelerate/checkpointing.py; `consolidated.safetensors` is Mistral's own spelling beside the transformers one.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from ckptools.errors import UsageError
from ckptools.files.opening import reading
from ckptools.text import few

Kind = Literal["safetensors", "bin"]

FILE = re.compile(
    r"(?P<head>[^/]*?)(?:-(?P<number>\d{1,6})-of-(?P<total>\d{1,6}))?(?P<variant>\.(?![^./]*-of-\d)[^./]+)?\.(?P<kind>safetensors|bin)",
    re.DOTALL,
)
NUMBER = re.compile(r"-(\d{1,6})-of-(?=\d{1,6}\.)")
MAX_FILES = 10_000
INDEX = re.compile(r"(?P<head>[^/]*)\.(?P<kind>safetensors|bin)\.index(?P<variant>\.[^./]+)?\.json", re.DOTALL)

KNOWN = (
    ("model", re.compile(r"(?:model|pytorch_model|pytorch_model_fsdp|consolidated)")),
    ("model_", re.compile(r"(?:model|pytorch_model)_(\d{1,4})")),
    ("diffusion", re.compile(r"diffusion_pytorch_model")),
    ("adapter", re.compile(r"adapter_model")),
)
SPELLINGS = ("model", "pytorch_model", "pytorch_model_fsdp", "consolidated")
"""Names of one model, by priority; transformers reads the first two, in this order."""


@dataclass(frozen=True)
class WeightName:
    """A file name of a model, or of a part of one.

    Attributes:
        path: the file.
        base: the name without number and suffix: `model`, `model.fp16`.
        kind: by the suffix.
        number: which of several files; None for the only one.
        total: the number of files, as spelled; None for the only one.
    """

    path: Path
    base: str
    kind: Kind
    number: int | None
    total: str | None

    @property
    def group(self) -> tuple[str, Kind, str | None]:
        """Common part of the names of one model's files."""
        return self.base, self.kind, self.total


@dataclass(frozen=True)
class ModelFiles:
    """The weight files of one model, with their index.

    Attributes:
        base: as in `WeightName`.
        kind: by the suffixes.
        files: those that are here, by number.
        index: the index that names them, where there is one.
    """

    base: str
    kind: Kind
    files: tuple[WeightName, ...]
    index: Path | None

    @property
    def stem(self) -> str:
        """The name without a variant."""
        return self.base.partition(".")[0]

    @property
    def model(self) -> str | None:
        """Which model of the folder it is, by the common names; None for any other name."""
        for name, pattern in KNOWN:
            found = pattern.fullmatch(self.stem)
            if found:
                return name + "".join(found.groups())
        return None

    @property
    def rank(self) -> tuple[bool, bool, int, int]:
        """Sort key of several spellings of a model: transformers' order, an index first."""
        spelled = SPELLINGS.index(self.stem) if self.stem in SPELLINGS else 0
        form = 0 if self.index else 1 if self.files[0].number is None else 2
        return "." in self.base, self.kind == "bin", spelled, form

    @property
    def shown(self) -> str:
        """Its name in messages: its index or its only file, else the first of several."""
        return self.index.name if self.index else self.files[0].path.name


def parse(path: Path) -> WeightName | None:
    """Parse the name of a weight file; None when it is none."""
    found = FILE.fullmatch(path.name)
    if not found or not found["head"]:
        return None
    number = None if found["number"] is None else int(found["number"])
    kind: Kind = "bin" if found["kind"] == "bin" else "safetensors"
    return WeightName(path, found["head"] + (found["variant"] or ""), kind, number, found["total"])


def parse_index(path: Path) -> tuple[str, Kind] | None:
    """Parse the name of an index into the base and kind that it is for; None when it is none."""
    found = INDEX.fullmatch(path.name)
    if not found or not found["head"]:
        return None
    return found["head"] + (found["variant"] or ""), "bin" if found["kind"] == "bin" else "safetensors"


def model_files_in(folder: Path) -> list[ModelFiles]:
    """The weight files of every model in a folder; a lone `.bin` counts only under a common name."""
    with reading(folder):
        entries = sorted(p for p in folder.iterdir() if p.is_file())
    indexes = {key: p for p in entries if (key := parse_index(p)) is not None}
    groups: dict[tuple[str, Kind, str | None], list[WeightName]] = {(*key, None): [] for key in indexes}
    for name in filter(None, map(parse, entries)):
        group = (name.base, name.kind, None) if (name.base, name.kind) in indexes else name.group
        groups.setdefault(group, []).append(name)
    found = [ModelFiles(b, k, tuple(sorted(n, key=_number)), indexes.get((b, k))) for (b, k, _), n in groups.items()]
    return [w for w in found if w.kind == "safetensors" or w.index or w.model or w.files[0].number is not None]


def _number(name: WeightName) -> int:
    return -1 if name.number is None else name.number


def models_of_folder(folder: Path, found: Sequence[ModelFiles]) -> dict[str, ModelFiles]:
    """The models of a folder by their name in the tree: `model`, and `model_1` … where Accelerate saved several.

    Raises:
        UsageError: it holds several that are not one model in different spellings.
    """
    by_model: dict[str | None, list[ModelFiles]] = {}
    for weights in found:
        by_model.setdefault(weights.model, []).append(weights)
    mine = [name for name in by_model if name is not None and re.fullmatch(r"model(_\d+)?", name)]
    if "model" in mine:
        return {name: _first(folder, by_model[name]) for name in sorted(mine, key=lambda n: (len(n), n))}
    named = next((name for name, _ in KNOWN if name in by_model), None)
    return {"model": _first(folder, by_model[named] if named else found)}


def _first(folder: Path, spellings: Sequence[ModelFiles]) -> ModelFiles:
    ordered = sorted(spellings, key=lambda w: w.rank)
    indexed = [w for w in ordered if w.index]
    if ordered[0].model is None and len(indexed) == 1:
        return indexed[0]
    if len(ordered) > 1 and (ordered[0].rank == ordered[1].rank or ordered[0].model is None):
        raise UsageError(folder, f"holds {len(ordered)} models; name the one you mean: {listed(ordered)}")
    return ordered[0]


def model_files_of(path: Path) -> ModelFiles:
    """The set of a file: files with the same name and total, and the index for that name."""
    name = parse(path)
    if name is None:
        return ModelFiles(path.stem, "safetensors", (WeightName(path, path.stem, "safetensors", None, None),), None)
    if name.number is None:
        return ModelFiles(name.base, name.kind, (name,), None)
    with reading(path.parent):
        entries = sorted(path.parent.iterdir())
    same = [n for n in map(parse, entries) if n is not None and n.group == name.group]
    index = next((p for p in entries if parse_index(p) == (name.base, name.kind)), None)
    return ModelFiles(name.base, name.kind, tuple(sorted(same, key=_number)) or (name,), index)


def missing_files(files: Sequence[WeightName]) -> list[Path]:
    """Missing files of names such as `-00002-of-00004`, at most `MAX_FILES`."""
    first = files[0]
    if first.total is None:
        return []
    here = {f.number for f in files}
    start = 0 if 0 in here else 1
    numbers = range(start, start + min(int(first.total), MAX_FILES))
    return [_numbered(first, n) for n in numbers if n not in here]


def _numbered(name: WeightName, number: int) -> Path:
    """The file of another number of the same set; numbers are as wide as that of `name`."""
    return name.path.with_name(NUMBER.sub(lambda m: f"-{number:0{len(m[1])}d}-of-", name.path.name, count=1))


def listed(weights: Iterable[ModelFiles]) -> str:
    """Names of models, a few of them."""
    return few(sorted(w.shown for w in weights))
