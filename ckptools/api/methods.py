"""Methods of a checkpoint that read its values for figures of them, or write files."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import fields
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, ParamSpec, TypeVar

from ckptools.errors import CkptoolsError
from ckptools.model import checkpoint as checkpoint_data
from ckptools.tensor_io.fetch_ahead import Progress

if TYPE_CHECKING:
    from ckptools.consolidate.record import Consolidated
    from ckptools.stats.record import DeadRows, Moments, Statistics, Stats


# -- errors in the words of Python: what commands call `--prefer-rank` is the argument `prefer_rank` here --------------


P = ParamSpec("P")
R = TypeVar("R")

COMMAND = re.compile(
    r"ckptools (?:consolidate|create|diff|doctor|formats|inspect|ls|match|report|shell|show|stats|tree|verify)\b[^;:)]*"
)
"""A command line in a message, which stays as it is typed."""

CHOICE = re.compile(r"--(only|fill|dtype|weights|format) ([a-z0-9_]+)(?![a-z0-9_.-])")
OPTION = re.compile(r"(?<![\w-])--([a-z]+(?:-[a-z]+)*)")


def in_python(function: Callable[P, R]) -> Callable[P, R]:
    """Let the errors of a public function name its arguments as Python does."""

    @wraps(function)
    def called(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return function(*args, **kwargs)
        except CkptoolsError as error:
            error.args = tuple(python_words(a) if isinstance(a, str) else a for a in error.args)
            error.reason = python_words(error.reason)
            raise

    return called


def python_words(text: str) -> str:
    """A message without the dashes of options, but in commands."""
    commands = COMMAND.findall(text)
    parts = (CHOICE.sub(r"\1='\2'", part) for part in COMMAND.split(text))
    rest = [OPTION.sub(lambda option: option[1].replace("-", "_"), part) for part in parts]
    return "".join(part for pair in zip(rest, [*commands, ""], strict=True) for part in pair)


# -- methods -----------------------------------------------------------------------------------------------------------


class ValueMethods:
    """The methods that read values, in bounded memory, or write files, each of which appears whole or not at all."""

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
        from ckptools.keys.entries import Selection
        from ckptools.stats.figures import statistics
        from ckptools.stats.passes import parts_of

        ck = self._with_all_ranks()
        parts = parts_of(ck, Selection.given(filter, exclude, section), per_rank)
        return statistics(ck.path, parts, histogram, jobs, progress)

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

        `filter` and `exclude` are globs of names of parameters, as in `stats`.

        Raises:
            UsageError: no optimizer has such moments.
        """
        from ckptools.keys.entries import Selection
        from ckptools.stats.figures import moments, pairs_of

        ck = self._with_all_ranks()
        return moments(ck, pairs_of(ck, Selection.given(filter, exclude)), jobs, progress)

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

        The arguments are those of `stats`.

        Raises:
            UsageError: there is no such section.
        """
        from ckptools.keys.entries import Selection
        from ckptools.stats.figures import dead_rows, matrices

        ck = self._with_all_ranks()
        return dead_rows(ck, matrices(ck, Selection.given(filter, exclude, section)), jobs, progress)

    @in_python
    def report(
        self,
        out: str | Path,
        *,
        deep: bool = False,
        values: bool = False,
        manifest: str | Path | None = None,
        ignore: Iterable[str] = (),
        force: bool = False,
        interactive: bool = False,
        jobs: int | None = None,
        progress: Progress | None = None,
    ) -> Path:
        """Write a page of HTML: the verdict, problems, facts, param groups and pictures, with JSON for programs in it.

        One file that needs no network and no script. It is written whatever is wrong with the checkpoint. The arguments
        are those of `verify`; `values` also puts figures of every tensor on the page. `force` overwrites the file. An
        `interactive` page has one script, by which tables sort and filter, and what is about one rank is marked.

        Raises:
            OutputExistsError: it is there already, or in the way of the checkpoint's files.
            ReadError, WriteError: a file cannot be read or written; nothing that looks finished is left.
            UsageError: its name ends in something else than `.html`, there is no folder for it, or a code that does not
                exist.
        """
        from ckptools.report.html import write_report

        write_report(
            self._with_all_ranks(),
            out,
            deep=deep,
            values=values,
            manifest=manifest,
            ignore=ignore,
            force=force,
            interactive=interactive,
            jobs=jobs,
            progress=progress,
        )
        return Path(out)

    def write_digests(
        self, out: str | Path, *, force: bool = False, jobs: int | None = None, progress: Progress | None = None
    ) -> Path:
        """Write a JSON with the SHA-256 of every tensor, whatever its layout, and a digest of every plain value.

        `ckptools.diff` takes it in the place of the checkpoint, on a machine that does not see that. `force` overwrites
        a file that is there.

        Raises:
            OutputExistsError: the file is there.
            UsageError: there is no folder for it.
            WriteError: it cannot be written.
        """
        from ckptools.diff.digest_file import write_digest_file

        write_digest_file(self._with_all_ranks(), Path(out), force, jobs, progress)
        return Path(out)

    @in_python
    def consolidate(
        self,
        out: str | Path,
        *,
        format: str | None = None,
        only: str | None = None,
        map: Mapping[str, str] | str | Path | None = None,
        like: str | Path | None = None,
        assume: bool = False,
        strip_prefix: str | None = None,
        rename: Sequence[str] = (),
        dtype: str | None = None,
        max_shard_size: int | str | None = None,
        tied: str = "keep",
        keep_types: bool = False,
        force: bool = False,
        allow_missing: bool = False,
        fill: str | None = None,
        fill_from: str | Path | None = None,
        dequantize: bool = False,
        prefer_rank: int | None = None,
        check: bool = False,
        unchecked: bool = False,
        manifest: bool = False,
        provenance: bool = True,
        dry_run: bool = False,
        resume: bool = False,
        jobs: int | None = None,
        progress: Progress | None = None,
    ) -> Consolidated:
        """Write its full tensors into one `.pt`, one or several `.safetensors`, or a DCP folder to resume from.

        Args:
            out: the file or folder to write; its suffix (`.dcp` for a folder) says the format. With a `/` at its end,
                or where it is a folder, `model.safetensors` or `model.pt` in it.
            format: `pt`, `safetensors` or `dcp`, where no suffix says it; a file gets that suffix.
            only: `model` (the bare state dict), `optimizer`, or `all` (the same tree); or a glob, such as `blocks.*`,
                for those names of the model that match. Default: `model` for `.safetensors`, else `all`.
            map: new names of the model by old ones, or the path of a JSON of them: `match(...).fix` is one.
            like: a Hugging Face folder, or its `config.json`: `out` is a folder with the same names, shapes, dtypes and
                files, the config and the tokenizer. The set is complete, or it is refused.
            assume: with `like`, take what only shapes or a trainer's defaults speak for.
            strip_prefix: a beginning of names that goes, such as `module.`.
            rename: `OLD=NEW` for a tensor or module, `OLD.=NEW.` for the beginning of names; behind `map` and
                `strip_prefix`, in this order. The state of an optimizer follows the names of the model.
            dtype: torch dtype for the floating-point tensors of the model, such as `bfloat16`.
            max_shard_size: bytes of tensors per file of safetensors (which get a Hugging Face index) or of a DCP, or a
                text such as `5GB`.
            tied: for safetensors: `keep` writes a tied weight under each name, `drop` only under the first.
            keep_types: keep what plain `torch.load` does not make (timedeltas, numpy's values …) in a `.pt`, instead
                of the nearest that it does.
            force: overwrite an existing output.
            allow_missing: leave out tensors that are not whole, and list them, instead of refusing.
            fill: with `allow_missing`: `nan` or `zero` to put into holes, which are listed; without it a tensor with
                a hole is left out.
            fill_from: another checkpoint of the same run, from which regions are taken that are missing or damaged;
                each is listed, the output says so and is not whole. One of another run is refused.
            dequantize: write the values of quantized tensors, as their class (torchao's) computes them; else they are
                refused.
            prefer_rank: where ranks hold different copies of a tensor that should be equal, take this rank's.
            check: let the format's own library read the output back before it gets its name, and compare it with the
                shards; for a dry run, compare the source with its checksums.
            unchecked: do not compare the source with the checksums that it states.
            manifest: write sha256 of every tensor and file into a JSON beside the output.
            provenance: let the output say where it comes from (name, step, ranks), what was filled in and left out.
            dry_run: plan and check, write nothing.
            resume: keep what is written when it does not come to its end, and take up what the same call has kept.
            jobs: threads.
            progress: called with bytes written, or read back, and the tensor they belong to.

        Raises:
            NotWholeError: something is missing, overlaps, contradicts, or was found damaged before anything was
                written.
            DamagedError: a record is not what its checksum says.
            OutputExistsError, NoSpaceError: the output is in the way or does not fit.
            ReadError, WriteError: a file cannot be read or written; nothing that looks finished is left.
            UsageError: options that do not fit together.
        """
        given = locals()  # the arguments, and nothing else yet
        from ckptools.consolidate.options import ConsolidateOptions
        from ckptools.consolidate.run import consolidate as write
        from ckptools.files.opening import check_path

        check_path(out)
        options = ConsolidateOptions(**{known.name: given[known.name] for known in fields(ConsolidateOptions)})
        return write(self._with_all_ranks(), out, options, progress)
