"""Output formats: one file each, and the visible tuple that lists them."""

from __future__ import annotations

from ckptools.consolidate.writers import dcp, pt, safetensors
from ckptools.consolidate.writers.layout import Writer

WRITERS: tuple[Writer, ...] = (pt, safetensors, dcp)

FOLDER_HOLDS: Writer = safetensors
"""The default format in a folder, as for models on the Hugging Face hub."""
