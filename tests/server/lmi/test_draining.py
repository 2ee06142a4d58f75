"""A server that is told to stop, as a process: who is served to the end, who is sent away, and how long it takes."""

import asyncio
import http.client
import json
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

import pytest
import uvicorn

from hotspan.http.serving import CUT_S, DrainingServer
from kit.waiting import until_async
from tests.bench.simulated import in_simulated_time

from .fake_engine import FakeEngine
from .serving import client, front
from .test_life import ENDLESS

_SERVER = """
import asyncio, sys
sys.path.insert(0, ".")
import uvicorn
from hotspan.http import serving
from hotspan.http.connections import HttpLimits, connection_class
from tests.server.lmi.fake_engine import FakeEngine, Step
from tests.server.lmi.serving import front
class Held(FakeEngine):  # ends no answer before a line comes
    async def _stepped(self):
        async for number, step in super()._stepped():
            if step.finish_reason:
                await asyncio.to_thread(sys.stdin.readline)
            yield number, step

serving.CUT_S = 60  # so that a machine that stands still does not use it up
steps = int(sys.argv[1])
app = front(Held((*[Step(((1, "a"),), "a")] * steps, Step((), "", "length")), delay_s=0.02))
options = {"lifespan": "off", "log_level": "critical", "timeout_graceful_shutdown": 1}
config = uvicorn.Config(app, port=0, http=connection_class(HttpLimits()), **options)
server = serving.DrainingServer(config, app.admission, float(sys.argv[2]), lambda: "")
server._ready_line = lambda: str(server.servers[0].sockets[0].getsockname()[1])
server.run()
"""


class Process:
    """A running server."""

    def __init__(self, steps: int, drain_s: float) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", _SERVER, str(steps), str(drain_s)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            bufsize=1,
        )
        assert self.process.stdout is not None
        self.port = int(self.process.stdout.readline())

    def end_answers(self) -> None:
        """Let an answer that has come to its end say so."""
        assert self.process.stdin is not None
        self.process.stdin.write("\n")

    def ask(self, path: str, body: Any = None) -> http.client.HTTPResponse:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        data = None if body is None else json.dumps(body)
        connection.request("GET" if body is None else "POST", path, data, {"content-type": "application/json"})
        return connection.getresponse()


@pytest.fixture
def servers() -> Iterator[list[Process]]:
    made: list[Process] = []
    yield made
    for one in made:
        one.process.kill()
        one.process.wait()


STREAM = {"inputs": "Say", "stream": True}


def test_a_stop_lets_requests_end(servers: list[Process]) -> None:
    """A stream that runs when the signal comes is complete; the port tells the others to go elsewhere."""
    servers.append(server := Process(steps=50, drain_s=300))
    stream = server.ask("/invocations", STREAM)
    stream.readline()
    server.process.send_signal(signal.SIGTERM)
    deadline = time.monotonic() + 60
    while (ping := server.ask("/ping")).status == 200:
        assert time.monotonic() < deadline
    assert ping.status == 503 and json.load(ping) == {"status": "Draining"}
    assert (late := server.ask("/invocations", STREAM)).status == 503 and late.headers["retry-after"] == "1"
    server.end_answers()
    assert json.loads(stream.read().splitlines()[-1])["generated_text"] == "a" * 50
    assert server.process.wait(60) == 0


def test_a_stop_has_an_end(servers: list[Process]) -> None:
    """A stream that does not end in time ends with an error, and the process with it."""
    servers.append(server := Process(steps=10_000, drain_s=60.5))
    stream = server.ask("/invocations", STREAM)
    stream.readline()
    server.process.send_signal(signal.SIGTERM)
    assert json.loads(stream.read().splitlines()[-1])["error"]["code"] == 503
    assert server.process.wait(60) == 0


@in_simulated_time
async def test_a_stop_ends_in_time() -> None:
    """A request without end is cut off as long before the time to drain is over as errors and connections may take."""
    engine = FakeEngine(ENDLESS, delay_s=0.01)
    app = front(engine)
    server = DrainingServer(uvicorn.Config(app), app.admission, 30, lambda: "")
    loop = asyncio.get_running_loop()
    async with client(app) as http:
        asked = asyncio.create_task(http.post("/invocations", json={"inputs": "Say"}))
        await until_async(lambda: engine.running == 1)
        began_s = loop.time()
        server._stop(signal.SIGTERM)
        assert server._draining is not None and not server.should_exit
        await server._draining
        assert server.should_exit and loop.time() - began_s == pytest.approx(30 - CUT_S, abs=0.1)
        assert (await asked).status_code == 503


def test_a_second_signal_cuts_off(servers: list[Process]) -> None:
    """Who insists is obeyed at once."""
    servers.append(server := Process(steps=10_000, drain_s=300))
    stream = server.ask("/invocations", STREAM)
    stream.readline()
    for number in (signal.SIGTERM, signal.SIGINT):
        server.process.send_signal(number)
        time.sleep(0.2)
    server.process.wait(60)
