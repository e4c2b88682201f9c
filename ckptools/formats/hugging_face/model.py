"""One model of a Hugging Face folder, joined from its weight files (safetensors or torch.save)."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from ckptools.dtypes import ITEMSIZE
from ckptools.errors import ReadError, UnsafePathError
from ckptools.files.opening import (
    File,
    JsonError,
    content_of,
    head_of,
    parse_json,
    read_json,
    reading,
    what_is,
)
from ckptools.files.safetensors_header import Header, read_header, source_of
from ckptools.formats.hugging_face.files import (
    Index,
    ModelFiles,
    check_index,
    check_total_size,
    missing_files,
    missing_of_sets,
    model_files_in,
    models_of_folder,
    read_index,
)
from ckptools.formats.options import Options
from ckptools.formats.shared.checkpoint_builder import Fault, FileSet
from ckptools.formats.shared.companions import companions_in
from ckptools.model.facts import RankFile
from ckptools.model.problems import Code, Problem
from ckptools.model.provenance import KEY, Said
from ckptools.model.regions import Box, Ints
from ckptools.model.shards import Shard
from ckptools.model.tensor import Tensor
from ckptools.pickles.classes.tensors import TORCHAO, of_class
from ckptools.pickles.machine import gc_paused
from ckptools.rules.files import missing, strays
from ckptools.text import few

# -- tensors of torchao's classes, whose parts are stored as separate safetensors --------------------------------------
# `tensor_names` lists every tensor; each has a JSON of its own in `__metadata__`, with its class, its attributes and
# the names of its parts. The part `qdata` of `a.weight` is the tensor `a._weight_qdata`. transformers writes all of it
# into every file of a model, also for tied weights that it leaves out.
#
# Source: torchao 0.18.0, prototype/safetensors (`flatten_tensor_state_dict`, `TensorSubclassAttributeJSONEncoder`);
# transformers 5.23, quantizers/quantizer_torchao.py.

NAMES = "tensor_names"
"""The key of `__metadata__` that lists all tensors."""

PLAIN = "Tensor"
CODES, SCALE = "qdata", "scale"


class Description(NamedTuple):
    """The description of one tensor in `__metadata__`; without a class if it cannot be read.

    Attributes:
        kind: name of its class; `Tensor` for a plain one.
        attributes: attributes of the class other than its parts.
        parts: the tensors in it, by the names of their attributes.
    """

    kind: str
    attributes: Mapping[str, Any]
    parts: Mapping[str, str]


def descriptions(metadata: Mapping[str, str]) -> dict[str, Description]:
    """The tensors that torchao describes in the `__metadata__` of a file; empty if it is not torchao's."""
    names = _json(metadata.get(NAMES))
    if not isinstance(names, list) or not all(isinstance(name, str) and name in metadata for name in names):
        return {}
    return {name: _description(name, _json(metadata[name])) for name in names}


def _json(text: str | None) -> Any:
    try:
        return None if text is None else parse_json(text)
    except JsonError:
        return None


def _description(name: str, content: Any) -> Description:
    kind, attributes, parts = (content.get(key) if isinstance(content, dict) else None for key in KEYS)
    if kind == PLAIN:
        return Description(PLAIN, {}, {})
    module, dot, weight = name.rpartition(".")
    texts = isinstance(parts, list) and all(isinstance(part, str) for part in parts)
    if not (dot and isinstance(kind, str) and isinstance(attributes, dict) and texts and parts):
        return Description("", {}, {})
    return Description(kind, attributes, {part: f"{module}._{weight}_{part}" for part in parts})


KEYS = ("_type", "_data", "_tensor_data_names")


def put_together(tree: dict[Any, Any], described: Mapping[str, Description]) -> tuple[dict[Any, Any], list[Problem]]:
    """Replace the parts of torchao's tensors by the tensors, in the order of the parts; return also the problems."""
    owners = {part: name for name, one in described.items() for part in one.parts.values() if part in tree}
    made: dict[Any, Any] = {}
    for key, value in tree.items():
        owner = owners.get(key)
        if owner is None:
            made[key] = value
        elif owner not in made:
            made[owner] = _joined_tensor(tree, described[owner])
    return made, list(_problems(tree, described))


