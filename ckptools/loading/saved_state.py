"""The values that `dcp.load` can ask of a checkpoint: those of the DCP folder that `consolidate` would write of it.

A value has two keys: its key in the tree as it was saved, for the script that saved it, and its key in the tree of
torch's state_dict API (`model`, `optimizer`), for any other. No value of a tensor is read here, and nothing needs
torch, so that one rank makes the record for all.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

from ckptools.consolidate.options import FLAT, SAVED, ConsolidateOptions, renamed, renaming_of, unwrapped
from ckptools.consolidate.output_place import OutputPlace, made_like, original_for
from ckptools.consolidate.provenance import note_on_carried
from ckptools.consolidate.selection import check_files, select
from ckptools.consolidate.writers import PT
from ckptools.consolidate.writers.dcp import Leaf, ObjectPath, arrange
from ckptools.consolidate.writers.layout import OutputContents, WriteOptions
from ckptools.consolidate.writers.pt import Packed
from ckptools.errors import CkptoolsError
from ckptools.files.opening import OpenFiles
from ckptools.formats.open import with_all_ranks
from ckptools.keys.expected_names import CONFIG
from ckptools.model.checkpoint import Checkpoint
from ckptools.model.extents import read_paths
from ckptools.model.tensor import Tensor
from ckptools.tensor_io.checksums import crc32
from ckptools.tensor_io.stream import tensor_bytes
from ckptools.text import few, fqn_of, plural
from ckptools.training_state.optimizers import optimizers_of

MODEL, OPTIMIZER = "model", "optimizer"
"""The keys of model and optimizer in the tree of torch's state_dict API."""

Value = Tensor | bytes
"""A tensor with one shard per region, or any other value as the archive that torch.save would write."""

AS_SAVED = WriteOptions(None, None, "keep", keep_types=True, streamed=False)
"""Options with which an archive keeps the types of its values."""

Stamp = tuple[int, int]
"""Size of a file in bytes, and its time in nanoseconds."""


class SavedEntry(NamedTuple):
    """A value of the checkpoint.

    Attributes:
        path: its key path in the tree as it was saved.
        saved: its key there, as DCP's planner flattens it.
        flat: its key in the tree of torch's state_dict API.
        value: None if the checkpoint has lost it, and the running value is to be kept.
    """

    path: ObjectPath
    saved: str
    flat: str
    value: Value | None


@dataclass(frozen=True)
class SavedState:
    """What a checkpoint holds, by key.

    Attributes:
        step: its training step; None if unknown.
        world_size: number of ranks that saved it; None if unknown.
        numbered: whether its optimizer has numbers, so that an order speaks for its names at most.
        unnamed: whether some of its parameters have no name at all.
        own: the values that each rank had for itself, by their key in the saved tree, then by rank.
        groups: the optimizer's param groups: the fqns under `params`, and the archives of all other values.
        counters: plain numbers outside of model, optimizer, scheduler and random states, by key.
        without: why the checkpoint has a model here and nothing else; None if everything could be chosen.
        notes: what was done or assumed, for the user.
        stamps: size and time of each file with values.
    """

    path: Path
    step: int | None
    world_size: int | None
    entries: Sequence[SavedEntry]
    numbered: bool
    unnamed: bool
    own: Mapping[str, Mapping[int, Value]]
    groups: Sequence[Mapping[str, Any]]
    counters: Mapping[str, int | float]
    without: CkptoolsError | None
    notes: Sequence[str]
    stamps: Mapping[Path, Stamp] = field(default_factory=dict)


def stamp_of(path: Path) -> Stamp:
    """Size and time of a file."""
    status = path.stat()
    return status.st_size, status.st_mtime_ns


def saved_state(checkpoint: Checkpoint | str | Path, options: ConsolidateOptions) -> SavedState:
    """Choose the values of a checkpoint as `consolidate` does with these options.

    If the whole tree cannot be chosen, the model alone is.

    Raises:
        NotWholeError: the model is not whole.
        ReadError: a file cannot be read.
        UsageError: options contradict each other.
    """
    whole = with_all_ranks(checkpoint)
    without: CkptoolsError | None = None
    with OpenFiles() as files:
        if options.dequantize:
            from ckptools.training_state.packed_values import with_values  # needs numpy

            whole = with_values(whole, files)
        part = options.only or ("model" if options.like is not None else "all")
        try:
            return _of_part(whole, part, options, files, None)
        except CkptoolsError as error:
            if part == "model":
                raise
            without = error
        try:
            return _of_part(whole, "model", options, files, without)
        except CkptoolsError:
            raise without from None


