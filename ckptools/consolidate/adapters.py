"""LoRA adapters in an output: `--only lora` writes a folder that PEFT loads, `--merge-lora` the merged model.

Both begin with a selection, in which every tensor is whole, and replace its tree. The one shard of a merged weight has
the tensors that it is computed of (`LowRank`), so that writers, checksums and the comparison of an output treat it like
any other.

Source: peft 0.21.2, as in `training_state.adapters`; config.py (`PeftConfigMixin.from_pretrained`) and
tuners/lora/model.py (`_unload_and_optionally_merge`).
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ckptools.consolidate.options import ConsolidateOptions
from ckptools.consolidate.output_place import OutputPlace, in_folder
from ckptools.consolidate.selection import LORA, select
from ckptools.consolidate.writers import SAFETENSORS
from ckptools.consolidate.writers.layout import OutputContents, OutputLayout, identity, quoted
from ckptools.dtypes import short
from ckptools.errors import OutputExistsError, RefusedError, UsageError
from ckptools.files.opening import OpenFiles, is_remote, location, read_json
from ckptools.formats.open import open_checkpoint
from ckptools.keys.expected_names import CONFIG, Original, read_original
from ckptools.model.checkpoint import Checkpoint
from ckptools.model.facts import ADAPTER_CONFIG
from ckptools.model.regions import Box
from ckptools.model.shards import Encoded, LowRank, Shard
from ckptools.model.tensor import Tensor
from ckptools.model.tree import leaf_at
from ckptools.option import spelled
from ckptools.text import few, plural
from ckptools.text import shape as shape_text
from ckptools.training_state.adapters import (
    PREFIX,
    Adapter,
    LoraModule,
    adapters_of,
    contradiction,
    half_of,
    scaling_of,
    stated_rank,
    unfit_base,
    without_peft,
)
from ckptools.training_state.sections import Section

FORBIDDEN = ("map", "strip_prefix", "rename", "allow_missing", "fill", "fill_from", "assume", "dequantize")
"""Options that contradict `--only lora` and `--merge-lora`."""

WEIGHTS = "adapter_model.safetensors"

HALVES = ("bfloat16", "float16")
FLOATS = (*HALVES, "float32", "float64")
"""dtypes of base weights to which B·A is added."""

OTHER_RULES = (
    "alora_invocation_tokens", "arrow_config", "kasa_config", "layer_replication", "lora_bias", "monteclora_config",
    "target_parameters", "trainable_token_indices", "use_bdlora", "use_qalora", "velora_config",
)  # fmt: skip
"""Settings with which PEFT merges by another rule than W + scaling · B A and DoRA's."""

PLAIN_STARTS = ("gaussian", "eva", "orthogonal")
"""Values of `init_lora_weights` that leave the base weights as they are; others, such as `pissa`, change them."""


