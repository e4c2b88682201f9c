"""Find the model, optimizers, schedulers and random states in a tree, by their content.

Names differ between frameworks, shapes of dicts do not: an optimizer is a dict with `state` and `param_groups`, a
scheduler has `last_epoch` (Megatron's a decay style), a model is a dict of tensors. Names only decide if the content
does not.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache
from math import prod
from types import NoneType
from typing import Any, Literal, NamedTuple

from ckptools.dtypes import is_floating, short
from ckptools.model.checkpoint import Checkpoint
from ckptools.model.records import Rows, displayed, to_dict
from ckptools.model.regions import Ints
from ckptools.model.tensor import Tensor
from ckptools.model.tree import Lost, NumpyArray, Opaque, children_of, nodes_in, tensors_in
from ckptools.text import Key, KeyPath, clip_middle, fqn_of, plural, size
from ckptools.training_state.inner_models import models_inside, part_of
from ckptools.training_state.role_words import MODEL_KEYS

# -- count the tensors of a section: elements, bytes and dtypes, tied weights once -------------------------------------


class SectionSize(NamedTuple):
    """Counts of the tensors and foreign objects in a section.

    Attributes:
        params: elements of the global tensors; for quantized weights the number of weights, if known.
        nbytes: bytes of the global tensors, packed.
        opaque: dotted names of objects of foreign classes.
        bytes_of: bytes by dtype.
        quantized: number of tensors of codes, by how they are quantized.
        uncounted: number of those that are not in `params`, because their number of weights is unknown.
    """

    tensors: int
    params: int
    dtypes: dict[str, int]
    nbytes: int
    opaque: tuple[str, ...]
    bytes_of: dict[str, int]
    quantized: dict[str, int]
    uncounted: int

    @property
    def dtype_words(self) -> str:
        """The dtypes, the most frequent first: `fp8e4m3, fp32, bf16; quantized`."""
        dtypes = ", ".join(short(dtype) for dtype, _ in Counter(self.dtypes).most_common())
        return f"{dtypes}; quantized" if self.quantized else dtypes


def measure(value: Any) -> SectionSize:
    """Count the tensors of a subtree; a tied weight counts once."""
    seen: set[Any] = set()
    dtypes: dict[str, int] = {}
    bytes_of: dict[str, int] = {}
    quantized: dict[str, int] = {}
    tensors = params = uncounted = 0
    opaque: dict[str, None] = {}
    for _, leaf in nodes_in(value, (Tensor, Opaque)):
        if isinstance(leaf, Opaque) and not isinstance(leaf, Lost):
            opaque[leaf.name] = None
        if not isinstance(leaf, Tensor):
            continue
        tensors += 1
        dtypes[leaf.dtype] = dtypes.get(leaf.dtype, 0) + 1
        if leaf.coded is not None and leaf.are_codes:
            quantized[leaf.coded.scheme] = quantized.get(leaf.coded.scheme, 0) + 1
            uncounted += leaf.coded.numel is None
        elif leaf.kind == "quantized":
            words = _class_words(leaf)
            quantized[words] = quantized.get(words, 0) + 1
        identity = storage_identity(leaf)
        if identity is None or identity not in seen:
            params += leaf.numel if leaf.coded is None else leaf.coded.numel or 0
            bytes_of[leaf.dtype] = bytes_of.get(leaf.dtype, 0) + leaf.nbytes
        seen.add(identity)
    return SectionSize(tensors, params, dtypes, sum(bytes_of.values()), tuple(opaque), bytes_of, quantized, uncounted)


def _class_words(tensor: Tensor) -> str:
    """The quantization of a tensor with its own scales: its class, such as `torchao Int8Tensor`, or its dtype."""
    if not tensor.encoded_as:
        return short(tensor.dtype)
    library, _, rest = tensor.encoded_as[0].name.partition(".")
    return f"{library} {rest.rpartition('.')[2]}"


def storage_identity(tensor: Tensor) -> Any:
    """A key that tied tensors share: the same bytes with the same strides; None for a tensor without bytes."""
    first = tensor.first_source
    if first is None or not tensor.numel:
        return None
    return (first.path, first.record, first.offset, first.strides, tensor.shape, tensor.dtype)


# -- recognise the saved states of random generators: the generator, and whether they are those of every rank ----------


STREAMS = {
    "torch": "torch", "cpu": "torch", "cuda": "cuda", "numpy": "numpy", "python": "python", "random": "python",
    "random_state": "python", "numpy_random_seed": "numpy",
    "torch_manual_seed": "torch", "torch_cuda_manual_seed": "cuda",
    "random_rng_state": "python", "np_rng_state": "numpy", "torch_rng_state": "torch", "cuda_rng_state": "cuda",
}  # fmt: skip
"""Generators by the keys of their states; `..._seed` are Accelerate's, `..._rng_state` Megatron's and many others'."""


