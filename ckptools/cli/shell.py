"""`ckptools shell`: a Python prompt with one rank's file loaded."""

from __future__ import annotations

import ast
import code
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import CodeType
from typing import Annotated, Any

import typer

from ckptools.cli.printing import remark

ShardPath = Annotated[Path, typer.Argument(readable=False, help="One rank's file.", show_default=False)]
Command = Annotated[
    str | None,
    typer.Option("--command", "-c", help="Run this and leave; prints an expression.", show_default=False),
]
Trust = Annotated[bool, typer.Option("--trust", help="Run whatever code the file names. Only if you trust it.")]


def shell(path: ShardPath, command: Command = None, trust: Trust = False) -> None:
    """Open a Python prompt with one rank's file loaded.

    PATH is `shard` there: real tensors, ShardedTensors and DTensors. No torchrun, no other ranks, no GPU needed.
    Without a terminal, code is read from stdin.
    """
    from ckptools.torch_engine.offline import load_shard, offline

    with offline(), plain_tracebacks(), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Please use DTensor instead", FutureWarning)
        shard = load_shard(path, trust=trust)
        names = {"__name__": "__console__", "shard": shard}
        if command is not None:
            run(names, command, "<command>", echo=True)
        elif not sys.stdin.isatty():
            run(names, sys.stdin.read(), "<stdin>", echo=False)
        else:
            prompt(names, banner(path, shard))


@contextmanager
def plain_tracebacks() -> Iterator[None]:
    """Let Python show the tracebacks of the user's code in its own way, and leave our frames out of them."""
    hook, sys.excepthook = sys.excepthook, sys.__excepthook__
    try:
        yield
    finally:
        sys.excepthook = hook


class Interpreter(code.InteractiveInterpreter):
    """Runs code and remembers whether it failed.

    Attributes:
        failed: whether a traceback was shown.
    """

    failed = False

    def showtraceback(self) -> None:
        """Show a traceback without our own frames; what ends a program goes on to do so."""
        if isinstance(sys.exc_info()[1], (KeyboardInterrupt, BrokenPipeError)):
            raise
        self.failed = True
        super().showtraceback()

    def showsyntaxerror(self, filename: str | None = None, **more: Any) -> None:
        """Show a syntax error."""
        self.failed = True
        super().showsyntaxerror(filename, **more)


def run(names: dict[str, Any], source: str, filename: str, echo: bool) -> None:
    """Run `source`; with `echo`, print the value of every expression statement as the prompt does.

    Raises:
        SystemExit: with code 1, when it raised; the traceback is on stderr.
    """
    interpreter = Interpreter(names)
    try:
        compiled = compiled_from(source, filename, echo)
    except (SyntaxError, ValueError, OverflowError):
        interpreter.showsyntaxerror(filename)
    else:
        interpreter.runcode(compiled)
    if interpreter.failed:
        raise SystemExit(1)


def compiled_from(source: str, filename: str, echo: bool) -> CodeType:
    """Compile a script, or with `echo` the same lines as if they were typed at the prompt."""
    module = ast.parse(source, filename)
    if echo:
        return compile(ast.Interactive(body=module.body), filename, "single")
    return compile(module, filename, "exec")


def banner(path: Path, shard: Any) -> str:
    """Say what is bound."""
    import torch

    from ckptools._version import __version__
    from ckptools.text import clip, printable

    what = type(shard).__name__
    if isinstance(shard, dict):
        what += ": " + ", ".join(str(key) for key in list(shard)[:8]) + (", ..." if len(shard) > 8 else "")
    lines = (
        f"ckptools {__version__}, torch {torch.__version__}, Python {sys.version.split()[0]}",
        clip(printable(f"shard = {path}, a {what}"), 160),
    )
    return "\n".join(lines)


def prompt(names: dict[str, Any], text: str) -> None:
    """Talk to the user until they leave, in IPython where it is installed."""
    try:
        from IPython import start_ipython  # type: ignore[import-not-found,unused-ignore]
    except ImportError:
        _complete_with_tab(names)
        code.interact(text, local=names, exitmsg="")
    else:
        remark(text)
        start_ipython(argv=["--no-banner"], user_ns=names)


def _complete_with_tab(names: dict[str, Any]) -> None:
    try:
        import readline
        import rlcompleter
    except ImportError:  # Windows, or a Python built without it
        return
    readline.set_completer(rlcompleter.Completer(names).complete)
    readline.parse_and_bind("tab: complete")