@dataclass(frozen=True)
class AdapterOutput:
    """An output that is made of a LoRA adapter.

    Attributes:
        path: the checkpoint's path, for messages.
        adapter: the adapter, with the settings of `--like` that no file beside the checkpoint states.
        base: the model of `--base`; None if the base weights are in the checkpoint, or the output is the adapter alone.
        original: the Hugging Face folder of `--base` whose config and tokenizer the output gets; None without.
        place: the output's place.
        merged: whether the output is the merged model.
    """

    path: Path
    adapter: Adapter
    base: Checkpoint | None
    original: Original | None
    place: OutputPlace
    merged: bool

    @property
    def part(self) -> str:
        """The part of the checkpoint that is read."""
        return "model" if self.merged and self.base is None else LORA

    def made(self, selection: OutputContents, options: ConsolidateOptions, files: OpenFiles) -> OutputContents:
        """Make the contents of the output from the selected part of the checkpoint.

        Raises:
            RefusedError: a tensor is missing, does not fit, or needs a rule that is not known.
        """
        section, path = self.adapter.section, selection.source.path
        at = next(at for one, at in selection.places if one.path == section.path)
        state = leaf_at(selection.tree, at)
        needed = [key for one in self.adapter.modules for key in one.keys.values()] + [*self.adapter.in_full.values()]
        needed += [*self.adapter.base.values()] if self.part == "model" else []
        if gone := next((key for key in needed if key not in state), ""):
            why = selection.left_out.get((*at, gone), "it is not here")
            raise RefusedError(path, f"{gone} cannot be written: {why}")
        made = dict(self._merged(state, options, files) if self.merged else self._saved(state))
        named = {key: name for name, (key, _) in made.items()}
        tree = {name: tensor for name, (_, tensor) in made.items()}
        return replace(
            selection,
            tree=tree,
            model_paths={(name,) for name in tree},
            places=((Section("model", section.name, (), tree), ()),),
            notes=[*selection.notes, *self._notes(state)],
            renamed=named,
            part="model" if self.merged else LORA,
            like=self.original,
            base=self.base,
        )

    def in_folder(self, layout: OutputLayout, dtype: str | None) -> OutputLayout:
        """Add the small files of the output's folder to its plan."""
        if self.original is not None:
            made = in_folder(layout, self.original, self.place, dtype)
            copied = f"copied from {self.original.path}: {few(list(self.original.copied), 6)}"
            return replace(made, notes=(*made.notes, copied))
        if self.merged:
            return layout
        folder = self.place.path.parent
        texts = {**layout.texts, folder / ADAPTER_CONFIG: json.dumps(self._config(), indent=2) + "\n"}
        load = f"from peft import PeftModel; model = PeftModel.from_pretrained(base, {quoted(folder)})"
        return replace(layout, folder=None if is_remote(folder) else folder, texts=texts, load=load)

    # -- PEFT's own folder

    def _saved(self, state: Mapping[str, Any]) -> Iterator[tuple[str, tuple[str, Tensor]]]:
        """Each tensor of the adapter by the name under which PEFT saves it, with its key."""
        for one in self.adapter.modules:
            for part, key in one.keys.items():
                kind = "B" if part == "bias" else f"embedding_{part}" if one.embedding and part in ("A", "B") else part
                end = ".bias" if part == "bias" else ".weight" if not one.embedding and part in ("A", "B") else ""
                yield f"{PREFIX}{one.name}.lora_{kind}{end}", (key, state[key])
        for name, key in self.adapter.in_full.items():
            # In PEFT's own files a bias of the base that was trained keeps its `base_layer`.
            own = name if self.adapter.name else without_peft(key)
            yield f"{PREFIX}{own}", (key, state[key])

    def _config(self) -> dict[str, Any]:
        """The content of `adapter_config.json`: what is stated, and what the tensors prove."""
        modules, state, stated = self.adapter.modules, self.adapter.section.value, self.adapter.stated
        ranks = {one.name: state[one.keys["A"]].shape[0] for one in modules}
        proven: dict[str, Any] = {
            "peft_type": "LORA",
            "use_dora": any("magnitude_vector" in one.keys for one in modules),
            "lora_bias": any("bias" in one.keys for one in modules),
            "inference_mode": True,
        }
        if any(stated_rank(stated, name) != rank for name, rank in ranks.items()):
            usual = Counter(ranks.values()).most_common(1)[0][0]
            others = {re.escape(name): rank for name, rank in ranks.items() if rank != usual}
            proven |= {"r": usual, "rank_pattern": others}
        if not stated.get("target_modules"):
            proven["target_modules"] = list(ranks)
        if self.adapter.in_full and not stated.get("modules_to_save") and self.adapter.name:
            proven["modules_to_save"] = sorted({name.rpartition(".")[0] for name in self.adapter.in_full})
        if "fan_in_fan_out" not in stated:
            proven["fan_in_fan_out"] = self._are_transposed({n: state[key] for n, key in self.adapter.base.items()})
        defaults = {"base_model_name_or_path": None, "task_type": None, "bias": "none"}
        return {**defaults, **stated, **proven}

    # -- the merged model

    def _merged(
        self, state: Mapping[str, Any], options: ConsolidateOptions, files: OpenFiles
    ) -> Iterator[tuple[str, tuple[str, Tensor]]]:
        """Each tensor of the merged model by its name in the base model, with its key."""
        adapter = self.adapter
        if self.base is None:
            weights = {name: (key, state[key]) for name, key in adapter.base.items()}
        else:
            of_base = select(self.base, "model", replace(options, prefer_rank=None), files, None, None)
            if len(of_base.places) != 1:
                raise UsageError(self.base.path, f"{spelled('base')}: holds {len(of_base.places)} models")
            weights = {name: (name, value) for name, value in of_base.tree.items() if isinstance(value, Tensor)}
        changed = {f"{one.name}.weight": one for one in adapter.modules}
        for name in (*changed, *adapter.in_full):
            if name not in weights:
                raise RefusedError(self._of_base, f"has no {name}, which the adapter changes")
        turned = self._are_transposed({name: tensor for name, (_, tensor) in weights.items()})
        merged = dict[Any, Tensor]()
        for name, one in changed.items():
            weight = weights[name][1]
            if weight.coded is not None or weight.encoded_as or weight.dtype not in FLOATS:
                scheme = weight.coded.scheme if weight.coded else weight.dtype
                raise RefusedError(self._of_base, f"{name} is in codes of {scheme}, to which no B·A can be added")
            if why := unfit_base(one, state[one.keys["A"]].shape, state[one.keys["B"]].shape, weight.shape):
                raise RefusedError(self._of_base, why)
            if (identity(weight) or name) in merged:
                raise RefusedError(
                    self._of_base, f"{name} is tied to another weight with an adapter: no rule merges both"
                )
            merged[identity(weight) or name] = self._with_adapter(one, state, weight, one.embedding or turned)
        for name, (key, tensor) in weights.items():
            if name in adapter.in_full:
                own = state[adapter.in_full[name]]
                if own.shape != tensor.shape:
                    text = f"{name} is {shape_text(tensor.shape)}, and {shape_text(own.shape)} in the adapter"
                    raise RefusedError(self._of_base, text)
                yield name, (adapter.in_full[name], own)
            else:
                # A weight that is tied to one with an adapter changes with it, as in PEFT.
                yield name, (key, merged.get(identity(tensor) or name, tensor))

    @property
    def _of_base(self) -> Path:
        """The path that has the base weights, for messages."""
        return self.path if self.base is None else self.base.path

    def _with_adapter(self, one: LoraModule, state: Mapping[str, Any], weight: Tensor, turned: bool) -> Tensor:
        """A weight with its adapter: one shard that is computed when it is read."""
        a, b = state[one.keys["A"]], state[one.keys["B"]]
        magnitude = state[one.keys["magnitude_vector"]] if "magnitude_vector" in one.keys else None
        scaling = scaling_of(self.adapter.stated, one.name, a.shape[0])
        assert scaling is not None
        lengths = () if magnitude is None else tuple(magnitude.shards)
        how = LowRank(
            tuple(weight.shards), tuple(a.shards), tuple(b.shards), lengths, a.shape[0], scaling, turned, weight.dtype
        )
        of = {"base": how.base, "lora_A": how.a, "lora_B": how.b, "magnitude": how.magnitude}
        parts = [(part, source) for part, shards in of.items() for shard in shards for source in shard.sources]
        whole = Box.whole(weight.shape)
        encoded = Encoded("peft.LoRA", tuple(parts), how, weight.shape, whole)
        return Tensor(weight.shape, weight.dtype, (Shard(whole, None, None, None, encoded),))

    def _are_transposed(self, weights: Mapping[str, Tensor]) -> bool:
        """Whether linear layers have W as [in, out], as GPT-2's Conv1D: by one that is not square, else as stated."""
        for one in self.adapter.modules:
            weight = weights.get(f"{one.name}.weight")
            if weight is not None and not one.embedding and len(weight.shape) == 2 and len(set(weight.shape)) == 2:
                turned: bool = weight.shape[1] == self.adapter.section.value[one.keys["B"]].shape[0]
                return turned
        return self.adapter.stated.get("fan_in_fan_out") is True

    def _notes(self, state: Mapping[str, Any]) -> Iterator[str]:
        """Notes for the user on how the output is made of the adapter."""
        adapter = self.adapter
        if not self.merged:
            yield f"{adapter.words}, {plural(len(adapter.modules), 'module')}"
            return
        factors = sorted(
            {scaling_of(self.adapter.stated, m.name, state[m.keys["A"]].shape[0]) or 0 for m in adapter.modules}
        )
        scaling = " to ".join(f"{one:g}" for one in dict.fromkeys((factors[0], factors[-1])))
        count = plural(len(adapter.modules), "weight")
        yield f"{adapter.words} merged into {count}: W + {scaling} B A in float32, rounded to W's dtype once"
        if adapter.in_full:
            yield f"trained in full, and written in place of the base's: {few(list(adapter.in_full), 3)}"
        halves = {state[one.keys["A"]].dtype for one in adapter.modules} & set(HALVES)
        rounds = [f"B A to {short(dtype)}" for dtype in sorted(halves)]
        if not halves and any(one.embedding for one in adapter.modules):
            rounds = ["B A of an embedding to W's dtype"]
        if rounds:
            yield f"PEFT rounds {rounds[0]} before it adds it: its merge_and_unload may differ by one rounding"
        else:
            yield "PEFT's merge_and_unload makes the same of it, up to the last bits of sums in float32"
        if self.base is None:
            yield "the base weights here are taken as not merged yet: no file states whether PEFT had merged them"


