"""File names that say that a file is one rank's part of a model, as frameworks spell them that are not joined here.

    model-rank-0-part-0.safetensors     vLLM, SGLang (sharded_state)
    model0-mp4.safetensors              DeepSeek's own inference code
    rank0.safetensors                   TensorRT-LLM, with `mapping` in config.json
    checkpoint_5-shard0.pt              fairseq under FSDP
    model_0.safetensors                 one of several with the same names: torch's own examples, and others
    tp_00_00.pt, mp_rank_00/model_weights.ckpt, dp_rank_00_tp_rank_01_pp_rank_00.pt    NeMo and its like

A rank alone, as in `ep0-ba5-rank3.pt`, is `rank_names`' matter. Names such as `lora_rank_64` count something else.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import NamedTuple

from ckptools.errors import ReadError
from ckptools.files.location import is_remote
from ckptools.files.opening import File, reading
from ckptools.files.safetensors_header import read_header
from ckptools.formats.shared.rank_names import parse
from ckptools.formats.shared.several import several
from ckptools.text import few, plural

SUFFIXES = (".safetensors", ".pt", ".pth", ".bin", ".ckpt")

WORD = r"(?<![A-Za-z])(?:rank|shard|part|mp|tp|pp)[-_]?\d{1,5}(?!\d)(?:_\d{1,5}(?=\.|$))?"
"""A word that counts ranks, with its number, or two as in `tp_00_00`."""

PART = re.compile(rf"{WORD}|(?<![A-Za-z])model\d{{1,4}}-mp\d")
COUNTED = re.compile(r"model_\d+")
"""A name that ranks have, and the models of one run (Accelerate): the names of the tensors tell which."""

OTHER_RANKS = re.compile(r"lora|adapter", re.IGNORECASE)
"""What has a rank in its name that is that of a matrix."""

FOLDER = re.compile(r"(?:(?:^|_)(?:mp|tp|pp|dp|ep|cp)_rank_\d+)+|(?:rank|mp|tp)[-_]?\d+")
"""A folder that holds one rank's part; the file in it has a name that all ranks share."""

SLICE = re.compile(r"(?<![A-Za-z])(?:(?:mp|tp)[-_]?(?:rank)?[-_]?\d|(?:ep|cp)[-_]rank[-_]?\d)")
"""Words that count slices of tensors: a data-parallel rank holds all of them, a stage some of them whole."""

NUMBER = re.compile(r"\d+")
MAX_ENTRIES = 1 << 16
MAX_COMPARED = 8
MAX_BYTES = 1 << 16
"""Files whose headers are compared, and bytes of their tensors."""


class Parts(NamedTuple):
    """The files that are parts of one model by their names.

    Attributes:
        files: in the order of the numbers in their names.
        pattern: what they are called, with `*` for the numbers.
    """

    files: tuple[Path, ...]
    pattern: str

    @property
    def text(self) -> str:
        """What they are, for a problem."""
        files = plural(len(self.files), "file")
        return f"part of {files} by {'its name' if len(self.files) == 1 else 'their names'} ({self.pattern})"


def parts_with(path: Path) -> Parts | None:
    """The files that a file is a part with, itself included; None where its name does not say so."""
    if path.suffix not in SUFFIXES or OTHER_RANKS.search(path.name):
        return None
    if PART.search(path.stem):
        return _found(path.parent, _pattern(path.name), path)
    if COUNTED.fullmatch(path.stem) and path.suffix == ".safetensors":
        found = _found(path.parent, "model_*.safetensors", path)
        return found if _have_the_same_names(found.files) else None
    folder = path.parent if path.parent.name else path.absolute().parent
    if FOLDER.fullmatch(folder.name):
        return _found(folder.parent, f"{_pattern(folder.name)}/{path.name}", path)
    return None


def is_slice(path: Path) -> bool:
    """Whether a name counts slices of a model, as `tp_rank_00` does; a rank alone may hold all of it."""
    return SLICE.search(path.stem) is not None


def parts_in(folder: Path) -> Parts | None:
    """The one model of which a folder holds parts by their names; None where it holds other files of weights too.

    Raises:
        SeveralError: it holds parts of several.
    """
    families: dict[str, Parts] = {}
    for file in _weights_in(folder):
        found = None if _is_plain_rank(file) else parts_with(file)
        if found is None or (found.files[0].parent == folder) is ("/" in found.pattern):
            return None  # also of a folder that is a part itself
        families.setdefault(found.pattern, found)
    if len(families) > 1:
        raise several(folder, [parts.files[0] for parts in families.values()])
    return next(iter(families.values()), None)


def _is_plain_rank(path: Path) -> bool:
    return parse(path) is not None and not is_slice(path)


def _weights_in(folder: Path) -> list[Path]:
    """The files of weights in a folder, or in those below it that are a rank's."""
    with reading(folder):
        entries = sorted(islice(folder.iterdir(), MAX_ENTRIES))
        ranks = [e for e in entries if e.is_dir() and FOLDER.fullmatch(e.name)]
        files = [e for e in entries if e.suffix in SUFFIXES and e.is_file()]
        return files or [f for rank in ranks for f in sorted(rank.iterdir()) if f.suffix in SUFFIXES and f.is_file()]


def _pattern(name: str) -> str:
    """A name with `*` for the numbers of its ranks; other numbers, such as a step, stay."""
    return re.sub(WORD, lambda m: NUMBER.sub("*", m[0]), re.sub(r"(?<![A-Za-z])model\d+(?=-mp)", "model*", name))


def _found(folder: Path, pattern: str, path: Path) -> Parts:
    """The files of a pattern below a folder; of a file elsewhere only that one is known, nothing else was named."""
    if is_remote(path):
        return Parts((path,), pattern)
    expression = re.compile(r"\d+".join(map(re.escape, pattern.split("*"))))
    depth = pattern.count("/")
    with reading(folder):
        entries = (e / path.name if depth else e for e in islice(folder.iterdir(), MAX_ENTRIES))
        names = (e for e in entries if expression.fullmatch("/".join(e.parts[-1 - depth :])))
        files = sorted((e for e in names if e.is_file()), key=_numbers)
    return Parts(tuple(files), pattern)


def _have_the_same_names(files: Sequence[Path]) -> bool:
    """Whether several safetensors are numbered from 0 and have tensors of the same names, but not the same bytes."""
    if len(files) < 2 or [_numbers(f)[0][-1] for f in files] != list(range(len(files))):
        return False
    found = []
    with suppress(ReadError):
        for path in files[:MAX_COMPARED]:
            with File(path) as file:
                header = read_header(file)
                found.append((header.tensors.keys(), file.read(header.size, min(file.size - header.size, MAX_BYTES))))
    names, values = zip(*found, strict=True) if found else ((), ())
    return len(found) > 1 and all(n == names[0] for n in names) and len(set(values)) == len(values)


def _numbers(path: Path) -> tuple[list[int], str]:
    return [int(n) for n in NUMBER.findall(f"{path.parent.name}/{path.name}")], path.name


def not_joined(parts: Parts) -> str:
    """One line: what a file of these is, and that nobody knows how they join."""
    return f"{parts.text}: {few([p.name for p in parts.files])}; how they join is not known"
