"""Meta's Llama checkpoints: `consolidated.NN.pth`, one file per tensor-parallel rank, with `params.json` beside them.

    params.json             {"dim": 5120, "n_heads": 40, "n_layers": 40, "multiple_of": 256, "vocab_size": -1, …}
    consolidated.00.pth     names and tensors of rank 0, all of them plain
    consolidated.01.pth     of rank 1

The files hold plain tensors and do not state how they belong together; even their rank is only in the name. A weight
whose pieces do not add up to its shape in `params.json` is shown and not joined. A lone `consolidated.00.pth` with
whole weights is a whole checkpoint.

Source: facebookresearch/llama `llama/generation.py` (`Llama.build`); tested on files of this layout that torch wrote,
not on Meta's own.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from ckptools.errors import ReadError
from ckptools.files.opening import read_json, reading
from ckptools.formats.options import Options
from ckptools.formats.rank_search import rank_checks
from ckptools.formats.shared.checkpoint_builder import CheckpointBuilder, SavedFiles
from ckptools.formats.shared.tensor_parallel import (
    COLUMNS,
    REPLICATED,
    ROWS,
    JoinRule,
    RankPiece,
    UnlikeError,
    given_rule,
    join,
    no_rule,
    read_rules,
    unjoined_tensor,
)
from ckptools.model.checkpoint import Checkpoint
from ckptools.model.facts import FILES_FOUND, Fact, RankFile
from ckptools.model.problems import Code, Problem
from ckptools.model.regions import Ints
from ckptools.model.tensor import Tensor
from ckptools.pickles.reader import Saved
from ckptools.training_state.optimizers import AS_SAVED

# -- layout of Meta's Llama weights on tensor-parallel ranks, and the whole shapes by `params.json` --------------------
# Every linear layer is fairscale's ColumnParallelLinear (rows are cut) or RowParallelLinear (columns are); norms and
# rope frequencies are the same on every rank. The embedding is cut by columns in Llama 1 and 2 (ParallelEmbedding) and
# by rows since Llama 3 (VocabParallelEmbedding), as its shape shows. Source: facebookresearch/llama `llama/model.py`,
# meta-llama/llama-models `models/llama3/model.py`. Mistral's `params.json` also has `head_dim` and `hidden_dim`.

LAYER = re.compile(r"layers\.(\d{1,6})\.")
QUERY = re.compile(r"layers\.\d+\.attention\.wq\.weight")
EMBEDDING = "tok_embeddings.weight"
HEAD = "output.weight"
NO_PARAMS = "params.json is not here, which states the shapes of the whole weights"


class LlamaSizes(NamedTuple):
    """The sizes of a model, as `params.json` states them; None for unknown ones.

    Attributes:
        queries: rows of all query heads together.
        keys: rows of all key heads together.
        vocab: None if only the tokenizer knows it.
    """

    dim: int
    queries: int
    keys: int
    hidden: int | None
    vocab: int | None
    layers: int | None
    head: int


def sizes_of(params: Mapping[str, Any]) -> LlamaSizes | None:
    """The sizes in `params.json`; None if it lacks `dim` or `n_heads`, or they are invalid."""
    dim, heads = _size(params, "dim"), _size(params, "n_heads")
    if dim is None or heads is None:
        return None
    head = _size(params, "head_dim") or dim // heads
    keys = (_size(params, "n_kv_heads") or heads) * head
    vocab, layers = _size(params, "vocab_size"), _size(params, "n_layers")
    return LlamaSizes(dim, heads * head, keys, _hidden(params, dim), vocab, layers, head)


def _size(params: Mapping[str, Any], name: str) -> int | None:
    value = params.get(name)
    return value if type(value) is int and 0 < value < 1 << 40 else None


def _hidden(params: Mapping[str, Any], dim: int) -> int | None:
    """Two thirds of `4 * dim`, times a factor, rounded up to a multiple, as in `FeedForward.__init__`."""
    stated, multiple = _size(params, "hidden_dim"), _size(params, "multiple_of")
    if stated is not None or multiple is None:
        return stated
    hidden, factor = int(2 * (4 * dim) / 3), params.get("ffn_dim_multiplier")
    if isinstance(factor, (int, float)) and 0 < factor < 1000:
        hidden = int(factor * hidden)
    return multiple * ((hidden + multiple - 1) // multiple)


def tensor_parallel_size(tree: Mapping[Any, Any], sizes: LlamaSizes | None) -> int | None:
    """The tensor-parallel size by a file's shapes: all query rows divided by the file's query rows; None if unknown.

    Without `params.json`, the number of query rows is taken from the final norm, which is never cut.
    """
    norm = tree.get("norm.weight")
    whole = sizes.queries if sizes else norm.shape[0] if isinstance(norm, Tensor) and len(norm.shape) == 1 else 0
    query = next((t for n, t in tree.items() if isinstance(n, str) and QUERY.fullmatch(n)), None)
    rows = query.shape[0] if isinstance(query, Tensor) and len(query.shape) == 2 else 0
    return whole // rows if whole and rows and whole % rows == 0 else None


class WeightLayout(NamedTuple):
    """How one weight is cut over the ranks, and its whole shape, with None for an unknown dimension."""

    rule: JoinRule
    shape: tuple[int | None, ...]

    def accepts(self, piece: Ints, ranks: int) -> bool:
        """Whether pieces of this shape on `ranks` ranks add up to the whole weight."""
        joined = tuple(n * ranks if d == self.rule.dim else n for d, n in enumerate(piece))
        return len(joined) == len(self.shape) and all(w in (None, n) for w, n in zip(self.shape, joined, strict=True))


def layouts_of(name: str, sizes: LlamaSizes, vocab: int | None) -> tuple[WeightLayout, ...]:
    """The possible layouts of a weight, one of which its shape must fit; empty for a name without a rule."""
    dim, hidden = sizes.dim, sizes.hidden
    of_layer = {
        "attention.wq": WeightLayout(ROWS, (sizes.queries, dim)),
        "attention.wk": WeightLayout(ROWS, (sizes.keys, dim)),
        "attention.wv": WeightLayout(ROWS, (sizes.keys, dim)),
        "attention.wo": WeightLayout(COLUMNS, (dim, sizes.queries)),
        "feed_forward.w1": WeightLayout(ROWS, (hidden, dim)),
        "feed_forward.w2": WeightLayout(COLUMNS, (dim, hidden)),
        "feed_forward.w3": WeightLayout(ROWS, (hidden, dim)),
        "attention_norm": WeightLayout(REPLICATED, (dim,)),
        "ffn_norm": WeightLayout(REPLICATED, (dim,)),
    }
    if LAYER.match(name) and name.endswith(".weight"):
        known = of_layer.get(LAYER.sub("", name, count=1).removesuffix(".weight"))
        return (known,) if known else ()
    whole = {
        "norm.weight": (WeightLayout(REPLICATED, (dim,)),),
        "rope.freqs": (WeightLayout(REPLICATED, (sizes.head // 2,)),),
        HEAD: (WeightLayout(ROWS, (vocab, dim)),),
        EMBEDDING: (WeightLayout(COLUMNS, (vocab, dim)), WeightLayout(ROWS, (vocab, dim))),
    }
    return whole.get(name, ())


def vocabulary(tree: Mapping[Any, Any], sizes: LlamaSizes, ranks: int) -> int | None:
    """The rows of the vocabulary: stated, or those of an embedding that is cut by columns, else of the output layer."""
    if sizes.vocab is not None:
        return sizes.vocab
    embedding, head = tree.get(EMBEDDING), tree.get(HEAD)
    if isinstance(embedding, Tensor) and len(embedding.shape) == 2 and embedding.shape[1] * ranks == sizes.dim:
        return embedding.shape[0]
    return head.shape[0] * ranks if isinstance(head, Tensor) and head.shape else None


# -- the folder --------------------------------------------------------------------------------------------------------


NAME = "meta_llama"
READS = "Meta's Llama: consolidated.00.pth, consolidated.01.pth …, one per tensor-parallel rank, with params.json"
KNOWN_BY = "consolidated.NN.pth, or a folder that holds such files"
TRIED = ()
BY_HAND = ("Meta Llama",)
JOINS = ("model",)

FILE = re.compile(r"consolidated\.(\d{2,5})\.pth")
PARAMS = "params.json"
MAX_RANKS = 1 << 12


def detect(path: Path) -> bool:
    """Whether a path is a file called `consolidated.NN.pth`, or a folder with one."""
    return bool(_files_in(path)) if path.is_dir() else bool(FILE.fullmatch(path.name)) and path.is_file()


def _files_in(folder: Path) -> dict[int, Path]:
    with reading(folder):
        found = [(m, p) for p in folder.iterdir() if (m := FILE.fullmatch(p.name)) and p.is_file()]
    return {int(m[1]): p for m, p in sorted(found, key=lambda f: f[1].name)}


def read(path: Path, options: Options) -> Checkpoint:
    """Open the checkpoint of a file, or of a folder of files.

    Raises:
        ReadError: the file that the user named, or every file of a folder, cannot be read.
        UnsafePathError: a file is a link out of the folder.
    """
    builder = CheckpointBuilder(NAME, path)
    folder = path if path.is_dir() else path.parent
    files = _files_in(folder)
    if options.only_this_file and not path.is_dir():
        files = {rank: p for rank, p in files.items() if p.name == path.name}
    for file in files.values():
        if file != path:
            options.check_link(file, folder)
    return _LlamaFolder(builder, folder, files, options).checkpoint()


class _LlamaFolder:
    def __init__(self, builder: CheckpointBuilder, folder: Path, files: dict[int, Path], options: Options) -> None:
        self.builder, self.path, self.problems = builder, builder.path, builder.problems
        self.folder, self.files, self.options = folder, files, options
        self.contents = SavedFiles(options.read_file)
        self.saved: dict[int, Saved] = {}
        self._read_files()
        self.params = self._params()
        self.sizes = sizes_of(self.params or {})
        self.trees: dict[int, dict[Any, Any]] = {}
        for rank, saved in sorted(self.saved.items()):
            if not isinstance(saved.tree, dict):
                text = f"holds a {type(saved.tree).__name__}, expected the names and tensors of a model"
                raise ReadError(saved.path, text)
            self.trees[rank] = saved.tree
        self.world = self._world()
        self.rules = read_rules(options.rules)

    def _read_files(self) -> None:
        """Read the named file, or the first readable one of a folder; with all ranks, every one."""
        asked = next((rank for rank, p in self.files.items() if p.name == self.path.name), None)
        for rank, file in sorted(self.files.items(), key=lambda f: f[0] != asked):
            if self.saved and not self.options.all_ranks:
                return
            saved = self.contents.read(file, must=rank == asked or len(self.files) == 1)
            if saved is not None:
                self.saved[rank] = saved
        if not self.saved:
            raise ReadError(self.path, "none of its consolidated.NN.pth files can be read")

    def _params(self) -> dict[str, Any] | None:
        path = self.folder / PARAMS
        if not path.is_file():
            return None
        self.options.check_link(path, self.folder)
        found = read_json(path)
        if not isinstance(found, dict):
            raise ReadError(path, f"holds a {type(found).__name__}, expected the sizes of the model")
        return found

    def _world(self) -> Fact:
        sizes = {tensor_parallel_size(tree, self.sizes) for tree in self.trees.values()}
        stated = sorted(size for size in sizes if size is not None)
        if len(stated) > 1:
            self.problems.append(Problem(Code.WORLD_SIZES_DISAGREE, f"shapes in the files speak of {stated} ranks"))
        if len(stated) == 1:
            (world,) = stated
            if world > MAX_RANKS:
                raise ReadError(self.path, f"its shapes speak of {world} tensor-parallel ranks; no model has so many")
            return Fact(world, ("shapes and params.json" if self.sizes else "shapes",))
        return Fact(len(self.files), (FILES_FOUND,), agree=not stated)

    def checkpoint(self) -> Checkpoint:
        first = next(iter(self.trees.values()))
        vocab = vocabulary(first, self.sizes, self.world.value) if self.sizes else None
        names = dict.fromkeys(name for tree in self.trees.values() for name in tree)
        model = {name: self._value(name, vocab) for name in names}
        files = tuple(self._files())
        self.problems += rank_checks.check_files(files, self.contents.faults, self.world.value, True)
        numbers = {int(m[1]) for name in model if isinstance(name, str) and (m := LAYER.match(name))}
        stated = self.sizes.layers if self.sizes else None
        if stated is not None and numbers != set(range(stated)):
            text = f"{PARAMS} states {stated} layers, the files hold {len(numbers)}"
            self.problems.append(Problem(Code.MODEL_PART_MISSING, text))
        every = len(self.saved) + len(self.contents.faults) == len(self.files)
        self.builder.add_saved(self.saved.values())
        one = self.world.value == 1
        return self.builder.checkpoint(
            name=self.folder.absolute().name,
            saved_as="Meta Llama, " + ("every tensor whole" if one else f"tensor parallel {self.world.value}"),
            tree=model if self.params is None else {"model": model, "params": self.params},
            files=files,
            world_size=self.world,
            step=Fact(None),
            module_order=AS_SAVED,
            all_ranks=every,
            bytes_expected=rank_checks.expected_bytes(files),
        )

    def _value(self, name: Any, vocab: int | None) -> Any:
        """The value of a name, joined from the ranks if there is a rule and the shapes agree."""
        values = {rank: tree[name] for rank, tree in self.trees.items() if name in tree}
        first = next(iter(values.values()))
        if not isinstance(first, Tensor):
            return first
        tensors = {rank: t for rank, t in values.items() if isinstance(t, Tensor)}
        rule = self._rule(name, first, vocab)
        if isinstance(rule, str):
            return unjoined_tensor(tensors.items(), first.note or rule)
        # The pieces that were read, and for a cut weight also the unread pieces of other ranks.
        ranks = range(self.world.value) if rule.dim is not None else tensors
        try:
            return join([RankPiece(rank, rank, tensors.get(rank)) for rank in ranks], rule, self.world.value)
        except UnlikeError as error:
            self.problems.append(Problem(Code.LAYOUT_DISAGREES, str(error), None, str(name)))
            return unjoined_tensor(tensors.items(), first.note or str(error))

    def _rule(self, name: Any, piece: Tensor, vocab: int | None) -> JoinRule | str:
        ranks = self.world.value
        layouts = layouts_of(str(name), self.sizes, vocab) if self.sizes else ()
        fitting = next((layout.rule for layout in layouts if layout.accepts(piece.shape, ranks)), None)
        why = ""
        if layouts and not fitting:
            whole = " x ".join("?" if n is None else str(n) for n in layouts[0].shape)
            why = f"{list(piece.shape)} on each of {ranks} ranks does not make {whole}, which {PARAMS} states"
        if ranks == 1:
            self.problems += [Problem(Code.LAYOUT_DISAGREES, why, None, str(name), severity="warning")] if why else []
            return REPLICATED
        return given_rule(self.rules, str(name)) or fitting or why or (no_rule() if self.sizes else NO_PARAMS)

    def _files(self) -> Iterator[RankFile]:
        for rank in sorted({*self.files, *range(min(self.world.value, MAX_RANKS))}):
            file = self.files.get(rank)
            if file is not None:
                yield self.contents.listed(file, rank, "", len(self.files))
            else:
                yield RankFile(self.folder / f"consolidated.{rank:02d}.pth", rank, "", "missing", 0, None)
