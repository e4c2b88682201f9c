"""The options of `consolidate`, which the command line and Python share, and the renaming that they ask for."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from ckptools.consolidate.writers.layout import OutputContents, WriteOptions
from ckptools.dtypes import ITEMSIZE, SHORT, is_floating
from ckptools.errors import RefusedError, UsageError
from ckptools.model.checkpoint import Checkpoint
from ckptools.model.tree import describe_for_error, empty_like, leaf_at, with_leaves
from ckptools.option import option, spelled
from ckptools.text import KeyPath, clip, few, parse_bytes, plural
from ckptools.training_state.models import models_of, trained_model
from ckptools.training_state.optimizers import UNNAMED, Naming, optimizers_of
from ckptools.training_state.sections import Section, flat_key, is_flat_optimizer, sections_of_kind
from ckptools.training_state.wrappers import WRAPPERS, bare_name, ddp_prefix, without_ddp, without_wrappers

MAX_NAMED = 5
"""At most this many names are listed in a note."""

FILLS = ("nan", "zero")
"""The values that can fill a hole."""

SAVED, FLAT = "saved", "flat"
LAYOUTS = (SAVED, FLAT)
"""The trees that a DCP can have: the source's, or the one of torch's state_dict API."""


@dataclass(frozen=True)
class ConsolidateOptions:
    """The parts of a checkpoint to write, the form of the output, and the checks before the output gets its name.

    Each field is an option of the command and an argument of `ckptools.Checkpoint.consolidate`, with the same name and
    default. `jobs` is among the command's options for opening; None means one thread per core, at most four.
    """

    format: str | None = option(
        None,
        "pt, safetensors or dcp, for a name without suffix (a file gets that suffix) or DIR/.",
        metavar="pt|safetensors|dcp",
    )
    only: str | None = option(
        None,
        "model (the bare state dict), optimizer, or all (the same tree); or a glob of names of the model, such as"
        " 'blocks.*'; or lora, a LoRA adapter as a folder that PEFT loads. safetensors: model; else: all.",
        common=True,
        metavar="PART",
    )
    merge_lora: bool = option(False, "Write the model with its LoRA adapter added to the weights, as PEFT merges it.")
    base: str | Path | None = option(
        None,
        "With --merge-lora: the base model, a Hugging Face folder, where the checkpoint has the adapter alone.",
        metavar="HF",
        typed=str | None,
    )
    adapter: str | None = option(
        None, "With --merge-lora or --only lora: the adapter, where there are several.", metavar="NAME"
    )
    map: Mapping[str, str] | str | Path | None = option(
        None, "A JSON of old name to new, such as match --write-map writes.", typed=Path | None
    )
    like: str | Path | None = option(
        None,
        "Write DIR/ like this Hugging Face folder or config.json: its names, shapes, dtypes, files, config, tokenizer. "
        "With --only lora or --merge-lora: take what no file here states, such as alpha, from this adapter.",
        common=True,
        metavar="ORIGINAL",
        typed=str | None,
    )
    assume: bool = option(False, "With --like: take what only shapes or a trainer's defaults speak for.")
    strip_prefix: str | None = option(None, "Take this beginning of names away, such as module.", metavar="PREFIX")
    rename: Sequence[str] = option(
        (),
        "Rename a tensor, or a module with all below it; with a dot behind both, a beginning of names.",
        metavar="OLD=NEW",
        typed=list[str],
    )
    keep_names: bool | None = option(
        None,
        "Keep names of wrappers, such as module. and _orig_mod., or take them out. By default the whole tree keeps "
        "them, and a part alone loses them.",
    )
    layout: str = option(
        "saved",
        ".dcp: saved keeps the tree, for the script that saved it; flat moves the model to model and the optimizer to "
        "optimizer, for torch's state_dict API.",
        metavar="saved|flat",
    )
    dtype: str | None = option(
        None,
        "dtype for the model's floating-point tensors, such as bf16; others keep theirs.",
        common=True,
        metavar="DTYPE",
    )
    max_shard_size: int | str | None = option(
        None,
        "Bytes of tensors per file of safetensors (several get an index) or of a DCP, such as 5GB.",
        metavar="SIZE",
        typed=str | None,
    )
    tied: str = option(
        "keep",
        "safetensors: keep writes a tied weight under each name, drop only under the first.",
        metavar="keep|drop",
    )
    keep_types: bool = option(False, "Keep timedeltas, numpy arrays and the like, which plain torch.load refuses.")
    force: bool = option(False, "Overwrite an output that exists.", common=True)
    allow_missing: bool = option(False, "Leave out and list what is not whole, instead of refusing.", common=True)
    fill: str | None = option(
        None, "With --allow-missing: nan or zero in the place of holes, which are listed.", metavar="nan|zero"
    )
    fill_from: str | Path | None = option(
        None,
        "Take what is missing or damaged from another checkpoint of the same run, and keep a record of it in the "
        "output; one of another run is refused.",
        common=True,
        metavar="OLDER",
        typed=str | None,
    )
    check: bool = option(
        False,
        "Let torch or safetensors read the output back, and compare it with the shards, byte for byte; "
        "with --dry-run: compare the source with its checksums.",
        common=True,
    )
    unchecked: bool = option(False, "Do not compare the source with the checksums that it states.")
    manifest: bool = option(False, "Write sha256 of every tensor and file into OUT.manifest.json.")
    provenance: bool = option(
        True, "Let the output say which checkpoint it was made of, and what was filled in or left out."
    )
    dequantize: bool = option(
        False,
        "Write the values of quantized weights, as their class or library computes them: torchao, bitsandbytes, fp8 "
        "blocks, compressed-tensors, MXFP4, GPTQ, AWQ. Codes of any other kind are refused.",
    )
    prefer_rank: int | None = option(None, "Where ranks hold different copies of one tensor, take this rank's.")
    dry_run: bool = option(False, "Check and plan; write nothing.", common=True)
    resume: bool = option(False, "If it is cut short, keep what was written; the same command goes on from there.")
    jobs: int | None = None

    @property
    def threads(self) -> int:
        """Number of threads that copy: two per core, so that one reads while the other waits for its writes."""
        from ckptools.tensor_io.fetch_ahead import thread_count

        return thread_count(self.jobs, most=4, per_core=2)


def write_options(options: ConsolidateOptions, streamed: bool) -> WriteOptions:
    """The options of the writer, with the dtype's full name in place of a short one, such as `bf16`."""
    if options.dry_run and options.check and options.unchecked:
        checks, does_not = spelled("check", True), spelled("unchecked", True)
        text = f"{checks} compares the source with its checksums, and {does_not} does not: give one of them"
        raise UsageError(None, text)
    name = options.dtype
    dtype = None if name is None else {short: long for long, short in SHORT.items()}.get(name, name)
    if dtype is not None and (dtype not in ITEMSIZE or not is_floating(dtype) or dtype.startswith("float4")):
        raise UsageError(
            None, f"{spelled('dtype', name)}: choose a floating-point dtype, such as float32, bfloat16, float16"
        )
    if options.tied not in ("keep", "drop"):
        raise UsageError(None, f"{spelled('tied')} {options.tied}: choose keep or drop")
    if options.layout not in LAYOUTS:
        raise UsageError(None, f"{spelled('layout', options.layout)}: choose {' or '.join(LAYOUTS)}")
    limit = _nbytes(options.max_shard_size)
    return WriteOptions(dtype, limit, options.tied, options.keep_types, streamed, options.layout)


