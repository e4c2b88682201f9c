"""The contract that every command keeps."""

from __future__ import annotations

import functools
import gzip
import os
import re
import shutil
import subprocess
import sys
from importlib.metadata import version as torch_version
from pathlib import Path

import pytest
from typer.testing import CliRunner

from ckptools.__main__ import main
from ckptools._version import __version__
from ckptools.cli import app
from ckptools.cli.program import program
from ckptools.cli.start import COMMANDS, GROUPS, HELP, function_of, plain_arguments
from ckptools.display.screen import SGR
from tests.truth import FIXTURES

COMPOSER = FIXTURES / "composer-0.13.5-torch1.13.1-sharded-w4" / "ep0-ba5-rank0.pt"
NAMES = list(COMMANDS)


def run(*arguments: str) -> tuple[int, str, str]:
    result = CliRunner().invoke(app, arguments)
    return result.exit_code, result.stdout, result.stderr


@pytest.mark.parametrize("name", NAMES)
def test_every_command_has_help(name):
    code, stdout, _ = run(name, "--help")
    assert code == 0 and len(stdout) > 200


def test_create_takes_its_folder_as_an_argument(tmp_path):
    code, _, stderr = run("create", str(tmp_path / "out"), "--strategy", "none")
    assert (code, "--strategy none" in stderr) == (2, True)


@pytest.mark.parametrize("name", ["inspect", "consolidate", "shell", "verify"])
def test_a_wrong_path_is_one_line_and_code_3(name, tmp_path):
    more = ["-o", str(tmp_path / "x.pt")] if name == "consolidate" else []
    code, stdout, stderr = run(name, str(tmp_path / "nowhere.pt"), *more)
    assert (code, stdout, stderr.count("\n")) == (3, "", 1)
    assert "nowhere.pt" in stderr and "no such file" in stderr


@pytest.mark.parametrize("name", ["inspect", "verify", "tree", "stats"])
def test_a_file_that_is_cut_short_is_one_line_that_says_what_to_do(name, tmp_path):
    torn = tmp_path / "torn.pt"
    torn.write_bytes(COMPOSER.read_bytes()[:5000])
    code, stdout, stderr = run(name, str(torn))
    assert (code, stdout, stderr.count("\n")) == (3, "", 1)
    assert stderr.endswith(f"; copy it again, unless its save died; what else is here: ckptools doctor {torn}\n")


@pytest.mark.parametrize(("words", "same"), [(["help"], ["-h"]), (["help", "verify"], ["verify", "--help"])], ids=str)
def test_help_is_a_command_too(words, same):
    ours, theirs = process(*words), process(*same)
    assert (ours.returncode, ours.stdout) == (0, theirs.stdout)


def test_the_version_is_told_with_those_that_a_report_needs():
    done = process("--version")
    assert (
        done.stdout.startswith(f"ckptools {__version__}, Python 3.")
        and f"torch {torch_version('torch')}" in done.stdout
    )


@pytest.mark.parametrize("words", [["--version", "-v"], ["-v", "--version"], ["--version", "--verbose"]], ids=str)
def test_the_version_in_full_has_what_an_issue_form_asks_for(words):
    done = process(*words)
    lines = done.stdout.splitlines()
    assert done.returncode == 0 and lines[0] == f"ckptools {__version__}" and f"torch {torch_version('torch')}" in lines
    assert any(line.endswith(" processors") for line in lines) and str(Path.home()) not in done.stdout


@pytest.mark.slow
@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_a_shell_completes_commands(shell):
    told = {"COMP_WORDS": "ckptools insp", "COMP_CWORD": "1", "_TYPER_COMPLETE_ARGS": "ckptools insp"}
    asked = {"_CKPTOOLS_COMPLETE": f"complete_{shell}", "_TYPER_COMPLETE_FISH_ACTION": "get-args"}
    program = [str(Path(sys.executable).with_name("ckptools"))]
    done = subprocess.run(program, capture_output=True, text=True, env={**os.environ, **told, **asked})
    assert "inspect" in done.stdout and "verify" not in done.stdout


def completed(words: str, shell: str = "bash") -> list[str]:
    told = {
        "COMP_WORDS": words,
        "COMP_CWORD": str(len(words.split(" ")) - 1),
        "_CKPTOOLS_COMPLETE": f"complete_{shell}",
    }
    program = [str(Path(sys.executable).with_name("ckptools"))]
    done = subprocess.run(program, capture_output=True, text=True, env={**os.environ, **told})
    return done.stdout.split()


