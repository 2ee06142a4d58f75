"""Cache administration inside the engine's process: what the server asks for runs here, between two engine steps.

A command is a dict of JSON types, and so is its answer; what takes longer than a step is answered by a Future.
"""

import logging
import socket
import time
import uuid
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

from vllm import SamplingParams
from vllm.lora.request import LoRARequest
from vllm.v1.request import Request

from hotspan.core.terms import Scope, adapter_label, tag_labels, tenant_label
from hotspan.core.types import Tier
from hotspan.engine.keys import TenantKeys
from hotspan.engine.manager import HotspanManager
from hotspan.engine.prefixes import GpuPrefixes
from hotspan.engine.requests import RequestState
from hotspan.keyring.keyring import Keyring
from hotspan.tiers.follower import LogFollower
from hotspan.tiers.guard import GuardedTier
from hotspan.tiers.position import PositionKeeper

logger = logging.getLogger(__name__)

Answer = dict[str, Any]


def _ignored(done: bool) -> None:
    return


def replica_name() -> str:
    """A name for this process among the replicas."""
    return f"{socket.gethostname()}/{uuid.uuid4().hex[:8]}"


class Administrator:
    """Stats, invalidation, verification and key shredding for one engine. `do` is called on the scheduler's thread."""

    def __init__(
        self,
        manager: HotspanManager,
        prefixes: GpuPrefixes,
        disk: GuardedTier | None,
        follower: LogFollower | None,
        directory: Path | None,
        keys: TenantKeys | None,
        hasher: Callable[[], Any],
    ) -> None:
        self._manager = manager
        self._prefixes = prefixes
        self._disk = disk
        self._follower = follower
        self._keys = keys
        self._hasher = hasher
        self._replica = follower.replica if follower is not None else replica_name()
        self._threads = ThreadPoolExecutor(2, thread_name_prefix="hotspan-admin")
        self._keeper = PositionKeeper(directory, self._threads.submit) if directory is not None else None

    def do(self, command: Mapping[str, Any]) -> "Answer | Future[Answer]":
        """Carry out one command: stats, invalidate, check, shred or rotate."""
        verb = command["do"]
        if verb == "stats":
            return self._stats()
        if verb == "invalidate":
            return self._invalidate(command)
        if verb == "check":
            return self._verify()
        if verb == "shred":
            return self._shred(str(command["tenant"]))
        if verb == "rotate":
            return self._rotate(str(command["tenant"]))
        raise ValueError(f"the engine has no command {verb!r}")

    def close(self) -> None:
        """Let go of the threads."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    # -- commands --------------------------------------------------------------------------------------------------

    def _stats(self) -> Answer:
        tiers: dict[str, Any] = {}
        for tier, usage in self._manager.cache.usage().items():
            tiers[tier.value] = {
                "chunks": usage.chunks,
                "capacity_chunks": usage.capacity_chunks,
                "bytes": usage.bytes,
                "capacity_bytes": usage.capacity_bytes,
                "tenants": {f"{label:016x}": chunks for label, chunks in usage.tenants.items()},
                "is_up": usage.is_up,
            }
        return {"replica": self._replica, "tiers": tiers, "is_encrypted": self._keys is not None}

    def _invalidate(self, command: Mapping[str, Any]) -> "Future[Answer]":
        scope, named = self._scope(command)
        asked = {name: value for name, value in command.items() if name not in ("do", "tokens", "cache_salt")}
        return self._forget(scope, named, asked)

    def _forget(self, scope: Scope, named: frozenset[bytes], asked: Mapping[str, Any]) -> "Future[Answer]":
        """Forget at once; the answer comes when that is durable, or when it turns out that it can't be."""
        answer: Future[Answer] = Future()
        answer.set_running_or_notify_cancel()
        receipt: Answer = {
            "receipt": uuid.uuid4().hex,
            "at": time.time(),
            "scope": dict(asked),
        }
        blocks, stale = self._prefixes.invalidate(scope, named)
        stopped = self._manager.disown(scope, stale)

        def ended(durable: bool) -> None:
            answer.set_result(receipt | {"is_durable": durable} | self._witnesses(durable))

        removed = self._manager.cache.invalidate([scope], lambda durable: self._threads.submit(ended, durable))
        receipt["removed"] = {"gpu_blocks": blocks} | {f"{tier.value}_chunks": count for tier, count in removed.items()}
        receipt["requests_in_flight"] = stopped
        logger.info("cache_invalidated receipt=%s removed=%s", receipt["receipt"], receipt["removed"])
        return answer

    def _witnesses(self, is_durable: bool) -> Answer:
        """Which replicas have seen the invalidation; blocks until all that are alive have, or two seconds.

        One that is cut off from the log is among the missing as long as its last word is remembered, and reads nothing
        from the L2 until it has read the log again.
        """
        if self._follower is None or not is_durable:
            return {"replicas": [self._replica]}
        try:
            found = self._follower.witnesses()
        except OSError as error:
            logger.warning("l2_witnesses_unknown error=%s", str(error))
            return {"replicas": [self._replica]}
        return {"replicas": list(found.seen), "replicas_missing": list(found.missing)}

    def follow(self) -> None:
        """Forget here what other replicas invalidated; called before a request is admitted."""
        if self._follower is None or self._follower.position is None:
            return
        scopes, position = self._follower.foreign(), self._follower.position
        done = self._keeper.follow(position, min(1, len(scopes))) if self._keeper is not None else _ignored
        if not scopes:
            return
        blocks = 0
        for scope in scopes:
            # The engine's prefixes go by its own hashes, of which keys say nothing: all of the tenant's.
            dropped, stale = self._prefixes.invalidate(replace(scope, keys=None))
            self._manager.disown(scope, stale)
            blocks += dropped
        removed = self._manager.cache.invalidate(scopes, done, is_foreign=True)
        logger.info("cache_invalidated_elsewhere scopes=%d gpu_blocks=%d removed=%s", len(scopes), blocks, removed)

    def _verify(self) -> "Answer | Future[Answer]":
        check = self._disk.verification() if self._disk is not None else None
        if check is None:
            return {"replica": self._replica, "tiers": {}}
        return self._threads.submit(lambda: {"replica": self._replica, "tiers": {Tier.DISK.value: check.run()}})

    def _shred(self, tenant: str) -> "Future[Answer]":
        keyring = self._need_keyring()
        receipt = self._forget(Scope(tenant=tenant_label(tenant)), frozenset(), {"tenant": tenant})

        def destroy() -> Answer:
            keys = keyring.shred(tenant)
            return receipt.result(30) | {"shredded": {"tenant": tenant, "roots": list(keys.roots), "at": keys.at_s}}

        return self._threads.submit(destroy)

    def _rotate(self, tenant: str) -> "Future[Answer]":
        keyring = self._need_keyring()
        return self._threads.submit(lambda: {"tenant": tenant, "root": keyring.rotate(tenant)})

    # -- inside ----------------------------------------------------------------------------------------------------

    def _need_keyring(self) -> Keyring:
        if self._keys is None:
            raise ValueError("this engine has no keys: serve with --kek and --key-store")
        return self._keys.keyring

    def _scope(self, command: Mapping[str, Any]) -> tuple[Scope, frozenset[bytes]]:
        """What to take, and the engine's hashes of a text that is named by its tokens."""
        tenant, adapter = command.get("tenant"), command.get("adapter")
        keys, named = None, frozenset[bytes]()
        if command.get("tokens") is not None:
            text = self._text(command)
            first = int(command.get("tokens_from") or 0) // self._manager.chunk_tokens
            keys = frozenset(chunk.key for chunk in text.all_chunks() if chunk.index >= first)
            named = frozenset(bytes(name) for name in text.request.block_hashes[first * self._hashes(text) :])
        scope = Scope(
            tenant=None if tenant is None else tenant_label(tenant),
            adapter=None if adapter is None else adapter_label(adapter),
            labels=tag_labels(command.get("tags") or (), command.get("session")),
            keys=keys,
            namespace=self._manager.namespace if command.get("model") else None,
        )
        return scope, named

    def _text(self, command: Mapping[str, Any]) -> RequestState:
        path, name = command.get("adapter_path"), command.get("adapter_name")
        lora = LoRARequest(str(name), 1, str(path)) if path is not None else None
        request = Request(
            request_id="hotspan-invalidate",
            prompt_token_ids=[int(token) for token in command["tokens"]],
            sampling_params=SamplingParams(max_tokens=1),
            pooling_params=None,
            lora_request=lora,
            cache_salt=command.get("cache_salt"),
            block_hasher=self._hasher(),
        )
        return self._manager.named(request, str(command.get("tenant")), lora)

    def _hashes(self, text: RequestState) -> int:
        """The engine's hashes in a chunk."""
        return max(group.hashes_per_chunk for group in text.groups)
