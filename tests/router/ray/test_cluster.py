"""Two real replicas on a Ray of this machine, as `hotspan deploy ray` starts them, reached through HAProxy."""

import contextlib
import csv
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest

from hotspan.cli.admin_client import Admin
from hotspan.demo.model import make_demo_model
from hotspan.router.ray.reports import RECEIVED_S
from kit.ports import free_port
from tests.server.conftest import ENGINE, ENVIRONMENT, UNCOMPILED

pytest.importorskip("ray.serve", reason="Ray Serve is not installed: pip install 'hotspan[ray]'")

pytestmark = [pytest.mark.engine, pytest.mark.timeout(400)]

START_S, STOP_S = 240.0, 60.0
SESSIONS = 4
TOKENS = 1000  # about a second's
PICKED = "http-hotspan-via-ingress-request-router"  # HAProxy's name for requests that the picker decided
HEALTH_BYTES = 500  # a request for a server's health is shorter
LONGEST = 4000  # --max-model-len is 4096


@dataclass
class Cluster:
    """A running `hotspan deploy ray`."""

    process: subprocess.Popen[bytes]
    port: int
    stats_port: int
    model: str
    log: Path
    places: tuple[Path, ...] = ()

    def chat(self, session: str, text: str, **more: Any) -> dict[str, Any]:
        """One answer. Raises: HTTPError."""
        with self.open(session, text, **more) as answer:
            found: dict[str, Any] = json.load(answer)
        return found

    def open(self, session: str, text: str, **more: Any) -> Any:
        body = {"model": self.model, "messages": [{"role": "user", "content": text}], "max_tokens": 4, **more}
        headers = {"content-type": "application/json", "x-session-id": session}
        url = f"http://127.0.0.1:{self.port}/v1/chat/completions"
        return urllib.request.urlopen(urllib.request.Request(url, json.dumps(body).encode(), headers), timeout=60)

    def servers(self) -> dict[int, psutil.Process]:
        """The replicas' servers, by the ports that only their actors know."""
        found = {}
        for process in psutil.Process(self.process.pid).children(recursive=True):
            with contextlib.suppress(psutil.Error):
                words = process.cmdline()
                if words[1:4] == ["-m", "hotspan", "serve"]:
                    found[int(words[words.index("--port") + 1])] = process
        return found

    def counts(self) -> dict[int, float]:
        """How many requests each server has answered."""
        return {port: self._sum(port, "vllm:request_success_total") for port in self.servers()}

    def is_reached(self) -> bool:
        """Whether HAProxy has given each replica a request that the picker chose it for: both hear of it in time."""
        with urllib.request.urlopen(f"http://127.0.0.1:{self.stats_port}/stats;csv", timeout=60) as answer:
            rows = list(csv.DictReader(answer.read().decode().removeprefix("# ").splitlines()))
        given = [int(row["stot"]) for row in rows if row["pxname"] == PICKED and "-replica-" in row["svname"]]
        return len(given) == 2 and all(given)

    @contextlib.contextmanager
    def stopped(self) -> Iterator[None]:
        """No server reads or answers anything meanwhile."""
        servers = self.servers().values()
        try:
            for process in servers:
                process.suspend()
            yield
        finally:
            for process in servers:
                process.resume()

    def unread(self) -> dict[int, int]:
        """How many requests for completions wait in the sockets of each server."""
        sockets = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
        found = dict.fromkeys(self.servers(), 0)
        for _, local, _, _, queues, *_ in sockets:
            port = int(local.split(":")[1], 16)
            if port in found and int(queues.split(":")[1], 16) > HEALTH_BYTES:
                found[port] += 1
        return found

    def running(self, port: int) -> float:
        """How many requests a server works on."""
        return self._sum(port, "vllm:num_requests_running")

    def _sum(self, port: int, name: str) -> float:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=60) as answer:
            text = answer.read().decode()
        return sum(float(n) for n in re.findall(rf"^{name}\{{.*\}} (\S+)$", text, re.M))

    def actor_of(self, port: int) -> psutil.Process:
        """The actor whose server listens there: its parent's parent."""
        actor = self.servers()[port].parent()
        while actor is not None and not actor.cmdline()[0].startswith("ray::ServeReplica"):
            actor = actor.parent()
        assert actor is not None
        return actor


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    model = make_demo_model(tmp_path_factory.mktemp("models") / "tiny", "tiny").path
    port, stats_port, log = free_port(), free_port(), tmp_path_factory.mktemp("ray") / "log"
    # Sockets have short names.
    place = Path(f"/tmp/hotspan-ray-{os.getpid()}")
    place.mkdir()
    environment = {key: value for key, value in os.environ.items() if not key.startswith(("VLLM_", "HOTSPAN_", "RAY_"))}
    environment |= (
        ENVIRONMENT
        | UNCOMPILED
        | {
            "RAY_USAGE_STATS_ENABLED": "0",
            "RAY_TMPDIR": str(place),
            # multiprocessing leaves a directory there in each process that is killed.
            "TMPDIR": str(tmp_path_factory.mktemp("tmp")),
            "RAY_SERVE_HAPROXY_CONFIG_FILE_LOC": f"{place}/haproxy.cfg",
            "RAY_SERVE_HAPROXY_SOCKET_PATH": f"{place}/admin.sock",
            "RAY_SERVE_HAPROXY_SERVER_STATE_BASE": str(place),
            "RAY_SERVE_HAPROXY_SERVER_STATE_FILE": f"{place}/server-state",
            "RAY_SERVE_HAPROXY_METRICS_PORT": str(free_port()),
            "RAY_SERVE_HAPROXY_STATS_PORT": str(stats_port),
            "RAY_SERVE_HAPROXY_NBTHREAD": "1",
            # For load balancers that learn slowly; a test has none.
            "RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S": "0.1",
        }
    )
    options = ["--replicas", "2", "--gpus", "0", "--cpus", "1", "--port", str(port)]
    command = [sys.executable, "-m", "hotspan", "deploy", "ray", str(model), *options]
    with log.open("wb") as output:
        process = subprocess.Popen(
            [*command, "--", "--insecure", "--ram-gib", "0.25", *ENGINE],
            stdout=output,
            stderr=subprocess.STDOUT,
            env=environment,
            start_new_session=True,
        )
    found = Cluster(process, port, stats_port, str(model), log, (place, Path(environment["TMPDIR"])))
    try:
        deadline = time.monotonic() + START_S
        while f"hotspan is ready on http://0.0.0.0:{port}" not in log.read_text(errors="replace"):
            assert process.poll() is None and time.monotonic() < deadline, log.read_text(errors="replace")[-5000:]
            time.sleep(0.2)
        number = 0
        while not found.is_reached():
            assert time.monotonic() < deadline
            number += 1
            found.chat(f"first-{number}", "hello")
        time.sleep(RECEIVED_S)  # those that went elsewhere meanwhile are no longer counted
        yield found
    finally:
        started = [process] if process.poll() is not None else [*psutil.Process(process.pid).children(recursive=True)]
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(STOP_S)
        for each in (process, *started):
            with contextlib.suppress(psutil.Error, ProcessLookupError):
                each.kill()
        shutil.rmtree(place, ignore_errors=True)


