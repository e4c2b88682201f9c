"""A local S3 server (moto) in a process of its own, and what is put into its bucket."""

from __future__ import annotations

import os
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import obstore
from obstore.store import S3Store

from ckptools.files.remote.path import RemotePath
from tests.truth import Known

BUCKET = "checkpoints"

SERVE = """
import functools
import botocore.utils
from moto.server import create_backend_app
from werkzeug.serving import WSGIRequestHandler, make_server

class Quiet(WSGIRequestHandler):
    protocol_version = "HTTP/1.1"
    def log(self, *_): pass

# A listing has the time of each object as text, which moto parses and writes anew: a third of what it does.
botocore.utils.parse_timestamp = functools.cache(botocore.utils.parse_timestamp)

# Not its dispatcher, which looks through the folders of all services at each request.
moto = create_backend_app("s3")

def app(environ, start_response):
    # Nothing can be written below `refused/`, and no parts of files below `broken/`.
    path, writes = environ["PATH_INFO"], environ["REQUEST_METHOD"] in ("PUT", "POST")
    refused = "/refused/" in path and writes
    if not refused and not ("/broken/" in path and writes and "partNumber" in environ["QUERY_STRING"]):
        return moto(environ, start_response)
    environ["wsgi.input"].read(int(environ.get("CONTENT_LENGTH") or 0))
    start_response("403 Forbidden" if refused else "500 Internal Server Error", [("Content-Length", "0")])
    return []

server = make_server("127.0.0.1", 0, app, threaded=True, request_handler=Quiet)
print(server.server_port, flush=True)
server.serve_forever()
"""


@contextmanager
def s3_server() -> Iterator[str]:
    """Yield the address of an S3 server with an empty bucket."""
    command = [sys.executable, "-c", SERVE]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
        try:
            assert process.stdout is not None
            address = f"http://127.0.0.1:{int(process.stdout.readline())}"
            with urllib.request.urlopen(urllib.request.Request(f"{address}/{BUCKET}", method="PUT"), timeout=30):
                pass
            yield address
        finally:
            process.kill()


def settings(address: str) -> dict[str, str]:
    """The environment of a user whose bucket is there."""
    return {
        "AWS_ENDPOINT_URL": address,
        "AWS_ACCESS_KEY_ID": "somebody",
        "AWS_SECRET_ACCESS_KEY": "secret",
        "AWS_REGION": "us-east-1",
    }


class Bucketful:
    """A server's bucket, and what was put into it.

    Attributes:
        address: of the server.
    """

    def __init__(self, address: str) -> None:
        self.address = address
        self._put: set[Path] = set()
        self._store = S3Store(
            BUCKET,
            endpoint=address,
            region="us-east-1",
            access_key_id="somebody",
            secret_access_key="secret",
            client_options={"allow_http": True},
        )

    def put(self, path: Path) -> str:
        """Upload a file or a folder, once; return its URL."""
        if path not in self._put:
            for file in sorted(p for p in path.rglob("*") if p.is_file()) if path.is_dir() else [path]:
                self.put_bytes(str(file.relative_to(path.parent)), file.read_bytes())
        self._put.add(path)
        return f"s3://{BUCKET}/{path.name}"

    def holding(self, known: Known) -> Known:
        """A fixture as it is there."""
        self.put(known.folder)
        return replace(known, place=RemotePath(f"s3://{BUCKET}"))

    def put_bytes(self, key: str, data: bytes) -> None:
        """Upload one object, over whatever has the key."""
        self._put = {path for path in self._put if not key.startswith(path.name)}
        obstore.put(self._store, key, data)

    def put_aged(self, path: Path) -> None:
        """Upload a folder, and make its files on disk as old as they are there."""
        self.put(path)
        for file in (p for p in path.rglob("*") if p.is_file()):
            written = obstore.head(self._store, str(file.relative_to(path.parent)))["last_modified"].timestamp()
            os.utime(file, (written, written))

    def delete(self, key: str) -> None:
        """Remove one object."""
        obstore.delete(self._store, key)
