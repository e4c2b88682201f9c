"""Will a run resume? Compare optimizer groups and state, random states, ranks and torch itself with a new run's.

Only headers and random states are read. `load_state_dict` pairs groups and numbered parameters by position, so a
different order gives parameters the wrong moments without an error; `dcp.load` pairs by name. Sources: torch/optim/
optimizer.py (`load_state_dict`), torch/distributed/checkpoint/state_dict.py (`set_optimizer_state_dict`),
pytorch#187138 (a different dtype is cast silently), pytorch#194251 (classes that another torch version lacks).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from math import prod
from typing import Any

from ckptools.dtypes import short
from ckptools.errors import UsageError
from ckptools.files.opening import OpenFiles
from ckptools.keys.random_states import random_states
from ckptools.match.record import MatchRow, ResumeRow, ResumeVerdict
from ckptools.model.checkpoint import Checkpoint
from ckptools.model.tensor import Tensor
from ckptools.option import spelled
from ckptools.pickles.machine import STRIDES
from ckptools.text import few, named_ranks, plural
from ckptools.torch_engine.installed import names_that_torch_lacks, torch_version
from ckptools.torch_engine.module_shapes import OptimizerShapes
from ckptools.training_state.optimizers import UNNAMED, Optimizer, optimizers_of
from ckptools.training_state.wrappers import without_ddp

MAX_NAMED = 3
OWN_FILES = ("rank_files", "deepspeed")
"""Formats whose trainers read the file of their own rank, and so resume only on the same number of ranks."""

CONVERT = "consolidate -o resume.dcp"
"""Command that writes a DCP folder, which every world size and torch from 2.6 on can read."""


def _give_names() -> str:
    return f"{spelled('names')} FROM gives names"


def resume_rows(
    ck: Checkpoint,
    rows: Iterable[MatchRow],
    names: Mapping[str, str],
    optimizer: bool,
    expected: OptimizerShapes | None,
    world_size: int | None,
) -> Iterator[ResumeRow]:
    """Answer each question about resuming, one row each.

    Args:
        ck: the checkpoint, with all ranks read.
        rows: comparison of the names of the model.
        names: every name of the checkpoint's model, with its name in the model after renames.
        optimizer: whether the user asks about the optimizer.
        expected: what the new run's optimizer expects; None if `to` creates no optimizer.
        world_size: number of ranks of the new run; None if the user does not ask.

    Raises:
        UsageError: the user asks about the optimizer, and `to` creates none.
    """
    yield _dtypes([row for row in rows if row.dtype_differs])
    if optimizer:
        if expected is None:
            text = f"{spelled('optimizer')}: {spelled('to')} must name a function that returns (model, optimizer)"
            raise UsageError(None, f"{text}, as in: return model, torch.optim.AdamW(model.parameters())")
        yield from _optimizer(ck, names, expected)
    if world_size is not None:
        if world_size < 1:
            raise UsageError(None, f"{spelled('world-size')} {world_size}: a run has at least one rank")
        yield _ranks(ck, world_size)
        yield from _random_states(ck, world_size)
    yield torch_row(ck)


def _dtypes(rows: list[MatchRow]) -> ResumeRow:
    if not rows:
        return ResumeRow("dtypes", "fits", "those of the model")
    pairs = dict.fromkeys(f"{short(row.checkpoint_dtype)} to {short(row.model_dtype)}" for row in rows)
    text = (
        f"{plural(len(rows), 'tensor')} would be cast without a word by dcp.load (pytorch#187138): {few(list(pairs))}"
    )
    return ResumeRow("dtypes", "worth a look", text, "consolidate --dtype writes another dtype, to nearest even")


# -- the optimizer -----------------------------------------------------------------------------------------------------


def _optimizer(ck: Checkpoint, names: Mapping[str, str], expected: OptimizerShapes) -> Iterator[ResumeRow]:
    found = list(optimizers_of(ck).values())
    if len(found) != 1:
        here = f"{len(found)} optimizers: {', '.join(one.name for one in found)}" if found else "no optimizer"
        verdict: ResumeVerdict = "not known" if found else "DOES NOT FIT"
        yield ResumeRow("optimizer", verdict, f"the checkpoint holds {here}")
        return
    saved = found[0]
    new_names = {without_ddp(old): new for old, new in names.items()}
    groups = [[new_names.get(without_ddp(name), without_ddp(name)) for name in g.names] for g in saved.param_groups]
    if saved.naming.unnamed:
        yield from _by_number(saved, groups, expected)
        return
    yield _groups(saved, groups, expected)
    yield _state(
        saved, {new_names.get(without_ddp(str(n)), str(n)): slots for n, slots in saved.state.items()}, expected
    )


def _by_number(saved: Optimizer, groups: list[list[str]], expected: OptimizerShapes) -> Iterator[ResumeRow]:
    """Pair numbered parameters by position, as `load_state_dict` does, and compare their sizes and shapes."""
    here, there = (", ".join(str(len(group)) for group in side) for side in (groups, expected.groups))
    known = "the checkpoint has numbers without names"
    if [len(g) for g in groups] != [len(g) for g in expected.groups]:
        listed = any(groups)
        text = f"groups of {here} parameters here and {there} there" if listed else "the groups here list no parameters"
        verdict: ResumeVerdict = "DOES NOT FIT" if listed else "not known"
        yield ResumeRow("optimizer groups", verdict, f"{text}; {known}", _give_names())
        text = f"{plural(len(saved.state), 'state')} by number, and no number has its place in the new optimizer"
        yield ResumeRow("optimizer state", "not known", text, _give_names())
        return
    numbered = {str(key) if str(key).startswith(UNNAMED) else f"{UNNAMED}{key}": v for key, v in saved.state.items()}
    by_name = {**numbered, **{str(key): slots for key, slots in saved.state.items()}}
    old = [name for group in saved.param_groups for name in group.names]
    new = [name for group in groups for name in group]
    places = list(zip(old, new, (name for group in expected.groups for name in group), strict=True))
    row = _state(saved, {wanted: by_name[name] for name, _, wanted in places if name in by_name}, expected)
    sizes = f"{plural(len(groups), 'group')} of {here} parameters"
    moved = [
        f"number {n} is {name} here and {wanted} there"
        for n, (_, name, wanted) in enumerate(places)
        if not name.startswith(UNNAMED) and name != wanted
    ]
    if row.verdict != "fits" or moved:
        text = f"{sizes} here and there; {known}" + (f"; by shape or order {few(moved, MAX_NAMED)}" if moved else "")
        yield ResumeRow("optimizer groups", "not known", text, _give_names())
        yield row if row.verdict != "fits" else row._replace(verdict="not known", next=_give_names())
        return
    lacking = _settings_lacking(saved, expected)
    text = f"by number, as torch loads them: {sizes}" + (f"; {lacking}" if lacking else "")
    yield ResumeRow("optimizer groups", "worth a look" if lacking else "fits", text)
    same = "their shapes agree at every place; two of one shape that changed places would not show"
    yield row._replace(detail=f"by number: {row.detail}, {same}")


def _groups(saved: Optimizer, groups: list[list[str]], expected: OptimizerShapes) -> ResumeRow:
    here, there = (", ".join(str(len(group)) for group in side) for side in (groups, expected.groups))
    if saved.state and not any(groups):
        return ResumeRow("optimizer groups", "not known", "the groups here list no parameters")
    if len(groups) != len(expected.groups):
        text = f"{plural(len(groups), 'group')} here (of {here}), {len(expected.groups)} there (of {there})"
        return ResumeRow("optimizer groups", "DOES NOT FIT", text)
    for number, (mine, theirs) in enumerate(zip(groups, expected.groups, strict=True)):
        if set(mine) != set(theirs):
            sides = {"here": [n for n in mine if n not in theirs], "there": [n for n in theirs if n not in mine]}
            only = [f"only {side}: {few(names, MAX_NAMED)}" for side, names in sides.items() if names]
            return ResumeRow("optimizer groups", "DOES NOT FIT", f"group {number}: {'; '.join(only)}")
    if saved.naming.by != "fqn" and groups != [list(g) for g in expected.groups]:
        text = "the parameters have another order, and the state goes by number: moments would go to other parameters"
        return ResumeRow("optimizer groups", "DOES NOT FIT", text, f"{CONVERT} --layout flat keys it by name")
    if lacking := _settings_lacking(saved, expected):
        return ResumeRow("optimizer groups", "worth a look", f"{plural(len(groups), 'group')} of {here}; {lacking}")
    return ResumeRow("optimizer groups", "fits", f"{plural(len(groups), 'group')} of {here} parameters")


def _settings_lacking(saved: Optimizer, expected: OptimizerShapes) -> str:
    """Name the hyperparameters that only the new optimizer's groups have; "" for none."""
    lacking = [
        f"group {n} lacks {few(sorted(more), MAX_NAMED)}"
        for n, (group, known) in enumerate(zip(saved.param_groups, expected.settings, strict=True))
        if (more := known - {str(key) for key in group})
    ]
    return f"{few(lacking, MAX_NAMED)}, which the new optimizer has" if lacking else ""


