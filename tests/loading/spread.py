"""Ranks that train, write checkpoints of many kinds with one content, load each in many layouts, and train on.

Each function is called in every rank of a world. A folder gets `middle.pt` and `end.pt`, the whole state after three
and after six steps of a run that was not stopped, `middle.dcp` for torch itself, `sources/`, and for each target
a JSON: what differed.

All runs have two shares of the data. Where four ranks are in rows of two, a row is a share. A sum of two equal
gradients is exact, so that data parallel runs of two and of four ranks have the same bits. Tensor parallel computes in
another order; it is compared with a run of its own that torch itself filled with `middle.dcp`.
"""

from __future__ import annotations

import dataclasses
import json
import warnings
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import ckptools
from ckptools.training import layouts
from ckptools.training.model import (
    TIED,
    Position,
    Transformer,
    batches,
    decayed_names,
    make_loader,
    make_optimizer,
    make_scheduler,
    seed_all,
    trained_names,
)
from ckptools.training.options import CreateOptions, ModelSize, ParallelOptions
from ckptools.training.run import Run, full_state, prepare, train_step
from tools.demo import same, tensors

SIZE = ModelSize(vocab=31, width=20, layers=2, context=7)
SHARES, STEPS = 2, 3


@dataclass(frozen=True)
class Source:
    """A checkpoint to load from.

    Attributes:
        strategy: of the run that writes it.
        layout: in which `create` writes it, or the name of an output of `consolidate` of it.
        world_size: ranks that write it.
        parallel: choices of the strategy.
        needs: what a user has to tell: `shapes`, or to `dcp.load` the `names` of the optimizer's parameters.
        complete: whether it has the optimizer; else only the weights are loaded.
    """

    strategy: str
    layout: str
    world_size: int
    parallel: dict[str, Any] = field(default_factory=dict)
    needs: str = ""
    complete: bool = True

    @property
    def name(self) -> str:
        return "-".join([self.strategy, *map(str, self.parallel.values()), self.layout])


def asked(folder: Path, strategy: str, **parallel: Any) -> CreateOptions:
    return CreateOptions(folder, strategy, batch=4, size=SIZE, parallel=ParallelOptions(**parallel)).completed()


def begin() -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    dist.init_process_group("gloo")


def end() -> None:
    dist.barrier()
    dist.destroy_process_group()


def prepared(options: CreateOptions) -> Run:
    return prepare(options, lambda line: None)


def go_on(run: Run, done: int) -> None:
    """Take three steps after those that are done; ranks of a row have the same data and draw the same numbers."""
    share = dist.get_rank() * SHARES // dist.get_world_size()
    loader = make_loader(asked(run.options.out, "ddp"), share, SHARES)
    seed_all(100 * done + share)
    for tokens, position in islice(batches(loader, Position()), done, done + STEPS):
        train_step(run, tokens)
        run.step, run.position = run.step + 1, position


def train_on(folder: Path) -> None:
    """Be one of two ranks of the run that is not stopped."""
    begin()
    run = prepared(asked(folder, "fsdp2"))
    for name, done in (("middle.pt", 0), ("end.pt", STEPS)):
        go_on(run, done)
        state = {**full_state(run), "scheduler": run.scheduler.state_dict(), "position": run.position}
        if dist.get_rank() == 0:
            torch.save(state, folder / name)
        if done == 0:
            dcp.save(state_of(run), checkpoint_id=folder / "middle.dcp")
    del run
    end()


# -- checkpoints with the content of `middle.pt` -----------------------------------------------------------------------


def middle_of(folder: Path) -> dict[str, Any]:
    state: dict[str, Any] = torch.load(folder / "middle.pt", weights_only=False)
    return state


FLATTENED = StateDictOptions(flatten_optimizer_state_dict=True)


def state_of(run: Run) -> dict[str, Any]:
    optimizer = get_optimizer_state_dict(run.model, run.optimizer, options=FLATTENED)
    return {"model": get_model_state_dict(run.model), "optimizer": optimizer}


def filled_by_torch(run: Run, folder: Path) -> None:
    """Put a run where the first run was, without ckptools."""
    state = state_of(run)
    dcp.load(state, checkpoint_id=folder / "middle.dcp")
    set_model_state_dict(run.model, state["model"])
    set_optimizer_state_dict(run.model, run.optimizer, state["optimizer"], options=FLATTENED)
    middle = middle_of(folder)
    run.scheduler.load_state_dict(middle["scheduler"])
    run.step, run.position = STEPS, middle["position"]


