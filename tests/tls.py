"""One TLS context for all of httpx's clients in a process of tests.

`httpx.get` and its like make a client for each request, and that reads the certificates of all authorities: 20 ms.
"""

import functools
import os
from typing import Any

from httpx._transports import default

_create = default.create_ssl_context


@functools.cache
def _usual(file: str | None, directory: str | None) -> Any:
    """The context for certificates at these places, which it has from the environment."""
    return _create()


def _context(verify: Any = True, cert: Any = None, trust_env: bool = True) -> Any:
    if verify is True and cert is None and trust_env:
        return _usual(os.environ.get("SSL_CERT_FILE"), os.environ.get("SSL_CERT_DIR"))
    return _create(verify, cert, trust_env)


def share_tls_context() -> None:
    """From now on, in this process."""
    default.create_ssl_context = _context
