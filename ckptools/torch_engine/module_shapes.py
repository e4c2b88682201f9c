"""Names and shapes of a module's state dict: one that is here, a user's function makes, or a `config.json` describes.

This is the one place where a user's own code is imported, and only by a name that the user typed; no file says one.
It is called on torch's meta device, where tensors have shapes and no values, so that it takes no memory.

A Hugging Face config is taken where transformers is installed. Nothing is downloaded, and no code but that of
transformers is run: what a config says of code of its own (`auto_map`) is not looked at.
"""

from __future__ import annotations

import contextlib
import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from copy import deepcopy
from dataclasses import dataclass, field, replace
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

from ckptools.errors import ReadError, UsageError
from ckptools.model.regions import Ints
from ckptools.model.tensor import Coded
from ckptools.model.tree import describe_for_error
from ckptools.text import clip, first_line, no_such_key, plural

# -- what `from_pretrained` makes of a checkpoint's names: transformers 5 renames, joins, splits and dequantizes tensors
# Its own code is asked, with tensors on torch's meta device, which have shapes and no values, so that every model type
# whose conversion it states is known here, and none is copied. Source: transformers/core_model_loading.py,
# conversion_mapping.py and quantizers/base.py of 5.23.


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


# -- the optimizer that a user's function makes beside a module: its groups by name, and the state that it will keep


@dataclass(frozen=True)
class OptimizerShapes:
    """An optimizer as it will expect its state.

    Attributes:
        name: its class.
        groups: of each param group the names of its parameters, in order.
        settings: of each param group the names of its hyperparameters.
        slots: shape of every slot by parameter, such as `exp_avg`; None where they are not known.
    """

    name: str
    groups: tuple[tuple[str, ...], ...] = field(repr=False)
    settings: tuple[frozenset[str], ...] = field(repr=False)
    slots: Mapping[str, Mapping[str, Ints]] | None = field(default=None, repr=False)


def optimizer_shapes(module: Any, optimizer: Any) -> OptimizerShapes:
    """Describe an optimizer of a module on torch's meta device; parameters of another module are called `?`."""
    names = {id(parameter): name for name, parameter in module.named_parameters()}
    groups = tuple(tuple(names.get(id(p), "?") for p in group["params"]) for group in optimizer.param_groups)
    settings = tuple(frozenset(str(key) for key in group if key != "params") for group in optimizer.param_groups)
    return OptimizerShapes(type(optimizer).__name__, groups, settings, _slots(optimizer, names))


def _slots(optimizer: Any, names: Mapping[int, str]) -> dict[str, dict[str, Ints]] | None:
    """The slots after one step, as torch's `_init_optim_state` makes them; None where the optimizer makes none so."""
    with contextlib.suppress(Exception), _gradients(optimizer):
        optimizer.step()
        found = {names.get(id(p), "?"): dict(_shapes(state)) for p, state in optimizer.state.items()}
        return found if all(found.values()) or not found else None
    return None


def _shapes(state: Mapping[str, Any]) -> Iterator[tuple[str, Ints]]:
    for slot, value in state.items():
        if value is not None:
            yield str(slot), tuple(getattr(value, "shape", ()))


@contextlib.contextmanager
def _gradients(optimizer: Any) -> Iterator[None]:
    """Gradients of zero, which have no memory on the meta device."""
    import torch

    for group in optimizer.param_groups:
        for parameter in group["params"]:
            parameter.grad = torch.zeros_like(parameter)
    yield


class NamedShape(NamedTuple):
    """The shape of one name of a state dict, as far as it is known.

    Attributes:
        shape: sizes; None where they are unknown, or it is no tensor.
        dtype: torch's name; "" when unknown.
        tied: an earlier name that has the same values, such as `emb.weight` of `head.weight`; "" for none.
        note: why it cannot be compared or loaded; "" where it can.
        coded: of which quantized weight it is a part; None where it is a value of its own.
    """

    shape: Ints | None
    dtype: str = ""
    tied: str = ""
    note: str = ""
    coded: Coded | None = None


@dataclass(frozen=True)
class StateDictShapes:
    """The names of a state dict with their shapes: what a checkpoint holds, or what a model expects.

    Attributes:
        given_by: where they come from, for people.
        tensors: shape by name, in the order in which it has them.
        ordered: whether that is the order of the module.
        ties_optional: whether a name may be absent whose values come with another, as when transformers loads.
        loading: what `from_pretrained` would make of names and shapes; None where it is no model of transformers.
        converts: whether the model is loaded so, and not by `load_state_dict`.
        optimizer: the optimizer that was made with the module; None without one.
        ranks: how many ranks saved tensors of these shapes.
    """

    given_by: str
    tensors: Mapping[str, NamedShape] = field(repr=False)
    ordered: bool = False
    ties_optional: bool = False
    loading: Callable[[Mapping[str, NamedShape]], Loading | None] | None = field(default=None, repr=False)
    converts: bool = False
    optimizer: OptimizerShapes | None = None
    ranks: int = 1


