"""LoRA adapters in a model's state dict, found by PEFT's names, and the settings of an `adapter_config.json`.

    base_model.model.layers.0.q_proj.base_layer.weight          W [out, in], which is frozen
    base_model.model.layers.0.q_proj.lora_A.default.weight      A [r, in] of the adapter called `default`
    base_model.model.layers.0.q_proj.lora_B.default.weight      B [out, r]
    base_model.model.layers.0.q_proj.lora_magnitude_vector.default.weight     [out], of DoRA
    base_model.model.embed_tokens.lora_embedding_A.default      A [r, rows] of an embedding, beside its B [columns, r]
    base_model.model.lm_head.modules_to_save.default.weight     trained in full, in the place of `original_module`

A file that PEFT saved has the same names without the adapter's: `lora_A.weight`, and `lm_head.weight` for a module that
was trained in full. FSDP, DDP and torch.compile add their own words, which are taken away. A model that was changed by
`inject_adapter_in_model` has no `base_model.model.`; one of PEFT before 0.6 has no `base_layer`.

Proven by the file: the modules, r (rows of A), whether magnitudes make it DoRA, whether base weights are here. Alpha
and rsLoRA are stated by a config alone. Nothing in a file says whether PEFT had merged an adapter before it saved.

Source: peft 0.21.2: utils/save_and_load.py (`get_peft_model_state_dict`), utils/other.py (`ModulesToSaveWrapper`,
`get_pattern_key`), tuners/lora/layer.py (`update_layer`), tuners/lora/config.py, tuners/tuners_utils.py
(`check_target_module_exists`).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import sqrt
from typing import Any, NamedTuple

from ckptools.model.checkpoint import Checkpoint
from ckptools.model.problems import Code, Problem
from ckptools.model.records import displayed, to_dict
from ckptools.model.regions import Ints
from ckptools.model.tensor import Tensor
from ckptools.text import KeyPath, and_others, few, fqn_of, plural
from ckptools.text import shape as shape_text
from ckptools.training_state.optimizers import optimizers_of
from ckptools.training_state.sections import Section, sections_of_kind
from ckptools.training_state.wrappers import without_ddp

PREFIX = "base_model.model."
BASE = "base_layer"

PART = re.compile(
    r"(?P<module>.+)\.lora_(?P<part>A|B|embedding_A|embedding_B|magnitude_vector)"
    r"(?:\.(?P<adapter>(?!(?:weight|bias)$)[^.]+))?(?:\.(?P<end>weight|bias))?"
)
IN_FULL = re.compile(
    r"(?P<module>.+)\.(?:modules_to_save\.(?P<adapter>[^.]+)|(?P<original>original_module))\.(?P<rest>.+)"
)
UNKNOWN = re.compile(r"\.(?:lora_|token_adapter\.)")
"""Names of PEFT that neither pattern matches: AdaLoRA's, and those of single trained tokens."""

OTHER = "another kind of LoRA"
WRITTEN = ("LoRA", "rsLoRA", "DoRA", "rsDoRA")
"""The kinds of adapters that `consolidate` writes and merges."""

LAYER = re.compile(r"(?:^|\.)\d{1,9}\.")
"""The end of a layer's name: the first number in a module's name is the layer's."""


class LoraModule(NamedTuple):
    """A module that an adapter changes.

    Attributes:
        name: its name in the base model: `model.layers.0.self_attn.q_proj`.
        keys: keys of its tensors in the state dict by their part: `A`, `B`, `magnitude_vector`, `bias` (of B).
        embedding: whether it is an embedding, whose A and B are stored transposed to a linear layer's.
    """

    name: str
    keys: Mapping[str, str]
    embedding: bool


