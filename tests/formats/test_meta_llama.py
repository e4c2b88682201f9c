"""Meta's Llama files: the pieces of every rank make the whole weights again, or the reason is told."""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

import ckptools
from ckptools.cli import app
from ckptools.errors import NotWholeError, ReadError
from ckptools.formats.meta_llama import sizes_of
from ckptools.model.tensor import Tensor

PARAMS = {"dim": 16, "n_heads": 8, "n_layers": 2, "multiple_of": 8, "norm_eps": 1e-5, "vocab_size": -1}
HIDDEN = 48  # of dim 16: int(2 * 64 / 3) = 42, rounded up
COLUMN_CUT = ("attention.wo", "feed_forward.w2")
ROW_CUT = ("attention.wq", "attention.wk", "attention.wv", "feed_forward.w1", "feed_forward.w3", "output")


@dataclass(frozen=True)
class Llama:
    """A model to write.

    Attributes:
        ranks: tensor-parallel size.
        params: of `params.json`.
        rows: whether the embedding is cut by rows (Llama 3).
        vocab: rows of the embedding.
        hidden: of the feed-forward layers.
    """

    ranks: int
    params: dict[str, Any]
    rows: bool = False
    vocab: int = 40
    hidden: int = HIDDEN

    def weights(self) -> dict[str, torch.Tensor]:
        generator = torch.Generator().manual_seed(7)
        dim, head = self.params["dim"], self.params["dim"] // self.params["n_heads"]
        keys = self.params.get("n_kv_heads", self.params["n_heads"]) * head
        shapes = {"tok_embeddings.weight": (self.vocab, dim), "norm.weight": (dim,), "output.weight": (self.vocab, dim)}
        shapes["rope.freqs"] = (head // 2,)
        for n in range(self.params["n_layers"]):
            at = f"layers.{n}."
            shapes |= {f"{at}attention.w{x}.weight": (keys if x in "kv" else dim, dim) for x in "qkvo"}
            shapes |= {f"{at}feed_forward.w{x}.weight": (self.hidden, dim) for x in "13"}
            shapes[f"{at}feed_forward.w2.weight"] = (dim, self.hidden)
            shapes |= {f"{at}{norm}.weight": (dim,) for norm in ("attention_norm", "ffn_norm")}
        return {k: torch.randn(s, generator=generator).to(torch.bfloat16) for k, s in shapes.items()}

    def piece(self, name: str, whole: torch.Tensor, rank: int) -> torch.Tensor:
        plain = (
            name.removesuffix(".weight").split(".", 2)[-1] if name.startswith("layers.") else name[: -len(".weight")]
        )
        if plain in COLUMN_CUT or (name == "tok_embeddings.weight" and not self.rows):
            return whole.chunk(self.ranks, 1)[rank].clone()
        if plain in ROW_CUT or name == "tok_embeddings.weight":
            return whole.chunk(self.ranks, 0)[rank].clone()
        return whole

    def save(self, folder: Path) -> Path:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "params.json").write_text(json.dumps(self.params))
        for rank in range(self.ranks):
            state = {name: self.piece(name, whole, rank) for name, whole in self.weights().items()}
            torch.save(state, folder / f"consolidated.{rank:02d}.pth")
        return folder


MODELS = {
    "llama 1, one rank": Llama(1, PARAMS),
    "llama 2, two ranks": Llama(2, PARAMS),
    "llama 2, grouped": Llama(4, {**PARAMS, "n_kv_heads": 4, "ffn_dim_multiplier": 1.3}, hidden=56),
    "llama 3, eight ranks": Llama(8, {**PARAMS, "vocab_size": 40, "rope_theta": 500000.0}, rows=True),
    "llama 3, no vocabulary told": Llama(2, PARAMS, rows=True),
}


def run(*arguments: object) -> tuple[int, str, str]:
    done = CliRunner().invoke(app, [*map(str, arguments)])
    return done.exit_code, done.stdout, done.stderr


@pytest.mark.parametrize("model", MODELS.values(), ids=MODELS)
def test_every_weight_is_put_together_bit_for_bit(model, tmp_path):
    ck = ckptools.open(model.save(tmp_path / "llama"), all_ranks=True)
    assert (ck.format, ck.world_size.value, ck.problems) == ("meta_llama", model.ranks, ())
    assert set(ck.model) == set(model.weights())
    assert all(ck.model[name].load().equal(whole) for name, whole in model.weights().items())
    assert ck.raw["params"]["dim"] == 16


