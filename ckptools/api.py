"""What users hold: a checkpoint with its methods, lazy tensors that load, and the functions that open and write them.

Everything below returns data; this file gives it methods. It is the only one that may import from every room, and
does so where a method is called, so that importing ckptools stays cheap.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ckptools.errors import CkptoolsError
from ckptools.model import checkpoint as checkpoint_data
from ckptools.model import tensor as tensor_data
from ckptools.model.problems import Problem
from ckptools.model.regions import Box
from ckptools.model.tensor import Shard
from ckptools.model.tree import KeyPath
from ckptools.model.values import Opaque
from ckptools.torch_engine.offline import load_shard, offline

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt
    import torch

    from ckptools.consolidate.result import Consolidated
    from ckptools.formats.options import Reader, Weights
    from ckptools.formats.resolver import Resolver
    from ckptools.formats.shared.given_names import NamesFrom
    from ckptools.model.verification import Verification
    from ckptools.training_state.optimizers import Optimizer
    from ckptools.training_state.sections import Section

__all__ = [
    "Checkpoint",
    "CkptoolsError",
    "Opaque",
    "Problem",
    "Shard",
    "Tensor",
    "consolidate",
    "load_shard",
    "offline",
    "open",
    "verify",
]

Progress = Callable[[int, str], None]
"""Called with a number of bytes that were read or written, and the tensor or file that they belong to."""


@dataclass(frozen=True, slots=True, repr=False)
class Tensor(tensor_data.Tensor):
    """A tensor of a checkpoint, known by shape, dtype and where its pieces lie. Its values stay on disk until `load`.

    Attributes:
        resolver: finds its shards in files that were not read yet; None where every shard has its bytes.
        key: its key path in the checkpoint's tree.
    """

    resolver: Resolver | None = field(default=None, compare=False)
    key: KeyPath = field(default=(), compare=False)

    def load(self, rank: int | None = None) -> torch.Tensor:
        """Read the values as a `torch.Tensor` of the global shape.

        Args:
            rank: read only what this rank holds, as it held it: its local tensor.

        Raises:
            NotWholeError: no file that is here holds some of it.
            ReadError: a file cannot be read, or the tensor cannot be put together; the message says why.
            UsageError: `rank` holds nothing of it.
        """
        from ckptools.tensor_io import read

        if rank is None:
            loaded: torch.Tensor = read.load(self._with_box(Box.whole(self.shape)))
        else:
            loaded = read.load(self._with_rank(rank), rank)
        return loaded

    def numpy(self) -> npt.NDArray[Any]:
        """Read the values as a numpy array; bfloat16 and fp8, which numpy lacks, become float32 exactly.

        Raises:
            NotWholeError, ReadError: as `load`.
            UsageError: numpy has nothing like its dtype.
        """
        from ckptools.tensor_io import read

        return read.to_numpy(self._with_box(Box.whole(self.shape)))

    def __array__(self, dtype: np.dtype[Any] | None = None, copy: bool | None = None) -> npt.NDArray[Any]:
        """Read the values for `np.asarray(tensor)`, as `numpy()` does.

        Raises:
            ValueError: the values were asked for without a copy; they are on disk.
        """
        if copy is False:
            raise ValueError("the values are in a file: an array of them is always a copy")
        values = self.numpy()
        return values if dtype is None else values.astype(dtype)

    def __getitem__(self, index: Any) -> torch.Tensor:
        """Read a slice as a `torch.Tensor`: only the shards, and only the bytes, that it needs.

        Args:
            index: ints, slices with step 1, and `...`.

        Raises:
            NotWholeError, ReadError: as `load`.
            UsageError: another kind of index.
        """
        from ckptools.tensor_io import read

        box, shape = read.box_of_index(self, index)
        loaded: torch.Tensor = read.load_box(self._with_box(box), box, shape)
        return loaded

    def _with_box(self, box: Box) -> tensor_data.Tensor:
        if self.resolver is None or self.note:
            return self
        return self.resolver.with_sources(self, self.key, box)

    def _with_rank(self, rank: int) -> tensor_data.Tensor:
        return self if self.resolver is None else self.resolver.with_rank(self, self.key, rank)


class StateDict(Mapping[str, Any]):
    """A part of a checkpoint by name, such as the state dict of its model. Unknown names are told with the nearest.

    Args:
        name: what it is part of, for its `repr`.
        values: what it maps.
    """

    def __init__(self, name: str, values: Mapping[Any, Any]) -> None:
        self._name, self._values = name, values

    def __getitem__(self, key: str) -> Any:
        if key in self._values:
            return self._values[key]
        from ckptools.text import no_such_key

        raise KeyError(no_such_key(key, map(str, self._values)))

    def get(self, key: str, default: Any = None) -> Any:
        """The value at `key`, or `default`."""
        return self._values.get(key, default)

    def __contains__(self, key: object) -> bool:
        return key in self._values

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def _ipython_key_completions_(self) -> list[str]:
        return [str(k) for k in self._values]

    def __repr__(self) -> str:
        tensors = sum(isinstance(v, tensor_data.Tensor) for v in self._values.values())
        return f"<{self._name or 'values'}: {len(self)} entries, {tensors} tensors>"

    def _repr_html_(self) -> str:
        from ckptools.views.html import values_html

        return values_html(self)


@dataclass(frozen=True, repr=False)
class Checkpoint(checkpoint_data.Checkpoint):
    """A distributed checkpoint, opened: its structure is read, its tensors are lazy.

    A context manager: `with ckptools.open(path) as ck:` forgets at its end what was read of other ranks' files.

    Attributes:
        resolver: reads other ranks' files when their shards are asked for, each once.
    """

    resolver: Resolver | None = field(default=None, compare=False)

    @property
    def raw(self) -> Any:
        """The tree as the file has it: nested dicts, lists and tuples with plain values and lazy tensors."""
        return self.tree

    @cached_property
    def sections(self) -> tuple[Section, ...]:
        """The parts of the tree: model, optimizers, schedulers, RNG and the rest, in file order."""
        from ckptools.training_state.sections import sections_of

        return sections_of(self)

    def of_kind(self, kind: str) -> tuple[Section, ...]:
        """The sections of one kind: `model`, `optimizer`, `scheduler`, `rng` or `other`."""
        return tuple(s for s in self.sections if s.kind == kind)

    @cached_property
    def model(self) -> Mapping[str, Any]:
        """The model's state dict: fqn to lazy tensor. Of several models the names are prefixed with the section."""
        from ckptools.training_state.sections import model_of

        models = self.of_kind("model")
        return StateDict(models[0].name if len(models) == 1 else "models", model_of(self))

    @cached_property
    def optimizers(self) -> Mapping[str, Optimizer]:
        """The optimizers by class name or key, their state by fqn where names are known.

        Raises:
            RefusedError: the names that were given when it was opened do not fit.
        """
        from ckptools.training_state.optimizers import optimizers_of

        return StateDict("optimizers", {name: _with_states(o) for name, o in optimizers_of(self).items()})

    @cached_property
    def schedulers(self) -> Mapping[str, Any]:
        """The schedulers' states, by class name or key."""
        from ckptools.training_state.sections import schedulers_of

        return StateDict("schedulers", schedulers_of(self))

    @property
    def rng(self) -> Any:
        """The saved RNG state as the file has it; None when it has none."""
        from ckptools.training_state.sections import rng_of

        return rng_of(self)

    def verify(
        self,
        *,
        deep: bool = False,
        values: bool = False,
        manifest: str | Path | None = None,
        ignore: Iterable[str] = (),
        jobs: int | None = None,
        progress: Progress | None = None,
    ) -> Verification:
        """Check whether it is whole, unharmed and coherent. What cannot be read on the way is a problem found.

        Args:
            deep: read every tensor's bytes and compare the CRC-32 that the container carries.
            values: look for NaN and infinities.
            manifest: a JSON that `consolidate(manifest=True)` wrote; every tensor and file in it is compared.
            ignore: codes of problems that are not counted.
            jobs: threads.
            progress: called with bytes read and the file they are in.

        Raises:
            ReadError: it cannot be opened, or the manifest cannot be read.
            UsageError: a code that does not exist.
        """
        from ckptools.checks import verifying

        return verifying.verify(
            self._with_all_ranks(),
            deep=deep,
            values=values,
            manifest=manifest,
            ignore=ignore,
            jobs=jobs,
            progress=progress,
        )

    def consolidate(
        self,
        out: str | Path,
        *,
        format: str | None = None,
        only: str | None = None,
        dtype: str | None = None,
        max_shard_size: int | None = None,
        tied: str = "keep",
        keep_types: bool = False,
        force: bool = False,
        allow_missing: bool = False,
        fill: str | None = None,
        prefer_rank: int | None = None,
        check: bool = False,
        unchecked: bool = False,
        manifest: bool = False,
        dry_run: bool = False,
        jobs: int | None = None,
        progress: Progress | None = None,
    ) -> Consolidated:
        """Write its full tensors into one `.pt`, one or several `.safetensors`, or a DCP folder to resume from.

        Args:
            out: the file or folder to write; its suffix (`.dcp` for a folder) says the format. With a `/` at its end,
                or where it is a folder, `model.safetensors` or `model.pt` in it.
            format: `pt`, `safetensors` or `dcp`, where no suffix says it; a file gets that suffix.
            only: `model` (the bare state dict), `optimizer`, or `all` (the same tree). Default: `model` for
                `.safetensors`, else `all`.
            dtype: torch dtype for the floating-point tensors of the model, such as `bfloat16`.
            max_shard_size: bytes of tensors per file of safetensors (which get a Hugging Face index) or of a DCP.
            tied: for safetensors: `keep` writes a tied weight under each name, `drop` only under the first.
            keep_types: keep what plain `torch.load` does not make (timedeltas, numpy's values …) in a `.pt`, instead
                of the nearest that it does.
            force: overwrite an existing output.
            allow_missing: leave out tensors that are not whole, and list them, instead of refusing.
            fill: with `allow_missing`: `nan` or `zero` to put into holes, which are listed; without it a tensor with
                a hole is left out.
            prefer_rank: where ranks hold different copies of a tensor that should be equal, take this rank's.
            check: let the format's own library read the output back before it gets its name, and compare it with the
                shards; for a dry run, compare the source with its checksums.
            unchecked: do not compare the source with the checksums that it states.
            manifest: write sha256 of every tensor and file into a JSON beside the output.
            dry_run: plan and check, write nothing.
            jobs: threads.
            progress: called with bytes written, or read back, and the tensor they belong to.

        Raises:
            NotWholeError: something is missing, overlaps, contradicts, or was found damaged before anything was
                written.
            DamagedError: a record is not what its checksum says.
            OutputExistsError, NoSpaceError: the output is in the way or does not fit.
            ReadError, WriteError: a file cannot be read or written; nothing that looks finished is left.
            UsageError: options that do not fit together.
        """
        from ckptools.consolidate.options import ConsolidateOptions
        from ckptools.consolidate.run import consolidate as write

        options = ConsolidateOptions(
            format=format,
            only=only,
            dtype=dtype,
            max_shard_size=max_shard_size,
            tied=tied,
            keep_types=keep_types,
            force=force,
            allow_missing=allow_missing,
            fill=fill,
            prefer_rank=prefer_rank,
            check=check,
            unchecked=unchecked,
            manifest=manifest,
            dry_run=dry_run,
            jobs=jobs,
        )
        return write(self._with_all_ranks(), out, options, progress)

    def close(self) -> None:
        """Forget what was read of other ranks' files; lazy tensors that need them read them again."""
        if self.resolver is not None:
            self.resolver.close()

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _with_all_ranks(self) -> checkpoint_data.Checkpoint:
        return self if self.all_ranks or self.resolver is None else self.resolver.all_ranks()

    def __repr__(self) -> str:
        from ckptools.views.checkpoint_line import checkpoint_line

        return checkpoint_line(self)

    def _repr_html_(self) -> str:
        from ckptools.views.html import checkpoint_html

        return checkpoint_html(self)


