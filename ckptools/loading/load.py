"""`load` and `load_state_dict`: a checkpoint into a model and its optimizer, or into a plain dict, in one call."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from inspect import signature
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint import state_dict_loader
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.tensor import DTensor

from ckptools.cluster.lost_rank import lost_ranks_told
from ckptools.cluster.rank_0 import told_by
from ckptools.dtypes import SHORT
from ckptools.errors import CkptoolsError, ReadError, RefusedError, UsageError
from ckptools.keys.entries import pattern
from ckptools.loading.load_options import LoadOptions
from ckptools.loading.record_checks import Checksums
from ckptools.loading.saved_state import MODEL, OPTIMIZER
from ckptools.loading.storage_reader import IN_PART, Planner
from ckptools.loading.storage_reader import StorageReader as StorageReader
from ckptools.model.records import displayed
from ckptools.model.tensor import Tensor as SavedTensor
from ckptools.option import in_python, spelled
from ckptools.text import first_few, first_line, plural, size
from ckptools.training_state.wrappers import bare_name, ddp_prefix

if TYPE_CHECKING:
    from typing_extensions import Unpack

# By parameter, so that the groups of the saved and of the running optimizer may differ.
FLATTENED = StateDictOptions(flatten_optimizer_state_dict=True)


@displayed
@dataclass(frozen=True)
class Loaded:
    """What `load` has loaded on this rank.

    Attributes:
        path: the checkpoint.
        step: its training step; None if unknown.
        counters: plain numbers beside model and optimizer, such as an epoch or tokens, by key.
        tensors: number of tensors that were filled, in whole or with this rank's part.
        nbytes: bytes of them.
        bytes_read: bytes that this rank has read for them.
        kept: keys that kept their values: the checkpoint does not have them.
        not_loaded: keys of the checkpoint that `load` does not take, such as a scheduler's.
        checksums: how many records were compared with their checksums, on rank 0; None on the others.
        notes: what was done or assumed.
    """

    path: Path
    step: int | None
    counters: dict[str, int | float]
    tensors: int
    nbytes: int
    bytes_read: int
    kept: tuple[str, ...] = ()
    not_loaded: tuple[str, ...] = ()
    checksums: Checksums | None = None
    notes: tuple[str, ...] = field(default=())

    def _summary(self) -> str:
        step = "" if self.step is None else f" of step {self.step}"
        kept = f", {plural(len(self.kept), 'key')} kept" if self.kept else ""
        return f"{plural(self.tensors, 'tensor')}{step}, {size(self.nbytes)}{kept}; {self.path}"


@in_python
def load(
    model: nn.Module,
    path: str | Path | Sequence[str | Path],
    /,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    device: torch.device | str | None = None,
    strict: bool = True,
    cast: bool = False,
    process_group: dist.ProcessGroup | None = None,
    no_dist: bool = False,
    **options: Unpack[LoadOptions],
) -> Loaded:
    """Load a checkpoint of any format and world size into a model, and into its optimizer; a collective.

    The model may be plain, or spread by DDP, FSDP, FSDP2, HSDP or tensor parallelism: each rank reads only its part.
    Parameters on the meta device are made on `device`, this rank's part alone.

    Args:
        model: the model.
        path: as for `ckptools.open`.
        optimizer: its optimizer, whose hyperparameters become the saved ones; None loads the model alone.
        device: where parameters on the meta device are made; by default the device of their mesh, else the CPU.
        strict: refuse names that only one side has; otherwise names that the checkpoint lacks keep their values.
        cast: convert values to the dtypes of the model; otherwise other dtypes are refused.
        process_group: the ranks that load; None for all.
        no_dist: this process loads alone.
        options: see `LoadOptions`; its `model` names the saved model, where there are several.

    Before anything is written into the model, the checkpoint's verdict and all names, shapes and dtypes are compared.
    Whether files can be read to their end, and match their checksums, is only known when they have been read: after a
    ReadError or a RendezvousError the model may hold some of the new values, and is of no use.

    Every error is raised on every rank, and one rank's message says why.

    Raises:
        NotWholeError: the checkpoint is not whole, and `allow_missing` is not given.
        RefusedError: names, shapes or dtypes differ, or a running param group has parameters of several saved ones
            that differ.
        ReadError: a file cannot be read, has changed, or is damaged; or a rank failed in another way.
        RendezvousError: another rank has ended.
        UsageError: the model has buffers on the meta device that no checkpoint holds.
    """
    group: dict[str, Any] = {"process_group": process_group, "no_dist": no_dist}
    reader = StorageReader(path, strict=strict, cast=cast, **group, **options)
    if optimizer is not None and reader.state.numbered and not options.get("names"):
        # The running optimizer knows which parameter has which number, if it lists them as the saved one did.
        groups = _groups(get_optimizer_state_dict(model, optimizer))
        options["names"] = [[reader.saved_name(name) for name in one["params"]] for one in groups]
        try:
            reader = StorageReader(path, strict=strict, cast=cast, **group, **options)
        except RefusedError as error:
            if reader.state.unnamed:
                text = f"the running optimizer is not the saved one, whose parameters have numbers: {error.reason}"
                raise (error if reader.rank else RefusedError(reader.path, text)) from None
    _materialize(model, device, optimizer)
    state: dict[str, Any] = {MODEL: without_second_names(get_model_state_dict(model), model, reader)}
    if optimizer is not None:
        state[OPTIMIZER] = dict(get_optimizer_state_dict(model, optimizer, options=FLATTENED))
        if len(reader.state.groups) > 1:
            # Of the parameters of one group, torch would take the first one's hyperparameters for all.
            reader.param_groups = _groups(get_optimizer_state_dict(model, optimizer))
    _load(state, reader, cast)
    # A kept value may be a copy of a tensor that was loaded under another name.
    kept = set(reader.kept)
    loaded = {name: value for name, value in state[MODEL].items() if f"{MODEL}.{name}" not in kept}
    set_model_state_dict(model, loaded, options=StateDictOptions(strict=False))
    if optimizer is not None:
        set_optimizer_state_dict(model, optimizer, state[OPTIMIZER], options=FLATTENED)
    return Loaded(
        path=reader.path,
        step=reader.step,
        counters=dict(reader.counters),
        tensors=reader.tensors,
        nbytes=reader.bytes_kept,
        bytes_read=reader.bytes_read,
        kept=reader.kept,
        not_loaded=reader.not_asked,
        checksums=reader.checksums,
        notes=tuple(reader.notes),
    )


def _load(state: dict[str, Any], reader: StorageReader, cast: bool) -> None:
    """Let DCP fill a state dict; of the errors of several ranks, raise one."""
    options: dict[str, Any] = {"storage_reader": reader, "planner": Planner(cast), "process_group": reader.group}
    call: Callable[..., None] = dcp_load
    if reader.alone and dist.is_available() and dist.is_initialized():
        options["no_dist"] = True
        if "no_dist" not in signature(dcp_load).parameters:  # torch 2.6: only the older name of it can be alone
            call = state_dict_loader.load_state_dict
    try:
        with warnings.catch_warnings(), lost_ranks_told(reader.path, reader.group):
            # One process alone is meant, and the older name is only used where the newer one cannot be.
            warnings.filterwarnings("ignore", "torch.distributed is (disabled|unavailable)|`load_state_dict` is deprec")
            call(state, **options)
    except CheckpointException as error:
        rank, (failure, _) = min(error.failures.items())
        mine = reader.rank == rank
        if isinstance(failure, CkptoolsError):
            raise failure if mine else told_by(rank, failure, reader.path) from None
        if mine and isinstance(failure, KeyboardInterrupt):
            raise failure from None
        text = f"rank {rank} failed: {first_line(failure)}"
        failed = ReadError(reader.path, f"{text}; {IN_PART}" if error.args[0] == "read" else text)
        raise (failed if mine else told_by(rank, failed, reader.path)) from (error if mine else None)


def _groups(state: dict[str, Any]) -> list[dict[str, Any]]:
    """The param groups of an optimizer, with the names of their parameters."""
    return list(state["param_groups"])


def without_second_names(state: dict[str, Any], model: nn.Module, reader: StorageReader) -> dict[str, Any]:
    """A model's state dict without names that the checkpoint lacks, if it has another name of the same tensor.

    The module says which names are of one tensor: FSDP1's state dict has a copy for each name.
    """
    leading = ddp_prefix([name for name, _ in _tensors_of(model)])
    names: dict[object, list[str]] = {}
    for tensor, name in _names_by_tensor(model):
        names.setdefault(tensor, []).append(bare_name(name, leading))
    gone = {
        name
        for tied in names.values()
        if len(tied) > 1 and any(reader.has(f"{MODEL}.{one}") for one in tied)
        for name in tied
        if not reader.has(f"{MODEL}.{name}")
    }
    return {name: value for name, value in state.items() if name not in gone}


def _names_by_tensor(model: nn.Module) -> Iterator[tuple[object, str]]:
    yield from ((_identity(value), name) for name, value in _tensors_of(model))
    # FSDP1 without `use_orig_params` makes one flat parameter of a unit, and lists the second names in it.
    # Source: `SharedParamInfo` in torch/distributed/fsdp/_flat_param.py.
    names = {module: name for name, module in model.named_modules()}
    for module in names:
        for info in getattr(getattr(module, "_flat_param", None), "_shared_param_infos", ()):
            first = f"{names[info.prim_module]}.{info.prim_param_name}"
            yield first, first
            yield first, f"{names[info.module]}.{info.param_name}"


def _identity(value: Tensor) -> object:
    """Equal for tensors that are the same elements in memory; an empty one, such as a rank's part, is only itself."""
    local = value.to_local() if isinstance(value, DTensor) else value
    if not local.numel():
        return id(value)
    return local.untyped_storage()._cdata, local.storage_offset(), tuple(local.shape), local.stride()


