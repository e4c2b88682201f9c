"""What `--shapes` reads: names, shapes, ties and order."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import save_file

from ckptools.errors import CkptoolsError, ReadError, UsageError
from ckptools.formats.open import read_given
from tests.state_dicts import state_dict
from tests.truth import FIXTURES, LOCAL


def write(path, content: object):
    path.write_text(json.dumps(content))
    return path


def test_a_json_is_in_the_order_in_which_it_is_written(tmp_path):
    found = read_given("shapes", write(tmp_path / "s.json", {"b": [2, 3], "a": [], "c": "b"}))
    assert list(found.shapes.items()) == [("b", (2, 3)), ("a", ()), ("c", (2, 3))]
    assert (found.tied, found.ordered, found.source) == ({"c": "b"}, True, str(tmp_path / "s.json"))


def test_a_name_tied_to_a_tied_name_is_tied_to_the_first(tmp_path):
    assert read_given("shapes", write(tmp_path / "s.json", {"a": [1], "b": "a", "c": "b"})).tied == {"b": "a", "c": "a"}


@pytest.mark.parametrize(
    "content",
    [[], {}, 3, {"a": 3}, {"a": [1.5]}, {"a": [-1]}, {"a": [True]}, {"a": "b"}, {"a": "b", "b": [1]}, {"a": [1 << 70]}],
    ids=repr,
)
def test_another_json_is_refused_in_one_line(content, tmp_path):
    with pytest.raises(ReadError) as error:
        read_given("shapes", write(tmp_path / "s.json", content))
    assert "\n" not in str(error.value) and str(tmp_path / "s.json") in str(error.value)


@pytest.mark.parametrize("text", ["", "{", '{"a": [1], "a": [2]}', "[" * 5000, '{"a": [' + "9" * 5000 + "]}"])
def test_a_damaged_json_is_refused_in_one_line(text, tmp_path):
    (tmp_path / "s.json").write_text(text)
    with pytest.raises(ReadError) as error:
        read_given("shapes", tmp_path / "s.json")
    assert "\n" not in str(error.value)


def test_a_torch_file_tells_shapes_order_and_ties(tmp_path):
    weight = torch.zeros(2, 3)
    model = state_dict({"z": weight, "a": torch.zeros(2), "head": weight})
    torch.save({"model": model}, tmp_path / "m.pt")
    found = read_given("shapes", tmp_path / "m.pt")
    assert list(found.shapes.items()) == [("z", (2, 3)), ("a", (2,)), ("head", (2, 3))]
    assert (found.tied, found.ordered) == ({"head": "z"}, True)


def test_a_torch_file_whose_state_dict_does_not_list_its_modules_tells_no_order(tmp_path):
    torch.save({"z": torch.zeros(2, 3), "a": torch.zeros(2)}, tmp_path / "m.pt")
    found = read_given("shapes", tmp_path / "m.pt")
    assert not found.ordered and "_metadata" in found.order.why


def test_a_model_without_values_tells_shapes(tmp_path):
    torch.save(torch.nn.Linear(2, 3, device="meta").state_dict(), tmp_path / "m.pt")
    assert read_given("shapes", tmp_path / "m.pt").shapes == {"weight": (3, 2), "bias": (3,)}


def test_a_rank_file_tells_whole_shapes():
    found = read_given("shapes", FIXTURES / "torch2.6.0-fsdp1-hsdp2x2-w4" / "rank1.pt")
    assert found.shapes["emb.weight"] == (33, 17) and found.ordered


def test_safetensors_tells_shapes_and_no_order(tmp_path):
    save_file({"b": torch.zeros(2), "a": torch.zeros(3)}, tmp_path / "m.safetensors")
    found = read_given("shapes", tmp_path / "m.safetensors")
    assert (found.shapes, found.ordered) == ({"a": (3,), "b": (2,)}, False)


def test_a_folder_of_hugging_face_tells_shapes(tmp_path):
    write(tmp_path / "config.json", {})
    for i, name in enumerate(("b", "a")):
        save_file({name: torch.zeros(i + 2)}, tmp_path / f"model-0000{i + 1}-of-00002.safetensors")
    names = {name: f"model-0000{i + 1}-of-00002.safetensors" for i, name in enumerate(("b", "a"))}
    write(tmp_path / "model.safetensors.index.json", {"metadata": {"total_size": 20}, "weight_map": names})
    for path in (tmp_path, tmp_path / "model.safetensors.index.json"):
        assert read_given("shapes", path).shapes == {"b": (2,), "a": (3,)}


def test_parameters_put_together_from_pieces_tell_no_order():
    local = FIXTURES / "composer-0.14.1-torch2.0.1-local-w4"
    assert not read_given("shapes", local).ordered


def test_a_checkpoint_that_lacks_them_too_is_refused():
    with pytest.raises(UsageError, match="has no shapes either"):
        read_given("shapes", LOCAL[0].file)


def test_something_with_several_models_is_refused(tmp_path):
    torch.save({"a": {"w": torch.zeros(2)}, "b": {"w": torch.zeros(2)}}, tmp_path / "m.pt")
    with pytest.raises(UsageError, match="2 models"):
        read_given("shapes", tmp_path / "m.pt")


def test_nothing_there_is_one_line(tmp_path):
    with pytest.raises(CkptoolsError, match="no such file"):
        read_given("shapes", tmp_path / "nothing.json")
