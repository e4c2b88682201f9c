"""A checkpoint in one line, as `repr` and the head of a notebook's table show it."""

from __future__ import annotations

from ckptools.model.checkpoint import Checkpoint
from ckptools.text import clip_middle, plural, printable, size
from ckptools.training_state.sections import measure, sections_of
from ckptools.training_state.verdict import perhaps_more, verdict_of


def checkpoint_line(ck: Checkpoint) -> str:
    """Name, step, ranks, tensors and size of a checkpoint in one line.

    Such as `<Checkpoint ep0-ba11500: step 11500, 256 ranks (whole), 1164 tensors, 75.3 GiB>`.
    """
    tensors = sum(measure(s.value).tensors for s in sections_of(ck))
    step = [] if ck.step.value is None else [f"step {ck.step.value}"]
    found = size(sum(f.nbytes for f in ck.files))
    facts = [*step, ranks_line(ck), plural(tensors, "tensor"), found]
    return f"<Checkpoint {printable(clip_middle(ck.name, 60))}: {', '.join(facts)}>"


def ranks_line(ck: Checkpoint) -> str:
    """How many ranks it has, and whether they are all there: `4 ranks (whole)`, `1 of 256 ranks`, `one file`."""
    world, here = ck.world_size.value, len(ck.ranks)
    verdict = verdict_of(ck)
    if len(ck.files) == 1 and verdict.whole:
        return "one file"
    if not isinstance(world, int) or here >= world or not any(f.status == "missing" for f in ck.files):
        parts = plural(here, "rank") if here else plural(len(ck.files), "file")
        unproven = "perhaps not all" if perhaps_more(ck.problems) else "not compared"
        return f"{parts} ({unproven if verdict.whole is None else 'whole' if verdict.whole else 'NOT WHOLE'})"
    return f"{here} of {world} ranks"
