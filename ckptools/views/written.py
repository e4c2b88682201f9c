"""What `consolidate` did, or would do, in lines."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from ckptools.dtypes import short
from ckptools.text import and_more, clip, duration, few, plural, printable, size
from ckptools.views.tables import Column, table

if TYPE_CHECKING:
    from ckptools.consolidate.result import Consolidated
    from ckptools.consolidate.sources import SourceChecksums

MAX_NAMED = 5

COPY_COLUMNS = tuple(Column(f"{title}  ") for title in ("tensor", "from file", "at", "to file", "at", "bytes"))
"""Two blanks behind each title keep short numbers under it apart."""


def summary(done: Consolidated, dry_run: bool) -> Iterator[str]:
    """The lines for stdout: each file, and the tensors in it."""
    verb = "would write" if dry_run else "wrote"
    data = [path for path, _ in done.layout.files if path.name != ".metadata"]
    for path in done.files:
        yield printable(f"{verb} {path}")
    took = f" in {duration(done.seconds)}" if not dry_run else ""
    files = f" in {len(data)} files" if len(data) > 1 else ""
    yield f"{plural(done.tensors, 'tensor')}, {size(done.nbytes)}{files}{took}"
    changed: dict[tuple[str, str], set[str]] = {}
    for job in done.layout.jobs:
        if job.dtype != job.tensor.dtype:
            key = (short(job.tensor.dtype), short(job.dtype))
            changed.setdefault(key, set()).add(job.fqn)
    for (old, new), names in changed.items():
        yield f"dtype {old} -> {new}, to nearest even: {plural(len(names), 'tensor')}"
    if dry_run:
        yield _reads(done)
    yield f"source checksums: {_checksums(done.checksums, dry_run)}"
    if done.read_back:
        yield f"checked: {done.read_back}"


def _checksums(found: SourceChecksums | None, dry_run: bool) -> str:
    """Whether the source's checksums were compared, and how many there are."""
    if found is None:
        return "not compared; --check compares them" if dry_run else "not compared (--unchecked)"
    if not found.right:
        return "there are none in the source"
    without = f", {found.without} have none" if found.without else ""
    return f"{plural(found.right, 'record')} right{without}"


def _reads(done: Consolidated) -> str:
    sources = {s.source.path for job in done.layout.jobs for s in job.tensor.shards if s.source}
    parts = sum(1 for job in done.layout.jobs for _ in job.parts())
    nbytes = sum(job.tensor.nbytes for job in done.layout.jobs)
    return f"reads {size(nbytes)} of {plural(len(sources), 'file')}, {plural(parts, 'copy').replace('copys', 'copies')}"


def copies(done: Consolidated) -> Iterator[str]:
    """Every copy of the plan: tensor, from which file and offset, to which file and offset, how many bytes."""
    from ckptools.tensor_io.byte_plan import Copy

    rows = []
    for job in done.layout.jobs:
        target = done.layout.files[job.file][0].name
        for part in job.parts():
            # A band is put together in memory from the shards that meet its box.
            source = (part.source.name, part.source_offset) if isinstance(part, Copy) else ("several", part.box)
            rows.append([job.fqn, source[0], str(source[1]), target, str(job.offset + part.offset), str(part.nbytes)])
    yield from table(COPY_COLUMNS, rows)


def _listed_in(done: Consolidated) -> Path:
    """The file that lists what is not there."""
    return next(path for path in done.files if path.name.endswith(".left-out.json"))


def _filled(done: Consolidated) -> Iterator[str]:
    """Tensors that were written although no file holds some of them."""
    names = [name for name in done.missing if name not in done.left_out]
    for name in names[:MAX_NAMED]:
        yield f"filled: {name}: {few(done.missing[name], 3)}"
    if len(names) > MAX_NAMED:
        yield f"filled: {len(names) - MAX_NAMED} more; all regions are in {_listed_in(done)}"


def remarks(done: Consolidated, dry_run: bool) -> Iterator[str]:
    """The lines for stderr: what the user should know although it went well, and how to load it."""
    yield from (f"note: {note}" for note in done.notes)
    for name, why in list(done.left_out.items())[:MAX_NAMED]:
        yield f"left out: {name}: {why}"
    yield from _filled(done)
    if len(done.left_out) > MAX_NAMED:
        yield f"left out: {len(done.left_out) - MAX_NAMED} more; all are in {_listed_in(done)}"
    if done.odd:
        names = ", ".join(clip(name, 60) for name in done.odd[:3]) + (" …" if len(done.odd) > 3 else "")
        yield f"note: NaN or infinity seen in {plural(len(done.odd), 'tensor')}: {names}"
    if done.tied:
        name, first = next(iter(done.tied.items()))
        more = and_more(len(done.tied) - 1)
        yield f"note: tied weights: {clip(name, 60)} has the bytes of {clip(first, 60)}{more}"
    if done.needs:
        yield (
            f"note: plain torch.load does not make {', '.join(done.needs)}, which --keep-types keeps: it needs "
            "weights_only=False, or these in torch.serialization.safe_globals"
        )
    yield from _not_asked(done)
    if not dry_run:
        yield f"load: {done.load}"


def _not_asked(done: Consolidated) -> Iterator[str]:
    """What the checkpoint holds beside the part that is written by default."""
    if not done.not_asked:
        return
    tensors = [f"{count} in {clip(name, 60)}" for name, count in done.not_asked.items() if count]
    plain = [clip(name, 60) for name, count in done.not_asked.items() if not count]
    told = [f"{plural(sum(done.not_asked.values()), 'tensor')} ({few(tensors, MAX_NAMED)})"] if tensors else []
    told += [f"what is no tensor ({few(plain, MAX_NAMED)})"] if plain else []
    yield f"note: the model alone is written, without {' and '.join(told)}; --only all writes everything"