def open(
    path: str | Path | Sequence[str | Path],
    *,
    all_ranks: bool = False,
    only_this_file: bool = False,
    follow_symlinks: bool = False,
    read_file: Reader | None = None,
    shapes: str | Path | None = None,
    weights: Weights = "fp32",
    rules: str | Path | None = None,
    ranks: str | None = None,
    names: NamesFrom | None = None,
) -> Checkpoint:
    """Open a checkpoint: its structure, none of its tensor values. Runs nothing that the file names.

    Args:
        path: a rank file (its siblings are found), a folder of rank files, any torch.save file; or several rank
            files, by any name, which together are the checkpoint.
        all_ranks: read every rank's structure now; otherwise the others are read when something needs them.
        only_this_file: do not look for siblings.
        follow_symlinks: accept siblings that are links out of the folder.
        read_file: what reads one file; the inert reader unless somebody asks for torch's.
        shapes: where shapes are told that the checkpoint lacks (FSDP1 flat parameters): another checkpoint, a folder
            of safetensors, or a JSON of name to shape.
        weights: where the model is held twice, `fp32` (master copy) or `module`.
        rules: a JSON file that says how tensor-parallel weights are joined.
        ranks: what the rank files in the folder `path` are called, such as `model-{rank}-of-{world}.pt`.
        names: what names the parameters of an optimizer that is keyed by number: a checkpoint that keeps the module's
            order, a JSON list in the optimizer's order, such a list itself, or the `nn.Module`.

    Raises:
        ReadError: it cannot be read as what it claims to be.
        UnknownFormatError: no format recognises it.
        UsageError: a folder holds several checkpoints; or names are given that nothing here needs.
        RefusedError: names are given that do not fit.
    """
    from ckptools.formats.opening import open_checkpoint
    from ckptools.training_state import modules

    opened = open_checkpoint(
        path,
        all_ranks=all_ranks,
        only_this_file=only_this_file,
        follow_symlinks=follow_symlinks,
        read_file=read_file or modules.read_file,
        shapes=shapes,
        weights=weights,
        rules=rules,
        ranks=ranks,
        names=names,
    )
    return with_methods(opened)


