"""Which of a checkpoint's models is meant: every command looks at the same one, and says how to take another."""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from typer.testing import CliRunner

import ckptools
from ckptools.cli import app
from ckptools.errors import UsageError
from ckptools.training_state.models import models_of, note_on_choice, trained_model


class Net(nn.Module):
    """Two layers of one shape, and a normalization, whose buffers have the shape of its parameters."""

    def __init__(self, width: int = 3, fill: float = 0.0) -> None:
        super().__init__()
        self.a, self.norm, self.b = nn.Linear(width, width), nn.BatchNorm1d(width), nn.Linear(width, width)
        with torch.no_grad():
            for number, parameter in enumerate(self.parameters()):
                parameter.fill_(fill + number / 8)


def optimizer_of(net: nn.Module, named: bool = False) -> dict[str, Any]:
    optimizer = torch.optim.AdamW(net.named_parameters() if named else net.parameters(), lr=0.1)
    for parameter in net.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    return optimizer.state_dict()


def saved(path: Path, parts: Mapping[str, nn.Module | dict[str, Any]], **more: Any) -> Path:
    states = {key: part.state_dict() if isinstance(part, nn.Module) else part for key, part in parts.items()}
    torch.save({**states, **more}, path)
    return path


def run(*words: object) -> tuple[int, str, str]:
    done = CliRunner().invoke(app, [str(word) for word in words])
    return done.exit_code, done.stdout, done.stderr


# -- roles -------------------------------------------------------------------------------------------------------------


ROLES = {
    ("model", "ema"): ("trained", "ema"),
    ("state_dict", "state_dict_ema"): ("trained", "ema"),
    ("net", "averaged_model"): ("trained", "ema"),
    ("model", "swaModel"): ("trained", "ema"),
    ("student", "teacher"): ("trained", "teacher"),
    ("policy", "ref_policy", "value_model", "reward_model"): ("trained", "reference", "critic", "reward"),
    ("actor", "critic"): ("trained", "critic"),
    ("netG", "netD", "netG_ema"): ("trained", "discriminator", "ema"),
    ("g", "d", "g_ema"): ("trained", "discriminator", "ema"),
    ("online", "target"): ("trained", "target"),
    ("model", "best_model"): ("trained", "best"),
    ("model", "normalization"): ("trained", ""),
    ("state_dict", "criterion"): ("trained", ""),
    ("model", "model_1"): ("", ""),
    ("text_model", "unet"): ("", ""),
    ("schema", "theme"): ("", ""),
    ("encoder", "decoder"): ("", ""),
    ("values", "refiner"): ("", ""),
    ("b", "d"): ("", ""),
}


@pytest.mark.parametrize("names", ROLES, ids="+".join)
def test_a_word_of_the_name_is_a_role_and_one_model_without_a_role_is_the_trained_one(tmp_path, names):
    path = saved(tmp_path / "x.pt", {name: Net(fill=number) for number, name in enumerate(names)})
    assert tuple(model.role for model in models_of(ckptools.open(path))) == ROLES[names]


# -- one model in every command ----------------------------------------------------------------------------------------


TRAINED = {names: names[roles.index("trained")] for names, roles in ROLES.items() if "trained" in roles}


