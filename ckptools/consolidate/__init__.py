"""Many shards into one file: choose, plan, copy, publish.

Nothing is written before everything is checked, and nothing has its final name before everything is written.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from ckptools.errors import RefusedError, UsageError
from ckptools.formats import with_all_ranks

if TYPE_CHECKING:
    from ckptools.consolidate.execute import Progress
    from ckptools.consolidate.publish import Seen
    from ckptools.consolidate.selection import Selection
    from ckptools.consolidate.sources import SourceChecksums
    from ckptools.consolidate.writers.layout import Layout, Writer
    from ckptools.model.checkpoint import Checkpoint


@dataclass(frozen=True)
class Consolidated:
    """What was written, or would be.

    Attributes:
        files: paths of the output, data files first; a folder that is one output stands for what is in it.
        nbytes: bytes of the tensors' files.
        tensors: number of tensors.
        seconds: wall time; 0 for a dry run.
        left_out: names that were not written, with the reason.
        missing: names of tensors with holes, left out or filled, with the regions that no file holds.
        needs: classes in a `.pt` that plain `torch.load` does not make; none without `keep_types`.
        tied: names that share the bytes of an earlier name, with that name.
        notes: what the user should know.
        layout: the plan: every tensor with its place, and every copy.
        not_asked: sections that were not written because nobody asked for them, with how many tensors each has.
        checksums: how the source's checksums were compared; None when they were not.
        odd: names of tensors in which NaN or infinity was seen on the way.
        read_back: how the output was read back and compared; empty when it was not.
    """

    files: tuple[Path, ...]
    nbytes: int
    tensors: int
    seconds: float
    left_out: dict[str, str]
    missing: dict[str, tuple[str, ...]]
    needs: tuple[str, ...]
    tied: dict[str, str]
    notes: tuple[str, ...]
    layout: Layout
    checksums: SourceChecksums | None = None
    odd: tuple[str, ...] = ()
    read_back: str = ""
    not_asked: dict[str, int] = field(default_factory=dict)

    @property
    def load(self) -> str:
        """The line of Python that loads the output."""
        return self.layout.load


def consolidate(
    checkpoint: Checkpoint | str | Path,
    out: str | Path,
    *,
    format: str | None = None,
    only: str | None = None,
    dtype: str | None = None,
    max_shard_size: int | None = None,
    tied: str = "keep",
    keep_types: bool = False,
    force: bool = False,
    allow_missing: bool = False,
    fill: str | None = None,
    prefer_rank: int | None = None,
    check: bool = False,
    unchecked: bool = False,
    manifest: bool = False,
    dry_run: bool = False,
    jobs: int | None = None,
    progress: Progress | None = None,
    planned: Callable[[int], None] = lambda _: None,
) -> Consolidated:
    """Write a checkpoint's full tensors into one `.pt`, one or several `.safetensors`, or a DCP folder to resume from.

    Args:
        checkpoint: an opened checkpoint, or its path.
        out: the file or folder to write; its suffix (`.dcp` for a folder) says the format. With a `/` at its end, or
            where it is a folder, `model.safetensors` or `model.pt` in it.
        format: `pt`, `safetensors` or `dcp`, where no suffix says it; a file gets that suffix.
        only: `model` (the bare state dict), `optimizer`, or `all` (the same tree). Default: `model` for
            `.safetensors`, else `all`.
        dtype: torch dtype for the floating-point tensors of the model, such as `bfloat16`.
        max_shard_size: bytes of tensors per file of safetensors (which get a Hugging Face index) or of a DCP.
        tied: for safetensors: `keep` writes a tied weight under each name, `drop` only under the first.
        keep_types: keep what plain `torch.load` does not make (timedeltas, numpy's values …) in a `.pt`, instead of
            the nearest that it does.
        force: overwrite an existing output.
        allow_missing: leave out tensors that are not whole, and list them, instead of refusing.
        fill: with `allow_missing`: `nan` or `zero` to put into holes, which are listed; without it a tensor with a hole
            is left out.
        check: let the format's own library read the output back before it gets its name, and compare it with the
            shards; for a dry run, compare the source with its checksums.
        unchecked: do not compare the source with the checksums that it states.
        manifest: write sha256 of every tensor and file into a JSON beside the output.
        prefer_rank: where ranks hold different copies of a tensor that should be equal, take this rank's.
        dry_run: plan and check, write nothing.
        jobs: threads.
        progress: called with bytes written, or read back, and the tensor they belong to.
        planned: called before that with how many bytes they will be, and again when more is known.

    Raises:
        NotWholeError: something is missing, overlaps, contradicts, or was found damaged before anything was written.
        DamagedError: a record is not what its checksum says.
        OutputExistsError, NoSpaceError: the output is in the way or does not fit.
        ReadError, WriteError: a file cannot be read or written; nothing that looks finished is left.
    """
    from ckptools.consolidate.choose import select, tensors_of
    from ckptools.consolidate.named_state import by_name
    from ckptools.consolidate.naming import output_of
    from ckptools.consolidate.output import check_not_among, check_space
    from ckptools.consolidate.publish import Proofs, Seen, write
    from ckptools.consolidate.shortfall import check_rounding
    from ckptools.consolidate.sources import compare
    from ckptools.consolidate.writers.layout import WriteOptions, beside
    from ckptools.files.opening import OpenFiles

    started = time.perf_counter()
    output = output_of(out, format)
    writer, target = output.writer, output.path
    options = WriteOptions(_dtype(dtype), max_shard_size, _choice(tied), keep_types)
    whole = with_all_ranks(checkpoint)
    if not output.named:
        check_not_among(whole, target)
    with OpenFiles() as files:
        part = only or _usual_part(whole, writer)
        check_rounding(whole, part)
        holes, threads = _missing(allow_missing, fill), jobs or min(4, os.cpu_count() or 1)
        first = None
        if not unchecked and (holes or (check and dry_run)):
            first = compare(tensors_of(whole, part), files, threads, progress or (lambda _, __: None), planned)
        selection = select(whole, part, holes, prefer_rank, files, first.damaged if first else {})
        selection = by_name(selection) if writer.BY_NAME else selection
        layout = writer.lay_out(selection, target, options)
        selection.left_out |= layout.left_out
        texts = _texts(selection, layout, target)
        proofs = Proofs(not unchecked, check, beside(target, "manifest.") if manifest else None)
        _check(whole, layout, [*texts, *proofs.paths], force, output.new_folder)
        check_space(target.parent if output.new_folder is None else output.new_folder.parent, layout.nbytes)
        seen = Seen(first.right if first else None)
        if not dry_run:
            before = sum(record.nbytes for record in first.right) if first else 0
            planned(before + sum(job.nbytes for job in layout.jobs) * (2 if check else 1))
            seen = write(whole, layout, output.new_folder, texts, files, proofs, threads, progress)
    seconds = 0.0 if dry_run else time.perf_counter() - started
    done = _result(selection, layout, [*texts, *proofs.paths], seconds, seen)
    return done if only else replace(done, not_asked=_not_asked(whole, part))


def _usual_part(checkpoint: Checkpoint, writer: Writer) -> str:
    """What is written when the caller does not say.

    Raises:
        RefusedError: that is the model, and there is none.
    """
    if writer.ONLY == "model" and not checkpoint.of_kind("model"):
        text = f"holds no model, which {writer.NAME} is written of; --only all writes every tensor there is"
        raise RefusedError(checkpoint.path, text)
    return writer.ONLY


def _check(checkpoint: Checkpoint, layout: Layout, texts: Sequence[Path], force: bool, new: Path | None) -> None:
    """Refuse an output that is in the way of something; `new` is the folder that will be made for it."""
    from ckptools.consolidate.output import check_folder, check_place

    if layout.folder is not None:
        check_folder(checkpoint, layout.folder, force)
        check_place(checkpoint, texts, force)
    else:
        check_place(checkpoint, [*(p for p, _ in layout.files), *texts], force, new)


def _dtype(name: str | None) -> str | None:
    from ckptools.dtypes import ITEMSIZE, SHORT, is_floating

    if name is None:
        return None
    full = {short: long for long, short in SHORT.items()}.get(name, name)
    if full not in ITEMSIZE or not is_floating(full) or full.startswith("float4"):
        raise UsageError(None, f"--dtype {name}: choose a floating-point dtype, such as float32, bfloat16, float16")
    return full


def _missing(allow: bool, fill: str | None) -> str | None:
    """What becomes of a tensor with a hole: None to refuse it, `leave` to leave it out, or what fills the hole."""
    if fill is not None and fill not in ("nan", "zero"):
        raise UsageError(None, f"--fill {fill}: choose nan or zero")
    if fill is not None and not allow:
        raise UsageError(None, "--fill needs --allow-missing; without it nothing that has a hole is written")
    return fill or ("leave" if allow else None)


def _choice(tied: str) -> str:
    if tied not in ("keep", "drop"):
        raise UsageError(None, f"--tied {tied}: choose keep or drop")
    return tied


def _texts(selection: Selection, layout: Layout, target: Path) -> dict[Path, str]:
    from ckptools.consolidate.writers.layout import beside
    from ckptools.consolidate.writers.sidecar import left_out_json

    texts = dict(layout.texts)
    if selection.left_out or selection.missing:
        told = left_out_json(selection.left_out, selection.missing, selection.filled)
        texts[beside(target, "left-out.")] = told
    return texts


def _not_asked(checkpoint: Checkpoint, part: str) -> dict[str, int]:
    """The sections that are not of the kind that is written, and how many tensors each has."""
    from ckptools.model.tree import tensors_in

    others = [s for s in checkpoint.sections if part not in ("all", s.kind)]
    return {s.name: sum(1 for _ in tensors_in(s.value)) for s in others}


def _result(selection: Selection, layout: Layout, texts: Sequence[Path], seconds: float, seen: Seen) -> Consolidated:
    from ckptools.consolidate.sources import count
    from ckptools.model.tree import fqn_of

    return Consolidated(
        files=(*((p for p, _ in layout.files) if layout.folder is None else [layout.folder]), *texts),
        nbytes=layout.nbytes,
        tensors=len(layout.jobs) if layout.tensors is None else layout.tensors,
        seconds=seconds,
        left_out={fqn_of(p): why for p, why in selection.left_out.items()},
        missing={fqn_of(p): tuple(map(str, boxes)) for p, boxes in selection.missing.items()},
        needs=layout.needs,
        tied=dict(layout.tied),
        notes=(*selection.notes, *layout.notes),
        layout=layout,
        checksums=None if seen.right is None else count(layout.jobs, seen.right),
        odd=seen.odd,
        read_back=seen.read_back,
    )