@displayed
@dataclass(frozen=True, repr=False)
class Adapter:
    """A LoRA adapter in a model's state dict.

    Attributes:
        name: its name; "" in PEFT's own files, which have none.
        section: the model's section.
        modules: the modules that it changes.
        in_full: keys of tensors trained in full, by their names in the base model; `modules_to_save` in PEFT.
        base: keys of the base model's tensors in the state dict, by their names there.
        unknown: keys of PEFT's tensors that no rule here covers.
        stated: the content of an `adapter_config.json`; empty without one.
        stated_in: the file that states it; two, if the user gave one beside it.
        ranks: the distinct numbers r, in order; without modules whose A does not tell.
        frozen: whether the optimizer has state of the adapter's tensors, and of no tensor of the base.
    """

    name: str
    section: Section
    modules: tuple[LoraModule, ...]
    in_full: Mapping[str, str]
    base: Mapping[str, str]
    unknown: tuple[str, ...]
    stated: Mapping[str, Any]
    stated_in: str
    ranks: Ints
    frozen: bool

    @property
    def lacks_base(self) -> list[str]:
        """Names of base weights that the adapter changes and that are not here."""
        return [f"{one.name}.weight" for one in self.modules if f"{one.name}.weight" not in self.base]

    @property
    def here(self) -> int:
        """For how many of its modules the base weight is here, whatever its name in the module."""
        parents = {name.rpartition(".")[0] for name in self.base}
        return sum(_own_name(one.name) in parents for one in self.modules)

    @property
    def kind(self) -> str:
        """`DoRA`, `rsLoRA` or `LoRA`; another method of PEFT by the name that its config has for it."""
        method = self.stated.get("peft_type", "LORA")
        if method != "LORA" or self.unknown:
            return f"{method:.20}" if isinstance(method, str) and method != "LORA" else OTHER
        rs = "rs" if self.stated.get("use_rslora") is True else ""
        return rs + ("DoRA" if any("magnitude_vector" in one.keys for one in self.modules) else "LoRA")

    @property
    def alphas(self) -> list[float]:
        """The distinct numbers alpha that the config states for the modules; empty if it states none."""
        found = {alpha_of(self.stated, one.name) for one in self.modules}
        return sorted(alpha for alpha in found if alpha is not None) if None not in found else []

    @property
    def words(self) -> str:
        """Its kind, name and numbers: `LoRA r=8, alpha=16`."""
        ranks = " to ".join(map(str, sorted({*self.ranks[:1], *self.ranks[-1:]})))
        alphas = self.alphas
        alpha = " to ".join(f"{one:g}" for one in sorted({*alphas[:1], *alphas[-1:]}))
        named = f" {self.name}:" if self.name not in ("", "default") else ""
        kind = f"{OTHER}," if self.kind == OTHER else self.kind
        return f"{kind}{named} r={ranks or '?'}, {f'alpha={alpha}' if alpha else 'alpha not stated'}"

    @property
    def where(self) -> str:
        """The modules that it changes, and what is here of the base: `on q_proj of 2 layers; base weights not here`."""
        found = [(one.name, LAYER.search(one.name)) for one in self.modules]
        layers = {name[: number.end()] for name, number in found if number}
        ends = list(dict.fromkeys(name.rpartition(".")[2] for name, number in found if number))
        outside = [name.rpartition(".")[2] for name, number in found if not number]
        on = [f"{few(ends, 8)} of {plural(len(layers), 'layer')}"] if ends else []
        on += [few(outside, 4)] if outside else []
        facts = [f"on {' and '.join(on)}"]
        facts += [f"{few(sorted(self.in_full), 3)} trained in full"] if self.in_full else []
        if not self.here:
            facts.append("base weights not here")
        elif self.here < len(self.modules):
            facts.append(f"{len(self.modules) - self.here} of {plural(len(self.modules), 'base weight')} not here")
        else:
            facts.append("base weights here, frozen" if self.frozen else "base weights here")
        return "; ".join(facts)

    def to_dict(self) -> dict[str, Any]:
        """The adapter as a plain dict."""
        return to_dict(self)

    def _record(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "section": self.section.name,
            "kind": self.kind,
            "ranks": list(self.ranks),
            "alphas": self.alphas,
            "modules": [one.name for one in self.modules],
            "in_full": sorted(self.in_full),
            "base_weights": self.here,
        }

    def _summary(self) -> str:
        return f"{self.words} {self.where}"


