"""Files that each hold one rank's part of a model, in the forms of frameworks whose parts are not joined here.

Names that say so:

    model-rank-0-part-0.safetensors     vLLM, SGLang (sharded_state)
    model0-mp4.safetensors              DeepSeek's own inference code
    rank0.safetensors                   TensorRT-LLM, with `mapping` in config.json
    model_0.safetensors                 torch's own examples, and others
    tp_00_00.pt, mp_rank_00/model_weights.ckpt, dp_rank_00_tp_rank_01_pp_rank_00.pt    NeMo and its like

A rank alone, as in `ep0-ba5-rank3.pt`, is `rank_names`' matter. Names such as `lora_rank_64` count something else.

Other signs are the content (fairseq's `shard_metadata`, FSDP's `flat_param_0`), and files beside: TensorRT-LLM's
`config.json` with a mapping of several ranks, or a `metadata.pkl` or `metadata.yaml` with words for ranks. Slices look
like whole tensors, so there are no more.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import Any

from ckptools.errors import ReadError
from ckptools.files.file_type import content_of, head_of
from ckptools.files.json_file import read_json
from ckptools.files.location import is_remote
from ckptools.files.opening import File, reading
from ckptools.files.safetensors_header import read_header
from ckptools.files.zip_archive import Container
from ckptools.formats.rank_search.part_files import NUMBER, PartFiles, not_joined
from ckptools.formats.rank_search.rank_names import parse
from ckptools.formats.shared.several import several
from ckptools.model.problems import Code, Problem
from ckptools.model.provenance import KEY
from ckptools.model.tree import tensors_in
from ckptools.pickles import reader

SUFFIXES = (".safetensors", ".pt", ".pth", ".bin", ".ckpt")

WORD = r"(?<![A-Za-z])(?:rank|shard|part|mp|tp|pp)[-_]?\d{1,5}(?!\d)(?:_\d{1,5}(?=\.|$))?"
"""A word that counts ranks, with its number, or two as in `tp_00_00`."""

PART = re.compile(rf"{WORD}|(?<![A-Za-z])model\d{{1,4}}-mp\d")
COUNTED = re.compile(r"model_\d+")
"""Names of ranks, of the models of one run (Accelerate), of steps, and of our outputs: see `_counts_ranks`."""

FIRST_MODEL = "model.safetensors"
"""Accelerate's name for the first of several models; the second is `model_1.safetensors`."""

STEPS = 100
"""Numbers that are all multiples of it count steps, not ranks."""

OTHER_RANKS = re.compile(r"lora|adapter", re.IGNORECASE)
"""Words before `rank` that mean the rank of a matrix."""

FOLDER = re.compile(r"(?:(?:^|_)(?:mp|tp|pp|dp|ep|cp)_rank_\d+)+|(?:rank|mp|tp)[-_]?\d+")
"""A folder that holds one rank's part; the file in it has a name that all ranks share."""

SLICE = re.compile(r"(?<![A-Za-z])(?:(?:mp|tp)[-_]?(?:rank)?[-_]?\d|(?:ep|cp)[-_]rank[-_]?\d)")
"""Words that count slices of tensors: a data-parallel rank holds all of them, a stage some of them whole."""

MAX_ENTRIES = 1 << 16
MAX_COMPARED = 8
MAX_BYTES = 1 << 16
"""Files whose headers are compared, and bytes of their tensors."""

FLAT = re.compile(r"_?flat_param(_\d+)?")
SHARDED = "shard_metadata"
"""Key that fairscale's users write beside the shards of FSDP; files with a rank in their names are joined by it."""

CONFIG = "config.json"
BESIDE = ("metadata.pkl", "metadata.yaml", CONFIG)
RANKS = re.compile(rb"world_?size|tensor_?parallel|tp_size|num_ranks|shard|device_?mesh", re.IGNORECASE)
MAX_READ = 1 << 20
MAPPING = ("world_size", "tp_size", "pp_size")
"""Numbers of ranks in the `mapping` of TensorRT-LLM's configuration."""


