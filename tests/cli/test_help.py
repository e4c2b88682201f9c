"""The help of commands: short and full, in colour, with examples that run; and mistakes on the command line."""

from __future__ import annotations

import os
import re
import shlex
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from ckptools.cli import app
from ckptools.cli.help import MANY, SHORT
from ckptools.cli.options import declared_options, spellings
from ckptools.cli.start import COMMANDS, function_of
from ckptools.display.screen import SGR
from tests.truth import FIXTURES

RANKS = FIXTURES / "torch2.13.0-fsdp1-sharded-w4"
ODD = Path(__file__).parent.parent / "odd"
NAMES = list(COMMANDS)
ENVIRONMENT = {key: value for key, value in os.environ.items() if key not in ("NO_COLOR", "FORCE_COLOR")}


def helped(*words: object, **environment: str) -> str:
    result = CliRunner().invoke(app, [*map(str, words)], prog_name="ckptools", env={"COLUMNS": "80", **environment})
    assert (result.exit_code, result.stderr) == (0, "")
    return result.stdout


def listed(text: str) -> list[str]:
    """The longest spelling of each option that a help has in its first column."""
    found = re.findall(r"^  (-[\w-]+(?:, -[\w-]+)*)", text, re.MULTILINE)
    return [max(words.split(", "), key=len) for words in found]


def declared(name: str) -> dict[str, bool]:
    """Whether each option that a command does not refuse is common, by its longest spelling."""
    options = declared_options(function_of(name)).items()
    return {
        max(spellings(option, known), key=len): known.metadata["common"]
        for option, known in options
        if not known.metadata["hidden"]
    }


def examples_of(name: str) -> list[str]:
    return helped(name, "--help").partition("\nExamples:\n")[2].strip().split("\n  ")


@pytest.mark.parametrize("name", NAMES)
def test_the_full_help_lists_every_option(name):
    found = listed(helped(name, "--help-all"))
    assert sorted({*found} - {"--help", "--help-all"}) == sorted(declared(name)) and len(found) == len({*found})


@pytest.mark.parametrize("name", NAMES)
def test_the_help_lists_at_most_ten_options_that_people_use_and_names_the_full_one(name):
    text, every = helped(name, "--help"), declared(name)
    *found, last = listed(text)
    if len(every) <= MANY - 2:  # without the two options that show the help
        assert ({*found}, last) == ({*every}, "--help")
    else:
        assert 4 <= len(found) <= SHORT and all(every[word] for word in found)
        assert last == "--help-all" and f"Show all {len(every) + 2} options." in text


def test_the_full_help_has_a_heading_for_each_group_of_options():
    headings = re.findall(r"^(\w[\w ]*):$", helped("stats", "--help-all"), re.MULTILINE)
    assert headings == ["Arguments", "Options", "Keys", "Rows", "Output", "Opening", "Every command", "Examples"]


@pytest.mark.parametrize("columns", ["40", "80", "200"])
@pytest.mark.parametrize("name", NAMES)
def test_help_breaks_no_option_and_fits_eighty_columns(name, columns):
    text = helped(name, "--help-all", COLUMNS=columns)
    assert max(map(len, text.splitlines())) < 80 and not re.search(r"\w-$", text, re.MULTILINE)


@pytest.mark.slow
def test_a_shell_completes_options_that_only_the_full_help_lists():
    line = "ckptools stats --"
    told = {"COMP_WORDS": line, "COMP_CWORD": "2", "_CKPTOOLS_COMPLETE": "complete_bash"}
    program = [str(Path(sys.executable).with_name("ckptools"))]
    done = subprocess.run(program, capture_output=True, text=True, env={**os.environ, **told})
    assert {*declared("stats"), "--help", "--help-all"} == {*done.stdout.split()}


# -- examples ----------------------------------------------------------------------------------------------------------


PLACES = {
    "PATH": RANKS / "rank0.pt", "DIR": RANKS, "A": ODD / "step10.pt", "B": ODD / "step20.pt",
    "MODEL": RANKS, "OTHER": RANKS,
}  # fmt: skip
"""Paths in the place of a user's."""


