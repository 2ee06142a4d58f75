"""What RedisStore makes of a connection: chunks from a real redis-server, against a loop that reads and forgets.

usage: python -m benchmarks.l2_redis [--chunks 16] [--chunk-mib 14] [--repetitions 9] [--output FILE]

The server is started here, and reached over TCP and over a Unix socket. Both sides read the same values over as many
connections, in turns, round by round; the figure is the ratio of the medians. The limit asks for values of 1 MiB, four
ahead as the store does, and receives them all into one buffer of 1 MiB; the store receives every chunk into memory of
its own, as a cache does. What the loop makes of that, and redis-py of a chunk in one value, is shown beside them.
"""

import os
import socket
import sys
import tempfile
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import asdict
from pathlib import Path

import redis

from benchmarks.harness import arguments
from benchmarks.l2_rates import GOAL, Settings, finish, print_rates
from hotspan.bench.storage import Figure, in_turns, page_buffers
from hotspan.core.terms import Terms
from hotspan.core.types import MIB, PAGE_BYTES, ChunkKey
from hotspan.l2.options import RedisOptions
from hotspan.l2.redis import RedisStore
from hotspan.tiers.record import Record
from kit.redis_server import RedisServer, redis_server

AHEAD = 4
RAW = "raw GETs of 1 MiB"


class RawConnection:
    """A plain socket that gets values and forgets them."""

    def __init__(self, server: RedisServer, is_local: bool) -> None:
        self._socket = socket.socket(socket.AF_UNIX if is_local else socket.AF_INET)
        self._socket.connect(str(server.socket) if is_local else ("127.0.0.1", server.port))
        self._buffer = memoryview(bytearray(MIB + 64))

    def set(self, name: bytes, value: memoryview) -> None:
        self._socket.sendall(b"*3\r\n$3\r\nSET\r\n$%d\r\n%b\r\n$%d\r\n" % (len(name), name, len(value)))
        self._socket.sendall(value)
        self._socket.sendall(b"\r\n")
        if self._socket.recv(64) != b"+OK\r\n":
            raise SystemExit("the server did not take a value")

    def get(self, names: Sequence[bytes], sizes: Sequence[int], into: memoryview | None = None) -> None:
        """Ask for some, and for the next one whenever one has come. into: where to instead, line ends and all."""
        requests = [b"*2\r\n$3\r\nGET\r\n$%d\r\n%b\r\n" % (len(name), name) for name in names]
        self._socket.sendall(b"".join(requests[:AHEAD]))
        for number, size in enumerate(sizes, AHEAD):
            buffer = self._buffer if into is None else into[(number - AHEAD) * MIB :]
            got, whole = 0, len(b"$%d\r\n\r\n" % size) + size
            while got < whole:
                count = self._socket.recv_into(buffer[got:whole])
                if not count:
                    raise SystemExit("the server closed the connection")
                got += count
            if number < len(requests):
                self._socket.sendall(requests[number])

    def close(self) -> None:
        self._socket.close()


def measure(server: RedisServer, settings: Settings, connections: int, is_local: bool) -> list[Figure]:
    """Over one way to the server."""
    frames = page_buffers(settings.chunks, settings.frame_bytes)
    spare = page_buffers(settings.chunks, settings.frame_bytes + PAGE_BYTES)
    url = f"unix://{server.socket}" if is_local else server.url
    keys = [ChunkKey(os.urandom(32)) for _ in frames]
    sizes = [min(MIB, settings.frame_bytes - at) for at in range(0, settings.frame_bytes, MIB)]
    names = [[b"raw:%d:%d" % (nth, part) for part in range(len(sizes))] for nth in range(settings.chunks)]
    raws = [RawConnection(server, is_local) for _ in range(connections)]
    client = redis.Redis.from_url(url)
    with closing(RedisStore(url, RedisOptions(timeout_s=10))) as store, ThreadPoolExecutor(connections) as threads:
        for nth, (key, frame) in enumerate(zip(keys, frames, strict=True)):
            store.put(Record(key, None, bytes(32), settings.payload_bytes, Terms(), nth), [frame])
            for name, part in zip(names[nth], range(0, settings.frame_bytes, MIB), strict=True):
                raws[0].set(name, frame[part : part + MIB])
            client.set(f"whole:{nth}", bytes(frame))
        found = store.find(keys)

        def get(nth: int) -> None:
            one = found[nth]
            if one is None or not store.get(one, [frames[nth]]):
                raise SystemExit("a chunk was gone: the figures would mean nothing")

        def each(job: Callable[[int], object]) -> None:
            """On as many threads as there are connections, each with its share of the chunks."""

            def share(first: int) -> None:
                for nth in range(first, settings.chunks, connections):
                    job(nth)

            list(threads.map(share, range(connections)))

        jobs: dict[str, Callable[[], object]] = {
            "store": lambda: each(get),
            "raw": lambda: each(lambda nth: raws[nth % connections].get(names[nth], sizes)),
            "raw, kept": lambda: each(lambda nth: raws[nth % connections].get(names[nth], sizes, spare[nth])),
            "redis-py": lambda: each(lambda nth: client.get(f"whole:{nth}")),
        }
        rates = in_turns(jobs, settings.chunks * settings.frame_bytes, settings.repetitions)
    for raw in raws:
        raw.close()
    client.close()
    server.ask("FLUSHALL")
    way = f"{'Unix socket' if is_local else 'TCP'}, {connections} connection{'s' if connections > 1 else ''}"
    return [
        Figure(f"get, {way}", RAW, rates["store"], rates["raw"], GOAL),
        Figure(f"the raw loop into memory of its own, {way}", RAW, rates["raw, kept"], rates["raw"]),
        Figure(f"redis-py's get, {way}", RAW, rates["redis-py"], rates["raw"]),
    ]


def main() -> int:
    options = arguments(__doc__, chunks=16, chunk_mib=14.0, repetitions=9)
    settings = Settings(options.chunks, options.chunk_mib, options.repetitions)
    figures: list[Figure] = []
    with tempfile.TemporaryDirectory() as scratch, redis_server(Path(scratch)) as server:
        for connections in (1, 2):
            for is_local in (False, True):
                figures += measure(server, settings, connections, is_local)
                print_rates(figures[-3:])
    return finish("l2-redis", asdict(settings), figures, options.output)


if __name__ == "__main__":
    sys.exit(main())