@pytest.mark.slow
def test_a_shell_completes_keys_from_the_file_and_sections():
    assert completed(f"ckptools show {COMPOSER} model.blocks.0.up.") == [
        "model.blocks.0.up.bias",
        "model.blocks.0.up.weight",
    ]
    assert completed(f"ckptools tree {COMPOSER} --filter model.ga") == ["model.gate"]
    assert "schedulers.LambdaLR" in completed(f"ckptools tree {COMPOSER} --section s")


@pytest.mark.slow
def test_a_shell_completes_nothing_from_what_cannot_be_read(tmp_path):
    (tmp_path / "x.pt").write_text("buy milk")
    assert completed(f"ckptools show {tmp_path / 'x.pt'} a") == []
    assert completed(f"ckptools tree {tmp_path / 'x.pt'} --section mo") == ["model"]


@pytest.mark.slow
def test_verbose_says_what_a_command_cost_on_stderr():
    plain, verbose = process("verify", COMPOSER, "--deep"), process("verify", COMPOSER, "--deep", "-v")
    assert "took" not in plain.stderr
    assert re.search(
        r"^took .* of CPU; .* of memory at most; \d+\.\d KiB read from files$", verbose.stderr, re.MULTILINE
    )


@pytest.mark.slow
def test_colour_is_asked_for_or_comes_with_a_terminal_and_changes_no_word():
    plain, painted = process("verify", COMPOSER), process("verify", COMPOSER, "--color", "always")
    assert "\x1b[32mok\x1b[0m" in painted.stdout and "\x1b" not in plain.stdout
    assert re.sub(r"\x1b\[[\d;]*m", "", painted.stdout).splitlines()[:-1] == plain.stdout.splitlines()[:-1]
    assert "\x1b" in process("verify", COMPOSER, FORCE_COLOR="1").stdout
    assert "\x1b" not in process("verify", COMPOSER, FORCE_COLOR="1", NO_COLOR="1").stdout


ODD = Path(__file__).parent.parent / "odd"
PAINTED = (
    f"inspect {COMPOSER}", f"inspect {COMPOSER} --section rng", f"tree {COMPOSER}", f"show {COMPOSER} rng",
    f"stats {COMPOSER}", f"verify {COMPOSER}", f"doctor {COMPOSER}", f"ls {COMPOSER.parent}",
    f"diff {ODD / 'step10.pt'} {ODD / 'step20.pt'}", f"match {COMPOSER} --to {ODD / 'step20.pt'}",
    f"consolidate {ODD / 'step10.pt'} -o OUT --dry-run", "formats",
)  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("line", PAINTED, ids=lambda line: line.split()[0])
def test_every_command_has_the_palette_s_colours_and_the_same_words(line, tmp_path, monkeypatch):
    words = line.replace("OUT", str(tmp_path / "o.pt")).split()
    plain, colored = (run(*words, "--color", how)[1] for how in ("never", "always"))
    found = set(re.findall(r"\x1b\[([\d;]*)m", colored))
    assert found and found <= {"0", *SGR.values()} and "\x1b" not in plain
    assert re.sub(r"\d", "", re.sub(r"\x1b\[[\d;]*m", "", colored)) == re.sub(r"\d", "", plain)
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("NO_COLOR", "1")
    assert "\x1b" not in run(*words)[1]


def test_a_change_that_was_asked_about_is_not_red():
    assert (
        f"\x1b[{SGR['bad']}m" not in run("diff", str(ODD / "step10.pt"), str(ODD / "step20.pt"), "--color", "always")[1]
    )


def test_an_error_has_colour_where_it_is_asked_for(tmp_path):
    done = process("inspect", tmp_path / "x", "--color=always")
    assert done.stderr.startswith("\x1b[1;31merror\x1b[0m: ")


def test_codes_to_ignore_may_stand_in_one_option():
    code, stdout, _ = run("verify", str(COMPOSER), "--ignore", "CK206,CK105", "--ignore", "CK207")
    assert code == 0 and "no check failed" in stdout
    assert run("verify", str(COMPOSER), "--ignore", "CK206,CK999")[0] == 2


