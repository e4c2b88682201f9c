"""`python -m ckptools`: the same program as the `ckptools` command."""

from __future__ import annotations

import sys


def main() -> None:
    """Run the command line and exit with its code."""
    import gc

    # A short command makes many small objects and no cycles; the collector's frequent runs cost it some percent.
    gc.set_threshold(1_000_000)
    try:
        from ckptools.cli import run

        run()
    except KeyboardInterrupt:  # before the command began, which has its own message
        sys.stderr.write("interrupted; nothing was left behind\n")
        raise SystemExit(130) from None


if __name__ == "__main__":
    main()
