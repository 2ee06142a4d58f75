"""A running server's administration, as the command line calls it."""

import contextlib
import json
import socket
import struct
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from email.message import Message
from http.client import HTTPException
from typing import IO, Any
from urllib.parse import SplitResult, urlsplit

from hotspan.cli.output import Printing
from hotspan.config.admin_token import HOW_TO_GIVE, AdminToken, find_token
from hotspan.config.control import SCHEME, engine_sockets
from hotspan.config.environment import environment
from hotspan.config.options import option
from hotspan.core.errors import MALFORMED, ConfigError, NoAnswerError, RefusedError
from hotspan.http.local import open_url, proxy_of
from hotspan.http.unix import UnixConnection

_EXAMPLE = "http://127.0.0.1:8080"
_DEFAULT_PORT = 8080
_OF_UNIX = "http://localhost/"
"""In the place of a Unix socket's URL."""


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Admin(AdminToken):
    """Calls one server with the admin token that is given, or that the server left on this host."""

    server: str = option(
        "",
        f"URL of the server, or unix:PATH of an engine that your own vLLM runs. Default: {_EXAMPLE}; without a server "
        "of this user there, the engine with the connector that runs on this host.",
    )
    _found: list[str] = field(default_factory=list, init=False, compare=False)
    """The address, once it was looked for: all calls of a command go to one server, whichever others start."""

    @property
    def address(self) -> str:
        """What is asked: what --server says, or what is found at the first time.

        Raises: ConfigError if several engines are found.
        """
        if self.server:
            return self.server
        if not self._found:
            self._found.append(self._find())
        return self._found[0]

    @staticmethod
    def _find() -> str:
        surroundings = environment()
        engines = [] if find_token(_DEFAULT_PORT, surroundings) else engine_sockets(surroundings)
        if len(engines) > 1:
            raise ConfigError(
                f"{len(engines)} engines run on this host: give --server " + " or ".join(each.url for each in engines)
            )
        return engines[0].url if engines else _EXAMPLE

    def get(self, path: str, timeout_s: float = 30) -> Any:
        """What the server answers. Raises: ConfigError with what it says instead, or why it can't be asked."""
        return self._call("GET", path, None, timeout_s)

    def text(self, path: str, timeout_s: float = 30) -> str:
        """The text of a page. Raises: ConfigError, as `get`."""
        return str(self._call("GET", path, None, timeout_s, lambda answer: answer.read().decode()))

    def post(self, path: str, body: dict[str, Any], timeout_s: float = 60) -> Any:
        """What the server answers. Raises: ConfigError with what it says instead, or why it can't be asked."""
        return self._call("POST", path, body, timeout_s)

    def delete(self, path: str, timeout_s: float = 60) -> Any:
        """What the server answers. Raises: ConfigError with what it says instead, or why it can't be asked."""
        return self._call("DELETE", path, None, timeout_s)

    def _call(
        self,
        method: str,
        path: str,
        body: dict[str, Any] | None,
        timeout_s: float,
        read: Callable[[Any], Any] = json.load,
    ) -> Any:
        address = self.address
        token, data = None, None if body is None else json.dumps(body).encode()
        handlers: list[urllib.request.BaseHandler] = [_NoRedirect()]
        if address.startswith(SCHEME):
            shown, base = address, _OF_UNIX
            handlers.append(_UnixHandler(_path(address)))
        else:
            url = _url(address)
            shown = base = f"{url.scheme}://{url.netloc}{url.path.rstrip('/')}"
            token = self.of(url, environment())
        headers = {"content-type": "application/json"} | ({"authorization": f"Bearer {token}"} if token else {})
        request = urllib.request.Request(base.rstrip("/") + path, data, headers, method=method)
        try:
            with open_url(request, timeout_s, *handlers) as answer:
                return read(answer)
        except urllib.error.HTTPError as error:
            body = _json(error)
            said = _reason(error.code, body, token)
            if not isinstance(body, dict) and (proxy := proxy_of(base)):
                said += f" (asked through the proxy {proxy}: for a direct request put its host in no_proxy)"
            raise RefusedError(f"{shown} refused: {said}", body, error.code) from error
        except (OSError, HTTPException) as error:
            reason = getattr(error, "reason", error)
            is_late = isinstance(reason, TimeoutError)
            if address.startswith(SCHEME) and is_late:
                raise NoAnswerError(f"{shown} is stalled: {_stall(address, timeout_s)}") from error
            kind = NoAnswerError if is_late else ConfigError
            asked = f"{shown} can't be asked{_port_tried(base)}"
            raise kind(f"{asked} ({reason}): does it run, and is --server right?") from error
        except ValueError as error:
            raise ConfigError(f"{shown} does not answer as hotspan does: is --server right?") from error


