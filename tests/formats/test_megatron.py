"""Megatron's own checkpoints: pieces joined by rule, layers counted, optimizer named, and what is refused."""

from __future__ import annotations

import json
import shutil
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

import ckptools
from ckptools.cli import app
from ckptools.errors import CkptoolsError, NotWholeError, ReadError, UsageError
from ckptools.formats import options as limits
from ckptools.formats.megatron.folders import grid_of
from ckptools.formats.megatron.model import Layers, chunks_of, rule_of
from ckptools.formats.shared.tensor_parallel import GATED, ROWS, JoinRule, RankPiece, UnlikeError, join
from ckptools.model.cover import cover
from ckptools.model.facts import Fact
from ckptools.model.regions import Box, contiguous_strides
from ckptools.model.shards import Shard, Source
from ckptools.model.tensor import Tensor
from tests.formats.megatron_runs import Run, full_model, master, moments_of, save
from tests.formats.said import said
from tests.truth import FIXTURES

LEGACY = FIXTURES / "megatron-tp2pp2-fp32" / "legacy"
RNG, HEAD = "model_optim_rng.pt", "output_layer.weight"


def codes(ck: ckptools.Checkpoint, severity: str = "error") -> list[str]:
    return [p.code for p in ck.problems if p.severity == severity]


def same_model(ck: ckptools.Checkpoint, full: dict[str, torch.Tensor]) -> bool:
    model = {k: v for k, v in ck.model.items() if isinstance(v, Tensor)}
    return set(model) <= set(full) and all(torch.equal(t.load(), full[k]) for k, t in model.items())


