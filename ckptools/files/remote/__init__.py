"""Files that are far away, through fsspec: `s3://`, `https://`, `hf://`, `sftp://` and whatever else has a file system.

`path` is what the rest of the package sees, `store` lists and reads through a file system, `cached_file` keeps what was
fetched, `file_systems` says which file system serves a URL. What reads local files imports `path`, `cached_file` and
`errors` only, which import no package.
"""

WEB = ("https", "http")
HUB = "hf"
