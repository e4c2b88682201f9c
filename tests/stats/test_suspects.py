"""What is worth a look is found by name, and stands in the first lines: cases that users of other tools reported."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import ckptools
from ckptools.keys.entries import layer_and_role
from ckptools.stats.figures import statistics
from ckptools.stats.passes import MeasuredPart
from ckptools.stats.record import Suspect
from tests.stats.test_figures import stored

LAYERS = 32
ROLES = {"attn.o_proj.weight": (48, 48), "mlp.up_proj.weight": (64, 48), "mlp.down_proj.weight": (48, 64)}

Model = dict[str, torch.Tensor]


def healthy() -> Model:
    torch.manual_seed(0)
    made = {f"layers.{n}.{role}": torch.randn(*shape) * 0.02 for n in range(LAYERS) for role, shape in ROLES.items()}
    norms = {f"layers.{n}.norm.{kind}": torch.ones(48) for n in range(LAYERS) for kind in ("weight",)}
    biases = {f"layers.{n}.norm.bias": torch.zeros(48) for n in range(LAYERS)}
    return {
        "embed.weight": torch.randn(512, 48) * 0.02,
        **made,
        **norms,
        **biases,
        "output.weight": torch.randn(512, 48),
    }


def stats_of(folder: Path, model: Model) -> ckptools.Statistics:
    torch.save({"model": model}, folder / "model.pt")
    return ckptools.open(folder / "model.pt").stats()


def found(folder: Path, model: Model) -> list[tuple[str, str, str, str]]:
    return [(one.name, one.what, one.severity, one.words) for one in stats_of(folder, model).suspects]


def one_nan(model: Model) -> str:
    model["layers.17.mlp.down_proj.weight"][12, 31] = float("nan")
    return "layers.17.mlp.down_proj.weight"


def one_zeroed(model: Model) -> str:
    model["layers.24.mlp.up_proj.weight"].zero_()
    return "layers.24.mlp.up_proj.weight"


def forty_fold(model: Model) -> str:
    model["layers.30.attn.o_proj.weight"].mul_(40)
    return "layers.30.attn.o_proj.weight"


def denormals(model: Model) -> str:
    """NVIDIA/Megatron-LM#1570."""
    model["output.weight"][100:].mul_(1e-39)
    return "output.weight"


def eighteen_bad_values(model: Model) -> str:
    """facebookresearch/metaseq#122: a few values of one shard."""
    model["layers.9.mlp.down_proj.weight"].view(-1)[1000:1018] = 6e4
    return "layers.9.mlp.down_proj.weight"


def all_written_as_zeros(model: Model) -> str:
    """deepspeedai/DeepSpeed#6791: a conversion that wrote zeros."""
    for tensor in model.values():
        tensor.zero_()
    return "embed.weight"


def a_tail_of_zeros(model: Model) -> str:
    """A shard whose last 60 KB are zeros."""
    model["embed.weight"].view(-1)[-15_370:] = 0
    return "embed.weight"


CASES: list[Callable[[Model], str]] = [
    one_nan, one_zeroed, forty_fold, denormals, eighteen_bad_values, all_written_as_zeros, a_tail_of_zeros,
]  # fmt: skip
WRONG = (one_nan, one_zeroed, all_written_as_zeros, a_tail_of_zeros)


@pytest.mark.slow
@pytest.mark.parametrize("harm", CASES, ids=lambda harm: harm.__name__)
def test_a_public_case_is_found_by_name_in_the_first_five_lines(tmp_path, harm):
    model = healthy()
    name = harm(model)
    stats = stats_of(tmp_path, model)
    heading, *lines = str(stats).splitlines()[:5]
    assert heading == "worth a look" and any(name in line for line in lines[: lines.index("")])
    assert stats.ok == (harm not in WRONG)


def test_nothing_of_a_healthy_model_is_worth_a_look(tmp_path):
    assert found(tmp_path, healthy()) == []


def test_three_harms_in_one_file_are_three_lines_and_the_worst_come_first(tmp_path):
    model = healthy()
    names = [harm(model) for harm in (forty_fold, one_zeroed, one_nan)]
    assert found(tmp_path, model) == [
        (names[2], "not finite", "error", "1 NaN, first at [12, 31]"),
        (names[1], "all zero", "error", "all zero, unlike 31 other layers"),
        (names[0], "out of line", "warning", found(tmp_path, model)[2][3]),
    ]
    assert "40 x its role in other layers" in found(tmp_path, model)[2][3]


def test_a_run_of_zeros_says_how_long_it_is_and_where(tmp_path):
    model = healthy()
    a_tail_of_zeros(model)
    model["layers.3.mlp.up_proj.weight"].view(-1)[500:1500] = 0
    assert [words for *_, words in found(tmp_path, model)] == [
        "the last 15,370 of 24,576 elements are zero",
        "from 500 on 1,000 of 3,072 elements are zero",
    ]


def test_rows_of_zeros_are_dead_rows_and_no_error(tmp_path):
    model = healthy()
    model["embed.weight"][500:] = 0
    ((name, what, severity, words),) = found(tmp_path, model)
    assert (name, what, severity) == ("embed.weight", "dead rows", "warning")
    assert words.startswith("12 rows of 512 all zero: 500, 501")


def test_dead_rows_in_several_shards_are_one_list(tmp_path):
    values = torch.randn(64, 48)
    values[3:9] = values[40:46] = 0
    part = MeasuredPart("embed.weight", "model", stored(tmp_path / "t", values, cuts=2))
    (one,) = statistics(tmp_path, [part], histogram=False).suspects
    assert one.words == "12 rows of 64 all zero: 3, 4, 5, 6, 7, 8, 40, 41 …"


