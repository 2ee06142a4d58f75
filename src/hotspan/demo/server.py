"""A server of ours as a child process: started, waited for, stopped, its log in a file."""

import os
import shlex
import signal
import subprocess
import sys
import time
import urllib.error
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Final, Self

from hotspan.core.aftermath import Aftermath
from hotspan.core.errors import EngineError
from hotspan.http.local import open_url

_POLL_S: Final = 0.25
_LOG_LINES: Final = 25


def serve_command(model: Path, arguments: Sequence[str]) -> tuple[str, ...]:
    """The command line that serves `model` with this Python."""
    return (sys.executable, "-m", "hotspan", "serve", str(model), *arguments)


class ServerProcess:
    """One server. Use it as a context manager: leaving it stops the server.

    It runs in a session of its own, so that Ctrl-C reaches the demo alone, which then stops it in order. If the demo is
    killed, `aftermath` stops it.
    """

    def __init__(
        self,
        command: Sequence[str],
        environment: Mapping[str, str],
        port: int,
        log: Path,
        aftermath: Aftermath,
        stop_timeout_s: float = 60.0,
    ) -> None:
        self.command = shlex.join([*(f"{key}={value}" for key, value in environment.items()), *command])
        self.url = f"http://127.0.0.1:{port}"
        self.log = log
        self._arguments = list(command)
        self._environment = environment
        self._aftermath = aftermath
        self._stop_timeout_s = stop_timeout_s

    def __enter__(self) -> Self:
        self.log.parent.mkdir(parents=True, exist_ok=True)
        with self.log.open("wb") as log:
            self._process = subprocess.Popen(
                self._arguments,
                env={**os.environ, **self._environment},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self._aftermath.end(self._process.pid, self._stop_timeout_s, is_group=True)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    @property
    def pid(self) -> int:
        return self._process.pid

    def wait_until_ready(self, timeout_s: float, on_wait: Callable[[float, str], None]) -> None:
        """Return once /ping answers 200. `on_wait` hears the seconds so far and the log's last line.

        Raises: EngineError, with the end of the log, if the server dies or isn't ready in time.
        """
        started = time.monotonic()
        while True:
            waited = time.monotonic() - started
            self.check_alive()
            if self._answers():
                return
            if waited > timeout_s:
                raise EngineError(f"the server was not ready after {timeout_s:.0f} s.{self._end_of_log()}")
            on_wait(waited, self.last_line())
            time.sleep(_POLL_S)

    def check_alive(self) -> None:
        """Raises: EngineError, with the end of the log, if the server has ended."""
        status = self._process.poll()
        if status is not None:
            raise EngineError(f"the server ended with status {status}.{self._end_of_log()}")

    def stop(self) -> None:
        """Ask it to stop and wait; kill it if it doesn't in time. Does nothing for one that has ended."""
        if self._process.poll() is not None:
            return
        self._process.send_signal(signal.SIGTERM)
        try:
            self._process.wait(self._stop_timeout_s)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def last_line(self) -> str:
        lines = self._tail(1)
        return lines[0].strip() if lines else ""

    def _answers(self) -> bool:
        try:
            with open_url(f"{self.url}/ping", 2) as response:
                return bool(response.status == 200)
        except (urllib.error.URLError, OSError):
            return False

    def _end_of_log(self) -> str:
        return f" The end of its log, {self.log}:\n" + "\n".join(self._tail(_LOG_LINES))

    def _tail(self, lines: int) -> list[str]:
        with self.log.open(errors="replace") as log:
            return [line.rstrip() for line in deque(log, maxlen=lines)]