def adapters_of(ck: Checkpoint) -> tuple[Adapter, ...]:
    """The LoRA adapters of a checkpoint's models, in the order of their first tensors."""
    if "adapters" not in ck.worked_out:
        found = [one for section in sections_of_kind(ck, "model") for one in _adapters_in(ck, section)]
        ck.worked_out["adapters"] = tuple(found)
    known: tuple[Adapter, ...] = ck.worked_out["adapters"]
    return known


def _adapters_in(ck: Checkpoint, section: Section) -> Iterator[Adapter]:
    keys = [key for key, value in section.value.items() if isinstance(key, str) and isinstance(value, Tensor)]
    if not any(".lora_" in key for key in keys):
        return
    parts: dict[str, dict[str, dict[str, str]]] = {}
    in_full: dict[str, dict[str, str]] = {}
    others: dict[str, str] = {}
    originals: dict[str, str] = {}
    unknown: list[str] = []
    for key in keys:
        name = without_peft(key)
        if found := PART.fullmatch(name):
            part = "bias" if found["end"] == "bias" else found["part"]
            parts.setdefault(found["adapter"] or "", {}).setdefault(found["module"], {})[part] = key
        elif found := IN_FULL.fullmatch(name):
            own = f"{found['module']}.{found['rest']}"
            (originals if found["original"] else in_full.setdefault(found["adapter"], {}))[own] = key
        elif UNKNOWN.search(f".{name}") or _own_name(name) in others:  # which of two is meant is not known
            unknown.append(key)
        else:
            others[_own_name(name)] = key
    states = [o for o in optimizers_of(ck).values() if o.state and o.naming.by == "fqn" and not o.naming.unnamed]
    trained = {without_peft(str(name)) for o in states for name in o.state}
    for adapter, modules in parts.items():
        found_here = tuple(
            LoraModule(
                name,
                {part.removeprefix("embedding_"): key for part, key in own.items()},
                not {"embedding_A", "embedding_B"}.isdisjoint(own),
            )
            for name, own in modules.items()
        )
        # PEFT's own files have the base's names for what was trained beside the adapter, and nothing of the base.
        base = {**others, **originals} if adapter else {}
        beside = in_full.get(adapter, {}) if adapter else others
        of_lora = any(PART.fullmatch(name) for name in trained)
        frozen = of_lora and not any(without_peft(key) in trained for key in base.values())
        # PEFT writes the config of any other adapter into a folder of its own.
        config = ck.config if adapter in ("", "default") or len(parts) == 1 else None
        stated = config.adapter if config else {}
        ranks = {rank_of(section.value, one, stated) for one in found_here if "A" in one.keys}
        yield Adapter(
            adapter, section, found_here, beside, base, tuple(unknown), stated, config.adapter_in if config else "",
            tuple(sorted(rank for rank in ranks if rank is not None)), frozen,
        )  # fmt: skip


def without_peft(key: str) -> str:
    """Remove wrapper modules and PEFT's prefix from a key of a state dict."""
    return without_ddp(key).removeprefix(PREFIX)


def _own_name(name: str) -> str:
    return ".".join(word for word in name.split(".") if word != BASE)


def rank_of(state: Mapping[str, Any], one: LoraModule, stated: Mapping[str, Any]) -> int | None:
    """The number r of a module, which is the rows of its A; None if A is a placeholder or of a parameter of experts.

    A and B of a parameter (`target_parameters`) have r rows and columns for each expert.
    """
    a = state[one.keys["A"]]
    return None if a.note or len(a.shape) < 2 or stated.get("target_parameters") else a.shape[0]