def with_methods(data: checkpoint_data.Checkpoint) -> Checkpoint:
    """The checkpoint that a reader made, with methods; the tensors in its tree are replaced by ones that load."""
    from ckptools.formats.resolver import Resolver

    resolver = Resolver(data.path, data.options)
    found = {f.name: getattr(data, f.name) for f in fields(data) if f.init}
    bind = _Binding(None if data.all_ranks else resolver)
    found["tree"] = bind.bound(data.tree, ())
    found["per_rank"] = {key: {r: bind.bound(v, key) for r, v in of.items()} for key, of in data.per_rank.items()}
    return Checkpoint(**found, resolver=resolver)


class _Binding:
    """Puts lazy tensors that load in the place of those that only say where they are.

    Containers are changed in place: a state dict keeps its class and what else is known of it.
    """

    def __init__(self, resolver: Resolver | None) -> None:
        self._resolver = resolver
        self._met: dict[int, tuple[Any, Any]] = {}

    def bound(self, value: Any, path: KeyPath) -> Any:
        """The value, or what stands in its place."""
        if isinstance(value, tensor_data.Tensor):
            return self._tensor(value, path)
        if id(value) in self._met or not isinstance(value, _HOLDERS):
            return self._met.get(id(value), (value, value))[1]
        self._met[id(value)] = value, value
        if isinstance(value, Opaque):
            for name in ("args", "state", "items", "keywords"):
                setattr(value, name, self.bound(getattr(value, name), path))
            return value
        if isinstance(value, tuple):
            children = [self.bound(child, (*path, n)) for n, child in enumerate(value)]
            same = all(a is b for a, b in zip(children, value, strict=True))
            bound = value if same else tuple(children)
            self._met[id(value)] = value, bound
            return bound
        for key, child in list(value.items() if isinstance(value, dict) else enumerate(value)):
            if isinstance(child, _BOUND):
                value[key] = self.bound(child, (*path, key))
        return value

    def _tensor(self, tensor: tensor_data.Tensor, path: KeyPath) -> Tensor:
        if isinstance(tensor, Tensor):
            return tensor
        known = {f.name: getattr(tensor, f.name) for f in fields(tensor)}
        complete = tensor.shards and all(s.source is not None or s.item is not None for s in tensor.shards)
        return Tensor(**known, resolver=None if complete else self._resolver, key=path)


