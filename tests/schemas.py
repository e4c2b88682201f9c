"""The JSON Schemas of the package, each beside the record that it describes."""

from __future__ import annotations

from pathlib import Path

import ckptools

SCHEMAS = {path.stem: path for path in Path(ckptools.__file__).parent.rglob("*.json")}
"""File by the name of the command, or of the file that one writes: `inspect`, `digests`."""
