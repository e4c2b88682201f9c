"""Hugging Face folders: sets of files, their index, what lies beside them, and which model of a folder is meant."""

from __future__ import annotations

import json
import shutil
import struct
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import ckptools
from ckptools.errors import NotWholeError, ReadError, UnknownFormatError, UnsafePathError, UsageError
from ckptools.formats.hugging_face.files import parse, parse_index
from ckptools.inspect.record import facts, inspect_report
from tests.formats.said import said
from tests.formats.trainer_folder import trainer_folder
from tests.truth import FIXTURES

LLAMA = FIXTURES / "hf-llama-safetensors-bf16" / "ckpt"
GPT2 = FIXTURES / "hf-gpt2-bin-tied-fp32" / "ckpt"
INDEX = "model.safetensors.index.json"


@pytest.fixture
def llama(tmp_path) -> Path:
    return Path(shutil.copytree(LLAMA, tmp_path / "llama"))


@pytest.fixture
def gpt2(tmp_path) -> Path:
    return Path(shutil.copytree(GPT2, tmp_path / "gpt2"))


def part(number: int, of: int = 4) -> str:
    return f"model-{number:05d}-of-{of:05d}.safetensors"


def codes(ck: ckptools.Checkpoint) -> list[str]:
    return [p.code for p in ck.problems]


def edit(index: Path, **changes: str | None) -> None:
    """Change the files that an index names for tensors; None takes a tensor out."""
    told = json.loads(index.read_text())
    for name, file in changes.items():
        told["weight_map"][name] = file
        if file is None:
            del told["weight_map"][name]
    index.write_text(json.dumps(told))


def one(folder: Path, name: str, *names: str) -> Path:
    """Write one weight file with a small tensor under each name."""
    folder.mkdir(exist_ok=True, parents=True)
    tensors = {n: torch.arange(6.0).reshape(2, 3) for n in names or ("w",)}
    if name.endswith(".safetensors"):
        save_file({n: t.clone() for n, t in tensors.items()}, folder / name)
    else:
        torch.save(tensors, folder / name)
    return folder / name


# -- names -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "base", "kind", "number", "total"),
    [
        ("model.safetensors", "model", "safetensors", None, None),
        ("model-00002-of-00004.safetensors", "model", "safetensors", 2, "00004"),
        ("pytorch_model-00002-of-00004.bin", "pytorch_model", "bin", 2, "00004"),
        ("model.fp16.safetensors", "model.fp16", "safetensors", None, None),
        ("model.fp16-00001-of-00002.safetensors", "model.fp16", "safetensors", 1, "00002"),
        ("unet-00001-of-00002.fp16.safetensors", "unet.fp16", "safetensors", 1, "00002"),
        ("my-7b-of-mine.safetensors", "my-7b-of-mine", "safetensors", None, None),
    ],
)
def test_a_name_tells_model_kind_and_number(name, base, kind, number, total):
    found = parse(Path(name))
    assert found is not None
    assert (found.base, found.kind, found.number, found.total) == (base, kind, number, total)


@pytest.mark.parametrize(
    ("name", "found"),
    [
        (INDEX, ("model", "safetensors")),
        ("pytorch_model.bin.index.json", ("pytorch_model", "bin")),
        ("model.safetensors.index.fp16.json", ("model.fp16", "safetensors")),
        ("config.json", None),
        (".safetensors.index.json", None),
    ],
)
def test_an_index_tells_which_model_it_is_for(name, found):
    assert parse_index(Path(name)) == found


# -- sets of files -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["", "pytorch_model.bin.index.json", "pytorch_model-00001-of-00004.bin"])
def test_bin_files_are_joined_in_module_order(gpt2, name):
    ck = ckptools.open(gpt2 / name)
    assert (ck.format, ck.whole, len(ck.model), ck.module_order.kept) == ("hugging_face", True, 29, True)


def without_from_index(folder: Path, *files: str) -> None:
    """Take files out of an index, as a tool does that makes it again of what is left."""
    told = json.loads((folder / INDEX).read_text())["weight_map"]
    edit(folder / INDEX, **{name: None for name, file in told.items() if file in files})