def _of_part(
    whole: Checkpoint, part: str, options: ConsolidateOptions, files: OpenFiles, without: CkptoolsError | None
) -> SavedState:
    notes = check_files(whole, part, files, options.unchecked)
    contents = select(whole, part, options, files, None, None, does="loads")
    if options.like is not None:
        # The names of the running model's state dict, not those of published files.
        config = Path(options.like) if Path(options.like).name == CONFIG else Path(options.like) / CONFIG
        original = original_for(replace(options, like=config), OutputPlace(whole.path, PT), whole)
        assert original is not None
        contents, _ = made_like(contents, original, options, files)
    renaming = renaming_of(options)
    contents = renamed(contents, renaming) if renaming else contents
    bare = unwrapped(contents, replace(options, layout=FLAT))
    in_tree, in_api = arrange(contents, whole.path, SAVED), arrange(bare, whole.path, FLAT)
    saved, flat = in_tree.leaves, in_api.leaves
    # Both list the same values in the same order.
    pairs = [(a, b, _value(a, contents, files)) for a, b in zip(saved, flat, strict=True)]
    entries = [SavedEntry(a.path, fqn_of(a.path), fqn_of(b.path), value) for a, b, value in pairs]
    left_out = zip(contents.left_out, bare.left_out, strict=True)
    lost = [(a, b) for a, b in left_out if a in contents.lost]
    entries += [SavedEntry((), in_tree.name(a), in_api.name(b), None) for a, b in lost]
    extents = [entry.value.extents for entry in entries if isinstance(entry.value, Tensor)]
    namings = [optimizer.naming for optimizer in optimizers_of(whole).values()]
    return SavedState(
        path=whole.path,
        step=None if whole.step.value is None else int(whole.step.value),
        world_size=whole.world_size.value,
        entries=entries,
        numbered=any(naming.by in ("order", "none") or naming.unnamed for naming in namings),
        unnamed=any(naming.unnamed for naming in namings),
        own=_own(contents, pairs),
        groups=list(_groups(flat, [value for _, _, value in pairs])),
        counters=_counters(contents, saved),
        without=without,
        notes=[*notes, *contents.notes, *_note_on_filled(contents), *note_on_carried(contents)],
        stamps={path: stamp_of(path) for path in read_paths(extents)},
    )


def _value(leaf: Leaf, contents: OutputContents, files: OpenFiles) -> Value:
    """The tensor of a leaf, or the archive of any other value."""
    if isinstance(leaf.value, Tensor):
        return leaf.value
    packed = Packed(leaf.value, leaf.source, contents, AS_SAVED)
    data, crcs = bytearray(packed.archive.nbytes), list[int]()
    for job in packed.jobs(0, 0):
        values = b"".join(tensor_bytes(job.tensor, job.dtype, files))
        data[job.offset : job.offset + len(values)] = values
        crcs.append(crc32(values))
    for frame in packed.archive.framing(0, 0):
        text = frame.data(crcs.__getitem__)
        data[frame.offset : frame.offset + len(text)] = text
    return bytes(data)


def _note_on_filled(contents: OutputContents) -> Iterator[str]:
    """Note the tensors with elements that are in no file, and have a value of the user's instead."""
    filled = [fqn_of(path) for path in contents.missing if contents.filled and path not in contents.left_out]
    if filled:
        yield f"elements of {plural(len(filled), 'tensor')} that are in no file are {contents.filled}: {few(filled, 3)}"


def _own(contents: OutputContents, pairs: Sequence[tuple[Leaf, Leaf, Value]]) -> dict[str, dict[int, Value]]:
    """The values that each rank had for itself: a list by rank in the tree, where the script saved one value."""
    found: dict[str, dict[int, Value]] = {}
    for leaf, _, value in pairs:
        listed = next((path for path in contents.by_rank if leaf.source[: len(path)] == path), None)
        if listed is not None and len(leaf.source) > len(listed):
            n = len(leaf.path) - (len(leaf.source) - len(listed))
            key = fqn_of((*leaf.path[:n], *leaf.path[n + 1 :]))
            found.setdefault(key, {})[int(leaf.source[len(listed)])] = value
    return found


def _groups(leaves: Sequence[Leaf], values: Sequence[Value]) -> Iterator[dict[str, Any]]:
    """The param groups of the one optimizer, whether it lists them or is flattened by parameter."""
    listed: dict[int, dict[str, Any]] = {}
    flattened: dict[str, dict[str, Value]] = {}
    for leaf, value in zip(leaves, values, strict=True):
        if leaf.path[:1] != (OPTIMIZER,):
            continue
        if len(leaf.path) == 4 and leaf.path[1] == "param_groups":
            group = listed.setdefault(int(leaf.path[2]), {})
            group[str(leaf.path[3])] = leaf.value if leaf.path[3] == "params" else value
            if leaf.path[3] == "param_names":  # torch_checkpointing has these alone, as the keys of the states
                group.setdefault("params", leaf.value)
        elif len(leaf.path) == 2 and str(leaf.path[1]).startswith("param_groups."):
            fqn, _, name = str(leaf.path[1]).removeprefix("param_groups.").rpartition(".")
            flattened.setdefault(fqn, {})[name] = value
    yield from (listed[number] for number in sorted(listed))
    alike: list[tuple[dict[str, Value], list[str]]] = []
    for fqn, hyperparameters in flattened.items():
        mine = next((fqns for known, fqns in alike if known == hyperparameters), None)
        if mine is None:
            alike.append((hyperparameters, [fqn]))
        else:
            mine.append(fqn)
    yield from ({**hyperparameters, "params": fqns} for hyperparameters, fqns in alike)


def _counters(contents: OutputContents, leaves: Sequence[Leaf]) -> dict[str, int | float]:
    others = [at for section, at in contents.places if section.kind == "other"]
    inside = (leaf for leaf in leaves if any(leaf.source[: len(at)] == at for at in others))
    return {fqn_of(leaf.path): leaf.value for leaf in inside if type(leaf.value) in (int, float)}