def _nbytes(given: int | str | None) -> int | None:
    """The bytes of tensors per file, which may be given as a text such as `5GB`; None for no limit."""
    size = parse_bytes(given) if isinstance(given, str) else given
    if given is not None and (type(size) is not int or size < 0):
        raise UsageError(
            None, f"{spelled('max-shard-size')} {given}: expected a size such as 5GB or 500MiB, or a number of bytes"
        )
    return size


def hole_rule(options: ConsolidateOptions) -> str | None:
    """The rule for a tensor with a hole: None to refuse it, `leave` to leave it out, or the fill value."""
    fill = options.fill
    if fill is not None and fill not in FILLS:
        raise UsageError(None, f"{spelled('fill', fill)}: choose nan or zero")
    if fill is not None and not options.allow_missing:
        raise UsageError(
            None,
            f"{spelled('fill')}: nothing that has a hole is written; add {spelled('allow-missing', True)}",
        )
    return fill or ("leave" if options.allow_missing else None)


# -- new names: first a map, then a prefix to strip, then rules --------------------------------------------------------


class RenameRule(NamedTuple):
    """One rule as the user gave it, and the function that applies it to a name."""

    given: str
    new_name: Callable[[str], str]


class Renaming(NamedTuple):
    """The renaming that the user asked for: a map from old to new names, then rules that apply to every name."""

    names: Mapping[str, str]
    rules: Sequence[RenameRule]

    def of(self, names: Iterable[str], path: Path) -> tuple[dict[str, str], list[str]]:
        """Map every name of a model to its new name; also return a note on entries that match no name."""
        now = {name: self.names.get(name, name) for name in names}
        unknown = [old for old in self.names if old not in now]
        if self.names and len(unknown) == len(self.names):
            raise UsageError(path, f"{spelled('map')}: the model has none of its {len(unknown)} names; {_begin(now)}")
        for rule in self.rules:
            after = {old: rule.new_name(new) for old, new in now.items()}
            if not all(after.values()):
                lost = next(old for old, new in after.items() if not new)
                raise UsageError(path, f"{rule.given}: nothing would be left of the name {describe_for_error(lost)}")
            if after == now:
                raise UsageError(path, f"{rule.given}: fits no name of the model; {_begin(now)}")
            now = after
        lacks = f"the model has no {few(list(map(describe_for_error, unknown)), MAX_NAMED)}"
        return now, [f"{spelled('map')}: {lacks}"] if unknown else []


