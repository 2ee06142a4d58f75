"""Fuzzing of settings, of stores' URLs, and of what lies in an L2: each kind as proofs/fuzz.py has them."""

import json
import random
from pathlib import Path
from typing import Any

from hotspan.config.options import build, options_of
from hotspan.config.settings import CacheOptions, CacheSettings
from hotspan.core.errors import ConfigError
from hotspan.core.terms import Terms
from hotspan.core.types import PAGE_BYTES, Compress
from hotspan.l2.follower import LogFollower
from hotspan.l2.metadata import ENTRY_BYTES, LIFE_BYTES
from hotspan.l2.open import open_store, parse_store_url
from hotspan.l2.remote import RemoteOptions, RemoteTier
from hotspan.testing.chunks import aligned, content
from hotspan.tiers.record import RECORD_BYTES
from kit.simulated.inline import InlineQueues
from kit.simulated.memory_store import MemoryServer
from proofs.fuzz_bench import NAMESPACE, Bench, Broken, mutated

_HEAD_BYTES = RECORD_BYTES + LIFE_BYTES
_SIZE = 3 * PAGE_BYTES
_NUMBERS = (0.5, 1.0, 4.0, 1e-12, 0.0, -1.0, 1e300, float("inf"), float("-inf"), float("nan"))
_URLS: tuple[str, ...] = (
    "redis://cache:6379/0",
    "rediss://user@cache",
    "file:///mnt/kv",
    "s3://bucket/prefix",
    "lm://cache:65432",
)
_URLS += ("sagemaker-hyperpod://10.0.0.1:9200",)
_SETTINGS: dict[str, tuple[Any, ...]] = {
    "disk": (None, Path("/nvme"), Path("relative"), Path("~/kv")),
    "disk_gib": (None, *_NUMBERS),
    "l2": (None, *_URLS),
    "l2_option": ({}, {"timeout_s": "1"}, {"": ""}),
    "l2_log": (None, "redis://cache"),
    "chunk_tokens": (256, 1, 0, -1, 1 << 70),
    "model_digest": ("sampled", "full", "", "fast"),
    "persistence": ("tiers", "none", "None"),
    "kek": (None, "file:kek", "env:KEK", "aws-kms:alias/x", "", "file:"),
    "key_store": (None, Path("keys")),
    "share_across_tenants": (True, False),
}


def settings(bench: Bench, rng: random.Random) -> bool:
    """What the command line may hand to the engine."""
    given = {name: rng.choice(values) for name, values in _SETTINGS.items() if rng.random() < 0.3}
    given["ram_gib"] = rng.choice(_NUMBERS)
    kinds = {option.name: option.kind for option in options_of(CacheOptions)}
    try:
        read = {name: kinds[name].parse(value, name) for name, value in given.items() if value is not None}
        found = build(CacheOptions, read).settings()
    except ConfigError:
        return False
    if CacheSettings.from_json(json.loads(json.dumps(found.to_json()))) != found:
        raise Broken(f"{found!r} changed on its way through JSON")
    if found.ram_bytes < 0 or (found.disk is not None and found.disk.bytes < 0) or found.chunk_tokens < 1:
        raise Broken(f"{found!r}")
    return True


def url(bench: Bench, rng: random.Random) -> bool:
    """A store's URL and options, as a user may mistype them."""
    text = rng.choice(_URLS)
    if rng.random() < 0.8:
        text = mutated(rng, text.encode()).decode("latin-1")
    names, values = ("timeout_s", "ttl_s", "prefix", "capacity_gib", "x", ""), ("1", "-1", "nan", "x")
    options = {rng.choice(names): rng.choice(values)}
    try:
        address = parse_store_url("--l2", text)
        if address.scheme in ("redis", "rediss"):
            open_store("--l2", text, options if rng.random() < 0.5 else {}).close()
    except ConfigError:
        return False
    return True


def stored_object(bench: Bench, rng: random.Random) -> bool:
    """What lies in an L2, compressed or not, changed: a chunk's own bytes, or a miss."""
    allowed = {chunk.key: content(chunk.key, _SIZE) for chunk in bench.chunks[:3]}
    server = MemoryServer()
    queues = InlineQueues()
    follower = LogFollower(server.log(), "fuzz")
    follower.poll()
    follower.foreign()
    store = server.store()
    compress: Compress = rng.choice(("never", "always"))
    tier = RemoteTier(RemoteOptions(store, follower, compress=compress, queue=queues.queue), NAMESPACE, _SIZE)
    for chunk in bench.chunks[:3]:
        tier.submit_store(chunk, Terms(labels=frozenset({1})), aligned(_SIZE, allowed[chunk.key]))
    queues.run()
    tier.finished()
    key, name = rng.choice(sorted(server.objects.items()))
    head, rest = server.data[name][:_HEAD_BYTES], server.data[name][_HEAD_BYTES:]
    server.data[name] = mutated(rng, head) + rest if rng.random() < 0.5 else head + mutated(rng, rest)
    beside = store.metadata_name(key)
    server.data[beside] += rng.randbytes(rng.choice((0, 1, ENTRY_BYTES, 30)) * rng.choice((0, 0, 1)))
    reader = RemoteTier(RemoteOptions(server.store(), follower, queue=queues.queue), NAMESPACE, _SIZE)
    reader.ask(bench.chunks[:3], 0)
    queues.run()
    reader.finished()
    into, found = aligned(_SIZE), 0
    for chunk in bench.chunks[:3]:
        if reader.submit_load(chunk.key, into):
            queues.run()
            if all(transfer.fault is None for transfer in reader.finished()):
                found += 1
                if into != allowed[chunk.key]:
                    raise Broken("a chunk from the L2 has wrong bytes")
    return found == 3
