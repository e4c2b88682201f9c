"""The record of `inspect`, which text, JSON and notebooks render.

Nothing is escaped or cut here: names are as in the file.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from ckptools.display.next_command import command_arguments, next_command
from ckptools.files.location import common_folder
from ckptools.inspect.section_summary import OptimizerRow, SchedulerRow, optimizer_rows, scheduler_rows, section_summary
from ckptools.keys.sharding import ShardingRow, sharding_name, sharding_rows
from ckptools.model.checkpoint import Checkpoint, Fact
from ckptools.model.problems import Problem, worst_first
from ckptools.model.provenance import Provenance
from ckptools.model.tree import fqn_of, walk
from ckptools.model.verdict import Verdict
from ckptools.pickles.foreign_names import foreign_classes, foreign_problems, suspicious_names
from ckptools.training_state.judgement import verdict_of
from ckptools.training_state.modules import module_problems
from ckptools.training_state.section_size import SectionSize, measure
from ckptools.training_state.sections import Section, SectionKind, sections_of, sections_of_kind

TORCH_KEYS = ("torch_version", "pytorch_version", "torch")
WRITER_KEYS = (
    "composer_version", "pytorch-lightning_version", "lightning_version", "deepspeed_version", "ds_version",
    "megatron_version", "transformers_version", "accelerate_version", "checkpoint_version",
)  # fmt: skip


class RankCount(NamedTuple):
    """Ranks that saved it (None if unknown), those with undamaged files here, those that were read, and files here."""

    expected: int | None
    here: int
    read: int
    files: int


class SectionRow(NamedTuple):
    """One section of the tree, and its contents in words; `plain` is a single value or an empty container."""

    kind: SectionKind
    name: str
    path: tuple[Any, ...]
    size: SectionSize
    holds: str
    plain: bool


class Report(NamedTuple):
    """Everything shown by `inspect`.

    Attributes:
        saved_as: how it was saved, for people.
        sharding: the same, for programs.
        world_size: ranks that saved it; without a value if one file has everything and does not record it.
        bytes_expected: bytes that they should have; None if unknown.
        saved: first and last file time, in seconds since 1970; None without files.
        foreign: names of foreign classes.
        suspicious: names that could run code.
        differing: names of values that differ between ranks, as they may.
        provenance: its source, if `consolidate` wrote it.
        arguments: command-line arguments that open it again, with the same options.
        next: the next command that users want; "" if none would work.
    """

    checkpoint: Checkpoint
    name: str
    folder: Path
    saved_as: str
    sharding: str
    verdict: Verdict
    problems: tuple[Problem, ...]
    world_size: Fact
    ranks: RankCount
    layout: tuple[ShardingRow, ...]
    bytes_found: int
    bytes_expected: int | None
    saved: tuple[float, float] | None
    torch: Fact
    writers: tuple[tuple[str, str], ...]
    sections: tuple[SectionRow, ...]
    optimizers: tuple[OptimizerRow, ...]
    schedulers: tuple[SchedulerRow, ...]
    foreign: tuple[str, ...]
    suspicious: tuple[str, ...]
    differing: tuple[str, ...]
    provenance: Provenance | None
    arguments: str
    next: str


def inspect_report(ck: Checkpoint) -> Report:
    """Report on an opened checkpoint, without reading a file."""
    foreign = foreign_classes(ck.tree)
    suspicious = suspicious_names(ck.names, foreign)
    alone = ck.world_size.value in (None, 1)
    named = [*foreign_problems(foreign, suspicious), *module_problems(ck.tree)]
    versions = dict(_versions(ck))
    times = [f.modified for f in ck.files if f.modified]
    return Report(
        checkpoint=ck,
        name=ck.name,
        # Megatron has a folder for each rank.
        folder=common_folder([f.path.parent for f in ck.files]) if ck.files else ck.path,
        saved_as=ck.saved_as,
        sharding=sharding_name(ck),
        verdict=verdict_of(ck),
        problems=worst_first(dict.fromkeys([*ck.problems, *named])),
        world_size=Fact(None, ck.world_size.sources) if len(ck.files) == 1 and alone else ck.world_size,
        ranks=_rank_count(ck),
        layout=sharding_rows(ck),
        bytes_found=sum(f.nbytes for f in ck.files),
        bytes_expected=ck.bytes_expected,
        saved=(min(times), max(times)) if times else None,
        torch=_torch_version(versions),
        writers=tuple((fqn, v) for fqn, v in versions.items() if fqn.rpartition(".")[2] in WRITER_KEYS),
        sections=tuple(_section_row(ck, s) for s in sections_of(ck)),
        optimizers=optimizer_rows(ck),
        schedulers=scheduler_rows(ck),
        foreign=tuple(foreign),
        suspicious=suspicious,
        differing=tuple(map(fqn_of, ck.differing)),
        provenance=ck.provenance if ck.provenance and ck.provenance.sources else None,
        arguments=command_arguments(ck),
        next=str(next_command(ck) or ""),
    )


def _rank_count(ck: Checkpoint) -> RankCount:
    read = {f.rank for f in ck.files if f.status == "read" and (f.rank is not None or not ck.ranks)}
    files = sum(f.status != "missing" for f in ck.files)
    if len(ck.files) == 1 and verdict_of(ck).whole:
        return RankCount(None, 1, 1, files)
    return RankCount(ck.world_size.value, len(ck.ranks), len(read), files)


def _section_row(ck: Checkpoint, section: Section) -> SectionRow:
    size = measure(section.value)
    plain = section.kind == "other" and (not isinstance(section.value, (Mapping, list, tuple)) or not section.value)
    return SectionRow(section.kind, section.name, section.path, size, section_summary(ck, section, size), plain)


def _versions(ck: Checkpoint) -> Mapping[str, str]:
    """Versions of the writing software that files record, by the name of the value: `metadata.torch_version`."""
    found = dict(ck.stated_versions)
    for section in sections_of_kind(ck, "other"):
        for path, leaf in walk(section.value):
            key = path[-1] if path else section.path[-1] if section.path else None
            if isinstance(leaf, (str, int, float)) and key in (*TORCH_KEYS, *WRITER_KEYS) and len(str(leaf)) < 60:
                found[".".join([section.name, *map(str, path)])] = str(leaf)
    return found


def _torch_version(versions: Mapping[str, str]) -> Fact:
    for fqn, version in versions.items():
        if fqn.rpartition(".")[2] in TORCH_KEYS and version[:1].isdigit():
            return Fact(version, (fqn,))
    return Fact(None)