def _begin(now: Mapping[str, str]) -> str:
    return f"its names are such as {few([describe_for_error(name) for name in now.values()][:2])}"


def renaming_of(options: ConsolidateOptions) -> Renaming | None:
    """The renaming that the user asked for; None if there is none.

    Raises:
        ReadError: the map cannot be read.
        UsageError: a rule is malformed.
    """
    rules = []
    if options.strip_prefix is not None:
        begin = options.strip_prefix.rstrip(".") + "."
        if begin == ".":
            raise UsageError(
                None, f"{spelled('strip-prefix')} is empty; give the beginning of names that goes, such as module."
            )
        rules.append(_rule(f"{spelled('strip-prefix')} {options.strip_prefix}", begin, ""))
    for text in options.rename:
        old, sign, new = text.partition("=")
        if not sign or not (old or new):
            raise UsageError(None, f"{spelled('rename')} {text}: expected OLD=NEW, such as blocks=layers or module.=")
        rules.append(_rule(f"{spelled('rename')} {text}", old, new))
    names = _map(options.map)
    return Renaming(names, rules) if names or rules else None


def _map(given: Mapping[str, str] | str | Path | None) -> Mapping[str, str]:
    if given is None or isinstance(given, Mapping):
        bad = next(((old, new) for old, new in (given or {}).items() if not (new and isinstance(new, str))), None)
        if bad is not None:
            raise UsageError(None, f"map: expected a name for {describe_for_error(bad[0])}, found {bad[1]!r:.80}")
        return given or {}
    from ckptools.keys.renames import read_map

    return read_map(Path(given))


def _rule(given: str, old: str, new: str) -> RenameRule:
    """A rule for the tensor `old` and all below a module `old`; for a prefix if `old` is empty or ends in a dot."""
    from ckptools.keys.renames import replaced_module, replaced_prefix

    if not old or old.endswith("."):
        if new and not new.endswith("."):
            raise UsageError(None, f"{given}: {old or 'nothing'} is the beginning of names; end {new} with a dot too")
        return RenameRule(given, lambda name: replaced_prefix(name, old, new))
    if not new or new.endswith("."):
        raise UsageError(None, f"{given}: {old} is a whole name; end both or none with a dot")
    return RenameRule(given, lambda name: replaced_module(name, old, new))


# -- rename the keys of an output: those of the model and, like them, those of the optimizer's state -------------------
# A `.pt` keeps the source's tree, whose numbers `optimizer.load_state_dict` accepts. An output that is a flat list of
# tensors gets names in place of numbers, where they are known, and a note says where the names come from. A parameter
# without a name keeps its number.


NewKey = Callable[[Any], Any]
"""Maps a key of a section to its new key."""