def _materialize(model: nn.Module, device: torch.device | str | None, optimizer: torch.optim.Optimizer | None) -> None:
    """Give parameters and buffers on the meta device memory, of each only this rank's part."""
    on_meta = [name for name, value in _tensors_of(model) if value.is_meta]
    if not on_meta:
        return
    if optimizer is not None:
        text = "the model is on the meta device, and its optimizer would keep the parameters without values"
        raise UsageError(None, f"{text}: load the model alone, then make the optimizer and load both")
    saved = {name for name, _ in model.state_dict(keep_vars=True).items()}
    lost = [name for name in on_meta if name not in saved]
    if lost:
        named = f"{plural(len(lost), 'buffer')} on the meta device that no checkpoint holds: {first_few(lost, 3)}"
        raise UsageError(None, f"the model has {named}; compute them on a device first")

    made_of: dict[Tensor, Tensor] = {}

    def made(value: Tensor) -> Tensor:
        if not value.is_meta:
            return value
        if value not in made_of:
            where = device or (value.device_mesh.device_type if isinstance(value, DTensor) else "cpu")
            made_of[value] = torch.empty_like(value, device=where)
        return made_of[value]

    names: dict[nn.Parameter, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(parameter, []).append(name)
    model._apply(made)
    for first, *others in names.values():
        for tied in others:  # torch has made a parameter of each of its names
            path, _, name = tied.rpartition(".")
            setattr(model.get_submodule(path), name, model.get_parameter(first))


def _tensors_of(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from model.named_parameters(remove_duplicate=False)
    yield from model.named_buffers(remove_duplicate=False)


@in_python
def load_state_dict(
    path: str | Path | Sequence[str | Path],
    *,
    keys: str | Iterable[str] = (),
    dtype: torch.dtype | str | None = None,
    device: torch.device | str = "cpu",
    **options: Unpack[LoadOptions],
) -> dict[str, Tensor]:
    """Load the model of a checkpoint of any format as a plain dict of tensors, in one process.

    Args:
        path: as for `ckptools.open`.
        keys: globs of names; none loads every tensor.
        dtype: dtype of tensors of floating-point numbers; None keeps theirs.
        device: where the tensors are made.
        options: see `LoadOptions`; `model` chooses one of several models.

    Raises:
        NotWholeError: the model is not whole, and `allow_missing` is not given.
        ReadError: a file cannot be read, has changed, or is damaged.
        RefusedError: `dtype` is given, and its weights are codes, which are no values to convert.
        UsageError: no name matches, or `dtype` is none of floating-point numbers.
    """
    reader = StorageReader(path, strict=False, cast=dtype is not None, no_dist=True, **options)
    wanted = pattern((keys,) if isinstance(keys, str) else tuple(keys)) if keys else None
    named = {short: long for long, short in SHORT.items()}.get(str(dtype), dtype)
    kind = getattr(torch, named, None) if isinstance(named, str) else named
    if dtype is not None and not (isinstance(kind, torch.dtype) and kind.is_floating_point):
        text = f"{spelled('dtype', dtype)}: choose a floating-point dtype, such as float32, bfloat16, float16"
        raise UsageError(None, text)
    found: dict[str, Any] = {}
    for entry in reader.state.entries:
        section, _, name = entry.flat.partition(".")
        if section == MODEL and isinstance(entry.value, SavedTensor) and (wanted is None or wanted.fullmatch(name)):
            own: torch.dtype | None = getattr(torch, entry.value.dtype, None)
            if own is None:
                text = f"{name} is {entry.value.dtype}, which torch {torch.__version__} does not have"
                raise RefusedError(reader.path, f"{text}; leave it out with {spelled('keys')}")
            into = kind if kind is not None and own.is_floating_point else own
            found[name] = torch.empty(entry.value.shape, dtype=into, device=device)
    if not found:
        which = f"{spelled('keys', keys)}: no name of its model matches" if keys else "holds no model"
        raise UsageError(reader.path, which)
    _load({MODEL: found}, reader, dtype is not None)
    return found