def _problems(tree: Mapping[Any, Any], described: Mapping[str, Description]) -> Iterator[Problem]:
    absent = []
    for name, one in described.items():
        lacking = [part for part in one.parts.values() if part not in tree]
        if not one.kind:
            yield Problem(Code.METADATA_CONTRADICTS, f"__metadata__ has a description of {name} that cannot be read")
        elif name in tree and one.parts:
            yield Problem(Code.METADATA_CONTRADICTS, f"{name} is here, and __metadata__ says that it is in parts")
        elif lacking and len(lacking) < len(one.parts):
            text = f"without {few(lacking)}, a part of it by __metadata__"
            yield Problem(Code.MODEL_PART_MISSING, text, None, name)
        elif lacking or (not one.parts and name not in tree):
            absent.append(name)
    if absent:
        text = f"__metadata__ describes {few(absent)}, which is not here; of tied weights only one is written"
        yield Problem(Code.MODEL_PART_MISSING, text, severity="note")


def _joined_tensor(tree: Mapping[Any, Any], one: Description) -> Tensor:
    """Join the parts of a tensor."""
    parts: dict[str, Any] = {part: tree[key] for part, key in one.parts.items() if key in tree}
    first: Tensor = parts[CODES] if CODES in parts else next(iter(parts.values()))
    state = {**{key: _attribute(value) for key, value in one.attributes.items()}, **parts}
    name = f"{TORCHAO}{one.kind}"
    if len(parts) < len(one.parts):
        lacking = few([part for part in one.parts if part not in parts])
        note = f"a tensor of class {name} without its {lacking}, which no file here has"
        return Tensor(first.shape, first.dtype, (), "unreadable", note=note)
    return of_class(name, _shape(one, first), _dtype(one, parts, first), state)


def _attribute(value: Any) -> Any:
    """An attribute as in a pickle; a dtype by its name, any other object as text."""
    return value.get("_data") if isinstance(value, dict) and value.keys() == {"_type", "_data"} else value


def _shape(one: Description, codes: Tensor) -> Ints:
    """The shape of the whole tensor, or, if its class does not state it, of its codes; a byte may hold two codes."""
    stated = one.attributes.get("shape")
    if isinstance(stated, list) and all(type(n) is int and n >= 0 for n in stated):
        return tuple(stated)
    two = one.kind == "NVFP4Tensor" or _attribute(one.attributes.get("elem_dtype")) == "float4_e2m1fn_x2"
    return (*codes.shape[:-1], 2 * codes.shape[-1]) if two and codes.shape else codes.shape


def _dtype(one: Description, parts: Mapping[str, Tensor], codes: Tensor) -> str:
    """The dtype of the values, or, if its class does not state it, of the scales."""
    stated = _attribute(one.attributes.get("dtype", one.attributes.get("orig_dtype")))
    if isinstance(stated, str) and stated in ITEMSIZE:
        return stated
    return "bfloat16" if one.kind == "Int4TilePackedTo4dTensor" else parts.get(SCALE, codes).dtype


# -- the model of a folder ---------------------------------------------------------------------------------------------


MAX_LINES = 6
"""Up to this many missing files get a line each."""