Move = tuple[Section, KeyPath, NewKey]
"""A section, its key path in the tree of the output, and the function that maps its keys."""


def renamed(selection: OutputContents, renaming: Renaming) -> OutputContents:
    """Rename a selection; optimizer state keyed by number keeps its numbers.

    Raises:
        UsageError: a rule fits no name.
        RefusedError: two names become the same, or an optimizer has state of a parameter that the model lacks.
    """
    source = selection.source
    names, notes = renaming.of(_names(source), source.path)
    follow = _following(names, source.path)

    def new_key_of(section: Section) -> NewKey | None:
        if section.kind == "model":
            return lambda key: names.get(key, key) if key in section.value else key
        return follow if section.kind == "optimizer" else None

    changed = [(old, new) for old, new in names.items() if old != new]
    example = " is ".join(clip(describe_for_error(name), 80) for name in changed[0]) if changed else ""
    return replace(
        _with_new_keys(selection, new_key_of),
        notes=[*selection.notes, *notes, f"names of the model: {len(changed)} of {len(names)} are new ({example})"],
        renamed=names,
    )


def unwrapped(selection: OutputContents, options: ConsolidateOptions) -> OutputContents:
    """Take the names of wrappers out of a selection's names, unless the output keeps them.

    The whole tree keeps them, because it is for the script that saved it, whose modules are wrapped. A part alone, and
    the trained model of a DCP for torch's state_dict API, has the names of the bare module, which load into any. If
    the user gives new names, only these count. The optimizer's state follows its model.

    Raises:
        RefusedError: two names become the same.
    """
    trained = trained_model(selection.source)
    names_now = [] if trained is None else [selection.renamed.get(name, name) for name in trained.value]
    following = {} if trained is None else _bare_names(selection, trained.path, names_now)
    models = [section for section, _ in selection.places if section.kind == "model"]
    if selection.part == "all" and options.layout == FLAT and options.keep_names is None:
        models = [section for section in models if trained is not None and section.path == trained.path]
    bare = {section.path: _bare_names(selection, section.path, section.value) for section in models}

    def new_key_of(section: Section) -> NewKey | None:
        if section.path in bare and section.kind == "model":
            return lambda key: bare[section.path].get(key, key)
        return _following_bare(selection, section, following) if section.kind == "optimizer" else None

    sections = [(s, new_key) for s, _ in selection.places if (new_key := new_key_of(s)) is not None]
    names = [(name, new_key(name)) for section, new_key in sections for name in _keys_by_name(section)]
    changed = [(old, new) for old, new in names if old != new]
    if _keeps_names(selection, options):
        if not changed or options.keep_names or selection.renamed:
            return selection
        said = f"names of wrappers are kept, as in {changed[0][0]}; {spelled('keep-names', False)} takes them out"
        return replace(selection, notes=[*selection.notes, said])
    made = _with_new_keys(selection, new_key_of, f"{spelled('keep-names', True)} keeps the names of wrappers")
    every = {old: new for model in (*bare.values(), following) for old, new in model.items()}
    made.renamed = {old: every.get(new, new) for old, new in selection.renamed.items()} or every
    if changed:
        example = " is ".join(clip(describe_for_error(name), 80) for name in changed[0])
        counted = f"{len(changed)} of {plural(len(names), 'name')} ({example})"
        made.notes = [
            *made.notes,
            f"names of wrappers are taken out of {counted}; {spelled('keep-names', True)} keeps them",
        ]
    return made


def _keeps_names(selection: OutputContents, options: ConsolidateOptions) -> bool:
    """Whether the output keeps the names of wrappers."""
    if options.keep_names is not None or options.layout == FLAT:
        return bool(options.keep_names)
    return selection.part == "all" or bool(selection.renamed)


def _keys_by_name(section: Section) -> list[str]:
    """The names of parameters in a model or an optimizer; none for an optimizer that has numbers."""
    if section.kind == "model":
        return list(section.value)
    if is_flat_optimizer(section.value):
        return list(dict.fromkeys(flat_key(key)[1] for key in section.value))
    return [key for key in section.value["state"] if isinstance(key, str)]


