"""Names and shapes of a checkpoint beside those of a model: what differs, and the rename that fixes most."""

from __future__ import annotations

import re
import time
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import ckptools
from ckptools.api.notebook import html_of
from ckptools.errors import UsageError
from ckptools.keys.entries import Selection
from ckptools.match.record import Match
from ckptools.match.run import compared, fold
from ckptools.torch_engine.module_shapes import Loading, NamedShape, StateDictShapes

EVERYTHING = Selection()


def shapes(names: Mapping[str, Any], ordered: bool = False, **facts: Any) -> StateDictShapes:
    """Shapes by name; a value that is no shape is a `NamedShape` itself."""
    made = {n: v if isinstance(v, NamedShape) else NamedShape(v, "float32") for n, v in names.items()}
    return StateDictShapes("it", made, ordered, **facts)


def matched(saved: Mapping[str, Any], model: Mapping[str, Any], **facts: Any) -> Match:
    return compared(shapes(saved, **facts), shapes(model, **facts), True, EVERYTHING)


def statuses(found: Match) -> dict[str, str]:
    return {str(row.name or row.checkpoint_name): row.status for row in found.rows}


GPT = {
    "emb.weight": (32, 8),
    **{f"blocks.{n}.{name}.weight": (8, 8) for n in range(3) for name in ("attn.q", "attn.k", "attn.v", "ffn")},
    "head.weight": (32, 8),
}


def test_the_same_names_and_shapes_load():
    found = matched(GPT, GPT)
    assert (found.loads, found.same, found.renames, found.groups.to_dicts()) == (True, len(GPT), (), [])


@pytest.mark.parametrize("prefix", ["module.", "_orig_mod.", "module._orig_mod.", "a.b.c.", "0."])
def test_a_prefix_of_either_side_is_found_whatever_it_is(prefix):
    longer = {f"{prefix}{name}": shape for name, shape in GPT.items()}
    (drop,), (add,) = matched(longer, GPT).renames, matched(GPT, longer).renames
    assert (drop.kind, drop.old, drop.new, drop.fixes) == ("prefix", prefix, "", len(GPT))
    assert (add.kind, add.old, add.new, add.fixes) == ("prefix", "", prefix, len(GPT))
    assert matched(longer, GPT).fix == {f"{prefix}{name}": name for name in GPT}


def test_a_rename_is_told_and_the_checkpoint_does_not_load_for_it():
    found = matched({f"module.{name}": shape for name, shape in GPT.items()}, GPT)
    assert (found.loads, found.same, found.renamed) == (False, 0, len(GPT))
    assert set(statuses(found).values()) == {"renamed"}


def test_a_rename_gives_no_few_names_the_number_of_another_layer():
    """Of two models that have little in common, the norms of one layer fit another layer's."""
    saved = {f"model.transformer.blocks.{n}.{name}": (8 + n,) for n in range(3) for name in ("ln.weight", "ln.bias")}
    model = {f"blocks.{n}.attention.{name}": (7 + n,) for n in range(3) for name in ("ln.weight", "ln.bias")}
    more = {f"{n}.{name}": (n, 3) for n in range(9) for name in ("up", "down")}
    found = matched(saved | more, model | {f"x.{name}": (*shape, 1) for name, shape in more.items()})
    assert [rename for rename in (*found.renames, *found.alternatives) if rename.kind == "prefix"] == []


ENDS = st.lists(st.sampled_from(("attn.q", "ln_1", "ln_2", "up")), min_size=1, unique=True)


@pytest.mark.slow
@given(st.integers(2, 5), ENDS, ENDS, st.sampled_from(("", "attention.", "0.")), st.data())
def test_a_rename_that_moves_layers_makes_most_names_fit(layers, ends, other, inside, data):
    def widths(pattern: str, some: list[str]) -> dict[str, tuple[int, ...]]:
        return {pattern.format(n) + end: (data.draw(st.integers(8, 9)),) for n in range(layers) for end in some}

    saved, model = widths("model.blocks.{}.", ends), widths(f"blocks.{{}}.{inside}", other)
    found = matched(saved, model)
    moved = [old for old, new in found.fix.items() if re.findall(r"\.(\d+)\.", old) != re.findall(r"\.(\d+)\.", new)]
    fit = {row.checkpoint_name for row in found.rows if row.status in ("same", "renamed")}
    assert not moved or len(fit.intersection(moved)) * 2 > min(len(saved), len(model))


