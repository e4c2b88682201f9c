"""The place of an output: its name and format, and checks that nothing is overwritten and that there is room.

The suffix of the name gives the format. A name without a suffix needs `format`, and a file gets that format's suffix. A
name that ends with `/`, or the name of an existing folder, means a folder: the output is the file `model.safetensors`
or `model.pt` in it, depending on `format`. A folder of the source is refused, because the output could pass for the
checkpoint there, unless the user gives the file's name. A DCP is a folder itself and gets exactly the given name. Side
files lie beside the output under its whole name and one more word: `OUT.json`, `OUT.left-out.json`,
`OUT.manifest.json`, `OUT.index.json`.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from ckptools.consolidate.options import ConsolidateOptions
from ckptools.consolidate.writers import FOLDER_HOLDS, PT, SAFETENSORS, WRITERS, Writer
from ckptools.consolidate.writers.layout import LEFT_OUT, OutputContents, OutputLayout, beside, quoted
from ckptools.errors import NoSpaceError, OutputExistsError, ReadError, RefusedError, UsageError, WriteError
from ckptools.files.opening import OpenFiles, is_remote, location
from ckptools.files.remote.path import RemotePath, refreshed
from ckptools.files.storage import RemoteError
from ckptools.formats.megatron.folders import arguments
from ckptools.formats.rank_search.rank_names import parse
from ckptools.keys.expected_names import CONFIG, COPIED, QUANTIZED, Original, read_original
from ckptools.keys.pairing import CutRows, PairingRule, pair
from ckptools.model.checkpoint import Checkpoint
from ckptools.model.provenance import FILE_NAME
from ckptools.model.records import displayed, to_dict
from ckptools.model.tensor import Tensor
from ckptools.model.tree import describe_for_error, leaf_at
from ckptools.option import spelled
from ckptools.text import few, fqn_of, plural, printable, size

HEADROOM = 1 << 20
"""Bytes to leave free on the disk beside the output."""

_DCP_FILE = re.compile(rf"\.metadata|__[0-9]+_[0-9]+\.distcp|{re.escape(FILE_NAME)}")


def _hub_file() -> re.Pattern[str]:
    """The pattern of file names in the folder of a Hugging Face model."""
    return re.compile(
        rf"(?:{COPIED.pattern}|adapter_config\.json|(?:adapter_)?model.*\.safetensors(?:\.[a-z.-]+\.json|\.json)?)"
    )


@dataclass(frozen=True)
class OutputPlace:
    """The place and format of an output: a file or, for a DCP, a folder.

    Attributes:
        new_folder: the folder to make for the file; None if it exists, if the user gave no folder, or in a bucket,
            which has no real folders.
        named: whether the user gave the file's name, not only a folder for it.
    """

    path: Path
    writer: Writer
    new_folder: Path | None = None
    named: bool = True


def output_of(out: str | Path, format: str | None = None) -> OutputPlace:
    """Find the file and the format of an output by its name `out`, which may end with `/`.

    Raises:
        UsageError: the name gives no format, contradicts `format`, or is not valid.
        ReadError, WriteError: `out` is in a store that cannot be reached.
    """
    if not str(out):
        raise UsageError(None, f"{spelled('out')} is empty; give a name for the output")
    path = location(out)
    with store_errors(path):
        folder = str(out).endswith(("/", os.sep)) or path.is_dir()
    writer = _writer(path, folder, format)
    if not writer.FILE:
        if path.name in ("", ".."):
            raise UsageError(path, "is no name for an output")
        return OutputPlace(path, writer)
    if folder:
        here = is_remote(path) or path.is_dir()
        return OutputPlace(path / writer.FILE, writer, None if here else path, named=False)
    named = path.suffix.lower() in writer.SUFFIXES
    return OutputPlace(path if named else path.with_name(path.name + writer.SUFFIXES[0]), writer)


@contextmanager
def store_errors(path: Path) -> Iterator[None]:
    """Turn errors of the output's store, such as denied access, into a WriteError of one line."""
    try:
        yield
    except RemoteError as error:
        raise WriteError(path, error.strerror or "the store does not answer") from error


def _writer(path: Path, folder: bool, format: str | None) -> Writer:
    asked = next((w for w in WRITERS if format == w.NAME), None)
    if format is not None and asked is None:
        raise UsageError(None, f"{spelled('format', format)}: choose one of {', '.join(w.NAME for w in WRITERS)}")
    by_name = next((w for w in WRITERS if path.suffix.lower() in w.SUFFIXES), None)
    if folder and by_name is not None and by_name.FILE:
        by_name = None  # `weights.pt/` is a folder that happens to be called so
    if asked is not None and by_name not in (None, asked):
        suffix = f"{path.suffix} is written as {by_name.NAME}" if by_name else ""
        raise UsageError(path, f"{suffix}, and {spelled('format')} says {asked.NAME}; choose one of the two")
    writer = asked or by_name or (FOLDER_HOLDS if folder else None)
    if writer is None:
        known = ", ".join(s for w in WRITERS for s in w.SUFFIXES)
        suffix = repr(path.suffix) if path.suffix else "a name without suffix"
        raise UsageError(path, f"no output format for {suffix}; use one of {known}, or say {spelled('format')}")
    return writer


