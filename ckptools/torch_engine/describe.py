"""The second way in: a file loaded by torch, described in the same model as the inert reader's.

`ckptools.pickles.reader.read` works from the bytes of a pickle and has no torch; this starts from the objects that
torch made of the same file. Both must describe it alike, which is how each is tested by the other.

Tensors are in `ckptools.torch_engine.describe_tensors`.
"""

from __future__ import annotations

import warnings
from collections import OrderedDict, defaultdict
from collections.abc import Callable
from datetime import date, datetime, timedelta
from pathlib import Path
from types import BuiltinFunctionType, FunctionType
from typing import Any

from ckptools.errors import ReadError
from ckptools.files.opening import File
from ckptools.model.values import Device, Global, NumpyArray, NumpyDtype, NumpyScalar, Opaque, Size, TorchName
from ckptools.pickles import reader
from ckptools.pickles.classes.device_mesh import claims_of
from ckptools.pickles.machine import without_cycles
from ckptools.pickles.reader import Saved
from ckptools.torch_engine.describe_tensors import TensorDescriber, dtype_name
from ckptools.torch_engine.offline import load_named
from ckptools.training_state.modules import with_modules

PLAIN_TYPES = (str, int, float, bool, bytes, complex, bytearray, type(None), timedelta, datetime, date)
CONTAINERS = (dict, OrderedDict, defaultdict, list, tuple, set, frozenset)


def read(path: Path, trust: bool = False) -> Saved:
    """Read a torch.save file through torch.

    Args:
        path: the file.
        trust: run whatever code it names; see `load_shard`.

    Raises:
        ReadError: as `load_shard`, or the inert reader cannot list its names, or it is nested too deep.
        ForeignClassError: as `load_shard`.
    """
    with File(path) as file:
        nbytes, modified = file.size, file.modified
    inert = reader.read(path)
    names = inert.names
    described = ObjectDescriber(path)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch's advice to users of ShardedTensor
            tree = with_modules(without_cycles(described.value(load_named(path, names, trust=trust))))
    except RecursionError as error:
        raise ReadError(path, "its values are nested too deep to be described") from error
    claims, at_least = claims_of(described.tensors.claims, described.tensors.meshes)
    origin = inert.provenance
    return Saved(path, tree, claims, names, nbytes, modified, nbytes, at_least=at_least, provenance=origin)


class ObjectDescriber:
    """Describes the objects of one loaded file.

    Attributes:
        tensors: describes its tensors, and has what they claim.
    """

    def __init__(self, path: Path) -> None:
        self.tensors = TensorDescriber(path)
        self._done: dict[int, tuple[Any, Any]] = {}

    def value(self, node: Any) -> Any:
        """Describe one object and all that it holds; what occurs twice is described once."""
        if type(node) in PLAIN_TYPES:
            return node
        if id(node) not in self._done:
            describe = self._containers if type(node) in CONTAINERS else self._leaf
            # The object is kept too, so that its id is not given to another one.
            self._done[id(node)] = (node, describe(node))
        return self._done[id(node)][1]

    # -- containers ------------------------------------------------------------------------------------------

    def _containers(self, node: Any) -> Any:
        if isinstance(node, (tuple, set, frozenset)):
            return type(node)(map(self.value, node))
        if isinstance(node, list):
            made: Any = []
            self._done[id(node)] = (node, made)
            made.extend(map(self.value, node))
            return made
        made = defaultdict(node.default_factory) if isinstance(node, defaultdict) else type(node)()
        self._done[id(node)] = (node, made)
        for key, value in node.items():
            made[self.value(key)] = self.value(value)
        if isinstance(getattr(node, "_metadata", None), dict):
            made._metadata = self.value(node._metadata)
        return made

    # -- leaves ----------------------------------------------------------------------------------------------

    def _leaf(self, node: Any) -> Any:
        import torch

        if isinstance(node, torch.Tensor):
            return self.tensors.describe(node)
        for kinds, describe in _small_types():
            if isinstance(node, kinds):
                return describe(node)
        return self._opaque(node)

    def _opaque(self, node: Any) -> Opaque | Global:
        """An object of any other class, by what pickling it again would say."""
        reduced: Any = node.__reduce_ex__(2)
        if isinstance(reduced, str):
            return Global(node.__module__, reduced)
        function, args, state, items, pairs = (*reduced, None, None, None)[:5]
        if function.__name__ == "__newobj__":
            function, args = args[0], args[1:]
        opaque = Opaque(f"{function.__module__}.{function.__qualname__}", self.value(tuple(args)))
        opaque.state = self.value(state)
        opaque.items = self.value([*(items or ()), *(pairs or ())])
        return opaque


def _small_types() -> list[tuple[Any, Callable[[Any], Any]]]:
    """Types of torch and numpy that a tree may hold by themselves, and how the model spells them."""
    import numpy as np
    import torch

    named = (torch.dtype, torch.qscheme)
    return [
        (torch.Size, Size),
        (named, lambda v: Global("torch", dtype_name(v))),
        (torch.layout, lambda v: TorchName(dtype_name(v))),
        (torch.device, lambda v: Device(v.type, v.index)),
        (torch.torch_version.TorchVersion, str),
        (np.ndarray, _numpy_array),
        (np.dtype, lambda v: NumpyDtype(v.str)),
        (np.generic, lambda v: NumpyScalar(v.dtype.str, v.tobytes())),
        ((type, FunctionType, BuiltinFunctionType), lambda v: Global(v.__module__, v.__qualname__)),
    ]


def _numpy_array(array: Any) -> NumpyArray:
    if array.dtype.hasobject:
        return NumpyArray("|O", array.shape, False, b"")
    fortran = array.flags.f_contiguous and not array.flags.c_contiguous
    return NumpyArray(array.dtype.str, array.shape, bool(fortran), array.tobytes("A"))