def stream_of(path: KeyPath) -> str:
    """The generator of a piece of RNG state: the first known word on its path; "" if there is none."""
    return next((STREAMS[str(key).lower()] for key in path if str(key).lower() in STREAMS), "")


def generator_of(node: Any) -> str:
    """Recognise the state of a generator by its form: `python`, `numpy`, or "" for any other value.

    Sources: CPython's Lib/random.py `getstate`; numpy/random/mtrand.pyx `get_state`, as a tuple and as a dict.
    """
    if isinstance(node, (list, tuple)) and len(node) == 3:
        first = type(node[0]) is int and (node[2] is None or isinstance(node[2], float))
        return "python" if first and twister_of(node[1]) == "python" else ""
    if isinstance(node, (list, tuple)) and len(node) == 5:
        return "numpy" if isinstance(node[0], str) and twister_of(node[1]) == "numpy" else ""
    if isinstance(node, Mapping) and isinstance(node.get("state"), Mapping):
        return "numpy" if isinstance(node.get("bit_generator"), str) else ""
    return ""


TWISTERS = {625: "python", 624: "numpy"}
"""Length of a saved Mersenne Twister state: 624 numbers, in Python followed by the position."""


def twister_of(value: Any) -> str:
    """Recognise a Mersenne Twister by its numbers: `python`, `numpy`, or "" for any other value."""
    if isinstance(value, (NumpyArray, Tensor)):
        return TWISTERS.get(value.shape[0], "") if len(value.shape) == 1 and value.dtype in INTEGERS else ""
    ints = isinstance(value, (list, tuple)) and all(type(v) is int for v in value[:8])
    return TWISTERS.get(len(value), "") if ints else ""


INTEGERS = ("<u4", "uint32", "<i8", "int64", "<u8", "uint64")
"""Dtypes, in numpy's and in torch's names, in which such numbers are saved."""


def is_gathered(states: Any) -> bool:
    """Whether RNG states are a list with one entry per rank, as Composer gathers them, not one per device of a rank."""
    return isinstance(states, (list, tuple)) and len(states) > 1 and all(isinstance(s, Mapping) for s in states)


# -- sections ----------------------------------------------------------------------------------------------------------


SectionKind = Literal["model", "optimizer", "scheduler", "rng", "other"]

RNG_WORDS = (
    "rng", "random_state", "random_states", "rng_state", "rng_states", "random_rng_state", "np_rng_state",
    "rng_tracker_states", "cuda_rng_state", "torch_rng_state",
)  # fmt: skip
OPTIMIZER_WORDS = ("optim", "optimizer", "optimizers", "optim_state_dict", "optimizer_state_dict")
"""Keys below which tensors are never a model, even if an optimizer was saved without its param groups."""

REGISTERED = re.compile(r"custom_checkpoint_\d{1,4}")
"""Keys of the objects that a script registered with Accelerate; their tensors, such as averages, are not the model."""

SCHEDULER_KEYS = ("last_epoch", "_last_lr", "base_lrs", "last_batch_iteration", "lr_decay_style", "decay_style")
MAX_SECTION_DEPTH = 5


