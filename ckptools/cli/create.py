"""`ckptools create`: train for real, save a checkpoint."""

from __future__ import annotations

import inspect
import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ckptools.cli.printing import remark, show
from ckptools.cli.record_options import fill, parameters
from ckptools.training.options import CreateOptions

if TYPE_CHECKING:
    from ckptools.training import Created

# The number of the rank in a name: `-rank3.pt`, `_rank_3.pt`, `__3_0.distcp`, `random_states_3.pkl`.
_RANK = re.compile(r"(?<=rank)\d+|(?<=rank_)\d+|(?<=^__)\d+|(?<=/__)\d+|(?<=random_states_)\d+")


def create(out: Path, **given: Any) -> None:
    """Train a small transformer and save a real checkpoint.

    On the CPU. Starts the ranks itself; inside `torchrun -m ckptools create ...` it is one of them.

    Layouts: composer (ep0-ba5-rank0.pt, one file per rank; with ddp one whole file), composer-dcp (ep0-ba5/, as
    Composer saves shards since 0.16; not ddp), snapshot (snapshot.pt, ddp only), verl (model_world_size_4_rank_0.pt
    and so on, not ddp), dcp (torch.distributed.checkpoint).
    """
    from ckptools import training

    options = fill(CreateOptions, {"out": out, **given})
    created = training.create(options, verbose=True)
    if created.rank == 0:
        _tell(created)


_OUT = Annotated[Path, typer.Argument(readable=False, metavar="OUT", help="Folder for the checkpoint.")]

# The options are the fields of the record; typer asks for the signature.
create.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
    [inspect.Parameter("out", inspect.Parameter.POSITIONAL_OR_KEYWORD, annotation=_OUT), *parameters(CreateOptions)]
)


def _tell(created: Created) -> None:
    """Say what was saved and, on stderr, what to do with it."""
    names = [path.relative_to(created.out).as_posix() for path in created.files]
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
