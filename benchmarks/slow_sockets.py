"""A healthy client's p99 beside a thousand sockets that never end their requests.

usage: python -m benchmarks.slow_sockets [--rounds 25] [--output FILE]

The server is a process of its own that answers at once, with hotspan's connections. Half of the slow sockets send half
a head, the others half a body. Rounds with and without them alternate; the ratio is the median of the rounds' ratios.
Goal: at most 1.2. That a request takes no more operations beside slow sockets is a test
(tests/server/lmi/test_connections.py).
"""

import argparse
import contextlib
import json
import resource
import socket
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import uvicorn

from hotspan.bench.machine import machine_facts
from hotspan.http.connections import HttpLimits, connection_class
from kit.child import Child
from kit.measure import paired_ratio, quantile
from tests.server.lmi.test_connections import GET, HALF_A_BODY, plain

GOAL, SLOW, REQUESTS = 1.2, 1000, 600


def raise_file_limit() -> None:
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def serve(fd: int) -> None:
    """The server's process."""
    raise_file_limit()
    connections = connection_class(HttpLimits(head_s=600, stall_s=600, connections=4096))
    config = uvicorn.Config(plain, lifespan="off", log_level="critical", http=connections)
    uvicorn.Server(config).run([socket.socket(fileno=fd)])


@contextlib.contextmanager
def server() -> Iterator[tuple[int, psutil.Process]]:
    with socket.create_server(("127.0.0.1", 0), backlog=2048) as listener:
        fd, port = listener.fileno(), listener.getsockname()[1]
        command = [sys.executable, "-m", "benchmarks.slow_sockets", "--serve", str(fd)]
        process = Child(command, port, pass_fds=[fd])
    with process:
        yield port, psutil.Process(process.pid)


def p99_ms(port: int) -> float:
    took = []
    with socket.create_connection(("127.0.0.1", port)) as healthy:
        healthy.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for _ in range(REQUESTS):
            began = time.perf_counter()
            healthy.sendall(GET)
            while not (part := healthy.recv(4096)).endswith(b"xx"):
                assert part, "the server hung up"
            took.append(1e3 * (time.perf_counter() - began))
    return quantile(took, 0.99)


@contextlib.contextmanager
def slow_sockets(port: int, process: psutil.Process) -> Iterator[None]:
    """They, which the server has accepted and still holds at the end."""
    with contextlib.ExitStack() as stack:
        slow = [stack.enter_context(socket.create_connection(("127.0.0.1", port))) for _ in range(SLOW)]
        for number, held in enumerate(slow):
            held.sendall(HALF_A_BODY if number % 2 else GET[:-2])
        while process.num_fds() < len(slow):
            time.sleep(0.02)
        yield
        assert process.num_fds() >= len(slow), "the server hung up on some"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=25)
    parser.add_argument("--output", type=Path)
    parser.add_argument("--serve", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve is not None:
        serve(options.serve)
        return
    raise_file_limit()
    alone, beside = [], []
    with server() as (port, process):
        p99_ms(port)
        for _ in range(options.rounds):
            alone.append(p99_ms(port))
            with slow_sockets(port, process):
                beside.append(p99_ms(port))
    ratio = paired_ratio(beside, alone).median
    found = {"ratio": ratio, "goal": GOAL, "alone_p99_ms": alone, "beside_p99_ms": beside, "machine": machine_facts()}
    text = json.dumps(found, indent=2, default=str)
    print(text)
    if options.output:
        options.output.write_text(text + "\n")
    sys.exit(ratio > GOAL)


if __name__ == "__main__":
    main()
