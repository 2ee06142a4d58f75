"""What vLLM keeps of stored responses (`VLLM_ENABLE_RESPONSES_API_STORE=1`), each tenant's apart and bounded.

vLLM keeps them by id in dicts, and drops none. An id of another tenant's response is unknown here, whether it is read,
cancelled, continued (`previous_response_id`), or used again (a client may choose its `request_id`).
"""

import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator, MutableMapping
from typing import Any, TypeVar

from hotspan.core.types import MIB

MAX_STORED_RESPONSES = 256
"""Of one tenant; with more, the one that was begun first is forgotten, with its messages and events."""

MAX_STORED_BYTES = 128 * MIB
"""Of one tenant's responses, messages and events, likewise. One that has more by itself is not stored; a body has 64
MiB at most by default. What several responses share, as a conversation's begin, counts in each.
"""

EVENT_BYTES = 1024
"""That an event counts with. They come one by one while a response is streamed in the background."""

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


class _Weighed(TenantStore[_V]):
    """One that knows how large its values are."""

    def __init__(self, tenant: Callable[[], str]) -> None:
        super().__init__(tenant)
        self._sizes: TenantStore[int] = TenantStore(tenant)

    def __setitem__(self, key: str, value: _V) -> None:
        super().__setitem__(key, value)
        self._sizes[key] = size_of(value)

    def __delitem__(self, key: str) -> None:
        super().__delitem__(key)
        del self._sizes[key]

    @property
    def bytes(self) -> int:
        """Of the tenant's."""
        return sum(self._sizes.values())


class _Messages(_Weighed[Any]):
    """What was said up to each response: vLLM stores it first, and all that is stored of a response leaves with it."""

    def __init__(self, tenant: Callable[[], str]) -> None:
        super().__init__(tenant)
        self.responses, self.events = _Results(tenant, self), _Events(tenant, self)

    def __setitem__(self, key: str, value: Any) -> None:
        super().__setitem__(key, value)
        self.bound()

    def bound(self) -> None:
        """Forget the tenant's oldest, until the others are as few and small as may be."""
        stores = (self, self.responses, self.events)
        while self and (len(self) > MAX_STORED_RESPONSES or sum(store.bytes for store in stores) > MAX_STORED_BYTES):
            oldest = next(iter(self))
            for store in stores:
                store.pop(oldest, None)


class _Results(_Weighed[Any]):
    """Responses or events. Without its messages none is stored: it would be continued as if nothing had been said."""

    def __init__(self, tenant: Callable[[], str], messages: _Messages) -> None:
        super().__init__(tenant)
        self._messages = messages

    def __setitem__(self, key: str, value: Any) -> None:
        if key in self._messages:
            super().__setitem__(key, value)
            self._messages.bound()


class _Events(_Results):
    """Events of responses that are streamed in the background: vLLM adds to what it has stored."""

    @property
    def bytes(self) -> int:
        queues = (part for value in self.values() if isinstance(value, tuple) for part in value)
        return EVENT_BYTES * sum(len(part) for part in queues if isinstance(part, deque))


def size_of(value: object) -> int:
    """About how many bytes a value of plain types, models and dataclasses takes; no more than `MAX_STORED_BYTES` are
    counted, give or take one part. Costs 1 us for each part.
    """
    size, left = 0, [value]
    while left and size <= MAX_STORED_BYTES:
        part = left.pop()
        size += sys.getsizeof(part)
        if isinstance(part, dict):
            left += [*part, *part.values()]
        elif isinstance(part, list | tuple | set | frozenset | deque):
            left += part
        else:
            left += _fields(part)
    return size


def _fields(part: object) -> Iterable[object]:
    """Of a model of pydantic's or a dataclass; of anything else none, since it may lead anywhere."""
    names = getattr(part, "__dataclass_fields__", None) or getattr(type(part), "model_fields", None) or ()
    return [getattr(part, name, None) for name in names]


def keep_apart(serving: Any, tenant: Callable[[], str]) -> None:
    """Give vLLM's handler of `/v1/responses` stores that know tenants. Mutates: the handler, before its first request.

    Raises: AttributeError if it keeps responses elsewhere; ValueError if it has some.
    """
    messages = _Messages(tenant)
    # A task leaves when it ends; vLLM holds it by nothing else, so that none may be dropped.
    stores: dict[str, TenantStore[Any]] = {
        "msg_store": messages,
        "response_store": messages.responses,
        "event_store": messages.events,
    }
    tasks: TenantStore[Any] = TenantStore(tenant)
    for name, store in (stores | {"background_tasks": tasks}).items():
        if getattr(serving, name):
            raise ValueError(f"{name} is in use already")
        setattr(serving, name, store)
