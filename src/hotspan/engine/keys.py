"""The keyring as admission and the tiers need it: tenants come by name, and go by label into records and frames."""

from collections.abc import Iterable

from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from hotspan.core.frame import FrameSealing
from hotspan.core.terms import tenant_label
from hotspan.keyring.keyring import Keyring


class TenantKeys:
    """A keyring that finds tenants by label. Calls return at once and may come from any thread."""

    def __init__(self, keyring: Keyring, tenants: Iterable[str]) -> None:
        self.keyring = keyring
        self._tenants = {tenant_label(tenant): tenant for tenant in tenants}

    def names(self, tenant: str) -> bytes | None:
        """The secret in the names of a tenant's chunks; None while it is not to be had."""
        self._tenants[tenant_label(tenant)] = tenant
        return self.keyring.names(tenant)

    def sealing(self, tenant: int) -> FrameSealing | None:
        """What this process seals a tenant's frames with."""
        name = self._tenants.get(tenant)
        return None if name is None else self.keyring.sealing(name)

    def opening(self, key_id: bytes, writer: bytes) -> AESGCM | None:
        """The key of a frame; None if it was shredded or can't be had."""
        return self.keyring.opening(key_id, writer)
