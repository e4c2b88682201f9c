"""Find the checkpoint tensors that make each tensor of a Hugging Face model: by renames, or by a documented layout.

Nothing is assumed unless the caller allows it, and the set is complete or refused: every name of the model gets a
tensor of its shape, and every tensor of the checkpoint a place, or a reason to leave it out.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

from ckptools.dtypes import ITEMSIZE, is_floating
from ckptools.errors import RefusedError
from ckptools.files.opening import OpenFiles
from ckptools.formats.megatron.folders import setting
from ckptools.keys.expected_names import Original, shapes_of_state
from ckptools.keys.layouts import (
    HUB,
    LAYOUTS,
    MEGATRON,
    MEGATRON_GPT2,
    Recognised,
    UnfitError,
    recognise,
)
from ckptools.keys.renames import find_renames, rename_words
from ckptools.model.cover import cover
from ckptools.model.records import displayed
from ckptools.model.regions import Ints
from ckptools.model.tensor import Tensor
from ckptools.option import spelled
from ckptools.tensor_io.slicing import RowBlock, cut_out, put_in, split_rows
from ckptools.tensor_io.stream import tensor_bytes, tensor_digest
from ckptools.text import few, plural, printable
from ckptools.text import shape as shape_text
from ckptools.torch_engine.module_shapes import NamedShape, PublishedPart, StateDictShapes
from ckptools.training_state.wrappers import without_ddp

# -- the result: the sources of each tensor, and the rules that were applied -------------------------------------------


COMPUTED = "a buffer that the model computes anew"
"""A reason for not writing a tensor of the checkpoint."""


@displayed
class Proof(NamedTuple):
    """Counts of the comparison that proves that every element of an output is its source's.

    Attributes:
        tensors: tensors of the output.
        elements: their elements.
        renamed: tensors with another name than in the source.
        rearranged: tensors whose rows were moved, joined, split or transposed.
        cut: tensors without the source's padded rows.
        cast: tensors of another dtype: the source's values converted to nearest even.
        merged: tensors to which an adapter was added.
    """

    tensors: int
    elements: int
    renamed: int = 0
    rearranged: int = 0
    cut: int = 0
    cast: int = 0
    merged: int = 0

    def __str__(self) -> str:
        return f"{plural(self.tensors, 'tensor')}, {self.counts}"

    @property
    def counts(self) -> str:
        """The number of elements, and the transformations they passed."""
        parts = ("renamed", "rearranged", "cut", "cast", "merged")
        through = ", ".join(f"{getattr(self, part)} {part}" for part in parts if getattr(self, part))
        counts = plural(self.elements, "element")
        return f"{counts} ({through})" if through else counts


@displayed
class PairingRule(NamedTuple):
    """A rule that was applied.

    Attributes:
        old: name in the checkpoint; in a layout, `{}` stands for a layer's number.
        new: name in the model.
        words: a transformation, such as `transposed`; "" for a rename alone.
        tensors: number of the model's tensors that it made.
        assumed: whether the caller allowed it without evidence in names.
    """

    old: str
    new: str
    words: str
    tensors: int
    assumed: bool = False

    @property
    def line(self) -> str:
        """The rule in one line."""
        words = f": {self.words}" if self.words else ""
        names = f"{printable(self.old)} -> {printable(self.new)}"
        return f"renamed: {names}{words}: {plural(self.tensors, 'tensor')}{' (assumed)' if self.assumed else ''}"


@displayed
class CutRows(NamedTuple):
    """Rows of a vocabulary that are not written.

    Attributes:
        rows: rows in the checkpoint.
        kept: rows that are written.
        why: the proof that the other rows are padding.
    """

    name: str
    rows: int
    kept: int
    why: str

    @property
    def line(self) -> str:
        """The cut in one line."""
        return f"cut: {printable(self.name)}: {self.kept} of {self.rows} rows are written; {self.why}"


@dataclass(frozen=True)
class Pairing:
    """The tensors of a model, made from the tensors of a checkpoint.

    Attributes:
        tensors: by name in the model, in its order.
        sources: names in the checkpoint from which each tensor is made.
        cut: rows that are not written.
        left: names of the checkpoint that the model does not have, with the reason.
        rearranged: names of tensors that are not a tensor of the checkpoint unchanged.
    """

    tensors: Mapping[str, Tensor] = field(repr=False)
    sources: Mapping[str, tuple[str, ...]] = field(repr=False)
    rules: tuple[PairingRule, ...] = ()
    cut: tuple[CutRows, ...] = ()
    left: Mapping[str, str] = field(default_factory=dict)
    rearranged: frozenset[str] = frozenset()

    def proof(self, dtypes: Mapping[str, str]) -> Proof:
        """Count the transformations of an output that has these tensors in the given dtypes."""
        return Proof(
            tensors=len(self.tensors),
            elements=sum(tensor.numel for tensor in self.tensors.values()),
            renamed=sum(olds != (new,) for new, olds in self.sources.items()),
            rearranged=len(self.rearranged),
            cut=len(self.cut),
            cast=sum(tensor.dtype != dtypes.get(name, tensor.dtype) for name, tensor in self.tensors.items()),
        )


# -- prove that the last rows of a vocabulary are padding: rows without a token, which trainers add for even division
# --- Megatron pads to a multiple of `make_vocab_size_divisible_by` times the tensor-parallel size, and states the
# result. Source: megatron/training/tokenizer/tokenizer.py (`_vocab_size_with_padding`).


def why_padding(tensor: Tensor, kept: int, args: Mapping[str, Any], files: OpenFiles) -> str:
    """The proof that the rows from `kept` on belong to no token; "" without a proof.

    `args` are Megatron's settings, if the checkpoint has them.

    Raises:
        ReadError: the rows cannot be read.
    """
    rows = tensor.shape[0]
    padded = setting(args, "padded_vocab_size")
    multiple = (setting(args, "make_vocab_size_divisible_by") or 0) * (
        setting(args, "tensor_model_parallel_size", "model_parallel_size") or 1
    )
    if padded == rows and multiple and -(-kept // multiple) * multiple == rows:
        return f"args.padded_vocab_size is {rows}, which is {kept} rounded up to a multiple of {multiple}"
    rest = split_rows(tensor, [RowBlock(kept, rows - kept, 0, 0)])[0]
    if all(bytes(piece).count(0) == len(piece) for piece in tensor_bytes(rest, rest.dtype, files)):
        return f"all values of the last {rows - kept} rows are zero"
    return ""


# -- convert the tensors of one layout to another: divide them into parts, and join the parts --------------------------
# Parts have the same names in all layouts, so that each layout needs one table, not one for each pair of layouts.


UNCOVERED = ("rotary_interleaved", "apply_layernorm_1p", "layernorm_zero_centered_gamma", "multi_latent_attention")
"""Settings of Megatron with which the same names have other values."""


def from_trainer(
    found: Recognised, tensors: Mapping[str, Tensor], model: Original, args: Mapping[str, Any], assume: bool, path: Path
) -> Pairing:
    """Make a model's tensors from the tensors of a trainer with documented names.

    Raises:
        RefusedError: there is no rule for the model's type, or for the trainer's settings (`args`); or a size differs.
    """
    fitting = [one for one in LAYOUTS if one not in HUB and model.model_type in one.model_types]
    known = recognise(tensors, model.sizes, fitting) if fitting else None
    if known is None or len(known.placed) < len(found.placed) // 2:
        text = f"the names are those of {found.layout.name}, and no documented rule turns them into a model of type"
        raise RefusedError(path, f"{text} {model.model_type!r}")
    if known.layout in (MEGATRON, MEGATRON_GPT2):
        _check_settings(args, assume, path)
    return _between(known, tensors, model)


def _check_settings(args: Mapping[str, Any], assume: bool, path: Path) -> None:
    """Refuse Megatron settings without a rule, and missing settings unless the defaults are assumed."""
    if "rotary_interleaved" not in args and not assume:
        text = "the checkpoint does not hold Megatron's args, which say how rotary pairs and norms are stored"
        raise RefusedError(
            path, f"{text}; {spelled('assume')} takes the defaults (rotary_interleaved and layernorm_1p off)"
        )
    for name in UNCOVERED:
        if args.get(name):
            raise RefusedError(path, f"args.{name} is set, for which there is no documented rule")


def _between(known: Recognised, tensors: Mapping[str, Tensor], model: Original) -> Pairing:
    hubs = [one for one in HUB if model.model_type in one.model_types]
    wanted = recognise(model.shapes.tensors, model.sizes, hubs)
    parts, came_from = _taken_apart(known, tensors, model)
    made, sources = dict[str, Tensor](), dict[str, tuple[str, ...]]()
    counted: dict[tuple[str, str, str], int] = {}
    rearranged: set[str] = set()
    for new, place in wanted.placed.items() if not wanted.prefix else ():
        if not all(part in parts for part in place.parts):
            continue
        try:
            made[new] = place.stored.form.join([parts[part] for part in place.parts], model.sizes)
        except UnfitError as error:
            raise _unfit(new, error) from error
        sources[new] = tuple(dict.fromkeys(came_from[part] for part in place.parts))
        rows = [known.placed[name].stored for name in sources[new]]
        forms = dict.fromkeys((*(row.form for row in rows), place.stored.form))
        words = "; ".join(form.words for form in forms if form.words)
        old = ", ".join(dict.fromkeys(known.prefix + row.name for row in rows))
        rule = old, place.stored.name, words
        counted[rule] = counted.get(rule, 0) + 1
        rearranged |= {new} if words else set()
    rules = [PairingRule(*rule, count) for rule, count in counted.items() if rule[2] or rule[0] != rule[1]]
    if wrapped := [name for name in known.placed if without_ddp(name) != name]:
        first = wrapped[0]
        rules.insert(0, PairingRule(first, without_ddp(first), "names of wrappers dropped", len(wrapped)))
    return Pairing(made, sources, tuple(rules), (), dict.fromkeys(known.recomputed, COMPUTED), frozenset(rearranged))


def _taken_apart(
    known: Recognised, tensors: Mapping[str, Tensor], model: Original
) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Parts by name, and the source tensor of each."""
    parts, came_from = dict[str, Tensor](), dict[str, str]()
    for name, place in known.placed.items():
        try:
            pieces = place.stored.form.split(tensors[name], model.sizes)
        except UnfitError as error:
            raise _unfit(name, error) from error
        for part, piece in zip(place.parts, pieces, strict=True):
            if part in came_from:
                raise RefusedError(None, f"{came_from[part]} and {name} are both the same weight ({part})")
            parts[part], came_from[part] = piece, name
    if model.tied and "head.weight" not in parts and "embed.weight" in parts:
        parts["head.weight"], came_from["head.weight"] = parts["embed.weight"], came_from["embed.weight"]
    return parts, came_from


