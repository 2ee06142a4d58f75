"""An S3 server on a free port of the loopback: moto's, in a process of its own, where Flask harms nobody.

It runs in a fork of that process, which has imported moto once, so that a killed server is back at once.
"""

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

    def __init__(self, *buckets: str, port: int = 0) -> None:
        """port: where it listens; 0 for any free one."""
        self._buckets = buckets
        self.address = ("127.0.0.1", port)
        environment = os.environ | {"MOTO_S3_DEFAULT_KEY_BUFFER_SIZE": str(_OBJECT_BYTES)}
        pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
        self._parent = subprocess.Popen([sys.executable, __file__], text=True, env=environment, **pipes)
        self.start()

    def start(self) -> None:
        """Start it where it was, with nothing in it; returns when it answers."""
        self._pid, port = map(int, self._tell(str(self.address[1])).split())
        self.address = ("127.0.0.1", port)
        for bucket in self._buckets:
            _ask("PUT", f"{self.url}/{bucket}")

    @property
    def pid(self) -> int:
        """The process that serves now."""
        return self._pid

    @property
    def url(self) -> str:
        return "http://{}:{}".format(*self.address)

    def stop(self) -> None:
        """Kill it."""
        self._tell("stop")

    def freeze(self) -> None:
        """Stop it in the middle of whatever it does, its connections open."""
        os.kill(self._pid, signal.SIGSTOP)

    def thaw(self) -> None:
        """Let it go on."""
        os.kill(self._pid, signal.SIGCONT)

    def close(self) -> None:
        """End it, and the process that starts it."""
        with self._parent:
            assert self._parent.stdin is not None
            self._parent.stdin.close()

    def _tell(self, command: str) -> str:
        """What the process answers that starts the server."""
        assert self._parent.stdin is not None and self._parent.stdout is not None
        self._parent.stdin.write(command + "\n")
        self._parent.stdin.flush()
        line: str = self._parent.stdout.readline()
        assert line, "the S3 server did not come up"
        return line

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
    """Serve on the port of each line, until one says "stop" or there are no more."""
    import moto.s3.responses  # so that no fork has to
    from moto.moto_server import werkzeug_app

    assert moto.s3.responses and werkzeug_app
    for line in sys.stdin:
        pid = os.fork()
        if not pid:
            try:
                _serve(int(line))
            finally:
                print("it does not serve", flush=True)
                os._exit(1)
        sys.stdin.readline()
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        print("stopped", flush=True)


def _serve(port: int) -> None:
    from moto.moto_server.werkzeug_app import create_backend_app
    from werkzeug.serving import WSGIRequestHandler, make_server

    class Silent(WSGIRequestHandler):
        """Nobody reads a line for each request."""

        def log_request(self, code: int | str = "-", size: int | str = "-") -> None:
            return None

    application = _OneWriteAtATime(create_backend_app("s3"))
    server = make_server("127.0.0.1", port, application, threaded=True, request_handler=Silent)
    print(os.getpid(), server.server_port, flush=True)
    server.serve_forever()


if __name__ == "__main__":
    main()
