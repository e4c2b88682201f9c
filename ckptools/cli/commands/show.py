"""`ckptools show`: print a value in full, or a tensor with its shards."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ckptools.cli.options import AnswerOptions, OpeningOptions
from ckptools.cli.printing import answered_in_json, opened, remark, remark_private, show_answer
from ckptools.errors import UsageError
from ckptools.option import option
from ckptools.text import plural

if TYPE_CHECKING:
    from ckptools.cli.arguments import CheckpointPath, ShownKeys


def show(
    path: CheckpointPath,
    keys: ShownKeys,
    *,
    values: str | None = option(
        None,
        "Print the elements of a slice, such as '0:4,:8'; only their bytes are read.",
        common=True,
        metavar="SLICE",
    ),
    all_ranks: bool = option(
        False, "Read every rank, also of more than 64 for what all ranks should share.", common=True
    ),
    limit: int | None = option(
        None, "Show this many rows of a table; 0 for all. [default: what fits a terminal]", common=True
    ),
    private: bool = option(False, "Show also values whose names begin with '_'.", common=True),
    form: AnswerOptions,
    opening: OpeningOptions,
) -> None:
    """Show a value in full, or a tensor with its shards.

    A KEY is a name as `tree` lists it, the beginning of several (rng, optimizers.AdamW.param_groups), a kind of section
    (optimizer.param_groups), or a glob. Where ranks hold different values, each is shown with its ranks. For tensors of
    up to a million elements it adds a few statistics.

    Exit code: 0 shown, 1 a part is missing or cannot be read, 2 usage (also a key that does not exist), 3 unreadable.

    Examples:
        ckptools show PATH optimizer.param_groups
        ckptools show PATH rng --all-ranks
    """
    from ckptools.contents.show import show as shown_at
    from ckptools.contents.text import shown_text

    with answered_in_json(form.json, "ckptools/show/1", "rows", [path]):
        if limit is not None and limit < 0:
            raise UsageError(None, f"--limit {limit}: 0 is for all")
        checkpoint = opened([path], opening, all_ranks=False)
        every = None if checkpoint.all_ranks else lambda: opened([str(checkpoint.path)], opening, all_ranks=True)
        found = shown_at(checkpoint, keys, values, private, all_ranks, every)

    show_answer(form, "show", found, found.rows, shown_text, limit)
    if not (found.rows or found.private):
        remark("it has no keys")
    remark_private(found.private)
    plain = any(row.type != "tensor" for row in found.rows)
    if found.not_read and plain:
        remark(f"{plural(found.not_read, 'other rank')} not read, and may hold other values: --all-ranks")
    if found.lost and plain:
        remark(f"what {plural(found.lost, 'rank')} had is not known: files are missing or damaged (verify names them)")
    if found.problems:
        raise SystemExit(1)
