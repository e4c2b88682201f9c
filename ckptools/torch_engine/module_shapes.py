"""Names and shapes of a model's state dict: of a module, of a user's function that makes one, or of a `config.json`.

Only this module imports a user's own code, and only by a name that the user typed; a file cannot name code to import.
The code is called on torch's meta device, where tensors have shapes but no values, and so take no memory.

Hugging Face configs need transformers. Nothing is downloaded, and only code of transformers is run: code that a config
names (`auto_map`) is ignored.
"""

from __future__ import annotations

import contextlib
import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from copy import deepcopy
from dataclasses import dataclass, field, replace
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from ckptools.errors import ReadError, UsageError
from ckptools.model.regions import Box, Ints, contiguous_strides
from ckptools.model.tensor import Coded
from ckptools.model.tree import describe_for_error
from ckptools.option import spelled
from ckptools.text import clip, first_line, no_such_key, plural

# -- conversions by `from_pretrained`: transformers 5 renames, joins, splits and dequantizes tensors while loading
# transformers' own code is run with tensors on torch's meta device, so that conversions of every model type are known
# without a copy of its rules. Source: transformers/core_model_loading.py, conversion_mapping.py and quantizers/base.py
# of 5.23.


Found = TypeVar("Found")

MAX_MESSAGE = 200
"""Longest quotation of an error of transformers, in characters."""


@dataclass(frozen=True)
class Loading:
    """How transformers converts the tensors of a checkpoint while loading it.

    Attributes:
        sources: for each name of the model, names in the checkpoint from which it is made; it may need further names.
        made: names of the model that get a value, also those made from the same tensors as another name.
        shapes: shape that is made, if it differs from the model's.
        ignored: names in the checkpoint that the model's class ignores.
        failed: for names that cannot be made from their sources, the reason.
        method: quantization method stated by the config; "" for none.
        not_judged: why all of this is unknown; "" if it is known.
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
        """The sources of each name that is not just loaded from the same name."""
        return {name: olds for name, olds in self.sources.items() if olds != (name,)}

    @property
    def apart(self) -> str:
        """Describe how the tensors differ from the model's `state_dict`."""
        olds = [old for some in self.converted.values() for old in some]
        if self.method:
            return f"the weights are quantized here ({self.method}), and are not there"
        if olds and all("expert" in old for old in olds) and len(olds) > len(self.converted):
            return "the experts are one by one here and in one tensor there"
        return f"{plural(len(olds), 'tensor')} here {'is' if len(olds) == 1 else 'are'} stored in another way there"

    @property
    def words(self) -> str:
        """Describe the conversion: `joins 24 tensors of experts into 4`; "" if tensors are loaded unchanged."""
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
    """Find how transformers converts tensors, given as shape and dtype by name; None for transformers 4.

    `model` is a model of transformers on the meta device; it is used up, as it gets tensors without values.
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
    """Make tensors on the meta device with these shapes and dtypes, leaving out tensors that torch cannot make."""
    import torch

    found: dict[str, Any] = {}
    for name, (shape, known) in saved.items():
        dtype = getattr(torch, known or "float32", None)
        if isinstance(dtype, torch.dtype):
            with contextlib.suppress(RuntimeError, TypeError, OverflowError):  # a forged file may state any size
                found[name] = torch.empty(shape, dtype=dtype, device="meta")
    return found


def _quantizer(model: Any) -> Any:
    """Return the quantizer of a config, set to dequantize; the name of its method if it cannot; None without one.

    The modules of a quantization method are known only if its package and device are present.
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


# -- published names: `save_pretrained` of transformers 5 writes the names of the hub, such as one tensor per expert
# transformers' own code is run on the meta device, where a view still has its place in the tensor that it is a view of.
# Its ops call `contiguous()`, which would lose that place. Source: transformers/core_model_loading.py of 5.23
# (`revert_weight_conversion`, `Chunk`, `SplitModulelist`).