@dataclass(frozen=True, slots=True, kw_only=True)
class StatsOptions(Printing):
    """A server, and how its answer is printed."""

    admin: Admin = field(default_factory=Admin)


@contextlib.contextmanager
def reading(address: str) -> Iterator[None]:
    """A block that reads what a server answered.

    Raises: ConfigError if the answer has not what the block reads: no server of hotspan's gave it.
    """
    try:
        yield
    except (*MALFORMED, AttributeError, IndexError) as error:
        raise ConfigError(f"{address} does not answer as hotspan does: is --server right?") from error


@contextlib.contextmanager
def said_by_each(address: str, answer: Any) -> Iterator[list[tuple[str, dict[str, Any]]]]:
    """A block as `reading`'s: what a server answered, under "", or that of each replica behind a router."""
    with reading(address):
        rows = answer.get("replicas")
        is_router = bool(rows) and isinstance(rows[0], dict) and "body" in rows[0]
        yield [(row["replica"], row["body"]) for row in rows if row["status"] < 300] if is_router else [("", answer)]


@contextlib.contextmanager
def each_replica(address: str, answer: Any) -> Iterator[list[tuple[str, dict[str, Any]]]]:
    """A block as `said_by_each`'s: what was said by each replica, and its name behind that of its server, if any."""
    with said_by_each(address, answer) as servers:
        if not all(said["replicas"] for _, said in servers):
            raise ValueError("a server without an engine core")
        yield [
            (f"{name} {replica['replica']}".lstrip(), replica) for name, said in servers for replica in said["replicas"]
        ]


def _stall(address: str, timeout_s: float) -> str:
    """What keeps the process behind a Unix socket from answering."""
    import psutil

    with contextlib.suppress(OSError, psutil.Error), socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as caller:
        caller.settimeout(timeout_s)
        caller.connect(_path(address))
        pid, _, _ = struct.unpack("3i", caller.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i")))
        return f"process {pid} ({psutil.Process(pid).status()}) gave no answer within {timeout_s:g} s"
    return f"its process gave no answer within {timeout_s:g} s"


def _port_tried(url: str) -> str:
    """The port that a URL without one stands for, in words."""
    parts = urlsplit(url)
    if parts.port is not None or url == _OF_UNIX:
        return ""
    port = 80 if parts.scheme == "http" else 443
    return f" at port {port}, as --server names none (`hotspan serve` has {_DEFAULT_PORT})"


def _path(address: str) -> str:
    return address.removeprefix(SCHEME).removeprefix("//")


def _url(server: str) -> SplitResult:
    try:
        url = urlsplit(server if "://" in server else f"http://{server}")
        _ = url.port
    except ValueError as error:
        raise ConfigError(f"--server {server} is no URL ({error}): give one as in {_EXAMPLE}") from error
    if url.scheme not in ("http", "https") or not url.hostname:
        raise ConfigError(f"--server {server} is no URL of a server: give one as in {_EXAMPLE}")
    return url


def _json(error: urllib.error.HTTPError) -> Any:
    try:
        return json.load(error)
    except (ValueError, OSError, HTTPException):
        return None


def _reason(status: int, body: Any, token: str | None) -> str:
    if status == 401:
        return f"{'it wants another admin token' if token else 'no admin token is known'}: {HOW_TO_GIVE}"
    try:
        return str(body["error"]["message"])
    except (KeyError, TypeError):
        engines = engine_sockets(environment())
        if not engines:
            return f"HTTP {status}; is it a hotspan server?"
        return f"HTTP {status}: a server of vLLM's own is asked by its engine's socket: --server {engines[0].url}"


class _UnixHandler(urllib.request.HTTPHandler):
    """Asks a server behind a Unix socket."""

    def __init__(self, path: str) -> None:
        super().__init__()
        self._socket = path

    def http_open(self, req: urllib.request.Request) -> Any:
        return self.do_open(lambda host, timeout=None, **given: UnixConnection(self._socket, timeout), req)


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """A redirect would carry the token to wherever it points."""

    def redirect_request(
        self, req: urllib.request.Request, fp: IO[bytes], code: int, msg: str, headers: Message, newurl: str
    ) -> None:
        return None
