"""`.pt`: a torch.save zip archive that plain `torch.load(path)` reads, with `mmap=True` too."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from ckptools.consolidate.provenance import record_of
from ckptools.consolidate.writers.archive import Archive, Storage
from ckptools.consolidate.writers.layout import (
    Job,
    OutputContents,
    OutputLayout,
    ReadBack,
    ReadTensor,
    WriteOptions,
    identity,
    output_dtype,
    quoted,
)
from ckptools.consolidate.writers.loadable import LEFT_OUT, BytesTensor, Loadable
from ckptools.consolidate.writers.pickle_emitter import Emitter
from ckptools.dtypes import ITEMSIZE
from ckptools.errors import RefusedError
from ckptools.formats.shared.merge import empty_like
from ckptools.model.provenance import FILE_NAME, Provenance
from ckptools.model.tensor import Tensor
from ckptools.model.tree import KeyPath, fqn_of


def lay_out(selection: OutputContents, out: Path, options: WriteOptions) -> OutputLayout:
    """Plan a `.pt` with the selection's tree; tied weights share one storage."""
    loadable = Loadable()
    tree = selection.tree if options.keep_types else loadable.value(selection.tree)
    if tree is LEFT_OUT:
        raise RefusedError(out, f"would hold nothing but {loadable.left_out[()]}")
    packed = pack(tree, (), selection, options, record_of(selection, loadable.left_out))
    return OutputLayout(
        files=((out, packed.archive.nbytes),),
        jobs=packed.jobs(0, 0),
        framing=lambda _: packed.archive.framing(0, 0),
        read_back=packed.read_back,
        checksums=True,
        needs=packed.needs,
        notes=(loadable.note(),) if loadable.note() else (),
        left_out=loadable.left_out,
        tied={fqn_of(path): first for path, first in packed.tied.items() if path in selection.model_paths},
        load=f"import torch; state = torch.load({quoted(out)}{', weights_only=False' if packed.needs else ''})",
    )


@dataclass(frozen=True)
class Packed:
    """A planned archive of one tree, which has a tensor for every name.

    Attributes:
        stored: fqn, tensor and dtype of every storage that is copied, in order.
        tied: key paths of tensors that share the storage of an earlier one, with its fqn.
        needs: names in the pickle that `torch.load(weights_only=True)` does not accept.
        made_of: source and output dtype of each tensor of the tree, by its key path.
    """

    archive: Archive
    stored: tuple[tuple[str, Tensor, str], ...]
    tied: Mapping[KeyPath, str]
    needs: tuple[str, ...]
    tree: Any
    made_of: Mapping[KeyPath, tuple[Tensor, str]]

    def jobs(self, file: int, at: int) -> tuple[Job, ...]:
        """The jobs for the tensors if the archive begins at byte `at` of an output file."""
        pairs = zip(self.stored, self.archive.starts, strict=True)
        return tuple(Job(fqn, tensor, dtype, file, at + start) for (fqn, tensor, dtype), start in pairs)

    @contextmanager
    def read_back(self, paths: Sequence[Path]) -> Iterator[ReadBack]:
        """Open the archive with plain `torch.load`; if it refuses, with harmless names allowed."""
        import torch

        from ckptools.torch_engine.offline import load_plain, load_shard

        loaded = load_shard(paths[0]) if self.needs else load_plain(paths[0])
        tensors = []
        for path, value in _side_by_side(self.tree, loaded, ()):
            if isinstance(value, torch.storage.TypedStorage):
                value = torch.empty(0, dtype=value.dtype).set_(value)
            tensors.append(ReadTensor(fqn_of(path), *self.made_of[path], partial(lambda loaded: loaded, value)))
        yield ReadBack(f"torch {torch.__version__}", tensors)


def _side_by_side(tree: Any, loaded: Any, path: KeyPath) -> Iterator[tuple[KeyPath, Any]]:
    """Every tensor's key path, with the value loaded there."""
    if isinstance(tree, Tensor):
        yield path, loaded
    elif isinstance(tree, dict):
        for (key, node), value in zip(tree.items(), loaded.values(), strict=True):
            yield from _side_by_side(node, value, (*path, key))
    elif type(tree) in (list, tuple):
        for number, (node, value) in enumerate(zip(tree, loaded, strict=True)):
            yield from _side_by_side(node, value, (*path, number))


def pack(
    tree: Any, path: KeyPath, selection: OutputContents, options: WriteOptions, record: Provenance | None = None
) -> Packed:
    """Plan the archive that torch.save would write for the node at `path` of the selection's tree.

    The `record` of its source becomes an entry of its own, which torch.load ignores.
    """
    storages = _Storages(tree, path, selection, options)
    emitter = Emitter(storages.key)
    pickle = emitter.dump(storages.tree)
    beside = ((FILE_NAME, record.to_json().encode("ascii")),) if record else ()
    archive = Archive.of(pickle, storages.sizes, options.streamed, beside)
    needs = tuple(emitter.needs)
    return Packed(archive, tuple(storages.stored), storages.tied, needs, storages.tree, storages.made_of)


class _Storages:
    """Give every distinct tensor of a tree a storage, in tree order; tied ones share it."""

    def __init__(self, tree: Any, path: KeyPath, selection: OutputContents, options: WriteOptions) -> None:
        self.stored: list[tuple[str, Tensor, str]] = []
        self.sizes: list[Storage] = []
        self.tied: dict[KeyPath, str] = {}
        self.made_of: dict[KeyPath, tuple[Tensor, str]] = {}
        self._keys: dict[Any, tuple[str, str]] = {}
        self._by_object: dict[int, str] = {}
        self.tree = self._typed(tree, path, selection, options)

    def _typed(self, node: Any, path: KeyPath, selection: OutputContents, options: WriteOptions) -> Any:
        """Copy the tree with the tensors of the output: output dtype, own storage."""
        if isinstance(node, Tensor):
            return self._store(node, path, output_dtype(path, node, selection, options.dtype))
        if isinstance(node, BytesTensor):
            self._by_object[id(node)] = self._new(node.data)
        if isinstance(node, dict):
            copied = empty_like(node)
            for key, value in node.items():
                copied[key] = self._typed(value, (*path, key), selection, options)
            return copied
        if type(node) in (list, tuple):
            return type(node)(self._typed(v, (*path, i), selection, options) for i, v in enumerate(node))
        return node

    def _store(self, tensor: Tensor, path: KeyPath, dtype: str) -> Tensor:
        written = replace(tensor, dtype=dtype)
        same = identity(tensor)
        key, first = self._keys.get((same, dtype), ("", "")) if same is not None else ("", "")
        if key:
            self.tied[path] = first
        else:
            key = self._new(tensor.numel * ITEMSIZE[dtype])
            self._keys[same, dtype] = (key, fqn_of(path))
            self.stored.append((fqn_of(path), tensor, dtype))
        self._by_object[id(written)] = key
        self.made_of[path] = (tensor, dtype)
        return written

    def _new(self, storage: Storage) -> str:
        self.sizes.append(storage)
        return str(len(self.sizes) - 1)

    def key(self, tensor: Tensor | BytesTensor) -> str:
        """The storage key of a tensor of `tree`."""
        return self._by_object[id(tensor)]
