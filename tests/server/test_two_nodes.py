"""Two replicas on two nodes that share nothing but a Redis; the one that computed is killed."""

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path

import pytest

from kit.redis_server import INSTALL_REDIS

from .conftest import Server, serving
from .test_replicas import ALL, TEXTS, ask_within, chunks_of, kill, settle, share, stored

pytestmark = pytest.mark.engine


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
    """What a replica computed is loaded by another one that it reaches by Redis alone, also after it was killed."""
    program = shutil.which("redis-server")
    assert program is not None, INSTALL_REDIS
    store, *others = nodes
    inside = [["ip", "netns", "exec", name] for name in others]
    command = ["ip", "netns", "exec", store, program, "--bind", "0.0.0.0", "--protected-mode", "no", "--save", ""]
    redis = subprocess.Popen([*command, "--dir", str(tmp_path)], stdout=subprocess.DEVNULL)

    def start(node: int, name: str) -> AbstractContextManager[Server]:
        options = ("--ram-gib", "0.1", "--l2", f"redis://10.77.{node}.1:6379", *ALL)
        return serving(tiny_model, tmp_path / name, *options, ready=False, within=inside[node])

    try:
        with ExitStack() as stack:
            one, two = (stack.enter_context(start(node, f"node-{node}")) for node in range(2))
            one.wait_until_ready()
            two.wait_until_ready()
            before = stored(one, within=inside[0])
            first = ask_within(one, TEXTS, inside[0])
            settle(before + chunks_of(first), one, within=inside[0])
            kill(one)
            second = ask_within(two, TEXTS, inside[1])
            assert [text for text, *_ in first] == [text for text, *_ in second]
            assert share(first) == 0 and share(second) == 1
    finally:
        redis.terminate()
        redis.wait(60)