def test_scattered_zeros_of_a_pruned_matrix_are_no_block(tmp_path):
    model = healthy()
    model["embed.weight"][torch.rand(512, 48) < 0.7] = 0
    assert found(tmp_path, model) == []


def test_a_layer_that_is_another_bit_for_bit_is_a_copy_and_a_tied_or_constant_one_is_none(tmp_path):
    model = healthy()
    model["layers.5.mlp.up_proj.weight"] = model["layers.4.mlp.up_proj.weight"].clone()
    model["layers.8.mlp.up_proj.weight"] = model["layers.7.mlp.up_proj.weight"]
    ((name, what, severity, words),) = found(tmp_path, model)
    assert (name, what, severity) == ("layers.5.mlp.up_proj.weight", "copy", "warning")
    assert words == "the same values as layers.4.mlp.up_proj.weight, bit for bit"


def test_half_precision_has_small_numbers_of_its_own_that_are_no_denormals(tmp_path):
    half = {name: tensor.half() for name, tensor in healthy().items()}
    assert [one for one in found(tmp_path, half) if one[1] == "denormal"] == []


def test_a_tensor_of_many_shards_is_looked_into_shard_by_shard(tmp_path):
    for rank in range(2):
        torch.save({"model": {"w": torch.full((4,), float("nan"))}, "rank": rank}, tmp_path / f"rank{rank}.pt")
    stats = ckptools.open(tmp_path / "rank0.pt", only_this_file=True).stats()
    assert [one.words for one in stats.suspects] == ["4 NaN, first at [0] (rank 0)"]
    assert isinstance(stats.suspects[0], Suspect) and stats.to_dicts()[0]["denormal"] == 0


def one_large(name: str, value: float) -> Callable[[Model], str]:
    def harm(model: Model) -> str:
        model[name].view(-1)[7] = value
        return name

    return harm


@pytest.mark.slow
@pytest.mark.parametrize("layers", [1, 3, 12])
@pytest.mark.parametrize("value", [1e30, -2e4])
@pytest.mark.parametrize(
    "name", ["layers.0.mlp.up_proj.weight", "layers.0.norm.weight", "embed.weight", "output.weight"]
)
def test_an_element_too_large_for_a_weight_is_named_whatever_the_number_of_layers(tmp_path, layers, value, name):
    model = {key: tensor for key, tensor in healthy().items() if int(layer_and_role(key)[0] or 0) < layers}
    one_large(name, value)(model)
    ((where, what, severity, words),) = found(tmp_path, model)
    assert (where, what, severity) == (name, "out of range", "warning")
    at = "[7]" if "norm" in name else "[0, 7]"
    assert words == f"1 element beyond 10,000, the largest {abs(value):g}, first at {at}"


def test_an_element_far_larger_than_all_others_of_its_matrix_is_named(tmp_path):
    model = {"a.weight": torch.randn(64, 64) * 0.02, "b.weight": torch.randn(512, 512) * 0.02}
    model["a.weight"][3, 4], model["b.weight"][511, 510] = 10.0, -20.0
    assert [(name, what, words.rpartition(": ")[2]) for name, what, _, words in found(tmp_path, model)] == [
        ("a.weight", "out of range", "10, first at [3, 4]"),
        ("b.weight", "out of range", "20, first at [511, 510]"),
    ]


SOUND = {
    "attn.causal_mask": torch.full((1, 1, 64, 64), -3.4e38).triu(1),
    "attn.bias": torch.full((1, 1, 64, 64), -1e9).triu(1),
    "attn.masked_bias": torch.tensor(-1e9),
    "table": torch.full((64, 64), -1e9).tril(),
    "rotary.inv_freq": 1.0 / (1e6 ** (torch.arange(0, 64, 2) / 64)),
    "bn.running_var": torch.full((64,), 2e4),
    "vq.cluster_size": torch.full((2, 512), 3e5),
    "proj.weight_scale_inv": torch.full((4, 4), 5e5),
    "seen_tokens": torch.tensor(3e9),
    "sqrt_recip_alphas_cumprod": torch.logspace(0, 5, 1000),
    "norm.weight": torch.cat([torch.full((255,), 0.01), torch.tensor([55.0])]),
    "down_proj.weight": torch.cat([torch.randn(255, 64) * 0.02, torch.linspace(0.1, 3.0, 64)[None]]),
    "positions": torch.arange(40_000).reshape(200, 200).float(),
}


@pytest.mark.parametrize("name", SOUND)
def test_masks_tables_statistics_and_scales_are_not_too_large(tmp_path, name):
    assert found(tmp_path, {"up.weight": torch.randn(8, 8), name: SOUND[name]}) == []


@pytest.mark.parametrize(("layers", "result"), [(3, "not judged"), (5, "ok")])
def test_a_rule_that_needs_five_layers_says_where_it_had_fewer(tmp_path, layers, result):
    stats = stats_of(tmp_path, {f"layers.{n}.up.weight": torch.randn(8, 8) for n in range(layers)})
    said = "no odd layers: not judged: fewer than 5 layers have such a tensor" in str(stats).splitlines()
    assert (stats.in_line.result, said, stats.in_range.result) == (result, layers < 5, "ok")


def test_a_role_that_few_layers_have_is_the_part_that_was_not_compared(tmp_path):
    model = {f"layers.{n}.up.weight": torch.randn(8, 8) for n in range(6)}
    model["layers.0.dense.weight"] = torch.randn(8, 8)
    words = "no odd layers: partly: 6 of 7 looked at: fewer than 5 layers have such a tensor"
    assert str(stats_of(tmp_path, model)).splitlines()[-1] == words
