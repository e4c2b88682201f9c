"""Safetensors shards of DCP: put together by their offsets, refused where these do not cover; held against torch."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

import ckptools
from ckptools.errors import NotWholeError, ReadError, UsageError
from ckptools.formats.dcp_safetensors import parse
from tests.truth import FIXTURES
from tests.versions import TORCH

DCP_HF = FIXTURES / "dcp-hf" / "ckpt"
SHAPES = FIXTURES / "dcp-hf" / "shapes.json"


@pytest.fixture
def shards(tmp_path) -> Path:
    return Path(shutil.copytree(DCP_HF, tmp_path / "shards"))


def name(rank: int, part: int, of: int = 2) -> str:
    return f"shard-{rank + 1:05d}-model-{part:05d}-of-{of:05d}.safetensors"


def codes(ck: ckptools.Checkpoint) -> list[str]:
    return [p.code for p in ck.problems]


def contents(path: Path) -> tuple[dict[str, torch.Tensor], dict[str, dict[str, list[int]]]]:
    with safe_open(path, framework="pt") as file:
        info = json.loads(file.metadata()["DCP_SHARDING_INFO"])
        return {k: file.get_tensor(k) for k in file.keys()}, info  # noqa: SIM118 - it is no dict


def write(path: Path, tensors: dict[str, torch.Tensor], info: object) -> None:
    text = info if isinstance(info, str) else json.dumps(info)
    save_file(tensors, path, metadata={"format": "pt", "DCP_VERSION": "1.0", "DCP_SHARDING_INFO": text})


def move(path: Path, fqn: str, offsets: object) -> None:
    """Change what a shard says of where one of its pieces belongs."""
    tensors, info = contents(path)
    info[fqn] = {"saved_offsets": offsets}  # type: ignore[dict-item]
    write(path, tensors, info)


@pytest.mark.parametrize(
    ("file", "rank", "part"),
    [(name(0, 1), 0, 1), (name(11, 2, 3), 11, 2), ("shard-1-model-1-of-1.safetensors", 0, 1)],
)
def test_a_name_tells_rank_and_part(file, rank, part):
    found = parse(Path(file))
    assert found is not None and (found.rank, found.part) == (rank, part)


@pytest.mark.parametrize("file", ["model-00001-of-00002.safetensors", "shard-00000-model-00001-of-00001.safetensors"])
def test_other_names_are_no_shards(file):
    assert parse(Path(file)) is None


LAST = [(3, (1, 2)), (3, (1,)), (3, (2,)), (2, ()), (3, ())]
"""A rank and those of its files that are lost: all, the first, the last, none."""


@pytest.mark.parametrize(("rank", "parts"), LAST)
def test_without_shapes_the_last_rank_may_be_missing_so_whole_is_not_known(shards, tmp_path, rank, parts):
    for part in parts:
        (shards / name(rank, part)).unlink()
    ck = ckptools.open(shards)
    (problem,) = [p for p in ck.problems if p.code == "CK110"]
    assert (ck.whole, problem.severity) == (None, "warning") and "last rank" in problem.message
    with pytest.raises(NotWholeError, match="CK110"):
        ck.consolidate(tmp_path / "out.safetensors")
    ck.consolidate(tmp_path / "out.safetensors", allow_missing=True)


@pytest.mark.parametrize(
    ("rank", "parts"), [(0, (1,)), (0, (2,)), (1, (1,)), (2, (2,)), (3, (1,)), (3, (2,)), (3, (1, 2))]
)
def test_with_shapes_every_lost_file_is_missed(shards, tmp_path, rank, parts):
    for part in parts:
        (shards / name(rank, part)).unlink()
    ck = ckptools.open(shards, shapes=SHAPES)
    assert (ck.whole, ck.verdict.recoverable) == (False, False)
    with pytest.raises(NotWholeError):
        ck.consolidate(tmp_path / "out.safetensors")


LLAMA = {
    "model_type": "llama", "vocab_size": 33, "hidden_size": 16, "intermediate_size": 30, "num_attention_heads": 4,
    "num_key_value_heads": 2, "num_hidden_layers": 1,
}  # fmt: skip


def llama_shards(folder: Path, config: dict, **rows: int) -> Path:
    """Shards of a small Llama of four ranks as FSDP cuts it: the layers in file 1, the tables in file 2."""
    at = "model.layers.0."
    shapes = {f"{at}self_attn.q_proj.weight": (16, 16), f"{at}self_attn.k_proj.weight": (8, 16)}
    shapes |= {f"{at}mlp.up_proj.weight": (30, 16), f"{at}mlp.down_proj.weight": (16, 30), "model.norm.weight": (16,)}
    tables = {"model.embed_tokens.weight": (rows.get("vocabulary", 33), 16), "lm_head.weight": (33, 16)}
    folder.mkdir()
    for part, own in ((1, shapes), (2, tables)):
        cut = {k: torch.ones(shape).chunk(4) for k, shape in own.items()}
        for rank in range(4):
            info = {k: {"saved_offsets": [rank * len(c[0]), *(0,) * (c[0].dim() - 1)]} for k, c in cut.items()}
            write(folder / name(rank, part), {k: c[rank] for k, c in cut.items()}, info)
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize(
    ("lost", "fqn", "said"),
    [
        ([(3, 1), (3, 2)], "model.embed_tokens.weight", r"states a shape of \[33, 16\], .* reach to \[27, 16\]"),
        ([(2, 1), (2, 2), (3, 1), (3, 2)], "lm_head.weight", r"states a shape of \[33, 16\], .* reach to \[18, 16\]"),
        ([(3, 2)], "lm_head.weight", r"states a shape of \[33, 16\], .* reach to \[27, 16\]"),
        ([(3, 1)], "model.layers.0.mlp.up_proj.weight", r"states a shape of \[30, 16\], .* reach to \[24, 16\]"),
        ([(0, 1), (0, 2)], "model.embed_tokens.weight", r"gap \[0:9, 0:16\]"),
    ],
)
def test_rows_that_the_config_states_and_no_piece_holds_are_a_gap(tmp_path, lost, fqn, said):
    folder = llama_shards(tmp_path / "x", LLAMA)
    for rank, part in lost:
        (folder / name(rank, part)).unlink()
    ck = ckptools.open(folder)
    (gap,) = [p for p in ck.problems if (p.code, p.tensor) == ("CK101", fqn)]
    assert ck.whole is False and re.search(said, gap.message)
    with pytest.raises(NotWholeError) as refused:
        ck.consolidate(tmp_path / "out.safetensors")
    assert gap in refused.value.problems


@pytest.mark.parametrize(
    ("config", "rows"),
    [
        (LLAMA, {}),
        (LLAMA, {"vocabulary": 36}),
        ({**LLAMA, "vocab_size": 40}, {}),  # the last piece is the short one, so that no rank is lost
        ({**LLAMA, "hidden_size": 32, "vocab_size": 64}, {}),
        ({**LLAMA, "quantization_config": {"quant_method": "gptq"}, "vocab_size": 64}, {"vocabulary": 36}),
    ],
)
def test_shards_that_are_all_here_are_not_called_torn_beside_any_config(tmp_path, config, rows):
    ck = ckptools.open(llama_shards(tmp_path / "x", config, **rows))
    assert ck.whole is None and "CK101" not in codes(ck)


@pytest.mark.slow
@pytest.mark.parametrize("out", ["out.safetensors", "out.pt", "out.dcp"])
@pytest.mark.parametrize("provenance", [True, False])
def test_an_output_carries_the_doubt_of_shards_whose_shapes_no_file_states(tmp_path, out, provenance):
    ckptools.open(DCP_HF).consolidate(tmp_path / out, allow_missing=True, provenance=provenance)
    made = ckptools.open(tmp_path / out)
    assert made.whole is None and any("a last rank may be missing" in p.message for p in made.problems)
    made.consolidate(tmp_path / "again.safetensors")
    (problem,) = ckptools.open(tmp_path / "again.safetensors").problems
    assert (problem.code, problem.severity) == ("CK107", "warning")
    ckptools.open(DCP_HF, shapes=SHAPES).consolidate(tmp_path / "sure.safetensors")
    assert ckptools.open(tmp_path / "sure.safetensors").whole


def test_shapes_that_are_smaller_than_the_pieces_contradict_them(shards, tmp_path):
    (tmp_path / "shapes.json").write_text(json.dumps({"embed.weight": [30, 17]}))
    ck = ckptools.open(shards, shapes=tmp_path / "shapes.json")
    assert ("CK104", "embed.weight") in [(p.code, p.tensor) for p in ck.problems]


def test_a_rank_that_lacks_one_of_its_files_is_told(shards):
    (shards / name(2, 1)).unlink()
    ck = ckptools.open(shards)
    told = next(p for p in ck.problems if p.code == "CK001")
    assert (told.rank, told.severity) == (2, "warning") and "no file of 1 part of 2" in told.message
    assert not ck.whole


def test_a_file_that_is_a_copy_of_another_of_its_rank_is_noticed(shards):
    one, other = (shards / f"shard-00004-model-0000{n}-of-00002.safetensors" for n in (1, 2))
    shutil.copy(one, other)
    found = [p.message for p in ckptools.open(shards).problems if p.code == "CK009"]
    (text,) = found
    assert text.startswith(f"{other.name} has the pieces of {one.name}") and text.endswith("a copy of it")


def test_pieces_that_overlap_are_refused(shards, tmp_path):
    move(shards / name(1, 2), "embed.weight", [8, 0])
    ck = ckptools.open(shards)
    assert ("CK102", "embed.weight") in [(p.code, p.tensor) for p in ck.problems]
    with pytest.raises(NotWholeError, match="overlap"):
        ck.consolidate(tmp_path / "out.safetensors")


def test_ranks_that_disagree_on_the_dtype_are_refused(shards, tmp_path):
    tensors, info = contents(shards / name(1, 2))
    write(shards / name(1, 2), {k: t.half() if k == "embed.weight" else t for k, t in tensors.items()}, info)
    assert ("CK104", "embed.weight") in [(p.code, p.tensor) for p in ckptools.open(shards).problems]


def test_a_replica_that_differs_is_refused_and_an_equal_one_is_kept_once(shards, tmp_path):
    fqn = "stats.running_mean"
    mean = contents(shards / name(1, 2))[0][fqn]
    tensors, info = contents(shards / name(0, 2))
    write(shards / name(0, 2), tensors | {fqn: mean}, info | {fqn: {"saved_offsets": [0]}})
    ckptools.open(shards, shapes=SHAPES).consolidate(tmp_path / "out.safetensors")
    assert torch.equal(load_file(tmp_path / "out.safetensors")[fqn], mean)
    write(shards / name(0, 2), tensors | {fqn: mean + 1}, info | {fqn: {"saved_offsets": [0]}})
    with pytest.raises(NotWholeError, match="CK105"):
        ckptools.consolidate(shards, tmp_path / "other.safetensors")


@pytest.mark.parametrize(
    ("offsets", "found"),
    [
        ([0], "expected 2 saved_offsets"),
        ([0, -1], "saved_offsets"),
        ([0, 1 << 70], "an int of 71 bits"),
        (None, "None"),
    ],
)
def test_offsets_that_cannot_be_are_refused(shards, offsets, found):
    move(shards / name(1, 2), "embed.weight", offsets)
    with pytest.raises(ReadError, match=found):
        ckptools.open(shards / name(1, 2))
    assert ("CK002", 1) in [(p.code, p.rank) for p in ckptools.open(shards).problems]


@pytest.mark.parametrize("info", ["{", "[]", "null", '{"embed.weight": 1, "embed.weight": 2}', "[" * 100_000])
def test_sharding_info_that_is_none_is_one_line(shards, info):
    tensors, _ = contents(shards / name(1, 2))
    write(shards / name(1, 2), tensors, info)
    with pytest.raises(ReadError, match="DCP_SHARDING_INFO"):
        ckptools.open(shards / name(1, 2))


def test_a_piece_far_out_costs_nothing(shards):
    move(shards / name(3, 2), "embed.weight", [1 << 60, 1 << 60])
    ck = ckptools.open(shards)
    assert not ck.whole and ck.model["embed.weight"].shape == ((1 << 60) + 6, (1 << 60) + 17)


def test_shards_of_two_saves_are_for_the_user_to_part(shards):
    shutil.copy(shards / name(0, 1), shards / name(0, 1, of=3))
    with pytest.raises(UsageError, match="2 checkpoints"):
        ckptools.open(shards)


def test_objects_in_front_of_the_tensors_are_told(shards):
    path = shards / name(0, 1)
    torch.save({"lr": 1}, shards / "object")
    path.write_bytes((shards / "object").read_bytes() + path.read_bytes())
    with pytest.raises(ReadError, match="objects that DCP wrote in front"):
        ckptools.open(path)


def test_a_shard_under_another_name_is_not_taken_for_a_whole_model(shards, tmp_path):
    (tmp_path / "alone").mkdir()
    shutil.copy(shards / name(1, 2), tmp_path / "alone" / "model.safetensors")
    ck = ckptools.open(tmp_path / "alone")
    assert codes(ck) == ["CK011"] and "pieces of larger tensors" in ck.problems[0].message


# -- against torch -----------------------------------------------------------------------------------------------


pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


def save_with_torch(folder: Path, **options: object) -> dict[str, torch.Tensor]:
    import torch.distributed.checkpoint as dcp

    state = {"a.w": torch.arange(12.0).reshape(3, 4), "b": torch.ones(2, dtype=torch.bfloat16), "c": torch.zeros(0, 4)}
    if not hasattr(dcp, "HuggingFaceStorageWriter"):
        pytest.skip(f"{TORCH} has no HuggingFaceStorageWriter")
    writer = dcp.HuggingFaceStorageWriter(path=str(folder), **options)  # type: ignore[arg-type]
    dcp.save(dict(state), storage_writer=writer)
    return state


def check(ck: ckptools.Checkpoint, state: dict[str, torch.Tensor]) -> None:
    assert ck.whole and set(ck.model) == set(state)
    assert all(torch.equal(ck.model[k].load(), t) for k, t in state.items())


def test_what_torch_writes_from_rank_0_is_a_hugging_face_model(tmp_path):
    state = save_with_torch(tmp_path, fqn_to_index_mapping={"a.w": 1, "b": 2, "c": 2})
    ck = ckptools.open(tmp_path)
    assert (ck.format, ck.saved_as) == ("hugging_face", "2 .safetensors and an index, every tensor whole")
    check(ck, state)


def test_what_torch_writes_from_every_rank_are_shards(tmp_path):
    state = save_with_torch(tmp_path, save_distributed=True)
    (tmp_path / "shapes.json").write_text(json.dumps({k: list(t.shape) for k, t in state.items()}))
    ck = ckptools.open(tmp_path, shapes=tmp_path / "shapes.json")
    assert (ck.format, ck.world_size.value) == ("dcp_safetensors", 1)
    check(ck, state)


def test_a_consolidated_model_and_the_shards_below_it_are_both_read(tmp_path):
    mapping = {"a.w": 1, "b": 2, "c": 2}
    state = save_with_torch(tmp_path, save_distributed=True, enable_consolidation=True, fqn_to_index_mapping=mapping)
    check(ckptools.open(tmp_path), state)
    below = ckptools.open(tmp_path / "sharded")
    assert (below.format, below.problems) == ("dcp_safetensors", ())
    check(below, state)


def test_the_consolidated_model_above_tells_of_a_last_rank_that_is_missing(shards, tmp_path):
    (tmp_path / "model").mkdir()
    ckptools.open(shards, shapes=SHAPES).consolidate(tmp_path / "model" / "model.safetensors")
    below = Path(shutil.copytree(shards, tmp_path / "model" / "sharded"))
    assert ckptools.open(below).problems == ()
    for part in (1, 2):
        (below / name(3, part)).unlink()
    assert "CK101" in codes(ckptools.open(below))


def test_torch_and_ckptools_consolidate_the_same_shards_to_the_same_values(shards, tmp_path):
    official = pytest.importorskip(
        "torch.distributed.checkpoint._consolidate_hf_safetensors", reason=f"{TORCH} has no HuggingFaceStorageWriter"
    )
    # torch 2.13 stops at integer tensors (torch.finfo).
    tensors, info = contents(shards / name(2, 2))
    del tensors["stats.num_batches_tracked"], info["stats.num_batches_tracked"]
    write(shards / name(2, 2), tensors, info)
    (tmp_path / "out").mkdir()
    fqns = list(ckptools.open(shards).model)
    official.consolidate_safetensors_files(
        str(shards), str(tmp_path / "out"), {k: 1 + n % 2 for n, k in enumerate(fqns)}
    )
    theirs, ours = ckptools.open(tmp_path / "out"), ckptools.open(shards)
    assert (theirs.format, theirs.problems) == ("hugging_face", ())
    assert set(theirs.model) == set(ours.model)
    assert all(torch.equal(theirs.model[k].load(), ours.model[k].load()) for k in fqns)