def _unfit(name: str, error: UnfitError) -> RefusedError:
    return RefusedError(None, f"{printable(name)}: {error}; is ORIGINAL of another size?")


# -- pairs -------------------------------------------------------------------------------------------------------------


MAX_NAMED = 4
EMBEDDING_WORDS = ("embed_tokens", "wte", "lm_head")
"""Words in the names of Hugging Face models' tensors that have a row for each token."""

HEAD = "lm_head.weight"


def pair(
    state: Mapping[str, Any], original: Original, args: Mapping[str, Any], assume: bool, path: Path, files: OpenFiles
) -> Pairing:
    """Find the sources of each tensor of a model.

    Args:
        state: the state dict of the checkpoint's model.
        original: the model.
        args: the trainer's own settings in the checkpoint (Megatron's `args`); empty if there are none.
        assume: accept pairs that only shapes or defaults support.
        path: of the checkpoint, for messages.
        files: keeps sources open.

    Raises:
        RefusedError: the set is not complete, or needs an assumption that is not allowed.
        ReadError: values that must be compared cannot be read.
    """
    tensors = {name: value for name, value in state.items() if isinstance(value, Tensor)}
    encoded = next((name for name, tensor in tensors.items() if tensor.encoded_as and tensor.note), None)
    if encoded is not None:
        raise RefusedError(
            path, f"{encoded} is quantized; {spelled('like')} writes values: add {spelled('dequantize', True)}"
        )
    if any(tensor.encoded_as for tensor in tensors.values()):
        # The rows of a weight that is decoded while it is written are not moved.
        return _checked(_by_renames(tensors, original, assume), tensors, original, args, assume, path, files)
    found = recognise(tensors, original.sizes)
    if original.config and found.layout not in HUB and len(found.placed) * 2 > len(tensors):
        draft = from_trainer(found, tensors, original, args, assume, path)
    else:
        draft = _by_renames(tensors, original, assume)
        if _lacking(draft, original):
            # The same model in another form, such as with separate experts.
            fitting = [one for one in HUB if original.model_type in one.model_types]
            draft = _between(recognise(tensors, original.sizes, fitting), tensors, original) if fitting else draft
        if lacking := _lacking(draft, original):
            other = _as_transformers_saves(tensors, original, assume)
            draft = other if _lacking(other, original) < lacking else draft
    return _checked(draft, tensors, original, args, assume, path, files)