def _state(saved: Optimizer, state: Mapping[str, Mapping[str, Any]], expected: OptimizerShapes) -> ResumeRow:
    """Compare the saved state of each parameter, by its name in the new optimizer, with the state that one keeps."""
    wanted = expected.slots
    if wanted is None:
        return ResumeRow("optimizer state", "not known", f"what {expected.name} keeps is not known before it has run")
    without = [name for name in wanted if name not in state]
    if without:
        text = (
            f"{plural(len(without), 'parameter')} without state, which would begin at zero: {few(without, MAX_NAMED)}"
        )
        return ResumeRow("optimizer state", "DOES NOT FIT", text)
    slots = {slot for one in wanted.values() for slot in one}
    here = {str(slot) for parameter in wanted for slot, value in state[parameter].items() if value is not None}
    if slots != here:
        sides = (("here", here - slots), ("there", slots - here))
        only = "; ".join(f"only {side}: {few(sorted(some))}" for side, some in sides if some)
        return ResumeRow("optimizer state", "DOES NOT FIT", f"{saved.name} here, {expected.name} there: {only}")
    odd = [
        f"{parameter}.{slot}"
        for parameter, shapes in wanted.items()
        for slot, shape in shapes.items()
        if isinstance(value := state[parameter].get(slot), Tensor) and prod(shape) > 1 and value.shape != shape
    ]
    if odd:
        text = f"{plural(len(odd), 'shape')} differ: {few(odd, MAX_NAMED)}"
        return ResumeRow("optimizer state", "DOES NOT FIT", text)
    text = f"{', '.join(sorted(slots)) or 'none'} of {plural(len(wanted), 'parameter')}"
    return ResumeRow("optimizer state", "fits", text)


