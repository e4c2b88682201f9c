"""Checkpoints on a web server, which lists nothing: what is named is opened as on disk, and no more is claimed."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import NamedTuple

import pytest
from typer.testing import CliRunner

import ckptools
from ckptools.cli import app
from tests.files.range_server import RangeHandler, range_server, serving
from tests.truth import FIXTURES

RANKS = "torch2.13.0-fsdp1-sharded-w4"
SECRET = "sig=c0ffee"


class Web(NamedTuple):
    address: str
    asked: list[str]


@pytest.fixture(scope="module")
def web() -> Iterator[Web]:
    asked: list[str] = []
    with range_server(FIXTURES, asked) as address:
        yield Web(address, asked)


def run(*words: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, [*words])
    assert "c0ffee" not in result.output and "Traceback" not in result.output
    return result.exit_code, result.output


@pytest.mark.parametrize(
    "file",
    [
        "torch2.13.0-ddp-w4/snapshot.pt",
        "hf-llama-safetensors-bf16/ckpt/model.safetensors.index.json",
        "hf-gpt2-bin-tied-fp32/ckpt/pytorch_model.bin.index.json",
    ],
)
def test_a_file_or_an_index_is_opened_as_on_disk(web, file):
    there, here = ckptools.open(f"{web.address}/{file}"), ckptools.open(FIXTURES / file)
    assert there.format == here.format and there.whole is here.whole is True
    for key in here.model:
        assert there.model[key].numpy().tobytes() == here.model[key].numpy().tobytes()


@pytest.mark.slow
def test_rank_files_that_are_named_are_opened_as_one_checkpoint_with_the_query_of_each(web):
    urls = [f"{web.address}/{RANKS}/rank{rank}.pt?{SECRET}{rank}" for rank in range(4)]
    there, here = ckptools.open(urls), ckptools.open(FIXTURES / RANKS)
    key = next(iter(here.model))
    assert there.model[key].numpy().tobytes() == here.model[key].numpy().tobytes()
    assert run("verify", *urls)[0] == 0
    signed = [path for path in web.asked if "/rank" in path]
    assert signed and all(path.endswith(f"rank{path[-1]}.pt?{SECRET}{path[-1]}") for path in signed)


def test_of_one_rank_file_it_is_said_that_no_others_can_be_listed(web):
    code, out = run("verify", f"{web.address}/{RANKS}/rank0.pt?{SECRET}", "--json")
    assert code == 1
    assert "no file of this rank among the named ones, and the server lists no others" in out
    assert "no file rank1.pt" not in out


def test_of_one_rank_file_the_others_are_to_be_named(web):
    code, out = run("inspect", f"{web.address}/{RANKS}/rank0.pt?{SECRET}")
    assert code == 1 and "NOT WHOLE" in out and "name the other rank files too" in out
    assert "1970" not in out


class Signed(RangeHandler):
    """Denies, as S3 does, whatever was not signed, whether it is there or not."""

    def send_file(self, file: Path) -> None:
        if SECRET in self.path:
            super().send_file(file)
        else:
            self.answer(403, b"")


def test_what_may_not_be_seen_is_denied_and_not_called_absent():
    file = "hf-gpt2-bin-tied-fp32/ckpt/pytorch_model-00001-of-00004.bin"
    with serving(partial(Signed, FIXTURES, [])) as address:
        assert run("inspect", f"{address}/{file}?{SECRET}")[0] == 1  # one file of four
        assert run("inspect", f"{address}/torch2.13.0-ddp-w4/snapshot.pt?{SECRET}")[0] == 0
        code, out = run("inspect", f"{address}/{file}?Expires=1")
    assert code == 3 and "access denied by the server (403 Forbidden)" in out


@pytest.mark.parametrize("command", ["inspect", "verify", "tree", "stats", "doctor"])
def test_a_file_that_is_not_there_is_one_line(web, command):
    code, out = run(command, f"{web.address}/nothing.pt?{SECRET}")
    assert code == 3 and out.endswith(f"error: {web.address}/nothing.pt: no such file or folder\n")


@pytest.mark.parametrize("command", [["doctor"], ["stats"], ["tree"], ["show"], ["match", "--to"]])
def test_commands_answer_about_a_url_as_about_a_file(web, command):
    file = "torch2.13.0-ddp-w4/snapshot.pt"
    there, here = run(*command, f"{web.address}/{file}?{SECRET}"), run(*command, str(FIXTURES / file))
    assert there[0] == here[0]


@pytest.mark.parametrize("command", ["inspect", "ls", "verify"])
def test_a_server_alone_is_no_folder_without_checkpoints(web, command):
    code, out = run(command, f"{web.address}/")
    assert code == 3 and "a web server lists no files; name one" in out


def test_ls_names_what_it_was_not_given(web):
    with serving(partial(Signed, FIXTURES, [])) as address:
        code, out = run("ls", f"{address}/run7")
    assert code == 3 and f"{address}/run7: " in out


def test_a_folder_cannot_be_listed_and_is_said_to_be_none(web):
    code, out = run("ls", f"{web.address}/{RANKS}")
    assert code == 3 and out.count("\n") == 1


def test_a_copy_on_a_web_server_is_the_same_and_another_is_not(web):
    file = "torch2.13.0-ddp-w4/snapshot.pt"
    assert run("diff", "--values", f"{web.address}/{file}?{SECRET}", str(FIXTURES / file))[0] == 0
    other = f"{web.address}/torch2.13.0-fsdp1-sharded-w4/rank0.pt?{SECRET}"
    assert run("diff", f"{web.address}/{file}?{SECRET}", other)[0] == 1


def test_a_checkpoint_is_consolidated_from_a_web_server(web, tmp_path):
    index = "hf-llama-safetensors-bf16/ckpt/model.safetensors.index.json"
    for place, out in (f"{web.address}/{index}?{SECRET}", "there"), (str(FIXTURES / index), "here"):
        assert run("consolidate", place, "-o", str(tmp_path / f"{out}.safetensors"))[0] == 0
    assert (tmp_path / "there.safetensors").read_bytes() == (tmp_path / "here.safetensors").read_bytes()
