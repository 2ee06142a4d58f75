"""R8, without the server: any bytes as frames, tables, logs, directives, scopes and settings. Refused, or right."""

import json
import os
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from hotspan.config.tenants import Tenants, load_tenants
from hotspan.core.directives import CLIENT_DIRECTIVES, Directives, parse_directives
from hotspan.core.errors import ConfigError
from hotspan.core.frame import HEADER_BYTES, FrameIdentity, seal, verify
from hotspan.core.terms import Scope, Terms
from hotspan.core.types import Chunk, ChunkKey
from hotspan.testing.chunks import aligned, key_of
from hotspan.tiers.table import SUPERBLOCK_BYTES
from kit.places import in_memory
from kit.proof import Findings, Progress, Proof, rng_of
from proofs import fuzz_l2
from proofs.fuzz_bench import NAMESPACE, SIZE, Bench, Broken, mutated

CLAIM = "whatever comes in is refused in words or taken for what it is; nothing else, and no wrong byte"
_JSON_VALUES: tuple[Any, ...] = (
    None,
    True,
    False,
    0,
    -1,
    1,
    1.5,
    1e400,
    10**40,
    "",
    "x",
    "15m",
    "\0",
    "\ud800",
    [],
    ["a"],
    {},
    {"a": 1},
)


@dataclass(frozen=True, slots=True)
class Options:
    """cases: inputs, of all kinds."""

    cases: int = 10_000
    seed: int = 0
    only: int | None = None


def run(options: Options, progress: Progress) -> Proof:
    """Case after case, each of a kind by chance."""
    findings, kinds = Findings(), Counter[str]()
    accepted = Counter[str]()
    with in_memory() as path:
        bench = Bench(path)
        names = list(KINDS)
        weights = [weight for weight, _ in KINDS.values()]
        for case in range(options.cases) if options.only is None else [options.only]:
            rng = rng_of("fuzz", options.seed, case)
            (name,) = rng.choices(names, weights)
            kinds[name] += 1
            try:
                accepted[name] += KINDS[name][1](bench, rng)
            except Exception as error:  # whatever it is, it is what we look for
                findings.add(case, f"{name}: {type(error).__name__}: {error}"[:300])
            if not case % 256:
                progress(case, options.cases)
    figures = {"cases": sum(kinds.values()), **{f"{name}": kinds[name] for name in names}}
    figures |= {f"{name}_taken": accepted[name] for name in names}
    figures["failures"] = findings.count
    return Proof("fuzz", CLAIM, figures, not findings.count and sum(kinds.values()) > 0, tuple(findings.kept))


# -- what input there is: each takes a case, says whether the input was taken, and raises if it was wrongly -----------


def _frame(bench: Bench, rng: random.Random) -> bool:
    payload = memoryview(rng.randbytes(rng.choice((1, 512, 4096))))
    identity = FrameIdentity(key_of(f"{rng.random()}"), rng.randbytes(32), rng.randrange(5), rng.choice((0, 10**10)))
    header = memoryview(bytearray(HEADER_BYTES))
    seal(header, payload, identity)
    whole = bytes(header) + payload
    changed = mutated(rng, whole) if rng.random() < 0.95 else whole
    is_hit = verify(memoryview(changed)[:HEADER_BYTES], memoryview(changed)[HEADER_BYTES:], identity) is None
    if is_hit != (changed == whole):
        raise Broken(
            "a frame was taken that is not the one that was written" if is_hit else "a whole frame was refused"
        )
    return is_hit


def _table(bench: Bench, rng: random.Random) -> bool:
    table = bench.good["table"]
    if rng.random() < 0.5:  # spare the superblock, or all that is tried is its check
        return bench.look({"table": table[:SUPERBLOCK_BYTES] + mutated(rng, table[SUPERBLOCK_BYTES:])}) > 0
    return bench.look({"table": mutated(rng, table)}) > 0


def _log(bench: Bench, rng: random.Random) -> bool:
    return bench.look({"log": mutated(rng, bench.good["log"])}) > 0


def _slab(bench: Bench, rng: random.Random) -> bool:
    return bench.look({"slab": mutated(rng, bench.good["slab"])}) > 0


def _any_json(rng: random.Random, depth: int = 0) -> Any:
    if depth < 2 and rng.random() < 0.3:
        if rng.random() < 0.5:
            return [_any_json(rng, depth + 1) for _ in range(rng.choice((0, 1, 3, 70)))]
        return {str(_any_json(rng, 2)): _any_json(rng, depth + 1) for _ in range(3)}
    if rng.random() < 0.2:
        return rng.choice((rng.random() * 1e6, rng.randrange(-(1 << 70), 1 << 70), "t" * rng.choice((1, 512, 513))))
    return rng.choice(_JSON_VALUES)


def _directives(bench: Bench, rng: random.Random) -> bool:
    names = [*CLIENT_DIRECTIVES, "tag", "tenant", ""]
    likely: dict[str, Any] = {"ttl": "15m", "tags": ["a", "b@2"], "tags_from": 7, "session": "s", "no_store": True}
    params: dict[str, Any] = {}
    for name in rng.sample(names, rng.randrange(4)):
        params[name] = likely[name] if name in likely and rng.random() < 0.5 else _any_json(rng)
    try:
        found = parse_directives(params)
    except ValueError:
        return False
    if found.tenant != Directives().tenant or Directives.from_json(json.loads(json.dumps(found.to_json()))) != found:
        raise Broken(f"{params!r} became {found!r}")
    terms = found.terms(None, 1e9)
    if found.ttl_s is not None and not 1e9 < terms.expires_s < 1 << 63:
        raise Broken(f"{params!r} expires at {terms.expires_s}")
    return True