@pytest.mark.parametrize("lost", [(1,), (2, 3), (4,)])
def test_files_that_an_index_made_again_hides_are_found_by_the_numbers_of_the_others(llama, tmp_path, lost):
    for number in lost:
        (llama / part(number)).unlink()
    without_from_index(llama, *map(part, lost))
    ck = ckptools.open(llama)
    assert [f.path.name for f in ck.files if f.status == "missing"] == [*map(part, lost)]
    assert (ck.whole, ck.verdict.recoverable) == (False, False)
    more = f" and {len(lost) - 1} more" if len(lost) > 1 else ""
    assert ck.verdict.headline.startswith(f"NOT WHOLE: {part(lost[0])}{more} missing")
    with pytest.raises(NotWholeError, match=part(lost[0])):
        ck.consolidate(tmp_path / "out.safetensors")


def test_files_of_two_sets_in_one_index_are_counted_apart(llama):
    """A model in four files, and what was trained beside it in two of its own."""
    for number in (1, 2):
        one(llama, part(number, 2), f"mtp.{number}")
    edit(llama / INDEX, **{f"mtp.{n}": part(n, 2) for n in (1, 2)})
    assert not {"CK001", "CK107"} & set(codes(ckptools.open(llama)))
    (llama / part(2, 2)).unlink()
    without_from_index(llama, part(2, 2))
    assert [f.path.name for f in ckptools.open(llama).files if f.status == "missing"] == [part(2, 2)]


def test_the_index_tells_what_the_missing_file_held(llama):
    held = set(load_file(llama / part(4)))
    (llama / part(4)).unlink()
    lost = [p for p in ckptools.open(llama).problems if p.code == "CK107"]
    assert {p.tensor for p in lost} == held
    assert lost[0].message == f"{INDEX} says that it is in {part(4)}, which is not here or damaged"


def test_numbers_may_begin_at_zero_and_a_number_beyond_them_is_stray(tmp_path):
    for number in (0, 1):
        one(tmp_path, part(number, of=2), f"w{number}")
    assert ckptools.open(tmp_path).problems == ()
    one(tmp_path, part(3, of=2), "w3")
    assert codes(ckptools.open(tmp_path)) == ["CK009"]


def test_many_missing_files_are_one_line(tmp_path):
    one(tmp_path, part(7, of=99_999))
    missing, _ = ckptools.open(tmp_path).problems
    assert missing.message.endswith("and 9993 more") and len(missing.message) < 400


def test_a_model_whose_every_file_is_damaged_cannot_be_read(llama):
    for number in range(1, 5):
        (llama / part(number)).write_bytes(b"")
    with pytest.raises(ReadError, match=r"is cut short|is empty"):
        ckptools.open(llama)
    for number in range(1, 5):
        (llama / part(number)).unlink()
    with pytest.raises(ReadError, match="nothing of the model is here"):
        ckptools.open(llama)


# -- the index ---------------------------------------------------------------------------------------------------


def doubled(folder: Path) -> None:
    told = json.loads((folder / INDEX).read_text())
    told["metadata"]["total_size"] *= 2
    (folder / INDEX).write_text(json.dumps(told))


EMBEDDING = "model.embed_tokens.weight"
CONTRADICTIONS = {
    "a file that it hides": (lambda f: without_from_index(f, part(2)), "CK010", "does not name"),
    "a tensor that it hides": (lambda f: edit(f / INDEX, **{"lm_head.weight": None}), "CK010", "does not name"),
    "a tensor in another file": (lambda f: edit(f / INDEX, **{"lm_head.weight": part(1)}), "CK010", ""),
    "another total size": (doubled, "CK010", ""),
    "a tensor in no file": (lambda f: edit(f / INDEX, lost=part(2)), "CK107 lost", "which holds no such tensor"),
    "a tensor in two files": (lambda f: one(f, part(4), "lm_head.weight", EMBEDDING), f"CK009 {EMBEDDING}", ""),
}


@pytest.mark.parametrize("what", CONTRADICTIONS)
def test_an_index_that_the_files_contradict_is_told_and_all_is_read(llama, what, tmp_path):
    harm, problem, words = CONTRADICTIONS[what]
    harm(llama)
    ck = ckptools.open(llama)
    assert problem in said(ck) and any(words in p.message for p in ck.problems)
    assert ck.whole == (problem == "CK010")
    if ck.whole:
        assert len(ck.model) == 30
    else:
        with pytest.raises(NotWholeError):
            ck.consolidate(tmp_path / "out.safetensors")