@pytest.mark.parametrize("model", MODELS.values(), ids=MODELS)
def test_one_file_tells_every_shape_and_finds_the_rest(model, tmp_path):
    folder = model.save(tmp_path / "llama")
    ck = ckptools.open(folder / "consolidated.00.pth")
    assert all(ck.model[name].shape == tuple(whole.shape) for name, whole in model.weights().items())
    assert all(ck.model[name].load().equal(whole) for name, whole in model.weights().items())


@pytest.mark.slow
@pytest.mark.parametrize("model", MODELS.values(), ids=MODELS)
def test_it_is_consolidated_and_verified(model, tmp_path):
    folder = model.save(tmp_path / "llama")
    ckptools.consolidate(folder, tmp_path / "all.pt", only="model")
    written = torch.load(tmp_path / "all.pt")
    assert all(written[name].equal(whole) for name, whole in model.weights().items())
    assert run("verify", folder, "--deep")[0] == 0


@pytest.mark.slow
@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.sampled_from([1, 2, 4]), st.booleans(), st.sampled_from([1, 2]), st.sampled_from([8, 16, 24]), st.integers(1, 3)
)
def test_any_sizes_that_follow_the_code_are_put_together(tmp_path, ranks, rows, group, vocab, layers):
    params = {**PARAMS, "n_kv_heads": 8 // group, "n_layers": layers, "vocab_size": vocab}
    model = Llama(ranks, params, rows, vocab)
    shutil.rmtree(tmp_path / "x", ignore_errors=True)
    ck = ckptools.open(model.save(tmp_path / "x"), all_ranks=True)
    assert ck.problems == () and all(ck.model[n].load().equal(w) for n, w in model.weights().items())


def test_a_lone_file_is_whole_without_params_too(tmp_path):
    folder = Llama(1, PARAMS).save(tmp_path)
    (folder / "params.json").unlink()
    ck = ckptools.open(folder / "consolidated.00.pth")
    assert ck.whole and ck.world_size.sources == ("shapes",) and next(iter(ck.tree)) == "tok_embeddings.weight"


@pytest.mark.parametrize("command", ["inspect", "verify"])
@pytest.mark.parametrize("with_params", [True, False])
def test_a_missing_rank_is_known_by_the_shapes_alone(tmp_path, command, with_params):
    folder = Llama(2, PARAMS).save(tmp_path)
    (folder / "consolidated.01.pth").unlink()
    if not with_params:
        (folder / "params.json").unlink()
    code, stdout, _ = run(command, folder)
    assert code == 1 and "no file consolidated.01.pth" in stdout
    assert run("consolidate", folder, "-o", tmp_path / "x.pt")[0] == 4


def test_without_params_the_pieces_are_shown_and_refused(tmp_path):
    folder = Llama(2, PARAMS).save(tmp_path)
    (folder / "params.json").unlink()
    code, _, stderr = run("consolidate", folder, "-o", tmp_path / "x.safetensors")
    assert code == 4 and "params.json is not here" in stderr and not (tmp_path / "x.safetensors").exists()


@pytest.mark.parametrize(
    ("change", "name"),
    [
        ({"n_kv_heads": 4}, "layers.0.attention.wk.weight"),
        ({"multiple_of": 256}, "layers.1.feed_forward.w2.weight"),
        ({"vocab_size": 48}, "tok_embeddings.weight"),
        ({"n_heads": 8, "dim": 32, "head_dim": 2}, "norm.weight"),
    ],
    ids=str,
)
def test_what_does_not_make_the_shape_that_params_tell_is_refused(tmp_path, change, name):
    folder = Llama(2, PARAMS).save(tmp_path)
    (folder / "params.json").write_text(json.dumps({**PARAMS, **change}))
    ck = ckptools.open(folder, all_ranks=True)
    found = ck.model[name]
    assert isinstance(found, Tensor) and "does not make" in found.note
    with pytest.raises(NotWholeError, match="does not make"):
        ckptools.consolidate(folder, tmp_path / "x.safetensors")


def test_a_weight_without_a_rule_is_refused_and_a_rule_joins_it(tmp_path):
    folder = Llama(2, PARAMS).save(tmp_path)
    whole = torch.arange(12.0).reshape(6, 2)
    for rank in range(2):
        path = folder / f"consolidated.{rank:02d}.pth"
        torch.save({**torch.load(path), "lora.a": whole.chunk(2)[rank].clone()}, path)
    assert "no rule says" in ckptools.open(folder, all_ranks=True).model["lora.a"].note
    (tmp_path / "rules.json").write_text('{"lora.*": {"dim": 0}}')
    ck = ckptools.open(folder, all_ranks=True, rules=tmp_path / "rules.json")
    assert ck.model["lora.a"].load().equal(whole)


def test_layers_that_no_file_has_are_missed(tmp_path):
    folder = Llama(2, PARAMS).save(tmp_path)
    (folder / "params.json").write_text(json.dumps({**PARAMS, "n_layers": 3}))
    (problem,) = ckptools.open(folder).problems
    assert (problem.code, problem.message) == ("CK107", "params.json states 3 layers, the files hold 2")


def test_copies_that_differ_are_an_error(tmp_path):
    folder = Llama(2, PARAMS).save(tmp_path)
    state = torch.load(folder / "consolidated.01.pth")
    state["norm.weight"] = state["norm.weight"] + 1
    torch.save(state, folder / "consolidated.01.pth")
    assert run("verify", folder)[0] == 1
    assert run("consolidate", folder, "-o", tmp_path / "x.pt")[0] == 4


def test_a_file_copied_over_another_is_told(tmp_path):
    folder = Llama(2, PARAMS).save(tmp_path)
    shutil.copy(folder / "consolidated.00.pth", folder / "consolidated.01.pth")
    code, stdout, _ = run("verify", folder)
    assert code == 1 and "consolidated.00.pth, which is here too: a copy of it" in stdout
    assert run("consolidate", folder, "-o", tmp_path / "x.pt")[0] == 4


def test_ranks_of_two_models_are_an_error(tmp_path):
    folder = Llama(2, PARAMS).save(tmp_path / "a")
    other = Llama(2, {**PARAMS, "dim": 32}).save(tmp_path / "b")
    shutil.copy(other / "consolidated.01.pth", folder)
    assert run("verify", folder)[0] == 1
    assert run("consolidate", folder, "-o", tmp_path / "x.pt")[0] == 4


@pytest.mark.parametrize("text", ["[]", "{", '{"dim": "x"}', '{"dim": -1, "n_heads": 0}', '{"dim": 1e400}'])
def test_params_that_are_none_are_no_shapes(tmp_path, text):
    folder = Llama(2, PARAMS).save(tmp_path)
    (folder / "params.json").write_text(text)
    code, _, stderr = run("consolidate", folder, "-o", tmp_path / "x.safetensors")
    assert code in (3, 4) and "Traceback" not in stderr and "bug" not in stderr


def test_shapes_that_claim_many_ranks_are_refused_at_once(tmp_path):
    state = {"norm.weight": torch.ones(1).expand(1 << 40), "layers.0.attention.wq.weight": torch.ones(1, 4)}
    torch.save(state, tmp_path / "consolidated.00.pth")
    with pytest.raises(ReadError, match="no model has so many"):
        ckptools.open(tmp_path)


@pytest.mark.parametrize(
    ("params", "hidden"),
    [
        ({"dim": 4096, "n_heads": 32, "multiple_of": 256}, 11008),  # Llama 1 and 2, 7B
        ({"dim": 5120, "n_heads": 40, "multiple_of": 256}, 13824),  # 13B
        ({"dim": 8192, "n_heads": 64, "multiple_of": 4096, "ffn_dim_multiplier": 1.3}, 28672),  # 70B
        ({"dim": 4096, "n_heads": 32, "multiple_of": 1024, "ffn_dim_multiplier": 1.3}, 14336),  # Llama 3, 8B
        ({"dim": 4096, "n_heads": 32, "head_dim": 128, "hidden_dim": 14336}, 14336),  # Mistral 7B
    ],
    ids=str,
)
def test_the_feed_forward_sizes_are_those_of_the_published_models(params, hidden):
    sizes = sizes_of(params)
    assert sizes is not None and sizes.hidden == hidden


def test_ranks_of_zeros_are_no_copies(tmp_path):
    folder = Llama(2, PARAMS).save(tmp_path)
    for file in folder.glob("*.pth"):
        state = torch.load(file)
        torch.save({name: torch.zeros_like(t) for name, t in state.items()}, file)
    assert run("verify", folder)[0] == 0
