"""An output like a Hugging Face model (`--like`): its names, shapes, dtypes, files, config and tokenizer."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from ckptools.consolidate.options import ConsolidateOptions
from ckptools.consolidate.output_place import OutputPlace
from ckptools.consolidate.writers import SAFETENSORS
from ckptools.consolidate.writers.layout import LikeModel, OutputContents, OutputLayout, quoted
from ckptools.errors import OutputExistsError, RefusedError, UsageError
from ckptools.files.location import is_remote
from ckptools.files.opening import OpenFiles
from ckptools.formats.megatron.folders import arguments
from ckptools.keys.original import Original, read_original
from ckptools.keys.paired import CutRows, Pairing, PairingRule
from ckptools.keys.pairing import pair
from ckptools.model.checkpoint import Checkpoint
from ckptools.model.records import displayed, to_dict
from ckptools.model.tensor import Tensor
from ckptools.model.tree import fqn_of, leaf_at
from ckptools.text import few, plural, printable

FORBIDDEN = ("map", "strip_prefix", "rename", "allow_missing", "fill", "fill_from")
"""Options that contradict `--like`."""


@displayed
@dataclass(frozen=True, repr=False)
class Likeness:
    """How an output was made like a Hugging Face model.

    Attributes:
        original: the model that was given.
        rules: every rename and rearrangement, with the number of tensors.
        cut: vocabularies of which padded rows are not written.
        left: names of the checkpoint that the model does not have, with the reason.
        copied: names of small files that were copied.
        renamed: number of tensors with another name than in the checkpoint.
        rearranged: number of tensors whose rows were moved, joined, split or transposed.
        elements: number of elements that were written.
    """

    original: str
    rules: tuple[PairingRule, ...]
    cut: tuple[CutRows, ...]
    left: Mapping[str, str]
    copied: tuple[str, ...]
    renamed: int
    rearranged: int
    elements: int
    pairing: Pairing = field(repr=False, compare=False)

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
            raise UsageError(None, "--assume needs --like")
        return None
    given = next((name for name in FORBIDDEN if getattr(options, name)), None)
    if given is not None:
        raise UsageError(
            None, f"--like finds names itself and writes complete sets: it does not go with {_flag(given)}"
        )
    if options.only not in (None, "model") or options.tied != "keep":
        raise UsageError(
            None, "--like writes the model, with tied weights as its config says: leave out --only and --tied"
        )
    if output.writer is not SAFETENSORS or output.named:
        raise UsageError(output.path, "--like writes a folder with safetensors: -o DIR/")
    original = read_original(options.like, bool(checkpoint.options and checkpoint.options.follow_symlinks))
    folder = original.path if original.path.name != "config.json" else original.path.parent
    if folder.resolve() == output.path.parent.resolve():
        raise OutputExistsError(output.path.parent, "is the folder of --like itself; choose another name")
    return original


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def made_like(
    selection: OutputContents, original: Original, options: ConsolidateOptions, files: OpenFiles
) -> tuple[OutputContents, Likeness]:
    """The contents of an output that is like a Hugging Face model, and how they were made.

    Raises:
        RefusedError: the set is not complete, or something would have to be assumed.
    """
    models = [(section, at) for section, at in selection.places if section.kind == "model"]
    source = selection.source
    if len(models) != 1:
        raise UsageError(source.path, f"holds {plural(len(models), 'model')}; --like writes one")
    if selection.lost or selection.missing or selection.carried:
        raise RefusedError(source.path, "is not whole; --like writes complete sets only")
    section, at = models[0]
    state = leaf_at(selection.tree, at)
    found = pair(state, original, arguments(source.tree), options.assume, source.path, files)
    others = {str(key): "is no tensor" for key, value in state.items() if not isinstance(value, Tensor)}
    gone = {fqn_of(path): why for path, why in selection.left_out.items()}
    found = replace(found, left={**found.left, **others, **gone})
    tree = dict(found.tensors)
    files_there = original.files if set(tree) <= set(original.files) else {}
    dtypes = {name: one.dtype for name, one in original.shapes.tensors.items() if one.dtype}
    stated = original.config.get("architectures")
    architecture = str(stated[0]) if isinstance(stated, list) and stated else ""
    contents = replace(
        selection,
        tree=tree,
        model_paths={(name,) for name in tree},
        left_out={},
        places=((section._replace(value=tree, path=()), ()),),
        renamed={olds[0]: new for new, olds in found.sources.items() if len(olds) == 1},
        like=LikeModel(dtypes, files_there, original.copied, architecture),
    )
    return contents, _likeness(original, found)


def _likeness(original: Original, found: Pairing) -> Likeness:
    renamed = sum(olds != (new,) for new, olds in found.sources.items())
    elements = sum(tensor.numel for tensor in found.tensors.values())
    rearranged = len(found.rearranged)
    copied = tuple(original.copied)
    return Likeness(
        str(original.path), found.rules, found.cut, found.left, copied, renamed, rearranged, elements, found
    )


def in_folder(layout: OutputLayout, contents: OutputContents, output: OutputPlace, dtype: str | None) -> OutputLayout:
    """The plan of such an output, with the small files; on a disk one folder, which appears whole."""
    assert contents.like is not None
    folder = output.path.parent
    texts = {folder / name: content for name, content in contents.like.copied.items()}
    auto = "AutoModelForCausalLM" if contents.like.architecture.endswith("ForCausalLM") else "AutoModel"
    load = f"from transformers import {auto}; model = {auto}.from_pretrained({quoted(folder)})"
    notes = [f"{_flag('dtype')} {dtype}: config.json still states the dtype of --like"] if dtype else []
    whole = None if is_remote(folder) else folder
    return replace(layout, folder=whole, texts={**layout.texts, **texts}, load=load, notes=(*layout.notes, *notes))


def likeness_lines(like: Likeness) -> Iterator[str]:
    """A line for each rule, cut, left-out name and copied file."""
    yield from [rule.line for rule in like.rules if rule.words or rule.old != rule.new]
    yield from [cut.line for cut in like.cut]
    reasons: dict[str, list[str]] = {}
    for name, why in like.left.items():
        reasons.setdefault(why, []).append(printable(name))
    for why, some in reasons.items():
        yield f"not written: {few(some, 3)}: {why}"
    yield f"copied from {like.original}: {', '.join(like.copied)}"