def check_output(
    checkpoint: Checkpoint, output: OutputPlace, layout: OutputLayout, texts: Collection[Path], force: bool
) -> None:
    """Refuse an output that would overwrite a file, or that an older side file beside it would seem to describe."""
    with store_errors(output.path):
        if layout.folder is not None:
            _check_folder(checkpoint, layout.folder, force, output.writer)
            check_place(checkpoint, [path for path in texts if path.parent != layout.folder], force)
        else:
            files = (path for path, _ in layout.files)
            check_place(checkpoint, [output.path, *files, *texts], force, output.new_folder)
        side = beside(output.path, LEFT_OUT)
        if not force and side not in texts and side.exists():
            raise OutputExistsError(side, f"lists what an earlier output lacks; {spelled('force', True)} removes it")


def check_place(checkpoint: Checkpoint, paths: Iterable[Path], force: bool, new: Path | None = None) -> None:
    """Refuse an output that would overwrite a file, above all a source, or could pass for a rank file.

    `new` is the folder that will be made for the output.
    """
    sources = [f.path for f in checkpoint.files]
    taken = {p.resolve() for p in sources}
    groups = {(p.parent.resolve(), n.group) for p in sources if (n := parse(p)) is not None}
    for path in paths:
        folder = path.parent if path.parent != new else path.parent.parent
        if not (is_remote(folder) or folder.is_dir()):
            raise UsageError(path, f"there is no folder {folder}; make it first")
        if path.resolve() in taken:
            raise OutputExistsError(path, "is a file of the checkpoint itself; choose another name")
        name = parse(path)
        if name is not None and (path.parent.resolve(), name.group) in groups:
            raise OutputExistsError(path, "would pass for one more rank file of the checkpoint; choose another name")
        if path.is_dir():
            raise OutputExistsError(path, "is a folder")
        if (path.exists() or path.is_symlink()) and not force:
            raise OutputExistsError(path, f"exists; {spelled('force', True)} overwrites it")


def check_not_among(checkpoint: Checkpoint, output: Path) -> None:
    """Refuse an output under a default name in the source's folder, where it could pass for the source."""
    folder = output.parent.resolve()
    if any(f.path.resolve().is_relative_to(folder) for f in checkpoint.files):
        text = f"holds the checkpoint itself; to write beside its files, give the file's name: -o {output}"
        raise OutputExistsError(output.parent, text)


def _check_folder(checkpoint: Checkpoint, folder: Path, force: bool, writer: Writer) -> None:
    """Refuse a folder that would replace something other than an earlier output, above all a source."""
    if not (is_remote(folder) or folder.parent.is_dir()):
        raise UsageError(folder, f"there is no folder {folder.parent}; make it first")
    target, opened = folder.resolve(), checkpoint.path.resolve()
    if target == opened or any(f.path.resolve().is_relative_to(target) for f in checkpoint.files):
        raise OutputExistsError(folder, "holds the checkpoint itself; choose another name")
    if checkpoint.path.is_dir() and target.is_relative_to(opened):
        raise OutputExistsError(folder, "lies inside the checkpoint's folder; choose a place beside it")
    if not (folder.exists() or folder.is_symlink()):
        return
    if folder.is_symlink() or not folder.is_dir():
        raise OutputExistsError(folder, "exists and is no folder")
    here = sorted(folder.iterdir())
    if not here and writer.FILE:
        return
    if not force:
        raise OutputExistsError(folder, f"exists; {spelled('force', True)} replaces it")
    known, what = (_hub_file(), "Hugging Face model") if writer.FILE else (_DCP_FILE, "DCP")
    strange = next((p.name for p in here if p.is_dir() or not known.fullmatch(p.name)), None)
    if strange is not None:
        text = f"holds {describe_for_error(strange)}, which is no part of a {what}; choose another name"
        raise OutputExistsError(folder, text)


class Replaced(NamedTuple):
    """Files of an earlier output to remove when a new one replaces it.

    Attributes:
        first: files without which the others pass for no output, removed before a new file gets its name.
        last: files without a counterpart in the new output, removed when the new output is complete.
    """

    first: tuple[Path, ...]
    last: tuple[Path, ...]


