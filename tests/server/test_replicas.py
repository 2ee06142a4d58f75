"""Two replicas at once: on one node over its daemon, on two nodes over Redis, and one that was killed and came back."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import pytest

from hotspan.bench.prose import prose
from tests.daemon.rig import DaemonProcess
from tests.tiers.stores.servers import INSTALL_REDIS

from .conftest import Server, serving

pytestmark = pytest.mark.engine

TEXTS = [prose(seed, 1500) for seed in range(4)]
CHUNK = 256
POST = """
import sys, urllib.request
request = urllib.request.Request(sys.argv[1], sys.stdin.buffer.read(), {"content-type": "application/json"})
print(urllib.request.urlopen(request, timeout=60).read().decode())
"""


def ask(server: Server, text: str, within: Sequence[str] = ()) -> tuple[str, int, int]:
    """The answer, the prompt's tokens, and how many of them were cached."""
    body = json.dumps({"model": server.model, "prompt": text, "max_tokens": 4, "temperature": 0})
    command = [*within, sys.executable, "-c", POST, server.url + "/v1/completions"]
    done = subprocess.run(command, input=body, capture_output=True, text=True, timeout=90, check=True)
    answer = json.loads(done.stdout)
    usage = answer["usage"]
    cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
    return answer["choices"][0]["text"], usage["prompt_tokens"], cached


def share(asked: Sequence[tuple[str, int, int]]) -> float:
    """Of all whole chunks of the prompts, how much was cached."""
    return sum(cached for *_, cached in asked) / sum(tokens // CHUNK * CHUNK for _, tokens, _ in asked)


def kill(server: Server) -> None:
    """As a node's failure does: every process of the replica at once."""
    os.killpg(server.process.pid, signal.SIGKILL)
    server.process.wait(30)


def test_two_replicas_of_a_node_share_its_daemon(tiny_model: Path, tmp_path: Path) -> None:
    """What either computes the other loads, both at once; one is killed, the other goes on; it comes back warm."""
    daemon = DaemonProcess(size_gib=0.25)
    daemon.start()
    url = f"sagemaker-hyperpod://127.0.0.1:{daemon.port}"
    options = ("--ram-gib", "0.1", "--l2", url, "--l2-option", f"shared_memory_name={daemon.name}")
    try:
        with ExitStack() as stack, ThreadPoolExecutor() as pool:
            one = stack.enter_context(serving(tiny_model, tmp_path / "one", *options, ready=False))
            two = stack.enter_context(serving(tiny_model, tmp_path / "two", *options, ready=False))
            one.wait_until_ready()
            two.wait_until_ready()
            first = list(pool.map(lambda n: ask((one, two)[n % 2], TEXTS[n]), range(4)))
            time.sleep(2)
            second = list(pool.map(lambda n: ask((two, one)[n % 2], TEXTS[n]), range(4)))
            assert [text for text, *_ in first] == [text for text, *_ in second]
            assert share(first) == 0 and share(second) >= 0.5
            kill(one)
            assert ask(two, TEXTS[0])[0] == first[0][0]
            again = stack.enter_context(serving(tiny_model, tmp_path / "again", *options))
            warm = [ask(again, text) for text in TEXTS]
            assert [text for text, *_ in warm] == [text for text, *_ in first]
            assert share(warm) >= 0.5
    finally:
        daemon.close()


@pytest.fixture
def nodes() -> Iterator[tuple[str, str, str]]:
    """Three network namespaces: a store's, and two nodes that each have a link to it (10.77.N.2 to 10.77.N.1)."""
    if os.geteuid() or shutil.which("ip") is None:
        pytest.skip("network namespaces need root and iproute2")
    names = [f"hotspan-{os.getpid()}-{name}" for name in ("store", "one", "two")]
    links = [f"hs{os.getpid() % 100000}{side}" for side in "ab"]
    run = [["ip", "netns", "add", name] for name in names]
    run += [["ip", "-n", name, "link", "set", "lo", "up"] for name in names]
    for number, (link, node) in enumerate(zip(links, names[1:], strict=True)):
        run += [
            ["ip", "-n", names[0], "link", "add", link, "type", "veth", "peer", "name", "up0", "netns", node],
            ["ip", "-n", names[0], "addr", "add", f"10.77.{number}.1/24", "dev", link],
            ["ip", "-n", node, "addr", "add", f"10.77.{number}.2/24", "dev", "up0"],
            ["ip", "-n", names[0], "link", "set", link, "up"],
            ["ip", "-n", node, "link", "set", "up0", "up"],
        ]
    try:
        for command in run:
            done = subprocess.run(command, capture_output=True, text=True)
            if done.returncode:
                pytest.skip(f"no network namespaces here: {' '.join(command)}: {done.stderr.strip()}")
        yield names[0], names[1], names[2]
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "del", name], capture_output=True)


def test_two_nodes_share_redis(nodes: tuple[str, str, str], tiny_model: Path, tmp_path: Path) -> None:
    """Replicas that reach each other by Redis alone load what the other computed; one that was killed is warm again."""
    program = shutil.which("redis-server")
    assert program is not None, INSTALL_REDIS
    store, *others = nodes
    inside = [["ip", "netns", "exec", name] for name in others]
    command = ["ip", "netns", "exec", store, program, "--bind", "0.0.0.0", "--protected-mode", "no", "--save", ""]
    redis = subprocess.Popen([*command, "--dir", str(tmp_path)], stdout=subprocess.DEVNULL)

    def start(node: int, name: str) -> "serving":  # type: ignore[valid-type]
        options = ("--ram-gib", "0.1", "--l2", f"redis://10.77.{node}.1:6379")
        return serving(tiny_model, tmp_path / name, *options, ready=False, within=inside[node])

    try:
        with ExitStack() as stack:
            one, two = (stack.enter_context(start(node, f"node-{node}")) for node in range(2))
            one.wait_until_ready()
            two.wait_until_ready()
            first = [ask(one, text, inside[0]) for text in TEXTS]
            time.sleep(2)
            second = [ask(two, text, inside[1]) for text in TEXTS]
            assert [text for text, *_ in first] == [text for text, *_ in second]
            assert share(first) == 0 and share(second) >= 0.5
            kill(one)
            again = stack.enter_context(start(0, "again"))
            again.wait_until_ready()
            warm = [ask(again, text, inside[0]) for text in TEXTS]
            assert [text for text, *_ in warm] == [text for text, *_ in first]
            assert share(warm) >= 0.5
    finally:
        redis.terminate()
        redis.wait(20)