@pytest.mark.parametrize("name", NAMES)
def test_help_has_two_examples(name):
    first, second = examples_of(name)
    assert first.startswith(f"ckptools {name}") and second.startswith(f"ckptools {name}")


@pytest.mark.slow
@pytest.mark.parametrize("number", [0, 1])
@pytest.mark.parametrize("name", [name for name in NAMES if name != "browse"])
def test_an_example_runs_on_a_user_s_paths(name, number, tmp_path):
    program, *words = shlex.split(examples_of(name)[number])
    command = [sys.executable, "-m", program, *(str(PLACES.get(word, word)) for word in words)]
    pipes: Any = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    environment = {**os.environ, "XDG_STATE_HOME": str(tmp_path)}  # where watch remembers what it has verified
    running = subprocess.Popen(command, cwd=tmp_path, env=environment, text=True, **pipes)
    if name == "watch" and "--once" not in words:
        assert running.stdout is not None and running.stdout.readline() != ""
        running.send_signal(signal.SIGINT)
    stdout, stderr = running.communicate("print(ck)", timeout=120)
    assert running.returncode in (0, 1) and "error: " not in stderr and (stdout or name == "watch"), stderr


@pytest.mark.parametrize("number", [0, 1])
def test_an_example_of_browse_lacks_nothing_but_a_terminal(number):
    _, *words = shlex.split(examples_of("browse")[number])
    result = CliRunner().invoke(app, [str(PLACES.get(word, word)) for word in words])
    assert (result.exit_code, result.stderr.partition(";")[0]) == (2, "error: browse needs a terminal")


