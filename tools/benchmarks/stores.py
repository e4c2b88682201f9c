"""What a bucket costs: a local S3 server behind 20 ms of added latency, against the same files on disk."""

from __future__ import annotations

import asyncio
import json
import os
import re
import shutil
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import chain
from pathlib import Path
from threading import Thread
from unittest.mock import patch

import ckptools
from ckptools.text import size
from tests.object_store import BUCKET, Bucketful, s3_server, settings
from tools.benchmarks.measure import Run, run, table_as_measured
from tools.benchmarks.scale import hollow

CKPTOOLS = [sys.executable, "-m", "ckptools"]
WORLD = 256
AS_ZEROS = ("--allow-missing", "--fill", "zero")
"""How what lies in holes is written."""

MATRICES = {f"layers.{n}.weight": (2048, 256) for n in range(50)}
"""With AdamW's two moments and step counts 200 tensors of the DCP folder; of each matrix a rank has 128 KiB."""

RANK_FILES = """
import sys
from pathlib import Path
from tests.fake_world import write_sharded
write_sharded(Path(sys.argv[1]), int(sys.argv[2]), range(int(sys.argv[2])), parameters=17)
"""
"""The files of all ranks, each of which lists the shards of all: 17 parameters with two moments."""

LATENCY = 0.02
"""Seconds that each request takes longer."""

REQUEST = re.compile(rb"(GET|HEAD|PUT|POST|DELETE) ")


class Distance:
    """A proxy that makes a server far away, and counts what is asked and sent.

    Attributes:
        requests: requests so far.
        nbytes: bytes of answers so far, headers included.
        most: most requests that were under way together.
    """

    def __init__(self, address: str) -> None:
        self._host, port = address.removeprefix("http://").split(":")
        self._port = int(port)
        self.requests = self.nbytes = self.most = self._now = 0

    async def serve(self, client: asyncio.StreamReader, answers: asyncio.StreamWriter) -> None:
        """Pass on what comes over one connection."""
        server, questions = await asyncio.open_connection(self._host, self._port)
        await asyncio.gather(self._ask(client, questions), self._answer(server, answers), return_exceptions=True)
        questions.close()
        answers.close()

    async def _ask(self, client: asyncio.StreamReader, questions: asyncio.StreamWriter) -> None:
        while data := await client.read(1 << 16):
            if REQUEST.match(data):
                self.requests += 1
                self._now += 1
                self.most = max(self.most, self._now)
                await asyncio.sleep(LATENCY)
            questions.write(data)
            await questions.drain()
        questions.write_eof()

    async def _answer(self, server: asyncio.StreamReader, answers: asyncio.StreamWriter) -> None:
        while data := await server.read(1 << 16):
            self._now -= data.startswith(b"HTTP/1.1")
            self.nbytes += len(data)
            answers.write(data)
            await answers.drain()
        answers.close()


@contextmanager
def far_away(address: str) -> Iterator[tuple[str, Distance]]:
    """The address of a proxy before a server, and what it counts."""
    distance, loop = Distance(address), asyncio.new_event_loop()
    server = loop.run_until_complete(asyncio.start_server(distance.serve, "127.0.0.1", 0))
    Thread(target=loop.run_forever, daemon=True).start()
    loop.set_exception_handler(lambda *_: None)  # connections that end with a command are no news
    yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", distance
    loop.call_soon_threadsafe(loop.stop)


def make(work: Path) -> None:
    """Write the rank files of a world, and a DCP folder of 8 ranks, where they are not there yet."""
    if not (work / "world").exists():
        print(f"{WORLD} rank files ...", file=sys.stderr)
        new = work / "world.new"
        shutil.rmtree(new, ignore_errors=True)
        run([sys.executable, "-c", RANK_FILES, str(new), str(WORLD)])
        new.rename(work / "world")
    if not (work / "dcp").exists():
        shapes = work / "matrices.json"
        shapes.write_text(json.dumps(MATRICES))
        hollow(work / "dcp", 8, str(shapes), "--layout", "dcp")