def wrapped(name: str) -> str:
    """As FSDP1 with activation checkpointing calls it."""
    first, _, rest = name.partition("blocks.")
    return f"{first}blocks.{rest[0]}._fsdp_wrapped_module._checkpoint_wrapped_module.{rest[2:]}" if rest else name


def test_wrappers_between_are_found_together():
    found = matched({f"_fsdp_wrapped_module.{wrapped(name)}": shape for name, shape in GPT.items()}, GPT)
    (rename,) = found.renames
    assert (rename.kind, rename.old) == ("component", "_checkpoint_wrapped_module._fsdp_wrapped_module")
    assert found.renamed == rename.fixes == len(GPT)


def test_a_wrapper_that_only_the_model_has_is_added():
    model = {name.replace("attn.", "inner.attn."): shape for name, shape in GPT.items()}
    (rename,) = matched(GPT, model).renames
    assert (rename.kind, rename.new, rename.fixes) == ("wrapper", "inner", 9)


def test_a_component_with_another_name_is_found():
    model = {name.replace("attn", "self_attention"): shape for name, shape in GPT.items()}
    (rename,) = matched(GPT, model).renames
    assert (rename.kind, rename.old, rename.new, rename.fixes) == ("component", "attn", "self_attention", 9)


def test_the_end_of_names_with_another_name_is_found():
    saved = {name.replace("ffn.weight", "ffn.gamma"): shape for name, shape in GPT.items()}
    (rename,) = matched(saved, GPT).renames
    assert (rename.kind, rename.old, rename.new, rename.fixes) == ("component", "gamma", "weight", 3)


def test_two_readings_that_fix_as_many_are_both_told_and_neither_is_taken():
    saved = {f"{section}.{name}": shape for section in ("model", "ema") for name, shape in GPT.items()}
    found = matched(saved, GPT)
    assert (found.renames, found.fix) == ((), {})
    assert {(rename.old, rename.fixes) for rename in found.alternatives} == {("model.", len(GPT)), ("ema.", len(GPT))}


def test_siblings_of_one_shape_are_not_guessed():
    found = matched({"a.wq.weight": (8, 8)}, {"a.q.weight": (8, 8), "a.k.weight": (8, 8)})
    assert (found.renames, found.fix) == ((), {}) and len(found.alternatives) == 2


def layers(numbers, *parts, module="layers"):
    return {f"{module}.{n}.{part}.w": (4, 4) for n in numbers for part in parts or ("up", "down")}


@pytest.mark.parametrize(("there", "offset"), [(range(1, 4), 1), (range(10, 13), 10), (range(3, 6), 3)])
@pytest.mark.parametrize("back", [False, True])
def test_layers_that_moved_by_an_offset_are_found_as_such(there, offset, back):
    saved, model = {**layers(range(3)), "emb.w": (9, 4)}, {**layers(there), "emb.w": (9, 4)}
    found = matched(model, saved) if back else matched(saved, model)
    (rename,) = found.renames
    assert (rename.kind, rename.old, rename.offset, rename.changes) == (
        "offset",
        "layers.",
        -offset if back else offset,
        6,
    )
    assert found.same + found.renamed == len(model) == rename.fit
    assert found.same == len(saved.keys() & model.keys())


def test_layers_below_another_name_that_moved_are_found_behind_the_rename_of_their_module():
    found = matched(layers(range(3), module="h"), layers(range(1, 4)))
    assert [(r.kind, r.old, r.new, r.offset) for r in found.renames] == [
        ("prefix", "h.", "layers.", 0),
        ("offset", "layers.", "layers.", 1),
    ]
    assert found.fix == {} and found.assumed == {
        f"h.{n}.{part}.w": f"layers.{n + 1}.{part}.w" for n in range(3) for part in ("up", "down")
    }


@pytest.mark.parametrize(
    ("saved", "model"),
    [
        (layers(range(3)), layers(range(4))),
        (layers(range(3)), layers(range(1, 5))),
        (layers((0, 1, 3)), layers(range(1, 4))),
        (layers(range(3)), {**layers(range(1, 4)), "layers.2.up.w": (5, 5)}),
        (layers(range(3)), {**layers(range(1, 4)), "layers.2.more.w": (4, 4)}),
    ],
    ids=["more behind", "more on both sides", "a gap", "another shape", "another name"],
)
def test_layers_that_may_have_moved_in_more_than_one_way_or_do_not_fit_are_left_alone(saved, model):
    found = matched(saved, model)
    assert (found.renames, found.alternatives, found.fix, found.assumed) == ((), (), {}, {})


