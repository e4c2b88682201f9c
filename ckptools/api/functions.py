"""The functions of `ckptools` that take a checkpoint or its path, such as `verify` and `diff`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import update_wrapper
from inspect import signature
from pathlib import Path
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, Protocol, TypeVar

from ckptools.errors import in_python
from ckptools.files.opening import check_path
from ckptools.model.checkpoint import Checkpoint
from ckptools.tensor_io.fetch_ahead import Progress

if TYPE_CHECKING:
    from ckptools.diff.record import Difference
    from ckptools.doctor.answers import Diagnosis
    from ckptools.formats.options import Reader, Weights
    from ckptools.formats.shared.given_names_and_shapes import NamesFrom, ShapesFrom
    from ckptools.ls.record import RunFolder


# -- opening a checkpoint, or listing those of a run -------------------------------------------------------------------


@in_python
def open(
    path: str | Path | Sequence[str | Path],
    *,
    all_ranks: bool = False,
    only_this_file: bool = False,
    follow_symlinks: bool = False,
    read_file: Reader | None = None,
    jobs: int | None = None,
    shapes: ShapesFrom | None = None,
    weights: Weights = "fp32",
    rules: str | Path | None = None,
    ranks: str | None = None,
    names: NamesFrom | None = None,
    salvage: bool = False,
) -> Checkpoint:
    """Open a checkpoint: its structure, none of its tensor values. Runs nothing that the file names.

    Args:
        path: a rank file (its siblings are found), a folder of rank files, any torch.save file; or several rank
            files, by any name, which together are the checkpoint.
        all_ranks: read every rank's structure now; otherwise the others are read when something needs them.
        only_this_file: do not look for siblings.
        follow_symlinks: accept siblings that are links out of the folder.
        read_file: what reads one file; the inert reader unless torch's is asked for.
        jobs: processes that read rank files, from 16 files on; None for as many as there are cores, where the files
            take a while.
        shapes: the source of shapes that the checkpoint lacks (FSDP1 flat parameters): another checkpoint, a folder
            of safetensors, a JSON of name to shape, or the `nn.Module` before it was wrapped.
        weights: where the model is stored twice, `fp32` (master copy) or `module`.
        rules: a JSON file that says how tensor-parallel weights are joined.
        ranks: what the rank files in the folder `path` are called, such as `model-{rank}-of-{world}.pt`.
        names: what names the parameters of an optimizer that is keyed by number: a checkpoint that keeps the module's
            order, a JSON list in the optimizer's order, such a list itself, or the `nn.Module`.
        salvage: read a `.pt` that is cut short up to the cut; what is behind it is a gap, and it is not whole.

    Raises:
        ReadError: it cannot be read as what it claims to be.
        UnknownFormatError: no format recognises it.
        UsageError: a folder holds several checkpoints; or names are given that nothing here needs.
        RefusedError: names are given that do not fit.
    """
    given = locals()  # the arguments, and nothing else yet
    from ckptools.formats.open import open_checkpoint
    from ckptools.formats.shards_of_other_ranks import with_other_ranks
    from ckptools.training_state import modules

    given["read_file"] = read_file or modules.read_file
    return with_other_ranks(open_checkpoint(**given))


@in_python
def checkpoints_in(
    folder: str | Path,
    *,
    deep: bool = False,
    follow_symlinks: bool = False,
    jobs: int | None = None,
    shapes: str | Path | None = None,
    weights: Weights = "fp32",
    rules: str | Path | None = None,
    names: NamesFrom | None = None,
    salvage: bool = False,
    on_found: Callable[[Path], None] | None = None,
) -> RunFolder:
    """The checkpoints of a run, the newest first, with `.newest_whole` to open; as a table: `.to_dicts()`.

    Each is looked into as `open` does, whose arguments these are. Every rank of the newest is read, and of older ones
    until one is whole; `deep` compares their checksums too. `on_found` is called with each that was looked into.

    Raises:
        UnknownFormatError: no checkpoint is in it.
        ReadError: it cannot be listed.
        UsageError: it is no folder.
    """
    given = locals()  # the arguments, and nothing else yet
    from ckptools.ls import rows

    return rows.checkpoints_in(**given)


# -- functions of a checkpoint or its path -----------------------------------------------------------------------------


P = ParamSpec("P")
R_co = TypeVar("R_co", covariant=True)


class _OfPath(Protocol[P, R_co]):
    def __call__(self, checkpoint: Checkpoint | str | Path, *args: P.args, **kwargs: P.kwargs) -> R_co: ...


def _opened(checkpoint: Checkpoint | str | Path) -> Checkpoint:
    if isinstance(checkpoint, Checkpoint):
        return checkpoint
    check_path(checkpoint)
    return open(checkpoint, all_ranks=True)


def _of_path(method: Callable[Concatenate[Checkpoint, P], R_co]) -> _OfPath[P, R_co]:
    """A method of a checkpoint as a function that takes the path of one too."""

    def function(checkpoint: Checkpoint | str | Path, *args: P.args, **kwargs: P.kwargs) -> R_co:
        return method(_opened(checkpoint), *args, **kwargs)

    update_wrapper(function, method)
    shown = signature(method)
    first, *others = shown.parameters.values()
    first = first.replace(name="checkpoint", annotation="Checkpoint | str | Path")
    function.__signature__ = shown.replace(parameters=[first, *others])  # type: ignore[attr-defined]
    function.__qualname__ = function.__name__
    return function


verify = _of_path(Checkpoint.verify)
report = _of_path(Checkpoint.report)
consolidate = _of_path(Checkpoint.consolidate)
stats = _of_path(Checkpoint.stats)
match = _of_path(Checkpoint.match)


@in_python
def diff(
    a: Checkpoint | str | Path,
    b: Checkpoint | str | Path,
    *,
    values: bool = False,
    rtol: float | None = None,
    atol: float | None = None,
    every_byte: bool = False,
    filter: str | Iterable[str] = (),
    exclude: str | Iterable[str] = (),
    section: str = "",
    jobs: int | None = None,
    progress: Progress | None = None,
) -> Difference:
    """Compare two checkpoints, of any formats and world sizes; layouts are shown, and are no difference.

    Without further arguments keys, shapes, dtypes and plain values are compared: step, lr, param groups, scheduler,
    random states, position in the data.

    Args:
        a: a checkpoint, its path, or that of a file that `Checkpoint.write_digests` wrote.
        b: another one.
        values: compare the values of tensors too, bit for bit: NaN equals NaN of the same bits alone. Tensors of two
            dtypes are compared by value, in float64.
        rtol: relative tolerance: what is no further apart than `atol + rtol * |b|` is within it, whatever the dtypes.
        atol: absolute tolerance.
        every_byte: read also shards of which both sides state the same CRC-32.
        filter: only keys that match one of these globs.
        exclude: no keys that match one of these.
        section: only one section: its kind, or its name on either side.
        jobs: threads.
        progress: called with bytes read and the tensor they are of.

    Raises:
        ReadError: one of them cannot be opened.
        UsageError: neither has such a section or key, or a tolerance is negative.
    """
    from ckptools.diff.compare import Wanted, compare, side_of
    from ckptools.keys.entries import Selection

    wanted = Wanted(values, rtol, atol, every_byte, Selection.given(filter, exclude, section), jobs)
    return compare(side_of(a), side_of(b), wanted, progress)


@in_python
def doctor(
    path: str | Path | Sequence[str | Path],
    to: Any = None,
    *,
    deep: bool = False,
    only_this_file: bool = False,
    follow_symlinks: bool = False,
    jobs: int | None = None,
    shapes: str | Path | None = None,
    weights: Weights = "fp32",
    rules: str | Path | None = None,
    ranks: str | None = None,
    names: NamesFrom | None = None,
    salvage: bool = False,
) -> Diagnosis:
    """Answer the first questions about a checkpoint, with what says so, and with what to type next.

    It asks `verify`, `checkpoints_in` and, with `to`, `match`. What cannot be opened has an answer too.

    The arguments are those of `open`; of a folder of several the newest whole one is looked at. `to` is what it should
    load into, as `Checkpoint.match` takes it; None leaves that out. `deep` reads every byte, for checksums and values.

    Raises:
        UsageError: options that do not fit together.
        ReadError: `to` cannot be read.
    """
    given = locals()  # the arguments, and nothing else yet
    from ckptools.doctor.examination import examined

    return examined(**given)