@pytest.mark.parametrize("names", TRAINED, ids="+".join)
@pytest.mark.parametrize("wanted", ["trained", "the other"])
def test_every_command_looks_at_the_same_model(tmp_path, names, wanted):
    nets = {name: Net(fill=number) for number, name in enumerate(names)}
    path = saved(tmp_path / "x.pt", nets, optimizer=optimizer_of(copy.deepcopy(nets[TRAINED[names]])))
    name = TRAINED[names] if wanted == "trained" else next(n for n in names if n != TRAINED[names])
    state = nets[name].state_dict()
    torch.save(state, tmp_path / "state.pt")
    words = () if wanted == "trained" else ("--model", name)
    ck = ckptools.open(path, model=None if wanted == "trained" else name)

    assert list(ck.model) == list(state) and torch.equal(ck.model["b.weight"].load(), state["b.weight"])
    assert torch.equal(ck["b.weight"].load(), state["b.weight"])
    for only in ((), ("--only", "model"), ("--only", "*")):
        code, _, err = run("consolidate", path, "-o", tmp_path / "out.safetensors", "--force", *only, *words)
        out = load_file(tmp_path / "out.safetensors")
        assert code == 0 and out.keys() == state.keys() and all(torch.equal(out[k], state[k]) for k in out)
        assert f"note: model: {name}" in err
    code, _, err = run("match", path, "--to", tmp_path / "state.pt", *words)
    assert code == 0 and f"model: {name}" in err
    code, out, _ = run("doctor", path, "--to", tmp_path / "state.pt", *words, "--jsonl")
    loads = next(row for row in map(json.loads, out.splitlines()) if "load" in row["question"])
    assert loads["answer"] == "yes" and f"model: {name}" in loads["evidence"]
    code, out, _ = run("stats", path, "--jsonl", *words)
    rows = {row["name"]: row["rms"] for row in map(json.loads, out.splitlines())}
    assert rows.keys() == state.keys() and rows["b.weight"] == pytest.approx(state["b.weight"].float().abs().max())
    code, out, _ = run("stats", path, "--moments", "--jsonl", *words)
    moments = {row["name"]: row["weight"] for row in map(json.loads, out.splitlines())}
    if name in ("critic", "netD", "d"):  # the moments are those of another model, with which no weight of this goes
        assert moments[f"{TRAINED[names]}.b.weight"] is None
    else:
        assert moments["b.weight"] == pytest.approx(state["b.weight"].abs().max())
    code, out, _ = run("show", path, "b.weight", "--json", *words)
    assert json.loads(out)["rows"][0]["statistics"]["max"] == state["b.weight"].max()
    found = ckptools.diff(ck, tmp_path / "state.pt", section="model", every_byte=True)
    assert found.same is True and {row.name for row in found.tensors} == state.keys()
    assert sum("not compared: 9 tensors of the model" in note for note in found.notes) == (
        len(names) - 1 if wanted == "trained" else 0
    )


def test_all_is_every_model_with_its_name_before_its_keys(tmp_path):
    path = saved(tmp_path / "x.pt", {"model": Net(), "ema": Net(fill=1)})
    names = {f"{name}.{key}" for name in ("model", "ema") for key in Net().state_dict()}
    assert run("consolidate", path, "-o", tmp_path / "all.safetensors", "--model", "all")[0] == 0
    assert load_file(tmp_path / "all.safetensors").keys() == names == ckptools.open(path, model="all").model.keys()
    _, out, _ = run("stats", path, "--jsonl", "--model", "all")
    assert {json.loads(line)["name"] for line in out.splitlines()} == names
    code, _, err = run("match", path, "--to", path, "--model", "all")
    assert code == 2 and "--model all: one model is compared, of model, ema" in err


def test_commands_that_list_show_every_model_with_its_role_unless_one_is_named(tmp_path):
    path = saved(tmp_path / "x.pt", {"model": Net(), "ema": Net(fill=1)})
    roles = {s["name"]: s.get("role", "") for s in json.loads(run("inspect", path, "--json")[1])["sections"]}
    assert roles == {"model": "trained", "ema": "ema"}
    assert "trained" in run("inspect", path)[1]
    assert [s["name"] for s in json.loads(run("inspect", path, "--json", "--model", "ema")[1])["sections"]] == ["ema"]
    keys = [json.loads(line)["name"] for line in run("tree", path, "--jsonl")[1].splitlines()]
    assert len(keys) == 18 and "b.weight" in keys and "ema.b.weight" in keys
    keys = [json.loads(line)["name"] for line in run("tree", path, "--jsonl", "--model", "ema")[1].splitlines()]
    assert keys == list(Net().state_dict())