def test_a_rename_by_which_two_names_become_one_is_none():
    found = matched({"module.a.w": (2,), "module.b.w": (3,), "a.w": (4,)}, {"a.w": (2,), "b.w": (3,)})
    assert found.fix == {} or sorted(found.fix) == ["module.b.w"]


def test_shapes_decide_where_names_alone_would_fit_more():
    saved = {"a.w": (1,), "a.v": (1,), "b.w": (2,)}
    (rename,) = matched(saved, {"w": (2,), "v": (9,)}).renames
    assert rename.old == "b."


def test_a_shape_that_only_one_name_on_each_side_has_is_told_as_assumed_and_is_in_no_map():
    found = matched({"x.weight": (7, 3), "y.weight": (8, 8)}, {"y.weight": (8, 8), "a.b.c.weight": (7, 3)})
    (rename,) = found.renames
    assert (rename.kind, rename.example) == ("shape", ("x.weight", "a.b.c.weight"))
    assert (found.fix, found.assumed) == ({}, {"x.weight": "a.b.c.weight"})


@pytest.mark.parametrize(
    ("saved", "model"),
    [
        ({"x.weight": (7, 3)}, {"a.weight": (7, 3), "b.weight": (7, 3)}),
        ({"x.weight": (7, 3), "y.weight": (7, 3)}, {"a.weight": (7, 3)}),
        ({"x.weight": (7, 3), "y.weight": (7, 3)}, {"a.weight": (7, 3), "b.weight": (7, 3)}),
        ({"h.0.x.weight": (7, 3)}, {"h.1.y.weight": (7, 3)}),
        ({"x.weight": (7, 3)}, {"y.bias": (7, 3)}),
    ],
    ids=["two in the model", "two in the checkpoint", "two on both sides", "another layer", "another kind of name"],
)
def test_a_shape_that_allows_another_assignment_proposes_nothing(saved, model):
    found = matched(saved, model)
    assert found.fix == {} and found.assumed == {} and not any(r.assumed for r in found.renames)


def test_what_names_tell_stays_in_the_map_beside_what_is_assumed():
    saved = {"module.y.weight": (8, 8), "module.z.bias": (8,), "x.weight": (7, 3)}
    found = matched(saved, {"y.weight": (8, 8), "z.bias": (8,), "c.weight": (7, 3)})
    assert found.fix == {"module.y.weight": "y.weight", "module.z.bias": "z.bias"}
    assert found.assumed == {"x.weight": "c.weight"} and [r.kind for r in found.renames] == ["prefix", "component"]


def test_order_counts_only_where_both_sides_have_the_modules():
    saved = {"h.0.one.weight": (4, 4), "h.0.two.weight": (4, 4)}
    model = {"l.0.uno.weight": (4, 4), "l.0.due.weight": (4, 4)}
    found = matched(saved, model, ordered=True)
    (rename,) = found.renames
    assert (rename.kind, rename.fixes, matched(saved, model).renames) == ("order", 2, ())
    assert found.fix == {} and len(found.assumed) == 2
    assert matched(saved, {"l.1.uno.weight": (4, 4), "l.0.due.weight": (4, 4)}, ordered=True).renames == ()


@pytest.mark.parametrize(
    ("saved", "model", "reason", "words"),
    [
        ((32, 8), (64, 8), "padded", "32 rows short: padded vocabulary?"),
        ((65, 8), (64, 8), "padded", "1 row over: padded vocabulary?"),
        ((32, 8), (8, 32), "transposed", "transposed"),
        ((32, 8), (256,), "reshaped", "as many elements"),
        ((32, 8), (64, 9), "", ""),
        ((32, 8), (32, 9), "", ""),
    ],
)
def test_what_explains_a_shape_is_said(saved, model, reason, words):
    (row,) = matched({"emb.weight": saved}, {"emb.weight": model}).rows
    assert (row.status, row.reason) == ("shape", reason) and row.note.startswith(words)


def test_only_what_may_hold_a_vocabulary_is_called_padded():
    (row,) = matched({"ffn.up.weight": (32, 8)}, {"ffn.up.weight": (64, 8)}).rows
    assert row.reason == ""