def edit(file: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Write a rank's file again with a change."""
    tree = torch.load(file, weights_only=False)
    change(tree)
    torch.save(tree, file)


RUNS = {
    "one rank": Run(),
    "tp2": Run(tp=2),
    "tp4, grouped queries": Run(tp=4, heads=8, groups=4),
    "tp4, fewer groups than ranks": Run(tp=4, groups=2),
    "tp2 pp2": Run(tp=2, layers=[[1, 1]]),
    "tp2, gated, biases": Run(tp=2, gated=True, bias=True),
    "tp4 pp2, gated": Run(tp=4, layers=[[1, 2]], gated=True, bias=True),
    "uneven pipeline": Run(tp=2, layers=[[1, 3, 0, 2]]),
    "virtual pipeline": Run(layers=[[1, 2], [2, 1]]),
    "virtual pipeline, tp2": Run(tp=2, layers=[[1, 1, 1], [1, 1, 1]], gated=True),
    "tied across stages": Run(tp=2, layers=[[1, 1]], untied=False),
    "odd padding": Run(tp=2, vocab=22, args={"vocab_size": 19}),
}


@pytest.mark.slow
@pytest.mark.parametrize("run", RUNS.values(), ids=RUNS.keys())
def test_every_weight_and_moment_is_joined_bit_for_bit(run, tmp_path):
    save(run, tmp_path)
    ck = ckptools.open(tmp_path, all_ranks=True)
    full = full_model(run)
    assert ck.whole and same_model(ck, full)
    assert set(full) - set(ck.model) <= ({HEAD} if not run.untied else set())
    (optimizer,) = ck.optimizers.values()
    for slot, moments in moments_of(full).items():
        assert all(torch.equal(state[slot].load(), moments[fqn]) for fqn, state in optimizer.state.items())
    decayed, rest = optimizer.param_groups
    assert all("norm" not in n and "bias" not in n for n in decayed.names)
    assert {*decayed.names, *rest.names} == set(optimizer.state)


@pytest.mark.parametrize("run", [RUNS["tp4 pp2, gated"], RUNS["virtual pipeline, tp2"]], ids=["pp", "vp"])
def test_one_rank_per_stage_tells_every_name_and_shape(run, tmp_path, monkeypatch):
    save(run, tmp_path)
    monkeypatch.setattr(limits, "MAX_RANKS", 0)
    ck, full = ckptools.open(tmp_path), full_model(run)
    assert (ck.cost.files, ck.all_ranks, ck.whole) == (run.pp, False, None)
    assert {k: v.shape for k, v in ck.model.items()} == {k: tuple(v.shape) for k, v in full.items()}
    assert same_model(ck, full)


@given(st.integers(1, 5), st.integers(1, 4), st.integers(1, 3), st.integers(1, 3), st.integers(0, 1), st.integers(1, 3))
def test_joined_pieces_cover_exactly_and_each_rank_finds_its_own(ranks, rows, columns, halves, dim, extra):
    shape = tuple(n * (halves if d == dim else 1) for d, n in enumerate((rows, columns)))
    whole = Box.whole(shape)
    source = Source(Path("x"), 0, "float32", shape, contiguous_strides(shape), "r", (0, 4))
    local = Tensor(shape, "float32", (Shard(whole, None, source),))
    joined = join([RankPiece(r, r * extra, local) for r in range(ranks)], JoinRule(dim, halves), ranks)
    assert cover(joined.shape, [s.box for s in joined.shards]).exact
    assert joined.numel == ranks * local.numel and len(joined.shards) == ranks * halves


@given(st.lists(st.lists(st.integers(0, 3), min_size=2, max_size=2), min_size=1, max_size=3))
def test_layers_are_counted_chunk_by_chunk_and_stage_by_stage(counts):
    chunks = {
        (c, s): {f"decoder.layers.{i}.w": 0 for i in range(n)}
        for c, row in enumerate(counts)
        for s, n in enumerate(row)
    }
    layers = Layers(chunks, 2, None)
    named = [layers.name(name, place)[0] for place in sorted(chunks) for name in chunks[place]]
    assert named == [f"decoder.layers.{i}.w" for i in range(sum(map(sum, counts)))]


# -- rules -------------------------------------------------------------------------------------------------------


NAMES = {
    "language_model.embedding.word_embeddings.weight": 0,
    "language_model.transformer.layers.3.attention.query_key_value.bias": 0,
    "language_model.encoder.layers.3.self_attention.dense.weight": 1,
    "language_model.encoder.layers.3.self_attention.dense.bias": None,
    "language_model.encoder.layers.0.mlp.dense_4h_to_h.weight": 1,
    "language_model.encoder.layers.0.mlp.dense_4h_to_h.bias": None,
    "language_model.encoder.layers.0.post_attention_layernorm.weight": None,
    "language_model.encoder.final_norm.weight": None,
    "language_model.decoder.layers.1.inter_attention.key_value.weight": 0,
    "language_model.output_layer.weight": 0,
    "word_embeddings_for_head.weight": 0,
    "decoder.layers.1.self_attention.linear_qkv.layer_norm_weight": None,
    "decoder.layers.1.mlp.linear_fc1.layer_norm_bias": None,
    "decoder.layers.1.self_attention.q_layernorm.weight": None,
    "lm_head.bias": 0,
    "lm_head.dense.weight": None,
}


@pytest.mark.parametrize(("fqn", "dim"), NAMES.items())
def test_the_names_of_all_versions_have_a_rule(fqn, dim):
    rule = rule_of(fqn, {}, ())
    assert isinstance(rule, JoinRule) and rule.dim == dim


@pytest.mark.parametrize(
    "fqn",
    [
        "decoder.layers.0.mlp.experts.local_experts.0.linear_fc1.weight",
        "decoder.layers.0.mixer.in_proj.weight",
        "vision_model.decoder.layers.0.mlp.linear_fc2.weight",
        "decoder.layers.0.self_attention.linear_kv_down_proj.weight",
    ],
)
def test_other_names_have_none_and_are_told_the_way_out(fqn):
    assert "--rules" in str(rule_of(fqn, {}, ()))


@pytest.mark.parametrize(("rows", "expected"), [(24, GATED), (12, ROWS)])
def test_the_second_layers_columns_tell_a_gated_first_layer(rows, expected):
    shapes = {"decoder.layers.0.mlp.linear_fc1.weight": (rows, 8), "decoder.layers.0.mlp.linear_fc2.weight": (8, 12)}
    pieces = {k: Tensor(shape, "float32", ()) for k, shape in shapes.items()}
    assert rule_of("decoder.layers.0.mlp.linear_fc1.weight", pieces, ()) == expected


def with_router(run: Run, to: Path) -> Path:
    """A run whose files also hold a weight that no rule knows."""
    folder = save(run, to)
    for file in folder.glob("*/*.pt"):
        tree = torch.load(file, weights_only=False)
        tree["model"]["decoder.layers.0.mlp.special.weight"] = torch.arange(8.0).reshape(4, 2) + run.tp
        torch.save(tree, file)
    return to


def test_a_weight_without_a_rule_is_refused_by_name_and_the_rest_can_be_written(tmp_path):
    run = with_router(Run(tp=2), tmp_path / "run")
    with pytest.raises(NotWholeError, match=r"mlp\.special\.weight.*rules FILE"):
        ckptools.consolidate(run, tmp_path / "m.safetensors")
    done = ckptools.consolidate(run, tmp_path / "m.safetensors", allow_missing=True)
    assert [*done.left_out] == ["decoder.layers.0.mlp.special.weight"]


@pytest.mark.parametrize(
    ("rule", "shape"), [("replicated", (4, 2)), ({"dim": 1}, (4, 4)), ({"dim": 0, "halves": 2}, (8, 2))]
)
def test_a_rule_file_says_how_it_is_joined(rule, shape, tmp_path):
    run = with_router(Run(tp=2), tmp_path / "run")
    (tmp_path / "rules.json").write_text(json.dumps({"*.special.*": rule, "*": "replicated"}))
    ck = ckptools.open(run, all_ranks=True, rules=tmp_path / "rules.json")
    special = ck.model["decoder.layers.0.mlp.special.weight"]
    assert (special.shape, special.note) == (shape, "")
    if shape == (8, 2):
        assert special.load()[:, 0].tolist() == [2, 4, 2, 4, 6, 8, 6, 8]


def test_a_rule_file_comes_before_the_built_in_rules(tmp_path):
    save(Run(tp=2), tmp_path / "run")
    (tmp_path / "rules.json").write_text('{"output_layer.weight": {"dim": 1}}')
    assert ckptools.open(tmp_path / "run", rules=tmp_path / "rules.json").model["output_layer.weight"].shape == (8, 16)


@pytest.mark.parametrize(
    "text",
    [
        "", "[]", "no json", '{"*": 0}', '{"*": "joined"}', '{"*": {}}', '{"*": {"dim": -1}}', '{"*": {"dim": true}}',
        '{"*": {"dim": 0, "halves": 0}}', '{"*": {"dim": 0, "half": 2}}', '{"*": {"dim": 0, "dim": 1}}', "[" * 9999,
        '{"*": {"dim": 1e99}}',
    ],
)  # fmt: skip
def test_a_bad_rule_file_is_one_line(text, tmp_path):
    (tmp_path / "rules.json").write_text(text)
    with pytest.raises((UsageError, ReadError)) as error:
        ckptools.open(LEGACY, rules=tmp_path / "rules.json")
    assert str(error.value).startswith(str(tmp_path / "rules.json")) and "\n" not in str(error.value)


def test_the_pattern_of_a_bad_rule_is_named(tmp_path):
    (tmp_path / "rules.json").write_text('{"*.good": "replicated", "*.bad": {"dim": -1}}')
    with pytest.raises(UsageError, match=r"rules\.json: '\*\.bad': expected"):
        ckptools.open(LEGACY, rules=tmp_path / "rules.json")


def test_rows_that_are_no_two_halves_are_not_joined_half_by_half():
    local = Tensor((3, 2), "float32", (Shard(Box.whole((3, 2)), None, None),))
    with pytest.raises(UnlikeError, match=r"rule 'a\*' says 2 halves of dim 0, which has 3 elements"):
        join([RankPiece(rank, rank, local) for rank in range(2)], JoinRule(0, 2, "a*"), 2)


@pytest.mark.parametrize("other", [Tensor((3,), "float32", ()), Tensor((2,), "bfloat16", ())], ids=["shape", "dtype"])
def test_pieces_of_different_shapes_or_dtypes_are_not_joined(other):
    pieces = [RankPiece(r, r, t) for r, t in enumerate((Tensor((2,), "float32", ()), other))]
    with pytest.raises(UnlikeError, match="not pieces of one weight"):
        join(pieces, ROWS, 2)


# -- paths -------------------------------------------------------------------------------------------------------


@pytest.fixture
def legacy(tmp_path) -> Path:
    return Path(shutil.copytree(LEGACY, tmp_path / "run"))


def test_the_tracker_chooses_the_iteration(tmp_path):
    save(Run(), tmp_path, 20)
    save(Run(layers=[[3]]), tmp_path, 10)
    assert ckptools.open(tmp_path).step.value == 10
    (tmp_path / "iter_0000020").rename(tmp_path / "release")
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("release\n")
    assert ckptools.open(tmp_path).name == "release"


def test_without_a_tracker_several_iterations_are_listed(tmp_path):
    for iteration in (10, 20):
        save(Run(), tmp_path, iteration)
    (tmp_path / "latest_checkpointed_iteration.txt").unlink()
    with pytest.raises(UsageError, match=r"2 checkpoints.*iter_0000020, iter_0000010"):
        ckptools.open(tmp_path)
    shutil.rmtree(tmp_path / "iter_0000010")
    assert ckptools.open(tmp_path).step.value == 20


@pytest.mark.parametrize("text", ["../../etc", "5 6", "", "-1", "0x5", "releases", "9" * 40, "\x1b[31m5", "٥"])
def test_a_tracker_must_hold_a_plain_number_or_release(text, legacy):
    (legacy / "latest_checkpointed_iteration.txt").write_text(text)
    with pytest.raises(ReadError, match="expected a plain number or release") as error:
        ckptools.open(legacy)
    assert "\n" not in str(error.value) and "\x1b" not in str(error.value)


def test_a_tracker_that_names_what_is_not_here_is_told(legacy):
    (legacy / "latest_checkpointed_iteration.txt").write_text("6")
    with pytest.raises(ReadError, match="names iter_0000006, which is not here"):
        ckptools.open(legacy)


# -- what is missing or does not belong together ----------------------------------------------------------------------


@pytest.mark.parametrize("only", ["model", "optimizer", "all"])
def test_a_missing_stage_is_refused_although_no_tensor_has_a_gap(only, legacy, tmp_path):
    for rank in (0, 1):
        shutil.rmtree(legacy / "iter_0000005" / f"mp_rank_0{rank}_001")
    with pytest.raises(NotWholeError, match="pipeline stage 1 of 2: none of its files is read"):
        ckptools.consolidate(legacy, tmp_path / "m.pt", only=only)
    done = ckptools.consolidate(legacy, tmp_path / "m.pt", only="model", allow_missing=True)
    assert "decoder.layers.0.mlp.linear_fc1.weight" in torch.load(done.files[0])


def test_layers_behind_a_missing_stage_keep_their_numbers_where_the_pipeline_is_even(tmp_path):
    folder = save(Run(layers=[[2, 2, 2]]), tmp_path)
    shutil.rmtree(folder / "mp_rank_00_001")
    names = ckptools.open(tmp_path, all_ranks=True).model
    assert {n.split(".")[2] for n in names if "layers" in n} == {"0", "1", "4", "5"}


def test_layers_behind_a_missing_stage_have_no_number_where_it_is_not(tmp_path):
    folder = save(Run(layers=[[2, 1, 2]]), tmp_path)
    shutil.rmtree(folder / "mp_rank_00_001")
    ck = ckptools.open(tmp_path, all_ranks=True)
    unsure = ck.model["decoder.layers.?0 of stage 2.mlp.linear_fc1.weight"]
    assert "cannot be counted" in unsure.note and "CK107" in codes(ck)


def test_layers_that_skip_a_number_have_none_in_the_model(tmp_path):
    folder = save(Run(layers=[[2, 1]]), tmp_path / "run")

    def skip(tree: dict[str, Any]) -> None:
        tree["model"] = {name.replace("layers.1.", "layers.2."): t for name, t in tree["model"].items()}

    edit(folder / "mp_rank_00_000" / RNG, skip)
    names = {n.removesuffix(".mlp.linear_fc1.weight") for n in ckptools.open(tmp_path / "run").model if "fc1" in n}
    assert names == {f"decoder.layers.?{index}" for index in ("0 of stage 0", "2 of stage 0", "0 of stage 1")}
    with pytest.raises(NotWholeError, match=r"decoder\.layers\.\?0 of stage 0.*cannot be counted"):
        ckptools.consolidate(tmp_path / "run", tmp_path / "m.pt", only="model")


def test_a_cut_first_file_leaves_the_arguments_to_the_next_one(legacy):
    files = sorted((legacy / "iter_0000005").glob("*/model_optim_rng.pt"))
    for file in files[:-1]:
        file.write_bytes(file.read_bytes()[:20_000])
    ck = ckptools.open(legacy, all_ranks=True)
    assert [p.rank for p in ck.problems if p.code == "CK002"] == [0, 1, 2]
    assert ck.saved_as == "Megatron-LM, tensor parallel 2 x pipeline 2"
    files[-1].write_bytes(b"PK\3\4")
    with pytest.raises(ReadError, match=r"mp_rank_00_000/model_optim_rng\.pt"):
        ckptools.open(legacy)


def test_files_that_a_converter_wrote_from_one_process_are_no_swapped_folders(tmp_path):
    save(Run(tp=2, args={"rank": 0}), tmp_path)
    assert ckptools.open(tmp_path, all_ranks=True).whole


def test_tied_embeddings_that_differ_are_refused_and_equal_ones_are_written_once(tmp_path):
    run = Run(tp=2, layers=[[1, 1]], untied=False)
    folder = save(run, tmp_path / "run")
    done = ckptools.consolidate(tmp_path / "run", tmp_path / "m.safetensors")
    assert done.tied == {"output_layer.weight": "embedding.word_embeddings.weight"}
    file = folder / "mp_rank_01_001" / RNG
    tree = torch.load(file, weights_only=False)
    tree["model"]["output_layer.weight"][3] += 1
    torch.save(tree, file)
    with pytest.raises(NotWholeError, match=r"output_layer\.weight.*other bytes"):
        ckptools.consolidate(tmp_path / "run", tmp_path / "n.safetensors")


def test_the_embedding_for_the_head_of_older_versions_is_a_copy_of_the_input(tmp_path):
    arguments = {"untie_embeddings_and_output_weights": None}
    folder = save(Run(tp=2, layers=[[1, 1]], untied=False, args=arguments), tmp_path / "run")
    head, name = "output_layer.weight", "word_embeddings_for_head.weight"
    for rank in range(2):
        file = folder / f"mp_rank_0{rank}_001" / RNG
        edit(file, lambda tree: tree["model"].update({name: tree["model"].pop(head)}))
    done = ckptools.consolidate(tmp_path / "run", tmp_path / "m.safetensors")
    assert done.tied == {name: "embedding.word_embeddings.weight"}
    edit(folder / "mp_rank_01_001" / RNG, lambda tree: tree["model"][name][3].add_(1))
    with pytest.raises(NotWholeError, match=r"word_embeddings_for_head\.weight.*other bytes"):
        ckptools.consolidate(tmp_path / "run", tmp_path / "n.safetensors")


FC2, NORM = "decoder.layers.1.mlp.linear_fc2.weight", "decoder.final_layernorm.weight"
TP2, PP2, TIED = Run(tp=2), Run(layers=[[1, 1]]), Run(layers=[[1, 1]], untied=False)
PP4 = Run(layers=[[1, 1, 1, 1]])

Harm = Callable[[Path], object]


def of(rank: str, change: Callable[[dict[str, Any]], object]) -> Harm:
    """A harm that changes what one rank's file holds."""
    return lambda folder: edit(folder / f"mp_rank_{rank}" / RNG, change)


def in_model(rank: str, name: str, value: Callable[[Any], object]) -> Harm:
    return of(rank, lambda tree: tree["model"].update({name: value(tree["model"].get(name))}))


def versions(folder: Path) -> None:
    for rank in range(2):
        in_model(f"0{rank}", "decoder.version", lambda _: rank)(folder)  # noqa: B023 - called at once


def swapped(one: str, other: str) -> Harm:
    def swap(folder: Path) -> None:
        (folder / one).rename(folder / "x")
        (folder / other).rename(folder / one)
        (folder / "x").rename(folder / other)

    return swap


def copied(one: str, to: str) -> Harm:
    return lambda folder: shutil.copytree(folder / one, folder / to)


def stated(**args: int) -> Harm:
    def state(folder: Path) -> None:
        for file in folder.glob(f"*/{RNG}"):
            edit(file, lambda tree: vars(tree["args"]).update(args))

    return state


VOCABULARY = "model.embedding.word_embeddings.weight"
OPTIMIZER = "optimizer"
UNLIKE = "rank 1 has float16 [8, 6], another rank has float32 [8, 6]"
HARMS: tuple[tuple[Run, Harm, str, str], ...] = (
    (Run(), copied("mp_rank_00", "mp_rank_00_000"), "CK009 0", "tensor-parallel rank 0: mp_rank_00, mp_rank_00_000"),
    (TP2, copied("mp_rank_01", "mp_rank_02"), "CK009 2", "mp_rank_02 is tensor-parallel rank 2, and the save has 2"),
    (TP2, swapped("mp_rank_00", "mp_rank_01"), "CK009 1", "mp_rank_01 holds tensor-parallel rank 0"),
    (PP4, swapped("mp_rank_00_001", "mp_rank_00_002"), "CK009 2", "mp_rank_00_002 holds pipeline stage 1"),
    (TP2, lambda f: torch.save([1], f / "mp_rank_01" / RNG), "CK002 1", "expected a dict with a model, found a list"),
    (TP2, of("01", lambda t: t.update(iteration=6)), "CK006 iteration", "not of one step"),
    (TP2, of("01", lambda t: vars(t["args"]).update(hidden_size=24)), "CK103 1", "args.hidden_size is 24"),
    (RUNS["virtual pipeline"], of("00_001", lambda t: t.pop("model1")), "CK104", "numbers of model chunks: [1, 2]"),
    (TP2, versions, "CK105 model.decoder.version", "differ"),
    (TP2, in_model("01", FC2, lambda t: t.half()), f"CK104 model.{FC2}", UNLIKE),
    (TP2, in_model("01", NORM, lambda _: None), "CK106", f"{NORM}: ranks hold it and something else"),
    (
        TP2,
        of("01", lambda t: t["optimizer"]["param_groups"][1].update(lr=0.5)),
        "CK105 1 optimizer",
        "other param groups",
    ),
    (TIED, in_model("00_001", HEAD, lambda t: t.double()), f"CK104 model.{HEAD}", "float64 [16, 8]"),
    (PP2, stated(num_layers=3), "CK104 model.decoder.layers", "2 layers, args.num_layers is 3"),
    (TP2, stated(padded_vocab_size=32), f"CK104 {VOCABULARY}", "16 rows, args.padded_vocab_size is 32"),
)
"""A run, what is done to its folder, a problem of it then (code, rank, tensor), and words of its message."""


@pytest.mark.parametrize(("run", "harm", "problem", "words"), HARMS, ids=[words for *_, words in HARMS])
def test_what_does_not_belong_together_is_named_and_not_written(run, harm, problem, words, tmp_path):
    harm(save(run, tmp_path / "run"))
    ck = ckptools.open(tmp_path / "run", all_ranks=True)
    assert problem in said(ck) and any(words in p.message for p in ck.problems)
    with pytest.raises(NotWholeError):
        ck.consolidate(tmp_path / "m.pt", only="all")


# -- what differs between versions and options ------------------------------------------------------------------------


def test_older_nested_names_are_joined_too(tmp_path):
    weight = torch.randn(12, 4)
    for rank in range(2):
        layer = {"layers.0.attention.query_key_value.weight": weight.chunk(2)[rank]}
        embedding = {"word_embeddings": {"weight": weight.chunk(2)[rank]}}
        model = {"language_model": {"embedding": embedding, "transformer": layer}}
        file = tmp_path / "iter_0000003" / f"mp_rank_0{rank}" / RNG
        file.parent.mkdir(parents=True)
        torch.save({"args": Namespace(model_parallel_size=2), "model": model, "iteration": 3}, file)
    ck = ckptools.open(tmp_path, all_ranks=True)
    for name in ("embedding.word_embeddings.weight", "transformer.layers.0.attention.query_key_value.weight"):
        assert torch.equal(ck.model[f"language_model.{name}"].load(), weight)
    assert any(
        "checkpoint_version 0: fused QKV weights keep that version's row order" in p.message for p in ck.problems
    )


@pytest.mark.parametrize(
    ("version", "order"),
    [(0, "all queries, all keys"), (1.0, "interleaved"), (2.0, "for each query group"), (3.0, "for each query group")],
)
def test_the_order_of_fused_rows_is_that_of_the_version(version, order, tmp_path):
    save(Run(), tmp_path, checkpoint_version=version)
    (note,) = [p.message for p in ckptools.open(tmp_path).problems if "fused QKV" in p.message]
    assert order in note and (version >= 2 or f"checkpoint_version {version}:" in note)


@pytest.mark.parametrize(("weights", "other"), [("fp32", "weights='module'"), ("module", "weights='fp32'")])
def test_the_note_on_half_weights_names_the_option_for_the_other_copy(weights, other, tmp_path):
    save(Run(half=True), tmp_path)
    (note,) = [p.message for p in ckptools.open(tmp_path, weights=weights).problems if "half-precision" in p.message]
    assert note.startswith("16 half-precision weights") and other in note and f"weights={weights!r}" not in note


def test_the_note_on_half_weights_of_an_interleaved_pipeline_is_given_once_and_counts_all_chunks(tmp_path):
    run = Run(layers=[[1, 2], [2, 1]], half=True)
    save(run, tmp_path)
    ck = ckptools.open(tmp_path, all_ranks=True)
    (note,) = [p.message for p in ck.problems if "half-precision" in p.message]
    assert note.startswith(f"{len(full_model(run))} half-precision weights")
    assert set(ck.model) == set(full_model(run))


def test_a_grid_that_the_arguments_do_not_state_is_that_of_the_folders(tmp_path):
    sizes = dict.fromkeys(("tensor_model_parallel_size", "pipeline_model_parallel_size", "world_size"))
    run = Run(tp=2, layers=[[1, 1, 1]], args=sizes)
    save(run, tmp_path)
    ck = ckptools.open(tmp_path, all_ranks=True)
    assert ck.whole and same_model(ck, full_model(run))
    assert (ck.saved_as, ck.ranks) == ("Megatron-LM, tensor parallel 2 x pipeline 3", tuple(range(6)))


def test_half_weights_come_from_their_master_copies_unless_the_modules_are_asked_for(tmp_path):
    run = Run(tp=2, layers=[[1, 1]], gated=True, half=True)
    save(run, tmp_path)
    full = full_model(run)
    module = ckptools.open(tmp_path, all_ranks=True, weights="module")
    fp32 = ckptools.open(tmp_path, all_ranks=True)
    assert all(torch.equal(module.model[k].load(), v) for k, v in full.items())
    assert all(torch.equal(fp32.model[k].load(), master(k, full)) for k in full)
    assert "CK012" in codes(fp32, "note") and set(fp32.model) == set(full)
    (optimizer,) = module.optimizers.values()
    assert torch.equal(
        optimizer.state["output_layer.weight"]["fp32_param"].load(), fp32.model["output_layer.weight"].load()
    )


def test_half_weights_without_sure_master_copies_are_the_modules_own(tmp_path):
    folder = save(Run(half=True), tmp_path)
    file = folder / "mp_rank_00" / RNG
    tree = torch.load(file, weights_only=False)
    tree["optimizer"]["fp32_from_fp16_params"][0].pop()
    torch.save(tree, file)
    ck = ckptools.open(tmp_path)
    assert ck.model["output_layer.weight"].dtype == "bfloat16"
    assert any("no fp32 master copy here that is sure" in p.message for p in ck.problems)


def test_numbers_that_could_be_several_parameters_are_refused_and_the_model_can_be_written(tmp_path):
    folder = save(Run(), tmp_path / "run")
    file = folder / "mp_rank_00" / RNG
    tree = torch.load(file, weights_only=False)
    tree["optimizer"]["param_groups"][1]["params"].pop(0)
    torch.save(tree, file)
    with pytest.raises(NotWholeError, match=r"\?\d+ of mp_rank_00.*only='model'"):
        ckptools.consolidate(tmp_path / "run", tmp_path / "all.pt")
    ckptools.consolidate(tmp_path / "run", tmp_path / "model.pt", only="model")


def test_optimizer_state_of_another_shape_than_its_weight_is_refused_and_the_model_can_be_written(tmp_path):
    folder = save(Run(tp=2), tmp_path / "run")
    for file in folder.glob("*/*.pt"):
        edit(file, lambda tree: tree["optimizer"]["state"][2].update(row_sum=torch.ones(3)))
    with pytest.raises(NotWholeError, match=r"row_sum.*its shape is not its parameter's.*only='model'"):
        ckptools.consolidate(tmp_path / "run", tmp_path / "all.pt")
    ckptools.consolidate(tmp_path / "run", tmp_path / "model.pt", only="model")


def with_flat_buffers(run: Run, to: Path) -> Path:
    """A run with the distributed optimizer."""
    folder = save(run, to)
    for file in folder.glob("*/model_optim_rng.pt"):
        tree = torch.load(file, weights_only=False)
        groups = [{k: v for k, v in g.items() if k != "params"} for g in tree["optimizer"]["param_groups"]]
        torch.save({**tree, "optimizer": {"optimizer": {"param_groups": groups}}}, file)
        buffers = {k: torch.zeros(64) for k in ("param", "exp_avg", "exp_avg_sq")}
        flat = {0: {(torch.bfloat16, torch.float32): {**buffers, "numel_unpadded": 60}}, "buckets_coalesced": True}
        torch.save(flat, file.with_name("distrib_optim.pt"))
    return to


def test_the_distributed_optimizers_buffers_are_shown_and_not_joined(tmp_path):
    run = with_flat_buffers(Run(tp=2), tmp_path / "run")
    ck = ckptools.open(run, all_ranks=True)
    (optimizer,) = ck.optimizers.values()
    assert next(iter(optimizer.state)) == "mp_rank_00/distrib_optim.pt: 0.['torch.bfloat16', 'torch.float32']"
    assert len(optimizer.state) == 2 and {len(slots) for slots in optimizer.state.values()} == {3}
    assert [g.lr for g in optimizer.param_groups] == [1e-3, 1e-3]
    with pytest.raises(NotWholeError, match=r"flat buffers without names.*only='model'"):
        ck.consolidate(tmp_path / "all.pt")
    ck.consolidate(tmp_path / "model.pt", only="model")


def test_the_file_names_of_core_0_2_are_known_too(tmp_path):
    run = with_flat_buffers(Run(tp=2), tmp_path / "run")
    for folder in run.glob("*/mp_rank_*"):
        (folder / RNG).rename(folder / "model_rng.pt")
        (folder / "distrib_optim.pt").rename(folder / "optim.pt")
    ck = ckptools.open(run, all_ranks=True)
    assert (ck.format, ck.whole, same_model(ck, full_model(Run(tp=2)))) == ("megatron", True, True)
    (optimizer,) = ck.optimizers.values()
    assert {name.partition(":")[0] for name in optimizer.state} == {f"mp_rank_0{rank}/optim.pt" for rank in (0, 1)}
    assert ckptools.open(run / "iter_0000005" / "mp_rank_01" / "model_rng.pt").whole


def test_a_bare_tensor_in_the_place_of_an_optimizers_state_is_shown(legacy):
    for file in legacy.rglob("model_optim_rng.pt"):
        torch.save(torch.ones(3), file.with_name("distrib_optim.pt"))
    (optimizer,) = ckptools.open(legacy).optimizers.values()
    found = {name: list(slots) for name, slots in optimizer.state.items() if "distrib_optim.pt" in name}
    assert len(found) == 4 and all(slots == ["tensor"] for slots in found.values())


@pytest.mark.parametrize("copies", [None, {}, [None, 3], [["no tensor"], []]], ids=repr)
def test_master_copies_of_another_form_are_none(copies, tmp_path):
    folder = save(Run(half=True), tmp_path)
    file = folder / "mp_rank_00" / RNG
    edit(file, lambda tree: tree["optimizer"].update(fp32_from_fp16_params=copies))
    ck = ckptools.open(tmp_path)
    assert {t.dtype for t in ck.model.values() if isinstance(t, Tensor)} == {"bfloat16"}
    assert any("no fp32 master copy here that is sure" in p.message for p in ck.problems)


@pytest.fixture
def experts(tmp_path):
    """A run of two expert-parallel ranks, each with experts of its own under the same name."""
    for expert in range(2):
        own = torch.full((3,), float(expert))
        model = {"decoder.final_layernorm.weight": torch.ones(4), "decoder.layers.0.mlp.experts.w": own}
        args = Namespace(
            tensor_model_parallel_size=1, pipeline_model_parallel_size=1, expert_model_parallel_size=2, world_size=2
        )
        file = tmp_path / "run" / "iter_0000003" / f"mp_rank_00_00{expert}" / RNG
        file.parent.mkdir(parents=True)
        torch.save({"args": args, "model": model}, file)
    return tmp_path / "run"


def test_experts_of_several_ranks_are_no_copies_of_one_another(experts):
    verified = ckptools.open(experts).verify(deep=True, values=True)
    assert verified.ok and not [p for p in verified.problems if p.severity == "error"]
    assert verified.verdict.whole and verified.verdict.joinable is False


def test_expert_ranks_that_the_arguments_state_and_nothing_here_has_are_missing(experts):
    for file in experts.glob("*/*/*.pt"):
        edit(file, lambda tree: setattr(tree["args"], "expert_model_parallel_size", 3))
    ck = ckptools.open(experts, all_ranks=True)
    assert [p.message for p in ck.problems if p.code == "CK001"] == ["no file mp_rank_00_002/model_optim_rng.pt"]


def test_experts_of_another_tensor_parallel_size_are_not_joined_by_a_rule_either(tmp_path):
    folder = save(Run(tp=4, args={"expert_tensor_parallel_size": 2}), tmp_path / "run")
    name = "decoder.layers.0.mlp.experts.local_experts.0.linear_fc1.weight"
    for file in folder.glob("*/*.pt"):
        edit(file, lambda tree: tree["model"].update({name: torch.ones(4, 2)}))
    (tmp_path / "rules.json").write_text('{"*": {"dim": 0}}')
    ck = ckptools.open(tmp_path / "run", all_ranks=True, rules=tmp_path / "rules.json")
    assert "experts" in ck.model[name].note and ck.model["output_layer.weight"].shape == (16, 8)


def test_extra_states_of_several_ranks_are_kept_for_each(tmp_path):
    folder = save(Run(tp=2), tmp_path)
    for rank in range(2):
        file = folder / f"mp_rank_0{rank}" / RNG
        tree = torch.load(file, weights_only=False)
        tree["model"]["decoder.layers.0.mlp.linear_fc1._extra_state"] = torch.full((3,), rank, dtype=torch.uint8)
        torch.save(tree, file)
    ck = ckptools.open(tmp_path, all_ranks=True)
    states = ck.raw["extra_state"]["decoder.layers.0.mlp.linear_fc1._extra_state"]
    assert [t.load().tolist() for t in states] == [[0, 0, 0], [1, 1, 1]]
    assert len(ck.of_kind("model")) == 1 and not any("_extra" in n for n in ck.model)


def test_data_parallel_replicas_have_no_files_and_are_not_missed(tmp_path):
    save(Run(tp=2, layers=[[1, 1]], args={"world_size": 16, "rank": None}), tmp_path)
    ck = ckptools.open(tmp_path)
    assert (ck.world_size.value, ck.ranks, ck.whole) == (16, (0, 1, 8, 9), True)
    shown = CliRunner().invoke(app, ["inspect", str(tmp_path)]).stdout
    assert "whole: all 4 rank files are here" in shown and "world size  16" in shown


@pytest.mark.parametrize(
    ("more", "ranks"),
    [({}, (0, 1, 8, 9)), ({"use_tp_pp_dp_mapping": True}, (0, 1, 2, 3)), ({"world_size": None}, (0, 1, 2, 3))],
)
def test_the_ranks_of_a_later_stage_are_numbered_as_megatron_orders_its_grid(more, ranks, tmp_path):
    save(Run(tp=2, layers=[[1, 1]], args={"world_size": 16, "rank": None, **more}), tmp_path)
    assert ckptools.open(tmp_path).ranks == ranks


@pytest.mark.slow
@settings(max_examples=12, deadline=None)
@given(
    tp=st.sampled_from([1, 2, 4]), layers=st.lists(st.integers(0, 2), min_size=1, max_size=3).filter(any),
    gated=st.booleans(), bias=st.booleans(), untied=st.booleans(), half=st.booleans(),
)  # fmt: skip
def test_any_grid_gives_the_model_back(tmp_path_factory, tp, layers, gated, bias, untied, half):
    run = Run(tp=tp, layers=[layers], gated=gated, bias=bias, untied=untied, half=half)
    folder = tmp_path_factory.mktemp("grid")
    save(run, folder)
    ck = ckptools.open(folder, all_ranks=True, weights="module")
    assert ck.whole and same_model(ck, full_model(run))
    assert len(ck.model) >= len(full_model(run)) - (not untied)


@pytest.mark.parametrize("name", ["model_optim_rng.pt", "distrib_optim.pt"])
def test_a_damaged_file_is_one_line(name, tmp_path):
    run = with_flat_buffers(Run(), tmp_path / "run")
    (run / "iter_0000005" / "mp_rank_00" / name).write_bytes(b"PK\3\4 and no more")
    try:
        ck = ckptools.open(run)
        assert "CK002" in codes(ck)
    except CkptoolsError as error:
        assert "\n" not in str(error)


def test_one_stage_alone_can_be_looked_at(legacy):
    ck = ckptools.open(legacy / "iter_0000005" / "mp_rank_00_000" / RNG, only_this_file=True)
    assert codes(ck) == ["CK107"] and ck.cost.files == 1
    assert ck.model["decoder.layers.0.mlp.linear_fc1.weight"].shape == (68, 20)


@pytest.mark.parametrize("run", [Run(), Run(tp=2)], ids=["one rank", "tp2"])
def test_a_file_without_its_folder_is_whole_only_when_it_is_the_only_one(run, tmp_path):
    folder = save(run, tmp_path / "run")
    lone = Path(shutil.copy(folder / "mp_rank_00" / RNG, tmp_path))
    ck = ckptools.open(lone, all_ranks=True)
    assert (ck.format, ck.whole) == ("megatron", run.tp == 1)
    if run.tp == 2:
        with pytest.raises(NotWholeError, match="one of 2 ranks' files"):
            ck.consolidate(tmp_path / "m.pt", allow_missing=True)


@pytest.mark.parametrize("name", ["tensor_model_parallel_size", "pipeline_model_parallel_size"])
@pytest.mark.parametrize("size", [1 << 30, 1 << 70, 0, -2, "2", None, 2.0])
def test_absurd_sizes_in_the_arguments_cost_nothing(name, size, tmp_path):
    save(Run(args={name: size}), tmp_path)
    try:
        assert ckptools.open(tmp_path, all_ranks=True).model
    except ReadError as error:
        assert "no cluster has so many" in str(error)


def test_chained_optimizers_stay_a_list_and_are_named_together(tmp_path):
    folder = save(Run(tp=2), tmp_path)
    for file in folder.glob("*/*.pt"):
        tree = torch.load(file, weights_only=False)
        whole = tree["optimizer"]
        first, second = ({**whole, "param_groups": [g], "state": {}} for g in whole["param_groups"])
        for one in (first, second):
            ids = one["param_groups"][0]["params"]
            one["state"] = {n: whole["state"][i] for n, i in enumerate(ids)}
            one["param_groups"][0]["params"] = list(range(len(ids)))
        torch.save({**tree, "optimizer": [first, {"optimizer": second, "grad_scaler": {"scale": 2.0}}]}, file)
    ck = ckptools.open(tmp_path, all_ranks=True)
    full = moments_of(full_model(Run(tp=2)))["exp_avg"]
    states = {k: v for one in ck.optimizers.values() for k, v in one.state.items()}
    assert set(states) == set(full) and all(torch.equal(v["exp_avg"].load(), full[k]) for k, v in states.items())
    assert ck.raw["optimizer"][1]["grad_scaler"] == {"scale": 2.0}


@pytest.mark.parametrize(("stages", "said"), [([[2]], True), ([[1, 1]], False)])
def test_a_tied_output_layer_without_a_name_of_its_own_is_told(stages, said, tmp_path):
    save(Run(layers=stages, untied=False), tmp_path)
    told = [p.message for p in ckptools.open(tmp_path).problems if "tied to embedding" in p.message]
    assert bool(told) == said


def test_a_stated_world_that_is_smaller_than_the_grid_is_not_believed():
    sizes = {"tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 2}
    assert grid_of({**sizes, "world_size": 8}, []).world == Fact(8, ("args.world_size",))
    assert grid_of({**sizes, "world_size": 3}, []).world == Fact(4, ("files found",))
    assert grid_of({**sizes, "data_parallel_size": 3}, []).world == Fact(12, ("args.data_parallel_size",))
    contexts = {**sizes, "data_parallel_size": 3, "context_parallel_size": 2}
    assert grid_of(contexts, []).world == Fact(24, ("args.data_parallel_size",))


@pytest.mark.parametrize(
    ("tree", "chunks"),
    [
        ({"model": {"a": 1, "b": {"c": 2, "d": {"e": 3}}}}, [{"a": 1, "b.c": 2, "b.d.e": 3}]),
        ({"model": {}, "model0": {"x": 1}}, [{}]),
        ({"model1": {"b": 2}, "model0": {"a": {"c": 1}}}, [{"a.c": 1}, {"b": 2}]),
        ({f"model{n}": {"w": n} for n in range(11)}, [{"w": n} for n in range(11)]),
        ({"model0": {"a": 1}, "model2": {"b": 2}}, []),
        ({"model1": {"a": 1}}, []),
        ({"model0": [1, 2], "model1": {"a": {}}}, [{}, {}]),
        ({"model": 5}, []),
        ({1: {"a": 1}, "models": {}}, []),
    ],
)
def test_a_file_has_the_chunks_that_it_numbers(tree, chunks):
    assert chunks_of(tree) == chunks
