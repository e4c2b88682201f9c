"""`ckptools report`: a page whatever is wrong, which programs read too; and nothing that is in the way is lost."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest
from typer.testing import CliRunner

import ckptools
from ckptools.cli import app
from tests.cli.test_json_schemas import problems
from tests.display.test_report_page import answers_in, shown
from tests.truth import FIXTURES, SEVERAL, WHOLE

COMPOSER = FIXTURES / "composer-0.13.5-torch1.13.1-sharded-w4"
FOLDERS = sorted(path for path in FIXTURES.iterdir() if path.is_dir() and path not in SEVERAL)


def run(*arguments: object) -> tuple[int, str, str]:
    result = CliRunner().invoke(app, ["report", *map(str, arguments)])
    return result.exit_code, result.stdout, result.stderr


@pytest.fixture
def ranks(tmp_path: Path) -> Path:
    """The rank files of one step, to be damaged."""
    folder = tmp_path / "run"
    folder.mkdir()
    for rank in range(4):
        shutil.copy(COMPOSER / f"ep0-ba5-rank{rank}.pt", folder)
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("folder", FOLDERS, ids=lambda path: path.name)
def test_the_json_of_every_fixtures_page_is_what_the_schemas_say(folder, tmp_path):
    code, stdout, _ = run(folder, "-o", tmp_path / "page.html")
    page = (tmp_path / "page.html").read_text()
    answers = answers_in(page)
    assert list(answers) == ["inspect", "verify"] and (code == 0) == answers["verify"]["ok"]
    assert problems("inspect", answers["inspect"]) == problems("verify", answers["verify"]) == []
    assert stdout.splitlines()[0] in shown(page)


def test_a_page_is_written_of_what_is_broken_too_and_says_so_first(ranks, tmp_path):
    (ranks / "ep0-ba5-rank3.pt").unlink()
    code, stdout, stderr = run(ranks, "-o", tmp_path / "page.html")
    assert (code, stderr) == (1, "") and stdout.startswith("NOT WHOLE: rank 3 missing\n2 checks failed")
    assert stdout.splitlines()[-1] == f"wrote {tmp_path / 'page.html'}"
    assert answers_in((tmp_path / "page.html").read_text())["inspect"]["whole"] is False


def test_of_what_cannot_be_opened_the_page_says_so_and_what_doctor_says(tmp_path):
    (tmp_path / "model.pt").write_bytes(b"PK\x03\x04 no zip")
    code, stdout, stderr = run(tmp_path / "model.pt", "-o", tmp_path / "page.html")
    answers = answers_in((tmp_path / "page.html").read_text())
    assert (code, stdout) == (3, "") and stderr.startswith(f"error: {tmp_path / 'model.pt'}: ")
    assert stderr.endswith(f"; {tmp_path / 'page.html'} says so\n") and stderr.count("\n") == 1
    assert problems("doctor", answers["doctor"]) == [] and answers["doctor"]["readable"] is False
    assert '<b class="bad">cannot be opened: ' in (tmp_path / "page.html").read_text()


def test_of_what_is_not_there_nothing_is_written(tmp_path):
    code, stdout, stderr = run(tmp_path / "nowhere", "-o", tmp_path / "page.html")
    assert (code, stdout, list(tmp_path.iterdir())) == (3, "", []) and "says so" not in stderr


@pytest.mark.parametrize("name", ["page.pdf", "page", "ep0-ba5-rank0.pt"])
def test_a_name_that_is_no_page_is_refused(ranks, name):
    before = (ranks / "ep0-ba5-rank0.pt").read_bytes()
    code, _, stderr = run(ranks, "-o", ranks / name, "--force")
    assert code == 2 and stderr.endswith("give it a name that ends in .html\n")
    assert (ranks / "ep0-ba5-rank0.pt").read_bytes() == before


def test_a_page_that_is_there_stays_unless_it_is_forced(tmp_path):
    page = tmp_path / "page.html"
    page.write_text("of yesterday")
    assert run(COMPOSER, "-o", page)[0] == 4 and page.read_text() == "of yesterday"
    assert run(COMPOSER, "-o", page, "--force")[0] == 0 and answers_in(page.read_text())


def test_a_file_of_the_checkpoint_is_not_overwritten_whatever_it_is_called(tmp_path):
    page = tmp_path / "page.html"
    shutil.copy(FIXTURES / "torch2.13.0-ddp-w4" / "snapshot.pt", page)
    code, _, stderr = run(page, "-o", page, "--force")
    assert code == 4 and "is a file of the checkpoint itself" in stderr and ckptools.open(page).whole


def test_a_page_in_the_checkpoints_folder_changes_nothing_about_it(tmp_path):
    folder = shutil.copytree(FIXTURES / "torch2.13.0-fsdp2-dcp-w3" / "ckpt", tmp_path / "step-5")
    before = [(c.name, c.result, c.detail) for c in ckptools.verify(folder).checks]
    assert run(folder, "-o", folder / "page.html")[0] == 0
    assert [(c.name, c.result, c.detail) for c in ckptools.verify(folder).checks] == before


def test_standard_output_gets_the_page_and_nothing_else(tmp_path):
    code, stdout, stderr = run(COMPOSER, "-o", "-")
    assert code == 0 and stdout.startswith("<!doctype html>") and stdout.endswith("</html>\n")
    assert stderr.startswith("whole: all 4 rank files are here")


def test_what_is_asked_for_more_is_looked_at_and_shown(ranks, tmp_path):
    damaged = ranks / "ep0-ba5-rank1.pt"
    content = bytearray(damaged.read_bytes())
    at = ckptools.open(damaged).model["model.emb.weight"].shards[1].source.offset
    content[at + 3] ^= 0x40
    damaged.write_bytes(content)
    assert run(ranks, "-o", tmp_path / "quick.html")[0] == 0
    code, stdout, _ = run(ranks, "-o", tmp_path / "page.html", "--deep", "--values")
    page = shown((tmp_path / "page.html").read_text())
    assert code == 1 and stdout.splitlines()[1].startswith("1 check failed") and "CK004" in page
    pictures = ("4 ranks of", "bytes of", "rms of weights of", "l2 norms of tensors of", "layout of model.")
    assert all(title in page for title in pictures) and "not looked at: " not in page


def test_python_writes_the_same_page(tmp_path):
    ck = ckptools.open(WHOLE[0].file)
    out = ck.report(tmp_path / "page.html")
    run(WHOLE[0].file, "-o", tmp_path / "too.html")
    one, other = (answers_in(path.read_text())["inspect"] for path in (out, tmp_path / "too.html"))
    assert {**one, "read": 0} == {**other, "read": 0} and one["read"]["all_ranks"]
    with pytest.raises(ckptools.CkptoolsError, match="force=True overwrites it"):
        ck.report(tmp_path / "page.html")


def test_the_function_writes_the_page_of_a_path(tmp_path):
    assert ckptools.report(COMPOSER, tmp_path / "page.html") == tmp_path / "page.html"
    assert answers_in((tmp_path / "page.html").read_text())["verify"]["ok"]


def test_a_code_that_is_ignored_fails_no_check_and_changes_no_verdict_of_inspect(ranks, tmp_path):
    (ranks / "ep0-ba5-rank3.pt").unlink()
    failed = {problem.code for problem in ckptools.verify(ranks).problems if problem.severity == "error"}
    code, stdout, _ = run(ranks, "-o", tmp_path / "page.html", "--ignore", ",".join(failed))
    page = (tmp_path / "page.html").read_text()
    assert code == 0 and stdout.startswith("NOT WHOLE: rank 3 missing\nno check failed, ")
    assert answers_in(page)["verify"]["ignored"] and "rank 3" in shown(page)
    code, _, stderr = run(ranks, "-o", tmp_path / "too.html", "--ignore", "CK999")
    assert code == 2 and "there is no such code" in stderr and not (tmp_path / "too.html").exists()


def test_a_manifest_is_compared_for_the_page(tmp_path):
    model = tmp_path / "model.safetensors"
    ckptools.consolidate(COMPOSER, model, manifest=True)
    manifest = next(tmp_path.glob("*manifest*"))
    assert run(model, "-o", tmp_path / "page.html", "--manifest", manifest)[0] == 0
    told = json.loads(manifest.read_text())
    text = json.dumps(told).replace(next(iter(re.findall(r"[0-9a-f]{64}", json.dumps(told)))), "0" * 64)
    manifest.write_text(text)
    assert run(model, "-o", tmp_path / "too.html", "--manifest", manifest)[0] == 1
