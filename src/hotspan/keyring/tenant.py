"""One tenant's keys in the clear, as a running engine holds them, and the way to and from what the store keeps."""

import os
from dataclasses import dataclass, field, replace

from hotspan.core.errors import KeyUnavailable
from hotspan.keyring.records import TenantRecord, WrappedRoot, names_context, root_context
from hotspan.keyring.sealing import KEY_ID_BYTES, Root
from hotspan.keyring.wrap import KEY_BYTES, KeyWrapper


@dataclass(frozen=True, slots=True)
class TenantSecrets:
    """`names` is folded into the names of the tenant's chunks, 32 bytes; `roots` are its root keys, the newest last."""

    tenant: str
    names: bytes = field(repr=False)
    roots: tuple[Root, ...]

    @property
    def root_ids(self) -> tuple[bytes, ...]:
        """The ids of the roots, the newest last."""
        return tuple(root.id for root in self.roots)

    def with_root(self, root: Root) -> "TenantSecrets":
        """These and one more root, the newest."""
        return replace(self, roots=(*self.roots, root))

    def continued_by(self, root_ids: tuple[bytes, ...]) -> bool:
        """Whether a record with these roots is this tenant's, not shredded since: roots are only ever appended."""
        return root_ids[: len(self.roots)] == self.root_ids


def fresh_root() -> Root:
    """A new random root. Always of the operating system's randomness: a key from a seeded generator is none."""
    return Root(os.urandom(KEY_ID_BYTES), os.urandom(KEY_BYTES))


def fresh_secrets(tenant: str) -> TenantSecrets:
    """New random keys for a tenant that has none."""
    return TenantSecrets(tenant, os.urandom(KEY_BYTES), (fresh_root(),))


def wrap_root(wrapper: KeyWrapper, tenant: str, root: Root, created_s: float) -> WrappedRoot:
    """What the store keeps of `root`. Blocks for the KMS. Raises: KeyUnavailable."""
    return WrappedRoot(root.id, created_s, wrapper.wrap(root.secret, root_context(tenant, root.id)))


def wrap_secrets(wrapper: KeyWrapper, secrets: TenantSecrets, created_s: float) -> TenantRecord:
    """What the store keeps of `secrets`. Blocks for the KMS. Raises: KeyUnavailable."""
    return TenantRecord(
        secrets.tenant,
        wrapper.wrap(secrets.names, names_context(secrets.tenant, secrets.roots[0].id)),
        tuple(wrap_root(wrapper, secrets.tenant, root, created_s) for root in secrets.roots),
    )


def unwrap_secrets(wrapper: KeyWrapper, record: TenantRecord, known: TenantSecrets | None) -> TenantSecrets:
    """The keys that `record` holds; what `known` has of them is not asked of the wrapper again.

    Blocks: for the KMS, one call a key.
    Raises: KeyUnavailable.
    """
    if known is None or not known.continued_by(record.root_ids):
        names = wrapper.unwrap(record.names, names_context(record.tenant, record.roots[0].id))
        known = TenantSecrets(record.tenant, names, ())
    for root in record.roots[len(known.roots) :]:
        secret = wrapper.unwrap(root.wrapped, root_context(record.tenant, root.id))
        known = known.with_root(Root(root.id, secret))
    if any(len(secret) != KEY_BYTES for secret in (known.names, *(root.secret for root in known.roots))):
        raise KeyUnavailable("an unwrapped key has the wrong length: restore the key store, or shred the tenant")
    return known
