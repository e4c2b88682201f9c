"""Remote files, through fsspec: `s3://`, `https://`, `hf://`, `sftp://` and every other scheme with a file system.

The rest of the package uses the paths of `path`. `store` lists and reads through a file system, and extends the file
system of buckets, as `web` does for web servers. `cached_file` keeps fetched bytes. Code that reads local files imports
`path` and `cached_file` only.
"""

import os
import re

WEB = ("https", "http")
HUB = "hf"


def timeout() -> float:
    """Seconds that a request may take: 30, or the number in the environment variable CKPTOOLS_TIMEOUT."""
    given = os.environ.get("CKPTOOLS_TIMEOUT", "")
    return float(given) if re.fullmatch(r"\d+(\.\d+)?", given) and float(given) else 30.0
