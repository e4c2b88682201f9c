"""What `from_pretrained` makes of a checkpoint's names: transformers 5 renames, joins, splits and dequantizes tensors.

Its own code is asked, with tensors on torch's meta device, which have shapes and no values, so that every model type
whose conversion it states is known here, and none is copied. Source: transformers/core_model_loading.py,
conversion_mapping.py and quantizers/base.py of 5.23.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ckptools.model.regions import Ints
from ckptools.text import clip, first_line, plural

MAX_MESSAGE = 200
"""Characters of an error of transformers that a message quotes."""


@dataclass(frozen=True)
class Loading:
    """What becomes of the names of a checkpoint while transformers loads it.

    Attributes:
        sources: of each name of the model the names of the checkpoint that it is made of; more names may come with it.
        made: the names of the model that get a value; those that are made of the same tensors as another one too.
        shapes: the shape that is made, where it is not the model's.
        ignored: names of the checkpoint that the model says to leave out.
        failed: why a name of the model cannot be made of its sources.
        method: how the config says that the weights are quantized; "" where they are not.
        not_judged: why none of this is known; "" where it is.
    """

    sources: Mapping[str, tuple[str, ...]] = field(default_factory=dict, repr=False)
    made: frozenset[str] = field(default=frozenset(), repr=False)
    shapes: Mapping[str, Ints] = field(default_factory=dict, repr=False)
    ignored: frozenset[str] = field(default=frozenset(), repr=False)
    failed: Mapping[str, str] = field(default_factory=dict, repr=False)
    method: str = ""
    not_judged: str = ""

    @property
    def converted(self) -> dict[str, tuple[str, ...]]:
        """The sources of each name that is not simply the tensor of its own name."""
        return {name: olds for name, olds in self.sources.items() if olds != (name,)}

    @property
    def apart(self) -> str:
        """How the tensors differ from those that the model's `state_dict` has, for people."""
        olds = [old for some in self.converted.values() for old in some]
        if self.method:
            return f"the weights are quantized here ({self.method}), and are not there"
        if olds and all("expert" in old for old in olds) and len(olds) > len(self.converted):
            return "the experts are one by one here and in one tensor there"
        return f"{plural(len(olds), 'tensor')} here {'is' if len(olds) == 1 else 'are'} stored in another way there"

    @property
    def words(self) -> str:
        """What transformers does, for people: `joins 24 tensors of experts into 4`; "" if it takes them as they are."""
        joined = {name: olds for name, olds in self.converted.items() if len(olds) > 1}
        renamed = len(self.converted) - len(joined)
        taken = self.made - self.sources.keys()
        olds = [old for some in joined.values() for old in some]
        experts = " of experts" if olds and all("expert" in old for old in olds) else ""
        verb = f"dequantizes ({self.method})" if self.method else "joins"
        facts = [f"{verb} {plural(len(olds), 'tensor')}{experts} into {len(joined)}"] if joined else []
        facts += [f"renames {plural(renamed, 'tensor')}"] if renamed else []
        facts += [f"splits others into {plural(len(taken), 'tensor')}"] if taken else []
        facts += [f"leaves out {plural(len(self.ignored), 'tensor')}"] if self.ignored else []
        return f"transformers {', '.join(facts)} while loading" if facts else ""


def loading(model: Any, saved: Mapping[str, tuple[Ints, str]]) -> Loading | None:
    """What becomes of tensors, by name a shape and a dtype, that are loaded into a model; None for transformers 4.

    `model` is transformers' own, on the meta device, and is used up: it gets tensors without values.
    """
    import torch

    try:
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.core_model_loading import (
            WeightConverter,
            WeightRenaming,
            convert_and_load_state_dict_in_model,
            rename_source_key,
        )
        from transformers.modeling_utils import LoadStateDictConfig
    except ImportError:
        return None
    expected = model.state_dict()
    state = _on_meta(saved)
    try:
        quantizer = _quantizer(model)
        if isinstance(quantizer, str):
            return Loading(method=quantizer, not_judged=f"its config says that it is quantized ({quantizer})")
        rules: Any = get_model_conversion_mapping(model, None, quantizer)
        renamings = [rule for rule in rules if isinstance(rule, WeightRenaming)]
        converters = [rule for rule in rules if isinstance(rule, WeightConverter)]
        sources, unexpected = dict[str, list[str]](), list[str]()
        for name in state:
            new, _ = rename_source_key(name, renamings, converters, model.base_model_prefix, expected)
            if new not in expected and name in expected:
                new = name
            if new in expected:
                sources.setdefault(new, []).append(name)
            else:
                unexpected.append(name)
        how = LoadStateDictConfig(
            device_map={"": "meta"}, dtype=torch.get_default_dtype(), weight_mapping=rules, hf_quantizer=quantizer
        )
        with torch.device("meta"):
            info, _ = convert_and_load_state_dict_in_model(model, dict(state), how)
        made = expected.keys() - info.missing_keys
        info.unexpected_keys = set(unexpected)
        model._adjust_missing_and_unexpected_keys(info)
    except Exception as error:
        said = f"{type(error).__name__}: {clip(first_line(error), MAX_MESSAGE)}"
        return Loading(not_judged=f"transformers says {said}")
    return Loading(
        sources={name: tuple(olds) for name, olds in sources.items() if name not in info.conversion_errors},
        made=frozenset(made - info.conversion_errors.keys()),
        shapes={name: tuple(found) for name, found, _ in info.mismatched_keys},
        ignored=frozenset(unexpected) - info.unexpected_keys,
        failed={
            name: clip(said.strip().splitlines()[-1], MAX_MESSAGE) for name, said in info.conversion_errors.items()
        },
        method=getattr(quantizer.quantization_config.quant_method, "value", "") if quantizer is not None else "",
    )


def _on_meta(saved: Mapping[str, tuple[Ints, str]]) -> dict[str, Any]:
    """Tensors without values of the same shapes and dtypes; without those that torch has none for."""
    import torch

    found: dict[str, Any] = {}
    for name, (shape, known) in saved.items():
        dtype = getattr(torch, known or "float32", None)
        if isinstance(dtype, torch.dtype):
            with contextlib.suppress(RuntimeError, TypeError, OverflowError):  # sizes of a forged file
                found[name] = torch.empty(shape, dtype=dtype, device="meta")
    return found


def _quantizer(model: Any) -> Any:
    """The quantizer that a config asks for, told to dequantize; the name of its method if it cannot, None without one.

    What a quantized module of a method looks like is known where that method's package and device are.
    """
    stated = getattr(model.config, "quantization_config", None)
    if stated is None:
        return None
    from transformers.quantizers.auto import AutoHfQuantizer

    method = stated.get("quant_method", "") if isinstance(stated, Mapping) else getattr(stated, "quant_method", "")
    with contextlib.suppress(Exception):
        quantizer = AutoHfQuantizer.from_config(stated, pre_quantized=True)
        if hasattr(quantizer.quantization_config, "dequantize") and quantizer.get_load_operations().get("dequantize"):
            quantizer.quantization_config.dequantize = True
            return quantizer
    return str(getattr(method, "value", method))