class WeightModel(FileSet):
    """One model of a folder, read from its weight files; `files` are these and the index.

    Attributes:
        weight_files: the content of the files that could be read.
    """

    def __init__(self, weights: ModelFiles, path: Path, options: Options) -> None:
        super().__init__(path)
        self.weights, self.options = weights, options
        self.tree: Any = None
        self.weight_files: list[WeightFile] = []
        self.bytes_read = 0

    def read(self) -> WeightModel:
        """Read the index and every weight file, and join their tensors.

        Raises:
            ReadError: no file of it can be read, or not the one that the user named.
            UnsafePathError: a file is a link out of the folder, or the index names one outside.
        """
        index, here, missing, unnamed = self._find()
        errors = [error for path in here if (error := self._read_file(path)) is not None]
        if errors and not self.weight_files:
            raise errors[0]
        lost = len(here) + len(missing) - len(self.weight_files)
        self.tree = self.weight_files[0].tree if len(here) == 1 and not missing and not index else self._joined(index)
        # Files whose content is not of the kind in their names.
        for one in self.weight_files:
            if one.safetensors != (one.path.suffix == ".safetensors"):
                what = "safetensors" if one.safetensors else "a torch.save file"
                self.problems.append(Problem(Code.NAME_CONTRADICTS, f"{one.path.name} is {what} by its content"))
            if one.sharded:
                text = f"{one.path.name} holds pieces of larger tensors: DCP wrote it, and its name does not say so"
                self.problems.append(Problem(Code.ONE_OF_SEVERAL, text))
        if index:
            wrong = check_index(index, {one.path.name: one.tree for one in self.weight_files})
            self.problems += wrong
        if index and not lost and not any(p.kind is Code.MODEL_PART_MISSING for p in wrong):
            self.problems += check_total_size(index, (t for t in self.tree.values() if isinstance(t, Tensor)))
        # torchao's tensors are joined from their parts by the descriptions in all files.
        described: dict[str, Description] = {}
        for one in self.weight_files:
            for name, description in one.described.items():
                if described.setdefault(name, description) != description:
                    text = f"{one.path.name} and another file describe {name} in two ways"
                    self.problems.append(Problem(Code.METADATA_CONTRADICTS, text, None, name))
        if described and isinstance(self.tree, dict):
            self.tree, problems = put_together(self.tree, described)
            self.problems += problems
        if unnamed or (lost and not index):
            text = "what the missing or damaged files hold is not known, not even by name"
            self.problems.append(Problem(Code.MODEL_PART_MISSING, text))
        return self

    @property
    def saved_as(self) -> str:
        """Describe how the model was saved."""
        kinds = " and ".join(sorted({".safetensors" if h.safetensors else ".bin" for h in self.weight_files}))
        count = sum(f.part != "index" for f in self.files)
        index = " and an index" if count < len(self.files) else ""
        return f"{'one' if count == 1 else count} {kinds}{index}, every tensor whole"

    def _find(self) -> tuple[Index | None, list[Path], list[Path], list[Path]]:
        """The index, the present files, the missing files, and the missing files that the index does not name.

        A regenerated index names no lost file, but the numbers in the names count them.
        """
        index, unnamed = None, list[Path]()
        if self.weights.index is None:
            here, absent = [f.path for f in self.weights.files], self._gaps()
        else:
            self._check_link(self.weights.index)
            index = read_index(self.weights.index)
            self.add_file(index.path, None, "index")
            self.bytes_read += self.files[-1].nbytes
            named = [index.path.with_name(name) for name in index.files]
            unnamed = [] if self._is_alone else missing_of_sets(named)
            paths = [*named, *unnamed]
            here = [path for path in paths if path.exists()]
            absent = sorted({*paths}.difference(here))
            unnamed = [path for path in absent if path in unnamed]
        names = [path.name for path in absent]
        if absent and not here:
            raise ReadError(self.path, f"nothing of the model is here; no file {few(names)}")
        self.files += (RankFile(path, None, "", "missing", 0, None) for path in absent)
        lines = [(name,) for name in names] if len(names) <= MAX_LINES else [tuple(names)]
        unlisted = {path.name for path in unnamed}
        for line in lines:
            counted = f", which the others' names count and {index.path.name} does not name" if index else ""
            more = counted if unlisted.issuperset(line) else ""
            self.problems.append(missing(line, more=more))
        return index, here, absent, unnamed

    @property
    def _is_alone(self) -> bool:
        """Whether the user wants only the file that was named."""
        return self.options.only_this_file and not self.path.is_dir()

    def _gaps(self) -> list[Path]:
        """Missing files, by the numbers in the names of others."""
        if self._is_alone:
            return []
        beyond = [f.path.name for f in self.weights.files if f.number is not None and f.number > int(f.total or 0)]
        self.problems += strays(beyond, "a number beyond how many there are")
        return missing_files(self.weights.files)

    def _check_link(self, path: Path) -> None:
        if path != self.path:
            self.options.check_link(path, self.path if self.path.is_dir() else self.path.parent)

    def _read_file(self, path: Path) -> ReadError | None:
        """Read one file; return its fault, or raise it for the file that the user named."""
        self._check_link(path)
        try:
            weights = read_weights(path, self.options)
        except ReadError as error:
            self.add_fault(path, error)
            return error
        self.weight_files.append(weights)
        self.files.append(RankFile(path, None, "", "read", weights.nbytes, weights.modified))
        self.bytes_read += weights.bytes_read
        return None

    def _joined(self, index: Index | None) -> dict[Any, Any]:
        """Merge the tensors of several files into one dict; each may be in only one file.

        Of two files with one tensor, the one that the index names is taken, else the first.
        """
        tree: dict[Any, Any] = {}
        where: dict[Any, str] = {}
        listed = index.weight_map if index is not None else {}
        for one in self.weight_files:
            if not isinstance(one.tree, dict):
                raise ReadError(one.path, f"holds a {type(one.tree).__name__}, not the names and tensors of a model")
            for name, value in one.tree.items():
                if name in where and index is None:
                    both = (where[name], one.path.name)
                    self.problems += strays(both, "both hold it; the first is shown", tensor=str(name))
                if name not in where or listed.get(name) == one.path.name:
                    tree[name], where[name] = value, one.path.name
        return tree


