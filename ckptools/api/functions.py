"""The functions of `ckptools` that take a checkpoint or its path, such as `verify` and `diff`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import update_wrapper
from inspect import signature
from pathlib import Path
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, Protocol, TypeVar

from ckptools.files.opening import check_path
from ckptools.model.checkpoint import Checkpoint
from ckptools.option import in_python
from ckptools.tensor_io.fetch_ahead import Progress

if TYPE_CHECKING:
    from ckptools.diff.record import Difference
    from ckptools.doctor.answers import Diagnosis
    from ckptools.formats.options import Reader, Weights
    from ckptools.formats.shared.given_names_and_shapes import NamesFrom, ShapesFrom
    from ckptools.ls.record import RunFolder


# -- open a checkpoint, or list the checkpoints of a run --------------------------------------------------------------


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
    step: int | None = None,
    model: str | None = None,
) -> Checkpoint:
    """Open a checkpoint: read its structure, but no tensor values, and run no code that the file names.

    Args:
        path: a rank file (its siblings are found), a folder of rank files, any torch.save file; or several rank files
            with any names that together are the checkpoint.
        all_ranks: read every rank's structure now; otherwise other ranks are read when needed.
        only_this_file: do not look for siblings.
        follow_symlinks: accept siblings that are links out of the folder.
        read_file: function that reads one file; by default the inert reader, which does not use torch.
        jobs: processes that read rank files, from 16 files on; None for one per core, if the files take a while.
        shapes: source of shapes that the checkpoint lacks (FSDP1 flat parameters): another checkpoint, a folder of
            safetensors, a JSON of name to shape, or the `nn.Module` before it was wrapped.
        weights: if the model is stored twice, `fp32` (master copy) or `module`.
        rules: a JSON file that says how to join tensor-parallel weights.
        ranks: pattern of the rank files' names in the folder `path`, such as `model-{rank}-of-{world}.pt`.
        names: source of names for the parameters of an optimizer that is keyed by number: a checkpoint that keeps the
            module's order, a JSON list in the optimizer's order, such a list itself, or the `nn.Module`.
        salvage: read a truncated `.pt` as far as possible; the rest is a gap, and the checkpoint is not whole.
        step: if `path` is the folder of a run, open the checkpoint of this step; a path that is one checkpoint must be
            of this step.
        model: the model to look at, where there are several: the name of its section, its role (`ema`, `teacher`), or
            `all`; by default the trained one. `ck.model`, `match`, `stats`, `diff` and `consolidate` look at it.

    Raises:
        ReadError: the file cannot be read in the format that it claims to have.
        UnknownFormatError: no format recognises the path.
        UsageError: the folder holds several checkpoints and no `step` was given, or not exactly one of them is of this
            step; or `names` are given that nothing needs.
        RefusedError: `names` do not fit the optimizer.
    """
    given = locals()  # only the arguments so far
    from ckptools.formats.open import open_checkpoint
    from ckptools.formats.shards_of_other_ranks import with_other_ranks

    del given["step"]
    if read_file is None:
        del given["read_file"]
    if step is None:
        return with_other_ranks(open_checkpoint(**given))
    from ckptools.ls.one_of_run import check_step, paths_of_step

    given["path"] = paths_of_step(path, step, **{name: value for name, value in given.items() if name != "path"})
    return with_other_ranks(check_step(open_checkpoint(**given), step))


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
    """List the checkpoints of a run, the newest first, with `.newest_whole` to open; `.to_dicts()` makes a table.

    Each is opened as by `open`, which explains the arguments. The newest is verified with all ranks, then older ones
    until one is whole; `deep` also compares their checksums. `on_found` is called with the path of each opened
    checkpoint.

    Raises:
        UnknownFormatError: the folder holds no checkpoint.
        ReadError: the folder cannot be listed.
        UsageError: the path is not a folder.
    """
    given = locals()  # only the arguments so far
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
    """Make a function from a method of `Checkpoint`; it also accepts the path of a checkpoint."""

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
    """Compare two checkpoints of any formats and world sizes; how tensors are sharded does not count as a difference.

    Without further arguments, keys, shapes, dtypes and plain values are compared: step, lr, param groups, scheduler,
    random states, position in the data.

    Args:
        a: a checkpoint, its path, or the path of a digest file that `Checkpoint.write_digests` wrote.
        b: another one.
        values: also compare the values of tensors, bit for bit, so that NaN equals only NaN with the same bits. Tensors
            of different dtypes are compared by value, in float64.
        rtol: relative tolerance: values are within it if they differ by at most `atol + rtol * |b|`, whatever the
            dtypes.
        atol: absolute tolerance.
        every_byte: also read shards for which both sides state the same CRC-32.
        filter: only keys that match one of these globs.
        exclude: no keys that match one of these globs.
        section: only one section, by its kind or its name on either side.
        jobs: threads.
        progress: called with a number of bytes read and the name of their tensor.

    Raises:
        ReadError: one of them cannot be opened.
        UsageError: neither has the selected section or keys, or a tolerance is negative.
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
    step: int | None = None,
    model: str | None = None,
) -> Diagnosis:
    """Say whether a checkpoint is whole, the newest of its run, loadable and in step; propose the next commands.

    The answers come from `verify`, `checkpoints_in` and, with `to`, `match`. A path that cannot be opened is diagnosed
    too.

    `open` explains the other arguments; in a folder of several checkpoints, the newest whole one is opened. `to` is the
    model to load into, as for `Checkpoint.match`; None skips that question. `deep` reads every byte, for checksums and
    values.

    Raises:
        UsageError: options contradict each other.
        ReadError: `to` cannot be read.
    """
    given = locals()  # only the arguments so far
    from ckptools.doctor.examination import examined

    return examined(**given)
