"""Requests of commands to a server: to an address of this machine never through a proxy, whatever the environment says.

Most companies' machines have `http_proxy` set, and few have `no_proxy` beside it.
"""

import urllib.request
from http.client import HTTPResponse
from urllib.parse import urlsplit

from hotspan.core.addresses import is_loopback


def open_url(
    request: str | urllib.request.Request, timeout_s: float, *handlers: urllib.request.BaseHandler
) -> HTTPResponse:
    """Send a request, given as its URL or whole. Raises: OSError; of these, HTTPError for a status of 400 and above."""
    url = request if isinstance(request, str) else request.full_url
    direct = [urllib.request.ProxyHandler({})] if is_loopback(urlsplit(url).hostname or "") else []
    response: HTTPResponse = urllib.request.build_opener(*direct, *handlers).open(request, timeout=timeout_s)
    return response