def parts_with(path: Path) -> PartFiles | None:
    """The parts beside a file, with itself; None where its name is not that of a part."""
    if path.suffix not in SUFFIXES or OTHER_RANKS.search(path.name):
        return None
    if PART.search(path.stem):
        return _found(path.parent, _pattern(path.name), path)
    if COUNTED.fullmatch(path.stem) and path.suffix == ".safetensors":
        found = _found(path.parent, "model_*.safetensors", path)
        return found if _counts_ranks(found.files, path) else None
    folder = path.parent if path.parent.name else path.absolute().parent
    if FOLDER.fullmatch(folder.name):
        return _found(folder.parent, f"{_pattern(folder.name)}/{path.name}", path)
    return None


def is_slice(path: Path) -> bool:
    """Whether a name counts slices of a model, as `tp_rank_00` does; a rank alone may hold all of it."""
    return SLICE.search(path.stem) is not None


def parts_in(folder: Path) -> PartFiles | None:
    """The one model whose parts a folder holds, by their names; None where it holds other files of weights too.

    Raises:
        SeveralError: it holds parts of several.
    """
    families: dict[str, PartFiles] = {}
    for file in _weights_in(folder):
        found = None if parse(file) is not None and not is_slice(file) else parts_with(file)
        if found is None or (found.files[0].parent == folder) is ("/" in found.pattern):
            return None  # also of a folder that is a part itself
        families.setdefault(found.pattern, found)
    return _only(folder, list(families.values()))


def _only(folder: Path, found: Sequence[PartFiles]) -> PartFiles | None:
    if len(found) > 1:
        raise several(folder, [parts.files[0] for parts in found])
    return found[0] if found else None


def _weights_in(folder: Path) -> list[Path]:
    """The files of weights in a folder, or in its folders of ranks."""
    with reading(folder):
        entries = sorted(islice(folder.iterdir(), MAX_ENTRIES))
        ranks = [e for e in entries if e.is_dir() and FOLDER.fullmatch(e.name)]
        files = [e for e in entries if e.suffix in SUFFIXES and e.is_file()]
        return files or [f for rank in ranks for f in sorted(rank.iterdir()) if f.suffix in SUFFIXES and f.is_file()]


def _pattern(name: str) -> str:
    """A name with `*` for the numbers of its ranks; other numbers, such as a step, stay."""
    return re.sub(WORD, lambda m: NUMBER.sub("*", m[0]), re.sub(r"(?<![A-Za-z])model\d+(?=-mp)", "model*", name))


def _found(folder: Path, pattern: str, path: Path) -> PartFiles:
    """The files of a pattern below a folder; for a single remote file only that one, because only it was named."""
    if is_remote(path):
        return PartFiles((path,), pattern)
    expression = re.compile(r"\d+".join(map(re.escape, pattern.split("*"))))
    depth = pattern.count("/")
    with reading(folder):
        entries = (e / path.name if depth else e for e in islice(folder.iterdir(), MAX_ENTRIES))
        names = (e for e in entries if expression.fullmatch("/".join(e.parts[-1 - depth :])))
        files = sorted((e for e in names if e.is_file()), key=_numbers)
    return PartFiles(tuple(files), pattern)


def _counts_ranks(files: Sequence[Path], path: Path) -> bool:
    """Whether the numbers in `model_0.safetensors` and its like are those of ranks.

    They are, unless each file is proven whole: `consolidate` wrote it, by its own record; the first model of Accelerate
    lies beside it; the numbers are those of steps; or the files are copies of each other.
    """
    numbers = [_numbers(f)[0][-1] for f in files]
    first = path.with_name(FIRST_MODEL)
    if math.gcd(*numbers) >= STEPS or (0 not in numbers and not is_remote(path) and first.is_file()):
        return False
    begun = []
    with suppress(ReadError):
        for one in [path, *(f for f in files if f != path)][:MAX_COMPARED]:
            with File(one) as file:
                header = read_header(file)
                begun.append((*header.tensors, file.read(header.size, min(file.size - header.size, MAX_BYTES))))
                if KEY in header.metadata:
                    return False
    return len(begun) < 2 or len(set(begun)) > 1