def adapter_output(whole: Checkpoint, options: ConsolidateOptions, place: OutputPlace) -> AdapterOutput | None:
    """The output that is made of an adapter; None if the user asks for none.

    Raises:
        UsageError: other options contradict it, or there is no adapter, or the wrong one.
        RefusedError: a setting that it needs is stated nowhere.
    """
    merging, alone = options.merge_lora, options.only == LORA
    if not merging and not alone:
        given = next((name for name in ("base", "adapter") if getattr(options, name) is not None), None)
        if given is not None:
            alone_too = f" or {spelled('only', LORA)}" if given == "adapter" else ""
            raise UsageError(None, f"{spelled(given)} needs {spelled('merge-lora', True)}{alone_too}")
        return None
    asked = spelled("merge-lora", True) if merging else spelled("only", LORA)
    given = next((name for name in FORBIDDEN if getattr(options, name)), None)
    if given is not None:
        raise UsageError(None, f"{asked} does not go with {spelled(given.replace('_', '-'))}")
    if merging and options.only not in (None, "model"):
        raise UsageError(None, f"{asked} writes the model: leave out {spelled('only')}")
    if alone and options.base is not None:
        raise UsageError(None, f"{spelled('base')} needs {spelled('merge-lora', True)}")
    if alone and (place.writer is not SAFETENSORS or place.named):
        raise UsageError(place.path, f"{asked} writes a folder that PEFT loads: -o DIR/")
    adapter = _with_settings(_chosen(whole, options, asked), options)
    if adapter.unknown or adapter.stated.get("peft_type", "LORA") != "LORA":
        what = few(adapter.unknown, 2) or f"{adapter.stated_in} states peft_type {adapter.stated['peft_type']!r:.40}"
        raise RefusedError(whole.path, f"{asked}: {what}: no rule here covers it")
    if why := next(filter(None, map(half_of, adapter.modules)), ""):
        raise RefusedError(whole.path, f"{asked}: {why}")
    lacking = next((m for m in adapter.modules if scaling_of(adapter.stated, m.name, 1) is None), None)
    if lacking is not None:
        tried = f" in a form that is tried ({adapter.stated_in})" if adapter.stated else ""
        example = json.dumps({"lora_alpha": 16})
        way = f"{spelled('like', 'ADAPTER')} takes it from an adapter's folder, or from a JSON such as {example}"
        raise RefusedError(whole.path, f"{asked}: no file states alpha of {lacking.name}{tried}; {way}")
    if why := contradiction(adapter):
        raise RefusedError(whole.path, f"{asked}: {why}")
    if alone:
        return AdapterOutput(whole.path, adapter, None, None, replace(place, path=place.path.with_name(WEIGHTS)), False)
    _check_rules(whole, adapter, asked)
    base = _base(whole, adapter, options)
    original = None
    if base is not None and place.writer is SAFETENSORS and not place.named and (base.path / CONFIG).is_file():
        original = read_original(base.path, bool(whole.options and whole.options.follow_symlinks))
        if base.path.resolve() == place.path.parent.resolve():
            raise OutputExistsError(base.path, f"is the folder of {spelled('base')} itself; choose another name")
    return AdapterOutput(whole.path, adapter, base, original, place, True)


