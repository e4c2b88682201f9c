"""Real torch objects from one rank's file, on a machine that is not the cluster.

`torch.load` of a rank file wants the process group that it was saved by: a `ShardedTensor` refuses another rank or
world size, and a `DTensor`'s mesh brings the names of process groups that are not there. `offline()` gives a group
of this one process and takes those checks away for as long as it lasts; `load_shard` loads a file inside it.

The group is Gloo over an in-process store, so no port is taken and any number of processes can do this on one host.
Nothing here imports torch before it is needed.
"""

from __future__ import annotations

import sys
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

from ckptools.errors import CkptoolsError, ForeignClassError, ReadError
from ckptools.files.opening import File
from ckptools.pickles import reader

MapLocation = Any  # what `torch.load` takes: a device, its name, a dict or a function

_lock = threading.RLock()
_inside = 0
_undo = ExitStack()


@contextmanager
def offline() -> Iterator[None]:
    """Let rank files of any rank and world size be loaded here, with `torch.load` or `ckptools.load_shard`.

    Inside, `ShardedTensor`s load without being compared with the current process group, and meshes of `DTensor`s
    saved by torch 2.2 and later are brought into the installed torch's form. Afterwards `local_shards()`,
    `metadata()`, `size()`, `dtype` of a ShardedTensor and `to_local()`, `placements`, `device_mesh` of a DTensor
    work, and both the tensor and the mesh keep who saved them as `_ckptools_rank` and `_ckptools_world_size`.
    What would need the other ranks (`full_tensor()`, `gather()`) raises torch's own error: no group is pretended.

    A process group that exists already is used and left alone. Everything is undone on exit, also after an
    exception; with several threads or nested use, when the last one leaves.
    """
    global _inside
    with _lock:
        if not _inside:
            _undo.enter_context(_entered())
        _inside += 1
    try:
        yield
    finally:
        with _lock:
            _inside -= 1
            if not _inside:
                _undo.close()


@contextmanager
def _entered() -> Iterator[None]:
    """Make the group and the patches, and undo them."""
    from torch import distributed

    with ExitStack() as stack:
        if distributed.is_available():
            from ckptools.torch_engine.patches import patches

            stack.enter_context(_own_group())
            for owner, name, replacement in patches():
                stack.enter_context(_patched(owner, name, replacement))
        yield


@contextmanager
def _own_group() -> Iterator[None]:
    """A process group of this process alone, unless there is one already."""
    from torch import distributed
    from torch._C._distributed_c10d import HashStore

    if distributed.is_initialized():
        yield
        return
    excepthook = sys.excepthook
    distributed.init_process_group("gloo", store=HashStore(), world_size=1, rank=0)
    sys.excepthook = excepthook  # torch's would write "[rank0]:" before tracebacks, also after the group is gone
    group = distributed.group.WORLD
    try:
        yield
    finally:
        if distributed.is_initialized() and distributed.group.WORLD is group:
            distributed.destroy_process_group()


@contextmanager
def _patched(owner: type, name: str, replacement: Callable[..., Any]) -> Iterator[None]:
    """Replace a method of a class; one that it inherited, or did not have, is removed again."""
    missing = object()
    before = vars(owner).get(name, missing)
    setattr(owner, name, replacement)
    try:
        yield
    finally:
        if before is missing:
            delattr(owner, name)
        else:
            setattr(owner, name, before)


def load_shard(path: str | Path, map_location: MapLocation = "cpu", trust: bool = False) -> Any:
    """Load one torch.save file as what it was: dicts, tensors, `ShardedTensor`s, `DTensor`s.

    The file is mapped, not read: a tensor's bytes come from the disk when they are used. (Files from before torch
    1.6 cannot be mapped and are read; compressed ones are unpacked into a temporary file first.)

    Args:
        path: one rank's file, or any file that torch.save wrote.
        map_location: where the tensors go, as in `torch.load`.
        trust: run whatever code the pickle names, as `torch.load(weights_only=False)` does. Otherwise only the
            classes of `ckptools.torch_engine.allow_list` are made, and those that the caller has given to
            `torch.serialization.add_safe_globals`.

    Raises:
        ReadError: the file is missing, cut, damaged, or no torch.save file.
        ForeignClassError: it needs classes that are not on the allow-list; `.names` has all of them.
    """
    path = Path(path)
    return load_named(path, () if trust else reader.read(path).names, map_location, trust)


def load_named(path: Path, names: Sequence[str], map_location: MapLocation = "cpu", trust: bool = False) -> Any:
    """Load a file as `load_shard` does, when the names that it mentions have been listed already."""
    from ckptools.torch_engine import allow_list

    path, zipped = _loadable(path)
    with offline(), _lock:  # one at a time: what torch allows is a global list, and so are warnings
        if trust:
            return _load(path, map_location, zipped, weights_only=False)
        with allow_list.allowing(path, names):
            return allow_list.finished(_load(path, map_location, zipped, weights_only=True))


def load_plain(path: Path) -> Any:
    """Load a zip archive as plain `torch.load(path, mmap=True)` does, which makes only what is on torch's own list."""
    return _load(path, "cpu", True, weights_only=True)


def _loadable(path: Path) -> tuple[Path, bool]:
    """The file, or a temporary one where it is compressed; and whether that is a zip archive."""
    with File(path) as file, reader.decompressed(file) as (opened, contents):
        if contents[-1] == "tar":
            raise ReadError(path, "is a tar, which torch.load does not look into; unpack it first")
        return opened.path, contents[-1] == "zip"


def _load(path: Path, map_location: MapLocation, zipped: bool, weights_only: bool) -> Any:
    import torch

    from ckptools.torch_engine.allow_list import Refused

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about torch's own deprecated storage classes, nothing a user could do
            return torch.load(path, map_location=map_location, mmap=zipped, weights_only=weights_only)
    except Refused as error:
        raise ForeignClassError(path, [str(error)]) from error
    except (CkptoolsError, MemoryError):
        raise
    except Exception as error:
        raise ReadError(path, f"torch cannot load it: {_cause(error)}") from error


def _cause(error: Exception) -> str:
    """The one line of torch's message that says what happened."""
    text = str(error).replace("WeightsUnpickler error:", "\n")
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    if isinstance(error, UnpicklingError):
        lines = [line for line in lines if not line.startswith(_ADVICE)] or lines
    if lines and lines[0].startswith("Unsupported operand"):  # an opcode of pickle protocol 4, mostly
        lines[0] += ", in trusted files only (trust=True)"
    return f"{lines[0]:.200}" if lines else type(error).__name__


_ADVICE = ("Weights only load failed", "(1)", "(2)", "Please file an issue", "Check the documentation")
