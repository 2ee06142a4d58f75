"""Two replicas at once, on a node over its daemon and behind a router; the last test kills one."""

import json
import os
import re
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest

from hotspan.bench.prose import prose
from hotspan.core.types import CHUNK_TOKENS
from kit.ports import free_port
from tests.daemon.rig import DaemonProcess

from .conftest import Server, serving

pytestmark = pytest.mark.engine

TEXTS = [prose(seed, 1500) for seed in range(8)]
CHUNK = CHUNK_TOKENS
ALL = ("--patience-s", "60")
"""Options with which a replica loads all that an L2 has: how fast this machine is decides nothing."""
EXACT = re.compile(r'^hotspan_router_events_state\{reason="",replica=[^}]*\} (\S+)$', re.MULTILINE)
PIECE, PIECES = 512, re.compile(r"^hotspan_router_index_pieces (\S+)$", re.MULTILINE)
STORED = re.compile(r'^hotspan_cache_store_seconds_count\{[^}]*tier="l2"[^}]*\} (\S+)$', re.MULTILINE)
L2_UP = re.compile(r'^hotspan_cache_tier_up\{[^}]*tier="l2"[^}]*\} 1', re.MULTILINE)
CALL = """
import sys, urllib.request
for body in sys.stdin.buffer.read().splitlines() or [None]:
    request = urllib.request.Request(sys.argv[1], body, {"content-type": "application/json"})
    sys.stdout.write(urllib.request.urlopen(request, timeout=60).read().decode() + "\\n")
"""
PATIENCE_S = 60.0


def call(url: str, body: str = "", within: Sequence[str] = ()) -> str:
    """What a server answers, to each line of `body`; within: a command that asks it."""
    if not within:
        kind = {"content-type": "application/json"}
        answer = httpx.post(url, content=body, headers=kind, timeout=60) if body else httpx.get(url, timeout=60)
        return answer.raise_for_status().text
    command = [*within, sys.executable, "-c", CALL, url]
    return subprocess.run(command, input=body, capture_output=True, text=True, timeout=300, check=True).stdout


def body_of(server: Server, text: str) -> str:
    return json.dumps({"model": server.model, "prompt": text, "max_tokens": 4, "temperature": 0})


def asked_of(answer: str) -> tuple[str, int, int]:
    """An answer's text, the prompt's tokens, and how many of them were cached."""
    said = json.loads(answer)
    usage = said["usage"]
    cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
    return said["choices"][0]["text"], usage["prompt_tokens"], cached


def ask(server: Server, text: str) -> tuple[str, int, int]:
    """What `asked_of` has of a text's answer."""
    return asked_of(call(server.url + "/v1/completions", body_of(server, text)))


def ask_within(server: Server, texts: Sequence[str], within: Sequence[str]) -> list[tuple[str, int, int]]:
    """The same of some texts, one after the other; within: a command that asks."""
    bodies = "\n".join(body_of(server, text) for text in texts)
    return [asked_of(line) for line in call(server.url + "/v1/completions", bodies, within).splitlines()]