SHARDING_INFO = "DCP_SHARDING_INFO"
MAX_LIKELY = 1 << 32
"""A longer header means that the file is not safetensors."""


class WeightFile(NamedTuple):
    """The structure of one weight file: names and tensors of safetensors, or the whole tree of torch.save.

    `sharded` means that its tensors are pieces of larger ones (DCP); `names` are the dotted names in its pickle;
    `described` are torchao's descriptions of tensors that the file holds in parts.
    """

    path: Path
    tree: Any
    nbytes: int
    modified: float
    bytes_read: int
    safetensors: bool
    sharded: bool = False
    names: tuple[str, ...] = ()
    described: Mapping[str, Description] = MappingProxyType({})


def is_safetensors(head: bytes, path: Path) -> bool:
    """Whether a file is meant as safetensors: by its first bytes, or by its name if these are of no other kind."""
    return _begins_right(head) or (path.suffix == ".safetensors" and not content_of(head))


def _begins_right(head: bytes) -> bool:
    """Whether a file begins with a length and a JSON object."""
    return head[8:9] == b"{" and int.from_bytes(head[:8], "little") <= MAX_LIKELY


def read_weights(path: Path, options: Options) -> WeightFile:
    """Read the structure of one weight file.

    Raises:
        ReadError: it is damaged, or neither safetensors nor a torch.save file.
    """
    with File(path) as file:
        head = head_of(file)
        if is_safetensors(head, path):
            what = "" if _begins_right(head) else what_is(head)
            if what:
                raise ReadError(file.path, f"is {what}")
            with gc_paused():
                header = read_header(file)
                sources = {name: source_of(file, name, entry) for name, entry in header.tensors.items()}
                tree = {
                    name: Tensor(source.shape, source.dtype, (Shard(Box.whole(source.shape), None, source),))
                    for name, source in sources.items()
                }
            if KEY in header.metadata:
                options.said[file.path] = Said(header.metadata[KEY])
            described = descriptions(header.metadata)
            return WeightFile(
                file.path, tree, file.size, file.modified, header.size, True, _says_pieces(header), described=described
            )
    saved = options.read_file(path)
    return WeightFile(path, saved.tree, saved.nbytes, saved.modified, saved.bytes_read, False, names=saved.names)