def test_a_copy_under_the_name_of_another_file_is_to_blame_alone(llama):
    shutil.copy(llama / part(1), llama / part(2))
    ck = ckptools.open(llama)
    assert ck.verdict.headline == f"NOT WHOLE: {part(2)} stray or duplicate"
    assert [one.culprit for one in ck.verdict.incidents] == [part(2)]
    assert ck.verify().to_fetch == (part(2),)
    assert {shard.source.path.name for shard in ck.model[EMBEDDING].shards} == {part(1)}


def test_files_that_changed_places_are_both_named_and_all_is_read(llama):
    one, two = (llama / part(1)).read_bytes(), (llama / part(2)).read_bytes()
    (llama / part(1)).write_bytes(two)
    (llama / part(2)).write_bytes(one)
    ck = ckptools.open(llama)
    (incident,) = ck.verdict.incidents
    assert ck.whole and {part(1), part(2)} == set(incident.culprit.split(", "))
    assert "the two files seem to have changed places" in incident.causes[0].what


def test_a_total_size_may_count_tied_weights_once_or_twice_and_bools_as_bits(gpt2):
    path = gpt2 / "pytorch_model.bin.index.json"
    told = json.loads(path.read_text())
    for total in (147_024, 147_024 + 97 * 36 * 4):
        told["metadata"]["total_size"] = total
        path.write_text(json.dumps(told))
        assert ckptools.open(gpt2).problems == ()


@pytest.mark.parametrize("name", ["../model.safetensors", "/etc/passwd", "a/b.safetensors", "a\\b", "..", "", "a\0b"])
def test_an_index_that_names_a_file_elsewhere_is_refused(llama, name):
    edit(llama / INDEX, **{"lm_head.weight": name})
    with pytest.raises(UnsafePathError, match="only files beside it are read"):
        ckptools.open(llama)


@pytest.mark.parametrize("text", ["[]", "{}", '{"weight_map": []}', '{"weight_map": {}}', '{"weight_map": {"a": 1}}'])
def test_a_json_without_a_weight_map_is_no_index(llama, text):
    (llama / INDEX).write_text(text)
    with pytest.raises(ReadError, match="no index of a model"):
        ckptools.open(llama)


def test_a_file_that_the_index_does_not_name_stands_without_it(llama):
    stale = one(llama, part(9, of=9), "w")
    ck = ckptools.open(stale)
    assert list(ck.model) == ["w"] and codes(ck)[0] == "CK001"
    assert [(p.code, p.severity) for p in ckptools.open(llama).problems] == [("CK013", "warning")]


# -- links and odd files -----------------------------------------------------------------------------------------


def test_the_links_of_a_hugging_face_cache_need_to_be_allowed(llama, tmp_path):
    snapshot = tmp_path / "models--x" / "snapshots" / "c0ffee"
    (tmp_path / "models--x" / "blobs").mkdir(parents=True)
    snapshot.mkdir(parents=True)
    for n, file in enumerate(sorted(llama.iterdir())):
        file.rename(tmp_path / "models--x" / "blobs" / f"{n}")
        (snapshot / file.name).symlink_to(f"../../blobs/{n}")
    with pytest.raises(UnsafePathError, match="follow_symlinks"):
        ckptools.open(snapshot)
    with pytest.raises(UnsafePathError, match="follow_symlinks"):
        ckptools.open(snapshot / part(1))
    assert ckptools.open(snapshot, follow_symlinks=True).whole
    assert len(ckptools.open(snapshot / part(1), only_this_file=True).model) == 6


@pytest.mark.parametrize(
    ("data", "what"),
    [
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:00\n", "Git LFS pointer"),
        (b"<!DOCTYPE html><html>", "web page"),
        (bytes(4096), "zeros"),
        (b"GGUF" + bytes(60), "GGUF"),
        (b"", "cut short|empty"),
        (struct.pack("<Q", 50) + b"{", "cut short"),
    ],
)
def test_what_is_no_safetensors_is_told_for_what_it_is(tmp_path, data, what):
    (tmp_path / "model.safetensors").write_bytes(data)
    for path in (tmp_path, tmp_path / "model.safetensors"):
        with pytest.raises(ReadError, match=what):
            ckptools.open(path)