def replaced(checkpoint: Checkpoint, out: Path, layout: OutputLayout, texts: Collection[Path]) -> Replaced:
    """Find the files of an earlier output `out` to remove: if it has several, the index and the last file go first.

    An output in one file is replaced at once. With several files, an interrupt leaves new files among old ones. Readers
    then find the files by their numbers, as the index is gone, and notice that the last file is missing.
    The side file that lists names left out of the earlier output goes too, unless it is among the new `texts`.
    """
    if isinstance(out, RemotePath):
        refreshed(out)
    side = beside(out, LEFT_OUT)
    stale = (side,) if side not in texts and side.exists() else ()
    if layout.folder is not None or len(layout.files) == 1:
        return Replaced((), stale)
    number = re.compile(rf"{re.escape(out.stem)}-\d{{5}}-of-\d{{5}}{re.escape(out.suffix)}")
    new, sources = {path.name for path, _ in layout.files}, {f.path.resolve() for f in checkpoint.files}
    found = sorted(out.parent.iterdir()) if out.parent.is_dir() else []
    here = [path for path in found if number.fullmatch(path.name) or path.name == out.name]
    last = [path for path in here if path.name not in new and path.resolve() not in sources and path.is_file()]
    return Replaced((beside(out, "index."), layout.files[-1][0]), (*last, *stale))


def lacking_space(output: OutputPlace, nbytes: int) -> NoSpaceError | None:
    """The error for an output that does not fit on its disk; None if it fits, or is in a bucket."""
    if is_remote(output.path):
        return None
    folder = (output.new_folder or output.path).parent
    free = shutil.disk_usage(folder).free
    if nbytes + HEADROOM <= free:
        return None
    needed = f"{nbytes} and {size(HEADROOM)} to spare"
    return NoSpaceError(folder, f"has {free} bytes free; the output needs {needed}; -o writes it to another disk")


def check_unchanged(checkpoint: Checkpoint) -> None:
    """Refuse to publish an output if a source file has changed since it was opened."""
    for file in checkpoint.files:
        if not file.is_here:
            continue
        try:
            now = file.path.stat()
        except OSError as error:
            raise ReadError(file.path, "is gone since it was opened; nothing was written") from error
        if (now.st_size, now.st_mtime) != (file.nbytes, file.modified):
            what = f"{file.nbytes} bytes then, {now.st_size} now" if now.st_size != file.nbytes else "it was written to"
            raise ReadError(file.path, f"changed since it was opened: {what}; nothing was written")


# -- an output like a Hugging Face model (`--like`): its names, shapes, dtypes, files, config and tokenizer ------------


FORBIDDEN = ("map", "strip_prefix", "rename", "keep_names", "allow_missing", "fill", "fill_from")
"""Options that contradict `--like`."""


@displayed
@dataclass(frozen=True, repr=False)
class Likeness:
    """How an output was made like a Hugging Face model.

    Attributes:
        rules: every rename and rearrangement, with the number of tensors.
        cut: vocabularies whose padded rows are not written.
        left: names of the checkpoint that are not written, with the reason.
        renamed: number of tensors with another name than in the checkpoint.
        rearranged: number of tensors whose rows were moved, joined, split or transposed.
    """

    original: str
    rules: tuple[PairingRule, ...]
    cut: tuple[CutRows, ...]
    left: Mapping[str, str]
    copied: tuple[str, ...]
    renamed: int
    rearranged: int
    elements: int

    def _record(self) -> dict[str, Any]:
        names = ("original", "rules", "cut", "left", "copied", "renamed", "rearranged", "elements")
        return {name: getattr(self, name) for name in names}

    def to_dict(self) -> dict[str, Any]:
        """The record as a plain dict."""
        return to_dict(self)

    def _summary(self) -> str:
        return f"like {self.original}: {self.renamed} renamed, {self.rearranged} rearranged, {len(self.cut)} cut"


def original_for(options: ConsolidateOptions, output: OutputPlace, checkpoint: Checkpoint) -> Original | None:
    """Read the model of `--like`; None without one.

    Raises:
        UsageError: other options contradict it, or the output is no folder.
        OutputExistsError: the output is the model's own folder.
    """
    if options.like is None:
        if options.assume:
            way = f"add {spelled('like', 'ORIGINAL')}"
            raise UsageError(None, f"{spelled('assume', True)} is about the model that the output is to be like; {way}")
        return None
    given = next((name for name in FORBIDDEN if getattr(options, name)), None)
    if given is not None:
        text = f"{spelled('like')} finds names itself and writes complete sets"
        raise UsageError(None, f"{text}: it does not go with {spelled(given.replace('_', '-'))}")
    if options.only not in (None, "model") or options.tied != "keep":
        text = f"{spelled('like')} writes the model, with tied weights as its config says"
        raise UsageError(None, f"{text}: leave out {spelled('only')} and {spelled('tied')}")
    alone = location(options.like).name == CONFIG
    if not (output.writer is SAFETENSORS and not output.named) and not (output.writer is PT and alone):
        text = f"{spelled('like')} writes a folder with safetensors: -o DIR/; or, like a {CONFIG}, a .pt"
        raise UsageError(output.path, f"{text}, with the names of the model's state dict")
    links = bool(checkpoint.options and checkpoint.options.follow_symlinks)
    original = read_original(options.like, links, options.dequantize, published=not output.named)
    folder = original.path if original.path.name != CONFIG else original.path.parent
    if not output.named and folder.resolve() == output.path.parent.resolve():
        raise OutputExistsError(output.path.parent, f"is the folder of {spelled('like')} itself; choose another name")
    return original