def write(folder: Path, sources: list[Source]) -> None:
    """Be one rank of runs that are put where the first run was, and write what they have."""
    begin()
    for source in sources:
        options = asked(folder, source.strategy, **source.parallel)
        run = prepared(dataclasses.replace(options, layout=source.layout))
        filled_by_torch(run, folder)
        out = folder / "sources" / source.name
        out.mkdir(parents=True, exist_ok=True)
        layouts.SAVE[source.layout](run, out)
        dist.barrier()
        del run
    end()


# -- loading in every layout -------------------------------------------------------------------------------------------


def load_all(folder: Path, target: str, sources: list[Source]) -> None:
    """Be one rank of a run in the layout of the target, and begin it with each source."""
    begin()
    middle, last = middle_of(folder), torch.load(folder / "end.pt", weights_only=False)
    if target == "fsdp2-tp":
        run = prepared(asked(folder, target))
        filled_by_torch(run, folder)
        go_on(run, STEPS)
        last = full_state(run)
    found = {source.name: loaded(folder, target, source, middle, last) for source in sources}
    if dist.get_rank() == 0:
        (folder / f"{target}.json").write_text(json.dumps(found))
    end()


def loaded(
    folder: Path, target: str, source: Source, middle: dict[str, Any], last: dict[str, Any]
) -> dict[str, list[str]]:
    """What differs when a source was loaded, and three steps later."""
    path = folder / "sources" / source.name
    by_hand = target in ("fsdp2", "hsdp")
    given: dict[str, Any] = {}
    if source.needs == "shapes":
        given["shapes"] = Transformer(SIZE)
    elif source.needs == "names" and by_hand:
        given["names"] = trained_names("AdamW", Transformer(SIZE))
    if target == "meta":
        run = loaded_on_meta(folder, path, source.complete, given)
    else:
        # With another seed, so that what is not loaded differs.
        run = prepared(dataclasses.replace(asked(folder, target), seed=9))
        fill = by_dcp_load if by_hand else by_load
        fill(run, path, source.complete, given)
    put = differing(full_state(run), middle, source.complete)
    if not source.complete:
        return {"put": put}
    run.scheduler.load_state_dict(middle["scheduler"])
    go_on(run, STEPS)
    return {"put": put, "after": differing(full_state(run), last, True)}


def by_load(run: Run, path: Path, complete: bool, given: dict[str, Any]) -> None:
    found = ckptools.load(run.model, path, run.optimizer if complete else None, **given)
    assert not found.kept, found.kept


def by_dcp_load(run: Run, path: Path, complete: bool, given: dict[str, Any]) -> None:
    """Load as a script does that knows DCP, without `ckptools.load`."""
    reader = ckptools.StorageReader(path, **given)
    model = get_model_state_dict(run.model)
    state: dict[str, Any] = {"model": {k: v for k, v in model.items() if k not in TIED or reader.has(f"model.{k}")}}
    if complete:
        state["optimizer"] = get_optimizer_state_dict(run.model, run.optimizer)
    dcp.load(state, storage_reader=reader)
    set_model_state_dict(run.model, state["model"], options=StateDictOptions(strict=False))
    if complete:
        set_optimizer_state_dict(run.model, run.optimizer, state["optimizer"])


def loaded_on_meta(folder: Path, path: Path, complete: bool, given: dict[str, Any]) -> Run:
    """FSDP2 of a model without memory, which gets this rank's shards alone; then its optimizer."""
    run = prepared(asked(folder, "fsdp2"))
    with torch.device("meta"):
        model = Transformer(SIZE)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for module in [*model.blocks.values(), model]:
        fully_shard(module, mesh=mesh)
    ckptools.load(model, path, **given)
    assert model.head is not None and model.head.weight is model.emb.weight
    optimizer = make_optimizer("AdamW", model.named_parameters(), decayed_names(model))
    run = dataclasses.replace(
        run, model=model, optimizer=optimizer, scheduler=make_scheduler("cosine", optimizer, run.options.steps)
    )
    by_load(run, path, complete, given)
    return run


def differing(found: dict[str, Any], truth: dict[str, Any], complete: bool) -> list[str]:
    """Names of tensors and of hyperparameters that are not bit for bit the same."""
    parts = ("model", "optimizer") if complete else ("model",)
    one, other = (dict(tensors({part: state[part] for part in parts})) for state in (found, truth))
    names = sorted(one.keys() ^ other.keys()) + [n for n in one if n in other and not same(one[n], other[n])]
    groups = [hyperparameters(state["optimizer"]) if complete else {} for state in (found, truth)]
    return names + [fqn for fqn in groups[1] if groups[0].get(fqn) != groups[1][fqn]]


def hyperparameters(optimizer: dict[str, Any]) -> dict[str, Any]:
    return {fqn: {**group, "params": None} for group in optimizer["param_groups"] for fqn in group["params"]}