# -- ranks -------------------------------------------------------------------------------------------------------------


def _ranks(ck: Checkpoint, world_size: int) -> ResumeRow:
    saved = ck.world_size.exact
    if not isinstance(saved, int):
        return ResumeRow("ranks", "not known", "the checkpoint does not say how many ranks saved it")
    if saved == world_size:
        return ResumeRow("ranks", "fits", f"{plural(saved, 'rank')} saved it")
    text = f"{plural(saved, 'rank')} saved it, {plural(world_size, 'rank')} would load it"
    if ck.format in OWN_FILES:
        return ResumeRow("ranks", "DOES NOT FIT", f"{text}; each reads the file of its own rank", CONVERT)
    return ResumeRow("ranks", "fits" if ck.format == "dcp" else "not known", text)


def _random_states(ck: Checkpoint, world_size: int) -> Iterator[ResumeRow]:
    with OpenFiles() as files:
        states = random_states(ck, files)
    for stream, by_rank in states.items():
        owners = {rank for rank in by_rank if isinstance(rank, int)}
        if owners != by_rank.keys() or len(owners) != ck.world_size.exact:
            text = f"{plural(len(by_rank), 'state')}, which are not one for each rank that saved them"
            yield ResumeRow(f"rng {stream}", "fits" if world_size == ck.world_size.exact else "not known", text)
            continue
        gone, lacking = owners - set(range(world_size)), set(range(world_size)) - owners
        facts = [f"{named_ranks(lacking)} would have no state"] if lacking else []
        facts += [f"those of {named_ranks(gone)} would be lost"] if gone else []
        verdict: ResumeVerdict = "DOES NOT FIT" if lacking else "worth a look" if gone else "fits"
        yield ResumeRow(
            f"rng {stream}", verdict, "; ".join(facts) or f"a state for each of {plural(world_size, 'rank')}"
        )


def torch_row(ck: Checkpoint) -> ResumeRow:
    """Whether the installed torch, which is imported, has the classes and fields that the files name."""
    lacking = names_that_torch_lacks(ck.names)
    if not lacking:
        return ResumeRow("torch", "fits", f"torch {torch_version()} has every class that the files name")
    if any(name.endswith(f".{STRIDES}") for name in lacking):
        where = ".metadata has" if ck.format == "dcp" else "the files have"
        text = f"{where} tensor properties with strides, as torch 2.15 writes them"
        text = f"{text}; torch {torch_version()} here cannot read them (pytorch#194251)"
        return ResumeRow("torch", "DOES NOT FIT", text, CONVERT)
    text = f"torch {torch_version()} has no {few(lacking, MAX_NAMED)}, which the files name (pytorch#194251)"
    return ResumeRow("torch", "DOES NOT FIT", text, CONVERT)
