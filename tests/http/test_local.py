"""Commands reach a server of this machine where the environment names a proxy."""

import re
import socket
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import psutil
import pytest

import hotspan
from hotspan.core.addresses import is_here
from hotspan.http.local import open_url, proxy_of


class Here(BaseHTTPRequestHandler):
    """Answers everything."""

    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b"here")

    def log_message(self, *args: object) -> None:
        return


def own_addresses() -> list[str]:
    """Those of this machine's interfaces, as IPv4."""
    found = [each.address for addresses in psutil.net_if_addrs().values() for each in addresses if each.family == 2]
    return [each for each in found if not each.startswith("127.")]


def names() -> list[str]:
    """A server on all interfaces is reached by any of these."""
    return ["127.0.0.1", "localhost", "0.0.0.0", socket.gethostname(), *own_addresses()[:1]]


@pytest.mark.parametrize("name", names())
def test_no_proxy_stands_before_this_machine(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The request goes there itself; one to another host goes to the proxy, which is not there."""
    for variable in ("http_proxy", "HTTP_PROXY"):
        monkeypatch.setenv(variable, "http://127.0.0.1:9")
    for variable in ("no_proxy", "NO_PROXY"):
        monkeypatch.delenv(variable, raising=False)
    with HTTPServer(("0.0.0.0", 0), Here) as server, ThreadPoolExecutor(1) as pool:
        served = pool.submit(server.handle_request)
        assert open_url(f"http://{name}:{server.server_port}/metrics", 30).read() == b"here"
        served.result()
    with pytest.raises(OSError, match=r"refused.*through the proxy http://127.0.0.1:9"):
        open_url("http://hotspan.invalid/metrics", 30)


def test_other_machines_are_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """Addresses of nobody's, names, and a name that only begins as this machine's and is another's."""
    for host in ("192.0.2.1", "2001:db8::1", "hotspan.invalid", "example.com", ""):
        assert not is_here(host), host
    other = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("192.0.2.1", 0))]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *given, **named: other)
    assert not is_here(f"{socket.gethostname()}.elsewhere.example")


def test_a_proxys_password_is_not_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    """The error names the proxy alone."""
    monkeypatch.setenv("http_proxy", "http://me:hidden@127.0.0.1:9")
    monkeypatch.setenv("no_proxy", "inside.invalid")
    assert "127.0.0.1:9" in proxy_of("http://hotspan.invalid/") and "hidden" not in proxy_of("http://hotspan.invalid/")
    assert not proxy_of("http://inside.invalid:80/")


def test_all_commands_ask_so() -> None:
    """No other module opens a URL by itself: whoever adds one uses `open_url`."""
    source = Path(hotspan.__file__).parent
    found = {
        path.relative_to(source).as_posix()
        for path in source.rglob("*.py")
        if re.search(r"\burlopen\(|\bbuild_opener\(|httpx\.(get|post|request|Client)\(|trust_env", path.read_text())
    }
    assert found == {"http/local.py"}