def test_counts_are_never_summed_over_models(tmp_path):
    path = saved(tmp_path / "x.pt", {"model": Net(), "ema": Net()})
    assert "9 tensors" in next(line for line in run("inspect", path)[1].splitlines() if "layout" in line)
    found = json.loads(run("stats", path, "--json")[1])
    assert found["tensors"] == 9 and found["l2"] is not None
    assert json.loads(run("stats", path, "--json", "--model", "all")[1])["l2"] is None
    run("report", path, "-o", tmp_path / "x.html")
    assert "37" in (tmp_path / "x.html").read_text().partition("<span>parameters</span>")[2][:200]


def test_verify_looks_at_every_model_whichever_is_named(tmp_path):
    broken = Net(fill=1).state_dict() | {"b.weight": torch.full((3, 3), torch.nan)}
    path = saved(tmp_path / "x.pt", {"model": Net(), "ema": broken})
    for words in ((), ("--model", "model"), ("--model", "all")):
        code, out, _ = run("verify", path, "--values", *words)
        assert code == 1 and "CK201" in out and "ema.b.weight" in out


def test_what_both_sides_of_a_diff_have_is_compared_and_counted_apart(tmp_path):
    a = saved(tmp_path / "a.pt", {"model": Net(), "ema": Net(fill=1)})
    b = saved(tmp_path / "b.pt", {"model": Net(), "ema": Net(fill=2)})
    subjects = {row.subject: row for row in ckptools.diff(a, b, every_byte=True).subjects}
    assert subjects["weights"].verdict == "same" and subjects["other models"].different == 6
    ckptools.open(a).write_digests(tmp_path / "a.json")
    by_digest = {row.subject: row for row in ckptools.diff(tmp_path / "a.json", b).subjects}
    assert by_digest["weights"].verdict == "same" and by_digest["other models"].different == 6


def test_models_of_other_names_are_compared_if_they_are_the_trained_ones(tmp_path):
    a = saved(tmp_path / "a.pt", {"state_dict": Net(), "state_dict_ema": Net(fill=1)})
    b = saved(tmp_path / "b.pt", {"model": Net(), "ema": Net(fill=1)})
    found = ckptools.diff(a, b, every_byte=True)
    assert found.same is True and len(found.tensors) == 9
    assert "A's state_dict is compared with B's model, the one that is looked at" in " ".join(found.notes)
    assert "not compared: 9 tensors of the model ema, which only B has; model='ema'" in " ".join(found.notes)
    asked = ckptools.diff(a, b, section="state_dict_ema")
    assert asked.same is False and {row.verdict for row in asked.tensors} == {"only in A"}
    alone = saved(tmp_path / "c.pt", Net(fill=1).state_dict())
    code, out, _ = run("diff", a, alone, "--every-byte", "--model", "ema")
    assert code == 0 and "A's state_dict_ema is compared with B's model" in out


# -- no guess ----------------------------------------------------------------------------------------------------------


def test_the_optimizer_tells_which_of_two_models_without_a_role_was_trained(tmp_path):
    nets = {"backbone": Net(4), "unet": Net(3, fill=1)}
    for named in (False, True):
        path = saved(tmp_path / "x.pt", nets, optimizer=optimizer_of(copy.deepcopy(nets["unet"]), named))
        ck = ckptools.open(path)
        trained = trained_model(ck)
        assert trained is not None and trained.name == "unet" and ck.optimizers["optimizer"].naming.by != "none"
        assert note_on_choice(ck) == "model: unet (trained: the optimizer's states fit it alone); " + (
            "--model backbone takes the other"
        )


ASKED = {
    "two without a role": {"encoder": Net(), "decoder": Net(4)},
    "only averages": {"ema": Net(), "ema_slow": Net(fill=1)},
    "an optimizer that fits both": {"one": Net(), "two": Net(fill=1), "optimizer": optimizer_of(Net())},
    "an optimizer that fits the average": {"model": Net(4), "ema": Net(), "optimizer": optimizer_of(Net())},
    "two that are trained": {
        "one": Net(), "two": Net(4), "optimizer": optimizer_of(Net()), "optimizer_2": optimizer_of(Net(4)),
    },
}  # fmt: skip


