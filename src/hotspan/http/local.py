"""Requests of commands to a server: to an address of this machine never through a proxy, whatever the environment says.

Most companies' machines have `http_proxy` set, and few have `no_proxy` beside it.
"""

import urllib.error
import urllib.request
from http.client import HTTPResponse
from urllib.parse import urlsplit

from hotspan.core.addresses import is_here
from hotspan.core.redaction import redacted_text


def open_url(
    request: str | urllib.request.Request, timeout_s: float, *handlers: urllib.request.BaseHandler
) -> HTTPResponse:
    """Send a request, given as its URL or whole.

    Raises: OSError, which names the proxy if one was asked; of these, HTTPError for a status of 400 and above.
    """
    url = request if isinstance(request, str) else request.full_url
    proxy = proxy_of(url)
    direct = [] if proxy else [urllib.request.ProxyHandler({})]
    opener = urllib.request.build_opener(*direct, *handlers)
    try:
        response: HTTPResponse = opener.open(request, timeout=timeout_s)
    except urllib.error.HTTPError:
        raise
    except urllib.error.URLError as error:
        if not proxy:
            raise
        told = f"{error.reason}; it was asked through the proxy {proxy}: for a direct request put its host in no_proxy"
        raise urllib.error.URLError(
            TimeoutError(told) if isinstance(error.reason, TimeoutError) else OSError(told)
        ) from error
    return response


def proxy_of(url: str) -> str:
    """The proxy that requests to a URL go through, without a password; empty for none."""
    parts = urlsplit(url)
    host = parts.hostname or ""
    proxy = urllib.request.getproxies().get(parts.scheme, "")
    if not proxy or is_here(host) or urllib.request.proxy_bypass(parts.netloc.rpartition("@")[2]):
        return ""
    return redacted_text(proxy)
