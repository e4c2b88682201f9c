"""`python -m ckptools`: the same program as the `ckptools` command."""

from __future__ import annotations


def main() -> None:
    """Run the command line and exit with its code."""
    from ckptools.cli import run

    run()


if __name__ == "__main__":
    main()