def test_a_name_that_is_tied_in_the_model_is_no_missing_one_but_strict_loading_wants_it():
    tied = {"emb.weight": (4, 2), "head.weight": NamedShape((4, 2), "float32", tied="emb.weight")}
    found = matched({"emb.weight": (4, 2)}, tied)
    assert (statuses(found)["head.weight"], found.loads) == ("tied", False)
    optional = compared(shapes({"emb.weight": (4, 2)}), shapes(tied, ties_optional=True), True, EVERYTHING)
    assert optional.loads
    assert statuses(matched({"head.bias": (4,)}, tied))["head.weight"] == "missing"


def test_a_second_name_for_the_same_values_is_explained_where_the_model_has_one():
    saved = {"emb.weight": (4, 2), "head.weight": NamedShape((4, 2), "float32", tied="emb.weight")}
    row = matched(saved, {"emb.weight": (4, 2)}).rows[1]
    assert (row.status, row.reason, row.note[:18]) == ("unexpected", "tied", "tied to emb.weight")


def test_what_has_no_shape_is_not_called_equal():
    unknown = NamedShape(None, "float32", note="its shape is not told")
    found = matched({"a": unknown, "b": NamedShape(None)}, {"a": (3,), "b": (3,)})
    assert statuses(found) == {"a": "unknown", "b": "unknown"} and not found.loads
    assert [row.note for row in found.rows] == ["its shape is not told", "a tensor in the model only"]


def test_a_tensor_without_values_is_not_called_there_though_its_shape_is():
    found = matched({"a": NamedShape((3,), "float32", note="has no values")}, {"a": (3,)})
    assert (statuses(found), found.loads, found.same) == ({"a": "unknown"}, False, 0)


def test_what_is_no_tensor_on_both_sides_agrees():
    extra = {"w": (3,), "_extra_state": NamedShape(None)}
    assert matched(extra, extra).loads and not matched(extra, {"w": (3,)}).loads


def test_a_dtype_that_differs_is_a_note_and_what_nobody_tells_is_none():
    model = {name: NamedShape(shape, "bfloat16" if name == "emb.weight" else "") for name, shape in GPT.items()}
    found = matched(GPT, model)
    (group,) = found.groups
    assert found.loads and (group.status, group.names, group.checkpoint, group.model) == (
        "dtype", "emb.weight", "fp32", "bf16",
    )  # fmt: skip


def test_names_that_do_not_count_change_no_verdict():
    without_head = {name: shape for name, shape in GPT.items() if name != "head.weight"}
    assert not matched(without_head, GPT).loads
    assert compared(shapes(without_head), shapes(GPT), True, Selection(exclude=("head.*",))).loads
    assert compared(shapes(without_head), shapes(GPT), True, Selection(include=("blocks.*",))).model_names == 12
    with pytest.raises(UsageError, match="no name of it or it"):
        compared(shapes(GPT), shapes(GPT), True, Selection(include=("nothing",)))


# -- names folded ----------------------------------------------------------------------------------------------


def lines(names: list[str]) -> list[tuple[str, int]]:
    return [(text, len(members)) for text, members in fold(names)]


def test_a_wall_of_names_becomes_a_few_lines():
    names = [f"blocks.{n}.attn.{x}.{y}" for n in range(12) for x in "qkvo" for y in ("weight", "bias")]
    assert lines(names) == [("blocks.{0..11}.attn.{q,k,v,o}.{weight,bias}", 96)]


NAMES = st.lists(st.from_regex(r"[a-c0-3]{1,2}(\.[a-c0-3]{1,2}){0,4}", fullmatch=True), unique=True, max_size=60)


@settings(max_examples=40, deadline=None)
@given(NAMES)
def test_every_name_is_in_one_line_and_matches_it(names):
    folded = fold(names)
    assert sorted(n for _, members in folded for n in members) == list(range(len(names)))
    for text, members in folded:
        assert len(members) > 1 or text == names[members[0]] or not members


# -- properties of the search --------------------------------------------------------------------------------------

COMPONENT = st.sampled_from(["a", "b", "c", "w", "0", "1"])
MODELS = st.dictionaries(
    st.lists(COMPONENT, min_size=1, max_size=4).map(".".join),
    st.tuples(st.integers(1, 3), st.integers(1, 3)),
    max_size=9,
)


@pytest.mark.slow
@settings(max_examples=150, deadline=None)
@given(MODELS, MODELS)
def test_renames_never_make_two_names_one_nor_lose_what_fits(saved, model):
    if not saved and not model:
        return
    found = matched(saved, model)
    now = {name: {**found.fix, **found.assumed}.get(name, name) for name in saved}
    fit = sum(model.get(new) == saved[name] for name, new in now.items())
    assert len(set(now.values())) == len(now) and fit == found.same + found.renamed
    assert fit == sum(row.status in ("same", "renamed") for row in found.rows)
    assert fit >= sum(model.get(name) == shape for name, shape in saved.items())


