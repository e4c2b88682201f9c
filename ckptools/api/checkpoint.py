"""A checkpoint as users hold it: what its readers found, with methods that load, verify and consolidate."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ckptools.api.methods import ValueMethods, in_python
from ckptools.api.state_dict import RandomStates, RawTree, StateDict
from ckptools.api.tensor import Tensor
from ckptools.files.opening import check_path, path_of
from ckptools.model import checkpoint as checkpoint_data
from ckptools.model.checkpoint import RankFile
from ckptools.model.problems import Problem, Rows, as_html
from ckptools.model.tree import fqn_of
from ckptools.tensor_io.fetch_ahead import Progress
from ckptools.text import no_such_key
from ckptools.training_state.sections import Section, model_of, rng_of, schedulers_of, section_name, sections_of

if TYPE_CHECKING:
    from ckptools.api.plots import CheckpointPlots, Difference
    from ckptools.contents.record import Keys, Shown
    from ckptools.formats.shards_of_other_ranks import Resolver
    from ckptools.match.record import Match
    from ckptools.model.verdict import Verdict
    from ckptools.training_state.optimizers import Optimizer
    from ckptools.verify.record import Verification


@dataclass(frozen=True, repr=False)
class Checkpoint(ValueMethods, checkpoint_data.Checkpoint):
    """A distributed checkpoint, opened: its structure is read, its tensors are lazy.

    A context manager: `with ckptools.open(path) as ck:` forgets at its end what was read of other ranks' files. Beside
    what stands here it has everything that `ckptools.model.checkpoint.Checkpoint` lists: `path`, `format`, `files`,
    `world_size`, `step`, `problems`, `ranks` and more.

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
        return sections_of(self)

    def of_kind(self, kind: str) -> Rows[Section]:
        """The sections of one kind: `model`, `optimizer`, `scheduler`, `rng` or `other`."""
        return Rows(s for s in self.sections if s.kind == kind)

    @cached_property
    def model(self) -> Mapping[str, Any]:
        """The model's state dict: fqn to lazy tensor. Of several models the names are prefixed with the section."""
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
        found = {n: StateDict(n, v) if isinstance(v, Mapping) else v for n, v in schedulers_of(self).items()}
        return StateDict("schedulers", found)

    @cached_property
    def rng(self) -> RandomStates:
        """The saved random states: rank to generator to state, each with a fingerprint. Every rank's file is read."""
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
        from ckptools.api.plots import Difference, with_plots
        from ckptools.diff.compare import Wanted, compare
        from ckptools.keys.entries import Selection

        wanted = Wanted(values, rtol, atol, every_byte, Selection.given(filter, exclude, section), jobs)
        return with_plots(compare(self._with_all_ranks(), side_of(other), wanted, progress), Difference)

    @property
    def plot(self) -> CheckpointPlots:
        """Its pictures, such as `ck.plot.ranks()`, `ck.plot.layout(key)` and `ck.plot.heat("rms")`."""
        from ckptools.api.plots import CheckpointPlots

        return CheckpointPlots(self, self)

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
            return replace(value, name=known) if isinstance(value, Tensor) else value
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


def side_of(side: Checkpoint | str | Path) -> checkpoint_data.Checkpoint | Path:
    """A side of a comparison: a checkpoint with every rank's structure read, or the path of a file of digests."""
    from ckptools.diff.digest_file import is_digest_file
    from ckptools.formats.open import open_checkpoint
    from ckptools.training_state import modules

    if isinstance(side, Checkpoint):
        return side._with_all_ranks()
    check_path(side)
    if side != "" and is_digest_file(path_of(side)):
        return path_of(side)
    return open_checkpoint(side, all_ranks=True, read_file=modules.read_file)


def _with_states(optimizer: Optimizer) -> Optimizer:
    """The optimizer with the state of each parameter as a mapping that shows itself."""
    path = f"{section_name(optimizer.path)}.state"
    state = {
        n: StateDict(str(n), v, f"{path}.{n}.") if isinstance(v, Mapping) else v for n, v in optimizer.state.items()
    }
    return replace(optimizer, state=StateDict(f"{optimizer.name}.state", state))