def _bare_names(selection: OutputContents, path: KeyPath, names: Iterable[str]) -> dict[str, str]:
    """Each of the output's names of the model at `path` without wrappers, judged by all names of that model."""
    source, new = selection.source, selection.renamed
    here = [*(model.section for model in models_of(source)), *sections_of_kind(source, "model")]
    every = ({new.get(name, name) for name in section.value} for section in here if section.path == path)
    wanted = set(names)
    leading = ddp_prefix(next((known for known in every if known >= wanted), wanted))
    return {name: bare_name(name, leading) for name in names}


def _following_bare(selection: OutputContents, section: Section, names: Mapping[str, str]) -> NewKey:
    """A function that takes wrappers out of an optimizer's keys, so that they stay the names of its model."""
    own = [str(name) for name in naming_of(selection, section).names.values()]
    leading, bare = ddp_prefix(list(names) or own), frozenset(names.values())

    def new_name(key: Any) -> Any:
        if not isinstance(key, str) or key in names:
            return names.get(key, key)
        short = without_wrappers(key)
        return short if short in bare else bare_name(key, leading)

    return new_name


def by_name(selection: OutputContents) -> OutputContents:
    """Key the state of every optimizer by name, as far as names are known."""
    sections = [s for s, _ in selection.places if s.kind == "optimizer" and not is_flat_optimizer(s.value)]
    namings = {section.path: naming_of(selection, section) for section in sections}

    def new_key_of(section: Section) -> NewKey | None:
        naming = namings.get(section.path)
        return None if naming is None else lambda key: naming.names.get(key, key)

    notes = [note for naming in namings.values() for note in naming_notes(naming)]
    return replace(_with_new_keys(selection, new_key_of), notes=[*selection.notes, *notes])


def naming_of(selection: OutputContents, section: Section) -> Naming:
    """The names of an optimizer's parameters in the output."""
    found = (o.naming for o in optimizers_of(selection.source).values() if o.path == section.path)
    naming, new = next(found, Naming({}, "fqn", (), (), "")), selection.renamed
    return naming._replace(names={new.get(i, i): new.get(name, name) for i, name in naming.names.items()})


def naming_notes(naming: Naming) -> Iterator[str]:
    """Notes for the user on the names in the output."""
    if naming.note:
        yield f"optimizer: {naming.note}"
    if naming.unnamed and naming.by != "fqn":
        yield f"optimizer: state without a name is written under its number ({len(naming.unnamed)})"


def _names(source: Checkpoint) -> list[str]:
    """The names that may be renamed: the model's names or, without a model, the names that the optimizer knows."""
    models = sections_of_kind(source, "model")
    if models:
        return list(dict.fromkeys(str(name) for section in models for name in section.value))
    known = (name for optimizer in optimizers_of(source).values() for name in optimizer.naming.names.values())
    return list(dict.fromkeys(known))


def _following(names: Mapping[str, str], path: Path) -> NewKey:
    """A function that renames an optimizer's keys like the parameters of the model, apart from wrappers."""
    bare = {without_ddp(name): name for name in names}

    def new_name(key: Any) -> Any:
        own = key if key in names else bare.get(without_ddp(key)) if isinstance(key, str) else None
        if own is not None:
            return names[own]
        if not isinstance(key, str) or key.startswith(UNNAMED) or key.isdecimal():
            return key
        text = f"the model has no {describe_for_error(key)}, of which the optimizer has state, so that it cannot follow"
        raise RefusedError(path, f"{text} the new names; write the model alone: {spelled('only', 'model')}")

    return new_name


def _with_new_keys(
    selection: OutputContents, new_key_of: Callable[[Section], NewKey | None], way: str = "rename one of them"
) -> OutputContents:
    """Rename the keys of sections; `way` is what the user can do if two names become the same."""
    tree, places = selection.tree, []
    moves: list[Move] = []
    for section, at in selection.places:
        if (new_key := new_key_of(section)) is not None:
            written = leaf_at(tree, at)
            new = _renamed_section(section, written, new_key, selection.source.path, way)
            tree = with_leaves(tree, {at: new})
            moves.append((section, at, new_key))
            # A section has the names that are left out too, under which these are listed.
            new = new | {
                _moved((key,), [(section, (), new_key)])[0]: v for key, v in section.value.items() if key not in written
            }
            if not at:  # a section at the root has only some of the tree's keys
                mine = {_moved((key,), moves[-1:])[0] for key in section.value}
                new = {key: value for key, value in new.items() if key in mine}
            section = section._replace(value=new)
        places.append((section, at))
    return replace(
        selection,
        tree=tree,
        places=tuple(places),
        model_paths={_moved(path, moves) for path in selection.model_paths},
        left_out={_moved(path, moves): why for path, why in selection.left_out.items()},
        missing={_moved(path, moves): boxes for path, boxes in selection.missing.items()},
        lost={_moved(path, moves) for path in selection.lost},
        carried={_moved(path, moves): filled for path, filled in selection.carried.items()},
        borrowed={_moved(path, moves): boxes for path, boxes in selection.borrowed.items()},
    )