def _lacking(draft: Pairing, original: Original) -> int:
    return sum(name not in draft.tensors and not one.tied for name, one in original.shapes.tensors.items())


# -- the form in which transformers saves a model, and the form that it has in memory ---------------------------------


def _as_transformers_saves(tensors: Mapping[str, Tensor], original: Original, assume: bool) -> Pairing:
    """Cut the tensors of a state dict into the tensors that transformers saves, or join these to a state dict."""
    state, parts = original.as_published()
    words = "cut out, as transformers saves it"
    if original.shapes.tensors.keys() <= parts.keys():
        found = _by_renames(tensors, replace(original, shapes=state), assume)
        made = {
            name: _cut(found.tensors[part.name], part, state)
            for name, part in parts.items()
            if part.name in found.tensors
        }
        olds = {name: [parts[name].name] for name in made}
    else:
        words = "joined, as transformers has it in memory"
        shapes = {name: NamedShape(part.shape, state.tensors[part.name].dtype) for name, part in parts.items()}
        found = _by_renames(tensors, replace(original, shapes=replace(state, tensors=shapes)), assume)
        olds = {}
        for name, part in parts.items():
            olds.setdefault(part.name, []).append(name)
        olds = {name: some for name, some in olds.items() if found.tensors.keys() >= {*some}}
        made = {
            name: _joined([(found.tensors[old], parts[old]) for old in some], state.tensors[name].shape)
            for name, some in olds.items()
        }
    sources = {name: tuple(found.sources[old][0] for old in some) for name, some in olds.items()}
    rearranged = {name for name, some in olds.items() if len(some) > 1 or made[name] is not found.tensors[some[0]]}
    kinds = Counter(
        (", ".join(dict.fromkeys(_NUMBER.sub("{}", old) for old in some)), _NUMBER.sub("{}", name), name in rearranged)
        for name, some in olds.items()
        if some != [name]
    )
    rules = [PairingRule(old, new, words if cut else "", count) for (old, new, cut), count in kinds.items()]
    return Pairing(made, sources, (*found.rules, *rules), (), found.left, frozenset(rearranged))


