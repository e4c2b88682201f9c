"""Signs in files with whole tensors that parts of the model lie in other files, or that the tensors are slices.

The file of one pipeline stage looks like that of a whole model. Signs of a stage: files name their stage; numbered
layers are absent; ranks hold parameters of their own and no file states the number of ranks; or some of such files hold
the same parameters. Only the first proves that something is missing; the others are reasons not to call it whole.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from typing import Any

from ckptools.errors import ReadError
from ckptools.files.file_type import content_of, head_at
from ckptools.formats.rank_search.part_files import not_joined
from ckptools.formats.rank_search.parts import is_slice, parts_with
from ckptools.formats.rank_search.rank_names import columns
from ckptools.model.problems import Code, Problem
from ckptools.model.rank_vote import same_records
from ckptools.model.tensor import Tensor
from ckptools.model.tree import tensors_in
from ckptools.pickles.reader import Saved
from ckptools.text import few, plural, spans
from ckptools.training_state.parameter_names import without_wrappers
from ckptools.training_state.sections import Section, find_sections

STAGES = (
    ("pp_rank", "pp_size"),
    ("pp_rank", "pp_world_size"),
    ("pipeline_parallel_rank", "pipeline_parallel_size"),
    ("pipeline_model_parallel_rank", "pipeline_model_parallel_size"),
    ("stage", "num_stages"),
    ("stage_id", "num_stages"),
    ("stage_index", "num_stages"),
)
"""Names for the number of a stage and the number of stages; the last as in `torch.distributed.pipelining`."""

SLICES = "slices, which --rules FILE joins, or copies that are not of one save"
MIN_TELLING = 16
"""Fewer elements than this prove nothing, whether their bytes are equal or not."""

MAX_NAMED = 3
"""At most this many ranks with the same parameters are named."""

Ranked = Sequence[tuple[int, Any]]
"""The tree of each rank's file, in rank order."""


def signs_of_more(ranked: Ranked, in_parts: bool, world_stated: bool) -> Iterator[Problem]:
    """Yield signs that other files hold, or may hold, parameters, beside those whose trees are given; none is sharded.

    With `in_parts` ranks hold parameters of their own; `world_stated` if files or names have the number of ranks.
    """
    models: dict[int, list[Mapping[str, Any]]] = {}
    for rank, tree in ranked:  # a rank may have several files
        models.setdefault(rank, []).extend(_models(tree))
    stages = {claim for _, tree in ranked if (claim := _stage(tree)) is not None}
    yield from _missing_stages(stages)
    for where, absent in missing_layers([model for own in models.values() for model in own]).items():
        text = f"{where} has no {absent} here, and later ones; another file may hold what is absent"
        yield Problem(Code.MODEL_PART_MISSING, text, severity="warning")
    if in_parts and not (world_stated or stages):
        text = "ranks hold parameters of their own, and nothing states how many ranks there were"
        yield Problem(Code.MODEL_PART_MISSING, text, severity="warning")
    yield from _copied(models) if in_parts else ()


def _models(tree: Any) -> list[Mapping[str, Any]]:
    return [section.value for section in find_sections(tree) if section.kind == "model"]


def _stage(tree: Any) -> tuple[int, int, str] | None:
    """`(number, count, key)` of the stage that a file names, at its root or in a dict there."""
    nodes = [tree, *tree.values()] if isinstance(tree, Mapping) else []
    for node in (n for n in nodes if isinstance(n, Mapping)):
        for number, count in STAGES:
            stage, stages = node.get(number), node.get(count)
            if type(stage) is int and type(stages) is int and 0 <= stage < stages > 1:
                return stage, stages, f"{number} and {count}"
    return None


def _missing_stages(claims: Collection[tuple[int, int, str]]) -> Iterator[Problem]:
    here, counts = {stage for stage, _, _ in claims}, sorted({count for _, count, _ in claims})
    said = next((why for _, _, why in claims), "")
    if len(counts) > 1:
        yield Problem(Code.WORLD_SIZES_DISAGREE, f"files speak of {counts[0]} and of {counts[1]} stages ({said})")
    elif counts and len(here) < counts[0]:
        text = f"holds stage {spans(here)} of {counts[0]} by its own account ({said}); the others are in no file here"
        yield Problem(Code.MODEL_PART_MISSING, text)


