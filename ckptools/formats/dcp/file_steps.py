"""Files of a DCP folder that are from another save, by the steps that the optimizer counts for the parameters in each.

A DCP has one copy of each parameter's step, in the file of the rank that had least to write (`dedup_save_plans`), so
most files have some. Where those of one file agree, and contradict those of all others, the file was written at another
step. Steps of parameters that were frozen for a while differ too, but whichever file they are in; only a stage of a
pipeline could have all of its own. So it is an error where moments of those parameters lie in other files as well.
"""

from __future__ import annotations

import math
import struct
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

from ckptools.dtypes import ITEMSIZE
from ckptools.errors import ReadError
from ckptools.files.opening import OpenFiles
from ckptools.model.checkpoint import Fact
from ckptools.model.problems import Code, Problem, Severity
from ckptools.model.source import Source
from ckptools.model.tensor import Tensor
from ckptools.text import plural, spans
from ckptools.training_state.judgement import ELEMENTWISE
from ckptools.training_state.steps import RANKS_DIFFER

CODES = {"float32": "<f", "float64": "<d", "int64": "<q", "int32": "<i"}

MAX_READ = 1000
"""At most this many different steps of a file are read; checksums show which are equal."""


class FileSteps(NamedTuple):
    """The steps in the files of a DCP folder.

    Attributes:
        problems: files that are of another save than most.
        step: the step of most files, where they have different ones.
    """

    problems: list[Problem]
    step: Fact | None


def compare_steps(
    tensors: Mapping[str, Any], counters: Iterable[tuple[Path, int]], ranks: Mapping[Path, int | None]
) -> FileSteps:
    """Compare the steps that optimizers count, file by file.

    Args:
        tensors: those of a folder, by fqn.
        counters: other counts of steps and the files that they lie in, which may support one of those steps.
        ranks: of the files.
    """
    found: dict[str, dict[Path, dict[str, Source]]] = defaultdict(lambda: defaultdict(dict))
    for fqn, value in tensors.items():
        owner, _, slot = fqn.rpartition(".")
        if slot == "step" and isinstance(value, Tensor) and value.numel == 1 and value.dtype in CODES:
            sources = [shard.source for shard in value.found if shard.source is not None]
            if len(sources) == 1:
                optimizer = owner.rpartition("state.")[0]
                found[optimizer][sources[0].path][owner] = sources[0]
    made = FileSteps([], None)
    for files in found.values():
        made = _compared(files, tensors, counters, ranks) if len(files) > 1 and not made.problems else made
    return made


def _compared(
    files: Mapping[Path, Mapping[str, Source]],
    tensors: Mapping[str, Any],
    counters: Iterable[tuple[Path, int]],
    ranks: Mapping[Path, int | None],
) -> FileSteps:
    kinds = {(source.crc, source.dtype) for of_file in files.values() for source in of_file.values()}
    if len(kinds) == 1 and all(crc for crc, _ in kinds):
        return FileSteps([], None)
    with OpenFiles() as opened:
        steps = {path: set(_read(of_file.values(), opened)) for path, of_file in files.items()}
    known = set().union(*steps.values())
    held = {(path, step) for path, of_file in steps.items() for step in of_file}
    held |= {(path, step) for path, step in counters if step in known}
    holders = Counter(step for _, step in held)
    usual, count = holders.most_common(1)[0] if holders else (0, 0)
    most = 2 * count > len({path for path, _ in held})
    problems = []
    for path, of_file in steps.items():
        if of_file and all(holders[step] == 1 for step in of_file):
            cut = len(files[path]) > 1 and any(_is_elsewhere(owner, path, tensors) for owner in files[path])
            text = f"{path.name} counts {spans(of_file)} in {plural(len(files[path]), 'optimizer step')}"
            text += f", most files count {usual}" if most else ", and other files count others"
            text += f"; it {'is' if cut else 'may be'} of another save"
            severity: Severity = "error" if cut else "warning"
            problems.append(Problem(Code.MIXED_SAVES, text, ranks.get(path), severity=severity, files=(path.name,)))
    fact = Fact(usual, (f"counters in {plural(count, 'file')}", RANKS_DIFFER), agree=False)
    return FileSteps(problems, fact if problems and most else None)


def _read(sources: Iterable[Source], files: OpenFiles) -> Iterator[int]:
    """Each step once; what cannot be read has a problem of its own."""
    known = {source.crc or number: source for number, source in enumerate(sources)}
    for source in islice(known.values(), MAX_READ):
        with suppress(ReadError), files.open(source.path) as file:
            (step,) = struct.unpack(CODES[source.dtype], file.read(source.offset, ITEMSIZE[source.dtype]))
            if math.isfinite(step):
                yield int(step)


def _is_elsewhere(owner: str, path: Path, tensors: Mapping[str, Any]) -> bool:
    """Whether moments of a parameter lie in other files than its step."""
    slots = (tensors.get(f"{owner}.{slot}") for slot in ELEMENTWISE)
    found = {shard.source.path for slot in slots if isinstance(slot, Tensor) for shard in slot.found if shard.source}
    return not found <= {path}
