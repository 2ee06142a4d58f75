"""What vLLM's options for its HTTP front end mean here: TLS, CORS and the access log.

values: the engine's options by their names, as they were written or as its parser has them.
"""

import json
import logging
import ssl
from collections.abc import Mapping
from typing import Any

from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp

from hotspan.core.errors import ConfigError


def tls_options(values: Mapping[str, Any]) -> dict[str, Any]:
    """uvicorn's options for TLS; none without a certificate."""
    if not values.get("ssl_certfile"):
        return {}
    return {
        "ssl_certfile": values["ssl_certfile"],
        "ssl_keyfile": values.get("ssl_keyfile"),
        "ssl_ca_certs": values.get("ssl_ca_certs"),
        "ssl_cert_reqs": int(values.get("ssl_cert_reqs") or ssl.CERT_NONE),
        "ssl_ciphers": values.get("ssl_ciphers"),
    }


def check_tls(values: Mapping[str, Any]) -> None:
    """Raise ConfigError now for a certificate that could not be used once the model is loaded."""
    if values.get("enable_ssl_refresh"):
        raise ConfigError(
            "--enable-ssl-refresh can't be used: a certificate is read once, restart hotspan for a new one"
        )
    if values.get("ssl_keyfile") and not values.get("ssl_certfile"):
        raise ConfigError("--ssl-keyfile is given without --ssl-certfile: TLS needs the certificate as well")
    try:
        given = tls_options(values)
        if not given:
            return
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        # An empty passphrase, or OpenSSL would ask for one on the terminal.
        context.load_cert_chain(given["ssl_certfile"], given["ssl_keyfile"], password="")
        if given["ssl_ca_certs"]:
            context.load_verify_locations(given["ssl_ca_certs"])
        if given["ssl_ciphers"]:
            context.set_ciphers(given["ssl_ciphers"])
    except (OSError, ValueError) as error:  # an SSLError is an OSError
        raise ConfigError(
            f"TLS can't be had with --ssl-certfile {values['ssl_certfile']} ({error}): give a certificate and its key "
            "in PEM, the key without a passphrase"
        ) from error


def allowed(values: Mapping[str, Any], what: str) -> list[str]:
    """The origins, methods or headers that are allowed (CORS). Raises: ConfigError for an option that is not a list."""
    name = f"allowed_{what}"
    given = values.get(name) or []
    wrong = ConfigError(f'--allowed-{what} is {given!r}: give a JSON list of text, such as ["https://a.example"]')
    try:
        found = list(json.loads(given) if isinstance(given, str) else given)
    except (TypeError, ValueError) as error:
        raise wrong from error
    if not all(isinstance(each, str) for each in found):
        raise wrong
    return found


def with_cors(app: ASGIApp, values: Mapping[str, Any]) -> ASGIApp:
    """The app with the CORS headers that the options allow; the app itself if they allow no origin.

    vLLM's own app adds them to its own responses only: neither to refusals for a missing key or a full queue, nor to
    LMI's routes.

    Raises: ConfigError for an option that is not a list.
    """
    origins, methods, headers = (allowed(values, name) for name in ("origins", "methods", "headers"))
    if not origins:
        return app
    return CORSMiddleware(
        app,
        allow_origins=origins,
        allow_credentials=bool(values.get("allow_credentials")),
        allow_methods=methods or ["*"],
        allow_headers=headers or ["*"],
    )


class LeavesOut(logging.Filter):
    """Drops the access log's lines of these paths, as --disable-access-log-for-endpoints names them."""

    def __init__(self, paths: str) -> None:
        super().__init__()
        self._paths = frozenset(path.strip() for path in paths.split(","))

    def filter(self, record: logging.LogRecord) -> bool:
        """Whether a line is written."""
        asked = record.args  # client, method, path with query, version, status
        return not (isinstance(asked, tuple) and len(asked) > 2 and str(asked[2]).partition("?")[0] in self._paths)


def leave_out(values: Mapping[str, Any]) -> None:
    """Keep requests out of the access log of this process as the options tell."""
    if paths := values.get("disable_access_log_for_endpoints"):
        logging.getLogger("uvicorn.access").addFilter(LeavesOut(paths))