def _cut(tensor: Tensor, part: PublishedPart, state: StateDictShapes) -> Tensor:
    """The part of a tensor of a state dict; the tensor itself if that is all of it."""
    whole = state.tensors[part.name].shape
    if part.shape == whole:
        return tensor
    if whole is None or tensor.shape != whole:
        raise _unfit(part.name, UnfitError(f"{list(tensor.shape)} here and {list(whole or ())} there"))
    return cut_out(tensor, part.box, len(part.shape))


def _joined(pieces: Sequence[tuple[Tensor, PublishedPart]], shape: Ints | None) -> Tensor:
    """The tensor of a state dict that some parts make; the first one if they do not make it."""
    first, part = pieces[0]
    boxes = [part.box for _, part in pieces]
    unlike = any(tensor.shape != part.shape or tensor.dtype != first.dtype for tensor, part in pieces)
    if shape is None or unlike or part.shape == shape or not cover(shape, boxes).exact:
        return first
    return put_in([(tensor, part.box) for tensor, part in pieces], shape)


_NUMBER = re.compile(r"(?<=\.)\d+(?=\.)")


# -- renames -----------------------------------------------------------------------------------------------------------


def _by_renames(tensors: Mapping[str, Tensor], original: Original, assume: bool) -> Pairing:
    saved = StateDictShapes("the checkpoint", shapes_of_state(tensors))
    found = find_renames(saved, original.shapes)
    names = {old: new for old, new in found.names.items() if assume or old not in found.assumed}
    by_new = {new: old for old, new in names.items() if new in original.shapes.tensors}
    rules = [
        PairingRule(step.example[0], step.example[1], rename_words(step), step.changes, step.assumed)
        for step in found.steps
        if assume or not step.assumed
    ]
    made = {new: tensors[by_new[new]] for new in original.shapes.tensors if new in by_new}
    ends = tuple(end for one in HUB if original.model_type in one.model_types for end in one.recomputed)
    left = {name: COMPUTED for name in tensors if name.endswith(ends) and name not in by_new.values()}
    return Pairing(made, {new: (by_new[new],) for new in made}, tuple(rules), (), left)


# -- a complete set ----------------------------------------------------------------------------------------------------


