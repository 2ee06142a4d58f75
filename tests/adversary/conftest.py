"""One real house under attack: a server with two tenants, a disk, keys and a shared directory; a router; a daemon.

The server's model sees, clients register adapters, and KV events are published with a key. The router has keys and
tells what it expects to be cached.

One start for the whole package: the attacks run one after the other against the same processes.
"""

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from kit.ports import free_port
from tests.daemon.rig import DaemonProcess
from tests.engine.vision import make_vision_adapter, make_vision_model
from tests.server.conftest import Server, serving

ADMIN_TOKEN = "an-admin-token-of-the-house"
KEYS = {"acme": "sk-acme-0123456789", "globex": "sk-globex-0123456789"}
EVENTS_KEY = "a-key-of-events-with-32-characters"
MAX_ADAPTERS = 3
HTTP = httpx.Client(verify=False, limits=httpx.Limits(max_keepalive_connections=0), timeout=120)
"""A connection per request, without the TLS context that `httpx.get` makes for each."""
TEMPLATE = "{% for m in messages %}{{ m['content'] }} {% endfor %}"
TENANTS = "tenants:\n" + "".join(f'  {name}: {{keys: ["{key}"]}}\n' for name, key in KEYS.items())


@dataclass(frozen=True, slots=True)
class Asked:
    """What a completion gave. cached: tokens of the prompt that were not computed."""

    text: str
    cached: int


@dataclass(frozen=True, slots=True)
class House:
    """The processes under attack, and the files they keep.

    monitor_port: of the daemon, for monitors. event_ports: of KV events, live and replayed.
    """

    server: Server
    router_port: int
    daemon: DaemonProcess
    monitor_port: int
    directory: Path
    event_ports: tuple[int, int]

    @property
    def ports(self) -> dict[str, int]:
        """Each entry's port."""
        ports = {"server": self.server.port, "router": self.router_port}
        return ports | {"daemon": self.daemon.port, "monitor": self.monitor_port}

    @property
    def disk(self) -> Path:
        return self.directory / "kv"

    @property
    def shared(self) -> Path:
        return self.directory / "shared"

    @property
    def given_up(self) -> int:
        """How often the server gave up a tier."""
        return (self.directory / "server.log").read_text(errors="replace").count("tier_given_up")

    def call(self, method: str, path: str, key: str | None, body: Any = None) -> httpx.Response:
        """One request to the server."""
        headers = {} if key is None else {"authorization": f"Bearer {key}"}
        return HTTP.request(method, self.server.url + path, headers=headers, json=body)

    def ask(self, who: str, prompt: str, **more: Any) -> Asked:
        """A tenant's completion, which must be answered."""
        body = {"model": self.server.model, "prompt": prompt, "max_tokens": 4, "temperature": 0, "ignore_eos": True}
        answer = self.call("POST", "/v1/completions", KEYS[who], body | more)
        assert answer.status_code == 200, answer.text
        said = answer.json()
        return Asked(said["choices"][0]["text"], said["usage"]["prompt_tokens_details"]["cached_tokens"] or 0)

    def stats(self) -> dict[str, Any]:
        """What each tier of the server holds."""
        answer = self.call("GET", "/hotspan/cache", ADMIN_TOKEN)
        assert answer.status_code == 200, answer.text
        (replica,) = answer.json()["replicas"]
        return dict(replica["tiers"])

    def is_well(self) -> None:
        """Raises AssertionError unless server, router and daemon answer, and the router still trusts its replica."""
        for port in self.ports.values():
            assert HTTP.get(f"http://127.0.0.1:{port}/health").status_code == 200
        models = HTTP.get(f"http://127.0.0.1:{self.router_port}/v1/models", headers={"x-api-key": KEYS["acme"]})
        assert models.status_code == 200, models.text


