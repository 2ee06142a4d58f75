"""Cache administration inside the engine's process: what the server asks for runs here, between two engine steps.

A command is a dict of JSON types, and so is its answer; what takes longer than a step is answered by a Future.

    API server --utility call--> scheduler's thread --tokens--> a thread that hashes --+
                                   |    ^                                              |
                                   |    +------------- run_waiting <-------------------+
                                   v
                 engine's prefixes, RAM, tiers --durable--> receipts' threads --> answer

What other replicas invalidate comes by the log's thread, which wakes the scheduler's.
"""

import contextlib
import logging
import socket
import uuid
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from hotspan.core.clock import Clock
from hotspan.core.credentials import log_name
from hotspan.core.terms import DEFAULT_TENANT, Scope, adapter_label, tag_labels, tenant_label
from hotspan.core.types import Tier
from hotspan.engine.adapters import registered_name
from hotspan.engine.announcing import Announcer
from hotspan.engine.answers import Answer, Refused, attempt, both_of, carry_out, pass_on
from hotspan.engine.compat import CoreCalls
from hotspan.engine.core_traces import CoreTraces
from hotspan.engine.manager import HotspanManager
from hotspan.engine.measures import sizes_and_rates
from hotspan.engine.net import netted
from hotspan.engine.receipts import Receipts
from hotspan.engine.requests import RequestRecord
from hotspan.engine.texts import Texts
from hotspan.engine.weights import WeightsWatch
from hotspan.keyring.keyring import Keyring
from hotspan.l2.follower import LogFollower
from hotspan.l2.position import PositionKeeper
from hotspan.tiers.base import AllDurable
from hotspan.tiers.disk import DiskTier
from hotspan.tiers.lower import LowerTier
from hotspan.tiers.pins import MAX_PINS

logger = logging.getLogger(__name__)

_AT_ONCE = 4
"""Texts' invalidations that are carried out between two steps; the others wait for the next."""

_TEXTS = 20
"""That saved the most, in the statistics."""


def _ignored(done: bool) -> None:
    return


def replica_name() -> str:
    """A name for this process among the replicas."""
    return f"{socket.gethostname()}/{uuid.uuid4().hex[:8]}"


