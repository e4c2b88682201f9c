"""A checkpoint as users hold it: what its readers found, with methods that load, verify and consolidate."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ckptools.api.state_dict import StateDict
from ckptools.api.statistics import StatisticsMethods
from ckptools.model import checkpoint as checkpoint_data
from ckptools.model.checkpoint import RankFile
from ckptools.model.problems import Problem
from ckptools.model.records import as_html
from ckptools.model.rows import Rows
from ckptools.model.tree import fqn_of
from ckptools.tensor_io.progress import Progress
from ckptools.training_state.sections import section_name

if TYPE_CHECKING:
    from ckptools.api.plots import CheckpointPlots
    from ckptools.api.random_states import RandomStates
    from ckptools.consolidate.result import Consolidated
    from ckptools.formats.resolver import Resolver
    from ckptools.model.keys import Keys
    from ckptools.model.matching import Match
    from ckptools.model.shown import Shown
    from ckptools.model.verification import Verification
    from ckptools.training_state.optimizers import Optimizer
    from ckptools.training_state.sections import Section

"""Called with a number of bytes that were read or written, and the tensor or file that they belong to."""


@dataclass(frozen=True, repr=False)
class Checkpoint(StatisticsMethods, checkpoint_data.Checkpoint):
    """A distributed checkpoint, opened: its structure is read, its tensors are lazy.

    A context manager: `with ckptools.open(path) as ck:` forgets at its end what was read of other ranks' files. Beside
    what stands here it has everything that `ckptools.model.checkpoint.Checkpoint` lists: `path`, `format`, `files`,
    `world_size`, `step`, `problems`, `whole`, `ranks` and more.

    Attributes:
        resolver: reads other ranks' files when their shards are asked for, each once.
    """

    files: Rows[RankFile]
    problems: Rows[Problem] = field(default_factory=Rows)
    resolver: Resolver | None = field(default=None, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "files", Rows(self.files))
        object.__setattr__(self, "problems", Rows(self.problems))

    @property
    def raw(self) -> Any:
        """The tree as the file has it: nested dicts, lists and tuples with plain values and lazy tensors."""
        return self.tree

    @cached_property
    def sections(self) -> Rows[Section]:
        """The parts of the tree: model, optimizers, schedulers, RNG and the rest, in file order."""
        from ckptools.training_state.sections import sections_of

        return sections_of(self)

    def of_kind(self, kind: str) -> Rows[Section]:
        """The sections of one kind: `model`, `optimizer`, `scheduler`, `rng` or `other`."""
        return Rows(s for s in self.sections if s.kind == kind)

    @cached_property
    def model(self) -> Mapping[str, Any]:
        """The model's state dict: fqn to lazy tensor. Of several models the names are prefixed with the section."""
        from ckptools.training_state.sections import model_of

        models = self.of_kind("model")
        return StateDict(fqn_of(models[0].path) if len(models) == 1 else "", model_of(self))

    @cached_property
    def optimizers(self) -> Mapping[str, Optimizer]:
        """The optimizers by class name or key, their state by fqn where names are known.

        Raises:
            RefusedError: the names that were given when it was opened do not fit.
        """
        from ckptools.training_state.optimizers import optimizers_of

        return StateDict("optimizers", {name: _with_states(o) for name, o in optimizers_of(self).items()})

    @cached_property
    def schedulers(self) -> Mapping[str, Any]:
        """The schedulers' states, by class name or key."""
        from ckptools.training_state.sections import schedulers_of

        found = {n: StateDict(n, v) if isinstance(v, Mapping) else v for n, v in schedulers_of(self).items()}
        return StateDict("schedulers", found)

    @cached_property
    def rng(self) -> RandomStates:
        """The saved random states: rank to generator to state, each with a fingerprint. Every rank's file is read."""
        from ckptools.api.random_states import RandomStates
        from ckptools.training_state.sections import rng_of

        return RandomStates(self._with_all_ranks(), rng_of(self))

    def records(
        self, section: str = "", *, filter: Iterable[str] = (), exclude: Iterable[str] = (), private: bool = False
    ) -> Keys:
        """Every key with kind, shape, dtype, size and layout: what `ckptools tree` shows.

        `pandas.DataFrame(ck.records("model").to_dicts())` is a table of the model's tensors. It is not called `tree`,
        for that is the tree that the file holds.

        Args:
            section: a kind of section (`model`, `optimizer`, `scheduler`, `rng`, `other`), or the name of one.
            filter: globs of which a name must match one, such as `blocks.*.weight`; none means all.
            exclude: globs of which a name may match none.
            private: also values whose names begin with `_`; those that a glob spells are there anyway.

        Raises:
            UsageError: it has no such section.
        """
        from ckptools.contents.keys import keys_of
        from ckptools.contents.selection import Selection

        return keys_of(self, Selection(tuple(filter), tuple(exclude), section), private)

    def show(self, *keys: str, values: str | None = None, private: bool = False, all_ranks: bool = False) -> Shown:
        """What is at some keys: values in full, tensors with their shards and, where they are small, a few figures.

        What cannot be read of a tensor is said in its row. Where ranks hold different values, `ranks` of the row has
        each with its ranks. Other ranks' files are read where there are at most 32, or a key needs it.

        Args:
            keys: names as `records` has them, beginnings of names (`rng`), kinds of sections, or globs.
            values: a slice of each tensor whose elements are read, such as `0:4,:8`; only their bytes are.
            private: show also values whose names begin with `_`.
            all_ranks: read every rank's file, also of more than 32 for what all ranks should share.

        Raises:
            UsageError: nothing is at a key, or it is no slice of its tensor.
        """
        from ckptools.checks.showing import show

        return show(self, keys, values, private, all_ranks, None if self.all_ranks else self._with_all_ranks)

    def verify(
        self,
        *,
        deep: bool = False,
        values: bool = False,
        manifest: str | Path | None = None,
        ignore: Iterable[str] = (),
        jobs: int | None = None,
        progress: Progress | None = None,
    ) -> Verification:
        """Check whether it is whole, unharmed and coherent. What cannot be read on the way is a problem found.

        Args:
            deep: read every tensor's bytes and compare the CRC-32 that the container carries.
            values: look for NaN and infinities.
            manifest: a JSON that `consolidate(manifest=True)` wrote; every tensor and file in it is compared.
            ignore: codes of problems that are not counted.
            jobs: threads.
            progress: called with bytes read and the file they are in.

        Raises:
            ReadError: it cannot be opened, or the manifest cannot be read.
            UsageError: a code that does not exist.
        """
        from ckptools.checks import verify

        return verify.verify(
            self._with_all_ranks(),
            deep=deep,
            values=values,
            manifest=manifest,
            ignore=ignore,
            jobs=jobs,
            progress=progress,
        )

    def match(
        self, to: Any, *, filter: Iterable[str] = (), exclude: Iterable[str] = (), section: str | None = None
    ) -> Match:
        """Compare its model's names and shapes with those that another model expects; no values are read.

        Args:
            to: an `nn.Module` (on the meta device too), a state dict, shapes by name, a checkpoint; the path of one, of
                a Hugging Face `config.json` or of a JSON of name to shape; or `"package.module:function"`, which is
                imported, and called with no arguments on torch's meta device.
            filter: globs of the names that count, on either side; without any, all do.
            exclude: globs of names that do not count.
            section: name of the model's section, where it holds several models.

        Raises:
            ReadError: `to` cannot be read, or the function raises; or one of the two has no model.
            UsageError: one of the two has several models; or no name counts.
        """
        from ckptools.checks.matching.match import match
        from ckptools.contents.selection import Selection

        return match(self._with_all_ranks(), to, Selection(tuple(filter), tuple(exclude), section or ""))

    def report(
        self,
        out: str | Path,
        *,
        deep: bool = False,
        values: bool = False,
        force: bool = False,
        jobs: int | None = None,
        progress: Progress | None = None,
    ) -> Path:
        """Write a page of HTML: the verdict, problems, facts, param groups and pictures, with JSON for programs in it.

        One file that needs no network and no script. It is written whatever is wrong with the checkpoint.

        Args:
            out: the file, which ends in `.html`.
            deep: compare the CRC-32 of every tensor, as `verify(deep=True)` does.
            values: read every tensor: look for NaN and infinities, and put figures of each on the page.
            force: overwrite it.
            jobs: threads.
            progress: called with bytes read and the file or tensor they are of.

        Raises:
            OutputExistsError: it is there already, or in the way of the checkpoint's files.
            ReadError, WriteError: a file cannot be read or written; nothing that looks finished is left.
            UsageError: its name ends in something else than `.html`, or there is no folder for it.
        """
        from ckptools.api.report import write_report

        write_report(self._with_all_ranks(), out, deep=deep, values=values, force=force, jobs=jobs, progress=progress)
        return Path(out)

    def write_digests(
        self, out: str | Path, *, force: bool = False, jobs: int | None = None, progress: Progress | None = None
    ) -> Path:
        """Write a JSON with the SHA-256 of every tensor, whatever its layout, and a digest of every plain value.

        `ckptools.diff` takes it in the place of the checkpoint, on a machine that does not see that.

        Args:
            out: the file.
            force: overwrite it.
            jobs: threads.
            progress: called with bytes read and the tensor they are of.

        Raises:
            OutputExistsError: the file is there.
            UsageError: there is no folder for it.
            WriteError: it cannot be written.
        """
        from ckptools.checks.difference.digest_file import write_digest_file

        write_digest_file(self._with_all_ranks(), Path(out), force, jobs, progress)
        return Path(out)

    def consolidate(
        self,
        out: str | Path,
        *,
        format: str | None = None,
        only: str | None = None,
        map: Mapping[str, str] | str | Path | None = None,
        strip_prefix: str | None = None,
        rename: Sequence[str] = (),
        dtype: str | None = None,
        max_shard_size: int | None = None,
        tied: str = "keep",
        keep_types: bool = False,
        force: bool = False,
        allow_missing: bool = False,
        fill: str | None = None,
        prefer_rank: int | None = None,
        check: bool = False,
        unchecked: bool = False,
        manifest: bool = False,
        dry_run: bool = False,
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
            strip_prefix: a beginning of names that goes, such as `module.`.
            rename: `OLD=NEW` for a tensor or module, `OLD.=NEW.` for the beginning of names; behind `map` and
                `strip_prefix`, in this order. The state of an optimizer follows the names of the model.
            dtype: torch dtype for the floating-point tensors of the model, such as `bfloat16`.
            max_shard_size: bytes of tensors per file of safetensors (which get a Hugging Face index) or of a DCP.
            tied: for safetensors: `keep` writes a tied weight under each name, `drop` only under the first.
            keep_types: keep what plain `torch.load` does not make (timedeltas, numpy's values …) in a `.pt`, instead
                of the nearest that it does.
            force: overwrite an existing output.
            allow_missing: leave out tensors that are not whole, and list them, instead of refusing.
            fill: with `allow_missing`: `nan` or `zero` to put into holes, which are listed; without it a tensor with
                a hole is left out.
            prefer_rank: where ranks hold different copies of a tensor that should be equal, take this rank's.
            check: let the format's own library read the output back before it gets its name, and compare it with the
                shards; for a dry run, compare the source with its checksums.
            unchecked: do not compare the source with the checksums that it states.
            manifest: write sha256 of every tensor and file into a JSON beside the output.
            dry_run: plan and check, write nothing.
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
        from ckptools.consolidate.options import ConsolidateOptions
        from ckptools.consolidate.run import consolidate as write

        options = ConsolidateOptions(
            format=format,
            only=only,
            map=map,
            strip_prefix=strip_prefix,
            rename=rename,
            dtype=dtype,
            max_shard_size=max_shard_size,
            tied=tied,
            keep_types=keep_types,
            force=force,
            allow_missing=allow_missing,
            fill=fill,
            prefer_rank=prefer_rank,
            check=check,
            unchecked=unchecked,
            manifest=manifest,
            dry_run=dry_run,
            jobs=jobs,
        )
        return write(self._with_all_ranks(), out, options, progress)

    @property
    def plot(self) -> CheckpointPlots:
        """Its pictures, such as `ck.plot.ranks()`, `ck.plot.layout(key)` and `ck.plot.heat("rms")`."""
        from ckptools.api.plots import CheckpointPlots

        return CheckpointPlots(self, self)

    def close(self) -> None:
        """Forget what was read of other ranks' files; lazy tensors that need them read them again."""
        if self.resolver is not None:
            self.resolver.close()

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _with_all_ranks(self) -> checkpoint_data.Checkpoint:
        return self if self.all_ranks or self.resolver is None else self.resolver.all_ranks()

    def __repr__(self) -> str:
        from ckptools.views.checkpoint_line import checkpoint_line

        return checkpoint_line(self)

    def _repr_html_(self) -> str | None:
        return as_html(self)


def _with_states(optimizer: Optimizer) -> Optimizer:
    """The optimizer with the state of each parameter as a mapping that shows itself."""
    path = f"{section_name(optimizer.path)}.state"
    state = {
        n: StateDict(str(n), v, f"{path}.{n}.") if isinstance(v, Mapping) else v for n, v in optimizer.state.items()
    }
    return replace(optimizer, state=StateDict(f"{optimizer.name}.state", state))