_HOLDERS = (dict, list, tuple, Opaque)
_BOUND = (*_HOLDERS, tensor_data.Tensor)


def _with_states(optimizer: Optimizer) -> Optimizer:
    """The optimizer with the state of each parameter as a mapping that shows itself."""
    state = {n: StateDict(str(n), v) if isinstance(v, Mapping) else v for n, v in optimizer.state.items()}
    return replace(optimizer, state=StateDict(f"{optimizer.name}.state", state))


def verify(
    checkpoint: Checkpoint | str | Path,
    *,
    deep: bool = False,
    values: bool = False,
    manifest: str | Path | None = None,
    ignore: Iterable[str] = (),
    jobs: int | None = None,
    progress: Progress | None = None,
) -> Verification:
    """Check whether a checkpoint, or what is at a path, is whole, unharmed and coherent; see `Checkpoint.verify`."""
    return _opened(checkpoint).verify(
        deep=deep, values=values, manifest=manifest, ignore=ignore, jobs=jobs, progress=progress
    )


def consolidate(
    checkpoint: Checkpoint | str | Path,
    out: str | Path,
    *,
    format: str | None = None,
    only: str | None = None,
    dtype: str | None = None,
    max_shard_size: int | None = None,
    tied: str = "keep",
    keep_types: bool = False,
    force: bool = False,
    allow_missing: bool = False,
    fill: str | None = None,
    prefer_rank: int | None = None,
    check: bool = False,
    unchecked: bool = False,
    manifest: bool = False,
    dry_run: bool = False,
    jobs: int | None = None,
    progress: Progress | None = None,
) -> Consolidated:
    """Write the full tensors of a checkpoint, or of what is at a path; see `Checkpoint.consolidate`."""
    return _opened(checkpoint).consolidate(
        out,
        format=format,
        only=only,
        dtype=dtype,
        max_shard_size=max_shard_size,
        tied=tied,
        keep_types=keep_types,
        force=force,
        allow_missing=allow_missing,
        fill=fill,
        prefer_rank=prefer_rank,
        check=check,
        unchecked=unchecked,
        manifest=manifest,
        dry_run=dry_run,
        jobs=jobs,
        progress=progress,
    )


def _opened(checkpoint: Checkpoint | str | Path) -> Checkpoint:
    return open(checkpoint, all_ranks=True) if isinstance(checkpoint, (str, Path)) else checkpoint