def _moved(path: KeyPath, moves: Iterable[Move]) -> KeyPath:
    for section, at, new_key in moves:
        n = len(at)
        if path[:n] != at or len(path) == n or not section.holds((*section.path, *path[n:])):
            continue
        if section.kind == "model":
            return (*path[:n], new_key(path[n]), *path[n + 1 :])
        if is_flat_optimizer(section.value):
            return (*path[:n], _flat_key(path[n], new_key), *path[n + 1 :])
        if path[n] == "state" and len(path) > n + 1:
            return (*path[: n + 1], new_key(path[n + 1]), *path[n + 2 :])
    return path


def _renamed_section(section: Section, node: Any, new_key: NewKey, path: Path, way: str) -> Any:
    if section.kind == "model":
        made = _with_keys(node, new_key, path, way)
        return _with_new_modules(made, [(key, new_key(key)) for key in node])
    if is_flat_optimizer(section.value):
        return _with_keys(node, lambda key: _flat_key(key, new_key) if key in section.value else key, path, way)
    groups = type(node["param_groups"])(_renamed_group(group, new_key) for group in node["param_groups"])
    return with_leaves(node, {("state",): _with_keys(node["state"], new_key, path, way), ("param_groups",): groups})


def _flat_key(key: str, new_key: NewKey) -> str:
    """Rename a key such as `state.<fqn>.exp_avg` by the new name of its parameter."""
    kind, fqn, slot = flat_key(key)
    return f"{kind}{new_key(fqn)}.{slot}"


def _renamed_group(group: Mapping[str, Any], new_key: NewKey) -> dict[str, Any]:
    listed = {k: v for k, v in group.items() if k in ("params", "param_names") and isinstance(v, (list, tuple))}
    known = {k: v for k, v in listed.items() if all(isinstance(i, (int, str)) for i in v)}
    return {**group, **{key: type(value)(map(new_key, value)) for key, value in known.items()}}


def _with_keys(node: Any, new_key: NewKey, path: Path, way: str) -> Any:
    """Copy a dict into one of the same class, under new keys."""
    made = empty_like(node)
    came_from: dict[Any, Any] = {}
    for key, value in node.items():
        new = new_key(key)
        if new in made:
            both = f"{describe_for_error(came_from[new])} and {describe_for_error(key)}"
            raise RefusedError(path, f"{both} would both be called {describe_for_error(new)}; {way}")
        made[new], came_from[new] = value, key
    return made


def _with_new_modules(made: Any, names: Iterable[tuple[Any, Any]]) -> Any:
    """Rename the modules of a state dict (`_metadata`) like the tensors in them."""
    versions: Any = getattr(made, "_metadata", None)
    if not isinstance(versions, dict):
        return made
    modules: dict[str, str] = {}
    for old, new in names:
        for before, after in _modules(str(old), str(new)):
            modules.setdefault(before, after)
    modules.setdefault("", "")
    made._metadata = type(versions)((modules[m], v) for m, v in versions.items() if m in modules)
    return made


def _modules(old: str, new: str) -> Iterable[tuple[str, str]]:
    """Yield the old and the new name of each module around a tensor, as long as both end alike, but for wrappers."""
    words = {wrapper.word for wrapper in WRAPPERS}
    while old:
        last = old.rpartition(".")[2]
        if new and last == new.rpartition(".")[2]:
            new = new.rpartition(".")[0]
        elif last not in words:
            return
        old = old.rpartition(".")[0]
        yield old, new