def test_python_m_ckptools_is_the_same_program():
    command = [sys.executable, "-m", "ckptools", "inspect", str(COMPOSER), "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert '"ckptools/inspect/1"' in done.stdout


@pytest.mark.parametrize("name", NAMES)
def test_the_list_of_commands_has_the_first_line_of_each_docstring(name):
    function = function_of(name)
    assert (function.__name__, COMMANDS[name][0]) == (name, (function.__doc__ or "").splitlines()[0])


def process(*arguments: object, **more: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "ckptools", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, env={**os.environ, **more})


@pytest.mark.parametrize("arguments", [[], ["--help"], ["-h"]], ids=str)
@pytest.mark.parametrize("columns", ["80", "200", ""])
def test_commands_are_listed_without_importing_them_as_they_are_with_it(arguments, columns):
    typers = CliRunner().invoke(app, arguments, prog_name="ckptools", env={"COLUMNS": columns})
    ours = process(*arguments, COLUMNS=columns)
    assert (ours.returncode, ours.stdout, ours.stderr) == (typers.exit_code, typers.stdout, typers.stderr)


@pytest.mark.parametrize("columns", ["50", "80"])
def test_commands_are_listed_by_what_they_are_for_on_any_terminal(columns):
    blocks = process("--help", COLUMNS=columns).stdout.split("\n\n")[-len(GROUPS) :]
    assert [block.splitlines()[0] for block in blocks] == ["Look:", "Check:", "Compare:", "Write:", "Learn:"]
    listed = [re.findall(r"^  ([a-z]+)  ", block, re.MULTILINE) for block in blocks]
    assert listed == [list(commands) for commands in GROUPS.values()]


FLAGS = {
    "inspect": ["--json", "--all-ranks", "--only-this-file", "--follow-symlinks", "--trust", "-q", "--quiet"],
    "verify": ["--deep", "--values", "--json", "--only-this-file", "--follow-symlinks", "-v", "--verbose", "--debug"],
    "stats": ["--hist", "--per-rank", "--moments", "--dead-rows", "--json", "--jsonl"],
}
PLAIN = [
    *((name, ["a.pt", flag, "b"]) for name in FLAGS for flag in FLAGS[name]),
    ("inspect", ["a.pt"]),
    ("inspect", ["", "."]),
    ("verify", [*FLAGS["verify"], "x"]),
    ("verify", ["a", "--deep", "a", "--deep"]),
]


@pytest.mark.parametrize(("name", "arguments"), PLAIN, ids=str)
def test_paths_and_flags_mean_what_typer_takes_them_for(name, arguments, monkeypatch):
    taken: list[dict[str, object]] = []
    noting = lambda function: functools.wraps(function)(lambda **given: taken.append(given))  # noqa: E731
    monkeypatch.setattr("ckptools.cli.program.one_line_errors", noting)
    program(HELP, [function_of(name)], GROUPS)([name, *arguments], standalone_mode=False)
    plain = plain_arguments(name, arguments)
    defaults = {name: value for name, value in taken[0].items() if name not in (plain or {})}
    assert plain is not None and {**defaults, **plain} == taken[0]
    assert not [name for name, value in defaults.items() if value is True]


MORE = [[], ["--json"], ["a", "-j", "2"], ["a", "--ranks=x"], ["--", "a"], ["a", "--jso"], ["a", "-"], ["a", "--jobs"]]


@pytest.mark.parametrize("arguments", MORE, ids=str)
def test_what_is_more_than_paths_and_flags_is_left_to_typer(arguments):
    assert plain_arguments("verify", arguments) is None


@pytest.mark.slow
@pytest.mark.parametrize(
    ("typer", "arguments"),
    [
        (False, ["inspect", COMPOSER]),
        (False, ["verify", COMPOSER, "--json"]),
        (True, ["inspect", "--help"]),
    ],
    ids=str,
)
def test_only_the_command_that_is_called_is_imported_and_typer_only_to_parse_options(arguments, typer):
    command = [sys.executable, "-v", "-m", "ckptools", *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    loaded = {line.split("'")[1] for line in done.stderr.splitlines() if line.startswith("import '")}
    assert ("ckptools.cli" in loaded, "typer" in loaded) == (True, typer)
    assert {name for name in NAMES if f"ckptools.cli.commands.{name}" in loaded} == set(arguments[:1]) - {"--help"}


@pytest.mark.slow
def test_what_registers_itself_is_undone_before_the_process_ends(tmp_path):
    """A compressed file is unpacked into a temporary folder, which goes when everything else is left as it is."""
    packed = tmp_path / "rank0.pt.gz"
    packed.write_bytes(gzip.compress(COMPOSER.read_bytes()))
    (tmp_path / "scratch").mkdir()
    done = process("inspect", packed, "--only-this-file", TMPDIR=str(tmp_path / "scratch"))
    assert "NOT WHOLE: ranks 1..3 missing" in done.stdout
    assert (done.returncode, list((tmp_path / "scratch").iterdir())) == (1, [])


@pytest.mark.slow
def test_what_the_code_of_a_shell_has_not_written_yet_is_written_when_it_ends(tmp_path):
    done = process(
        "shell", COMPOSER, "-c", f"import math; math.f = open({str(tmp_path / 'kept')!r}, 'w'); math.f.write('kept')"
    )
    assert (done.returncode, (tmp_path / "kept").read_text()) == (0, "kept")


def closed_early(*arguments: object) -> tuple[int, str]:
    """Exit code and stderr of a command whose reader is gone before the first line."""
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-m", "ckptools", *map(str, arguments)]
    done = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, text=True)
    os.close(writer)
    return done.returncode, done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("more", [[], ["--json"], ["--section", "model"]], ids=str)
def test_a_reader_that_closes_the_pipe_early_changes_no_verdict(tmp_path, more):
    for rank in (0, 1, 2):  # of four
        shutil.copy(COMPOSER.with_name(f"ep0-ba5-rank{rank}.pt"), tmp_path)
    for folder, code in ((COMPOSER, 0), (tmp_path, 1)):
        found, stderr = closed_early("inspect", folder, *more)
        assert found == code and "Traceback" not in stderr and "roken" not in stderr


@pytest.mark.slow
def test_a_reader_that_closes_the_pipe_early_is_no_error(tmp_path):
    plan = ("consolidate", COMPOSER, "-o", tmp_path / "x.pt", "--dry-run", "--copies")
    for arguments in (plan, ("verify", COMPOSER), ("formats",), ("shell", COMPOSER, "-c", "print(9 * 'x' * 99999)")):
        code, stderr = closed_early(*arguments)
        assert code == 0 and "Traceback" not in stderr and "roken" not in stderr


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device that is always full")
def test_an_output_that_cannot_be_printed_is_one_line_and_code_3():
    command = f"{sys.executable} -m ckptools inspect {COMPOSER} > /dev/full"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True)
    assert done.returncode == 3
    assert "error: standard output: no space left on device" in done.stderr and "Traceback" not in done.stderr


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device that is always full")
@pytest.mark.parametrize("words", ["--help", "verify --help"])
def test_help_that_cannot_be_printed_is_one_line_and_code_3(words):
    done = subprocess.run(
        ["bash", "-c", f"{sys.executable} -m ckptools {words} > /dev/full"], capture_output=True, text=True
    )
    assert (done.returncode, done.stderr) == (3, "error: standard output: no space left on device\n")


