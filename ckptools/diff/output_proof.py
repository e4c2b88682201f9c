"""An output of `consolidate` beside the checkpoint that it was made of: is every element the source's?

The tensors of the source are given the names and the form of the output (`keys/pairing`) and converted to its dtypes;
then every byte is compared. So renames, fused projections, cut vocabularies and casts are no differences, and a wrong
one is.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial

from ckptools.diff.record import Difference, Side, SubjectRow, TensorDifference, Verdict
from ckptools.diff.tensor_values import OWN_COPIES, Reading
from ckptools.dtypes import ITEMSIZE
from ckptools.errors import CkptoolsError, RefusedError
from ckptools.formats.megatron.folders import arguments
from ckptools.keys.expected_names import saved_shapes
from ckptools.keys.original import Original, original_of
from ckptools.keys.paired import Pairing
from ckptools.keys.pairing import pair
from ckptools.keys.value_digests import once
from ckptools.model.checkpoint import Checkpoint
from ckptools.model.records import Rows
from ckptools.model.regions import contiguous_strides
from ckptools.model.tensor import Tensor
from ckptools.tensor_io.fetch_ahead import in_ranks
from ckptools.tensor_io.replicas import differing_boxes
from ckptools.tensor_io.stream import tensor_bytes
from ckptools.text import few, plural
from ckptools.training_state.judgement import verdict_of
from ckptools.training_state.sections import sections_of, sections_of_kind


def is_output_of(a: Checkpoint, b: Checkpoint) -> bool:
    """Whether A says that it is the whole model of B, and both have one."""
    said = a.provenance
    if said is None or said.part != "model" or said.filled or said.more_filled or said.sources[0].name != b.name:
        return False
    return len(sections_of_kind(a, "model")) == len(sections_of_kind(b, "model")) == 1


def difference_of_output(a: Checkpoint, b: Checkpoint, sides: tuple[Side, Side], reading: Reading) -> Difference | str:
    """Compare an output with its source; or say why that is not possible.

    Raises:
        ReadError: a file of B cannot be read.
    """
    if verdict_of(a).whole is False or verdict_of(b).whole is False:
        return "one of the two is not whole"
    found = _paired(a, b, reading)
    if isinstance(found, str):
        return found
    mine = {str(n): t for n, t in sections_of_kind(a, "model")[0].value.items() if isinstance(t, Tensor)}
    names = list(found.tensors)
    rows = in_ranks(
        partial(_row, mine, found, reading), names, reading.threads, lambda name: found.tensors[name].nbytes
    )
    different = [row.name for row in rows if row.verdict != "same"]
    detail = "every element is B's" if not different else f"{few(different)}"
    verdict: Verdict = "same" if not different else "differs"
    subject = SubjectRow("weights", verdict, len(rows) - len(different), len(different), 0, detail)
    read = sum(mine[name].nbytes + found.tensors[name].nbytes for name in names)
    proof = found.proof({name: tensor.dtype for name, tensor in mine.items()})
    return Difference(
        *sides, not different, True, None, None, Rows([subject]), Rows(rows), Rows([]),
        tuple(_notes(b, found)), read, proof=proof,
    )  # fmt: skip


def _paired(a: Checkpoint, b: Checkpoint, reading: Reading) -> Pairing | str:
    model = sections_of_kind(b, "model")[0].value
    state = {str(name): once(value) for name, value in model.items() if isinstance(value, Tensor)}
    unread = next((name for name, tensor in state.items() if tensor.note), None)
    if unread is not None:
        return f"{unread}: {state[unread].note}"
    for name, value in model.items():
        if isinstance(value, Tensor) and value.has_copies and differing_boxes(value.found, reading.files):
            return f"{name}: B: {OWN_COPIES}"
    original = original_of(a) or Original(a.path, saved_shapes(a), {}, {}, {})
    why = ""
    for assume in (False, True):  # the values decide, not the rules
        try:
            return pair(state, original, arguments(b.tree), assume, b.path, reading.files)
        except RefusedError as error:
            why = why or error.reason
    return why


def _row(mine: dict[str, Tensor], found: Pairing, reading: Reading, name: str) -> TensorDifference:
    """Compare one tensor of the output, in its own dtype, with what the source makes of it."""
    one, other = once(mine[name]), found.tensors[name]
    row = TensorDifference(
        name, "weights", "same", "", ", ".join(found.sources[name]), one.shape, other.shape, one.dtype, other.dtype
    )
    try:
        at = _first_difference(
            tensor_bytes(one, one.dtype, reading.files), tensor_bytes(other, one.dtype, reading.files)
        )
    except CkptoolsError as error:
        return row._replace(verdict="cannot be compared", detail=str(error))
    reading.progress(one.nbytes + other.nbytes, name)
    if at is None:
        return row._replace(compared=one.numel, differing=0)
    element = at // ITEMSIZE[one.dtype]
    index = tuple(element // s % n for s, n in zip(contiguous_strides(one.shape), one.shape, strict=True))
    return row._replace(verdict="differs", first=index, detail="B has other values, whatever was renamed or converted")


def _first_difference(one: Iterable[bytes | memoryview], other: Iterable[bytes | memoryview]) -> int | None:
    """The first byte in which two streams differ; None if they are equal."""
    left, right = map(iter, (one, other))
    here = there = memoryview(b"")
    at = 0
    while True:
        here, there = here or memoryview(next(left, b"")), there or memoryview(next(right, b""))
        count = min(len(here), len(there))
        if not count:
            return at if here or there else None
        if here[:count] != there[:count]:
            return at + next(n for n in range(count) if here[n] != there[n])
        at, here, there = at + count, here[count:], there[count:]


def _notes(b: Checkpoint, found: Pairing) -> list[str]:
    """What was followed, and what B has besides."""
    notes = [rule.line for rule in found.rules] + [cut.line for cut in found.cut]
    others = [section.name for section in sections_of(b) if section.kind != "model" and section.name]
    notes += [f"only in B, of which A is no output: {few(others)}"] if others else []
    notes += [f"only in B: {few(list(found.left))}: {plural(len(found.left), 'tensor')}"] if found.left else []
    return notes