@pytest.mark.parametrize("case", ASKED)
def test_where_nothing_proves_one_the_user_is_asked_with_the_names(tmp_path, case):
    path = saved(tmp_path / "x.pt", ASKED[case])
    first, second = (key for key, part in ASKED[case].items() if isinstance(part, nn.Module))
    for words in (
        ("consolidate", path, "-o", tmp_path / "o.safetensors"),
        ("stats", path),
        ("match", path, "--to", path),
    ):
        code, _, err = run(*words)
        assert code == 2 and f"--model {first} takes one, --model all all" in err and second in err
    with pytest.raises(UsageError, match=f"model='{first}' takes one"):
        ckptools.open(path).stats()
    assert {f"{first}.b.weight", f"{second}.b.weight"} <= ckptools.open(path).model.keys()
    assert not (tmp_path / "o.safetensors").exists()
    # What lists, checks or compares everything needs no choice.
    code, _, err = run("inspect", path)
    assert code == 0 and f"ckptools consolidate {path} --model all -o OUT.safetensors" in err
    assert f"{first}.b.weight" in [row["name"] for row in ckptools.open(path).records("model").to_dicts()]
    assert (
        run("verify", path, "--values")[0] == 0 and run("report", path, "-o", tmp_path / "r.html", "--values")[0] == 0
    )
    assert all(row.verdict != "differs" for row in ckptools.diff(path, path).subjects)
    assert run("consolidate", path, "-o", tmp_path / "o.safetensors", "--model", second)[0] == 0


@pytest.mark.parametrize("command", ["consolidate", "match", "stats", "tree", "show", "inspect"])
def test_a_model_that_is_not_there_is_refused_with_the_names(tmp_path, command):
    path = saved(tmp_path / "x.pt", {"model": Net(), "ema": Net(), "model_ema": Net()})
    more = {"consolidate": ("-o", tmp_path / "o.pt"), "match": ("--to", path), "show": ("b.weight",)}.get(command, ())
    code, _, err = run(command, path, *more, "--model", "teacher")
    assert code == 2 and "--model teacher: no such model; it holds model (trained), ema, model_ema (ema)" in err
    assert run(command, saved(tmp_path / "one.pt", Net().state_dict()), *more, "--model", "ema")[0] == 2


def test_a_role_that_two_models_have_is_not_enough(tmp_path):
    path = saved(tmp_path / "x.pt", {"model": Net(), "ema_fast": Net(), "ema_slow": Net(fill=1)})
    code, _, err = run("stats", path, "--model", "ema")
    assert (
        code == 2
        and "--model ema: 2 models of this role; it holds model (trained), ema_fast (ema), ema_slow (ema)" in err
    )
    assert run("stats", path, "--model", "ema_slow")[0] == 0


def test_a_model_that_is_named_is_not_the_whole_tree(tmp_path):
    path = saved(tmp_path / "x.pt", {"model": Net(), "ema": Net(fill=1)})
    code, _, err = run("consolidate", path, "-o", tmp_path / "o.pt", "--only", "all", "--model", "ema")
    assert code == 2 and "--only all writes the whole tree, and --model ema names one model" in err
    assert run("consolidate", path, "-o", tmp_path / "o.pt", "--model", "ema")[0] == 0
    assert torch.load(tmp_path / "o.pt").keys() == Net().state_dict().keys()
    assert run("consolidate", path, "-o", tmp_path / "tree.pt")[0] == 0
    assert torch.load(tmp_path / "tree.pt").keys() == {"model", "ema"}


@pytest.mark.parametrize("name", ["model", "ema"])
def test_an_output_states_its_model_and_is_proven_to_be_that_model(tmp_path, name):
    path = saved(tmp_path / "x.pt", {"model": Net(), "ema": Net(fill=1)})
    words = ("--model", name) if name == "ema" else ()
    assert (
        run("consolidate", path, "-o", tmp_path / "o.safetensors", "--rename", "b=c", "--dtype", "bfloat16", *words)[0]
        == 0
    )
    provenance = ckptools.open(tmp_path / "o.safetensors").provenance
    assert provenance is not None and provenance.part == f"model {name}"
    code, out, _ = run("diff", tmp_path / "o.safetensors", path, "--values", "--model", name)
    assert code == 0 and "every element is B's" in out
