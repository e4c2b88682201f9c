"""Everything that a reader makes of a checkpoint, as lines of text to compare with what was looked at before."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from typing import Any

from ckptools.errors import CkptoolsError, original_of
from ckptools.model.checkpoint import Checkpoint
from ckptools.model.shards import Encoded, Shard, Source
from ckptools.model.tensor import Tensor
from ckptools.model.tree import NumpyArray, NumpyScalar, walk
from ckptools.rules.verdict import verdict_of
from ckptools.text import KeyPath, fqn_of
from ckptools.training_state.optimizers import optimizers_of
from ckptools.training_state.sections import sections_of


def described(ck: Checkpoint) -> list[str]:
    """What is known of a checkpoint, without file times and what opening took in seconds."""
    return [*facts(ck), *(f"{name}: {found}" for name, found in _of_training(ck)), *leaves(ck)]


def facts(ck: Checkpoint) -> Iterator[str]:
    """Everything but its tree."""
    yield f"{ck.name} ({ck.format}): {ck.saved_as}"
    yield f"world size {_fact(ck.world_size)}; step {_fact(ck.step)}"
    yield f"order kept {ck.module_order.kept}: {ck.module_order.why}"
    yield f"verdict {verdict_of(ck).to_dict()}"
    yield f"expected {ck.bytes_expected}, read {ck.cost.files} files, all ranks {ck.all_ranks}, in parts {ck.in_parts}"
    yield f"text keys {ck.text_keys}, provenance {ck.provenance}, versions {dict(ck.stated_versions)}"
    yield from (f"file {f.rank} {f.part or '-'} {f.status} {f.nbytes} {f.path}" for f in ck.files)
    yield from (f"{p.code} {p.severity} {p.rank} {p.tensor} {p.ranks}: {p.message}" for p in ck.problems)
    yield f"{len(ck.names)} names {digest(ck.names)}"
    for what in ("differing", "assumed_names", "hollow"):
        yield from (f"{what} {found}" for found in sorted(map(repr, getattr(ck, what))))
    yield from (f"rounded {r.fqn}: {_tensor(r.copy)} to {_tensor(r.weight)}" for r in ck.rounded)
    for what, values in (("per rank", ck.per_rank), ("unequal", ck.unequal)):
        yield from (f"{what} {path}: {digest(dict(of))} of {list(of)}" for path, of in values.items())


def leaves(ck: Checkpoint) -> Iterator[str]:
    """The tensors of models, and of each other section a digest of all that is in it."""
    for section in sections_of(ck):
        found = [(path, _value(value)) for path, value in walk(section.value)]
        if section.kind == "model":
            yield from (f"{section.name}: {_path(path)}: {text}" for path, text in found)
        else:
            yield f"{section.name}: {len(found)} leaves {digest(found)}"
            yield from (f"{section.name}: {_path(path)}: {text}" for path, text in found if " NOTE " in text)


def digest(value: Any) -> str:
    """A few letters that stand for a value."""
    return hashlib.sha256(_whole(value).encode()).hexdigest()[:10]


def _of_training(ck: Checkpoint) -> Iterator[tuple[str, str]]:
    """Its sections, and its optimizers with their names."""
    for section in sections_of(ck):
        yield f"section {section.name!r}", f"{section.kind} at {section.path}"
    try:
        optimizers = optimizers_of(ck)
    except CkptoolsError as error:
        yield "optimizers", f"{type(error).__name__}: {error}"
        return
    for name, optimizer in optimizers.items():
        yield f"optimizer {name}", f"{optimizer.naming._replace(names={})} {digest(dict(optimizer.naming.names))}"
        for group in optimizer.param_groups:
            yield f"group of {name}", f"{len(group.names)} names, {digest(group.names)} {digest(dict(group))}"


def _fact(fact: Any) -> str:
    return f"{fact.words} {'agree' if fact.agree else 'DISAGREE'}: {', '.join(fact.sources)}"


def _path(path: KeyPath) -> str:
    return fqn_of(path) if all(isinstance(key, str) for key in path) else repr(path)


def _value(value: Any) -> str:
    if isinstance(value, Tensor):
        return _tensor(value)
    text = _whole(value)
    return text if len(text) <= 60 else f"{type(value).__name__} {digest(value)}"


def _tensor(tensor: Tensor) -> str:
    how = " ".join(filter(None, (tensor.kind, "parameter" * tensor.parameter, "grad" * tensor.requires_grad)))
    mesh = f" {tensor.placements} {tensor.mesh}" if tensor.placements or tensor.mesh else ""
    ranks = ",".join("-" if s.rank is None else str(s.rank) for s in tensor.shards)
    state = f" unread {tensor.unread} lost {dict(tensor.lost)}" if tensor.unread or tensor.lost else ""
    note = f" NOTE {tensor.note}" if tensor.note else ""
    detail = f" detail {digest(tensor.detail)}" if tensor.detail is not None else ""
    shape = "x".join(map(str, tensor.shape))
    shards = digest("\n".join(map(_shard, tensor.shards)))
    return f"{tensor.dtype} {shape} {how}{mesh} of {tensor.world_size} on {ranks} {shards}{state}{note}{detail}"


def _shard(shard: Shard) -> str:
    """One shard with each extent of its bytes."""
    item = shard.item and (shard.item.path.name, *shard.item[1:])
    return f"{shard.box} {shard.rank} {list(map(_source, shard.sources))} {item} {_encoded(shard.encoded)}"


def _source(source: Source) -> tuple[Any, ...]:
    return (original_of(source.path).name, *source[1:])


def _encoded(encoded: Encoded | None) -> Any:
    return encoded and (encoded.name, [name for name, _ in encoded.parts], encoded.coding, encoded.shape, encoded.box)


def _whole(value: Any) -> str:
    """A value in full, with all that is in it."""
    if isinstance(value, Tensor):
        return _tensor(value)
    if isinstance(value, dict):
        return "{" + ", ".join(f"{_whole(k)}: {_whole(v)}" for k, v in value.items()) + "}"
    if isinstance(value, list | tuple) and type(value) in (list, tuple):
        return str([_whole(v) for v in value])
    if isinstance(value, NumpyArray | NumpyScalar):
        return f"{value!r} {hashlib.sha256(value.data).hexdigest()[:8]}"
    return repr(value)
