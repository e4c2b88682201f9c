"""The steps of consolidating, one after the other: choose, plan, check, copy, publish.

Nothing is written before everything is checked, and nothing has its final name before everything is written.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path

from ckptools.cluster.team import current
from ckptools.consolidate.adapters import adapter_output
from ckptools.consolidate.options import (
    FLAT,
    ConsolidateOptions,
    by_name,
    hole_rule,
    renamed,
    renaming_of,
    unwrapped,
    write_options,
)
from ckptools.consolidate.output_place import (
    Likeness,
    check_not_among,
    check_output,
    in_folder,
    lacking_space,
    made_like,
    original_for,
    output_of,
)
from ckptools.consolidate.provenance import left_out_json, note_on_carried
from ckptools.consolidate.publishing.multipart import check_can_upload
from ckptools.consolidate.publishing.publish import Kept, WriteFindings, resume_folder, write
from ckptools.consolidate.record import Consolidated, converted, planned_reading
from ckptools.consolidate.selection import (
    check_files,
    places_to_write,
    sections_to_write,
    select,
    tensors_to_write,
)
from ckptools.consolidate.shares import check_same_plan, plan_digests
from ckptools.consolidate.source_records import Donor, compare, count, open_donor
from ckptools.consolidate.writers import DCP, Writer
from ckptools.consolidate.writers.layout import LEFT_OUT, OutputContents, OutputLayout, beside
from ckptools.dtypes import NO_NUMBERS, short
from ckptools.errors import NoSpaceError, RefusedError, UsageError
from ckptools.files.opening import OpenFiles, is_remote
from ckptools.formats.open import with_all_ranks
from ckptools.model.checkpoint import Checkpoint
from ckptools.model.provenance import FILE_NAME
from ckptools.model.tree import tensors_in
from ckptools.option import spelled
from ckptools.rules.verdict import verdict_of
from ckptools.tensor_io.fetch_ahead import Progress, no_progress
from ckptools.text import few, fqn_of, plural
from ckptools.training_state.models import put_together
from ckptools.training_state.sections import ALL, sections_of, sections_of_kind


def consolidate(
    checkpoint: Checkpoint | str | Path,
    out: str | Path,
    options: ConsolidateOptions,
    progress: Progress | None = None,
    planned: Callable[[int], None] = lambda _: None,
) -> Consolidated:
    """Write a checkpoint's full tensors into one `.pt`, one or several `.safetensors`, or a DCP folder to resume from.

    `progress` is called with the number of bytes written or read back, and the tensor they belong to. `planned` is
    called before that with the expected number of bytes, and again once the number is known better.

    Raises:
        NotWholeError: something is missing, overlaps, contradicts, or was found damaged before anything was written.
        DamagedError: a record does not match its checksum.
        OutputExistsError, NoSpaceError: the output would overwrite a file or does not fit.
        ReadError, WriteError: a file cannot be read or written; nothing that looks finished is left.
    """
    started = time.perf_counter()
    progress = progress or no_progress
    output = output_of(out, options.format)
    streamed = is_remote(output.path)
    if streamed:
        check_can_upload(output.path, options)
    if options.layout == FLAT and output.writer is not DCP:
        text = f"{spelled('layout', FLAT)} is for a {DCP.SUFFIXES[0]}, and this is a {output.writer.NAME}"
        raise UsageError(output.path, text)
    form, renaming = write_options(options, streamed), renaming_of(options)
    whole = with_all_ranks(checkpoint)
    opening = whole.cost.seconds if whole is checkpoint else 0.0
    if not output.named:
        check_not_among(whole, output.path)
    adapter = adapter_output(whole, options, output)
    output = adapter.place if adapter is not None else output
    original, likeness = original_for(options, output, whole) if adapter is None else None, None
    with OpenFiles() as files:
        unused: list[str] = []
        if options.dequantize:
            whole, unused = _decoded(whole, files, options.unchecked)
        part = adapter.part if adapter else options.only or _usual_part(whole, output.writer)
        whole = put_together(whole) if part == "all" else whole
        _check_codes(whole, part, options)
        if adapter is not None and adapter.base is not None:
            _check_codes(adapter.base, "model", options)
        notes = check_files(whole, part, files, options.unchecked)
        first, fills = None, hole_rule(options)
        donor = _donor(whole, part, files, options, progress) if options.fill_from else None
        if not options.unchecked and (fills or donor or (options.check and options.dry_run)):
            first = compare(tensors_to_write(whole, part), files, options.threads, progress, planned)
        selection = select(whole, part, options, files, first, donor)
        selection.notes = [*notes, *selection.notes]
        selection.with_record = options.provenance
        if original is not None:
            selection, likeness = made_like(selection, original, options, files)
        selection = adapter.made(selection, options, files) if adapter else selection
        selection = renamed(selection, renaming) if renaming else selection
        selection = unwrapped(selection, options) if original is None else selection
        selection = by_name(selection) if output.writer.BY_NAME else selection
        layout = output.writer.lay_out(selection, output.path, form)
        if original is not None and not output.named:
            layout = in_folder(layout, original, output, form.dtype)
        layout = adapter.in_folder(layout, form.dtype) if adapter else layout
        selection.left_out |= layout.left_out
        selection.notes += [*note_on_carried(selection), *_notes_on_codes(whole, layout, options.dequantize)]
        if unused:
            selection.notes.append(f"scales of activations are left out: {few(unused, 1)}")
        texts = dict(layout.texts)
        missed = selection.left_out or selection.missing or selection.carried or selection.passed_over
        if missed or selection.borrowed or (selection.unsure and not selection.with_record):
            texts[beside(output.path, LEFT_OUT)] = left_out_json(selection, layout.name_of)
        manifest = beside(output.path, "manifest.") if options.manifest else None
        paths = [*texts, *([manifest] if manifest else [])]
        kept = None
        if options.resume:
            kept = Kept(resume_folder(output.path), plan_digests(whole, layout, texts))
        for source in (whole, *([donor.checkpoint] if donor else [])):
            check_output(source, output, layout, paths, options.force)
        no_room = lacking_space(output, layout.nbytes - (kept.nbytes if kept else 0))
        if no_room is not None and not options.dry_run:
            raise no_room
        seen = WriteFindings(first.right if first else None)
        if current().world_size > 1:
            check_same_plan(plan_digests(whole, layout, texts))
        if not options.dry_run:
            before = first.nbytes if first else 0
            planned(before + sum(job.nbytes for job in layout.jobs) * (2 if options.check else 1))
            try:
                seen = write(whole, output, layout, texts, manifest, files, options, progress, kept)
            except KeyboardInterrupt:
                if kept is None:
                    raise
                way = f"the same command with {spelled('resume')} takes it up"
                raise KeyboardInterrupt(f"interrupted; what was written is kept in {kept.folder}, and {way}") from None
    return _result(whole, options, selection, likeness, layout, paths, seen, no_room, started - opening)


def _donor(whole: Checkpoint, part: str, files: OpenFiles, options: ConsolidateOptions, progress: Progress) -> Donor:
    """Open the other checkpoint of the run that fills gaps, and find its own damaged records."""
    if not options.provenance:
        record = f"the record that {spelled('no-provenance')} leaves out"
        raise UsageError(None, f"{spelled('fill-from')} needs {record}: the output must say so")
    donor = open_donor(whole, options.fill_from or "", partial(places_to_write, only=part))
    if not options.unchecked:
        tensors = ((fqn_of(path), tensor) for path, tensor in donor.tensors.items())
        donor.damage = compare(tensors, files, options.threads, progress, lambda _: None).damaged
    return donor


def _decoded(whole: Checkpoint, files: OpenFiles, unchecked: bool) -> tuple[Checkpoint, list[str]]:
    """The checkpoint with weights in the place of their codes, and the names of scales that nothing needs any more."""
    from ckptools.training_state.packed_values import ACTIVATIONS, unpacked  # needs numpy

    found = unpacked(whole, files, compare=not unchecked)
    kept = {path for path, _ in tensors_in(found.tree)}
    gone = (path for path, _ in tensors_in(whole.tree) if path not in kept)
    return found, [fqn_of(path) for path in gone if str(path[-1]).rpartition(".")[2] in ACTIVATIONS]


def _check_codes(whole: Checkpoint, part: str, options: ConsolidateOptions) -> None:
    """Refuse to convert codes of quantized weights as if they were values, and to dequantize if no weight can be."""
    if not options.dequantize and options.dtype is None:
        return
    named = list(tensors_to_write(whole, part))
    tensors = [tensor for _, tensor in named]
    codes = Counter(tensor.coded.scheme for tensor in tensors if tensor.coded is not None and tensor.are_codes)
    known = {scheme.words for scheme in whole.quantized if scheme.dequantized}
    held = " and ".join(f"{plural(n, 'weight')} in codes of {words}" for words, n in codes.items())
    if codes and options.dequantize:
        text = f"{spelled('dequantize', True)}: it holds {held}, of which ckptools makes no values"
        raise RefusedError(whole.path, f"{text}; without it they are written as they are")
    if codes:
        decoded = codes.keys() <= known and not options.merge_lora  # merging does not go with it
        way = f"add {spelled('dequantize', True)}" if decoded else "without it they are written as they are"
        text = f"{spelled('dtype', options.dtype)}: it holds {held}, which are no values to convert; {way}"
        raise RefusedError(whole.path, text)
    packed = next((name for name, t in named if t.dtype in NO_NUMBERS and not t.note), "")
    if packed and options.dtype is not None:
        text = f"{packed} has several numbers to an element, and no scale: no values to convert"
        way = "without it they are written as they are"
        raise RefusedError(whole.path, f"{spelled('dtype', options.dtype)}: {text}; {way}")
    quantized = whole.quantized or any(t.encoded_as or t.kind == "quantized" for _, t in tensors_in(whole.tree))
    if options.dequantize and not quantized and verdict_of(whole).whole is not False:  # else it may be in a lost file
        raise UsageError(whole.path, f"{spelled('dequantize', True)}: nothing here is quantized")


def _notes_on_codes(whole: Checkpoint, layout: OutputLayout, dequantize: bool) -> Iterator[str]:
    """Yield notes on codes that are written unchanged, and on 8-bit floats that are converted but could be codes."""
    if dequantize and not any(shard.encoded for job in layout.jobs for shard in job.tensor.found):
        yield f"{spelled('dequantize', True)}: nothing that is written is quantized"
    codes = Counter(t.coded.scheme for job in layout.jobs if (t := job.tensor).coded is not None and t.are_codes)
    for words, n in codes.items():
        stated = next((scheme.stated_by for scheme in whole.quantized if scheme.words == words), "")
        keep = f"; {stated} says how to read them: keep it beside the output" if stated else ""
        yield f"{plural(n, 'weight')} written as codes of {words}{keep}"
    cast = Counter(job.tensor.dtype for job in layout.jobs if job.dtype != job.tensor.dtype)
    for dtype in (dtype for dtype in cast if dtype.startswith("float8") and dtype != "float8_e8m0fnu"):
        text = f"{plural(cast[dtype], 'tensor')} of {short(dtype)} taken for values: no scales lie beside them"
        yield f"{text}, and nothing here says that they are codes"


def _usual_part(checkpoint: Checkpoint, writer: Writer) -> str:
    """The part to write by default: one model, if the user named one or the output holds nothing else."""
    if checkpoint.options is not None and checkpoint.options.model not in (None, ALL):
        return "model"
    if writer.ONLY == "model" and not sections_of_kind(checkpoint, "model"):
        verdict = verdict_of(checkpoint)
        why = f"{verdict.in_one_line}; " if verdict.whole is False else ""
        way = f"{spelled('only', 'all')} writes every tensor there is"
        raise RefusedError(checkpoint.path, f"{why}holds no model, which {writer.NAME} is written of; {way}")
    return writer.ONLY


def _result(
    whole: Checkpoint,
    options: ConsolidateOptions,
    selection: OutputContents,
    likeness: Likeness | None,
    layout: OutputLayout,
    texts: Sequence[Path],
    seen: WriteFindings,
    no_room: NoSpaceError | None,
    began: float,
) -> Consolidated:
    load, folder = layout.load, layout.files[0][0].parent
    if layout.folder is None and is_remote(folder):
        load = load.replace(f"{folder}/", "") + "  # copied to this machine"
    written = {section.path for section in sections_to_write(whole, selection.part).values()}
    not_asked = [
        s for s in sections_of(whole) if not options.only and selection.part != "all" and s.path not in written
    ]
    new_names = sum(old != new for old, new in selection.renamed.items())
    beside = [path for path in texts if path.parent != layout.folder]
    return Consolidated(
        files=(*((p for p, _ in layout.files) if layout.folder is None else [layout.folder]), *beside),
        data_files=sum(path.name not in (".metadata", FILE_NAME) for path, _ in layout.files),
        nbytes=layout.nbytes,
        tensors=len(layout.jobs) if layout.tensors is None else layout.tensors,
        left_out={fqn_of(p): why for p, why in selection.left_out.items()},
        missing={fqn_of(p): tuple(map(str, boxes)) for p, boxes in selection.missing.items()},
        needs=layout.needs,
        tied=dict(layout.tied),
        notes=(*selection.notes, *layout.notes),
        load=load,
        verdict=verdict_of(whole),
        layout=layout,
        converted=converted(layout.jobs),
        planned=planned_reading(layout, no_room) if options.dry_run else None,
        checksums=None if seen.right is None else count(layout.jobs, seen.right),
        odd=seen.odd,
        read_back=seen.read_back,
        not_asked={s.name: sum(1 for _ in tensors_in(s.value)) for s in not_asked},
        filled=selection.filled,
        from_replicas=selection.from_replicas,
        borrowed={fqn_of(p): tuple(map(str, boxes)) for p, boxes in selection.borrowed.items()},
        borrowed_from=selection.borrowed_from,
        like=likeness,
        renamed=likeness.renamed if likeness else new_names,
        seconds=0.0 if options.dry_run else time.perf_counter() - began,
    )