def is_function_name(text: str) -> bool:
    """Whether a text is spelled as `package.module:function` is."""
    return re.fullmatch(r"[A-Za-z_][\w.]*:[A-Za-z_][\w.]*", text) is not None


def shapes_from_function(name: str) -> StateDictShapes:
    """The shapes of what `package.module:function`, or a class in its place, makes when called with no arguments.

    It may make a module and an optimizer of it. The folder that the process runs in comes first.
    """
    with _users_code(name):
        made = _called(name)
        if not (isinstance(made, tuple) and len(made) > 1 and hasattr(made[1], "param_groups")):
            return shapes_of(made, name)
        return replace(shapes_of(made[0], name), optimizer=optimizer_shapes(made[0], made[1]))


def _called(name: str) -> Any:
    import torch

    module, _, path = name.partition(":")
    function: Any = import_module(module)
    for part in path.split("."):
        if not hasattr(function, part):
            raise UsageError(None, f"--to {name}: {no_such_key(part, dir(function))}")
        function = getattr(function, part)
    with torch.device("meta"):
        made = isinstance(function, type) or not hasattr(function, "state_dict")
        return function() if callable(function) and made else function


@contextlib.contextmanager
def _users_code(name: str) -> Iterator[None]:
    """Let modules in this folder be found, what they print go to stderr, and what they raise be one line."""
    sys.path.insert(0, str(os.getcwd()))  # noqa: PTH109 - sys.path holds texts
    try:
        with contextlib.redirect_stdout(sys.stderr):
            yield
    except (UsageError, ReadError):
        raise
    except ModuleNotFoundError as error:
        if not error.name or not f"{name.partition(':')[0]}.".startswith(f"{error.name}."):
            raise ReadError(None, _raised(name, error)) from error
        text = f"there is no module {error.name} here; it is looked for in this folder and in Python's path"
        raise UsageError(None, f"--to {name}: {text}") from error
    except (Exception, SystemExit) as error:
        raise ReadError(None, _raised(name, error)) from error
    finally:
        sys.path.pop(0)


def _raised(name: str, error: BaseException) -> str:
    said = clip(first_line(error), MAX_MESSAGE)
    return f"--to {name}: raised {type(error).__name__}: {said}; it is called with no arguments, on torch's meta device"


def shapes_of(model: Any, given_by: str = "") -> StateDictShapes:
    """Names and shapes of a module on any device, of a state dict, or of a mapping of name to shape."""
    state = _with_ties(model) if hasattr(model, "state_dict") else model
    if not isinstance(state, Mapping):
        text = f"expected an nn.Module, a state dict, or shapes by name; found {type(model).__name__}"
        raise UsageError(None, f"{given_by}: {text}" if given_by else text)
    found: dict[str, NamedShape] = {}
    first: dict[int, str] = {}
    for name, value in state.items():
        tied = first.setdefault(id(value), str(name)) if hasattr(value, "dtype") else ""
        found[str(name)] = _shape(value)._replace(tied="" if tied == str(name) else tied)
    if not found:
        raise UsageError(None, f"{given_by or type(model).__name__}: has no parameters and no buffers to load")
    made = StateDictShapes(given_by or f"the {type(model).__name__}", found, hasattr(model, "state_dict"))
    return replace(made, loading=_loading_of(model)) if _is_of_transformers(model) else made


def _is_of_transformers(model: Any) -> bool:
    """Whether it is a model of one of transformers' own classes; transformers is not imported for it."""
    library = sys.modules.get("transformers") if hasattr(model, "state_dict") else None
    known = getattr(library, "PreTrainedModel", None)
    return isinstance(known, type) and isinstance(model, known) and type(model).__module__.startswith("transformers.")


def _loading_of(model: Any) -> Callable[[Mapping[str, NamedShape]], Loading | None]:
    """What `from_pretrained` of a model's class makes of names, with another model of its config."""

    def loads(saved: Mapping[str, NamedShape]) -> Loading | None:
        import torch
        import transformers

        tensors = {n: (one.shape, one.dtype) for n, one in saved.items() if one.shape is not None and not one.note}
        with _offline(transformers), contextlib.redirect_stdout(sys.stderr), torch.device("meta"):
            return loading(type(model)._from_config(deepcopy(model.config)), tensors)

    return loads