def test_the_content_decides_and_a_name_that_disagrees_is_told(tmp_path):
    one(tmp_path, "x.safetensors").rename(tmp_path / "pytorch_model.bin")
    ck = ckptools.open(tmp_path)
    assert (codes(ck), ck.saved_as) == (["CK010"], "one .safetensors, every tensor whole")
    (tmp_path / "pytorch_model.bin").unlink()
    one(tmp_path, "x.bin").rename(tmp_path / "model.safetensors")
    assert codes(ckptools.open(tmp_path)) == ["CK010"]
    assert ckptools.open(tmp_path / "model.safetensors").format == "torch_file"


def test_a_zip_polyglot_under_a_safetensors_name_is_read_as_one_of_them_only(tmp_path):
    path = one(tmp_path, "model.safetensors")
    path.write_bytes(path.read_bytes() + b"PK\5\6" + bytes(18))
    with pytest.raises(ReadError, match="bytes were added"):
        ckptools.open(path)


# -- which model of a folder -------------------------------------------------------------------------------------


def test_several_models_are_listed_and_none_is_taken(tmp_path):
    one(tmp_path, "a.safetensors")
    one(tmp_path, "b.safetensors")
    with pytest.raises(UsageError, match=r"holds 2 models; name the one you mean: a\.safetensors, b\.safetensors"):
        ckptools.open(tmp_path)
    assert list(ckptools.open(tmp_path / "b.safetensors").model) == ["w"]


@pytest.mark.parametrize(
    ("taken", "left", "severity"),
    [
        ("model.safetensors", "consolidated.safetensors", "note"),
        ("model.safetensors", "pytorch_model.bin", "note"),
        ("model.safetensors", "model.fp16.safetensors", "note"),
        ("model.safetensors", "adapter_model.safetensors", "note"),
        ("model.safetensors", "vision.safetensors", "note"),
        ("model.safetensors", "model-00001-of-00001.safetensors", "warning"),
        ("diffusion_pytorch_model.safetensors", "diffusion_pytorch_model.fp16.safetensors", "note"),
    ],
)
def test_of_several_spellings_one_is_taken_and_the_other_is_told(tmp_path, taken, left, severity):
    one(tmp_path, taken, "taken")
    one(tmp_path, left, "left")
    ck = ckptools.open(tmp_path)
    (problem,) = ck.problems
    assert (list(ck.model), ck.whole, problem.code, problem.severity) == (["taken"], True, "CK013", severity)
    assert left in problem.message and taken in problem.message


def test_an_index_goes_before_a_single_file_which_is_told(llama):
    one(llama, "model.safetensors", "old")
    ck = ckptools.open(llama)
    assert "old" not in ck.model
    assert [(p.code, p.severity) for p in ck.problems] == [("CK013", "warning")]


def test_two_variants_or_two_sets_of_numbers_are_for_the_user_to_choose(tmp_path):
    one(tmp_path / "a", "model.fp16.safetensors")
    one(tmp_path / "a", "model.bf16.safetensors")
    one(tmp_path / "b", part(1, of=1))
    one(tmp_path / "b", part(1, of=2))
    for folder in ("a", "b"):
        with pytest.raises(UsageError, match="holds 2 models"):
            ckptools.open(tmp_path / folder)


def test_the_models_of_one_accelerate_run_are_read_side_by_side(tmp_path):
    one(tmp_path, "model.safetensors", "w")
    one(tmp_path, "model_1.safetensors", "v")
    ck = ckptools.open(tmp_path)
    assert list(ck.tree) == ["model", "model_1"] and list(ck.model) == ["model.w", "model_1.v"]


@pytest.mark.parametrize("name", ["optimizer.bin", "training_args.bin"])
def test_companions_alone_make_no_checkpoint(tmp_path, name):
    one(tmp_path, name)
    with pytest.raises(UnknownFormatError):
        ckptools.open(tmp_path)


@pytest.mark.parametrize("name", ["tokenizer.bin", "shard.bin"])
def test_other_bin_files_make_no_hugging_face_model(tmp_path, name):
    one(tmp_path, name)
    ck = ckptools.open(tmp_path)
    assert (ck.format, ck.path) == ("torch_file", tmp_path / name)


