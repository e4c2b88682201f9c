"""The way out of a cause: what to do about each kind of problem, with what the ranks have where they differ."""

from __future__ import annotations

from collections.abc import Sequence

from ckptools.errors import SAVE_FAILED
from ckptools.model.problems import Code, Differing, Problem
from ckptools.text import and_more, named_ranks, plural

ORIGIN = "where it was saved"
AGAIN = f"copy {{files}} again from {ORIGIN}"
WHICH_COPY = "; verify --deep finds a damaged copy, --prefer-rank takes one"
AFTER_DEEP = "; --prefer-rank takes one"
"""The same where every copy was just read."""
BACK = "consolidate again once the files that were lost are back"
EARLIER = "go back to an earlier checkpoint"
REMEDIES = {
    Code.FILE_MISSING: "put {files} beside the others; --allow-missing writes what is whole",
    Code.FILE_CUT: f"{AGAIN}; --allow-missing writes what is whole",
    Code.ODD_FILE_SIZE: f"compare its size with the one where it was saved; if that differs, {AGAIN}",
    Code.BAD_CHECKSUM: f"{AGAIN}; --allow-missing leaves out what is damaged",
    Code.VALUE_LOST: f"{AGAIN}; --allow-missing leaves out what is damaged",
    Code.MIXED_SAVES: f"put the files of one save together: {AGAIN}",
    Code.METADATA_CONTRADICTS: "copy the metadata again from where it was saved",
    Code.LEFT_OVER: "delete it, once no process writes there",
    Code.STRAY_FILE: "move what does not belong here away; give files that changed places their names back",
    Code.NAME_CONTRADICTS: "rename what has the wrong name, if you trust the content",
    Code.ONE_OF_SEVERAL: "open its files together, by their folder; `ckptools formats` lists what is joined",
    Code.MANIFEST_DIFFERS: f"{AGAIN}, or write the manifest anew",
    Code.FILE_UNREADABLE: "make {files} readable",
    Code.TRACKER_ASTRAY: "let the tracker name the newest whole checkpoint: ckptools ls",
    Code.NEVER_WRITTEN: f"{AGAIN}; --allow-missing leaves out what was never written",
    Code.FILE_CONTRADICTS: "put the data files back under the names that they had, or copy {files} again",
    Code.FILLED: BACK,
    Code.LEFT_OUT: BACK,
    Code.ORIGIN_UNREADABLE: "consolidate again",
    Code.NAMED_AS_ANOTHER_RANK: "give {files} the names of the ranks that they hold; consolidate goes by the content",
    Code.TENSOR_GAP: "find the file that holds it; --allow-missing leaves it out, or fills it with --fill",
    Code.TENSOR_OVERLAP: "put the files of one save together",
    Code.WORLD_SIZES_DISAGREE: "put the files of one save together",
    Code.LAYOUT_DISAGREES: f"put the files of one save together: {AGAIN}",
    Code.COPIES_DIFFER: f"{AGAIN}{WHICH_COPY}",
    Code.TENSOR_NOT_JOINED: "give what the message names; --allow-missing leaves such tensors out",
    Code.MODEL_PART_MISSING: "put the missing part beside it",
    Code.PLACEHOLDERS: "consolidate the folder of ZeRO-3's rank files; to save a model, gather its parameters first"
    " (stage3_gather_16bit_weights_on_model_save)",
    Code.SIZE_UNSTATED: "give the shapes with --shapes FROM, or --allow-missing if you know that no rank is missing",
    Code.NOT_FINITE: EARLIER,
    Code.ZEROS: EARLIER,
    Code.VALUES_ODD: "compare with an earlier checkpoint: ckptools diff --values",
    Code.NO_OPTIMIZER_STATE: "freeze it when you resume, or expect its moments to begin at zero",
    Code.STEPS_DISAGREE: "compare with an earlier checkpoint: ckptools diff",
    Code.LEARNING_RATES_DISAGREE: "set the learning rate by hand when you resume",
    Code.RNG_STATES_EQUAL: "seed each rank anew when you resume",
    Code.PARAM_GROUPS: "correct the param groups before the optimizer is loaded",
    Code.OPTIMIZER_STATE_SHAPE: EARLIER,
    Code.OPTIMIZER_STATE_UNNAMED: "give the names with --names",
    Code.UNSAFE_NAME: "do not load it with torch.load(weights_only=False); ckptools runs nothing of it",
}
"""The way out of a cause; `{files}` stands for the files of its ranks."""

WITHOUT_MAJORITY = {
    Code.MIXED_SAVES: "put the files of one save together: {values}",
    Code.COPIES_DIFFER: f"find out which is right: {{values}}{WHICH_COPY}",
}
"""The way out where ranks have different values, and no value has a majority; `{values}` stands for them."""

MAX_DIFFERING = 3
"""Values that differ, in a way out."""


def remedy_of(kind: Code, group: Sequence[Problem]) -> str:
    """The way out of problems of one kind with one cause; "" where none is known."""
    ranks = {rank for p in group for rank in p.all_ranks}
    several = len(ranks or {name for p in group for name in p.files}) > 1
    files = f"the file{'s' if several else ''}" + (f" of {named_ranks(ranks)}" if ranks else "")
    values = _values(group)
    remedy = (WITHOUT_MAJORITY if values and not ranks else REMEDIES).get(kind, "")
    if any(p.differing and p.differing.plain for p in group):
        remedy = remedy.removesuffix(WHICH_COPY)
    if kind is Code.FILE_CUT and all(SAVE_FAILED in p.message for p in group):
        remedy = f"{EARLIER}, as ckptools ls lists them; --allow-missing writes what is whole"
    if kind is Code.NEVER_WRITTEN and all(p.severity == "warning" for p in group):  # zeros are written as they are
        remedy = AGAIN
    if kind is Code.STRAY_FILE and all(p.severity == "warning" for p in group):
        remedy = f"compare {{files}} with {ORIGIN}, and move away a file that does not belong here"
    if kind is Code.FILE_MISSING and len(ranks) * 2 > max(ranks, default=0) + 1 > 2:  # most of them are not here
        files = f"the other {plural(len(ranks), 'rank file')}"
        remedy = remedy.replace("the others", "what is here")
    origin = "where they were saved" if several else ORIGIN
    return remedy.replace(ORIGIN, origin + (": {values}" if values else "")).format(files=files, values=values)


def _values(group: Sequence[Problem]) -> str:
    """What ranks have of values that differ: `its lr is 0.02, others have 0.003`; one of each set of ranks."""
    first = {p.all_ranks: p.differing for p in reversed(group) if p.differing}
    if len(first) == 1 == len({p.all_ranks for p in group}):
        (found,) = first.values()
        if found.usual and len(found.values) == 1 and not found.hidden:
            ((value, ranks),) = found.values
            return f"{'its' if len(ranks) == 1 else 'their'} {found.name} is {value}, others have {found.usual}"
    listed = [_listed(found) for _, found in sorted(first.items())]
    return "; ".join(listed[:MAX_DIFFERING]) + and_more(len(listed) - MAX_DIFFERING)


def _listed(found: Differing) -> str:
    """Say who has what, without blame: `lr is 0.003 (rank 0) or 0.02 (rank 1)`."""
    values = [f"{value} ({named_ranks(ranks)})" for value, ranks in found.values]
    values += [f"other values ({plural(found.hidden, 'more rank')})"] if found.hidden else []
    values += [f"{found.usual} (others)"] if found.usual else []
    return f"{found.name} is {' or '.join(values)}"
