"""The processes of a comparison: each serves a port, in a group that is ended as a whole."""

import os
import signal
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Final, Self

from hotspan.core.aftermath import Aftermath

READY_S: Final = 300.0
_POLL_S: Final = 0.25


class Child:
    """A process group that serves a port; its output goes to a log. Leaving the context ends it."""

    def __init__(
        self, command: Sequence[str], port: int, log: Path, aftermath: Aftermath, environment: Mapping[str, str]
    ) -> None:
        self.port = port
        self._log = log
        with log.open("ab") as output:
            self._process = subprocess.Popen(
                command,
                env={**os.environ, **environment},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )
        aftermath.end(self._process.pid, is_group=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.end(signal.SIGTERM)

    @property
    def pid(self) -> int:
        return self._process.pid

    def wait(self, page: str) -> None:
        """Until the port is open, and `page` answers 200 if there is one."""
        deadline = time.monotonic() + READY_S
        while not self._answers(page):
            if self._process.poll() is not None or time.monotonic() > deadline:
                raise SystemExit(f"not ready: {' '.join(map(str, self._process.args))}\nIts log is {self._log}")
            time.sleep(_POLL_S)

    def end(self, how: signal.Signals) -> None:
        """SIGTERM goes to the process and is waited for; SIGKILL goes to its group."""
        if self._process.poll() is None:
            if how is signal.SIGTERM:
                self._process.terminate()
                try:
                    self._process.wait(60)
                except subprocess.TimeoutExpired:
                    how = signal.SIGKILL
            if how is signal.SIGKILL:
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()

    def _answers(self, page: str) -> bool:
        try:
            if not page:
                socket.create_connection(("127.0.0.1", self.port), timeout=2).close()
                return True
            with urllib.request.urlopen(f"http://127.0.0.1:{self.port}{page}", timeout=2) as response:
                return bool(response.status == 200)
        except (urllib.error.URLError, OSError):
            return False