def text_of(session: int, turns: int) -> str:
    return " ".join(f"s{session}t{turn}w{word}" for turn in range(turns) for word in range(40))


def test_sessions_hit_their_caches(cluster: Cluster) -> None:
    """Sessions that begin before any is answered are spread evenly, and each goes on where it is cached."""
    before = cluster.counts()
    assert len(before) == 2

    def talk(session: int, turns: int) -> dict[str, Any]:
        usage: dict[str, Any] = cluster.chat(f"session-{session}", text_of(session, turns))["usage"]
        return usage

    with ThreadPoolExecutor(SESSIONS) as pool:
        with cluster.stopped():
            answers = [pool.submit(talk, session, 2) for session in range(SESSIONS)]
            deadline = time.monotonic() + START_S
            while sum((unread := cluster.unread()).values()) < SESSIONS:
                assert time.monotonic() < deadline, unread
                time.sleep(0.05)
        last = [answer.result() for answer in answers]
    begun = cluster.counts()
    assert [begun[port] - before[port] for port in before] == [SESSIONS / 2] * 2
    for turns in (3, 4):
        for session in range(SESSIONS):
            usage = talk(session, turns)
            # Blocks are of 128 tokens, and an earlier round's last one has the template's end in it.
            assert usage["prompt_tokens_details"]["cached_tokens"] >= last[session]["prompt_tokens"] - 2 * 128
            last[session] = usage
    after = cluster.counts()
    assert sum(after.values()) - sum(before.values()) == 3 * SESSIONS


def test_a_session_has_one_replica(cluster: Cluster) -> None:
    """Requests of one session, one after another, all reach the server that has its text."""
    before = cluster.counts()
    for _ in range(5):
        cluster.chat("alone", text_of(100, 4))
    after = cluster.counts()
    assert sorted(after[port] - before[port] for port in before) == [0, 5]