@settings(max_examples=60, deadline=None)
@given(MODELS.filter(len), st.sampled_from(["x.", "x.y.", "model."]))
def test_a_prefix_of_all_names_is_always_found(model, prefix):
    found = matched({f"{prefix}{name}": shape for name, shape in model.items()}, model)
    assert found.renamed == len(model) or found.alternatives


@pytest.mark.slow
def test_fifty_thousand_names_take_seconds():
    model = {f"layers.{n}.{part}.weight": (n % 7 + 1, 8) for n in range(5000) for part in "abcdefghij"}
    saved = {f"module.{name.replace('.a.', '.alpha.')}": shape for name, shape in model.items()}
    started = time.process_time()
    found = matched(saved, model)
    assert found.renamed == len(model) and time.process_time() - started < 15


def test_names_of_a_file_that_share_their_bytes_are_tied(tmp_path):
    weight = torch.ones(4, 2)
    torch.save({"emb.weight": weight, "head.weight": weight}, tmp_path / "a.pt")
    torch.save({"emb.weight": weight}, tmp_path / "b.pt")
    (row,) = [row for row in ckptools.open(tmp_path / "a.pt").match(tmp_path / "b.pt").rows if row.status != "same"]
    assert (row.reason, row.note[:18]) == ("tied", "tied to emb.weight")


def test_a_page_lists_the_names_that_renames_change_only_where_there_are_some():
    changed = matched({f"module.{name}": shape for name, shape in GPT.items()}, GPT)
    assert f"{len(GPT)} names that the renames change" in html_of(changed)
    assert "that the renames change" not in html_of(matched(GPT, GPT))


@pytest.mark.parametrize(("ranks", "reasons"), [(4, {"slices"}), (3, {"padded", ""}), (0, {"padded", ""})])
def test_shapes_that_are_the_models_divided_by_the_ranks_are_slices(ranks, reasons):
    model = shapes({"embed.weight": (96, 8), "up.weight": (30, 8), "up.bias": (30,)})
    cut = shapes({"embed.weight": (24, 8), "up.weight": (8, 8), "up.bias": (8,)}, ranks=ranks)
    rows = compared(cut, model, None, EVERYTHING).rows
    assert {row.reason for row in rows} == reasons
    assert ranks != 4 or rows[0].note == "1/4 of the rows on each of 4 ranks: slices along dim 0"


def test_every_field_of_a_name_that_is_tied_is_where_it_belongs():
    tied = {"emb.weight": (4, 2), "head.weight": NamedShape((4, 2), "float32", tied="emb.weight")}
    row = next(row for row in matched({"emb.weight": (4, 2)}, tied).rows if row.name == "head.weight")
    assert (row.checkpoint_name, row.model_shape, row.checkpoint_shape) == (None, (4, 2), None)
    assert (row.model_dtype, row.checkpoint_dtype, row.reason) == ("float32", "", "tied")
    assert row.note == "tied to emb.weight, which is there; strict loading wants both"


def test_groups_of_a_shape_that_differs_are_folded_by_what_differs():
    saved = {f"blocks.{n}.{name}": (4, 4) for n in range(8) for name in ("up", "down")}
    model = {name: ((4, 5) if name.endswith("up") else (4, 6)) for name in saved}
    groups = [(g.names, g.keys, g.checkpoint, g.model) for g in matched(saved, model).groups]
    assert groups == [
        ("blocks.{0..7}.up", 8, "[4, 4]", "[4, 5]"),
        ("blocks.{0..7}.down", 8, "[4, 4]", "[4, 6]"),
    ]


def test_what_is_no_tensor_on_either_side_is_counted_as_compared_by_name_alone():
    both = {**GPT, "extra": NamedShape(None), "more": NamedShape(None)}
    assert matched(both, both).not_compared[0] == (
        "2 names with no tensor: there on both sides, and nothing but the name was compared"
    )


def test_what_is_split_off_another_tensor_while_loading_is_converted():
    loading = Loading(made=frozenset(("b",)))
    model = shapes({"a": (4, 2), "b": (2, 2)}, loading=lambda tensors: loading, converts=True)
    found = compared(shapes({"a": (4, 2)}), model, True, EVERYTHING)
    row = next(row for row in found.rows if row.name == "b")
    assert (row.status, row.note) == ("converted", "split off another tensor while loading")
