"""Names of Hugging Face weight files, and the index that lists them: which files form a model.

    model.safetensors                               one file
    model-00001-of-00004.safetensors                one of several, listed in model.safetensors.index.json
    pytorch_model-00001-of-00004.bin                the same as torch.save files, pytorch_model.bin.index.json
    model.fp16.safetensors                          a variant; its index is model.safetensors.index.fp16.json
    model.fp16-00001-of-00002.safetensors           a variant in several files (transformers)
    diffusion_pytorch_model-00001-of-00002.fp16.safetensors   the same (older diffusers)
    model_1.safetensors                             the second model of an Accelerate run

Source: transformers/utils/__init__.py and modeling_utils.py, diffusers/utils/constants.py, peft/utils/constants.py,
accelerate/checkpointing.py; `consolidated.safetensors` is Mistral's own spelling beside the transformers one.

An index maps each tensor to its file:

    {"metadata": {"total_size": 132960, "total_parameters": 66480},
     "weight_map": {"lm_head.weight": "model-00004-of-00004.safetensors", …}}

An index may have been regenerated from the remaining files: the numbers in their names still count the lost ones.

`total_size` counts the bytes of the tensors, tied ones once, and a bool as an eighth of a byte. Source:
transformers/modeling_utils.py, huggingface_hub/serialization, torch/distributed/checkpoint/hf_storage.py.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from ckptools.errors import ReadError, SeveralError, UnsafePathError
from ckptools.files.opening import is_plain_name, read_json, reading
from ckptools.model.problems import Code, Problem
from ckptools.model.tensor import Tensor
from ckptools.model.tree import describe_for_error
from ckptools.rules.files import strays
from ckptools.text import few, plural
from ckptools.training_state.sections import storage_identity

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


class WeightName(NamedTuple):
    """The file name of a model, or of a part of one.

    Attributes:
        base: the name without number and suffix: `model`, `model.fp16`.
        number: the file's number among several; None for a single file.
        total: the number of files, as spelled; None for a single file.
    """

    path: Path
    base: str
    kind: str
    number: int | None
    total: str | None

    @property
    def group(self) -> tuple[str, str, str | None]:
        """The common part of the names of one model's files."""
        return self.base, self.kind, self.total


@dataclass(frozen=True)
class ModelFiles:
    """The present weight files of one model, by number, and the index that names them."""

    base: str
    kind: str
    files: tuple[WeightName, ...]
    index: Path | None

    @property
    def stem(self) -> str:
        """The name without a variant."""
        return self.base.partition(".")[0]

    @property
    def model(self) -> str | None:
        """The name of the model in the folder, if it has a common name; None for any other name."""
        for name, pattern in KNOWN:
            found = pattern.fullmatch(self.stem)
            if found:
                return name + "".join(found.groups())
        return None

    @property
    def rank(self) -> tuple[bool, bool, int, int]:
        """Sort key among several spellings of a model: transformers' order, an index first."""
        order = SPELLINGS.index(self.stem) if self.stem in SPELLINGS else 0
        form = 0 if self.index else 1 if self.files[0].number is None else 2
        return "." in self.base, self.kind == "bin", order, form

    @property
    def shown(self) -> str:
        """The model's name in messages: its index or its single file, else the first of several."""
        return self.index.name if self.index else self.files[0].path.name


def parse(path: Path) -> WeightName | None:
    """Parse the name of a weight file; None for any other name."""
    found = FILE.fullmatch(path.name)
    if not found or not found["head"]:
        return None
    number = None if found["number"] is None else int(found["number"])
    return WeightName(path, found["head"] + (found["variant"] or ""), found["kind"], number, found["total"])


def parse_index(path: Path) -> tuple[str, str] | None:
    """Parse the name of an index into its base and kind; None for any other name."""
    found = INDEX.fullmatch(path.name)
    return (found["head"] + (found["variant"] or ""), found["kind"]) if found and found["head"] else None


def model_files_in(folder: Path) -> list[ModelFiles]:
    """The weight files of every model in a folder; a lone `.bin` counts only under a common name."""
    with reading(folder):
        entries = sorted(p for p in folder.iterdir() if p.is_file())
    indexes = {key: p for p in entries if (key := parse_index(p)) is not None}
    groups: dict[tuple[str, str, str | None], list[WeightName]] = {(*key, None): [] for key in indexes}
    for name in filter(None, map(parse, entries)):
        group = (name.base, name.kind, None) if (name.base, name.kind) in indexes else name.group
        groups.setdefault(group, []).append(name)
    found = [ModelFiles(b, k, tuple(sorted(n, key=_number)), indexes.get((b, k))) for (b, k, _), n in groups.items()]
    return [w for w in found if w.kind == "safetensors" or w.index or w.model or w.files[0].number is not None]


def _number(name: WeightName) -> int:
    return -1 if name.number is None else name.number