def _numbers(path: Path) -> tuple[list[int], str]:
    return [int(n) for n in NUMBER.findall(f"{path.parent.name}/{path.name}")], path.name


def signs_of_a_part(path: Path, tree: Any, beside: bool = True) -> Iterator[Problem]:
    """Yield the first sign that a file is a part: its name, its content without any shard, or a file `beside` it."""
    lora = isinstance(tree, Mapping) and any("lora" in str(key).lower() for key in tree)
    parts = None if lora else parts_with(path)
    why = not_joined(parts) if parts else _by_content(tree) or (_by_what_is_beside(path) if beside else "")
    if why:
        yield Problem(Code.ONE_OF_SEVERAL, why)


def parts_by_content(folder: Path) -> PartFiles | None:
    """The files in a folder that are parts by their own content, numbered from 0; None where it holds others too.

    Raises:
        SeveralError: it holds parts of several models.
    """
    families: dict[str, list[Path]] = {}
    for path in _weights_in(folder):
        numbers = list(NUMBER.finditer(path.stem))
        if not numbers or path.suffix == ".safetensors":
            return None
        last = numbers[-1]
        families.setdefault(f"{path.name[: last.start()]}*{path.name[last.end() :]}", []).append(path)
    found = [PartFiles(tuple(sorted(files, key=_last_number)), pattern) for pattern, files in families.items()]
    return _only(folder, found) if all(map(_are_parts, found)) else None


def _last_number(path: Path) -> int:
    return int(NUMBER.findall(path.stem)[-1])


def _are_parts(parts: PartFiles) -> bool:
    """Whether files are numbered from 0, and the first and the last hold one rank's part by their own content."""
    ends = (parts.files[0], parts.files[-1])
    if len(parts.files) < 2 or list(map(_last_number, parts.files)) != list(range(len(parts.files))):
        return False
    try:
        if not all(path.is_file() and not path.is_symlink() and _has_words_of_parts(path) for path in ends):
            return False
        trees = [reader.read(path).tree for path in ends]
    except ReadError:
        return False
    whole = [t for tree in trees for _, t in tensors_in(tree) if not t.sharded]
    return bool(whole) and all(map(_by_content, trees))


def _has_words_of_parts(path: Path) -> bool:
    """Whether the pickle of a file has a name that `_by_content` looks for; of what is no zip archive it may have."""
    with File(path) as file:
        if content_of(head_of(file)) != "zip":
            return True
        pickle = Container(file).read("data.pkl")
    return any(word.encode() in pickle for word in (SHARDED, "flat_param"))


def _by_content(tree: Any) -> str:
    """Why a file is one rank's by its own content; "" where that says nothing."""
    if isinstance(tree, Mapping) and SHARDED in tree:
        return f"holds one rank's shards by its {SHARDED}; open the files of all ranks (--ranks 'NAME-{{rank}}.pt')"
    for key, _ in tensors_in(tree):
        last = str(key[-1]).rpartition(".")[2] if key else ""
        if FLAT.fullmatch(last):
            return f"holds one rank's part of flattened parameters ({last}), without their shapes and names"
    return ""


def _by_what_is_beside(path: Path) -> str:
    if is_remote(path):  # in a store only files that were named are fetched
        return ""
    for file in (path.with_name(name) for name in BESIDE):
        with suppress(ReadError, OSError):
            if file.is_file() and not file.is_symlink() and (why := _words_of_ranks(file)):
                return why
    return ""


def _words_of_ranks(beside: Path) -> str:
    if beside.name != CONFIG:
        with File(beside) as file:
            found = RANKS.search(file.read(0, min(file.size, MAX_READ)))
        text = f"{beside.name} beside it speaks of several ranks, and what this file holds of them is not known"
        return text if found else ""
    config = read_json(beside)
    mapping = config.get("mapping") if isinstance(config, Mapping) else None
    numbers = (mapping.get(name) for name in MAPPING if isinstance(mapping, Mapping))
    ranks = max((n for n in numbers if type(n) is int), default=1)
    return f"part of {ranks} by the mapping in {CONFIG} beside it; how they join is not known" if ranks > 1 else ""
