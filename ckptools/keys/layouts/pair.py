"""Turn the tensors of one layout into those of another: take them apart, and put the parts together.

The parts have one name in all layouts, so a layout needs a table of its own and none for each pair of layouts.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from ckptools.errors import RefusedError
from ckptools.keys.layouts.forms import Sizes, UnfitError
from ckptools.keys.layouts.recognise import Placed, Recognised, recognise
from ckptools.keys.layouts.tables import HUB, LAYOUTS, MEGATRON, MEGATRON_GPT2
from ckptools.keys.original import Original
from ckptools.keys.paired import COMPUTED, Pairing, PairingRule
from ckptools.model.tensor import Tensor
from ckptools.text import printable

UNCOVERED = ("rotary_interleaved", "apply_layernorm_1p", "layernorm_zero_centered_gamma", "multi_latent_attention")
"""Settings of Megatron with which the same names mean other values."""


def from_trainer(
    found: Recognised, tensors: Mapping[str, Tensor], model: Original, args: Mapping[str, Any], assume: bool, path: Path
) -> Pairing:
    """Make a model's tensors of those of a trainer with documented names.

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


def from_hub(tensors: Mapping[str, Tensor], model: Original) -> Pairing | None:
    """Make a model's tensors of the same model's in other forms, such as experts one by one; None without a rule."""
    fitting = [one for one in HUB if model.model_type in one.model_types]
    return _between(recognise(tensors, model.sizes, fitting), tensors, model) if fitting else None


def _check_settings(args: Mapping[str, Any], assume: bool, path: Path) -> None:
    """Refuse settings of Megatron without a rule; and where they are not here, unless the defaults are assumed."""
    if "rotary_interleaved" not in args and not assume:
        text = "the checkpoint does not hold Megatron's args, which say how rotary pairs and norms are stored"
        raise RefusedError(path, f"{text}; --assume takes the defaults (rotary_interleaved and layernorm_1p off)")
    for name in UNCOVERED:
        if args.get(name):
            raise RefusedError(path, f"args.{name} is set, for which there is no documented rule")


class _Parts(NamedTuple):
    """Parts by name, and the tensor that each comes from."""

    tensors: dict[str, Tensor]
    came_from: dict[str, str]


def _between(known: Recognised, tensors: Mapping[str, Tensor], model: Original) -> Pairing:
    hubs = [one for one in HUB if model.model_type in one.model_types]
    wanted = recognise(model.shapes.tensors, model.sizes, hubs)
    parts = _taken_apart(known, tensors, model)
    made, sources = dict[str, Tensor](), dict[str, tuple[str, ...]]()
    counted: dict[tuple[str, str, str], int] = {}
    rearranged: set[str] = set()
    for new, place in wanted.placed.items() if not wanted.prefix else ():
        if not all(part in parts.tensors for part in place.parts):
            continue
        made[new] = _joined(new, place, parts, model.sizes)
        sources[new] = tuple(dict.fromkeys(parts.came_from[part] for part in place.parts))
        rule = _rule(known, sources[new], place)
        counted[rule] = counted.get(rule, 0) + 1
        rearranged |= {new} if rule[2] else set()
    rules = tuple(PairingRule(*rule, count) for rule, count in counted.items())
    return Pairing(made, sources, rules, (), dict.fromkeys(known.recomputed, COMPUTED), frozenset(rearranged))


def _taken_apart(known: Recognised, tensors: Mapping[str, Tensor], model: Original) -> _Parts:
    found = _Parts({}, {})
    for name, place in known.placed.items():
        try:
            pieces = place.stored.form.split(tensors[name], model.sizes)
        except UnfitError as error:
            raise _unfit(name, error) from error
        for part, piece in zip(place.parts, pieces, strict=True):
            if part in found.came_from:
                raise RefusedError(None, f"{found.came_from[part]} and {name} are both the same weight ({part})")
            found.tensors[part], found.came_from[part] = piece, name
    if model.tied and "head.weight" not in found.tensors and "embed.weight" in found.tensors:
        found.tensors["head.weight"] = found.tensors["embed.weight"]
        found.came_from["head.weight"] = found.came_from["embed.weight"]
    return found


def _joined(new: str, place: Placed, parts: _Parts, sizes: Sizes) -> Tensor:
    try:
        return place.stored.form.join([parts.tensors[part] for part in place.parts], sizes)
    except UnfitError as error:
        raise _unfit(new, error) from error


def _unfit(name: str, error: UnfitError) -> RefusedError:
    return RefusedError(None, f"{printable(name)}: {error}; is ORIGINAL of another size?")


def _rule(known: Recognised, sources: tuple[str, ...], place: Placed) -> tuple[str, str, str]:
    """The names of a layout that become a name of the other, and what is done besides."""
    rows = [known.placed[name].stored for name in sources]
    forms = dict.fromkeys((*(row.form for row in rows), place.stored.form))
    words = "; ".join(form.words for form in forms if form.words)
    old = ", ".join(dict.fromkeys(known.prefix + row.name for row in rows))
    return old, place.stored.name, words