@displayed
class Section(NamedTuple):
    """A part of a checkpoint; its name is the path without uninformative leading keys: `optimizers.AdamW`, `model`.

    Attributes:
        keys: key in the tree by key of `value`, where they differ: a list of tensors is a model by name here.
        inside: the path of the state dict that holds this model among others; the section's own path is that path and
            the name of the module, and the keys in the tree begin with this name. None for any other section.
    """

    kind: SectionKind
    name: str
    path: KeyPath
    value: Any
    keys: Mapping[str, Key] = {}
    inside: KeyPath | None = None

    def holds(self, path: KeyPath) -> bool:
        """Whether a key path of the tree leads into this section; a model at the root has only some of its keys."""
        place = self.path if self.inside is None else self.inside
        n = len(place)
        inside = path[:n] == place
        mine = self.keys.values() if self.keys else self.value
        return inside and (len(path) == n or not isinstance(self.value, Mapping) or path[n] in mine)

    def place_of(self, path: KeyPath) -> KeyPath:
        """The key path in the tree of a value of this section."""
        place = self.path if self.inside is None else self.inside
        return (*place, *(self.keys.get(key, key) for key in path[:1]), *path[1:])

    def to_dict(self) -> dict[str, Any]:
        """The section's name, kind and size."""
        return to_dict(self)

    def _record(self) -> dict[str, Any]:
        amount = measure(self.value)
        counted = {name: getattr(amount, name) for name in ("tensors", "params", "dtypes", "quantized")}
        return {"name": self.name, "kind": self.kind, **counted, "bytes": amount.nbytes}

    def _summary(self) -> str:
        amount = measure(self.value)
        found = f"{plural(amount.tensors, 'tensor')}, {size(amount.nbytes)}" if amount.tensors else "no tensors"
        found += f", quantized: {', '.join(amount.quantized)}" if amount.quantized else ""
        return f"{clip_middle(self.name, 60)}: {self.kind}, {found}"


ALL = "all"
"""The name that stands for every model."""


def sections_of(checkpoint: Checkpoint) -> Rows[Section]:
    """The parts of a checkpoint: model, optimizers, schedulers, RNG and the rest, in file order.

    Models inside one state dict are a section each, unless the user asked for all models.
    """
    if "sections" not in checkpoint.worked_out:
        parts = find_sections(checkpoint.tree)
        together = checkpoint.options is not None and checkpoint.options.model == ALL
        checkpoint.worked_out["sections"] = Rows(parts if together else _divided(parts))
    found: Rows[Section] = checkpoint.worked_out["sections"]
    return found


def sections_of_kind(checkpoint: Checkpoint, kind: str) -> Rows[Section]:
    """The sections of one kind."""
    return Rows(s for s in sections_of(checkpoint) if s.kind == kind)


def tensors_of(sections: Iterable[Section]) -> Iterator[tuple[KeyPath, Tensor]]:
    """Yield every tensor in some sections, with its key path in the tree."""
    for section in sections:
        for path, tensor in tensors_in(section.value):
            yield section.place_of(path), tensor


def schedulers_of(checkpoint: Checkpoint) -> dict[str, Any]:
    """The schedulers' states, by class name or key."""
    found: dict[str, Any] = {}
    for section in sections_of_kind(checkpoint, "scheduler"):
        found[free_name(found, fqn_of(section.path[-1:]))] = section.value
    return found


def rng_of(checkpoint: Checkpoint) -> Any:
    """The saved RNG state as in the file; None if it has none."""
    found = sections_of_kind(checkpoint, "rng")
    return found[0].value if len(found) == 1 else {s.name: s.value for s in found} or None


def free_name(taken: Mapping[str, Any], name: str) -> str:
    """`name`, with a number appended if it is already taken."""
    number = 1
    while (free := name if number == 1 else f"{name} {number}") in taken:
        number += 1
    return free


def find_sections(tree: Any) -> tuple[Section, ...]:
    """Split a tree into its sections, in the order of the file.

    A tree of tensors alone is one model section; so are tensors that lie beside an optimizer (torchtitan). Every leaf
    is in exactly one section.
    """
    beside = _weights_beside_an_optimizer(tree)
    if beside:
        return beside
    if _is_model((), tree):
        return (Section("model", "model", (), tree),)
    found = tuple(_sections((), tree))
    return _weights_beside_counters(tree) or found if {s.kind for s in found} == {"other"} else found


def _divided(sections: Sequence[Section]) -> Iterator[Section]:
    """Divide each state dict that holds several models; what is beside them becomes a section of its own.

    Beside `current_model_state` of Lightning's `WeightAveraging`, a state dict is the average of everything in it.
    """
    if any(section.path == ("current_model_state",) for section in sections):
        yield from sections
        return
    states = cache(lambda: [_shapes_of_states(s.value) for s in sections if s.kind == "optimizer"])
    names = {s.name for s in sections}
    for section in sections:
        found = models_inside(section.value, states) if section.kind == "model" and not section.keys else {}
        plain = not section.path or section.path[-1] in MODEL_KEYS
        for child, keys in found.items():
            name = child if plain and child not in names - {section.name} else f"{section.name}.{child}"
            value = part_of(section.value, keys, child)
            yield Section("model", name, (*section.path, child), value, keys, section.path)
        mine = {key for keys in found.values() for key in keys.values()}
        rest = {key: value for key, value in section.value.items() if key not in mine} if found else {}
        if rest:
            yield Section("other", "rest", section.path, rest)
        elif not found:
            yield section