def missing_layers(models: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """Absent numbers before the last of numbered modules, by the path of these: `{"blocks": "0, 1"}`.

    A module without parameters has a number and no tensors. State dicts list it in their `_metadata`; where one does
    not have that, modules count that have modules themselves, as layers do.
    """
    listed = [getattr(model, "_metadata", None) for model in models]
    numbers: dict[str, set[int]] = {}
    for name in (name for model in models for name, value in model.items() if isinstance(value, Tensor)):
        _add_numbers(numbers, name, 1 if all(listed) else 2)
    for name in (name for modules in listed for name in (modules if all(listed) and modules else ())):
        _add_numbers(numbers, str(name), 0)
    gaps = ((where, pairwise((-1, *sorted(found)))) for where, found in numbers.items())
    absent = {where: spans(n for a, b in pairs for n in range(a + 1, b)) for where, pairs in gaps}
    return {where: text for where, text in absent.items() if text}


def _add_numbers(numbers: dict[str, set[int]], name: str, behind: int) -> None:
    """Record the numbers in a name with at least `behind` more parts behind them."""
    parts = without_wrappers(name).split(".")
    for at in range(len(parts) - behind):
        if parts[at].isdecimal() and len(parts[at]) < 6:
            numbers.setdefault(".".join(parts[:at]) or "the model", set()).add(int(parts[at]))


def other_parts_beside(path: Path, tree: Any, read_file: Callable[[Path], Saved]) -> Iterator[Problem]:
    """Yield files with the next or the previous number in their names, and with parameters that this one lacks.

    Saves of one model at several steps have the same names, and are no parts of each other.
    """
    own = {name for model in _models(tree) for name in model}
    for column in (c for c in columns(path) if c.level == 0):
        number = int(path.name[column.start : column.end])
        for other in (n for n in (number - 1, number + 1) if n >= 0):
            digits = str(other).zfill(column.end - column.start)
            beside = path.with_name(f"{path.name[: column.start]}{digits}{path.name[column.end :]}")
            names = _names_in(beside, read_file)
            lacking = [name for name in names if name not in own]
            if lacking and own.difference(names):
                text = f"{beside.name} beside it holds parameters that it lacks ({few(lacking, 1)})"
                yield Problem(Code.ONE_OF_SEVERAL, f"{text}; name both to open them as one", severity="warning")


def _names_in(path: Path, read_file: Callable[[Path], Saved]) -> list[str]:
    """The names in the models of a file; none where it is no zip archive, the only form that is quick to read."""
    with suppress(ReadError, OSError):
        if path.is_file() and not path.is_symlink() and content_of(head_at(path)) == "zip":
            return [name for model in _models(read_file(path).tree) for name in model]
    return []


def _copied(models: Mapping[int, Sequence[Mapping[str, Any]]]) -> Iterator[Problem]:
    """Ranks with the same parameters, where other parameters are on fewer ranks: a file may be another's copy."""
    ranks: dict[tuple[str, ...], list[int]] = {}
    for rank, own in models.items():
        ranks.setdefault(tuple(sorted(name for model in own for name in model)), []).append(rank)
    if len({len(same) for same in ranks.values()}) > 1:
        same = [f"ranks {spans(r)}" for r in ranks.values() if len(r) > 1]
        text = f"{few(same, MAX_NAMED)} hold the same parameters, and others are on fewer ranks; a file may be a copy"
        yield Problem(Code.MODEL_PART_MISSING, text, severity="warning")


def parts_by_rank(path: Path, sections: Sequence[Section]) -> Iterator[Problem]:
    """Yield signs that the plain tensors in the merged sections of rank files are slices, not replicas."""
    parts = parts_with(path) if is_slice(path) else None
    if parts is not None:
        yield Problem(Code.ONE_OF_SEVERAL, not_joined(parts))
        return
    tensors = [t for s in sections if s.kind == "model" for _, t in tensors_in(s.value)]
    other = [t for t in tensors if not same_records(t.shards)]
    if 2 * len(other) > len(tensors) and sum(t.numel for t in other) >= MIN_TELLING:
        ranks = len({s.rank for t in other for s in t.shards})
        text = (
            f"{len(other)} of {plural(len(tensors), 'tensor')} of the model have other bytes on each of {ranks} ranks"
        )
        yield Problem(Code.ONE_OF_SEVERAL, f"{text}: {SLICES}", severity="warning")