def test_the_examples_have_the_path_that_the_user_has_typed(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my run").mkdir()
    shown = helped("consolidate", "-o", "x.pt", "my run", "--help")
    assert "  ckptools consolidate 'my run' -o model.safetensors\n" in shown and "PATH..." in shown
    assert "  ckptools ls 'my run' --deep\n" in helped("ls", "my run", "-h")
    assert "  ckptools ls DIR\n" in helped("ls", "elsewhere", "-h")


# -- colour ------------------------------------------------------------------------------------------------------------


def plain(text: str) -> str:
    return re.sub(r"\x1b\[[\d;]*m", "", text)


@pytest.mark.parametrize(
    "words", [["--help"], ["stats", "--help"], ["create", "--help-all"], ["explain", "-h"]], ids=str
)
def test_help_has_the_palette_s_colours_where_they_are_asked_for_and_the_same_words(words):
    shown, colored = helped(*words), helped(*words, FORCE_COLOR="1")
    assert "\x1b" not in shown and plain(colored) == shown
    assert {*re.findall(r"\x1b\[([\d;]*)m", colored)} == {"0", SGR["heading"], SGR["typed"]}
    assert "\x1b" not in helped(*words, FORCE_COLOR="1", NO_COLOR="1")


@pytest.mark.parametrize("asked", [["--color", "always"], ["--color=always"]], ids=str)
def test_help_and_mistakes_have_the_colour_that_the_line_asks_for(asked):
    assert "\x1b" in helped("stats", *asked, "--help") and "\x1b" in helped("stats", "--help", *asked)
    assert "\x1b" not in helped("stats", "--help", "--color", "never", FORCE_COLOR="1")
    mistaken = CliRunner().invoke(app, ["stats", "--nothing", *asked]).stderr
    assert mistaken.startswith(f"\x1b[{SGR['bad']}merror\x1b[0m: \x1b[{SGR['typed']}m--nothing\x1b[0m: ")


def test_commands_options_and_codes_have_their_colours():
    assert f"\x1b[{SGR['typed']}m--deep\x1b[0m" in helped("verify", "--help", FORCE_COLOR="1")
    colored = helped("explain", "--help", FORCE_COLOR="1")
    assert f"\x1b[{SGR['typed']}mckptools explain\x1b[0m \x1b[{SGR['heading']}mCK101\x1b[0m" in colored
    assert f"  \x1b[{SGR['typed']}mverify\x1b[0m       Check" in helped("--help", FORCE_COLOR="1")


# -- mistakes ----------------------------------------------------------------------------------------------------------


MISTAKES: dict[str, str] = {
    "inspect x --jsn": "--jsn: no such option; did you mean --json or --jobs? ckptools inspect --help-all lists all",
    "inspect -z x": "-z: no such option; ckptools inspect --help-all lists all",
    "--json inspect x": "--json: no option of ckptools itself; options of a command stand behind its name",
    "inspekt x": "inspekt: no such command; did you mean inspect? ckptools --help lists all",
    "nothing": "nothing: no such command; ckptools --help lists all",
    "/": "/: a path, where the name of a command is expected: ckptools inspect /",
    "inspect --json": "PATH is missing; for example: ckptools inspect PATH",
    "show /": "KEY is missing; for example: ckptools show / optimizer.param_groups",
    "consolidate x": "--out is missing; for example: ckptools consolidate PATH -o model.safetensors",
    "ls a b": "b: one argument too many; expected ckptools ls [OPTIONS] DIR",
    "stats x --limit": "--limit N: the value is missing; see ckptools stats --help",
    "stats x --json=3": "--json takes no value; see ckptools stats --help",
    "stats x --limit y": "--limit y: expected a whole number",
    "stats x --limit=": "--limit '': expected a whole number",
    "inspect x -jx": "--jobs x: expected a whole number",
    "watch x --drift y": "--drift y: expected a number",
    "inspect x --engine y": "--engine y: expected inert or torch",
    "inspect x --jobs 0": "--jobs 0: must be at least 1",
    "inspect x --trust": "--trust: the inert reader runs nothing, so there is nothing to trust; add --engine torch",
    "diff a b --force": "--force overwrites a file of digests; add --hash FILE",
    "consolidate x -o y.pt --copies": "--copies prints the copies of a plan; add --dry-run",
    "watch x --delete": "--delete: how many checkpoints stay is not said; add --keep 3 or the like",
    "watch x --delete --keep 3": "--delete: older checkpoints go only where every byte was compared; add --deep",
    "watch x --model ema": "--model ema says whose norms are compared; add --values",
    "watch x --values --model all": "--model all: norms of several models are never added; name one model",
    "watch x --every 0": "--every 0.0: must be at least 0.05 seconds",
    "create x --dtensor --strategy ddp": "--dtensor goes with --strategy fsdp1, not ddp; add --strategy fsdp1",
}


@pytest.mark.parametrize("line", MISTAKES)
def test_a_mistake_is_one_line_in_the_words_of_every_other_error(line):
    result = CliRunner().invoke(app, line.split())
    assert (result.exit_code, result.stdout, result.stderr) == (2, "", f"error: {MISTAKES[line]}\n")


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("word", ["--nothing", "--jobs=x", "--color=red", "--json=1", "--color"])
def test_every_command_says_mistakes_so(name, word):
    result = CliRunner().invoke(app, [name, "x", word])
    assert (result.exit_code, result.stdout, result.stderr.count("\n")) == (2, "", 1)
    assert result.stderr.startswith(f"error: {word.partition('=')[0]}") and "Usage" not in result.stderr


def test_a_word_of_any_length_and_content_is_safe_to_print():
    stderr = CliRunner().invoke(app, ["inspect", f"--\x1b[35m{'x' * 999}"]).stderr
    assert "\x1b" not in stderr and len(stderr) < 200


def test_a_command_without_any_word_shows_its_help_and_is_code_2():
    result = CliRunner().invoke(app, ["stats"], prog_name="ckptools", env={"COLUMNS": "80"})
    assert (result.exit_code, result.stdout, result.stderr) == (2, "", helped("stats", "--help"))


def test_mistakes_are_errors_for_a_caller_in_python():
    from ckptools.errors import UsageError

    call: Any = app
    with pytest.raises(UsageError, match="--nothing: no such option"):
        call(["stats", "--nothing"], standalone_mode=False)