def adapter_sections(ck: Checkpoint) -> list[Section]:
    """The sections of a checkpoint's models that have adapters, reduced to the adapters' tensors."""
    keys: dict[KeyPath, set[str]] = {}
    sections = {one.section.path: one.section for one in adapters_of(ck)}
    for one in adapters_of(ck):
        mine = keys.setdefault(one.section.path, set())
        mine |= {key for module in one.modules for key in module.keys.values()} | {*one.in_full.values(), *one.unknown}
    return [
        section._replace(value={key: value for key, value in section.value.items() if key in keys[path]})
        for path, section in sections.items()
    ]


# -- settings that a config states -------------------------------------------------------------------------------------


MAX_PATTERN = 200
MAX_NAME = 500
QUANTIFIED = re.compile(r"(?<!\\)[*+{]")
OF_GROUPS = re.compile(r"\)[*+{?]")


def matches(pattern: str, name: str) -> bool | None:
    """Whether a pattern of a config matches a module's whole name; None if it is not tried, or malformed.

    A file could hold a pattern that takes hours: only patterns with at most two repetitions, none of a group, are
    tried.
    """
    repeats = len(QUANTIFIED.findall(pattern)) > 2 or OF_GROUPS.search(pattern)
    if repeats or len(name) > MAX_NAME or len(pattern) > MAX_PATTERN:
        return None
    try:
        return re.fullmatch(rf"(?:.*\.)?(?:{pattern})", name) is not None
    except (re.error, RecursionError, OverflowError):
        return None


def alpha_of(stated: Mapping[str, Any], name: str) -> float | None:
    """The number alpha of a module that a config states, by its `alpha_pattern` or for all; None if it states none."""
    patterns = stated.get("alpha_pattern")
    for pattern, own in patterns.items() if isinstance(patterns, Mapping) else ():
        fits = matches(pattern, name) if isinstance(pattern, str) else None
        if fits is None:
            return None
        if fits:
            return _number(own)
    return _number(stated.get("lora_alpha"))


def _number(value: Any) -> float | None:
    return value if type(value) in (int, float) and 0 < value < 1e9 else None


def scaling_of(stated: Mapping[str, Any], name: str, rank: int) -> float | None:
    """The factor of B·A for a module: alpha / r, or alpha / sqrt(r) for rsLoRA; None if no config states alpha."""
    alpha = alpha_of(stated, name)
    return None if alpha is None else alpha / (sqrt(rank) if stated.get("use_rslora") is True else rank)


def is_target(stated: Mapping[str, Any], name: str) -> bool | None:
    """Whether a config's `target_modules` select a module; None if it states none, or a pattern that is not tried."""
    targets = stated.get("target_modules")
    if isinstance(targets, list):
        return any(isinstance(one, str) and f".{name}".endswith(f".{one}") for one in targets)
    if not isinstance(targets, str) or targets == "all-linear":
        return None
    return matches(targets, name)


# -- problems ----------------------------------------------------------------------------------------------------------


def adapter_problems(ck: Checkpoint) -> Iterator[Problem]:
    """Find parts of an adapter without the others, or of shapes that do not fit, and a config that contradicts them."""
    if any(p.severity == "error" and p.kind.lacks in ("file", "part") for p in ck.problems):
        return  # parts may be in what is lost
    for adapter in adapters_of(ck):
        apart, unfit = dict[str, str](), dict[str, str]()
        for one in adapter.modules:
            first = next(iter(one.keys.values()))
            if why := half_of(one):
                apart[first] = why
            elif why := unfit_shapes(adapter.section.value, one, adapter.base):
                unfit[first] = why
        begin = f"{fqn_of(adapter.section.path)}." if adapter.section.path else ""
        for found, code in ((apart, Code.MODEL_PART_MISSING), (unfit, Code.METADATA_CONTRADICTS)):
            for key, why in list(found.items())[:1]:
                yield Problem(code, f"{why}{and_others(len(found) - 1)}", None, f"{begin}{key}", "error")
        if not (apart or unfit) and (why := contradiction(adapter)):
            yield Problem(Code.METADATA_CONTRADICTS, why, None, None, "error", files=(adapter.stated_in,))


