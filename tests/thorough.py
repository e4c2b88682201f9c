"""How much tests do that multiply: fixtures by damages, by commands, or a property by examples.

With the environment variable CKPTOOLS_THOROUGH they do all of it, which the nightly job does.
"""

from __future__ import annotations

import os

THOROUGH = bool(os.environ.get("CKPTOOLS_THOROUGH"))


def examples(count: int) -> int:
    """The `max_examples` of a property whose examples are costly: a third of `count`, or all."""
    return count if THOROUGH else count // 3