def _with_ties(module: Any) -> Any:
    """A module's state dict in which tied names have one object; of a wrapper that cannot keep them, its own."""
    try:
        return module.state_dict(keep_vars=True)
    except TypeError:
        return module.state_dict()


def _shape(value: Any) -> NamedShape:
    """The shape of a tensor, or one that was given in its place."""
    if isinstance(value, (list, tuple)) and all(isinstance(n, int) for n in value):
        return NamedShape(tuple(value))
    try:
        return NamedShape(tuple(map(int, value.shape)), str(value.dtype).removeprefix("torch."))
    except RuntimeError:  # a lazy parameter, which has no shape before the first forward pass
        return NamedShape(None, note="has no shape yet: it is a lazy parameter")
    except AttributeError:
        return NamedShape(None)


# -- a Hugging Face config ---------------------------------------------------------------------------------------------


MAX_PARTS = 10_000
"""Layers, experts or heads: a config of a few bytes may ask for any number of modules."""


def is_model_config(content: Any) -> bool:
    """Whether the content of a JSON is a Hugging Face config of a model."""
    return isinstance(content, Mapping) and isinstance(content.get("model_type"), str)


def shapes_from_config(path: Path, content: Mapping[str, Any]) -> StateDictShapes:
    """The state dict of the model that a `config.json` describes, made on torch's meta device."""
    _check_size(path, content)
    try:
        import transformers
    except ImportError as error:
        text = "describes a model for transformers, which is not installed: pip install transformers; or name the "
        raise UsageError(path, text + "function that makes it: --to package.module:function") from error
    try:
        with _offline(transformers), contextlib.redirect_stdout(sys.stderr):
            made = shapes_of(_model(transformers, path, content), str(path))
    except (UsageError, ReadError):
        raise
    except Exception as error:
        said = f"{type(error).__name__}: {clip(first_line(error), MAX_MESSAGE)}"
        raise ReadError(path, f"transformers {transformers.__version__} makes no model of it: {said}") from error
    # from_pretrained ties what the config says is tied, whether the file has it or not.
    return replace(made, ties_optional=True, converts=True)


def _model(transformers: Any, path: Path, content: Mapping[str, Any]) -> Any:
    import torch

    known = transformers.models.auto.configuration_auto.CONFIG_MAPPING
    if content["model_type"] not in known:
        raise UsageError(path, _lacks(transformers, f"models of type {describe_for_error(content['model_type'])}"))
    config = known[content["model_type"]].from_dict(dict(content))
    with torch.device("meta"):
        return _class(transformers, path, content)._from_config(config)


def _class(transformers: Any, path: Path, content: Mapping[str, Any]) -> Any:
    """The class that a config names; only one of transformers' own."""
    named = content.get("architectures")
    name = named[0] if isinstance(named, list) and named else None
    if not isinstance(name, str):
        raise UsageError(path, "does not say of which class the model is: expected a name in its `architectures`")
    found = getattr(transformers, name, None)
    if not (isinstance(found, type) and issubclass(found, transformers.PreTrainedModel)):
        raise UsageError(path, _lacks(transformers, f"model class {describe_for_error(name)}"))
    return found


def _lacks(transformers: Any, what: str) -> str:
    way = "code from elsewhere is not run; name the function that makes it: --to package.module:function"
    return f"transformers {transformers.__version__} has no {what}; {way}"


def _check_size(path: Path, content: Any) -> None:
    """Refuse numbers of layers and the like that would take all time and memory."""
    stack = [content]
    while stack:
        node = stack.pop()
        if not isinstance(node, Mapping):
            continue
        stack += node.values()
        for key, value in node.items():
            parts = isinstance(value, (int, float)) and value > MAX_PARTS
            if parts and any(word in str(key) for word in ("layer", "num_", "depth", "expert", "block", "head")):
                text = f"{describe_for_error(key)} is {describe_for_error(value)}; at most {MAX_PARTS} are made"
                raise ReadError(path, text)


@contextlib.contextmanager
def _offline(transformers: Any) -> Iterator[None]:
    """Keep transformers off the network and quiet, for this one model: the program around us may need both later."""
    from huggingface_hub import constants

    logging = transformers.utils.logging
    offline, verbosity = constants.HF_HUB_OFFLINE, logging.get_verbosity()
    constants.HF_HUB_OFFLINE = True
    logging.set_verbosity_error()
    bars = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        constants.HF_HUB_OFFLINE = offline
        logging.set_verbosity(verbosity)
        if bars:
            logging.enable_progress_bar()
