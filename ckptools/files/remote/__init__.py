"""Files that are far away, through fsspec: `s3://`, `https://`, `hf://`, `sftp://` and whatever else has a file system.

`path` is what the rest of the package sees, `store` lists and reads through a file system, `cached_file` keeps what was
fetched, `buckets` and `web` add to file systems. What reads local files imports `path` and `cached_file` only.
"""

import os
import re

WEB = ("https", "http")
HUB = "hf"


def timeout() -> float:
    """Seconds that a request may take: 30, or what the environment says."""
    given = os.environ.get("CKPTOOLS_TIMEOUT", "")
    return float(given) if re.fullmatch(r"\d+(\.\d+)?", given) and float(given) else 30.0