def report(work: Path) -> Iterator[str]:
    """A table of commands: on disk and in the bucket."""
    titles = ("what", "requests", "together", "bytes", "bytes / on disk", "seconds", "on disk", "peak")
    with s3_server() as address, far_away(address) as (far, distance), patch.dict(os.environ, settings(far)):
        bucket = Bucketful(address)
        bucket.put(work / "world")
        # A command's peak is never less than this process had when it started it: what is uploaded counts.
        yield from table_as_measured(titles, chain(rows(work, distance), dcp_rows(work, distance, bucket)))


def rows(work: Path, distance: Distance) -> Iterator[tuple[str, ...]]:
    """Run each command on disk and in the bucket."""
    here, there = work / "world", f"s3://{BUCKET}/world"
    name = min(path.name for path in here.iterdir())
    for words in (["inspect", name], ["inspect", "", "--all-ranks"], ["verify", ""], ["verify", "", "--deep"]):
        command, path, *options = words
        asked = [*CKPTOOLS, command, *options]
        local = run([*asked, str(here / path)])
        yield row(" ".join(filter(None, words)), asked, f"{there}/{path}".rstrip("/"), distance, local, of(here, words))
    digests = ["diff", "--hash", str(work / "digests.json"), "--force"]
    for what, command, *options in (("stats", "stats"), ("diff --hash", *digests)):
        asked = [*CKPTOOLS, command, *options]
        yield row(what, asked, there, distance, run([*asked, str(here)]), of(here, [command]))
    out = work / "out.safetensors"
    local = run([*CKPTOOLS, "consolidate", str(here), "-o", str(out), "--force", *AS_ZEROS])
    to = ["consolidate", there, "-o"]
    yield row("consolidate to disk", [*CKPTOOLS, *to, str(out), "--force"], "", distance, local, of(here, ["verify"]))
    to_bucket = [*CKPTOOLS, *to, f"s3://{BUCKET}/out.safetensors", "--force"]
    yield row("consolidate to the bucket", to_bucket, "", distance, local, of(here, ["verify"]))


def dcp_rows(work: Path, distance: Distance, bucket: Bucketful) -> Iterator[tuple[str, ...]]:
    """Upload the DCP folder, and run commands on it."""
    bucket.put(work / "dcp")
    here, nbytes = work / "dcp", sum(path.stat().st_size for path in (work / "dcp").iterdir())
    to = ["-o", str(work / "out.safetensors"), "--force", *AS_ZEROS]
    for command, *options in (["inspect"], ["verify"], ["consolidate", "--only", "all", *to]):
        asked = [*CKPTOOLS, command, *options]
        read = ckptools.open(here, all_ranks=command != "inspect").cost.nbytes if command != "consolidate" else nbytes
        local = run([*asked, str(here)])
        yield row(f"DCP: {command}", asked, f"s3://{BUCKET}/dcp", distance, local, read)


def of(here: Path, words: Sequence[str]) -> int:
    """Bytes that a command reads on disk: of `inspect` as counted, else the files whole."""
    if words[0] == "inspect" and words[1]:
        return ckptools.open(here / words[1]).cost.nbytes
    if words[0] == "inspect" or len(words) == 2:
        return ckptools.open(here, all_ranks=True).cost.nbytes
    return sum(path.stat().st_size for path in here.iterdir())


def row(what: str, command: Sequence[str], url: str, distance: Distance, local: Run, nbytes: int) -> tuple[str, ...]:
    """Run a command on the bucket; its line of the table."""
    distance.most, requests, got = 0, distance.requests, distance.nbytes
    far = run([*command, *filter(None, [url])])
    requests, got = distance.requests - requests, distance.nbytes - got
    figures = (f"{got / nbytes:.2f} x", f"{far.seconds:.2f} s", f"{local.seconds:.2f} s", size(far.peak))
    return (what, str(requests), str(distance.most), size(got), *figures)
