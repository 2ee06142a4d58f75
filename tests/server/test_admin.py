"""One real server with two tenants, a disk and encryption: who hits what, and that what is forgotten is gone."""

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from hotspan.bench.prose import prose
from hotspan.core.types import CHUNK_TOKENS

from .conftest import Server, serving

pytestmark = pytest.mark.engine

KEYS = {"acme": "sk-acme-0123456789", "globex": "sk-globex-0123456789"}
TENANTS = f"""
tenants:
  acme: {{keys: ["{KEYS["acme"]}"], floor: 0.2}}
  globex: {{keys: ["{KEYS["globex"]}"], quota: 0.6}}
retention:
  - {{tag: "brief-*", ttl: 6s}}
  - {{tenant: acme, tag: secret, no_store: true}}
"""
WORDS = 700
PATIENCE_S = 60.0
WAITING = re.compile(r'^hotspan_cache_store_queue_chunks\{.*tier="disk".*\} (\S+)$', re.MULTILINE)


@dataclass
class House:
    """The server and what lies around it."""

    server: Server
    directory: Path
    environment: dict[str, str]

    @property
    def token(self) -> str:
        return (self.directory / "run" / "hotspan" / f"{self.server.port}.token").read_text()

    def hotspan(self, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
        """`hotspan ...` as the same user on the same host runs it."""
        return subprocess.run(
            [sys.executable, "-m", "hotspan", *arguments],
            capture_output=True,
            text=True,
            timeout=120,
            env=os.environ | self.environment | variables,
        )

    def cache(self, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
        return self.hotspan("cache", *arguments, "--server", self.server.url, **variables)

    def call(self, method: str, path: str, key: str | None = None, body: Any = None) -> tuple[int, Any]:
        """Status and answer."""
        headers = {"content-type": "application/json"} | ({"authorization": f"Bearer {key}"} if key else {})
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self.server.url + path, data, headers, method=method)
        try:
            with urllib.request.urlopen(request, timeout=60) as answer:
                text, status = answer.read().decode(), answer.status
        except urllib.error.HTTPError as error:
            text, status = error.read().decode(), error.code
        with contextlib.suppress(ValueError):
            return status, json.loads(text)
        return status, text

    def ask(self, who: str, prompt: str, key: str | None = None, **directives: Any) -> int:
        """How many of the prompt's tokens were cached."""
        body: dict[str, Any] = {"model": self.server.model, "prompt": prompt, "max_tokens": 1}
        if "cache_salt" in directives:
            body["cache_salt"] = directives.pop("cache_salt")
        if directives:
            body["kv_transfer_params"] = directives
        status, answer = self.call("POST", "/v1/completions", key or KEYS[who], body)
        assert status == 200, answer
        return int(answer["usage"]["prompt_tokens_details"]["cached_tokens"] or 0)

    def settle(self, chunks: int = 1) -> None:
        """Wait until so many chunks are on disk and none is on its way there."""
        deadline = time.monotonic() + PATIENCE_S
        while True:
            self.ask("acme", "hello")  # the engine takes note of what is stored at its steps
            page = self.call("GET", "/metrics", self.token)[1]
            waiting = sum(float(count) for count in WAITING.findall(page))
            if not waiting and self.stats()["disk"]["chunks"] >= chunks:
                return
            assert time.monotonic() < deadline, (waiting, self.stats())
            time.sleep(0.05)

    def stats(self) -> dict[str, Any]:
        """What each tier holds."""
        status, answer = self.call("GET", "/hotspan/cache", self.token)
        assert status == 200
        (replica,) = answer["replicas"]
        assert replica["is_encrypted"]
        return dict(replica["tiers"])

    def invalidate(self, key: str, **scope: Any) -> dict[str, Any]:
        status, receipt = self.call("POST", "/hotspan/cache/invalidate", key, scope)
        assert status == 200, receipt
        assert receipt["is_durable"] and set(receipt["removed"]) == {"gpu_blocks", "ram_chunks", "disk_chunks"}
        return dict(receipt)


@pytest.fixture(scope="module")
def house(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[House]:
    directory = tmp_path_factory.mktemp("house")
    (directory / "run").mkdir(mode=0o700)
    tenants = directory / "tenants.yaml"
    tenants.write_text(TENANTS)
    tenants.chmod(0o600)
    environment = {"XDG_RUNTIME_DIR": str(directory / "run")}
    kek = ("--kek", f"file:{directory / 'kek'}")
    made = subprocess.run(
        [sys.executable, "-m", "hotspan", "keys", "init", "--store", str(directory / "keys"), *kek, "--new-kek"],
        capture_output=True,
        text=True,
    )
    assert made.returncode == 0, made.stderr
    options = ("--ram-gib", "0.1", "--disk", str(directory / "kv"), "--disk-gib", "0.25", "--tenants", str(tenants))
    options += ("--key-store", str(directory / "keys"), *kek)
    with serving(tiny_model, directory / "log", *options, variables=environment) as server:
        yield House(server, directory, environment)


def test_requests_are_recorded_without_their_text(house: House) -> None:
    """Equal texts of a tenant have equal keys, and those of two tenants have none in common."""
    record, name = ("POST", "/hotspan/trace"), {"recording": "0123456789abcdef"}
    assert house.call(*record, house.token, name)[0] == 200
    text = prose(4711, WORDS)
    for who in ("acme", "globex", "acme"):
        house.ask(who, text)
    status, found = house.call(*record, house.token, name)
    assert status == 200 and found["running"] == 0
    first, other, again = found["rows"]
    assert first["hash_ids"] == again["hash_ids"] and not {*first["hash_ids"]} & {*other["hash_ids"]}
    assert len(first["hash_ids"]) == -(-first["input_length"] // 128) and first["output_length"] == 1
    assert again["cached_length"] > 0 and again["ttft_ms"] > 0
    assert house.call(*record, KEYS["acme"], name)[0] == 403


def test_tenants_hit_their_own_only(house: House) -> None:
    """A tenant's second request hits its first; another tenant's request of the same text does not."""
    text = prose(100, WORDS)
    assert house.ask("acme", text) == 0
    assert house.ask("acme", text) > 256
    assert house.ask("globex", text) == 0
    assert house.ask("globex", text) > 256
    assert house.ask("admin", text, key=house.token) == 0


def test_a_clients_salt_stays_the_clients(house: House) -> None:
    """Within a tenant, a salt still parts what the client wants parted; no salt of a client reaches another tenant."""
    text = prose(101, WORDS)
    assert house.ask("acme", text, cache_salt="one") == 0
    assert house.ask("acme", text, cache_salt="two") == 0
    assert house.ask("acme", text, cache_salt="one") > 256
    assert house.ask("globex", text, cache_salt="one") == 0


def test_invalidation_by_tag(house: House) -> None:
    """What was made of a document is gone from every tier the receipt names, other documents stay."""
    first, second = prose(102, WORDS), prose(103, WORDS)
    before = house.stats()["disk"]["chunks"]
    for text, tag in ((first, "doc-1@3"), (second, "doc-2")):
        assert house.ask("acme", text, tags=[tag]) == 0
        assert house.ask("acme", text, tags=[tag]) > 256
    house.settle(before + 1)
    receipt = house.invalidate(KEYS["acme"], tags=["doc-1"])
    assert receipt["scope"] == {"tenant": "acme", "tags": ["doc-1"]}
    assert all(count > 0 for count in receipt["removed"].values()), receipt
    assert len(receipt["replicas"]) == 1 and receipt["receipt"]
    assert house.ask("acme", first) == 0
    assert house.ask("acme", second) > 256


@pytest.mark.parametrize("salt", [None, "mine"])
def test_invalidation_by_text(house: House, salt: str | None) -> None:
    """A text is forgotten by its prompt and salt, and from a token on; what comes before stays."""
    text = prose(104, WORDS)
    salted = {} if salt is None else {"cache_salt": salt}
    house.ask("acme", text, **salted)
    assert (whole := house.ask("acme", text, **salted)) > 512
    assert house.invalidate(KEYS["acme"], prompt=text, tokens_from=CHUNK_TOKENS, **salted)["removed"]["ram_chunks"] > 0
    assert 0 < house.ask("acme", text, **salted) < whole
    house.invalidate(KEYS["acme"], prompt=text, **salted)
    assert house.ask("acme", text, **salted) == 0


def test_invalidation_by_session_and_tenant(house: House) -> None:
    """A client forgets a conversation, or all that is its own; the other tenant's hits stay."""
    text = prose(105, WORDS)
    for who in KEYS:
        house.ask(who, text, session="s1")
        assert house.ask(who, text, session="s1") > 256
    house.invalidate(KEYS["acme"], session="s1")
    assert house.ask("acme", text) == 0
    assert house.ask("globex", text) > 256
    house.invalidate(house.token, tenant="globex")
    assert house.ask("globex", text) == 0
    assert house.ask("acme", text) > 256


def test_a_key_reaches_its_own_tenant_only(house: House) -> None:
    """Naming another tenant is 403 and forgets nothing; naming nothing is 400 and says what would do."""
    text = prose(106, WORDS)
    house.ask("globex", text)
    status, said = house.call("POST", "/hotspan/cache/invalidate", KEYS["acme"], {"tenant": "globex"})
    assert status == 403 and "another tenant" in said["error"]["message"]
    status, said = house.call("POST", "/hotspan/cache/invalidate", KEYS["acme"], {})
    assert status == 400 and "all of yours" in said["error"]["message"]
    status, said = house.call("POST", "/hotspan/cache/invalidate", house.token, {})
    assert status == 400 and "/hotspan/cache/clear" in said["error"]["message"]
    house.invalidate(KEYS["acme"], prompt=text)
    assert house.ask("globex", text) > 256


def test_time_to_live(house: House) -> None:
    """A request's own ttl, and a rule's on its tag, end its hits; before their end, and without one, they are hits."""
    mine, ruled, later, kept = (prose(seed, WORDS) for seed in range(700, 704))
    house.ask("acme", mine, ttl="2s")
    house.ask("acme", ruled, tags=["brief-1"])
    for text, given in ((later, {"ttl": "1h"}), (kept, {})):
        assert house.ask("acme", text, **given) == 0 and house.ask("acme", text, **given) > 256
    for text in (mine, ruled):
        deadline = time.monotonic() + PATIENCE_S
        while house.ask("acme", text):  # a request that asks for no ttl does not prolong what it hits
            assert time.monotonic() < deadline, "it is a hit for ever"
            time.sleep(0.2)
    assert house.ask("acme", later) > 256 and house.ask("acme", kept) > 256


def test_no_store(house: House) -> None:
    """What a request or a rule forbids to keep is not there the next time; the rule binds its own tenant only."""
    text = prose(110, WORDS)
    assert house.ask("acme", text, no_store=True) == house.ask("acme", text, tags=["secret"]) == 0
    assert house.ask("acme", text) == 0
    assert house.ask("globex", text, tags=["secret"]) == 0
    assert house.ask("globex", text) > 256


def bodies(model: str) -> dict[str, dict[str, Any]]:
    messages = [{"role": "user", "content": "hello"}]
    return {
        "/v1/completions": {"model": model, "prompt": "hello", "max_tokens": 2},
        "/v1/chat/completions": {"model": model, "messages": messages, "max_tokens": 2},
        "/v1/responses": {"model": model, "input": "hello", "max_output_tokens": 2},
        "/v1/messages": {"model": model, "messages": messages, "max_tokens": 2},
        "/invocations": {"model": model, "messages": messages, "max_tokens": 2},
    }


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", list(bodies("")))
def test_directives_on_every_route(house: House, path: str, stream: bool) -> None:
    """An unknown directive, one that is the server's, a wrong value: 400 with what would do, before it streams."""
    body = bodies(house.server.model)[path] | {"stream": stream}
    for params, expected in (
        ({"tag": ["x"]}, "did you mean tags?"),
        ({"hotspan": {"tenant": "globex"}}, "kv_transfer_params has no 'hotspan'"),
        ({"do_remote_prefill": True}, "it takes ttl, tags"),
        ({"ttl": "soon"}, "such as 15m"),
        ({"tags": ["\ud800"]}, "half a surrogate pair"),
    ):
        status, said = house.call("POST", path, KEYS["acme"], body | {"kv_transfer_params": params})
        assert status == 400 and expected in said["error"]["message"], said
    right = {"kv_transfer_params": {"tags": ["d"], "ttl": "1h"}}
    status, said = house.call("POST", path, KEYS["acme"], body | right)
    assert status == 200, said


def test_several_choices_and_beams(house: House) -> None:
    """Every choice of a request has its tenant; a beam search, which can't carry directives, is refused with them."""
    body = {"model": house.server.model, "prompt": prose(111, WORDS), "max_tokens": 2, "n": 3, "temperature": 1}
    status, said = house.call("POST", "/v1/completions", KEYS["acme"], body | {"kv_transfer_params": {"tags": ["n"]}})
    assert status == 200 and len(said["choices"]) == 3
    assert house.ask("globex", body["prompt"]) == 0
    assert house.ask("acme", body["prompt"]) > 256
    beams = {"model": house.server.model, "prompt": prose(112, WORDS), "max_tokens": 2, "n": 2, "use_beam_search": True}
    assert house.call("POST", "/v1/completions", KEYS["acme"], beams)[0] == 200
    assert house.ask("globex", str(beams["prompt"])) == 0
    status, said = house.call("POST", "/v1/completions", KEYS["acme"], beams | {"kv_transfer_params": {"ttl": 60}})
    assert status == 400 and "beam search" in said["error"]["message"]


def test_documents_are_warmed_before_their_first_question(house: House, tmp_path: Path) -> None:
    """The first question finds all whole chunks before it; to warm again computes nothing; the file's name is a tag."""
    (tmp_path / "docs").mkdir()
    texts = {f"{n}.txt": prose(900 + n, WORDS) for n in range(2)}
    for name, text in texts.items():
        (tmp_path / "docs" / name).write_text(text)
    (tmp_path / "template").write_text("Read this.\n{document}\nQuestion: {question}")
    words = ("warm", str(tmp_path / "docs"), "--template", str(tmp_path / "template"), "--api-key", KEYS["acme"])
    words += ("--token", house.token, "--ttl", "1h", "--json")
    runs = [json.loads(house.cache(*words).stdout) for _ in range(2)]
    assert [run["texts"] for run in runs] == [2, 2] and not runs[0]["failed"] and runs[0]["bytes"] > 0
    assert runs[0]["cached"] == 0 and runs[1]["tokens"] - runs[1]["cached"] < 2 * CHUNK_TOKENS
    for text in texts.values():
        assert (
            house.ask("acme", f"Read this.\n{text}\nQuestion: what is new?")
            >= runs[0]["tokens"] // 2 - 2 * CHUNK_TOKENS
        )
    assert house.ask("globex", f"Read this.\n{texts['0.txt']}\nQuestion: what is new?") == 0
    house.invalidate(KEYS["acme"], tags=["0.txt"])
    assert house.ask("acme", f"Read this.\n{texts['0.txt']}\nQuestion: what?") < 256


def test_an_announced_chat_is_the_one_that_is_asked(house: House) -> None:
    """The same messages name the same chunks; those of another tenant find nothing."""
    chat = {"model": house.server.model, "messages": [{"role": "user", "content": prose(910, WORDS)}], "max_tokens": 1}
    status, said = house.call("POST", "/v1/chat/completions", KEYS["acme"], chat)
    assert status == 200, said
    for who, chunks in (("acme", said["usage"]["prompt_tokens"] // CHUNK_TOKENS), ("globex", 0)):
        status, told = house.call("POST", "/hotspan/cache/prefetch", KEYS[who], chat)
        assert status == 200, told
        (replica,) = told["replicas"]
        assert sum(found["chunks"] for found in replica["found"].values()) == chunks


def test_a_tenant_has_its_texts_computed(house: House) -> None:
    """The first question about a warmed document is a hit of its tenant's; nobody else sees the warm-up."""
    body = {"texts": [{"text": prose(77, WORDS)}], "template": "Read:\n{document}\nQuestion: {question}", "tags": ["w"]}
    status, begun = house.call("POST", "/hotspan/cache/warm", KEYS["acme"], body)
    assert status == 202 and begun["texts"] == 1, begun
    path = f"/hotspan/cache/warm/{begun['id']}"
    assert house.call("GET", path, KEYS["globex"])[0] == 404
    deadline = time.monotonic() + PATIENCE_S
    while (said := house.call("GET", path, KEYS["acme"])[1])["state"] != "done":
        assert time.monotonic() < deadline and said["state"] in ("waiting", "running"), said
        time.sleep(0.02)
    assert said["warmed"] == 1 and said["tokens"] > WORDS and said["bytes"] > 0, said
    question = f"Read:\n{prose(77, WORDS)}\nQuestion: Which points matter most?"
    for who, least in (("acme", WORDS // 2), ("globex", 0)):
        asked = {"model": house.server.model, "prompt": question, "max_tokens": 1}
        status, answer = house.call("POST", "/v1/completions", KEYS[who], asked)
        assert status == 200, answer
        cached = (answer["usage"]["prompt_tokens_details"] or {}).get("cached_tokens") or 0
        assert cached >= least and bool(cached) is bool(least)
    assert house.call("DELETE", path, KEYS["acme"])[1]["state"] == "done"


def test_who_reaches_what(house: House) -> None:
    """Of the table of routes, one of each kind on the wire: public, clients', the administrator's, not there."""
    for method, path, *expected in (
        ("GET", "/health", 200, 200, 200, 200),
        ("GET", "/v1/models", 401, 401, 200, 200),
        ("POST", "/hotspan/cache/check", 401, 401, 403, 200),
        ("GET", "/nothing", 404, 404, 404, 404),
    ):
        keys = (None, "sk-wrong", KEYS["acme"], house.token)
        assert [house.call(method, path, key, {} if method == "POST" else None)[0] for key in keys] == expected, path


def test_bodies_are_checked(house: House) -> None:
    """What is no invalidation is a 400 of the one shape; an adapter that nobody has is a 404 where a text names it."""
    status, said = house.call("POST", "/hotspan/cache/invalidate", KEYS["acme"], {"tag": "x"})
    assert status == 400 and "tag" in said["error"]["message"]
    body = {"tenant": "acme", "adapter": "x"}
    assert house.call("POST", "/hotspan/cache/invalidate", house.token, body)[0] == 200
    assert house.call("POST", "/hotspan/cache/invalidate", house.token, body | {"prompt": "y"})[0] == 404


def test_stats_name_the_tenants(house: House) -> None:
    """The administrator sees what each tier holds, by tenant."""
    before = house.stats()["disk"]["chunks"]
    house.ask("acme", prose(113, WORDS))
    house.settle(before + 1)
    for tier in ("ram", "disk"):
        assert house.stats()[tier]["tenants"]["acme"] > 0


def test_shred_and_rotate(house: House) -> None:
    """A shredded tenant starts over with nothing, others keep theirs; a rotated one keeps its hits."""
    text = prose(114, WORDS)
    for who in KEYS:
        house.ask(who, text)
    server = ("--server", house.server.url)
    rotated = house.hotspan("keys", "rotate", *server, "--tenant", "globex")
    assert rotated.returncode == 0 and "new root" in rotated.stdout, rotated.stderr
    unsure = house.hotspan("keys", "shred", *server, "--tenant", "acme")
    assert unsure.returncode == 2 and "--yes" in unsure.stderr
    status, receipt = house.call("POST", "/hotspan/keys/rotate", house.token, {"tenant": "globex"})
    assert status == 200 and len(receipt["roots"]) == 1
    shredded = house.hotspan("keys", "shred", *server, "--tenant", "acme", "--yes")
    assert shredded.returncode == 0 and "shredded tenant 'acme'" in shredded.stdout, shredded.stderr
    status, receipt = house.call("POST", "/hotspan/keys/shred", house.token, {"tenant": "acme"})
    assert status == 200 and receipt["is_durable"] and not receipt["shredded"]["had_keys"], receipt
    for tenant in ("acme", "nosuch"):
        again = house.hotspan("keys", "shred", *server, "--tenant", tenant, "--yes")
        assert again.returncode == 2 and "has no keys" in again.stderr, again.stderr
    assert house.ask("acme", text) == 0
    assert house.ask("globex", text) > 256


def test_command_line(house: House) -> None:
    """`hotspan cache` finds the server's token; what can't work is one line and exit status 2."""
    text = prose(115, WORDS)
    house.ask("acme", text, tags=["cli"])
    house.settle()
    shown = house.cache("stats")
    assert shown.returncode == 0 and "acme" in shown.stdout and "disk" in shown.stdout, shown.stderr
    assert json.loads(house.cache("stats", "--json").stdout)["replicas"]
    assert house.cache("check").returncode == 0
    done = house.cache("invalidate", "--tenant", "acme", "--tag", "cli")
    assert done.returncode == 0 and "durable on" in done.stdout and "ram chunks" in done.stdout, done.stderr
    assert house.ask("acme", text) == 0
    (house.directory / "prompt").write_text(text)
    done = house.cache("invalidate", "--tenant", "acme", "--prompt-file", str(house.directory / "prompt"), "--json")
    assert json.loads(done.stdout)["removed"]["ram_chunks"] > 0
    (house.directory / "batch").write_text('[{"tags": ["cli"]}, {"session": "none"}]')
    house.ask("acme", text, tags=["cli"])
    house.settle()
    batch = ("--batch-file", str(house.directory / "batch"), "--json")
    done = house.cache("invalidate", "--tenant", "acme", *batch)
    assert json.loads(done.stdout)["removed"]["ram_chunks"] > 0, done.stderr
    assert house.ask("acme", text) == 0
    for arguments, expected in (
        (("clear",), "--yes"),
        (("invalidate",), "names nothing to forget"),
        (("check", "--kek", "file:x"), "go with --disk"),
    ):
        refused = house.cache(*arguments)
        assert refused.returncode == 2 and expected in refused.stderr and len(refused.stderr.splitlines()) == 1, refused
    elsewhere = house.cache("stats", XDG_RUNTIME_DIR=str(house.directory))
    assert elsewhere.returncode == 2 and "--token" in elsewhere.stderr
    wrong = house.cache("stats", "--token", "wrong-token-of-the-test")
    assert wrong.returncode == 2 and "another admin token" in wrong.stderr
    assert house.cache("clear", "--yes").returncode == 0
    assert house.ask("acme", text) == 0


def test_after_the_end(house: House) -> None:
    """Ctrl-C to the whole process group lets a stream end; the token's file goes with the server; its disk is checked
    offline, and flipped bits are found.
    """
    house.ask("acme", prose(116, WORDS))
    house.settle()
    file = house.directory / "run" / "hotspan" / f"{house.server.port}.token"
    assert file.exists()
    house.server.stop_in_a_stream(lambda: os.killpg(house.server.process.pid, signal.SIGINT), KEYS["acme"])
    assert not file.exists() and not list(file.parent.iterdir())
    gone = house.cache("stats")
    assert gone.returncode == 2 and "does it run" in gone.stderr
    disk = ("--disk", str(house.directory / "kv"), "--kek", f"file:{house.directory / 'kek'}")
    disk += ("--key-store", str(house.directory / "keys"))
    whole = house.hotspan("cache", "check", *disk, "--json")
    assert whole.returncode == 0, whole.stderr
    report = json.loads(whole.stdout)["replicas"][0]["tiers"]["disk"]
    assert report["whole"] > 0 and report["locked"] == 0 and not report["corrupt"]
    slab = house.directory / "kv" / "slab"
    with slab.open("r+b") as frames:
        for at in range(20000, slab.stat().st_size, 65536):
            frames.seek(at)
            byte = frames.read(1)
            frames.seek(at)
            frames.write(bytes([byte[0] ^ 1]))
    corrupt = house.hotspan("cache", "check", *disk)
    assert corrupt.returncode == 1 and "corrupt" in corrupt.stdout, corrupt.stderr
    assert house.hotspan("cache", "check", *disk).returncode == 0
