"""`ckptools shell`: a Python prompt with an open checkpoint."""

from __future__ import annotations

import ast
import code
import sys
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ckptools.cli.options import OpeningOptions
from ckptools.cli.printing import opened, remark
from ckptools.errors import ReadError, RefusedError
from ckptools.option import option

if TYPE_CHECKING:
    from ckptools.cli.arguments import CheckpointPaths


def shell(
    paths: CheckpointPaths,
    *,
    command: str | None = option(
        None, "Run this and leave; prints an expression.", flag="--command -c", common=True, metavar="CODE"
    ),
    trust: bool = option(False, "Run whatever code the file names. Only if you trust it.", common=True),
    opening: OpeningOptions,
) -> None:
    """Open a Python prompt with a checkpoint opened.

    `ck` is the opened checkpoint. If PATH is a single torch.save file with only allow-listed classes, `shard` is its
    content as torch loads it: real tensors, ShardedTensors and DTensors. No torchrun, no other ranks, no GPU needed.
    Without a terminal, code is read from stdin.

    Examples:
        ckptools shell PATH
        ckptools shell PATH -c 'ck.step'
    """
    import ckptools.api  # at the prompt, records print themselves
    from ckptools.formats.shards_of_other_ranks import with_other_ranks

    # Not `ckptools.open`: what is wrong with the arguments of this command is said in its words.
    ck = with_other_ranks(opened(paths, opening, all_ranks=False))
    paths = paths if len(paths) > 1 else [str(ck.path)]
    names = {"__name__": "__console__", "ckptools": ckptools, "ck": ck}
    with plain_tracebacks(), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Please use DTensor instead", FutureWarning)
        with shard_of(paths, trust) as shard:
            names |= shard
            if command is not None:
                run(names, command, "<command>", echo=True)
            elif not sys.stdin.isatty():
                run(names, sys.stdin.read(), "<stdin>", echo=False)
            else:
                prompt(names, banner(names, paths))


@contextmanager
def shard_of(paths: Sequence[str], trust: bool) -> Iterator[dict[str, Any]]:
    """Load a single torch.save file with torch, and yield it under the name `shard`; nothing for other checkpoints.

    Nothing also for a file that is not trusted and needs classes that are not on the allow-list.
    """
    if len(paths) > 1 or not _is_torch_file(Path(paths[0])):
        yield {}
        return
    from ckptools.torch_engine.offline import load_shard, offline

    with offline():
        try:
            names = {"shard": load_shard(Path(paths[0]), trust=trust)}
        except (RefusedError, ReadError) as error:
            remark(f"no shard here, only ck: {error}")
            names = {}
        yield names


def _is_torch_file(path: Path) -> bool:
    from ckptools.files.opening import File, content_of, head_of

    if not path.is_file():
        return False
    with File(path) as file:
        return content_of(head_of(file)) != ""


@contextmanager
def plain_tracebacks() -> Iterator[None]:
    """Show tracebacks of the user's code as Python does, without the frames of ckptools."""
    hook, sys.excepthook = sys.excepthook, sys.__excepthook__
    try:
        yield
    finally:
        sys.excepthook = hook


class _Interpreter(code.InteractiveInterpreter):
    """Runs code and remembers whether it failed."""

    failed = False

    def showtraceback(self) -> None:
        """Show a traceback without the frames of ckptools; exceptions that end a program still end it."""
        if isinstance(sys.exc_info()[1], (KeyboardInterrupt, BrokenPipeError)):
            raise
        self.failed = True
        super().showtraceback()

    def showsyntaxerror(self, filename: str | None = None, **more: Any) -> None:
        self.failed = True
        super().showsyntaxerror(filename, **more)


def run(names: dict[str, Any], source: str, filename: str, echo: bool) -> None:
    """Run `source`; with `echo`, print the value of every expression statement as the prompt does.

    Raises:
        SystemExit: with code 1, if it raised; the traceback is on stderr.
    """
    interpreter = _Interpreter(names)
    try:
        module = ast.parse(source, filename)
        # Interactive mode echoes values as if the lines were typed at the prompt.
        tree, mode = (ast.Interactive(body=module.body), "single") if echo else (module, "exec")
        compiled = compile(tree, filename, mode)
    except (SyntaxError, ValueError, OverflowError):
        interpreter.showsyntaxerror(filename)
    else:
        interpreter.runcode(compiled)
    if interpreter.failed:
        raise SystemExit(1)


def banner(names: Mapping[str, Any], paths: Sequence[str]) -> str:
    """List the names that are defined."""
    from ckptools._version import __version__
    from ckptools.text import clip, printable

    lines = [f"ckptools {__version__}, Python {sys.version.split()[0]}", f"ck = {names['ck']!r}"]
    if "shard" in names:
        shard = names["shard"]
        what = type(shard).__name__
        if isinstance(shard, dict):
            what += ": " + ", ".join(str(key) for key in list(shard)[:8]) + (", ..." if len(shard) > 8 else "")
        lines.append(f"shard = {paths[0]} as torch loads it, a {what}")
    return "\n".join(clip(printable(line), 160) for line in lines)


def prompt(names: dict[str, Any], text: str) -> None:
    """Run the prompt until the user leaves, in IPython if it is installed."""
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
