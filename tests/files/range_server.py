"""A web server on a real socket that gives ranges of the files of a folder, and lists nothing."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any
from urllib.parse import unquote


class RangeHandler(BaseHTTPRequestHandler):
    """Answers a request for a range of a file.

    Args:
        folder: where the files lie.
        asked: gets path and query of each request.
    """

    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True

    def __init__(self, folder: Path, asked: list[str], *rest: Any) -> None:
        self.folder, self.asked = folder, asked
        super().__init__(*rest)

    def do_GET(self) -> None:
        self.asked.append(self.path)
        self.reply()

    def reply(self) -> None:
        """Answer what was asked."""
        self.send_file(self.folder / unquote(self.path.partition("?")[0]).lstrip("/"))

    def send_file(self, file: Path) -> None:
        """Answer with the range of a file that was asked for."""
        if not file.is_file():
            self.answer(404, b"")
            return
        data = file.read_bytes()
        if "Range" not in self.headers:
            self.answer(200, data)
            return
        first, last = map(int, self.headers["Range"].removeprefix("bytes=").split("-"))
        part = data[first : last + 1]
        told = f"bytes {first}-{first + len(part) - 1}/{len(data)}" if part else f"bytes */{len(data)}"
        self.answer(206 if part else 416, part, {"Content-Range": told, "ETag": f'"{hash(data)}"'})

    def answer(self, status: int, body: bytes, headers: dict[str, str] | None = None) -> None:
        """Send an answer."""
        self.send_response(status)
        for name, value in {**(headers or {}), "Content-Length": str(len(body))}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: Any) -> None:
        """Say nothing."""


@contextmanager
def serving(handler: Any) -> Iterator[str]:
    """Yield the address of a server until the block ends."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    server.daemon_threads = True
    Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()


@contextmanager
def range_server(folder: Path, asked: list[str]) -> Iterator[str]:
    """Yield the address of a server of a folder's files."""
    with serving(partial(RangeHandler, folder, asked)) as address:
        yield address