@pytest.mark.slow
@pytest.mark.skipif(os.name == "nt", reason="needs a shell that closes streams")
@pytest.mark.parametrize("closed", [">&-", "2>&-", ">&- 2>&- <&-"])
def test_a_stream_that_the_caller_closed_changes_no_verdict(closed, tmp_path):
    shutil.copy(COMPOSER, tmp_path)  # one rank of four
    for path, code in ((COMPOSER, 0), (tmp_path, 1)):
        command = f"{sys.executable} -m ckptools inspect {path} {closed}"
        done = subprocess.run(["bash", "-c", command], capture_output=True, text=True)
        assert (done.returncode, "bug" in done.stderr, "Exception" in done.stderr) == (code, False, False)


def test_an_interrupt_before_the_command_begins_is_one_line_and_code_130(monkeypatch, capsys):
    def interrupted() -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("ckptools.cli.run", interrupted)
    with pytest.raises(SystemExit) as ended:
        main()
    assert (ended.value.code, capsys.readouterr().err) == (130, "interrupted; nothing was left behind\n")


def test_a_bug_is_code_70_and_says_how_to_report_it(monkeypatch):
    monkeypatch.setattr("ckptools.formats.open.open_checkpoint", lambda *_, **__: 1 / 0)
    code, stdout, stderr = run("inspect", str(COMPOSER))
    assert (code, stdout) == (70, "")
    assert "ZeroDivisionError" in stderr and "--debug" in stderr and stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("name", "arguments", "given"),
    [
        ("diff", ["1", "2"], {"a": "1", "b": "2"}),
        ("diff", ["1"], None),
        ("diff", ["1", "2", "3"], None),
        ("show", ["1", "2", "3"], {"path": "1", "keys": ["2", "3"]}),
        ("show", ["1"], None),
        ("match", ["1", "2"], None),
    ],
)
def test_arguments_go_to_the_parameters_that_are_named_for_them(name, arguments, given):
    assert plain_arguments(name, arguments) == given


def test_quiet_leaves_out_what_is_no_answer_and_keeps_errors(tmp_path):
    assert run("inspect", str(COMPOSER))[2] != ""
    assert run("inspect", str(COMPOSER), "-q")[2] == ""
    assert "no such file" in run("inspect", str(tmp_path / "x"), "--quiet")[2]