class Administrator:
    """Stats, invalidation, prefetching, verification and key shredding for one engine.

    `do` is called on the scheduler's thread.

    directory: of the disk, where it is noted how far a shared log was followed. hasher: makes the engine's function
               that names blocks. traces: of this core. weights: what follows the engine's, once that is made.
    """

    def __init__(
        self,
        manager: HotspanManager,
        disk: LowerTier | None,
        follower: LogFollower | None,
        directory: Path | None,
        keyring: Keyring | None,
        hasher: Callable[[], Callable[..., Any]],
        traces: CoreTraces,
        clock: Clock,
    ) -> None:
        self.weights: WeightsWatch | None = None
        self._manager = manager
        self._clock = clock
        self._disk = disk
        self._follower = follower
        self._keyring = keyring
        self._traces = traces
        self._replica = follower.replica if follower is not None else replica_name()
        self._receipts = Receipts(self._replica, follower, clock)
        self._texts = Texts(manager, hasher)
        self._checks = ThreadPoolExecutor(1, thread_name_prefix="hotspan-check")
        self._check: Future[Answer] | None = None
        # Nothing that runs here may wait for anything else that runs here.
        self._threads = ThreadPoolExecutor(2, thread_name_prefix="hotspan-admin")
        self._keeper = PositionKeeper(directory, self._submit) if directory is not None else None
        self._waiting: deque[Callable[[], None]] = deque()
        self._calls = CoreCalls(self.run_waiting)
        self._announcer = Announcer(manager, self._replica, self._calls.knock, clock)
        if follower is not None:
            follower.on_foreign = self._calls.knock

    def do(self, command: Mapping[str, Any]) -> "Answer | Future[Answer]":
        """Carry out one command, which is named in `do`."""
        verbs: dict[str, Callable[[Mapping[str, Any]], Answer | Future[Answer]]] = {
            "stats": lambda _: self._stats(),
            "log": lambda _: self._log(),
            "invalidate": self._invalidate,
            "prefetch": self._announced,
            "lookup": self._announced,
            "pin": self._pin,
            "check": lambda _: self._verify(),
            "explain": self._explain,
            "trace": self._traces.answer,
            "shred": lambda asked: self._shred(str(asked["tenant"])),
            "rotate": lambda asked: self._rotate(str(asked["tenant"])),
        }
        if command["do"] not in verbs:
            raise ValueError(f"the engine has no command {command['do']!r}")
        return verbs[command["do"]](command)

    def ask(self, command: Mapping[str, Any]) -> "Future[Answer]":
        """From any thread: what `do` answers, which the scheduler's thread is to call soon."""
        answer: Future[Answer] = Future()
        self._later(lambda: carry_out(self.do, command, answer), answer)
        return answer

    @netted(lambda: None)
    def run_waiting(self) -> None:
        """Do what other threads left to the scheduler's: called before each request and each step, and while idle."""
        self._calls.heard()
        self.follow()
        self._announcer.turn()
        for _ in range(min(_AT_ONCE, len(self._waiting))):
            self._waiting.popleft()()
        if self._waiting:
            self._calls.knock()

    def follow(self) -> None:
        """Forget here what other replicas invalidated: all of it at once; from then on all of the disk is found."""
        if self._follower is None or self._follower.position is None:
            return
        scopes, position = self._follower.foreign(), self._follower.position
        keeper = self._keeper if self._follower.is_shared else None
        done = keeper.follow(position, bool(scopes)) if keeper is not None and position is not None else _ignored
        if scopes:
            removed = self._manager.invalidate(scopes, done, is_foreign=True)
            logger.info("cache_invalidated_elsewhere scopes=%d removed=%s", len(scopes), removed.counts)
        if self._disk is not None:
            self._disk.trust()

    def close(self) -> None:
        """Let go of the threads."""
        self._receipts.close()
        self._announcer.close()
        self._texts.close()
        for threads in (self._checks, self._threads):
            threads.shutdown(wait=False, cancel_futures=True)

    # -- commands --------------------------------------------------------------------------------------------------

    def _stats(self) -> Answer:
        tiers: dict[str, Any] = {}
        self._manager.cache.step()  # an idle engine has not heard yet of what ended meanwhile
        for tier, usage in self._manager.cache.usage().items():
            tiers[tier.value] = {
                "chunks": usage.chunks,
                "capacity_chunks": usage.capacity_chunks,
                "bytes": usage.bytes,
                "capacity_bytes": usage.capacity_bytes,
                "tenants": {f"{label:016x}": chunks for label, chunks in usage.tenants.items()},
                "is_up": usage.is_up,
                "bad_slots": usage.bad_slots,
            }
        if Tier.L2.value in tiers:
            tiers[Tier.L2.value]["store"] = self._shared_store()
        texts = [
            {
                "tags": list(text.tags),
                "first_chunk": text.first.hex()[:16],
                "tenant": f"{text.terms.tenant:016x}",
                "hits": saved.hits,
                "tokens": saved.tokens,
                "seconds": round(saved.seconds, 3),
            }
            for text, saved in self._manager.savings.top(_TEXTS)
        ]
        hits = {f"{label:016x}": tokens for label, tokens in self._manager.savings.tenant_tokens.items()}
        told = {"replica": self._replica, "tiers": tiers, "texts": texts, "hit_tokens": hits}
        if self.weights is not None:
            name = None if self.weights.state.source is None else self._manager.namespace.hex()[:16]
            told["weights"] = self.weights.state.to_json() | {"namespace": name}
        return told | sizes_and_rates(self._manager) | {"is_encrypted": self._keyring is not None}

    def _shared_store(self) -> str | None:
        """What names the L2 among all: the epoch of its log, which is random. None if it has no log that is shared."""
        follower = self._follower
        if follower is None or not follower.is_shared or follower.position is None:
            return None
        return follower.position.epoch.hex()

    def _log(self) -> Answer:
        """Which log is read here, if it is shared, and up to which generation this engine has done what it says."""
        store = self._shared_store()
        self.follow()
        applied = self._follower.applied if self._follower is not None else 0
        return {"log": None if store is None else {"name": log_name(store), "generation": applied}}

    def _invalidate(self, command: Mapping[str, Any]) -> "Future[Answer]":
        """What one command names, or each of its batch, as one invalidation with one receipt."""
        batch: Sequence[Mapping[str, Any]] = command.get("batch") or [command]
        texts = [None if one.get("tokens") is None else self._texts.submit(one) for one in batch]
        hashed = [text for text in texts if text is not None]
        answer: Future[Answer] = Future()

        def named() -> None:
            scopes, widened = [], []
            for one, text in zip(batch, texts, strict=True):
                scope = _scope(one, self._manager.namespace)
                if text is not None:
                    scope = self._named(scope, text.result(), one)
                    widened += [one["tenant"]] if scope.keys is None else []
                scopes.append(scope)
                if scope.namespace is not None:
                    scopes += [replace(scope, namespace=former) for former in self._manager.former]
            pass_on(self._forget(scopes, widened, self._logged(command)), answer)

        if hashed:
            ready = AllDurable(len(hashed), lambda done: self._later(named, answer))
            for text in hashed:
                text.add_done_callback(lambda done: ready(True))
        else:
            attempt(named, answer)
        return answer

    def _announced(self, command: Mapping[str, Any]) -> "Future[Answer]":
        """Bring a text, or what has a session's or tags' labels, into RAM; for a look-up only say what there is."""
        answer: Future[Answer] = Future()
        tenant = tenant_label(str(command.get("tenant") or DEFAULT_TENANT))
        hold_s = None if command["do"] == "lookup" else float(command["hold_s"])
        known = partial(self._announcer.announce, tenant=tenant, hold_s=hold_s, answer=answer)
        if command.get("tokens") is None:
            scope = replace(_scope(command, self._manager.namespace), tenant=tenant, namespace=self._manager.namespace)
            self._announcer.labelled(scope, tenant, known, answer)
            return answer
        self._announcer.named(self._texts.begin(command), tenant, known, answer)
        return answer

    def _pin(self, command: Mapping[str, Any]) -> Answer:
        """Have chunks with all of some tags evicted last, for a while and up to a quota."""
        tenant, labels = tenant_label(str(command["tenant"])), tag_labels(command["tags"])
        if not self._manager.cache.pins.put(tenant, labels, int(command["bytes"]), float(command["hold_s"])):
            return {"replica": self._replica, "refused": f"a tenant has at most {MAX_PINS} pins: end one"}
        return {"replica": self._replica, "bytes": int(command["bytes"]), "hold_s": float(command["hold_s"])}

    def _named(self, scope: Scope, text: RequestRecord, command: Mapping[str, Any]) -> Scope:
        """A scope of a text's chunks from a token on; without names, of all that the tenant has with that adapter.

        The names are those with all weights that this engine had: what it stored with others may lie on disk still.
        Raises: Refused for a text that is too short to have names.
        """
        adapter = 0 if text.adapter is None else adapter_label(registered_name(text.adapter))
        if text.keyer is None or text.keyer.namespace != self._manager.namespace:
            logger.warning("cache_invalidation_widened tenant=%016x adapter=%016x", scope.tenant or 0, adapter)
            return replace(scope, adapter=adapter)
        start, request = int(command.get("tokens_from") or 0), text.request
        keys = text.keys_from(start)
        for former in self._manager.former if keys else ():
            keyer = self._manager.keyer(command["tenant"], request.lora_request, former)
            keys |= self._manager.named(request, keyer).keys_from(start)
        if not keys:
            raise Refused(
                f"a text of {text.request.num_tokens} tokens is shorter than a chunk ({self._manager.chunk_tokens}): "
                "what is stored of it can't be told by its tokens. Invalidate its tag, its session or its tenant"
            )
        return replace(scope, keys=keys)

    def _logged(self, command: Mapping[str, Any]) -> int | None:
        """The generation under which another replica of this model wrote the same to the log that both read."""
        said, position = command.get("logged"), self._follower.position if self._follower is not None else None
        if said is None or position is None or self._follower is None or not self._follower.is_shared:
            return None
        is_same = said["epoch"] == position.epoch.hex() and said["namespace"] == self._manager.namespace.hex()
        return int(said["generation"]) if is_same else None

    def _forget(
        self, scopes: Sequence[Scope], widened: Sequence[str] = (), logged: int | None = None
    ) -> "Future[Answer]":
        """Forget at once; the answer comes when that is durable, or when it turns out that it can't be.

        logged: the generation of its entry in the L2's log, which needs no other then.
        """
        answer: Future[Answer] = Future()
        receipt: Answer = {"receipt": uuid.uuid4().hex, "at": self._clock.unix()}

        def told(said: Answer) -> None:
            if "log" in said:
                said["log"]["namespace"] = self._manager.namespace.hex()
            answer.set_result(receipt | said)

        ready = AllDurable(2, lambda done: self._receipts.ended(done, told, logged))
        removed, requests = self._manager.invalidate(scopes, ready, is_foreign=logged is not None)
        receipt |= {"removed": removed, "requests_in_flight": requests, "widened": sorted(set(widened))}
        logger.info("cache_invalidated receipt=%s scopes=%d removed=%s", receipt["receipt"], len(scopes), removed)
        ready(True)
        return answer

    def _explain(self, command: Mapping[str, Any]) -> Answer:
        """Why a request's tokens were computed, or those of the last ones."""
        explainer, asked, tenant = self._manager.explainer, command.get("request"), command.get("tenant")
        if explainer is None:
            return {"replica": self._replica, "refused": "nothing is explained: serve with --explain-requests above 0"}
        owner = None if tenant is None else tenant_label(tenant)
        one = explainer.find(asked, owner) if asked else None
        found = explainer.last(owner) if not asked else [] if one is None else [one]
        is_client = bool(command.get("is_client"))
        return {"replica": self._replica, "requests": [each.to_json(is_client=is_client) for each in found]}

    def _verify(self) -> "Answer | Future[Answer]":
        """A check of the disk; who asks while one runs gets its answer, too."""
        disk = self._disk.working if self._disk is not None else None
        if not isinstance(disk, DiskTier):
            return {"replica": self._replica, "tiers": {}}
        if self._check is None or self._check.done():
            run = disk.verification().run
            self._check = self._checks.submit(lambda: {"replica": self._replica, "tiers": {Tier.DISK.value: run()}})
        return self._check

    def _shred(self, tenant: str) -> "Future[Answer]":
        """Forget a tenant, destroy its keys, and forget what requests that came in between have stored."""
        keyring, scopes = self._need_keyring(), [Scope(tenant=tenant_label(tenant))]
        first = self._forget(scopes)
        shredded = self._threads.submit(keyring.shred, tenant)
        answer: Future[Answer] = Future()

        def again() -> None:
            keys = shredded.result()
            told = {"tenant": tenant, "roots": list(keys.roots), "at": keys.at_s, "had_keys": keys.had_keys}
            second = self._forget(scopes)
            both = AllDurable(
                2, lambda done: attempt(lambda: answer.set_result(both_of(first, second) | {"shredded": told}), answer)
            )
            first.add_done_callback(lambda done: both(True))
            second.add_done_callback(lambda done: both(True))

        shredded.add_done_callback(lambda done: self._later(again, answer))
        return answer

    def _rotate(self, tenant: str) -> "Future[Answer]":
        keyring = self._need_keyring()
        return self._threads.submit(lambda: {"tenant": tenant, "root": keyring.rotate(tenant)})

    # -- inside ----------------------------------------------------------------------------------------------------

    def _need_keyring(self) -> Keyring:
        if self._keyring is None:
            raise ValueError("this engine has no keys: serve with --kek and --key-store")
        return self._keyring

    def later(self, function: Callable[[], None]) -> None:
        """From any thread: have the scheduler's thread call it soon."""
        self._waiting.append(function)
        self._calls.knock()

    def _later(self, function: Callable[[], None], answer: "Future[Answer]") -> None:
        """From any thread: have the scheduler's thread call it; `answer` is told if that fails."""
        self._waiting.append(lambda: attempt(function, answer))
        self._calls.knock()

    def _submit(self, function: Callable[[], object]) -> None:
        with contextlib.suppress(RuntimeError):  # closed: the next start does again what was not noted
            self._threads.submit(function)


def _scope(command: Mapping[str, Any], namespace: bytes) -> Scope:
    """What a command names, but for a text."""
    tenant, adapter = command.get("tenant"), command.get("adapter")
    return Scope(
        tenant=None if tenant is None else tenant_label(tenant),
        adapter=None if adapter is None else adapter_label(adapter),
        labels=tag_labels(command.get("tags") or (), command.get("session")),
        namespace=namespace if command.get("model") else None,
    )