@pytest.fixture(scope="package")
def house(tmp_path_factory: pytest.TempPathFactory) -> Iterator[House]:
    directory = tmp_path_factory.mktemp("adversary")
    model = make_vision_model(directory / "model")
    for seed, name in enumerate(KEYS):
        make_vision_adapter(directory / "adapters" / name / "mine", seed)
    (directory / "run").mkdir(mode=0o700)
    secrets = {"tenants.yaml": TENANTS, "admin": ADMIN_TOKEN, "keys.txt": "\n".join(KEYS.values())}
    for name, text in (secrets | {"events": EVENTS_KEY}).items():
        (directory / name).write_text(text)
        (directory / name).chmod(0o600)
    kek = ("--kek", f"file:{directory / 'kek'}")
    subprocess.run(
        [sys.executable, "-m", "hotspan", "keys", "init", "--store", str(directory / "store"), *kek, "--new-kek"],
        check=True,
        capture_output=True,
    )
    event_ports = free_port(), free_port()
    endpoints = [f"tcp://127.0.0.1:{port}" for port in event_ports]
    events = {"enable_kv_cache_events": True, "endpoint": endpoints[0], "replay_endpoint": endpoints[1]}
    options = ("--chat-template", TEMPLATE, "--enable-lora", "--adapter-copies", str(directory / "copies"))
    options += ("--client-adapters", str(directory / "adapters"), "--max-client-adapters", str(MAX_ADAPTERS))
    options += ("--kv-events-config", json.dumps(events), "--kv-events-key", str(directory / "events"))
    options += ("--ram-gib", "0.02", "--disk", str(directory / "kv"), "--disk-gib", "0.1", *kek)
    options += ("--key-store", str(directory / "store"), "--tenants", str(directory / "tenants.yaml"))
    options += ("--l2", f"file://{directory / 'shared'}", "--l2-option", "capacity_gib=0.2")
    options += ("--admin-token-file", str(directory / "admin"), "--sessions-path", str(directory / "sessions"))
    environment = {"XDG_RUNTIME_DIR": str(directory / "run"), "VLLM_ENABLE_RESPONSES_API_STORE": "1"}
    monitor_port = free_port()
    daemon = DaemonProcess(options=("--metrics-port", str(monitor_port)))
    with ExitStack() as stack:
        stack.callback(daemon.close)
        server = stack.enter_context(
            serving(model, directory / "server.log", *options, ready=False, variables=environment)
        )
        daemon.start()
        keyed = ("--api-keys-file", str(directory / "keys.txt"), "--admin-token-file", str(directory / "admin"))
        router_port = stack.enter_context(routing(server, directory / "router.log", *keyed, "--expose"))
        server.wait_until_ready()
        wait_for_router(router_port, directory / "router.log")
        found = House(server, router_port, daemon, monitor_port, directory, event_ports)
        yield found
        found.is_well()


@contextmanager
def routing(server: Server, log: Path, *options: str) -> Iterator[int]:
    """`hotspan route` in front of a server, on this port; it may not answer yet."""
    port = free_port()
    command = ["route", "--replica", server.url, "--port", str(port), "--health-interval-s", "0.2", *options]
    environment = os.environ | {"XDG_RUNTIME_DIR": str(log.parent / "run")}
    with log.open("wb") as output:
        router = subprocess.Popen(
            [sys.executable, "-m", "hotspan", *command], stdout=output, stderr=subprocess.STDOUT, env=environment
        )
    try:
        yield port
    finally:
        router.terminate()
        router.wait(60)


def wait_for_router(port: int, log: Path) -> None:
    """Until it answers. Raises: AssertionError if it does not."""
    deadline = time.monotonic() + 120
    while True:
        try:
            if httpx.get(f"http://127.0.0.1:{port}/ping", timeout=60).status_code == 200:
                return
        except httpx.TransportError:
            pass
        assert time.monotonic() < deadline, log.read_text()[-3000:]
        time.sleep(0.1)


@pytest.fixture
def well(house: House) -> Iterator[House]:
    """The house, which must answer everybody after the attack."""
    yield house
    house.is_well()


def as_json(answer: httpx.Response) -> Any:
    """An answer's body. Raises: AssertionError if it is no JSON."""
    try:
        return json.loads(answer.text)
    except ValueError:
        raise AssertionError(answer.text) from None
