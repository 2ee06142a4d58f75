"""What vLLM keeps of stored responses (`VLLM_ENABLE_RESPONSES_API_STORE=1`), each tenant's apart and bounded.

vLLM keeps them by id in dicts, and drops none. An id of another tenant's response is unknown here, whether it is read,
cancelled, continued (`previous_response_id`), or used again (a client may choose its `request_id`).
"""

from collections.abc import Callable, Iterator, MutableMapping
from typing import Any, TypeVar

MAX_STORED_RESPONSES = 256
"""Of one tenant; with more, the one that was begun first is forgotten, with its messages and events."""

_V = TypeVar("_V")


class TenantStore(MutableMapping[str, _V]):
    """A dict of the tenant that the current task works for. tenant: who that is."""

    def __init__(self, tenant: Callable[[], str]) -> None:
        self._tenant = tenant
        self._stores: dict[str, dict[str, _V]] = {}

    @property
    def _store(self) -> dict[str, _V]:
        return self._stores.setdefault(self._tenant(), {})

    def __getitem__(self, key: str) -> _V:
        return self._store[key]

    def __setitem__(self, key: str, value: _V) -> None:
        self._store[key] = value

    def __delitem__(self, key: str) -> None:
        del self._store[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._store)

    def __len__(self) -> int:
        return len(self._store)


class _Messages(TenantStore[Any]):
    """What was said up to each response: vLLM stores it first, and all that is stored of a response leaves with it."""

    def __init__(self, tenant: Callable[[], str]) -> None:
        super().__init__(tenant)
        self.results = [_Results(tenant, self), _Results(tenant, self)]

    def __setitem__(self, key: str, value: Any) -> None:
        super().__setitem__(key, value)
        if len(self) > MAX_STORED_RESPONSES:
            oldest = next(iter(self))
            for store in (self, *self.results):
                store.pop(oldest, None)


class _Results(TenantStore[Any]):
    """Responses or events. Without its messages none is stored: it would be continued as if nothing had been said."""

    def __init__(self, tenant: Callable[[], str], messages: _Messages) -> None:
        super().__init__(tenant)
        self._messages = messages

    def __setitem__(self, key: str, value: Any) -> None:
        if key in self._messages:
            super().__setitem__(key, value)


def keep_apart(serving: Any, tenant: Callable[[], str]) -> None:
    """Give vLLM's handler of `/v1/responses` stores that know tenants. Mutates: the handler, before its first request.

    Raises: AttributeError if it keeps responses elsewhere; ValueError if it has some.
    """
    messages = _Messages(tenant)
    responses, events = messages.results
    # A task leaves when it ends; vLLM holds it by nothing else, so that none may be dropped.
    stores = {"msg_store": messages, "response_store": responses, "event_store": events}
    for name, store in (stores | {"background_tasks": TenantStore(tenant)}).items():
        if getattr(serving, name):
            raise ValueError(f"{name} is in use already")
        setattr(serving, name, store)