def made_like(
    selection: OutputContents, original: Original, options: ConsolidateOptions, files: OpenFiles
) -> tuple[OutputContents, Likeness]:
    """Make the contents of an output that is like a Hugging Face model; also return how they were made.

    Raises:
        RefusedError: a tensor of the model is missing, or a rearrangement would have to be assumed.
    """
    models = [(section, at) for section, at in selection.places if section.kind == "model"]
    source = selection.source
    if len(models) != 1:
        raise UsageError(source.path, f"holds {plural(len(models), 'model')}; {spelled('like')} writes one")
    if selection.lost or selection.missing or selection.carried:
        raise RefusedError(source.path, f"is not whole; {spelled('like')} writes complete sets only")
    section, at = models[0]
    state = leaf_at(selection.tree, at)
    found = pair(state, original, arguments(source.tree), options.assume, source.path, files)
    others = {str(key): "is no tensor" for key, value in state.items() if not isinstance(value, Tensor)}
    gone = {fqn_of(path): why for path, why in selection.left_out.items()}
    tree = dict(found.tensors)
    contents = replace(
        selection,
        tree=tree,
        model_paths={(name,) for name in tree},
        left_out={},
        places=((section._replace(value=tree, path=()), ()),),
        renamed={olds[0]: new for new, olds in found.sources.items() if len(olds) == 1},
        like=original,
    )
    return contents, Likeness(
        original=str(original.path),
        rules=found.rules,
        cut=found.cut,
        left={**found.left, **others, **gone},
        copied=tuple(original.copied),
        renamed=sum(olds != (new,) for new, olds in found.sources.items()),
        rearranged=len(found.rearranged),
        elements=sum(tensor.numel for tensor in tree.values()),
    )


def in_folder(layout: OutputLayout, original: Original, output: OutputPlace, dtype: str | None) -> OutputLayout:
    """Add the small files of the Hugging Face model to the plan of an output; on a disk its folder appears whole."""
    folder, stated = output.path.parent, original.config.get("architectures")
    texts: dict[Path, str | bytes] = {folder / name: content for name, content in original.copied.items()}
    config, notes = _with_dtype(original.config, dtype), []
    if config != original.config:
        notes.append(f"{CONFIG} states {dtype}, as {spelled('dtype')} writes, and not the dtype of {original.path}")
    if original.dequantized:
        notes.append(f"{CONFIG} is written without its {QUANTIZED}")
    texts |= {folder / CONFIG: json.dumps(config, indent=2, ensure_ascii=False) + "\n"} if notes else {}
    causal = isinstance(stated, list) and stated and str(stated[0]).endswith("ForCausalLM")
    auto = "AutoModelForCausalLM" if causal else "AutoModel"
    load = f"from transformers import {auto}; model = {auto}.from_pretrained({quoted(folder)})"
    whole = None if is_remote(folder) else folder
    return replace(layout, folder=whole, texts={**layout.texts, **texts}, load=load, notes=(*layout.notes, *notes))


def _with_dtype(config: Mapping[str, Any], dtype: str | None) -> dict[str, Any]:
    """The config with `dtype` where it states one, also for a part of the model (`text_config`); as it is without."""
    found = dict(config)
    for key, value in config.items():
        if isinstance(value, Mapping) and key.endswith("_config") and key != QUANTIZED:
            found[key] = _with_dtype(value, dtype)
        elif dtype and isinstance(value, str) and key in ("dtype", "torch_dtype"):
            found[key] = dtype
    return found


def likeness_lines(like: Likeness) -> Iterator[str]:
    """Yield lines on the rules, the vocabularies that were cut, the left-out names and the copied files."""
    yield from [rule.line for rule in like.rules]
    yield from [cut.line for cut in like.cut]
    reasons: dict[str, list[str]] = {}
    for name, why in like.left.items():
        reasons.setdefault(why, []).append(printable(name))
    for why, some in reasons.items():
        yield f"not written: {few(some, 3)}: {why}"
    if like.copied:
        yield f"copied from {like.original}: {', '.join(like.copied)}"