def test_numbered_bins_without_an_index_are_joined(gpt2):
    (gpt2 / "pytorch_model.bin.index.json").unlink()
    ck = ckptools.open(gpt2 / "pytorch_model-00002-of-00004.bin")
    assert (ck.whole, len(ck.model), ck.saved_as) == (True, 29, "4 .bin, every tensor whole")


def test_a_file_that_holds_no_names_cannot_be_joined(gpt2):
    torch.save([1, 2], gpt2 / "pytorch_model-00002-of-00004.bin")
    with pytest.raises(ReadError, match="holds a list, not the names and tensors"):
        ckptools.open(gpt2)


# -- with the state of a training ------------------------------------------------------------------------------------


def test_a_trainer_folder_is_one_checkpoint_with_its_companions(tmp_path):
    ck = ckptools.open(trainer_folder(tmp_path / "checkpoint-3", world=4))
    assert [(s.name, s.kind) for s in ck.sections] == [
        ("model", "model"),
        ("optimizer", "optimizer"),
        ("scheduler", "scheduler"),
        ("rng", "rng"),
        ("trainer_state", "other"),
    ]
    assert (ck.name, ck.step.value, ck.world_size.value, ck.whole) == ("checkpoint-3", 3, 4, True)
    assert ck.saved_as == "one .safetensors, every tensor whole; training state beside it"


def test_parameters_are_not_named_by_an_order_that_safetensors_have_lost(tmp_path):
    ck = ckptools.open(trainer_folder(tmp_path, world=1))
    naming = ck.optimizers["optimizer"].naming
    assert (naming.by, naming.names) == ("shape", {0: "0.weight", 4: "2.weight", 5: "2.bias"})


def test_a_file_opened_by_name_is_the_model_alone(tmp_path):
    folder = trainer_folder(tmp_path, world=1)
    assert set(ckptools.open(folder / "model.safetensors").tree) == set(load_file(folder / "model.safetensors"))


def test_a_damaged_optimizer_does_not_keep_the_model_from_being_written(tmp_path):
    folder = trainer_folder(tmp_path / "in", world=1)
    (folder / "optimizer.pt").write_bytes((folder / "optimizer.pt").read_bytes()[:500])
    ck = ckptools.open(folder)
    assert not ck.whole and [(p.code, p.tensor) for p in ck.problems] == [("CK002", "optimizer")]
    ck.consolidate(tmp_path / "m.safetensors")
    assert set(load_file(tmp_path / "m.safetensors")) == set(load_file(folder / "model.safetensors"))
    with pytest.raises(NotWholeError, match=r"optimizer\.pt"):
        ck.consolidate(tmp_path / "all.pt")


def test_verify_fails_for_a_tensor_that_no_file_has(llama):
    assert ckptools.verify(llama).ok
    edit(llama / INDEX, **{"model.lost": part(2)})
    assert not ckptools.verify(llama).ok


# -- the version that wrote it -------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["", "model.safetensors.index.json", part(2)])
def test_the_version_that_the_config_beside_it_states_is_a_fact_of_it(llama, name):
    report = inspect_report(ckptools.open(llama / name))
    assert report.writers == (("config.json.transformers_version", "5.23.0"),)
    assert ("transformers", "5.23.0", "config.json.transformers_version") in facts(report)


@pytest.mark.parametrize("stated", [None, 5, "", "5" * 1000, ["5.23.0"]])
def test_what_is_no_version_is_not_shown(llama, stated):
    (llama / "config.json").write_text(json.dumps({"transformers_version": stated}))
    assert inspect_report(ckptools.open(llama)).writers == ()


def test_a_config_that_cannot_be_read_is_a_note_and_no_error(llama):
    (llama / "config.json").write_text('{"transformers_version": ')
    ck = ckptools.open(llama)
    assert [(p.code, p.severity, p.files) for p in ck.problems] == [("CK013", "note", ("config.json",))]
    assert ck.whole and "no JSON that can be read" in ck.problems[0].message


def test_a_config_is_not_read_alone_nor_behind_a_link_out_of_the_folder(llama, tmp_path):
    assert not inspect_report(ckptools.open(llama / part(1), only_this_file=True)).writers
    (llama / "config.json").rename(tmp_path / "elsewhere.json")
    (llama / "config.json").symlink_to(tmp_path / "elsewhere.json")
    assert not inspect_report(ckptools.open(llama)).writers
    assert inspect_report(ckptools.open(llama, follow_symlinks=True)).writers
