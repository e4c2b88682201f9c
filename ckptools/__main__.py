"""`python -m ckptools`: the same program as the `ckptools` command."""

from __future__ import annotations


def main() -> None:
    """Run the command line and exit with its code."""
    import gc

    # A short command makes many small objects and no cycles; looking for cycles so often costs it some percent.
    gc.set_threshold(1_000_000)
    from ckptools.cli import run

    run()


if __name__ == "__main__":
    main()