def _scope_json(bench: Bench, rng: random.Random) -> bool:
    scope = _scope(rng, bench.chunks)
    data = json.loads(json.dumps(scope.to_json()))
    if Scope.from_json(data) != scope:
        raise Broken(f"{scope!r} changed on its way through JSON")
    for name in rng.sample(sorted(data), rng.randrange(1, 3)):
        if rng.random() < 0.3:
            del data[name]
        else:
            data[name] = _any_json(rng)
    try:
        Scope.from_json(data)
    except (KeyError, TypeError, ValueError, OverflowError):
        return False
    return True


_TENANTS = b"""tenants:
  acme: {keys: ["sk-0123456789abcdef", "sha256:%s"], floor: 0.2, quota: 0.6, ttl: 24h}
  "globex": {keys: ["sk-fedcba9876543210"]}
retention:
  - {tag: "pii-*", ttl: 1h}
  - {tenant: acme, tag: secret, no_store: true}
""" % (b"ab" * 32)
_WORDS = (
    b"tenants",
    b"acme",
    b"keys",
    b"quota",
    b"0.2",
    b"1h",
    b"true",
    b"[]",
    b"{}",
    b": ",
    b"- ",
    b"~",
    b"&a *a",
    b"!!x",
)


def _tenants(bench: Bench, rng: random.Random) -> bool:
    text = _TENANTS
    if rng.random() < 0.5:
        text = text.replace(rng.choice(_WORDS), rng.choice(_WORDS), rng.randrange(1, 3))
    else:
        text = mutated(rng, text)
    path = bench.path / "tenants.yaml"
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
        file.write(text)
    try:
        found = load_tenants(path)
    except ConfigError as error:
        if "sk-0123456789abcdef" in str(error) or "sk-fedcba9876543210" in str(error):
            raise Broken("the error repeats a key") from error
        return False
    if not isinstance(found, Tenants) or sum(share.floor or 0.0 for share in found.shares) > 1 + 1e-9:
        raise Broken(f"{found!r}")
    return True


def _scope(rng: random.Random, chunks: list[Chunk]) -> Scope:
    keys = frozenset(chunk.key for chunk in rng.sample(chunks, rng.randrange(1, 3))) if rng.random() < 0.3 else None
    return Scope(
        tenant=rng.choice((None, None, 1, 2)),
        adapter=rng.choice((None, None, 0, 5)),
        labels=frozenset(rng.sample((1, 2, 3, 4), rng.choice((0, 1, 1, 2)))),
        keys=keys,
        namespace=rng.choice((None, None, NAMESPACE, bytes(32))),
    )


def _invalidation(bench: Bench, rng: random.Random) -> bool:
    """A disk tier's invalidation against a naive one."""
    for name in ("table", "log", "slab"):
        (bench.path / "disk" / name).unlink(missing_ok=True)
    tier, queues = bench.open()
    try:
        kept: dict[ChunkKey, Terms] = {}
        for chunk in bench.chunks:
            labels = rng.choice(((), (1,), (2,), (1, 3), tuple(range(2, 17))))
            terms = Terms(rng.choice((1, 2)), rng.choice((0, 5)), frozenset(labels))
            if rng.random() < 0.9 and tier.submit_store(chunk, terms, aligned(SIZE)):
                kept[chunk.key] = terms
        queues.run()
        tier.finished()
        scope = _scope(rng, bench.chunks)
        taken = {key for key, terms in kept.items() if _naive(scope, key, terms)}
        gone = taken | (scope.keys or set())
        for chunk in bench.chunks:
            if chunk.parent in gone and chunk.key in kept:
                gone = gone | {chunk.key}
                taken.add(chunk.key)
        count = tier.invalidate([scope], lambda done: None)
        left = {chunk.key for chunk in bench.chunks if tier.lookup(chunk.key)}
        if left != kept.keys() - taken or count != len(taken):
            raise Broken(f"{scope!r} took {count} chunks and not {len(taken)}")
        queues.run()
    finally:
        tier.close(5.0)
    return bool(taken)


def _naive(scope: Scope, key: ChunkKey, terms: Terms) -> bool:
    """What the words of `Scope` say."""
    if scope.tenant is not None and scope.tenant != terms.tenant:
        return False
    if scope.adapter is not None and scope.adapter != terms.adapter:
        return False
    if scope.keys is not None and key not in scope.keys:
        return False
    if scope.namespace is not None and scope.namespace != NAMESPACE:
        return False
    return len(terms.labels) > 13 or all(name in terms.labels for name in scope.labels)  # a record holds 13


KINDS: dict[str, tuple[float, Callable[[Bench, random.Random], bool]]] = {
    "frame": (20, _frame),
    "table": (8, _table),
    "log": (14, _log),
    "slab": (4, _slab),
    "directives": (25, _directives),
    "scope_json": (15, _scope_json),
    "tenants": (10, _tenants),
    "invalidation": (10, _invalidation),
    "settings": (8, fuzz_l2.settings),
    "url": (8, fuzz_l2.url),
    "object": (12, fuzz_l2.stored_object),
}
