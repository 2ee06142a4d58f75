"""The root of a text's keys: what changes KV besides text, as a request names it and as an engine does.

hotspan's replicas give the engine names of their own: an adapter's with a digest of its content, and a salt for each
tenant. What events show of these is used for requests too, so that both lead to the same keys.
"""

import re
from functools import lru_cache

from xxhash import xxh3_64_intdigest

from hotspan.core.namespace import ENGINE_SALT, engine_salt
from hotspan.core.terms import DEFAULT_TENANT

_ENGINE_NAME = re.compile(r"(?P<name>.+)@[0-9a-f]{12}")
_MAX_NAMES = 4096
_engine_salt = lru_cache(maxsize=1024)(engine_salt)
_UNSALTED = engine_salt(DEFAULT_TENANT)


def root_key(model: str, adapter: str = "", salt: str = "") -> int:
    """What the keys of a text's pieces are chained from."""
    return xxh3_64_intdigest("\0".join((model, adapter, salt)).encode(errors="replace"))


class Roots:
    """The roots of one model's texts.

    is_salted: replicas have shown salts of hotspan's, so requests are counted as having them.
    """

    def __init__(self, model: str = "") -> None:
        self._model = model
        self._adapters: dict[str, str] = {}
        self.is_salted = False

    def of_engine(self, adapter: str, salt: str) -> int | None:
        """The root of a text whose adapter and salt an engine names."""
        found = _ENGINE_NAME.fullmatch(adapter)
        if found and (found["name"] in self._adapters or len(self._adapters) < _MAX_NAMES):
            self._adapters[found["name"]] = adapter
        self.is_salted = self.is_salted or salt.startswith(ENGINE_SALT)
        return root_key(self._model, adapter, "" if salt == _UNSALTED else salt)

    def of_request(self, adapter: str, salt: str, tenant: str = "") -> int:
        """The root of a text that a request asks for. tenant: whose it is to the replicas; "" is the default one."""
        tenant = tenant or DEFAULT_TENANT
        if self.is_salted and (salt or tenant != DEFAULT_TENANT):
            salt = _engine_salt(tenant, salt)
        return root_key(self._model, self._adapters.get(adapter, adapter), salt)