class PublishedPart(NamedTuple):
    """The place of a published tensor in a tensor of the model's state dict.

    Attributes:
        shape: of the published tensor.
        name: of the tensor in the state dict.
        box: the elements that it has of that tensor, which may have more leading dimensions.
    """

    shape: Ints
    name: str
    box: Box


def published(model: Any) -> dict[str, PublishedPart | None] | None:
    """Find the tensors that `save_pretrained` writes of a model on the meta device; None for transformers 4.

    A tensor that is not a box of one tensor of the state dict is None.

    Raises:
        ReadError: transformers raises.
    """
    import torch
    from torch.overrides import TorchFunctionMode

    try:
        from transformers.core_model_loading import revert_weight_conversion
    except ImportError:
        return None

    class Uncopied(TorchFunctionMode):
        def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            return args[0] if function is torch.Tensor.contiguous else function(*args, **(kwargs or {}))

    owners: dict[int, str] = {}
    state = model.state_dict()
    own = {n: t for n, t in state.items() if owners.setdefault(t.untyped_storage()._cdata, n) == n}
    try:
        with torch.no_grad(), Uncopied():
            found = revert_weight_conversion(model, dict(own))
    except Exception as error:
        said = f"{type(error).__name__}: {clip(first_line(error), MAX_MESSAGE)}"
        raise ReadError(None, f"the names that transformers saves are not known: it says {said}") from error
    names = {n: owners.get(t.untyped_storage()._cdata) for n, t in found.items()}
    return {n: None if (old := names[n]) is None else _part(t, old, own[old]) for n, t in found.items()}