def models_of_folder(folder: Path, found: Sequence[ModelFiles]) -> dict[str, ModelFiles]:
    """The models of a folder by their name in the tree: `model`, and `model_1` … if Accelerate saved several.

    Raises:
        SeveralError: it contains several that are not one model in different spellings.
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
        names = few(sorted(w.shown for w in ordered))
        raise SeveralError(folder, f"holds {len(ordered)} models; name the one you mean: {names}")
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
    """Missing numbers of names such as `-00002-of-00004`, at most `MAX_FILES`."""
    first = files[0]
    if first.total is None:
        return []
    here = {f.number for f in files}
    start = 0 if 0 in here else 1
    numbers = range(start, start + min(int(first.total), MAX_FILES))
    return [_numbered(first, n) for n in numbers if n not in here]


def missing_of_sets(paths: Iterable[Path]) -> list[Path]:
    """Files that are missing from sets of numbered names, for each set among the paths."""
    sets: dict[tuple[str, str, str | None], list[WeightName]] = {}
    for name in filter(None, map(parse, paths)):
        sets.setdefault(name.group, []).append(name)
    return [path for files in sets.values() for path in missing_files(files)]


def _numbered(name: WeightName, number: int) -> Path:
    """The file of another number in the set that a file name belongs to, such as model-00002-of-00003."""
    return name.path.with_name(NUMBER.sub(lambda m: f"-{number:0{len(m[1])}d}-of-", name.path.name, count=1))


# -- the index ---------------------------------------------------------------------------------------------------------

MAX_SIZE = 1 << 62


class Index(NamedTuple):
    """An index: the file of each tensor, and the total bytes of all tensors, if stated."""

    path: Path
    weight_map: Mapping[str, str]
    total_size: int | None

    @property
    def files(self) -> list[str]:
        """The names of the model's files, sorted."""
        return sorted(set(self.weight_map.values()))


def read_index(path: Path) -> Index:
    """Read an index; its names must be plain names of files beside it.

    Raises:
        ReadError: it is not an index.
        UnsafePathError: it names a file elsewhere.
    """
    found = read_json(path)
    weight_map = found.get("weight_map") if isinstance(found, dict) else None
    if not isinstance(weight_map, dict) or not weight_map or not all(isinstance(v, str) for v in weight_map.values()):
        raise ReadError(path, "expected a `weight_map` of tensor names to file names; no index of a model")
    for name in sorted(set(weight_map.values())):
        if not is_plain_name(name):
            raise UnsafePathError(path, f"names the file {describe_for_error(name)}; only files beside it are read")
    metadata = found.get("metadata")
    total = metadata.get("total_size") if isinstance(metadata, dict) else None
    return Index(path, weight_map, int(total) if isinstance(total, (int, float)) and 0 <= total < MAX_SIZE else None)


def check_index(index: Index, files: Mapping[str, Mapping[str, Any]]) -> list[Problem]:
    """Find contradictions between an index and the tensors of the files that were read."""
    where: dict[str, list[str]] = {}
    for file, tensors in files.items():
        for name in tensors:
            where.setdefault(name, []).append(file)
    source = index.path.name
    problems = []
    moved: dict[tuple[str, str], list[str]] = {}
    for name, file in index.weight_map.items():
        found = where.get(name)
        if found is None:
            why = "which holds no such tensor" if file in files else "which is not here or damaged"
            text = f"{source} says that it is in {file}, {why}"
            blamed = (file,) if file in files else ()
            problems.append(Problem(Code.MODEL_PART_MISSING, text, None, name, files=blamed))
        elif file not in found:
            moved.setdefault((found[0], file), []).append(name)
        elif len(found) > 1:
            odd = [other for other in found if other != file]
            text = f"holds it too; {source} places it in {file}, whose values are shown"
            problems += strays(odd, text, tensor=name)
    for (file, stated), names in moved.items():
        text = f"{file}: holds {_some(names)} that {source} places in {stated}"
        problems.append(Problem(Code.NAME_CONTRADICTS, text, files=(file,), found=stated, expected=file))
    unlisted: dict[str, list[str]] = {}
    for name, found in where.items():
        if name not in index.weight_map:
            unlisted.setdefault(found[0], []).append(name)
            if len(found) > 1:
                problems += strays(found, "each of them holds it; the first is shown", tensor=str(name))
    for file, names in unlisted.items():
        text = f"{file}: holds {_some(names)} that {source} does not name; read all the same"
        problems.append(Problem(Code.NAME_CONTRADICTS, text, files=(file,)))
    return problems


def _some(names: Sequence[str]) -> str:
    return f"{plural(len(names), 'tensor')} ({describe_for_error(names[0])}{', …' if len(names) > 1 else ''})"


def check_total_size(index: Index, tensors: Iterable[Tensor]) -> list[Problem]:
    """Find an index whose `total_size` is not the size of its tensors, whether tied tensors count once or each time."""
    every = list(tensors)
    most = sum(t.nbytes for t in every)
    once = {storage_identity(t) or id(t): t for t in every}.values()
    least = sum(-(-t.nbytes // 8) if t.dtype == "bool" else t.nbytes for t in once)
    if index.total_size is None or least <= index.total_size <= most:
        return []
    text = f"{index.path.name} says total_size {index.total_size}, and the tensors have {most} bytes"
    return [Problem(Code.NAME_CONTRADICTS, text)]
