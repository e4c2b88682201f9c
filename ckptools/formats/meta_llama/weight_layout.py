"""Layout of Meta's Llama weights on tensor-parallel ranks, and the whole shapes by `params.json`.

Every linear layer is fairscale's ColumnParallelLinear (rows are cut) or RowParallelLinear (columns are); norms and rope
frequencies are the same on every rank. The embedding is cut by columns in Llama 1 and 2 (ParallelEmbedding) and by rows
since Llama 3 (VocabParallelEmbedding), as its shape shows. Source: facebookresearch/llama `llama/model.py`,
meta-llama/llama-models `models/llama3/model.py`. Mistral's `params.json` has `head_dim` and `hidden_dim` besides.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, NamedTuple

from ckptools.formats.shared.tensor_parallel import COLUMNS, REPLICATED, ROWS, JoinRule
from ckptools.model.regions import Ints
from ckptools.model.tensor import Tensor

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
        vocab: None where only the tokenizer has it.
    """

    dim: int
    queries: int
    keys: int
    hidden: int | None
    vocab: int | None
    layers: int | None
    head: int


def sizes_of(params: Mapping[str, Any]) -> LlamaSizes | None:
    """The sizes in `params.json`; None where it lacks `dim` or `n_heads`, or they are no sizes."""
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
    """Two thirds of `4 * dim`, times a factor, rounded up to a multiple, as `FeedForward.__init__` has it."""
    stated, multiple = _size(params, "hidden_dim"), _size(params, "multiple_of")
    if stated is not None or multiple is None:
        return stated
    hidden, factor = int(2 * (4 * dim) / 3), params.get("ffn_dim_multiplier")
    if isinstance(factor, (int, float)) and 0 < factor < 1000:
        hidden = int(factor * hidden)
    return multiple * ((hidden + multiple - 1) // multiple)


def tensor_parallel_size(tree: Mapping[Any, Any], sizes: LlamaSizes | None) -> int | None:
    """The tensor-parallel size by a file's shapes: all query rows divided by those in the file; None where unknown.

    Without `params.json` the final norm, which is never cut, has as many elements as there are query rows.
    """
    norm = tree.get("norm.weight")
    whole = sizes.queries if sizes else norm.shape[0] if isinstance(norm, Tensor) and len(norm.shape) == 1 else 0
    query = next((t for n, t in tree.items() if isinstance(n, str) and QUERY.fullmatch(n)), None)
    rows = query.shape[0] if isinstance(query, Tensor) and len(query.shape) == 2 else 0
    return whole // rows if whole and rows and whole % rows == 0 else None


class WeightLayout(NamedTuple):
    """How one weight is cut over the ranks, and its whole shape, with None in an unknown dimension."""

    rule: JoinRule
    shape: tuple[int | None, ...]

    def accepts(self, piece: Ints, ranks: int) -> bool:
        """Whether pieces of this shape on `ranks` ranks make the whole weight."""
        joined = tuple(n * ranks if d == self.rule.dim else n for d, n in enumerate(piece))
        return len(joined) == len(self.shape) and all(w in (None, n) for w, n in zip(self.shape, joined, strict=True))


def layouts_of(name: str, sizes: LlamaSizes, vocab: int | None) -> tuple[WeightLayout, ...]:
    """The possible layouts of a weight, of which its shape must fit one; none for a name without a rule."""
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