def test_streams_flow(cluster: Cluster) -> None:
    """The first token of a stream is here while the server still computes the others, and all come, to the end."""
    with cluster.open("stream", "hello", stream=True, max_tokens=LONGEST, ignore_eos=True) as answer:
        assert answer.headers["content-type"].startswith("text/event-stream")
        assert answer.readline().startswith(b"data: ")
        assert sum(map(cluster.running, cluster.servers())) == 1, "it came in one piece"
        parts = [line for line in answer if line.startswith(b"data: ")]
    assert parts[-1] == b"data: [DONE]\n" and len(parts) > 32


def test_ends_are_reported(cluster: Cluster) -> None:
    """Clients that hang up and requests that are refused leave the replicas as usable as before."""
    for _ in range(20):
        answer = cluster.open("gone", "hello", stream=True, max_tokens=500, ignore_eos=True)
        answer.readline()
        answer.close()
    with pytest.raises(urllib.error.HTTPError) as caught:
        cluster.chat("wrong", "hello", max_tokens=-1)
    assert caught.value.code == 400
    cluster.chat("after", "hello")


def test_what_was_invalidated_at_each_replica_is_gone(cluster: Cluster) -> None:
    """Without an L2 each is asked, as docs/ray.md says: by the token that it left for this user, at its own port."""
    text, tags = text_of(200, 6), {"kv_transfer_params": {"tags": ["ray-manual"]}}
    cluster.chat("tagged", text, **tags)
    cached = lambda: cluster.chat("tagged", text, **tags)["usage"]["prompt_tokens_details"]["cached_tokens"]  # noqa: E731
    assert cached() > 0
    for port in cluster.servers():
        receipt = Admin(server=f"http://127.0.0.1:{port}").post("/hotspan/cache/invalidate", {"tags": ["ray-manual"]})
        assert receipt["is_durable"], receipt
    assert not cached()


def test_no_text_is_written_down(cluster: Cluster) -> None:
    """Neither what was asked nor what was answered stands in a file of Ray's, HAProxy's or the replicas'."""
    marker = "zanzibarquillfeather"
    answer = cluster.chat("secret", f"{marker} " * 40)["choices"][0]["message"]["content"]
    files = [file for place in (*cluster.places, cluster.log.parent) for file in place.rglob("*") if file.is_file()]
    assert len(files) > 5
    for file in files:
        data = file.read_bytes()
        assert marker.encode() not in data, file
        assert len(answer) < 12 or answer.encode() not in data, file


def test_a_replica_dies(cluster: Cluster) -> None:
    """A replica that is killed fails no request that had not begun to answer, and its sessions go on elsewhere."""
    before = cluster.counts()
    cluster.chat("victim", text_of(200, 2))
    [port] = [each for each, count in cluster.counts().items() if count > before[each]]
    actor, server = cluster.actor_of(port), cluster.servers()[port]

    def ask(_: int) -> int:
        answer = cluster.chat("victim", text_of(200, 2), max_tokens=TOKENS, ignore_eos=True)
        return int(answer["usage"]["completion_tokens"])

    with ThreadPoolExecutor(4) as pool:
        asked = [pool.submit(ask, number) for number in range(4)]
        deadline = time.monotonic() + 60
        while not cluster.running(port):
            assert time.monotonic() < deadline, "none is sent there"
            time.sleep(0.01)
        stopped = [server, *server.children(recursive=True)]
        for process in stopped:
            process.suspend()  # so that it answers none of what it is asked from here on
        assert not any(answer.done() for answer in asked)
        actor.kill()
        assert [answer.result() for answer in asked] == [TOKENS] * 4
    for process in stopped:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.resume()
    for _ in range(3):
        cluster.chat("victim", text_of(200, 2))
    assert cluster.chat("victim", text_of(200, 2))["usage"]["prompt_tokens_details"]["cached_tokens"] > 0
    deadline = time.monotonic() + 60
    while server.is_running() and server.status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < deadline, "the server outlived its actor"
        time.sleep(0.1)


def test_it_ends_on_a_signal(cluster: Cluster) -> None:
    """SIGTERM takes the application back and leaves no process behind; the last of these tests."""
    started = psutil.Process(cluster.process.pid).children(recursive=True)
    cluster.process.send_signal(signal.SIGTERM)
    assert cluster.process.wait(STOP_S) == 0
    _, left = psutil.wait_procs(started, timeout=60)
    assert not left