def _says_pieces(header: Header) -> bool:
    """Whether DCP wrote the file and a tensor in it begins at an offset other than 0, whatever the file's name."""
    try:
        info = json.loads(header.metadata.get(SHARDING_INFO, "{}"))
    except (ValueError, RecursionError):
        return True
    entries = info.values() if isinstance(info, dict) else ()
    return any(isinstance(e, dict) and any(e.get("saved_offsets") or ()) for e in entries)


# -- models in folders of their own, beside training state that Accelerate or the Trainer wrote for all of them --------
#     checkpoint-500/unet/  unet_ema/                                     config.json and weights
#     checkpoint-500/optimizer.bin  scheduler.bin  random_states_{R}.pkl  as beside a model: see `companions`
#
# diffusers' training scripts write this by a hook, which takes the weights away from Accelerate; transformers' Trainer
# does if PEFT's adapter has a name. No file lists the folders. A folder with the config of a model and without weights
# has lost them; modules of sentence-transformers, such as `1_Pooling/`, have another config and may have no weights.
#
# Source: diffusers/examples/text_to_image/train_text_to_image.py, `save_model_hook`; accelerate/accelerator.py,
# `save_state`; peft/peft_model.py, `save_pretrained`; diffusers/configuration_utils.py, `to_json_string`. Checked on
# files of diffusers 0.42 with Accelerate 1.15.

CONFIGS = {"config.json": ("_class_name", "architectures"), "adapter_config.json": ("peft_type",)}
"""Names of configs, with keys of which a model's config has at least one."""

STATES = ("optimizer", "scheduler", "rng")


def model_folders(folder: Path) -> list[Path]:
    """The folders of models beside the training state in `folder`; empty without such a state.

    A folder called `model` may be the part of a composite; random states, whose names differ there, decide.
    """
    states = {companion.key for companion in companions_in(folder)}.intersection(STATES)
    if not states or ("rng" not in states and (folder / "model").exists()):
        return []
    with reading(folder):
        folders = sorted(entry for entry in folder.iterdir() if entry.is_dir())
    return [
        folder
        for folder in folders
        if model_files_in(folder) or any(_is_of_a_model(folder / name, keys) for name, keys in CONFIGS.items())
    ]


def _is_of_a_model(config: Path, keys: tuple[str, ...]) -> bool:
    try:
        stated = read_json(config) if config.is_file() else None
    except ReadError:
        return False
    return isinstance(stated, Mapping) and any(key in stated for key in keys)


def folders_not_read(folder: Path) -> Iterator[Problem]:
    """Note the folders of models beside weights that are read."""
    names = tuple(f.name for f in model_folders(folder) if model_files_in(f))
    if names:
        text = f"weights in folders beside it, and not read: {few(names)}; name a folder to open it"
        yield Problem(Code.NOT_READ, text, files=names)


def read_model_folders(
    folders: Iterable[Path], options: Options, problems: list[Problem]
) -> Iterator[tuple[str, WeightModel]]:
    """Yield the model of each folder by the folder's name; one that cannot be read becomes a problem.

    Raises:
        UnsafePathError: a file is a link out of its folder, or a folder is a link out of its parent.
        UsageError: one of the folders contains several models.
    """
    for one in folders:
        options.check_link(one, one.parent)
        found = model_files_in(one)
        if not found:
            problems.append(missing(f"weights in {one.name}, which has a config", None, one.name, kind=""))
            continue
        try:
            for name, weights in models_of_folder(one, found).items():
                yield one.name + name.removeprefix("model"), WeightModel(weights, one, options).read()
        except UnsafePathError:
            raise
        except ReadError as error:
            problems.append(Fault.of(error, one).problem(f"{one.name}:", None, one.name))
