"""`ckptools match`: what it prints, what it may be told to match, and what it says when that is nothing."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from jsonschema import Draft202012Validator
from safetensors.torch import save_file
from torch import nn
from typer.testing import CliRunner

import ckptools
from ckptools.cli import app
from tests.schemas import SCHEMAS
from tests.truth import FIXTURES, WHOLE

DDP = FIXTURES / "torch2.13.0-ddp-w4" / "snapshot.pt"
FSDP = FIXTURES / "torch2.13.0-fsdp1-sharded-w4"
GPT2 = FIXTURES / "hf-gpt2-bin-tied-fp32" / "ckpt"
LLAMA = FIXTURES / "hf-llama-safetensors-bf16" / "ckpt"


def run(*arguments: object) -> tuple[int, str, str]:
    result = CliRunner().invoke(app, ["match", *map(str, arguments)])
    return result.exit_code, result.stdout, result.stderr


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.emb, self.head = nn.Embedding(6, 4), nn.Linear(4, 6, bias=False)
        self.head.weight = self.emb.weight
        self.register_buffer("here", torch.zeros(2))
        self.register_buffer("gone", torch.zeros(2), persistent=False)


@pytest.fixture
def tied(tmp_path: Path) -> Path:
    torch.save(Tied().state_dict(), tmp_path / "tied.pt")
    return tmp_path / "tied.pt"


# -- what it says --------------------------------------------------------------------------------------------------


def test_the_rename_is_shown_with_how_many_it_fixes_and_the_command_that_applies_it(tmp_path, monkeypatch):
    code, out, err = run(DDP, "--to", FSDP)
    assert code == 1
    assert re.search(r"^DOES NOT LOAD +0 of 21 names of the model are there with their shape$", out, re.M)
    assert "21 of 21: drop prefix 'module.' (module.gate becomes gate)" in out
    assert re.search(r"^unexpected +module.temp +1 ", out, re.M)
    command = re.search(r"use it: ckptools (.*)", err)
    assert command is not None
    monkeypatch.chdir(tmp_path)
    words = command[1].replace("-o renamed.pt", "-o out.pt").split()
    assert CliRunner().invoke(app, words).exit_code == 0
    code, out, _ = run("out.pt", "--to", FSDP)
    assert (code, out.count("unexpected")) == (1, 1) and "21 of 21 names of the model are there" in out


def test_what_loads_says_so_and_nothing_more(tied):
    code, out, err = run(tied, "--to", tied)
    assert (code, err) == (0, "")
    assert out.splitlines()[2] == "loads                 3 of 3 names of the model are there with their shape"


@pytest.mark.slow
@pytest.mark.parametrize("known", WHOLE, ids=lambda known: f"{known.name}/{known.path}")
def test_every_format_matches_itself_and_its_safetensors(known, tmp_path):
    ck = known.open()
    ck.consolidate(tmp_path / "m.safetensors", only="model", keep_names=True)
    found = ck.match(tmp_path / "m.safetensors")
    assert ck.match(ck).loads and (found.same, found.renames) == (found.model_names, ())
    assert {row.status for row in found.rows} <= {"same", "unexpected"}
    assert not any(row.checkpoint_shape for row in found.rows if row.status == "unexpected")


def test_what_holds_no_model_says_what_it_holds(tied, tmp_path):
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(2))], momentum=0.9)
    torch.save({"optimizer": optimizer.state_dict()}, tmp_path / "o.pt")
    code, out, err = run(tmp_path / "o.pt", "--to", tied)
    assert (code, out) == (3, "") and "o.pt: holds no model to compare; it holds optimizer" in err


def test_of_several_models_one_is_chosen(tmp_path):
    state = {"w": torch.zeros(2), "v": torch.zeros(3)}
    torch.save({"model": state, "model_1": {"w": torch.zeros(2)}}, tmp_path / "unsure.pt")
    torch.save({"model": state, "ema": {"w": torch.zeros(2)}}, tmp_path / "two.pt")
    save_file(state, tmp_path / "m.safetensors")
    code, _, err = run(tmp_path / "unsure.pt", "--to", tmp_path / "m.safetensors")
    assert (code, "model, model_1; --model model takes one, --model all all" in err) == (2, True)
    assert run(tmp_path / "unsure.pt", "--to", tmp_path / "m.safetensors", "--section", "model")[0] == 0
    code, _, err = run(tmp_path / "m.safetensors", "--to", tmp_path / "unsure.pt")
    assert (code, "unsure.pt: holds 2 models: model, model_1; choose one with --section" in err) == (2, True)
    assert run(tmp_path / "two.pt", "--to", tmp_path / "m.safetensors")[0] == 0
    assert run(tmp_path / "two.pt", "--to", tmp_path / "m.safetensors", "--section", "model")[0] == 0
    assert run(tmp_path / "two.pt", "--to", tmp_path / "m.safetensors", "--section", "ema")[0] == 1


# -- what may be matched -------------------------------------------------------------------------------------------


def test_a_module_of_the_users_is_made_on_the_meta_device(tied, tmp_path, monkeypatch):
    source = "import torch\nfrom torch import nn\nprint('loud')\ndef make():\n    return nn.Embedding(6, 4)\n"
    huge = "def huge():\n    return nn.Linear(1 << 20, 1 << 20)\nclass In:\n    state = {'w': [1]}\n"
    (tmp_path / "users_module_a.py").write_text(source + huge)
    monkeypatch.chdir(tmp_path)
    code, out, err = run(tied, "--to", "users_module_a:make")
    assert code == 1 and "drop prefix 'emb.'" in out and "loud" not in out and "loud" in err
    assert "[1048576, 1048576]" in run(tied, "--to", "users_module_a:huge")[1]
    assert run(tied, "--to", "users_module_a:In.state")[0] == 1
    assert str(tmp_path) not in sys.path


BAD = {
    "nowhere_at_all:f": (2, "there is no module nowhere_at_all here"),
    "users_module_b:nope": (2, "no 'nope' here"),
    "users_module_b:fails": (3, "raised ValueError: two"),
    "users_module_b:leaves": (3, "raised SystemExit: 5"),
    "users_module_b:number": (2, "expected an nn.Module, a state dict, or shapes by name; found int"),
    "users_module_b:empty": (2, "has no parameters"),
    "users_module_b:needs": (3, "raised TypeError"),
    "users_module_c:f": (3, "raised ModuleNotFoundError: No module named 'surely_not_here'"),
    "users_module_d:f": (3, "raised SyntaxError"),
}


@pytest.mark.parametrize("name", BAD)
def test_users_code_that_fails_is_one_line(tied, tmp_path, monkeypatch, name):
    (tmp_path / "users_module_b.py").write_text(
        "import sys\nfrom torch import nn\ndef fails(): raise ValueError('two\\nlines \\x1b[31m')\n"
        "def leaves(): sys.exit(5)\ndef number(): return 3\ndef empty(): return nn.Identity()\ndef needs(a): pass\n"
    )
    (tmp_path / "users_module_c.py").write_text("import surely_not_here\n")
    (tmp_path / "users_module_d.py").write_text("def f(:\n")
    monkeypatch.chdir(tmp_path)
    code, out, err = run(tied, "--to", name)
    assert (code, out, err.count("\n")) == (BAD[name][0], "", 1) and BAD[name][1] in err and "\x1b" not in err


@pytest.mark.slow
def test_a_config_of_transformers_is_made_into_its_model(tmp_path):
    for folder in (GPT2, LLAMA):
        code, out, _ = run(folder, "--to", folder / "config.json")
        assert (code, "\nloads" in out) == (0, True), out
    config = json.loads((LLAMA / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "vocab_size": config["vocab_size"] + 31}))
    code, out, _ = run(LLAMA, "--to", tmp_path / "config.json")
    assert code == 1 and "31 rows short: padded vocabulary?" in out


@pytest.mark.slow
def test_the_program_around_us_can_still_reach_the_hub_afterwards():
    code = (
        "import ckptools, sys\n"
        "ckptools.open(sys.argv[1]).match(sys.argv[1] + '/config.json')\n"
        "import transformers, huggingface_hub\n"
        "print(huggingface_hub.is_offline_mode(), transformers.utils.logging.get_verbosity())\n"
    )
    online = {name: value for name, value in os.environ.items() if not name.endswith("_OFFLINE")}
    command = [sys.executable, "-c", code, str(LLAMA)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=online)
    assert done.stdout.split() == ["False", "30"]


@pytest.mark.slow
def test_the_network_is_not_asked_for_what_a_config_names():
    code = "import transformers, huggingface_hub as h; from ckptools.torch_engine.module_shapes import _offline"
    code += "\nwith _offline(transformers): h.HfApi().model_info('org/name')"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert "OfflineModeIsEnabled" in done.stderr


@pytest.mark.parametrize(
    ("changed", "code", "words"),
    [
        ({"model_type": "unheard_of"}, 2, "has no models of type 'unheard_of'; code from elsewhere is not run"),
        ({"architectures": ["Unheard"]}, 2, "has no model class 'Unheard'"),
        ({"architectures": ["AutoTokenizer"]}, 2, "has no model class 'AutoTokenizer'"),
        ({"architectures": None}, 2, "does not say of which class"),
        ({"num_hidden_layers": 10**9}, 3, "'num_hidden_layers' is 1000000000; at most 10000 are made"),
        ({"hidden_size": "x\n"}, 3, "makes no model of it"),
        ({"auto_map": {"AutoModel": "evil.Model"}, "architectures": ["Evil"]}, 2, "code from elsewhere is not run"),
    ],
    ids=str,
)
def test_a_config_of_which_there_is_no_model_is_one_line(tmp_path, changed, code, words):
    config = {**json.loads((LLAMA / "config.json").read_text()), **changed}
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "evil.py").write_text("raise SystemError\n")
    found, out, err = run(LLAMA, "--to", tmp_path / "config.json")
    assert (found, out, err.count("\n")) == (code, "", 1) and words in err


def test_without_transformers_there_is_one_line_that_says_how_to_get_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    code, out, err = run(LLAMA, "--to", LLAMA / "config.json")
    assert (code, out) == (2, "") and "which is not installed: pip install transformers; or name" in err


def test_a_json_of_shapes_may_have_dtypes_and_ties(tied, tmp_path):
    told = {"emb.weight": {"shape": [6, 4], "dtype": "torch.float32"}, "head.weight": "emb.weight", "here": [2]}
    (tmp_path / "s.json").write_text(json.dumps(told))
    assert run(tied, "--to", tmp_path / "s.json")[0] == 0
    (tmp_path / "s.json").write_text(json.dumps({**told, "here": {"shape": [2], "dtype": "bf16"}}))
    assert "converted when it is loaded" in run(tied, "--to", tmp_path / "s.json")[1]


@pytest.mark.parametrize(
    "content",
    ["[]", "{}", "3", '{"a": {"b": {"c": [1]}}}', '{"a": [-1]}', '{"a": [1.5]}', '{"a": "b"}', '{"a": [[1]]}',
     '{"a": {"shape": [1], "dtype": 7}}', '{"a": {"shape": [1], "dtype": "f7"}}', '{"a": [1], "a": [2]}', "{",
     "[" * 5000, '{"a": {"shape": [1], "dtyp": "fp32"}}', '{"\\u001b[31m": null}', '{"a": [' + "9" * 400 + "]}"],
    ids=lambda text: text[:30],
)  # fmt: skip
def test_a_json_that_is_no_list_of_shapes_is_one_line(tied, tmp_path, content):
    (tmp_path / "s.json").write_text(content)
    code, out, err = run(tied, "--to", tmp_path / "s.json")
    assert (code, out, err.count("\n")) == (3, "", 1) and "\x1b" not in err and len(err) < 500 + len(str(tmp_path))


def test_a_shape_that_is_none_is_named_with_what_was_found_there(tied, tmp_path):
    (tmp_path / "s.json").write_text('{"emb.weight": [6, 4], "here": [1.5]}')
    _, _, err = run(tied, "--to", tmp_path / "s.json")
    assert f"{tmp_path / 's.json'}: 'here': expected " in err and "found [1.5]" in err


# -- in Python -----------------------------------------------------------------------------------------------------


def test_a_module_tells_what_it_saves_and_what_is_tied(tied):
    with torch.device("meta"):
        model = Tied()
    ck = ckptools.open(tied)
    assert ck.match(model).loads and ck.match(model.state_dict()).loads and ck.match(ck.model).loads
    save_file({"emb.weight": torch.zeros(6, 4), "here": torch.zeros(2)}, tied.with_name("s.safetensors"))
    found = ckptools.open(tied.with_name("s.safetensors")).match(model)
    assert [(row.name, row.status) for row in found.rows if row.status != "same"] == [("head.weight", "tied")]
    assert not found.loads and "tied to emb.weight, which is there" in str(found)


LAZY = "in the model: has no shape yet: it is a lazy parameter"


def test_a_lazy_parameter_is_not_called_equal(tied):
    found = ckptools.open(tied).match({"head.weight": nn.LazyLinear(3).weight})
    assert [row.note for row in found.rows if row.status == "unknown"] == [LAZY]


# -- forms of the answer -------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_map_is_what_its_schema_says_and_what_consolidate_takes(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    code, _, err = run(DDP, "--to", FSDP, "--write-map", "map.json")
    assert code == 1 and "wrote map.json: 22 names" in err
    schema = json.loads(SCHEMAS["map"].read_text())
    assert list(Draft202012Validator(schema).iter_errors(json.loads(Path("map.json").read_text()))) == []
    ckptools.consolidate(DDP, "out.safetensors", map="map.json")
    assert ckptools.open("out.safetensors").match(FSDP).same == 21
    code, _, err = run(DDP, "--to", FSDP, "--write-map", "map.json")
    assert code == 4 and "is already there" in err


def test_no_map_is_written_where_there_is_no_rename_or_two(tied, tmp_path):
    target = tmp_path / "map.json"
    assert "no rename was found" in run(tied, "--to", tied, "--write-map", target)[2]
    state = {f"{part}.{n}.w": torch.zeros(2) for part in ("a", "b") for n in range(3)}
    save_file(state, tmp_path / "two.safetensors")
    (tmp_path / "s.json").write_text(json.dumps({f"{n}.w": [2] for n in range(3)}))
    code, out, err = run(tmp_path / "two.safetensors", "--to", tmp_path / "s.json", "--write-map", target)
    assert code == 1 and out.count("not chosen") == 2 and err.count("one of several: ckptools consolidate") == 2
    assert "several renames fix as many, and none was chosen" in err and not target.exists()


# -- which rows of its table -------------------------------------------------------------------------------------


@pytest.mark.parametrize("words", [("--sort", "size"), ("--limit", "-1")])
def test_a_column_or_number_that_is_none_is_a_usage_error(words):
    done = CliRunner().invoke(app, ["match", str(FSDP), "--to", str(GPT2), *words])
    assert done.exit_code == 2 and words[1] in done.stderr and not done.stdout


# -- what is assumed -----------------------------------------------------------------------------------------------


@pytest.fixture
def moved(tmp_path: Path) -> tuple[Path, Path]:
    """A model of which only the numbers of the layers have changed."""
    for name, first in (("saved", 0), ("model", 1)):
        save_file({f"layers.{first + n}.w": torch.ones(3, 3) for n in range(3)}, tmp_path / f"{name}.safetensors")
    return tmp_path / "saved.safetensors", tmp_path / "model.safetensors"


def test_what_is_assumed_is_said_to_be_and_comes_without_a_map_and_without_a_command(moved, tmp_path):
    code, out, err = run(moved[0], "--to", moved[1], "--write-map", tmp_path / "map.json")
    assert code == 1 and not (tmp_path / "map.json").exists() and "consolidate" not in err
    rule = "3 of 3: numbers behind 'layers.' are 1 higher (layers.0.w becomes layers.1.w): assumed; then it loads"
    assert rule in out and "every rename is assumed: " in err and "assumed, and in no map: 3 names" in err


def test_what_is_assumed_is_in_json_for_those_who_know_it(moved):
    answer = json.loads(run(moved[0], "--to", moved[1], "--json")[1])
    assert answer["fix"] == {} and answer["assumed"] == {f"layers.{n}.w": f"layers.{n + 1}.w" for n in range(3)}
    (rule,) = answer["renames"]
    assert (rule["kind"], rule["offset"], rule["assumed"], rule["fit"]) == ("offset", 1, True, 3)


def test_counts_behind_a_rename_are_of_the_names_that_were_asked_for(tmp_path):
    save_file({f"x.{n}.w": torch.ones(2) for n in "abc"}, tmp_path / "saved.safetensors")
    save_file({f"{n}.w": torch.ones(2) for n in "abc"}, tmp_path / "model.safetensors")
    _, out, _ = run(tmp_path / "saved.safetensors", "--to", tmp_path / "model.safetensors", "--filter", "a.*")
    assert "1 of 1: drop prefix 'x.'" in out


CLASSES = """
import torch
class Net(torch.nn.Module):
    def __init__(self, width=4):
        super().__init__()
        self.up = torch.nn.Linear(width, 2)
class Wide(Net):
    def __init__(self, width):
        super().__init__(width)
"""


def test_a_class_in_the_place_of_a_function_is_made_with_no_arguments(tied, tmp_path, monkeypatch):
    (tmp_path / "some_nets.py").write_text(CLASSES)
    monkeypatch.chdir(tmp_path)
    code, out, _ = run(tied, "--to", "some_nets:Net")
    assert code == 1 and "0 of 2 names of the model" in out and "up.weight" in out
    code, out, err = run(tied, "--to", "some_nets:Wide")
    assert (code, out, err.count("\n")) == (3, "", 1) and "missing 1 required positional argument: 'width'" in err
