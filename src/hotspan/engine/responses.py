"""What vLLM keeps of stored responses (`VLLM_ENABLE_RESPONSES_API_STORE=1`), each tenant's apart and bounded.

vLLM keeps them by id in dicts, and drops none. An id of another tenant's response is unknown here, whether it is read,
cancelled, continued (`previous_response_id`), or used again (a client may choose its `request_id`).
"""

from collections.abc import Callable, Iterator, MutableMapping
from typing import Any, TypeVar

MAX_STORED_RESPONSES = 256
"""Of one tenant; with more, the one that was stored first is forgotten."""

_BOUNDED = ("response_store", "msg_store", "event_store")
_UNBOUNDED = ("background_tasks",)
"""Each leaves when it ends, and vLLM holds it by nothing else."""

_V = TypeVar("_V")


class TenantStore(MutableMapping[str, _V]):
    """A dict of the tenant that the current task works for.

    tenant:      who that is.
    max_entries: of each tenant; with more, the oldest is dropped. None: no bound.
    """

    def __init__(self, tenant: Callable[[], str], max_entries: int | None = None) -> None:
        self._tenant = tenant
        self._max_entries = max_entries
        self._stores: dict[str, dict[str, _V]] = {}

    @property
    def _store(self) -> dict[str, _V]:
        return self._stores.setdefault(self._tenant(), {})

    def __getitem__(self, key: str) -> _V:
        return self._store[key]

    def __setitem__(self, key: str, value: _V) -> None:
        store = self._store
        store[key] = value
        if self._max_entries is not None and len(store) > self._max_entries:
            del store[next(iter(store))]

    def __delitem__(self, key: str) -> None:
        del self._store[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._store)

    def __len__(self) -> int:
        return len(self._store)


def keep_apart(serving: Any, tenant: Callable[[], str]) -> None:
    """Give vLLM's handler of `/v1/responses` stores that know tenants. Mutates: the handler, before its first request.

    Raises: AttributeError if it keeps responses elsewhere.
    """
    for names, max_entries in ((_BOUNDED, MAX_STORED_RESPONSES), (_UNBOUNDED, None)):
        for name in names:
            if getattr(serving, name):
                raise ValueError(f"{name} is in use already")
            setattr(serving, name, TenantStore(tenant, max_entries))