def _chosen(whole: Checkpoint, options: ConsolidateOptions, asked: str) -> Adapter:
    found = adapters_of(whole)
    if not found:
        raise UsageError(whole.path, f"{asked}: holds no LoRA adapter, that is no tensors called lora_A and lora_B")
    named = [one for one in found if options.adapter in (None, one.name)]
    if len(named) == 1:
        return named[0]
    here = f"holds {few([one.name or 'one without a name' for one in found], 6)}"
    if options.adapter is None:
        raise UsageError(whole.path, f"{asked}: {here}; choose one with {spelled('adapter', 'NAME')}")
    raise UsageError(whole.path, f"{spelled('adapter', options.adapter)}: {here}")


def _with_settings(adapter: Adapter, options: ConsolidateOptions) -> Adapter:
    """An adapter with the settings of `--like` that no file beside the checkpoint states."""
    if options.like is None:
        return adapter
    path = location(options.like)
    path = path / ADAPTER_CONFIG if path.is_dir() else path
    content = read_json(path)
    if not isinstance(content, Mapping):
        raise UsageError(path, f"{spelled('like')}: expected the settings of an adapter, as in {ADAPTER_CONFIG}")
    stated_in = f"{adapter.stated_in} with {path}" if adapter.stated else str(path)
    return replace(adapter, stated={**content, **adapter.stated}, stated_in=stated_in)


