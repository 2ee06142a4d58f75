"""Which texts saved the most: what was loaded of them in place of being computed."""

from collections.abc import Sequence
from typing import NamedTuple

from msgspec import Struct

from hotspan.core.scopes import ScopeSet
from hotspan.core.terms import Scope, Terms
from hotspan.core.types import ChunkKey

_CAPACITY = 512
_MAX_TENANTS = 4096


class SavedText(NamedTuple):
    """A text by its tags, or by the first chunk of its prompts if these had no tags."""

    tags: tuple[str, ...]
    first: ChunkKey
    terms: Terms


class Saved(Struct, frozen=True):
    """hits: loads. tokens: that were loaded. seconds: of computing them, less those of loading; 0 while unknown."""

    hits: int = 0
    tokens: int = 0
    seconds: float = 0.0


class Savings:
    """What was saved by text, of at most 512 texts: a new one takes the place of the one that saved least.

    The list has names of documents: it forgets what is invalidated, as the tiers do.

    tenant_tokens: loaded, by tenant, of all texts; of 4,096 tenants, in the same way. Invalidations do not change it.
    """

    def __init__(self, capacity: int = _CAPACITY) -> None:
        self._capacity = capacity
        self._texts: dict[tuple[int, tuple[str, ...] | ChunkKey], tuple[SavedText, Saved]] = {}
        self.tenant_tokens: dict[int, int] = {}

    def note(self, text: SavedText, tokens: int, seconds: float) -> None:
        """Tokens of a text were loaded; to compute them would have taken so many seconds more."""
        name = text.terms.tenant, text.tags or text.first
        _, before = self._texts.pop(name, (None, Saved()))
        if len(self._texts) >= self._capacity:
            del self._texts[min(self._texts, key=lambda each: _rank(self._texts[each][1]))]
        saved = Saved(before.hits + 1, before.tokens + tokens, before.seconds + max(0.0, seconds))
        self._texts[name] = text, saved
        self._count(text.terms.tenant, tokens)

    def top(self, count: int) -> list[tuple[SavedText, Saved]]:
        """Those that saved most: by seconds, or by tokens where seconds are not known."""
        return sorted(self._texts.values(), key=lambda each: _rank(each[1]), reverse=True)[:count]

    def invalidate(self, scopes: Sequence[Scope], namespace: bytes) -> None:
        """Forget the texts that one of the scopes takes."""
        known = ScopeSet(scopes)
        for name, (text, _) in list(self._texts.items()):
            if known.takes(text.first, namespace, text.terms) or known.may_name(namespace, text.terms):
                del self._texts[name]

    def clear(self) -> None:
        """Forget all texts."""
        self._texts.clear()

    def _count(self, tenant: int, tokens: int) -> None:
        counts = self.tenant_tokens
        if tenant not in counts and len(counts) >= _MAX_TENANTS:
            del counts[min(counts, key=counts.__getitem__)]
        counts[tenant] = counts.get(tenant, 0) + tokens


def _rank(saved: Saved) -> tuple[float, int]:
    return saved.seconds, saved.tokens