def _shapes_of_states(optimizer: Mapping[str, Any]) -> dict[Key, Ints]:
    """The shape of the largest tensor in each parameter's state, by the parameter's name or number."""
    state: dict[Key, Any] = {}
    if is_flat_optimizer(optimizer):
        for key, value in optimizer.items():
            kind, fqn, slot = flat_key(key)
            if kind == STATE:
                state.setdefault(fqn, {})[slot] = value
    else:
        state = optimizer["state"]
    tensors = {key: [t.shape for _, t in tensors_in(entry) if t.shape] for key, entry in state.items()}
    return {key: max(shapes, key=prod) for key, shapes in tensors.items() if shapes}


def _weights_beside_counters(tree: Any) -> tuple[Section, ...]:
    """The sections of a tree with tensors and single numbers or words at its root, if nothing else is a model."""
    values = tree if isinstance(tree, Mapping) and all(isinstance(k, str) for k in tree) else {}
    kept = {k: v for k, v in values.items() if not isinstance(v, (int, float, str, NoneType))}
    if (
        len(kept) == len(values)
        or not _is_model((), kept)
        or not any(t.shape for t in kept.values() if isinstance(t, Tensor))
    ):
        return ()
    return (Section("model", "model", (), kept), *_sections((), {k: v for k, v in values.items() if k not in kept}))


def _weights_beside_an_optimizer(tree: Any) -> tuple[Section, ...]:
    """The sections of a tree with tensors and an optimizer at its root, if nothing else is a model."""
    if not isinstance(tree, Mapping):
        return ()
    flat = _flat_optimizer_in(tree)
    if not flat and not any(map(is_optimizer, tree.values())):
        return ()
    others = {k: v for k, v in tree.items() if k not in flat}
    weights = {k: v for k, v in others.items() if isinstance(k, str) and isinstance(v, Tensor)}
    rest = tuple(_sections((), {k: v for k, v in others.items() if k not in weights}))
    optimizer = (Section("optimizer", "optimizer", (), flat),) if flat else ()
    if len(weights) == len(_random_states(weights)) or any(s.kind == "model" for s in rest):
        return (*_sections((), others), *optimizer) if flat else ()
    return (Section("model", "model", (), weights), *rest, *optimizer)


def _flat_optimizer_in(tree: Mapping[Any, Any]) -> dict[str, Any]:
    """The keys of a flattened optimizer that lie between others at the root, as in `{**model, **optim}`.

    Every `state.` key must be of a parameter that has `param_groups.` keys, whose values have no shape: a module of a
    model may be called `state` too.
    """
    mine = {k: v for k, v in tree.items() if isinstance(k, str) and k.startswith((STATE, GROUPS))}
    if len(mine) == len(tree) or not is_flat_optimizer(mine):
        return {}
    groups = {k: v for k, v in mine.items() if k.startswith(GROUPS)}
    if any(isinstance(v, Tensor) and v.shape for v in groups.values()):
        return {}
    grouped, stated = ({flat_key(k)[1] for k in keys} for keys in (groups, mine.keys() - groups.keys()))
    return mine if stated <= grouped else {}


def _sections(path: KeyPath, node: Any) -> Iterator[Section]:
    kind = _kind(path, node)
    if kind is None and len(path) < MAX_SECTION_DEPTH and isinstance(node, (Mapping, list, tuple)):
        children = children_of(node) or []
        if not path or any(_has_section((*path, key), child) for key, child in children):
            for key, child in children:
                yield from _sections((*path, key), child)
            return
    if kind == "model" and isinstance(node, list):
        numbers = {str(number): number for number in range(len(node))}
        yield Section(kind, section_name(path), path, dict(zip(numbers, node, strict=True)), numbers)
        return
    yield Section(kind or "other", section_name(path), path, node)


def _has_section(path: KeyPath, node: Any) -> bool:
    """Whether a section other than "other" begins at `node` or below it."""
    if _kind(path, node) is not None:
        return True
    if len(path) >= MAX_SECTION_DEPTH or not isinstance(node, (Mapping, list, tuple)):
        return False
    return any(_has_section((*path, key), child) for key, child in (children_of(node) or [])[:64])