def _check_rules(whole: Checkpoint, adapter: Adapter, asked: str) -> None:
    """Refuse an adapter whose merge follows a rule that is not known here."""
    setting = next((name for name in OTHER_RULES if adapter.stated.get(name)), None)
    if setting is not None:
        text = f"{asked}: {adapter.stated_in} states {setting}, with which PEFT merges by another rule"
        raise RefusedError(whole.path, text)
    for one in adapter.modules:
        shape = adapter.section.value[one.keys["A"]].shape
        if "bias" in one.keys:
            raise RefusedError(whole.path, f"{asked}: {one.keys['bias']} is a bias of B: no rule here merges it")
        if len(shape) != 2:
            text = f"lora_A of {one.name} is {shape_text(shape)}, of a convolution: no rule here merges it"
            raise RefusedError(whole.path, f"{asked}: {text}")


def _base(whole: Checkpoint, adapter: Adapter, options: ConsolidateOptions) -> Checkpoint | None:
    """The base model of `--base`; None if the base weights are in the checkpoint itself."""
    lacking, state = adapter.lacks_base, adapter.section.value
    coded = [key for one in adapter.modules if (key := adapter.base.get(f"{one.name}.weight")) and state[key].coded]
    if options.base is None:
        stated_name = adapter.stated.get("base_model_name_or_path")
        of = f", that is {stated_name!r:.80}" if isinstance(stated_name, str) and stated_name else ""
        if lacking and adapter.here:
            text = f"{lacking[0]} is not here, and other base weights are: no rule here merges that"
            raise RefusedError(whole.path, text)
        if lacking or coded:
            why = f"{coded[0]} is in codes of {state[coded[0]].coded.scheme}" if coded else f"{lacking[0]} is not here"
            raise RefusedError(whole.path, f"{why}; {spelled('base', 'HF')} gives the base model{of}")
        return None
    if not lacking and not coded:
        raise UsageError(whole.path, f"{spelled('base')}: the base weights are here; leave it out")
    start = adapter.stated.get("init_lora_weights")
    if isinstance(start, str) and start not in PLAIN_STARTS:
        text = f"its adapter began with init_lora_weights {start!r:.40}, which changes the base weights"
        raise RefusedError(whole.path, f"{text}: they are not those of {spelled('base')}")
    base = open_checkpoint(options.base, all_ranks=True)
    if adapters_of(base):
        raise UsageError(base.path, f"{spelled('base')}: holds a LoRA adapter, and is no base model")
    return base