def _part(view: Any, name: str, whole: Any) -> PublishedPart | None:
    """Locate a view in a contiguous tensor; None if it is not a box of it."""
    shape, strides = tuple(view.shape), contiguous_strides(tuple(whole.shape))
    left, starts = view.storage_offset(), []
    for stride in strides:
        starts.append(left // max(stride, 1))
        left -= starts[-1] * stride
    box = Box(tuple(starts), (1,) * (len(strides) - len(shape)) + shape)
    inside = len(box.sizes) == len(strides) and all(n <= m for n, m in zip(box.ends, whole.shape, strict=True))
    kept = zip(shape, view.stride(), strides[len(strides) - len(shape) :], strict=False)
    return PublishedPart(shape, name, box) if inside and all(n == 1 or a == b for n, a, b in kept) else None


# -- the optimizer that a user's function makes beside a module: its param groups by name, and the state that it keeps


@dataclass(frozen=True)
class OptimizerShapes:
    """The state that an optimizer expects.

    Attributes:
        name: class name.
        groups: for each param group, the names of its parameters in order.
        settings: for each param group, the names of its hyperparameters.
        slots: shape of every slot, such as `exp_avg`, by parameter; None if unknown.
    """

    name: str
    groups: tuple[tuple[str, ...], ...] = field(repr=False)
    settings: tuple[frozenset[str], ...] = field(repr=False)
    slots: Mapping[str, Mapping[str, Ints]] | None = field(default=None, repr=False)


def optimizer_shapes(module: Any, optimizer: Any) -> OptimizerShapes:
    """Describe an optimizer of a module on torch's meta device; parameters of other modules are named `?`."""
    names = {id(parameter): name for name, parameter in module.named_parameters()}
    groups = tuple(tuple(names.get(id(p), "?") for p in group["params"]) for group in optimizer.param_groups)
    settings = tuple(frozenset(str(key) for key in group if key != "params") for group in optimizer.param_groups)
    return OptimizerShapes(type(optimizer).__name__, groups, settings, _slots(optimizer, names))


def _slots(optimizer: Any, names: Mapping[int, str]) -> dict[str, dict[str, Ints]] | None:
    """Shapes of the state after one step, as torch's `_init_optim_state` takes it; None if that does not work."""
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
    """Set gradients of zero, which take no memory on the meta device."""
    import torch

    for group in optimizer.param_groups:
        for parameter in group["params"]:
            parameter.grad = torch.zeros_like(parameter)
    yield


class NamedShape(NamedTuple):
    """The shape of one name of a state dict, as far as it is known.

    Attributes:
        shape: sizes; None if unknown, or if the value is not a tensor.
        dtype: torch's name; "" if unknown.
        tied: an earlier name with the same values, such as `emb.weight` for `head.weight`; "" for none.
        note: why it cannot be compared or loaded; "" if it can.
        coded: the quantized weight that it is a part of; None for other values.
    """

    shape: Ints | None
    dtype: str = ""
    tied: str = ""
    note: str = ""
    coded: Coded | None = None


@dataclass(frozen=True)
class StateDictShapes:
    """The names of a state dict with their shapes, as a checkpoint has them or a model expects them.

    Attributes:
        given_by: source of the names, in words.
        tensors: shape by name, in the order of the source.
        ordered: whether that is the order of the module.
        ties_optional: whether a tied name may be absent, as when transformers loads.
        loading: finds how `from_pretrained` converts given names and shapes; None if it is not a model of transformers.
        published: finds the tensors that `save_pretrained` writes; None if it is not a model of transformers.
        converts: whether the model is loaded by `from_pretrained` and not by `load_state_dict`.
        optimizer: the optimizer that was made with the module; None without one.
        ranks: number of ranks that saved tensors of these shapes.
    """

    given_by: str
    tensors: Mapping[str, NamedShape] = field(repr=False)
    ordered: bool = False
    ties_optional: bool = False
    loading: Callable[[Mapping[str, NamedShape]], Loading | None] | None = field(default=None, repr=False)
    published: Callable[[], Mapping[str, PublishedPart | None] | None] | None = field(default=None, repr=False)
    converts: bool = False
    optimizer: OptimizerShapes | None = None
    ranks: int = 1


def is_function_name(text: str) -> bool:
    """Whether a text has the form `package.module:function`."""
    return re.fullmatch(r"[A-Za-z_][\w.]*:[A-Za-z_][\w.]*", text) is not None


def shapes_from_function(name: str) -> StateDictShapes:
    """Call `package.module:function`, or a class, without arguments, and return the shapes of the module it makes.

    It may return a module and its optimizer. Modules in the current folder are found first.
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
            raise UsageError(None, f"{spelled('to')} {name}: {no_such_key(part, dir(function))}")
        function = getattr(function, part)
    with torch.device("meta"):
        made = isinstance(function, type) or not hasattr(function, "state_dict")
        return function() if callable(function) and made else function


@contextlib.contextmanager
def _users_code(name: str) -> Iterator[None]:
    """Import from the current folder, print to stderr, and turn exceptions into one line, within the block."""
    sys.path.insert(0, str(os.getcwd()))  # noqa: PTH109 - sys.path holds strings
    try:
        with contextlib.redirect_stdout(sys.stderr):
            yield
    except (UsageError, ReadError):
        raise
    except ModuleNotFoundError as error:
        if not error.name or not f"{name.partition(':')[0]}.".startswith(f"{error.name}."):
            raise ReadError(None, _raised(name, error)) from error
        text = f"there is no module {error.name} here; it is looked for in this folder and in Python's path"
        raise UsageError(None, f"{spelled('to')} {name}: {text}") from error
    except (Exception, SystemExit) as error:
        raise ReadError(None, _raised(name, error)) from error
    finally:
        sys.path.pop(0)


def _raised(name: str, error: BaseException) -> str:
    said = clip(first_line(error), MAX_MESSAGE)
    how = "it is called with no arguments, on torch's meta device"
    return f"{spelled('to')} {name}: raised {type(error).__name__}: {said}; {how}"


def shapes_of(model: Any, given_by: str = "") -> StateDictShapes:
    """Return names and shapes of a module on any device, of a state dict, or of a mapping of name to shape."""
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
    if not _is_of_transformers(model):
        return made
    return replace(made, loading=_loading_of(model), published=partial(_apart, model, published))


def _is_of_transformers(model: Any) -> bool:
    """Whether a model is of one of transformers' own classes; does not import transformers."""
    library = sys.modules.get("transformers") if hasattr(model, "state_dict") else None
    known = getattr(library, "PreTrainedModel", None)
    return isinstance(known, type) and isinstance(model, known) and type(model).__module__.startswith("transformers.")


def _loading_of(model: Any) -> Callable[[Mapping[str, NamedShape]], Loading | None]:
    """Make a function that finds how `from_pretrained` converts names."""

    def loads(saved: Mapping[str, NamedShape]) -> Loading | None:
        tensors = {n: (one.shape, one.dtype) for n, one in saved.items() if one.shape is not None and not one.note}
        return _apart(model, partial(loading, saved=tensors))

    return loads


def _apart(model: Any, ask: Callable[[Any], Found]) -> Found:
    """Ask transformers about a second model of the same config, on the meta device."""
    import torch
    import transformers

    with _offline(transformers), contextlib.redirect_stdout(sys.stderr), torch.device("meta"):
        return ask(type(model)._from_config(deepcopy(model.config)))


def _with_ties(module: Any) -> Any:
    """Return a module's state dict in which tied names share one object, if the module supports that."""
    try:
        return module.state_dict(keep_vars=True)
    except TypeError:
        return module.state_dict()


def _shape(value: Any) -> NamedShape:
    """Return the shape of a tensor, or a shape given instead of a tensor."""
    if isinstance(value, (list, tuple)) and all(isinstance(n, int) for n in value):
        return NamedShape(tuple(value))
    try:
        return NamedShape(tuple(map(int, value.shape)), str(value.dtype).removeprefix("torch."))
    except RuntimeError:  # lazy parameters have no shape before the first forward pass
        return NamedShape(None, note="has no shape yet: it is a lazy parameter")
    except AttributeError:
        return NamedShape(None)


# -- a Hugging Face config ---------------------------------------------------------------------------------------------


MAX_PARTS = 10_000
"""Most layers, experts or heads: a config of a few bytes may ask for any number of modules."""


def is_model_config(content: Any) -> bool:
    """Whether the content of a JSON file is a Hugging Face config of a model."""
    return isinstance(content, Mapping) and isinstance(content.get("model_type"), str)


def shapes_from_config(path: Path, content: Mapping[str, Any]) -> StateDictShapes:
    """Make the model of a `config.json` on torch's meta device, and return the shapes of its state dict."""
    _check_size(path, content)
    try:
        import transformers
    except ImportError as error:
        text = "describes a model for transformers, which is not installed: pip install transformers; or name the "
        raise UsageError(path, text + f"function that makes it: {spelled('to')} package.module:function") from error
    try:
        with _offline(transformers), contextlib.redirect_stdout(sys.stderr):
            made = shapes_of(_model(transformers, path, content), str(path))
    except (UsageError, ReadError):
        raise
    except Exception as error:
        said = f"{type(error).__name__}: {clip(first_line(error), MAX_MESSAGE)}"
        raise ReadError(path, f"transformers {transformers.__version__} makes no model of it: {said}") from error
    # from_pretrained ties the names that the config ties, whether the file has both or not.
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
    """Return the class that a config names; only classes of transformers itself are accepted."""
    named = content.get("architectures")
    name = named[0] if isinstance(named, list) and named else None
    if not isinstance(name, str):
        raise UsageError(path, "does not say of which class the model is: expected a name in its `architectures`")
    found = getattr(transformers, name, None)
    if not (isinstance(found, type) and issubclass(found, transformers.PreTrainedModel)):
        raise UsageError(path, _lacks(transformers, f"model class {describe_for_error(name)}"))
    return found


def _lacks(transformers: Any, what: str) -> str:
    way = f"code from elsewhere is not run; name the function that makes it: {spelled('to')} package.module:function"
    return f"transformers {transformers.__version__} has no {what}; {way}"


def _check_size(path: Path, content: Any) -> None:
    """Refuse numbers of layers and the like that would take too much time and memory."""
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
    """Keep transformers off the network and quiet within the block; the program around may need both later."""
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
