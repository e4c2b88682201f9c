"""An opened checkpoint, as everything here passes it around and as users hold it.

It is data: its tree, its files, and what is known of how it was saved. Its methods show, check and write it; each
imports the room that does so when it is called, so that opening a checkpoint stays cheap.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from ckptools.errors import in_python
from ckptools.model.facts import NOTHING_READ, Fact, GivenNames, ModelConfig, ModuleOrder, RankFile, ReadCost, Scheme
from ckptools.model.problems import Problem, Rows, as_html
from ckptools.model.provenance import Filled, Provenance
from ckptools.model.state_dict import RawTree, StateDict
from ckptools.model.tensor import OtherFiles, Rounded, Tensor
from ckptools.text import KeyPath, fqn_of, no_such_key

if TYPE_CHECKING:
    from ckptools.consolidate.record import Consolidated
    from ckptools.contents.record import Keys, Shown
    from ckptools.diff.record import Difference
    from ckptools.keys.random_states import RandomStates
    from ckptools.match.record import Match
    from ckptools.model.verdict import Verdict
    from ckptools.pictures.plots import CheckpointPlots
    from ckptools.stats.record import DeadRows, Moments, Statistics, Stats
    from ckptools.tensor_io.fetch_ahead import Progress
    from ckptools.training_state.optimizers import Optimizer
    from ckptools.training_state.sections import Section
    from ckptools.verify.record import Verification


INSIDE = frozenset({
    "assumed_names", "bytes_expected", "differing", "hollow", "in_parts", "names_given", "options", "other_ranks",
    "rounded", "stated_digests", "structure_read", "text_keys", "tree", "unequal", "worked_out",
})  # fmt: skip
"""Fields of a checkpoint for other rooms, which completion does not propose."""


class OtherRanks(OtherFiles, Protocol):
    """What reads the files of a checkpoint that were not read when it was opened."""

    def all_ranks(self) -> Checkpoint:
        """The checkpoint with every rank's structure."""

    def close(self) -> None:
        """Forget what was read."""


