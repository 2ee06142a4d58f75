"""A page in a browser whose own name was led to this machine: it asks as its own server, so it has no other `Host`."""

from dataclasses import dataclass, field

from .wire import exchange

EVIL = ("evil.example", "localhost.evil.example", "127.0.0.1.evil.example", "evil.example.", "evil-localhost")
"""Names that an attacker can register, or that look like one of this machine's."""

READS = ("/", "/health", "/ping", "/metrics", "/dashboard", "/v1/models", "/nowhere")
"""Of every entry."""


@dataclass(frozen=True, slots=True)
class Request:
    """That a page may send to its own server without asking first."""

    method: str
    path: str
    body: bytes = b""
    headers: tuple[str, ...] = field(default=("Content-Type: application/json",))

    def to(self, host: str) -> bytes:
        """Its bytes."""
        lines = (f"{self.method} {self.path} HTTP/1.1", f"Host: {host}", *self.headers, "Connection: close")
        return "\r\n".join((*lines, f"Content-Length: {len(self.body)}", "", "")).encode() + self.body


def statuses(port: int, host: str, *requests: Request) -> list[int]:
    """Of each request by a name, and of the reads that each entry has."""
    found = []
    for request in (*(Request("GET", path) for path in READS), *requests):
        found += [answer.status for answer in exchange(port, request.to(host))]
    return found


def check_refusal(port: int, *requests: Request) -> None:
    """Raises AssertionError unless each request is 421 by a foreign name, and none is by this machine's."""
    for name in EVIL:
        for host in (name, f"{name}:{port}"):
            found = statuses(port, host, *requests)
            assert found == [421] * (len(READS) + len(requests)), (host, found)
    for host in (f"localhost:{port}", f"127.0.0.1:{port}", f"[::1]:{port}"):
        assert 421 not in statuses(port, host), host