def share(asked: Sequence[tuple[str, int, int]]) -> float:
    """Of all whole chunks of the prompts, how much was cached."""
    return sum(cached for *_, cached in asked) / sum(tokens // CHUNK * CHUNK for _, tokens, _ in asked)


def stored(*servers: Server, within: Sequence[str] = ()) -> float:
    """How many chunks these have put into the L2; counted at an engine's steps."""
    for server in servers:
        call(server.url + "/v1/completions", body_of(server, "Hello"), within)
    pages = [call(server.url + "/metrics", within=within) for server in servers]
    return sum(float(count) for page in pages for count in STORED.findall(page))


def settle(chunks: float, *servers: Server, within: Sequence[str] = ()) -> None:
    """Wait until so many chunks are in the L2."""
    deadline = time.monotonic() + PATIENCE_S
    while (now := stored(*servers, within=within)) < chunks:
        assert time.monotonic() < deadline, f"{now:g} of {chunks:g}"


def wait_until_up(server: Server) -> None:
    """Wait until the L2 takes part: its circuit breaker opens where a machine stands still for a second."""
    deadline = time.monotonic() + PATIENCE_S
    while True:
        call(server.url + "/v1/completions", body_of(server, "Hello"))  # counted at an engine's steps
        if L2_UP.search(call(server.url + "/metrics")):
            return
        assert time.monotonic() < deadline, "the L2 stays given up"


def chunks_of(asked: Sequence[tuple[str, int, int]]) -> int:
    """How many whole chunks the prompts have."""
    return sum(tokens // CHUNK for _, tokens, _ in asked)


@dataclass
class Found:
    """An answer. replica: who gave it. expected: tokens that the router took for cached there. cached: that were."""

    prompt: str
    answer: str
    tokens: int
    cached: int
    replica: str
    expected: int


@dataclass
class Stream:
    """What came of a streamed answer."""

    texts: list[str]
    is_whole: bool


class Router:
    """A running `hotspan route`."""

    def __init__(self, url: str, model: str) -> None:
        self.url = url
        self.model = model

    def ask(self, prompt: str, tokens: int = 4, session: str = "") -> Found:
        """An answer to a text, streamed, as chats are. session: the chat's name."""
        texts, said = [], {}
        with self._asked(prompt, tokens, {"x-session-id": session} if session else {}) as answer:
            for line in answer.iter_lines():
                if line.startswith("data: {"):
                    said = json.loads(line[6:])
                    texts += [choice["text"] for choice in said["choices"]]
            replica = answer.headers.get("x-hotspan-replica", "")
            expected = int(answer.headers.get("x-hotspan-cached-tokens", 0))
        cached = (said["usage"].get("prompt_tokens_details") or {}).get("cached_tokens") or 0
        return Found(prompt, "".join(texts), said["usage"]["prompt_tokens"], cached, replica, expected)

    def stream(self, prompt: str, tokens: int) -> Stream:
        """What comes of one until its end or until it breaks off."""
        got = Stream([], False)
        try:
            with self._asked(prompt, tokens, {}) as answer:
                for line in answer.iter_lines():
                    got.is_whole |= line == "data: [DONE]"
                    if line.startswith("data: {"):
                        got.texts += [choice["text"] for choice in json.loads(line[6:])["choices"]]
        except httpx.TransportError:
            assert not got.is_whole
        return got

    @contextmanager
    def _asked(self, prompt: str, tokens: int, headers: Mapping[str, str]) -> Iterator[httpx.Response]:
        body = {"model": self.model, "prompt": prompt, "max_tokens": tokens, "temperature": 0, "ignore_eos": True}
        body |= {"stream": True, "stream_options": {"include_usage": True}}
        with httpx.stream("POST", self.url + "/v1/completions", json=body, headers=headers, timeout=120) as answer:
            assert answer.status_code == 200, answer.read()
            yield answer

    def in_flight(self, server: Server) -> float:
        """How many requests it has sent to a replica that are not answered yet."""
        page = httpx.get(self.url + "/metrics").text
        found = re.search(rf'^hotspan_router_in_flight_requests\{{replica="{server.url}"\}} (\S+)$', page, re.MULTILINE)
        return float(found[1]) if found else 0.0

    def pieces(self) -> float:
        """How many pieces of texts it knows of."""
        return float(PIECES.findall(httpx.get(self.url + "/metrics").text)[0])

    def wait_until_exact(self, replicas: int, seconds: float = 60) -> None:
        """Until the router knows from that many replicas' events what they hold."""
        deadline = time.monotonic() + seconds
        while sum(map(float, EXACT.findall(httpx.get(self.url + "/metrics").text))) < replicas:
            assert time.monotonic() < deadline, httpx.get(self.url + "/metrics").text
            time.sleep(0.1)


@contextmanager
def routing(model: Path, replicas: Sequence[str], log: Path, *more: str) -> Iterator[Router]:
    """`hotspan route` before replicas that it reads the events of."""
    port = free_port()
    words = [word for replica in replicas for word in ("--replica", replica)]
    command = [sys.executable, "-m", "hotspan", "route", *words, "--port", str(port), "--expose"]
    with log.open("wb") as output:
        process = subprocess.Popen(
            [*command, "--model", str(model), "--model-name", str(model), *more],
            stdout=output,
            stderr=subprocess.STDOUT,
        )
    router = Router(f"http://127.0.0.1:{port}", str(model))
    try:
        deadline = time.monotonic() + 120
        while True:
            with suppress(httpx.TransportError):
                if httpx.get(router.url + "/ping").status_code == 200:
                    break
            assert process.poll() is None and time.monotonic() < deadline, log.read_text()
            time.sleep(0.1)
        yield router
    finally:
        process.terminate()
        process.wait(60)


def events(endpoint: str, replay: str) -> str:
    """What makes an engine publish its KV events."""
    return json.dumps(
        {"enable_kv_cache_events": True, "publisher": "zmq", "endpoint": endpoint, "replay_endpoint": replay}
    )


def chat(at: Server | Router, seeds: Iterable[int], replicas: Sequence[Server], turns: int = 4) -> list[Found]:
    """Chats that go on side by side, each turn with all that was said before; answers turn by turn.

    Each has a name: what the router takes for one otherwise, a text's first 4 KiB, changes as long as it is shorter.
    Then the chat's home moves, and on a slow machine, where computing what is new costs much, the chat with it.
    replicas: a turn begins when all that these computed in the one before is in the L2.
    """
    to = at if isinstance(at, Router) else Router(at.url, at.model)
    found: list[Found] = []
    before = stored(*replicas)
    talks = {seed: prose(seed, 500) for seed in seeds}
    with ThreadPoolExecutor(4) as pool:
        for turn in range(turns):
            for server in replicas:  # where a machine stands still for a second, a replica gives the L2 up for a while
                wait_until_up(server)
            asked = pool.map(lambda talk: to.ask(talk[1], 16, f"chat-{talk[0]}"), talks.items())
            answers = dict(zip(talks, asked, strict=True))
            found += answers.values()
            settle(before + sum(one.tokens // CHUNK for one in answers.values()), *replicas)
            talks = {seed: one.prompt + one.answer + prose(1000 * turn + seed, 120) for seed, one in answers.items()}
    return found


def found_again(talk: Sequence[Found], chats: int) -> float:
    """Of all whole chunks that the chats' prompts had one turn before, how much was cached."""
    return sum(one.cached for one in talk) / sum(one.tokens // CHUNK * CHUNK for one in talk[:-chats])


def kill(server: Server) -> None:
    """As a node's failure does: every process of the replica at once."""
    os.killpg(server.process.pid, signal.SIGKILL)
    server.process.wait(60)


@dataclass
class Node:
    """Two replicas on one node with its daemon, and a router before them that follows their KV events."""

    one: Server
    two: Server
    router: Router


@pytest.fixture(scope="module")
def node(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Node]:
    path = tmp_path_factory.mktemp("node")
    daemon = DaemonProcess(size_gib=1.0)
    daemon.start()
    url = f"sagemaker-hyperpod://127.0.0.1:{daemon.port}"
    options = ("--ram-gib", "0.1", "--l2", url, "--l2-option", f"shared_memory_name={daemon.name}", *ALL)
    key = path / "events.key"
    key.touch(0o600)
    key.write_text(secrets.token_hex(32))
    keyed = ("--kv-events-key", str(key))

    def start(name: str, *more: str) -> AbstractContextManager[Server]:
        return serving(tiny_model, path / name, *options, *more, ready=False)

    try:
        with ExitStack() as stack:
            ends = [(f"ipc://{path}/{name}.events", f"ipc://{path}/{name}.replay") for name in ("one", "two")]
            one, two = (
                stack.enter_context(start(name, "--kv-events-config", events(*end), *keyed))
                for name, end in zip(("one", "two"), ends, strict=True)
            )
            one.wait_until_ready()
            two.wait_until_ready()
            replicas = [
                f"{server.url},events={endpoint},replay={replay}"
                for server, (endpoint, replay) in zip((one, two), ends, strict=True)
            ]
            yield Node(one, two, stack.enter_context(routing(tiny_model, replicas, path / "router", *keyed)))
    finally:
        daemon.close()


def test_two_replicas_of_a_node_share_its_daemon(node: Node) -> None:
    """What either computes the other loads, both at once."""
    one, two = node.one, node.two
    before = stored(one, two)
    with ThreadPoolExecutor(4) as pool:
        first = list(pool.map(lambda n: ask((one, two)[n % 2], TEXTS[n]), range(len(TEXTS))))
        settle(before + chunks_of(first), one, two)
        second = list(pool.map(lambda n: ask((two, one)[n % 2], TEXTS[n]), range(len(TEXTS))))
    assert [text for text, *_ in first] == [text for text, *_ in second]
    assert share(first) == 0 and share(second) == 1


def test_the_router_knows_what_a_replica_computed_for_others(node: Node) -> None:
    """Asked past the router, a replica says what it holds now, and the router sends there who asks for it."""
    node.router.wait_until_exact(2)
    for seed in range(40, 46):
        text, server = prose(seed, 1500), (node.one, node.two)[seed % 2]
        pieces = node.router.pieces()
        ask(server, text)
        deadline = time.monotonic() + PATIENCE_S
        while node.router.pieces() < pieces + len(text) // PIECE // 2:
            assert time.monotonic() < deadline, "the router was not told"
            time.sleep(0.05)
        found = node.router.ask(text + " And then?")
        assert found.expected >= 1024 and found.cached >= 1024 and found.replica == server.url


def test_chats_hit_behind_the_router_as_at_one_replica(node: Node) -> None:
    """Rounds of chats, at one replica or spread over two, find nine tenths of the whole chunks of the turns before."""
    replicas = (node.one, node.two)
    alone = chat(node.one, range(100, 108), replicas)
    routed = chat(node.router, range(200, 208), replicas)
    assert {found.replica for found in routed} == {node.one.url, node.two.url}
    assert found_again(alone, 8) >= 0.9 and found_again(routed, 8) >= 0.9, (alone, routed)


def test_a_killed_replica_fails_no_request_that_it_had_not_answered(node: Node) -> None:
    """Who has no byte when it dies is answered by the other replica, and chats go on warm there."""
    for seed in (300, 800, 900):
        talk = chat(node.router, range(seed, seed + 12), (node.one, node.two), turns=2)
        moved = [found for found in talk[-12:] if found.replica == node.one.url]
        if len(moved) >= 4:
            break
    assert len(moved) >= 4
    os.killpg(node.one.process.pid, signal.SIGSTOP)  # so that it answers none of what it is asked from here on
    with ThreadPoolExecutor(12) as pool:
        streaming = [pool.submit(node.router.stream, prose(seed, 1300), 64) for seed in range(400, 412)]
        deadline = time.monotonic() + PATIENCE_S
        while not node.router.in_flight(node.one):
            assert time.monotonic() < deadline, "none is sent there"
            time.sleep(0.005)
        kill(node.one)
        streams = [future.result() for future in streaming]
    assert all(stream.is_whole for stream in streams)
    wait_until_up(node.two)
    again = [node.router.ask(found.prompt + " And then?") for found in moved]
    assert {found.replica for found in again} == {node.two.url}
    asked = [(now.answer, was.tokens, now.cached) for was, now in zip(moved, again, strict=True)]
    assert share(asked) >= 0.6