def half_of(one: LoraModule) -> str:
    """What is here of a module without A or B; "" if both are here."""
    lacks = [part for part in ("A", "B") if part not in one.keys]
    here = " and lora_".join(one.keys)
    return f"of {one.name} its lora_{here} is here, and its lora_{' and lora_'.join(lacks)} is not" if lacks else ""


def unfit_shapes(state: Mapping[str, Any], one: LoraModule, base: Mapping[str, str]) -> str:
    """Why the parts of a module do not fit each other or its base weight; "" if they do, or have no values here."""
    shapes = {part: state[key].shape for part, key in one.keys.items()}
    if any(state[key].note or state[key].kind == "flat_pieces" for key in one.keys.values()):
        return ""
    a, b = shapes["A"], shapes["B"]
    if len(a) != len(b) or len(a) < 2 or a[0] != b[1]:
        return f"lora_A {shape_text(a)} and lora_B {shape_text(b)} of {one.name} have no common r"
    magnitude = shapes.get("magnitude_vector")
    if len(a) == 2 and magnitude is not None and magnitude != (b[0],):
        return f"lora_magnitude_vector {shape_text(magnitude)} of {one.name} does not fit lora_B {shape_text(b)}"
    weight = state[base[f"{one.name}.weight"]] if f"{one.name}.weight" in base else None
    if weight is None or weight.note or weight.coded is not None or len(a) != 2:
        return ""
    return unfit_base(one, a, b, weight.shape)


def unfit_base(one: LoraModule, a: Ints, b: Ints, weight: Ints) -> str:
    """Why a base weight does not fit B·A of a module; "" if it does."""
    fits = ((a[1], b[0]),) if one.embedding else ((b[0], a[1]), (a[1], b[0]))
    makes = shape_text(fits[0])
    return "" if weight in fits else f"the base weight of {one.name} is {shape_text(weight)}, and B·A of it is {makes}"


def contradiction(adapter: Adapter) -> str:
    """What an adapter's config states and its tensors contradict; "" if nothing."""
    stated, state = adapter.stated, adapter.section.value
    if not stated:
        return ""
    method = stated.get("peft_type", "LORA")
    if method != "LORA" or adapter.unknown:
        # AdaLoRA and X-LoRA have tensors of these names too, of other shapes.
        other = isinstance(method, str) and "LORA" not in method
        return f"{adapter.stated_in} states peft_type {method:.40}, and the tensors here are of LoRA" if other else ""
    for one in adapter.modules:
        rank, expected = rank_of(state, one, stated), stated_rank(stated, one.name)
        if expected is not None and rank not in (None, expected):
            return (
                f"{adapter.stated_in} states r {expected} for {one.name}, and its lora_A has {plural(rank or 0, 'row')}"
            )
        if is_target(stated, one.name) is False:
            return f"{adapter.stated_in} does not select {one.name}, of which a lora_A is here"
    magnitudes = sum("magnitude_vector" in one.keys for one in adapter.modules)
    if type(stated.get("use_dora")) is bool and (not stated["use_dora"] if magnitudes else stated["use_dora"]):
        return f"{adapter.stated_in} states use_dora {stated['use_dora']}, and {magnitudes or 'no'} magnitudes are here"
    return ""


def stated_rank(stated: Mapping[str, Any], name: str) -> int | None:
    """The number r that a config states for a module; None if it states none, or a pattern that is not tried."""
    patterns = stated.get("rank_pattern")
    for pattern, own in patterns.items() if isinstance(patterns, Mapping) else ():
        fits = matches(pattern, name) if isinstance(pattern, str) else None
        if fits or fits is None:
            return own if fits and type(own) is int else None
    return stated["r"] if type(stated.get("r")) is int else None


def adapter_lines(ck: Checkpoint) -> Sequence[tuple[str, str]]:
    """For each adapter, its kind and numbers, and the modules it changes with the place of its alpha."""
    return [(one.words, one.where + (f"; {one.stated_in}" if one.alphas else "")) for one in adapters_of(ck)]
