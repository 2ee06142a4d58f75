"""Admission: from a request to the names of its chunks and the terms on which they are kept."""

import logging
from collections.abc import Sequence
from dataclasses import replace
from typing import Protocol

from vllm.lora.request import LoRARequest
from vllm.v1.request import Request

from hotspan.config.settings import CacheSettings
from hotspan.core.clock import Clock, SystemClock
from hotspan.core.directives import CLIENT_DIRECTIVES, Directives, governed, parse_directives
from hotspan.core.namespace import NO_ADAPTER, NO_TENANT, ChunkKeyer, tenant_digest
from hotspan.engine.adapters import registered_name
from hotspan.engine.fingerprint import AdapterDigests
from hotspan.engine.requests import ChunkGroup, RequestRecord

logger = logging.getLogger(__name__)

SERVER_DIRECTIVES = "hotspan"
"""The key of `kv_transfer_params` under which the server hands down what it found out about a request."""


class TenantSecrets(Protocol):
    """Where tenants have secrets (a keyring)."""

    def names(self, tenant: str) -> bytes | None:
        """32 bytes, at once; None while they are not to be had: then nothing of the tenant is cached."""
        ...


class Admission:
    """Decides for each request whose it is, what its chunks are called and how long they may live."""

    def __init__(
        self,
        settings: CacheSettings,
        namespace: bytes,
        groups: Sequence[ChunkGroup],
        chunk_tokens: int,
        secrets: TenantSecrets | None = None,
        clock: Clock | None = None,
    ) -> None:
        self.namespace = namespace
        self._settings = settings
        self.groups = tuple(groups)
        self._chunk_tokens = chunk_tokens
        self._secrets = secrets
        self._clock = clock or SystemClock()
        self.adapters = AdapterDigests()

    def admit(self, request: Request) -> RequestRecord:
        """What is to be known of a request. Blocks: for one pass over an adapter's files when it is first named."""
        directives = self._directives(request)
        if directives is None or self._has_unnamed_media(request):
            return RequestRecord(request=request, keyer=None, groups=self.groups, may_store=False)
        directives = governed(directives, self._settings.retention)
        lora = request.lora_request
        adapter, now_s = None if lora is None else registered_name(lora.lora_name), self._clock.unix()
        return RequestRecord(
            request=request,
            keyer=self.keyer(directives.tenant, lora),
            groups=self.groups,
            may_store=not directives.no_store,
            terms=directives.terms(adapter, now_s),
            bare_terms=replace(directives, tags=()).terms(adapter, now_s),
            tags_from=directives.tags_from // self._chunk_tokens,
            renews=directives.renew,
        )

    def keyer(self, tenant: str, lora: LoRARequest | None) -> ChunkKeyer | None:
        """Names for the chunks of a tenant and an adapter; None if nothing of them can be cached now."""
        adapter: bytes | None = NO_ADAPTER
        if lora is not None:
            adapter = self.adapters.of(lora.lora_int_id, lora.lora_path)
            if adapter is None:
                logger.warning(
                    "adapter_unknown name=%s: its files changed or can't be read: not cached", lora.lora_name
                )
                return None
        secret = tenant_digest(tenant) if self._secrets is None else self._secrets.names(tenant)
        if secret is not None and not self._settings.is_isolated:
            secret = NO_TENANT
        return None if secret is None or adapter is None else ChunkKeyer(self.namespace, adapter, secret)

    def _has_unnamed_media(self, request: Request) -> bool:
        """Whether media came through another server than hotspan's, where a client's `uuid` is their identity."""
        return bool(request.mm_features) and SERVER_DIRECTIVES not in (request.kv_transfer_params or {})

    def _directives(self, request: Request) -> Directives | None:
        """What the server said of the request, or what it says itself where no server stands before the engine."""
        params = request.kv_transfer_params or {}
        said = params.get(SERVER_DIRECTIVES)
        if said is not None:
            return Directives.from_json(said)
        if self._settings.is_strict:
            return None
        try:
            return parse_directives({name: params[name] for name in CLIENT_DIRECTIVES if name in params})
        except ValueError as error:
            logger.warning("directives_refused request=%s: it is not cached: %s", request.request_id, error)
            return None
