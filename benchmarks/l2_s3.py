"""What S3Store makes of a connection: chunks from a real S3 server, against obstore's plain get and put.

usage: python -m benchmarks.l2_s3 [--chunks 8] [--chunk-mib 14] [--repetitions 5] [--output FILE]

The server is moto's, started here, in a process of its own: it sends from memory, and to send a part of an object it
reads all of it. So both sides get the same ranges of objects of the same size, over as many connections, in turns,
round by round; the figure is the ratio of the medians. The limit gets them into memory of obstore's, and forgets them;
the store copies them into memory that is there already, as a cache does. The limit puts objects of the size of a
segment; the store asks beforehand whether they are there.
"""

import itertools
import sys
import uuid
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import asdict
from functools import partial
from typing import Any

import obstore
from obstore.store import S3Store as ObstoreS3

from benchmarks.harness import arguments
from benchmarks.l2_rates import GOAL, Settings, finish, print_rates
from hotspan.bench.storage import Figure, in_turns, page_buffers
from hotspan.core.frame import HEADER_BYTES
from hotspan.core.terms import Terms
from hotspan.core.types import PAGE_BYTES, Chunk, ChunkKey
from hotspan.l2.options import S3Options
from hotspan.l2.s3 import S3Store
from hotspan.testing.chunks import chain
from hotspan.tiers.record import Record
from kit.s3_server import CLIENT, S3Server

BUCKET = "benchmark"
TIMEOUT_S = 30.0
PAGE = bytes(PAGE_BYTES)


class Sides:
    """The store, and obstore alone, over one server."""

    def __init__(self, server: S3Server, settings: Settings) -> None:
        client: Any = CLIENT | {"endpoint": server.url}
        self._settings = settings
        self._raw = ObstoreS3(BUCKET, config=client, client_options={"allow_http": True})
        self._store = S3Store(
            f"s3://{BUCKET}/{uuid.uuid4().hex}",
            S3Options(timeout_s=TIMEOUT_S, client=client),
        )
        self._frames = page_buffers(settings.chunks, settings.frame_bytes)
        self._frame = bytes(self._frames[0])
        self._names = (f"text {nth}" for nth in itertools.count())
        self._paths = (f"raw/object/{nth}" for nth in itertools.count())
        text = chain("measured", settings.chunks)
        self._put(text)
        obstore.put(self._raw, "raw/read", PAGE + self._frame, use_multipart=False)
        self._found = self._store.find([chunk.key for chunk in text])

    def get(self, nth: int) -> None:
        found = self._found[nth]
        if found is None or not self._store.get(found, [self._frames[nth]]):
            raise SystemExit("a chunk was gone: the figures would mean nothing")

    def raw_get(self, nth: int) -> None:
        data = obstore.get_range(self._raw, "raw/read", start=PAGE_BYTES, length=self._settings.frame_bytes)
        if len(data) != self._settings.frame_bytes:
            raise SystemExit("an object was gone: the figures would mean nothing")

    def put(self, nth: int) -> None:
        """A chunk of a text of its own."""
        text = chain(next(self._names), 1)
        self._put(text)
        self._store.delete([text[-1].key])

    def raw_put(self, nth: int) -> None:
        path = next(self._paths)
        obstore.put(self._raw, path, self._frame, mode="create", use_multipart=False)
        obstore.delete(self._raw, path)

    def close(self) -> None:
        self._store.close()

    def _put(self, text: Sequence[Chunk]) -> None:
        for chunk, frame in zip(text, self._frames, strict=False):
            record = Record(ChunkKey(chunk.key), chunk.parent, bytes(32), self._settings.payload_bytes, Terms())
            if not self._store.put(record._replace(place=chunk.index), [frame[:HEADER_BYTES], frame[HEADER_BYTES:]]):
                raise SystemExit("a chunk was not taken: the figures would mean nothing")


def measure(server: S3Server, settings: Settings) -> list[Figure]:
    """Both directions."""
    with closing(Sides(server, settings)) as sides, ThreadPoolExecutor(settings.connections) as threads:

        def each(job: Callable[[int], None], times: int) -> None:
            list(threads.map(job, range(times)))

        gets = {
            "store": partial(each, sides.get, settings.chunks),
            "raw": partial(each, sides.raw_get, settings.chunks),
        }
        puts = {
            "store": partial(each, sides.put, settings.chunks),
            "raw": partial(each, sides.raw_put, settings.chunks),
        }
        got = in_turns(gets, settings.chunks * settings.frame_bytes, settings.repetitions)
        put = in_turns(puts, settings.chunks * settings.frame_bytes, settings.repetitions)
    goal = GOAL if settings.connections == 1 else None  # with more, both sides wait for the server's one interpreter
    way = f"{settings.connections} at once"
    return [
        Figure(f"get, {way}", "obstore's get of the same ranges", got["store"], got["raw"], goal),
        Figure(f"put, {way}", "obstore's put of such objects", put["store"], put["raw"], goal),
    ]


def main() -> int:
    options = arguments(__doc__, chunks=8, chunk_mib=14.0, repetitions=5)
    ways = [Settings(options.chunks, options.chunk_mib, options.repetitions, connections) for connections in (1, 2)]
    figures: list[Figure] = []
    for settings in ways:
        with S3Server(BUCKET) as server:
            figures += measure(server, settings)
        print_rates(figures[-2:])
    return finish("l2-s3", [asdict(settings) for settings in ways], figures, options.output)


if __name__ == "__main__":
    sys.exit(main())
