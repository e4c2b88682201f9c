"""Methods about values: figures of tensors, moments beside the model, dead rows."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from ckptools.api.python_words import in_python
from ckptools.model import checkpoint as checkpoint_data
from ckptools.tensor_io.threads import Progress

if TYPE_CHECKING:
    from ckptools.keys.entries import Selection
    from ckptools.stats.record import DeadRows, Moments, Statistics, Stats


class StatisticsMethods:
    """The methods of a checkpoint that read its values for figures of them, in bounded memory."""

    def _with_all_ranks(self) -> checkpoint_data.Checkpoint:
        raise NotImplementedError

    @in_python
    def stats(
        self,
        *,
        filter: str | Iterable[str] = (),
        exclude: str | Iterable[str] = (),
        section: str | None = None,
        per_rank: bool = False,
        histogram: bool = False,
        jobs: int | None = None,
        progress: Progress | None = None,
    ) -> Statistics[Stats]:
        """Take rms, norm, extremes, mean, standard deviation, zeros, NaN and infinities of tensors, in float64.

        What cannot be read is said in the `problem` of its row. `.to_dicts()` of the answer is a table for pandas.

        Args:
            filter: globs of which a name must match one; `*` matches dots too.
            exclude: globs of which a name may match none.
            section: a kind of section, or the name of one; None for the model, if there is one.
            per_rank: a row for what each rank holds of a tensor, instead of one for all of it.
            histogram: count also how many elements lie in each of equal parts of their range, which reads them twice.
            jobs: threads.
            progress: called with bytes read and the tensor they are of.

        Raises:
            UsageError: there is no such section.
        """
        from ckptools.stats.figures import statistics
        from ckptools.stats.reading import parts_of

        ck = self._with_all_ranks()
        return statistics(
            ck.path, parts_of(ck, _selection(filter, exclude, section), per_rank), histogram, jobs, progress
        )

    @in_python
    def moments(
        self,
        *,
        filter: str | Iterable[str] = (),
        exclude: str | Iterable[str] = (),
        jobs: int | None = None,
        progress: Progress | None = None,
    ) -> Statistics[Moments]:
        """Compare Adam's moments with the parameters: how large they are, and how far a step moves the parameter.

        Args:
            filter: globs of which the name of a parameter must match one.
            exclude: globs of which it may match none.
            jobs: threads.
            progress: called with bytes read and the parameter they are of.

        Raises:
            UsageError: no optimizer has such moments.
        """
        from ckptools.stats.moments import moments, pairs_of

        ck = self._with_all_ranks()
        return moments(ck, pairs_of(ck, _selection(filter, exclude)), jobs, progress)

    @in_python
    def dead_rows(
        self,
        *,
        filter: str | Iterable[str] = (),
        exclude: str | Iterable[str] = (),
        section: str | None = None,
        jobs: int | None = None,
        progress: Progress | None = None,
    ) -> Statistics[DeadRows]:
        """Find rows of matrices that are all zero, or whose second moment is, as of rows that never got a gradient.

        Args:
            filter: globs of which a name must match one; `*` matches dots too.
            exclude: globs of which a name may match none.
            section: a kind of section, or the name of one; None for the model, if there is one.
            jobs: threads.
            progress: called with bytes read and the matrix they are of.

        Raises:
            UsageError: there is no such section.
        """
        from ckptools.stats.dead_rows import dead_rows, matrices

        ck = self._with_all_ranks()
        return dead_rows(ck, matrices(ck, _selection(filter, exclude, section)), jobs, progress)


def _selection(filter: str | Iterable[str], exclude: str | Iterable[str], section: str | None = None) -> Selection:
    from ckptools.keys.entries import Selection

    include, without = ((globs,) if isinstance(globs, str) else tuple(globs) for globs in (filter, exclude))
    return Selection(include, without, section or "")
