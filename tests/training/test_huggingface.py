"""The model alone, as Hugging Face's libraries read it: whole, in several files, and as the ranks' shards."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import ckptools
from ckptools.errors import UsageError
from ckptools.training.layouts import file_numbers, untied
from ckptools.training.options import CreateOptions, FileOptions, check_options
from tests.training.forked import ckptools_forked
from tools.demo import same

pytestmark = pytest.mark.slow

FORMS = ("huggingface", "cut", "joined", "shards")


def truth(folder: Path) -> dict[str, torch.Tensor]:
    """The gathered model, each tied weight once."""
    return untied(torch.load(folder / "full.pt")["model"])


def is_truth(found: dict[str, torch.Tensor], folder: Path) -> bool:
    expected = truth(folder)
    return found.keys() == expected.keys() and all(same(found[name], expected[name]) for name in found)


def test_a_tied_weight_is_there_once(torch_layouts: Path) -> None:
    names = torch.load(torch_layouts / "full.pt")["model"].keys()
    assert names - load_file(torch_layouts / "huggingface/model.safetensors").keys() == {"head.weight"}
    assert json.loads((torch_layouts / "huggingface/config.json").read_text())["tie_word_embeddings"] is True


def test_one_file_holds_the_gathered_model(torch_layouts: Path) -> None:
    assert is_truth(load_file(torch_layouts / "huggingface/model.safetensors"), torch_layouts)


@pytest.mark.parametrize("form", ["cut", "joined"])
def test_the_index_leads_to_every_tensor(form: str, torch_layouts: Path) -> None:
    folder = torch_layouts / form
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    files = {name: load_file(folder / name) for name in set(index["weight_map"].values())}
    assert is_truth({fqn: files[name][fqn] for fqn, name in index["weight_map"].items()}, torch_layouts)
    assert sum(map(len, files.values())) == len(index["weight_map"])
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in truth(torch_layouts).values())


def test_a_file_is_no_larger_than_asked_for(torch_layouts: Path) -> None:
    files = [load_file(path) for path in (torch_layouts / "cut").glob("*.safetensors")]
    assert len(files) == 5
    assert all(sum(tensor.nbytes for tensor in file.values()) <= 200_000 for file in files)


def test_shards_lie_below_the_model_that_was_joined_from_them(torch_layouts: Path) -> None:
    shards = sorted(path.name for path in (torch_layouts / "joined/sharded").iterdir())
    assert shards == [f"shard-{rank:05d}-model-{n:05d}-of-00005.safetensors" for rank in (1, 2) for n in range(1, 6)]
    assert len(list((torch_layouts / "joined").glob("model-*.safetensors"))) == 5


@pytest.mark.parametrize("form", [*FORMS, "joined/sharded"])
def test_every_form_is_consolidated_to_the_trained_model(form: str, torch_layouts: Path, tmp_path: Path) -> None:
    assert ckptools.verify(torch_layouts / form, deep=True).ok
    # Shards that ranks wrote state no shape, so a last rank could be missing; a joined model beside them states it.
    unstated = any(problem.code == "CK110" for problem in ckptools.open(torch_layouts / form).problems)
    assert unstated == (form == "shards")
    ckptools.consolidate(torch_layouts / form, tmp_path / "model.safetensors", allow_missing=unstated)
    assert is_truth(load_file(tmp_path / "model.safetensors"), torch_layouts)


def test_a_model_is_cut_in_order_and_no_tensor_is() -> None:
    sizes = {"a": 10, "b": 10, "c": 50, "d": 5, "e": 5}
    numbers = file_numbers(sizes, FileOptions(max_shard_size="20"))
    assert numbers == {"a": 1, "b": 1, "c": 2, "d": 3, "e": 3}
    assert set(file_numbers(sizes, FileOptions()).values()) == {1}


def test_no_file_is_empty_before_a_tensor_that_is_too_large() -> None:
    assert file_numbers({"a": 50, "b": 5}, FileOptions(max_shard_size="20")) == {"a": 1, "b": 2}


@pytest.mark.parametrize(
    ("layout", "files", "says"),
    [
        (
            "huggingface",
            FileOptions(consolidated=False),
            "--no-consolidated goes with --save-distributed; add --save-distributed",
        ),
        ("huggingface", FileOptions(max_shard_size="5XB"), "--max-shard-size 5XB: expected a size"),
        ("huggingface", FileOptions(max_shard_size="0"), "--max-shard-size 0: expected a size"),
        ("dcp", FileOptions(save_distributed=True), "--save-distributed goes with --layout huggingface, not dcp"),
        ("dcp", FileOptions(items="json"), "--items json is not known; choose from torch, safetensors"),
        ("dcp", FileOptions(files_per_rank="2"), "--files-per-rank 2 is not known; choose from one, several"),
        ("olmo", FileOptions(items="safetensors"), "--items goes with --layout dcp, not olmo"),
        (
            "composer",
            FileOptions(async_save=True),
            "--async-save goes with --layout dcp, torchtitan, olmo, not",
        ),
    ],
)
def test_options_that_a_layout_does_not_have_are_refused(layout: str, files: FileOptions, says: str) -> None:
    with pytest.raises(UsageError) as refused:
        check_options(CreateOptions(Path("run"), "fsdp2", layout=layout, files=files))
    assert says in str(refused.value)


def test_another_form_takes_the_place_of_one_that_was_there(tmp_path: Path) -> None:
    asked = (2, "create", tmp_path / "run", "--steps", 1, "--layout", "huggingface")
    first = ckptools_forked(*asked, "--save-distributed", "--max-shard-size", "200KB")
    assert "sharded/shard-{00001..00002}-model-{00001..00005}-of-00005.safetensors" in first.stdout
    assert ckptools_forked(*asked).returncode == 4
    assert ckptools_forked(*asked, "--force").returncode == 0
    assert {path.name for path in (tmp_path / "run").iterdir()} == {"config.json", "model.safetensors"}