def _checked(
    draft: Pairing,
    tensors: Mapping[str, Tensor],
    original: Original,
    args: Mapping[str, Any],
    assume: bool,
    path: Path,
    files: OpenFiles,
) -> Pairing:
    """Cut proven padding, account for tensors that are left over, and refuse an incomplete set."""
    made, cut = dict[str, Tensor](), list[CutRows]()
    missing, unexpected, shapes = list[str](), list[str](), list[str]()
    draft = _with_tied_head(draft, original)
    for name, wanted in original.shapes.tensors.items():
        tensor = draft.tensors.get(name)
        if tensor is None:
            missing.append(name)
            continue
        if _padded(name, tensor, wanted.shape):
            assert wanted.shape is not None
            kept = wanted.shape[0]
            why = why_padding(tensor, kept, args, files) or (f"assumed ({spelled('assume')})" if assume else "")
            if why:
                cut.append(CutRows(name, tensor.shape[0], kept, why))
                tensor = split_rows(tensor, [RowBlock(0, kept, 0, 0)])[0]
        shapes.extend(_unlike(name, tensor, wanted.shape, wanted.dtype))
        made[name] = tensor
    used = {old for olds in draft.sources.values() for old in olds}
    left = dict(draft.left)
    for name in tensors:
        if name not in used and name not in left:
            why = _why_left(name, tensors, draft, files)
            left |= {name: why} if why else {}
            unexpected.extend([] if why else [name])
    facts = []
    if missing:
        absent = few(list(map(printable, missing)), MAX_NAMED)
        facts.append(f"the checkpoint lacks {plural(len(missing), 'name')} of {original.path}: {absent}")
    if unexpected:
        extra = few(list(map(printable, unexpected)), MAX_NAMED)
        facts.append(f"{original.path} has no place for {plural(len(unexpected), 'tensor')}: {extra}")
    if shapes:
        facts.append(few(list(map(printable, shapes)), MAX_NAMED))
    if facts:
        way = "" if assume else f"; {spelled('assume')} takes what only shapes speak for"
        raise RefusedError(path, f"{spelled('like')}: {'; '.join(facts)}; nothing was written{way}")
    return replace(draft, tensors=made, cut=tuple(cut), left=left)


def _with_tied_head(draft: Pairing, original: Original) -> Pairing:
    """A draft whose tied output layer, if the model has its name, is the embedding."""
    lacking = [name for name in original.shapes.tensors if name not in draft.tensors]
    source = next((name for name in draft.tensors if name.endswith(("embed_tokens.weight", "wte.weight"))), None)
    if not original.tied or source is None or lacking != [HEAD]:
        return draft
    rule = PairingRule(draft.sources[source][0], HEAD, "tied, as the config says", 1)
    tensors = {**draft.tensors, HEAD: draft.tensors[source]}
    sources = {**draft.sources, HEAD: draft.sources[source]}
    return replace(draft, tensors=tensors, sources=sources, rules=(*draft.rules, rule))


def _padded(name: str, tensor: Tensor, wanted: tuple[int, ...] | None) -> bool:
    """Whether a tensor is a vocabulary with more rows than wanted."""
    if wanted is None or not any(word in name for word in EMBEDDING_WORDS):
        return False
    return tensor.shape[1:] == wanted[1:] and tensor.shape[:1] > wanted[:1]


def _unlike(name: str, tensor: Tensor, wanted: tuple[int, ...] | None, dtype: str) -> Iterator[str]:
    if wanted is not None and tensor.shape != wanted:
        padded = "; nothing proves that its last rows are padding" if _padded(name, tensor, wanted) else ""
        yield f"{name} is {shape_text(tensor.shape)} here and {shape_text(wanted)} there{padded}"
    elif dtype and tensor.dtype != dtype and not all(is_floating(d) and ITEMSIZE[d] > 1 for d in (tensor.dtype, dtype)):
        yield f"{name} is {tensor.dtype} here and {dtype} there, which no cast makes of it"


def _why_left(name: str, tensors: Mapping[str, Tensor], draft: Pairing, files: OpenFiles) -> str:
    """Why a tensor that the model does not need may be left out: it is a tied copy; "" if it may not."""
    for new, olds in draft.sources.items():
        other = tensors[olds[0]]
        same = any(word in new for word in EMBEDDING_WORDS) and len(olds) == 1 and other.shape == tensors[name].shape
        if same and tensor_digest(other, files) == tensor_digest(tensors[name], files):
            return f"tied: the same values as {olds[0]}, under a name that ORIGINAL does not have"
    return ""
