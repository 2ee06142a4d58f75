"""The terms on which a chunk is kept, and the scopes by which an owner takes them back.

Names of tenants, tags, sessions and adapters are kept as 64-bit labels (the first bytes of a SHA-256): they fit into a
record on disk and tell a thief no document's name. Two names that share a label are forgotten together, which costs a
recomputation; identity never rests on a label (core/namespace.py has whole digests).
"""

import functools
import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from hotspan.core.types import ChunkKey

DEFAULT_TENANT = "default"
"""Whose requests are those that say no tenant."""

MAX_LABELS = 64
"""Labels that a chunk carries one by one; with more of them any tag takes it."""

NEVER = 0
"""The expiry of what is kept until it is evicted."""


def label(kind: str, name: str) -> int:
    """A name as 64 bits; never 0."""
    data = f"hotspan-label-1:{len(kind)}:{kind}:{name}".encode()
    return int.from_bytes(hashlib.sha256(data).digest()[:8], "little") or 1


WINDOW = label("window", "")
"""Of KV that is kept by its own tokens alone, whatever stood before it: an invalidation that names chunks of a text
takes all of these of its tenant, since any may be of that text."""

_KEPT = frozenset([WINDOW])
"""The labels that wild terms have, too."""


def tenant_label(name: str) -> int:
    """The label of a tenant."""
    return label("tenant", name)


def adapter_label(name: str) -> int:
    """The label of an adapter, by its name whatever its content."""
    return label("adapter", name)


def tag_labels(tags: Iterable[str] = (), session: str | None = None) -> frozenset[int]:
    """The labels of a request's tags and session."""
    named = {label("tag", tag) for tag in tags}
    return frozenset(named if session is None else named | {label("session", session)})


class Terms(Struct, frozen=True, gc=False):
    """Whose a chunk is, what it was made of, and until when it may be used.

    tenant, adapter: labels; 0 for the base model's adapter.
    labels:          of the tags and sessions of all requests that stored or hit it.
    generation:      the cache's when its store began: what was invalidated later takes it along.
    expires_s:       Unix time in seconds from which on it is a miss; 0 for never.
    is_wild:         it had more labels than a record holds: every tag and session takes it along.
    """

    tenant: int = 0
    adapter: int = 0
    labels: frozenset[int] = frozenset()
    generation: int = 0
    expires_s: int = NEVER
    is_wild: bool = False

    def joined(self, other: "Terms") -> "Terms":
        """These terms after a request under `other` hit the chunk: all labels of both, and the earlier expiry."""
        expires = min((at for at in (self.expires_s, other.expires_s) if at), default=NEVER)
        covers = self.is_wild or (other.labels <= self.labels and not other.is_wild)
        if expires == self.expires_s and covers:
            return self
        labels = shared(self.labels | other.labels)
        is_wild = self.is_wild or other.is_wild or len(labels) > MAX_LABELS
        return replace(self, labels=labels & _KEPT if is_wild else labels, expires_s=expires, is_wild=is_wild)

    @property
    def is_window(self) -> bool:
        """Whether they are of a window: what an invalidation names of a text may be in it."""
        return WINDOW in self.labels

    def at(self, generation: int) -> "Terms":
        """These terms as of a generation."""
        return replace(self, generation=generation)

    def until(self, expires_s: int) -> "Terms":
        """These terms with another expiry."""
        return replace(self, expires_s=expires_s)


@functools.lru_cache(maxsize=1024)
def shared(labels: frozenset[int]) -> frozenset[int]:
    """The same labels, in one set for all chunks that have them."""
    return labels


@dataclass(frozen=True, slots=True)
class Scope:
    """Which chunks an invalidation takes: those that match every part that is given, and what stands on them.

    labels:    a chunk carries all of them.
    keys:      chunks by name (of a text), and all windows, which may have parts of that text.
    namespace: one model in one layout.
    With nothing given it is everything.
    """

    tenant: int | None = None
    adapter: int | None = None
    labels: frozenset[int] = frozenset()
    keys: frozenset[ChunkKey] | None = None
    namespace: bytes | None = None

    @property
    def is_everything(self) -> bool:
        """Whether nothing narrows it."""
        return self == Scope()

    def takes(self, key: ChunkKey, namespace: bytes, terms: Terms) -> bool:
        """Whether a chunk under these terms goes, not counting what it stands on."""
        return (
            (self.tenant is None or terms.tenant == self.tenant)
            and (self.adapter is None or terms.adapter == self.adapter)
            and (self.labels <= terms.labels or terms.is_wild)
            and (self.keys is None or key in self.keys or terms.is_window)
            and (self.namespace is None or namespace == self.namespace)
        )

    def to_json(self) -> dict[str, Any]:
        """A dict of JSON types that `from_json` takes."""
        return {
            "tenant": self.tenant,
            "adapter": self.adapter,
            "labels": sorted(self.labels),
            "keys": None if self.keys is None else sorted(key.hex() for key in self.keys),
            "namespace": None if self.namespace is None else self.namespace.hex(),
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> "Scope":
        """The scope that `to_json` gave. Raises: KeyError, TypeError or ValueError for anything else.

        A field that is not known is refused: it may be of a later version, and take more than is understood here.
        """
        if not isinstance(data, Mapping) or data.keys() - {"tenant", "adapter", "labels", "keys", "namespace"}:
            raise ValueError("a scope has a tenant, an adapter, labels, keys and a namespace, and nothing else")
        keys, namespace = data["keys"], data["namespace"]
        return cls(
            tenant=_label_or_none(data["tenant"]),
            adapter=_label_or_none(data["adapter"]),
            labels=frozenset(_label(name) for name in _list(data["labels"])),
            keys=None if keys is None else frozenset(ChunkKey(_digest(key)) for key in _list(keys)),
            namespace=None if namespace is None else _digest(namespace),
        )


def _label(value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < 1 << 64:
        raise ValueError("a label is a whole number of 64 bits")
    return value


def _label_or_none(value: object) -> int | None:
    return None if value is None else _label(value)


def _list(value: object) -> list[object]:
    if not isinstance(value, list):
        raise TypeError("labels and keys are lists")
    return value


def _digest(value: object) -> bytes:
    if not isinstance(value, str) or len(value) != 64:
        raise ValueError("a key or a namespace has 64 hexadecimal digits")
    return bytes.fromhex(value)
