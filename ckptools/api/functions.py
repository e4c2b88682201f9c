"""The functions of `ckptools` that take a checkpoint or its path, such as `verify` and `diff`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import update_wrapper
from inspect import signature
from pathlib import Path
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, Protocol, TypeVar

from ckptools.api.checkpoint import Checkpoint, side_of
from ckptools.api.opening import open
from ckptools.api.plots import Difference, with_plots
from ckptools.api.python_words import in_python
from ckptools.files.location import check_path
from ckptools.tensor_io.threads import Progress

if TYPE_CHECKING:
    from ckptools.doctor.record import Diagnosis
    from ckptools.formats.options import Weights
    from ckptools.formats.shared.given import NamesFrom

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
    from ckptools.diff.compare import Wanted, compare
    from ckptools.keys.entries import Selection

    wanted = Wanted(values, rtol, atol, every_byte, Selection.given(filter, exclude, section), jobs)
    return with_plots(compare(side_of(a), side_of(b), wanted, progress), Difference)


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
    from ckptools.api import examination

    return examination.doctor(**given)