@dataclass(frozen=True)
class Checkpoint:
    """A distributed checkpoint: a tree of plain values whose tensors are lazy, and what is known of how it was saved.

    A context manager: `with ckptools.open(path) as ck:` forgets at its end what was read of other ranks' files.

    Attributes:
        path: what was opened.
        name: what it is called, without rank and suffix: `ep0-ba5`.
        format: name of the format's module, such as `rank_files`.
        saved_as: for people: `per-rank .pt, ShardedTensor (FSDP1)`.
        tree: nested dicts, lists and tuples; leaves are plain values, `Tensor` or `Opaque`.
        files: every rank file, found or missing, in rank order.
        world_size: ranks it was saved by, and what says so.
        step: training step, and what says so.
        module_order: whether the format keeps the order in which the module has its parameters, and why.
        problems: what is wrong, the worst first; `Code` explains their codes.
        names: dotted names of every class and function that the files mention.
        all_ranks: whether every rank's file was read, so that `tree` has the shards of all ranks.
        differing: key paths of values outside model, optimizer and scheduler that differ between the ranks; the
            tree holds the lowest rank's.
        per_rank: what each rank has at a key path, where the tree holds the lowest rank's: random states, positions in
            the data and what else differs outside model, optimizer and scheduler; tensors as that rank's file has them.
        unequal: the same where all should have one value, where only some have any (`Absent` stands for the others),
            and where a foreign object holds other values: to look at, while `per_rank` is kept in what is written.
        bytes_expected: bytes that all files together should have; None when unknown.
        cost: what opening it cost.
        assumed_names: parameters whose optimizer state has a number in the files, and got its name by order when it
            was read.
        names_given: names that the user gave for optimizer state that is keyed by number.
        rounded: fp32 copies that round to weights if the layout that was found is right; verify and consolidate look.
        stated_digests: SHA-256 of files beside each other, as one of them states it; `verify --deep` compares.
        in_parts: whether ranks' files hold parameters of their own, such as stages of a pipeline.
        text_keys: whether its format makes a text of every key of a dict, so that 1 and "1" look the same in it.
        stated_versions: of what wrote it, as files beside it state them, by where: `config.json.transformers_version`.
        provenance: what it was made of, where `consolidate` wrote it; None where its files do not say.
        config: what a Hugging Face `config.json` beside it says of its model; None without one.
        quantized: how its quantized weights are stored, for each way how many; see `training_state.quantized_weights`.
        hollow: tensors with zeros that lie in holes of sparse files and were never written.
        options: how it was opened, so that it can be opened again with all ranks.
        other_ranks: reads other ranks' files when their shards are asked for, each once; None where a format made it.
        worked_out: what was worked out of it once, by name: its sections, its optimizers.
    """

    path: Path
    name: str
    format: str
    saved_as: str
    tree: Any
    files: Rows[RankFile]
    world_size: Fact
    step: Fact
    module_order: ModuleOrder
    problems: Rows[Problem] = field(default_factory=Rows)
    names: tuple[str, ...] = field(default=())
    all_ranks: bool = True
    differing: tuple[KeyPath, ...] = ()
    per_rank: Mapping[KeyPath, Mapping[int, Any]] = field(default_factory=dict, compare=False)
    unequal: Mapping[KeyPath, Mapping[int, Any]] = field(default_factory=dict, compare=False)
    bytes_expected: int | None = None
    cost: ReadCost = NOTHING_READ
    assumed_names: frozenset[str] = field(default=frozenset())
    names_given: GivenNames | None = field(default=None, compare=False)
    rounded: tuple[Rounded, ...] = field(default=())
    stated_digests: Mapping[Path, str] = field(default_factory=dict, compare=False)
    in_parts: bool = False
    text_keys: bool = False
    stated_versions: Mapping[str, str] = field(default_factory=dict)
    provenance: Provenance | None = field(default=None)
    config: ModelConfig | None = field(default=None, compare=False)
    quantized: tuple[Scheme, ...] = field(default=())
    hollow: tuple[Filled, ...] = field(default=())
    options: Any = field(default=None, compare=False)
    other_ranks: OtherRanks | None = field(default=None, compare=False)
    worked_out: dict[str, Any] = field(init=False, default_factory=dict, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "files", Rows(self.files))
        object.__setattr__(self, "problems", Rows(self.problems))

    @property
    def structure_read(self) -> bool:
        """Whether the structure of every file was read, and not only that of some."""
        return self.all_ranks or all(f.status not in ("seen", "listed") for f in self.files)

    @property
    def ranks(self) -> tuple[int, ...]:
        """Ranks whose files are there and not cut."""
        return tuple(sorted({f.rank for f in self.files if f.rank is not None and f.is_here}))

    @property
    def raw(self) -> Any:
        """The tree as the file has it: nested dicts, lists and tuples with plain values and lazy tensors."""
        return RawTree(self.tree) if isinstance(self.tree, dict) else self.tree

    @property
    def verdict(self) -> Verdict:
        """Whether it is whole, recoverable and joinable, how far that was looked into, and why not."""
        from ckptools.rules.verdict import verdict_of

        return verdict_of(self)

    @property
    def whole(self) -> bool | None:
        """Whether everything that was saved is here and of one save; None where that is not proven."""
        return self.verdict.whole

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
        from ckptools.keys.random_states import RandomStates
        from ckptools.training_state.sections import rng_of

        return RandomStates(self._with_all_ranks(), rng_of(self))

    @in_python
    def records(
        self,
        section: str = "",
        *,
        filter: str | Iterable[str] = (),
        exclude: str | Iterable[str] = (),
        private: bool = False,
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
        from ckptools.contents.tree import keys_of
        from ckptools.keys.entries import Selection

        return keys_of(self, Selection.given(filter, exclude, section), private)

    @in_python
    def show(self, *keys: str, values: str | None = None, private: bool = False, all_ranks: bool = False) -> Shown:
        """What is at some keys: values in full, tensors with their shards and, where they are small, a few figures.

        What cannot be read of a tensor is said in its row. Where ranks hold different values, `ranks` of the row has
        each with its ranks. Other ranks' files are read where there are at most 64, or a key needs it.

        Args:
            keys: names as `records` has them, beginnings of names (`rng`), kinds of sections, or globs.
            values: a slice of each tensor whose elements are read, such as `0:4,:8`; only their bytes are.
            private: show also values whose names begin with `_`.
            all_ranks: read every rank's file, also of more than 64 for what all ranks should share.

        Raises:
            UsageError: nothing is at a key, or it is no slice of its tensor.
        """
        from ckptools.contents.show import show

        return show(self, keys, values, private, all_ranks, None if self.all_ranks else self._with_all_ranks)

    @in_python
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
        from ckptools.verify import run

        ck = self._with_all_ranks()
        return run.verify(ck, deep=deep, values=values, manifest=manifest, ignore=ignore, jobs=jobs, progress=progress)

    @in_python
    def match(
        self,
        to: Any,
        *,
        filter: str | Iterable[str] = (),
        exclude: str | Iterable[str] = (),
        section: str | None = None,
        optimizer: bool = False,
        world_size: int | None = None,
    ) -> Match:
        """Compare its model's names and shapes with those that another model expects; no values are read.

        Args:
            to: an `nn.Module` (on the meta device too), a state dict, shapes by name, a checkpoint; the path of one, of
                a Hugging Face `config.json` or of a JSON of name to shape; or `"package.module:function"`, which is
                imported, and called with no arguments on torch's meta device.
            filter: globs of the names that count, on either side; without any, all do.
            exclude: globs of names that do not count.
            section: name of the model's section, where it holds several models.
            optimizer: compare groups and state of the optimizer too; the function of `to` returns `(model, optimizer)`.
            world_size: say whether as many ranks resume from it: random states, files, the torch that is here.

        Raises:
            ReadError: `to` cannot be read, or the function raises; or one of the two has no model.
            UsageError: one of the two has several models; or no name counts.
        """
        from ckptools.keys.entries import Selection
        from ckptools.match.run import match

        return match(self._with_all_ranks(), to, Selection.given(filter, exclude, section), optimizer, world_size)

    @in_python
    def diff(
        self,
        other: Checkpoint | str | Path,
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
        """Compare it with another, as `ckptools.diff(self, other)`, which says what the arguments are."""
        from ckptools.diff.compare import Wanted, compare, side_of
        from ckptools.keys.entries import Selection

        wanted = Wanted(values, rtol, atol, every_byte, Selection.given(filter, exclude, section), jobs)
        return compare(self._with_all_ranks(), side_of(other), wanted, progress)

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

    @property
    def plot(self) -> CheckpointPlots:
        """Its pictures, such as `ck.plot.ranks()`, `ck.plot.layout(key)` and `ck.plot.heat("rms")`."""
        from ckptools.pictures.plots import CheckpointPlots

        return CheckpointPlots(self)

    # by name

    @cached_property
    def _by_name(self) -> dict[str, tuple[str, Any]]:
        """What is at each name that begins with the section, with the name that `records` has for it."""
        from ckptools.keys.entries import entries_of

        found: dict[str, tuple[str, Any]] = {}
        for entry in entries_of(self):
            begins = entry.name == entry.section or entry.name.startswith(f"{entry.section}.")
            found[entry.name if begins else f"{entry.section}.{entry.name}"] = entry.name, entry.value
        return found

    @cached_property
    def _names(self) -> dict[str, str]:
        """The names with the section, by those that `records` has."""
        return {known: name for name, (known, _) in self._by_name.items()}

    def __getitem__(self, name: str) -> Any:
        """What is at a name: a lazy tensor or a value; at the beginning of names, such as a section's, a mapping.

        The section may be left out where `records` has no section: `ck["model.embed.weight"]` is `ck["embed.weight"]`.

        Raises:
            KeyError: nothing is there; the message has the nearest name.
        """
        full = self._names.get(name, name)
        if full in self._by_name:
            known, value = self._by_name[full]
            return value.called(known) if isinstance(value, Tensor) else value
        below = {one[len(name) + 1 :]: v for one, (_, v) in self._by_name.items() if one.startswith(f"{name}.")}
        if not below:
            raise KeyError(no_such_key(name, self._by_name))
        return StateDict(name, below, f"{name}.")

    def __contains__(self, name: object) -> bool:
        return name in self._by_name or name in self._names

    def __iter__(self) -> Iterator[str]:
        return iter(self._by_name)

    def __len__(self) -> int:
        return len(self._by_name)

    def __bool__(self) -> bool:
        return True

    def _ipython_key_completions_(self) -> list[str]:
        return [*self._by_name]

    def __dir__(self) -> list[str]:
        """What users call; the facts that only other rooms ask for are left out."""
        return sorted(set(super().__dir__()) - INSIDE)

    def close(self) -> None:
        """Forget what was read of other ranks' files; lazy tensors that need them read them again."""
        if self.other_ranks is not None:
            self.other_ranks.close()

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _with_all_ranks(self) -> Checkpoint:
        return self if self.all_ranks or self.other_ranks is None else self.other_ranks.all_ranks()

    def __str__(self) -> str:
        """The text that `ckptools inspect` prints."""
        from ckptools.inspect.record import inspect_report, report_text

        return report_text(inspect_report(self))

    def __repr__(self) -> str:
        from ckptools.display.tables import checkpoint_line

        return checkpoint_line(self)

    def _repr_html_(self) -> str | None:
        return as_html(self)

    def _repr_mimebundle_(self, include: object = None, exclude: object = None) -> dict[str, str]:
        """The map of its ranks beside the HTML, from which code hosts strip drawings."""
        return {"image/svg+xml": self.plot.ranks().svg} if len(self.files) > 1 else {}


def _with_states(optimizer: Optimizer) -> Optimizer:
    """The optimizer with the state of each parameter as a mapping that shows itself."""
    from ckptools.training_state.sections import section_name

    path = f"{section_name(optimizer.path)}.state"
    state = {
        n: StateDict(str(n), v, f"{path}.{n}.") if isinstance(v, Mapping) else v for n, v in optimizer.state.items()
    }
    return replace(optimizer, state=StateDict(f"{optimizer.name}.state", state))
