"""Names that something beside the checkpoint tells: what is read, what fits, and what is refused."""

from __future__ import annotations

import json

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from torch import nn

import ckptools
from ckptools.errors import CkptoolsError, RefusedError, UsageError
from tests.truth import FIXTURES, WHOLE, load_truth

SAMPLE = FIXTURES / "dcp-ddp-number-plain-w2" / "ckpt"
NAMES = [f"{n}.weight" for n in range(4)]


def naming(names, path=SAMPLE):
    (optimizer,) = ckptools.open(path, names=names).optimizers.values()
    return optimizer.naming


def stack(width=8, depth=4):
    return nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(depth)))


def trained(model, groups=None):
    optimizer = torch.optim.AdamW(groups or model.parameters())
    for p in model.parameters():
        p.grad = torch.randn_like(p)
    optimizer.step()
    return optimizer


def test_without_names_nothing_is_named_and_it_is_said_what_to_do():
    found = naming(None)
    assert (found.names, found.by, len(found.unnamed)) == ({}, "none", 4)
    assert "DCP lists tensors" in found.note and "--names FROM" in found.note


@pytest.mark.parametrize("listed", [NAMES, [NAMES], [f"module.{n}" for n in NAMES]], ids=("flat", "groups", "ddp"))
def test_a_list_in_the_optimizers_order_names_every_number(listed, tmp_path):
    (tmp_path / "names.json").write_text(json.dumps(listed))
    for names in (listed, tmp_path / "names.json"):
        found = naming(names)
        assert (found.names, found.by, found.assumed) == (dict(enumerate(NAMES)), "told", ())
    assert "names.json" in found.note


def test_every_state_has_the_truths_name_and_values():
    known = next(k for k in WHOLE if k.name == "dcp-ddp-number-plain-w2")
    (optimizer,) = known.open().optimizers.values()
    truth = load_truth(known.name)
    found = {f"optim/{k}/{s}": t for k, slots in optimizer.state.items() for s, t in slots.items()}
    assert {k: t.numpy().tobytes() for k, t in found.items()} == {k: truth[k][1] for k in truth if k[:5] == "optim"}


def test_a_module_names_in_its_order_and_says_what_is_assumed():
    found = naming(stack())
    assert (found.names, found.by, found.assumed) == (dict(enumerate(NAMES)), "told", (0, 1, 2, 3))
    assert "the order of the Sequential, assumed" in found.note


def test_another_checkpoint_names_where_it_keeps_the_order(tmp_path):
    torch.save({"model": stack().state_dict()}, tmp_path / "other.pt")
    assert naming(tmp_path / "other.pt").names == dict(enumerate(NAMES))


def test_an_optimizer_that_says_its_names_names_another_by_its_groups(tmp_path):
    model = stack()
    named = list(model.named_parameters())
    optimizer = trained(model, [{"params": named[2:]}, {"params": named[:2]}])
    torch.save({"optimizer": optimizer.state_dict()}, tmp_path / "named.pt")
    by_number = trained(model, [{"params": [p for _, p in part]} for part in (named[2:], named[:2])])
    dcp.save({"model": model.state_dict(), "optim": by_number.state_dict()}, checkpoint_id=tmp_path / "ckpt")
    assert naming(tmp_path / "named.pt", tmp_path / "ckpt").names == dict(enumerate(NAMES[2:] + NAMES[:2]))


@pytest.mark.parametrize("write", [save_file, lambda d, path: torch.save(dict(d), path)], ids=("safetensors", "dict"))
def test_another_checkpoint_that_lost_the_order_is_refused_with_the_reason(write, tmp_path):
    path = tmp_path / "other.safetensors"
    write(stack().state_dict(), path)
    with pytest.raises(UsageError, match=r"does not state the order of parameters, for .*(sorted|_metadata)"):
        naming(path)


def wide():
    model = stack()
    model[2] = nn.Linear(8, 3, bias=False)
    return model


def wrong_shape(tmp_path):
    model = nn.Sequential(nn.Linear(8, 3, bias=False), nn.Linear(3, 8, bias=False))
    dcp.save({"model": model.state_dict(), "optim": trained(model).state_dict()}, checkpoint_id=tmp_path / "ckpt")
    return tmp_path / "ckpt"


def test_names_whose_shapes_contradict_are_refused_by_the_first(tmp_path):
    with pytest.raises(RefusedError, match=r"1.weight has shape \[8, 3\], and number 0, .* \[3, 8\]"):
        naming(["1.weight", "0.weight"], wrong_shape(tmp_path))


REFUSED = {
    "too few": (["0.weight"], "names of 1 parameters, and the optimizer numbers 4"),
    "other groups": ([NAMES[:1], NAMES[1:]], r"groups of \[1, 3\], and the optimizer has groups of \[4\]"),
    "a stranger": ([*NAMES[:3], "other"], "other is no tensor of the model here"),
    "no text": ([*NAMES[:3], 3], "no list of names"),
    "nothing": ([], "no list of names"),
    "twice": ([*NAMES[:3], NAMES[0]], "listed 2 times"),
    "another module": (stack(4), r"0.weight has shape \[4, 4\] there, and \[8, 8\] here"),
    "a larger module": (stack(depth=5), "4.weight is no tensor of the model here"),
    "a smaller module": (stack(depth=3), r"number 3 of the optimizer, of shape \[8, 8\], fits none"),
}


@pytest.mark.parametrize(("names", "why"), REFUSED.values(), ids=REFUSED.keys())
def test_names_that_do_not_fit_are_refused_in_one_line(names, why):
    with pytest.raises(CkptoolsError, match=why) as error:
        naming(names)
    assert "\n" not in str(error.value) and error.value.exit_code in (2, 4)


def test_where_no_optimizer_is_keyed_by_number_names_are_refused():
    with pytest.raises(UsageError, match="no optimizer here is keyed by number"):
        ckptools.open(FIXTURES / "dcp-multifile" / "ckpt", names=NAMES)


def test_two_optimizers_keyed_by_number_cannot_be_named_at_once(tmp_path):
    model = stack()
    states = {name: trained(model).state_dict() for name in ("a", "b")}
    torch.save({"model": model.state_dict(), **states}, tmp_path / "two.pt")
    with pytest.raises(UsageError, match="a, b is keyed by number"):
        ckptools.open(tmp_path / "two.pt", names=NAMES)


def test_names_that_the_param_groups_say_are_the_models(tmp_path):
    model = stack()
    optimizer = trained(model, list(nn.ModuleDict({"module": model}).named_parameters())[::-1])
    dcp.save({"model": model.state_dict(), "optim": optimizer.state_dict()}, checkpoint_id=tmp_path)
    found = naming(None, tmp_path)
    assert (found.by, found.names) == ("fqn", dict(enumerate(NAMES[::-1])))


def test_names_of_the_param_groups_that_are_not_the_models_are_not_taken(tmp_path):
    model = stack()
    optimizer = trained(model, [{"params": list(layer.named_parameters())} for layer in model])
    dcp.save({"model": model.state_dict(), "optim": optimizer.state_dict()}, checkpoint_id=tmp_path)
    assert naming(None, tmp_path).names == {}
