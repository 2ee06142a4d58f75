"""What the key store's files say: JSON, versioned, every key in it wrapped.

    store.json             {"version": 1, "wrapper": id of the KEK, "created": Unix time}
    SHA256(TENANT).json    {"version": 1, "tenant": name, "names": wrapped, "roots": [
                            {"id": 16 bytes as hex, "created": Unix time, "wrapped": base64, "wrapper": id of the KEK}]}

`names` is wrapped for the tenant and its first root, each root for the tenant and its own id, so that no blob serves in
another's place. Roots are only ever appended: two records with the same first root are the same tenant between shreds.
"""

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Literal

import msgspec

from hotspan.core.errors import KeyUnavailable
from hotspan.keyring.sealing import KEY_ID_BYTES
from hotspan.keyring.wrapped import wrapped_by


@dataclass(frozen=True, slots=True)
class StoreHeader:
    """What a key store says of itself: the KEK that new keys are wrapped by, and its Unix time of making."""

    wrapper_id: str
    created_s: float


@dataclass(frozen=True, slots=True)
class WrappedRoot:
    """One root of a tenant: `id` is 16 bytes, `created_s` Unix time."""

    id: bytes
    created_s: float
    wrapped: bytes = field(repr=False)


@dataclass(frozen=True, slots=True)
class TenantRecord:
    """One tenant's wrapped keys; at least one root, the newest last."""

    tenant: str
    names: bytes = field(repr=False)
    roots: tuple[WrappedRoot, ...]

    @property
    def root_ids(self) -> tuple[bytes, ...]:
        """The ids of the roots, the newest last."""
        return tuple(root.id for root in self.roots)

    def wrappers(self) -> set[str]:
        """The ids of the KEKs that it takes to unwrap all of it."""
        return {wrapped_by(blob) for blob in (self.names, *(root.wrapped for root in self.roots))}

    def with_root(self, root: WrappedRoot) -> "TenantRecord":
        """This record and one more root, the newest."""
        return replace(self, roots=(*self.roots, root))

    def rewrapped(self, change: Callable[[bytes, bytes], bytes]) -> "TenantRecord":
        """This record with each blob replaced by `change(blob, context)`."""
        return TenantRecord(
            self.tenant,
            change(self.names, names_context(self.tenant, self.roots[0].id)),
            tuple(replace(r, wrapped=change(r.wrapped, root_context(self.tenant, r.id))) for r in self.roots),
        )


def names_context(tenant: str, first_root: bytes) -> bytes:
    """What the tenant's name secret is bound to."""
    return _context(b"names", tenant, first_root)


def root_context(tenant: str, root_id: bytes) -> bytes:
    """What a root is bound to."""
    return _context(b"root", tenant, root_id)


def _context(purpose: bytes, tenant: str, root_id: bytes) -> bytes:
    parts = (b"hotspan-key-1", purpose, tenant.encode(), root_id)
    return b"".join(len(part).to_bytes(8, "big") + part for part in parts)


def file_name(tenant: str) -> str:
    """The name of the tenant's file; says nothing of the tenant's name, and any name makes a valid one."""
    return f"{hashlib.sha256(tenant.encode()).hexdigest()}.json"


class _Header(msgspec.Struct):
    version: Literal[1]
    wrapper: str
    created: float


class _Root(msgspec.Struct):
    id: str
    created: float
    wrapped: bytes
    wrapper: str


class _Record(msgspec.Struct):
    version: Literal[1]
    tenant: str
    names: bytes
    roots: list[_Root]


def encode_header(header: StoreHeader) -> bytes:
    """The content of store.json."""
    return _json(_Header(1, header.wrapper_id, header.created_s))


def decode_header(content: bytes) -> StoreHeader:
    """What `encode_header` was given. Raises: KeyUnavailable."""
    try:
        data = msgspec.json.decode(content, type=_Header)
    except (msgspec.MsgspecError, ValueError) as error:
        raise _damaged("the key store's store.json") from error
    return StoreHeader(data.wrapper, data.created)


def encode_record(record: TenantRecord) -> bytes:
    """The content of a tenant's file. A root's `wrapper` stands there for people: the blob itself says it too."""
    roots = [_Root(root.id.hex(), root.created_s, root.wrapped, wrapped_by(root.wrapped)) for root in record.roots]
    return _json(_Record(1, record.tenant, record.names, roots))


def decode_record(content: bytes, name: str) -> TenantRecord:
    """What `encode_record` was given. Raises: KeyUnavailable if `content` is not that, or not of the file `name`."""
    try:
        data = msgspec.json.decode(content, type=_Record)
        roots = tuple(WrappedRoot(bytes.fromhex(root.id), root.created, root.wrapped) for root in data.roots)
        whole = bool(roots) and all(len(root.id) == KEY_ID_BYTES for root in roots)
        if not whole or file_name(data.tenant) != name:
            raise ValueError("not this file's record")
    except (msgspec.MsgspecError, ValueError) as error:
        raise _damaged(f"the key store's file {name}") from error
    return TenantRecord(data.tenant, data.names, roots)


def _json(data: msgspec.Struct) -> bytes:
    return msgspec.json.format(msgspec.json.encode(data), indent=1) + b"\n"


def _damaged(what: str) -> KeyUnavailable:
    return KeyUnavailable(
        f"{what} is damaged, or of another version of hotspan: restore it, or shred the tenant to give it new keys"
    )
