"""`ckptools create`: train for real, save a checkpoint."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ckptools.cli.printing import remark, show

if TYPE_CHECKING:
    from ckptools.training import Created

# The number of the rank in a name: `-rank3.pt`, `_rank_3.pt`, `__3_0.distcp`.
_RANK = re.compile(r"(?<=rank)\d+|(?<=rank_)\d+|(?<=^__)\d+")

Out = Annotated[Path, typer.Argument(readable=False, help="Folder for the checkpoint.")]
Strategy = Annotated[str, typer.Option(help="How the model is spread: ddp, fsdp1, fsdp2.")]
WorldSize = Annotated[int | None, typer.Option("--world-size", help="Ranks. [default: 4, or what torchrun started]")]
Steps = Annotated[int, typer.Option(help="Optimizer steps before it is saved.")]
Layout = Annotated[str, typer.Option(help="How the files are laid out: composer, snapshot, verl, dcp.")]
Seed = Annotated[int, typer.Option(help="The same seed gives the same bytes in every tensor.")]
Optimizer = Annotated[str, typer.Option(help="AdamW or DecoupledAdamW.")]
Scheduler = Annotated[str, typer.Option(help="How the learning rate moves: cosine, lambda.")]
Full = Annotated[bool, typer.Option("--full", help="Also save full.pt, the state gathered by torch itself.")]
Force = Annotated[bool, typer.Option("--force", help="Replace a checkpoint of the same name in OUT.")]
# For benchmarks: a model of any size, at little cost for training it.
Size = Annotated[int, typer.Option(hidden=True)]


def create(
    out: Out,
    strategy: Strategy = "fsdp1",
    world_size: WorldSize = None,
    steps: Steps = 5,
    layout: Layout = "composer",
    seed: Seed = 0,
    optimizer: Optimizer = "AdamW",
    scheduler: Scheduler = "cosine",
    full: Full = False,
    force: Force = False,
    vocab: Size = 257,
    width: Size = 65,
    layers: Size = 3,
    heads: Size = 5,
    context: Size = 31,
    batch: Size = 8,
    dropout: Annotated[float, typer.Option(hidden=True)] = 0.1,
) -> None:
    """Train a small transformer and save a real checkpoint.

    On the CPU. Starts the ranks itself; inside `torchrun -m ckptools create ...` it is one of them.

    Layouts: composer (ep0-ba5-rank0.pt, one file per rank; with ddp one whole file), snapshot (snapshot.pt,
    ddp only), verl (model_world_size_4_rank_0.pt and so on, not ddp), dcp (torch.distributed.checkpoint).
    """
    from ckptools import training

    options = training.CreateOptions(
        out=out,
        strategy=strategy,
        world_size=world_size,
        steps=steps,
        layout=layout,
        seed=seed,
        optimizer=optimizer,
        scheduler=scheduler,
        full=full,
        force=force,
        batch=batch,
        size=training.ModelSize(vocab, width, layers, heads, context, dropout),
    )
    created = training.create(options, verbose=True)
    if created.rank == 0:
        _tell(created)


def _tell(created: Created) -> None:
    """Say what was saved and, on stderr, what to do with it."""
    names = [path.name for path in created.files]
    saved = ", ".join(f"{created.out}/{kind}" for kind in fold(names))
    show(f"saved {saved} ({created.nbytes / 2**20:.1f} MiB)")
    remark(f"try: ckptools inspect {created.first}")


def fold(names: list[str]) -> list[str]:
    """Write the files of all ranks as one: `ep0-ba5-rank{0..3}.pt`."""
    ranks: dict[str, list[int]] = {}
    for name in names:
        found = _RANK.search(name)
        kind = name if found is None else f"{name[: found.start()]}{{}}{name[found.end() :]}"
        ranks.setdefault(kind, []).append(0 if found is None else int(found[0]))
    return [
        kind.replace("{}", f"{{{min(numbers)}..{max(numbers)}}}" if len(numbers) > 1 else str(numbers[0]))
        for kind, numbers in ranks.items()
    ]
