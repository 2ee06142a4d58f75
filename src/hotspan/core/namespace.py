"""Names for KV: everything that changes a chunk's bytes is folded into its key.

    namespace digest = sha256( tagged, length-prefixed fields: model, dtypes, layout, parallelism, chunk size, ... )
    chunk key        = sha256( namespace digest | tenant's secret | adapter digest | group | engine's chained hash )
    window key       = sha256( namespace digest | tenant's secret | adapter digest | group | sha256( tokens ) )
    output key       = sha256( namespace digest | tenant's secret | adapter digest | salt | sha256( medium's name ) )

The engine's chained hash covers the tokens, all tokens before them, the salt, the adapter's name and the multimodal
inputs; what it leaves out (docs/architecture.md, Identity) is in the namespace and the adapter digest.
"""

import hashlib
from collections.abc import Mapping

from hotspan.core.types import ChunkKey

NO_ADAPTER = bytes(32)
"""The adapter digest of the base model."""

NO_TENANT = bytes(32)
"""The tenant's secret where tenants share what they compute."""

ENGINE_SALT = "hotspan:"
"""The beginning of all that `engine_salt` returns."""


def tenant_digest(tenant: str) -> bytes:
    """What stands for a tenant where there is no keyring to give it a secret."""
    return hashlib.sha256(b"hotspan-tenant-1" + tenant.encode()).digest()


def engine_salt(tenant: str, salt: str = "") -> str:
    """What a replica salts a tenant's texts with in vLLM's own keys, given the client's salt."""
    parts = [part.encode(errors="surrogatepass") for part in (tenant, salt)]
    data = b"hotspan-salt-1" + b"".join(len(part).to_bytes(4, "big") + part for part in parts)
    return ENGINE_SALT + hashlib.sha256(data).hexdigest()


def namespace_digest(fields: Mapping[str, str | int | bytes]) -> bytes:
    """32 bytes that differ when any field differs, whatever the fields contain.

    Each name and value is length-prefixed and each value tagged with its type, so that no two different sets of fields
    spell the same byte string; the order of the mapping does not matter.
    Raises: TypeError for a value that is not a str, int or bytes.
    """
    digest = hashlib.sha256(b"hotspan-namespace-1")
    for name in sorted(fields):
        value = fields[name]
        if isinstance(value, bytes):
            tag, data = b"b", value
        elif isinstance(value, str):
            tag, data = b"s", value.encode()
        elif isinstance(value, int) and not isinstance(value, bool):
            tag, data = b"i", str(value).encode()
        else:
            raise TypeError(f"namespace field {name!r} is a {type(value).__name__}; give a str, int or bytes")
        for part in (name.encode(), tag + data):
            digest.update(len(part).to_bytes(8, "little"))
            digest.update(part)
    return digest.digest()


class ChunkKeyer:
    """Chunk keys of one `namespace`, tenant and adapter; about a microsecond each."""

    __slots__ = ("_prefix", "namespace")

    def __init__(self, namespace: bytes, adapter: bytes = NO_ADAPTER, tenant: bytes = NO_TENANT) -> None:
        if not len(namespace) == len(adapter) == len(tenant) == 32:
            raise ValueError("a namespace, an adapter digest and a tenant's secret are 32 bytes each")
        self.namespace = namespace
        self._prefix = hashlib.sha256(b"hotspan-chunk-2" + namespace + tenant + adapter)

    def key(self, engine_hash: bytes, group: int) -> ChunkKey:
        """The key of the chunk that ends at `engine_hash` in KV cache group `group`."""
        digest = self._prefix.copy()
        digest.update(group.to_bytes(4, "little") + engine_hash)
        return ChunkKey(digest.digest())

    def window_key(self, tokens: bytes, group: int) -> ChunkKey:
        """The key of a window's KV in KV cache group `group`: of its own tokens, whatever comes before them.

        tokens: its token ids, uint32 little-endian. No window has the key of a chunk: what is hashed differs in length.
        """
        digest = self._prefix.copy()
        digest.update(group.to_bytes(4, "little") + b"window-1" + hashlib.sha256(tokens).digest())
        return ChunkKey(digest.digest())

    def output_key(self, identifier: str) -> ChunkKey:
        """The key of the encoder output of a medium, whatever text it stands in; no chunk and no window has it."""
        digest = self._prefix.copy()
        digest.update(b"encoder-1" + hashlib.sha256(identifier.encode()).digest())
        return ChunkKey(digest.digest())

    def salted(self, salt: str) -> "ChunkKeyer":
        """Names of windows and encoder outputs for requests with this salt of the engine's: others never find them.

        Keys of chunks need none: the salt is in the engine's hash.
        """
        salted = ChunkKeyer.__new__(ChunkKeyer)
        salted.namespace = self.namespace
        salted._prefix = self._prefix.copy()
        salted._prefix.update(b"salt-1" + hashlib.sha256(salt.encode(errors="surrogatepass")).digest())
        return salted

    @property
    def owner(self) -> bytes:
        """32 bytes that stand for the namespace, the tenant and the adapter together."""
        return self._prefix.digest()
