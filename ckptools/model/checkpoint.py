"""`Checkpoint`: an opened checkpoint, the object that users hold and every feature takes.

It is data: a tree, a list of files, and facts about the save. Its methods show, check and write it. Each method
imports its feature when called, so that opening a checkpoint stays cheap.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from ckptools.model.facts import NOTHING_READ, Fact, GivenNames, ModelConfig, ModuleOrder, RankFile, ReadCost, Scheme
from ckptools.model.problems import Problem
from ckptools.model.provenance import Filled, Provenance
from ckptools.model.records import Rows, as_html
from ckptools.model.state_dict import RawTree, StateDict
from ckptools.model.tensor import OtherFiles, Rounded, Tensor
from ckptools.option import in_python
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
    "rounded", "stated_digests", "structure_read", "text_keys", "tree", "unequal", "with_all_ranks", "worked_out",
})  # fmt: skip
"""Fields of a checkpoint for other rooms, which completion does not propose."""


class OtherRanks(OtherFiles, Protocol):
    """Reads the rank files that were not read when the checkpoint was opened."""

    def all_ranks(self) -> Checkpoint:
        """The checkpoint with every rank's structure."""

    def close(self) -> None:
        """Drop what was read from other ranks' files."""


@dataclass(frozen=True)
class Checkpoint:
    """A distributed checkpoint: a tree of plain values and lazy tensors, and facts about how it was saved.

    A context manager: `with ckptools.open(path) as ck:` drops at its end what was read from other ranks' files.

    Attributes:
        path: the path that was opened.
        name: name of the checkpoint without rank and suffix: `ep0-ba5`.
        format: name of the format's module, such as `rank_files`.
        saved_as: the format in words: `per-rank .pt, ShardedTensor (FSDP1)`.
        tree: nested dicts, lists and tuples; leaves are plain values, `Tensor` or `Opaque`.
        files: every rank file, found or missing, in rank order.
        world_size: number of ranks that saved it, and its sources.
        step: training step, and its sources.
        module_order: whether the format keeps the order of the module's parameters, and why.
        problems: the problems found, the worst first; `Code` explains their codes.
        names: dotted names of every class and function that the files mention.
        all_ranks: whether every rank's file was read, so that `tree` has the shards of all ranks.
        differing: key paths of values outside model, optimizer and scheduler that differ between the ranks; the
            tree has the lowest rank's value.
        per_rank: each rank's value at a key path where the tree has the lowest rank's: random states, positions in
            the data and other values outside model, optimizer and scheduler that differ; tensors as in that rank's
            file.
        unequal: the same for values that all ranks should share, for values that only some ranks have (`Absent`
            stands for the others), and for foreign objects that differ. `consolidate` writes `per_rank`, not `unequal`.
        bytes_expected: total size that all files should have; None when unknown.
        cost: files, bytes and seconds that opening it took.
        assumed_names: parameters whose optimizer state is numbered in the files and was given names by order.
        names_given: names that the user gave for optimizer state that is keyed by number.
        rounded: fp32 copies that round to their weights if the inferred layout is right; verify and consolidate check.
        stated_digests: SHA-256 of files, as another file states them; `verify --deep` compares.
        in_parts: whether ranks' files hold different parameters, such as stages of a pipeline.
        text_keys: whether the format turns every dict key into text, so that 1 and "1" look the same.
        stated_versions: versions of the libraries that wrote it, by where they are stated:
            `config.json.transformers_version`.
        provenance: the sources of an output of `consolidate`; None where its files state none.
        config: the Hugging Face `config.json` beside it; None without one.
        quantized: each way in which its weights are quantized, with a count; see `training_state.quantized_weights`.
        hollow: tensors whose zeros lie in holes of sparse files and were never written.
        options: the options of `open`, so that it can be opened again with all ranks.
        other_ranks: reads other ranks' files when their shards are needed, each once; None before `open` sets it.
        worked_out: cached results by name, such as its sections and its optimizers.
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
        """Whether the structure of every file was read."""
        return self.all_ranks or all(f.status not in ("seen", "listed") for f in self.files)

    @property
    def ranks(self) -> tuple[int, ...]:
        """Ranks whose files are present and not cut."""
        return tuple(sorted({f.rank for f in self.files if f.rank is not None and f.is_here}))

    @property
    def raw(self) -> Any:
        """The tree as in the file: nested dicts, lists and tuples with plain values and lazy tensors."""
        return RawTree(self.tree) if isinstance(self.tree, dict) else self.tree

    @property
    @in_python
    def verdict(self) -> Verdict:
        """Whether the checkpoint is whole, recoverable and joinable, how far that was checked, and why not."""
        from ckptools.rules.verdict import verdict_of

        return verdict_of(self)

    @property
    def whole(self) -> bool | None:
        """Whether everything that was saved is present and of one save; None where that is not proven."""
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
        """The model's state dict: fqn to lazy tensor; of several models the trained one, or the one given to `open`.

        With `model="all"`, and if nothing says which one was trained, it has all, with names behind those of sections.

        Raises:
            UsageError: the model given to `open` is not there.
        """
        from ckptools.training_state.models import chosen_models, models_of

        models = in_python(chosen_models)(self) or Rows(model.section for model in models_of(self))
        if len(models) == 1:
            return StateDict(fqn_of(models[0].path), models[0].value)
        return StateDict("", {f"{s.name}.{key}": value for s in models for key, value in s.value.items()})

    @cached_property
    def optimizers(self) -> Mapping[str, Optimizer]:
        """The optimizers by class name or key; their state is keyed by fqn where names are known.

        Raises:
            RefusedError: the names given to `open` do not fit.
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
        """The saved random states: rank to generator to state, each with a fingerprint. Reads every rank's file."""
        from ckptools.keys.random_states import RandomStates
        from ckptools.training_state.sections import rng_of

        return RandomStates(self.with_all_ranks(), rng_of(self))

    @in_python
    def records(
        self,
        section: str = "",
        *,
        filter: str | Iterable[str] = (),
        exclude: str | Iterable[str] = (),
        private: bool = False,
    ) -> Keys:
        """List every key with kind, shape, dtype, size and layout, as `ckptools tree` shows them.

        `pandas.DataFrame(ck.records("model").to_dicts())` is a table of the model's tensors. (`ck.tree` is the tree of
        values itself.)

        Args:
            section: a kind of section (`model`, `optimizer`, `scheduler`, `rng`, `other`), or the name of one.
            filter: globs, such as `blocks.*.weight`; a name must match at least one of them. No glob selects all.
            exclude: globs; a name that matches any of them is left out.
            private: include values whose names begin with `_`; a glob that begins with `_` selects them in any case.

        Raises:
            UsageError: there is no such section.
        """
        from ckptools.contents.tree import keys_of
        from ckptools.keys.entries import Selection

        return keys_of(self, Selection.given(filter, exclude, section), private)

    @in_python
    def show(self, *keys: str, values: str | None = None, private: bool = False, all_ranks: bool = False) -> Shown:
        """Show the values at some keys: plain values in full, tensors with their shards and, where small, statistics.

        A tensor's row states why it cannot be read. Where ranks have different values, `ranks` of the row lists each
        value with its ranks. With at most 64 ranks every file is read; with more, only if a key needs it.

        Args:
            keys: names as in `records`, prefixes of names (`rng`), kinds of sections, or globs.
            values: a slice of each tensor to read, such as `0:4,:8`; only its bytes are read.
            private: show also values whose names begin with `_`.
            all_ranks: read every rank's file, also with more than 64 ranks, to compare values that all should share.

        Raises:
            UsageError: a key matches nothing, or the slice does not fit its tensor.
        """
        from ckptools.contents.show import show

        return show(self, keys, values, private, all_ranks, None if self.all_ranks else self.with_all_ranks)

    def dequantized(self) -> Checkpoint:
        """The same checkpoint with the values of quantized weights in the place of their codes and scales.

        Values are computed when they are read. Each weight has its own name: `a.weight_packed` is `a.weight`. A weight
        that ckptools cannot decode keeps its codes, or a tensor whose `note` says why.

        Raises:
            ReadError: a file cannot be read.
        """
        from ckptools.files.opening import OpenFiles
        from ckptools.formats.open import with_all_ranks
        from ckptools.training_state.packed_values import with_values

        with OpenFiles() as files:
            return with_values(with_all_ranks(self), files)

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
        """Check whether the checkpoint is whole, undamaged and consistent. An unreadable file is reported as a problem.

        Args:
            deep: read every tensor's bytes and compare the CRC-32 that the container states.
            values: look for NaN and infinities.
            manifest: a JSON that `consolidate(manifest=True)` wrote; compare every tensor and file in it.
            ignore: codes of problems that are not counted.
            jobs: threads.
            progress: called with the bytes read and the current file.

        Raises:
            ReadError: it cannot be opened, or the manifest cannot be read.
            UsageError: a code does not exist.
        """
        from ckptools.verify import run

        ck = self.with_all_ranks()
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
        """Compare the checkpoint's model with another model: names and shapes, no values.

        Args:
            to: an `nn.Module` (on the meta device too), a state dict, shapes by name, or a checkpoint; the path of a
                checkpoint, of a Hugging Face `config.json` or of a JSON of name to shape; or
                `"package.module:function"`, which is imported and called without arguments on torch's meta device.
            filter: globs of the names to compare, on either side; without any, all are compared.
            exclude: globs of names to leave out.
            section: name of the model's section, if it holds several models and the trained one is not meant.
            optimizer: compare the optimizer's groups and state too; the function of `to` returns `(model, optimizer)`.
            world_size: report whether this many ranks can resume from it: random states, files, the installed torch.

        Raises:
            ReadError: `to` cannot be read, or the function raises; or one of the two has no model.
            UsageError: nothing says which of several models was trained; or no name is left to compare.
        """
        from ckptools.keys.entries import Selection
        from ckptools.match.run import match

        return match(self.with_all_ranks(), to, Selection.given(filter, exclude, section), optimizer, world_size)

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
        """Compare the checkpoint with another; `ckptools.diff(self, other)` explains the arguments."""
        from ckptools.diff.compare import Wanted, compare, side_of
        from ckptools.keys.entries import Selection

        wanted = Wanted(values, rtol, atol, every_byte, Selection.given(filter, exclude, section), jobs)
        return compare(self.with_all_ranks(), side_of(other), wanted, progress)

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
        """Compute rms, norm, extremes, mean, standard deviation, zeros, NaN and infinities of tensors, in float64.

        `problem` of a row states what could not be read. `.to_dicts()` of the result is a table for pandas.

        Args:
            filter: globs; a name must match at least one of them. `*` matches dots too.
            exclude: globs; a name that matches any of them is left out.
            section: a kind of section, or the name of one; None for the model, if there is one. Of several models, the
                one given to `open`, or the trained one.
            per_rank: one row for each rank's part of a tensor, instead of one row for the whole tensor.
            histogram: also count the elements in equal parts of their range, which reads them twice.
            jobs: threads.
            progress: called with the bytes read and the current tensor.

        Raises:
            UsageError: there is no such section.
        """
        from ckptools.keys.entries import Selection
        from ckptools.stats.figures import statistics
        from ckptools.stats.passes import parts_of

        ck = self.with_all_ranks()
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

        ck = self.with_all_ranks()
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
        """Find rows of matrices that are all zero, or whose second moments are, so that they never got a gradient.

        The arguments are those of `stats`.

        Raises:
            UsageError: there is no such section.
        """
        from ckptools.keys.entries import Selection
        from ckptools.stats.figures import dead_rows, matrices

        ck = self.with_all_ranks()
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
        """Write a page of HTML: the verdict, problems, facts, param groups and pictures, and JSON for programs.

        It is one file that needs no network and no script, and it is written for any checkpoint, however damaged. The
        arguments are those of `verify`; `values` also puts every tensor's statistics on the page. `force` overwrites
        the file. An `interactive` page has one script, which sorts and filters tables and highlights a rank.

        Raises:
            OutputExistsError: the file exists, or is one of the checkpoint's.
            ReadError, WriteError: a file cannot be read or written; no partial page is left.
            UsageError: the name does not end in `.html`, its folder does not exist, or a code does not exist.
        """
        from ckptools.report.html import write_report

        write_report(
            self.with_all_ranks(),
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

        `ckptools.diff` accepts it in place of the checkpoint, on a machine that cannot see the checkpoint. `force`
        overwrites an existing file.

        Raises:
            OutputExistsError: the file exists.
            UsageError: its folder does not exist.
            WriteError: it cannot be written.
        """
        from ckptools.diff.digest_file import write_digest_file

        write_digest_file(self.with_all_ranks(), Path(out), force, jobs, progress)
        return Path(out)

    @in_python
    def consolidate(
        self,
        out: str | Path,
        *,
        format: str | None = None,
        only: str | None = None,
        merge_lora: bool = False,
        base: str | Path | None = None,
        adapter: str | None = None,
        map: Mapping[str, str] | str | Path | None = None,
        like: str | Path | None = None,
        assume: bool = False,
        strip_prefix: str | None = None,
        rename: Sequence[str] = (),
        keep_names: bool | None = None,
        layout: str = "saved",
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
        """Write the full tensors into one `.pt`, one or several `.safetensors`, or a DCP folder to resume from.

        Args:
            out: the file or folder to write; its suffix (`.dcp` for a folder) gives the format. If it ends in `/` or is
                a folder, `model.safetensors` or `model.pt` is written in it.
            format: `pt`, `safetensors` or `dcp`, if the suffix does not give it; a file gets that suffix.
            only: `model` (the bare state dict), `optimizer`, or `all` (the same tree); or a glob, such as `blocks.*`,
                for the names of the model that match; or `lora`, for an adapter as a folder that PEFT loads. Default:
                `model` for `.safetensors`, else `all`.
            merge_lora: write the model with its LoRA adapter added to the weights, as PEFT's `merge_and_unload` does.
            base: with `merge_lora`, the base model, if the checkpoint has the adapter alone.
            adapter: with `merge_lora` or `only="lora"`, the adapter, if there are several.
            map: new names of the model by old ones, or the path of a JSON of them, such as `match(...).fix`.
            like: a Hugging Face folder, or its `config.json`: `out` is a folder with the same names, shapes, dtypes and
                files, the config and the tokenizer. The set is complete, or it is refused. With `only="lora"` or
                `merge_lora`: an adapter's folder or JSON that states what no file here does, such as `lora_alpha`.
            assume: with `like`, accept pairs for which only shapes or a trainer's defaults speak.
            strip_prefix: a prefix to remove from names, such as `module.`.
            rename: `OLD=NEW` for a tensor or module, `OLD.=NEW.` for a prefix of names; applied in this order, after
                `map` and `strip_prefix`. Optimizer state follows the names of the model.
            keep_names: keep the names of wrappers, such as `module.` and `_orig_mod.`; False takes them out. By default
                the whole tree keeps them, and a part alone loses them.
            layout: of a `.dcp`: `saved` keeps the tree, for the script that saved it; `flat` moves the model and the
                optimizer to `model` and `optimizer`, as torch's state_dict API names them.
            dtype: torch dtype for the floating-point tensors of the model, such as `bfloat16`.
            max_shard_size: bytes of tensors per file of safetensors (which get a Hugging Face index) or of a DCP, or a
                text such as `5GB`.
            tied: for safetensors: `keep` writes a tied weight under each name, `drop` only under the first.
            keep_types: in a `.pt`, keep values that plain `torch.load` refuses (timedeltas, numpy's values …) instead
                of converting them to the nearest type that it accepts.
            force: overwrite an existing output.
            allow_missing: leave out tensors that are not whole, and list them, instead of refusing.
            fill: with `allow_missing`: `nan` or `zero` to put into holes, which are listed; without it a tensor with
                a hole is left out.
            fill_from: another checkpoint of the same run, from which missing or damaged regions are taken; each is
                listed, and the output says that it is not whole. A checkpoint of another run is refused.
            dequantize: write the values of quantized weights, as their class or library computes them. Without it a
                tensor whose class has its own scales is refused, and other codes are written as they are.
            prefer_rank: take this rank's copy of a tensor whose copies differ.
            check: read the output back with the format's own library before it gets its name, and compare it with the
                shards; for a dry run, compare the source with its checksums.
            unchecked: do not compare the source with the checksums that it states.
            manifest: write the SHA-256 of every tensor and file into a JSON beside the output.
            provenance: record in the output its source (name, step, ranks), filled values and omissions.
            dry_run: plan and check, write nothing.
            resume: keep a partial output if interrupted, and continue the partial output of the same call.
            jobs: threads.
            progress: called with the bytes written, or read back, and the current tensor.

        Raises:
            NotWholeError: a tensor is missing, overlaps, contradicts, or was found damaged before anything was written.
            DamagedError: a zip entry does not match its checksum.
            OutputExistsError, NoSpaceError: the output exists, or does not fit on the disk.
            ReadError, WriteError: a file cannot be read or written; no partial output gets the output's name.
            UsageError: the options contradict each other.
        """
        given = locals()  # the arguments, before any other local
        from ckptools.consolidate.options import ConsolidateOptions
        from ckptools.consolidate.run import consolidate as write
        from ckptools.files.opening import check_path

        check_path(out)
        options = ConsolidateOptions(**{known.name: given[known.name] for known in fields(ConsolidateOptions)})
        return write(self.with_all_ranks(), out, options, progress)

    @property
    def plot(self) -> CheckpointPlots:
        """The checkpoint's pictures, such as `ck.plot.ranks()`, `ck.plot.layout(key)` and `ck.plot.heat("rms")`."""
        from ckptools.pictures.plots import CheckpointPlots

        return CheckpointPlots(self)

    # by name

    @cached_property
    def _by_name(self) -> dict[str, tuple[str, Any]]:
        """Value or tensor by full name, which begins with the section, each with its name in `records`."""
        from ckptools.keys.entries import entries_of

        found: dict[str, tuple[str, Any]] = {}
        for entry in entries_of(self):
            begins = entry.name == entry.section or entry.name.startswith(f"{entry.section}.")
            found[entry.name if begins else f"{entry.section}.{entry.name}"] = entry.name, entry.value
        return found

    @cached_property
    def _names(self) -> dict[str, str]:
        """Full names, with the section, by their names in `records`."""
        return {known: name for name, (known, _) in self._by_name.items()}

    def __getitem__(self, name: str) -> Any:
        """Return the lazy tensor or value of a name; for a prefix of names, such as a section, a mapping.

        The section may be left out where `records` has no section: `ck["model.embed.weight"]` is `ck["embed.weight"]`.

        Raises:
            KeyError: there is no such name; the message gives the nearest.
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
        """The names for users, without facts that only ckptools itself uses."""
        return sorted(set(super().__dir__()) - INSIDE)

    def close(self) -> None:
        """Drop what was read from other ranks' files; lazy tensors that need them read them again."""
        if self.other_ranks is not None:
            self.other_ranks.close()

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def with_all_ranks(self) -> Checkpoint:
        """The checkpoint with every rank's structure, which is read now unless it was read before.

        Raises:
            CkptoolsError: it cannot be opened any more.
        """
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
        """A picture of the checkpoint's ranks beside the HTML, because code hosts strip drawings from HTML."""
        return {"image/svg+xml": self.plot.ranks().svg} if len(self.files) > 1 else {}


def _with_states(optimizer: Optimizer) -> Optimizer:
    """Wrap each parameter's state in a mapping with a `repr` of its own."""
    from ckptools.training_state.sections import section_name

    path = f"{section_name(optimizer.path)}.state"
    state = {
        n: StateDict(str(n), v, f"{path}.{n}.") if isinstance(v, Mapping) else v for n, v in optimizer.state.items()
    }
    return replace(optimizer, state=StateDict(f"{optimizer.name}.state", state))
