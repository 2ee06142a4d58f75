"""An S3 server on a free port of the loopback: moto's, in a process of its own, where Flask harms nobody."""

import os
import signal
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Callable, Iterable
from types import TracebackType
from typing import Any

CLIENT = {"region": "us-east-1", "access_key_id": "test", "secret_access_key": "a secret that nobody prints"}
"""Settings for obstore, beside the endpoint."""

_OBJECT_BYTES = 256 << 20
"""Up to this size an object stays in the server's memory."""


class S3Server:
    """A server with nothing but empty buckets in it, until `close`."""

    def __init__(self, *buckets: str) -> None:
        self._buckets = buckets
        self.address = ("127.0.0.1", 0)
        self.start()

    def start(self) -> None:
        """Start it where it was, with nothing in it; returns when it answers."""
        environment = os.environ | {"MOTO_S3_DEFAULT_KEY_BUFFER_SIZE": str(_OBJECT_BYTES)}
        command = [sys.executable, __file__, str(self.address[1])]
        self._process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=environment)
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        assert line, "the S3 server did not come up"
        self.address = ("127.0.0.1", int(line))
        for bucket in self._buckets:
            _ask("PUT", f"{self.url}/{bucket}")

    @property
    def url(self) -> str:
        return "http://{}:{}".format(*self.address)

    def stop(self) -> None:
        """Kill it."""
        self._process.kill()
        self.close()

    def freeze(self) -> None:
        """Stop it in the middle of whatever it does, its connections open."""
        self._process.send_signal(signal.SIGSTOP)

    def thaw(self) -> None:
        """Let it go on."""
        self._process.send_signal(signal.SIGCONT)

    def close(self) -> None:
        """End it."""
        self._process.terminate()
        self._process.wait(60)
        if self._process.stdout is not None:
            self._process.stdout.close()

    def __enter__(self) -> "S3Server":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()


def _ask(method: str, url: str) -> None:
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with opener.open(urllib.request.Request(url, method=method), timeout=60) as answer:
        answer.read()


class _OneWriteAtATime:
    """A WSGI application whose conditional writes are atomic, as S3's are: moto checks first and writes then."""

    def __init__(self, application: Callable[..., Iterable[bytes]]) -> None:
        self._application = application
        self._writing = threading.Lock()

    def __call__(self, environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
        if environ["REQUEST_METHOD"] == "GET":
            return self._application(environ, start_response)
        with self._writing:
            return list(self._application(environ, start_response))


def main() -> None:
    from moto.moto_server.werkzeug_app import create_backend_app
    from werkzeug.serving import make_server

    signal.signal(signal.SIGTERM, lambda number, frame: os._exit(0))
    application = _OneWriteAtATime(create_backend_app("s3"))
    server = make_server("127.0.0.1", int(sys.argv[1]), application, threaded=True)
    print(server.server_port, flush=True)
    server.serve_forever()


if __name__ == "__main__":
    main()
