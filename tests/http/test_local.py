"""Commands reach a server of this machine where the environment names a proxy."""

import re
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

import hotspan
from hotspan.http.local import open_url


class Here(BaseHTTPRequestHandler):
    """Answers everything."""

    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b"here")

    def log_message(self, *args: object) -> None:
        return


@pytest.mark.parametrize("name", ["127.0.0.1", "localhost"])
def test_no_proxy_stands_before_this_machine(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The request goes there itself; one to another host goes to the proxy, which is not there."""
    for variable in ("http_proxy", "HTTP_PROXY"):
        monkeypatch.setenv(variable, "http://127.0.0.1:9")
    for variable in ("no_proxy", "NO_PROXY"):
        monkeypatch.delenv(variable, raising=False)
    with HTTPServer(("127.0.0.1", 0), Here) as server, ThreadPoolExecutor(1) as pool:
        served = pool.submit(server.handle_request)
        assert open_url(f"http://{name}:{server.server_port}/metrics", 30).read() == b"here"
        served.result()
    with pytest.raises(OSError, match="refused"):
        open_url("http://hotspan.invalid/metrics", 30)


def test_all_commands_ask_so() -> None:
    """No other module opens a URL by itself: whoever adds one uses `open_url`."""
    source = Path(hotspan.__file__).parent
    found = {
        path.relative_to(source).as_posix()
        for path in source.rglob("*.py")
        if re.search(r"\burlopen\(|\bbuild_opener\(|httpx\.(get|post|request|Client)\(|trust_env", path.read_text())
    }
    assert found == {"http/local.py"}