def _kind(path: KeyPath, node: Any) -> SectionKind | None:
    if is_optimizer(node):
        return "optimizer"
    if isinstance(node, Mapping) and "state" in node and isinstance(node.get("param_groups"), Lost):
        return "other"  # an unusable optimizer; in any case its moments are not a model
    if isinstance(node, Mapping) and any(k in node for k in SCHEDULER_KEYS):
        return "scheduler"
    if (path and isinstance(path[-1], str) and path[-1].lower() in RNG_WORDS) or generator_of(node):
        return "rng"
    return "model" if path and (_is_model(path, node) or _is_shadow_list(path, node)) else None


SHADOW_LISTS = ("shadow_params", "ema_params")


def _is_shadow_list(path: KeyPath, node: Any) -> bool:
    """Whether a value is the list of averaged parameters that an EMA without names saves.

    Source: diffusers/training_utils.py, `EMAModel.state_dict`; torch_ema/ema.py, `ExponentialMovingAverage.state_dict`,
    whose `collected_params` are a copy of the trained ones. `ema_params` is what scripts of their own call it.
    """
    named = path[-1] in SHADOW_LISTS and isinstance(node, list) and len(node) > 0
    return named and all(isinstance(value, Tensor) and is_floating(value.dtype) for value in node)


def is_optimizer(node: Any) -> bool:
    """Whether a subtree is a `torch.optim.Optimizer.state_dict()`, nested or flattened."""
    return is_flat_optimizer(node) or (
        isinstance(node, Mapping)
        and isinstance(node.get("state"), Mapping)
        and isinstance(node.get("param_groups"), (list, tuple))
        and all(isinstance(group, Mapping) for group in node["param_groups"])
    )


def is_flat_optimizer(node: Any) -> bool:
    """Whether a subtree has keys such as `state.<fqn>.exp_avg` and `param_groups.<fqn>.lr`, and no others.

    Source: torch/distributed/checkpoint/state_dict.py, `_flatten_optim_state_dict`.
    """
    if not isinstance(node, Mapping) or not node or not all(isinstance(k, str) for k in node):
        return False
    known = all(k.startswith((STATE, GROUPS)) and k.count(".") > 1 for k in node)
    return known and any(k.startswith(GROUPS) for k in node)


STATE, GROUPS = "state.", "param_groups."


def flat_key(key: str) -> tuple[str, str, str]:
    """Split a key such as `state.<fqn>.exp_avg` into `STATE` or `GROUPS`, the fqn and the name of the value."""
    kind = STATE if key.startswith(STATE) else GROUPS
    fqn, _, name = key[len(kind) :].rpartition(".")
    return kind, fqn, name


def _is_model(path: KeyPath, node: Any) -> bool:
    """Whether most values of a dict with text keys are tensors; other values (extra state) may lie between.

    Random states, detected by name and dtype, do not count: a dict that holds one beside them is not a model for it.
    Among weights they may be buffers of a module, and stay with them. Below the root, a dict of integer scalars alone
    holds counters, such as `n_averaged` of Lightning's `averaging_state`.
    """
    if not isinstance(node, Mapping) or not node or not all(isinstance(k, str) for k in node):
        return False
    states = len(_random_states(node))
    found = [v for v in node.values() if isinstance(v, Tensor)]
    if path and (REGISTERED.fullmatch(str(path[0])) or not any(t.shape or is_floating(t.dtype) for t in found)):
        return False
    tensors = len(found) - states
    return tensors * 2 > len(node) - states and not any(str(p).lower() in (*RNG_WORDS, *OPTIMIZER_WORDS) for p in path)


def _random_states(node: Mapping[str, Any]) -> list[str]:
    """Keys of tensors that have the names of random states, and are bytes, as torch's generators return theirs."""
    found = ((word, node[word]) for word in RNG_WORDS if word in node)
    return [word for word, value in found if isinstance(value, Tensor) and value.dtype == "uint8"]


OUTER_KEYS = ("state", "app")
"""Uninformative outer keys: Composer's `state`, DCP's `app`."""


def section_name(path: KeyPath) -> str:
    """The display name of a section: its path without an uninformative leading key."""
    shown = path[1:] if len(path) > 1 and path[0] in OUTER_KEYS else path
    return fqn_of(shown) or "checkpoint"


ASKED_FOR = ("_last_lr",)
"""Names that begin with `_` but that people look for: a scheduler's last learning rates."""


def is_private_name(word: str) -> bool:
    """Whether a name begins with `_` and is not in `ASKED_FOR`."""
    return word.startswith("_") and word not in ASKED_FOR
