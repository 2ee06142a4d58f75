"""A program in a process of its own: started, waited for until it answers, and ended with all that it started."""

import os
import signal
import socket
import subprocess
import threading
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Final, Self

from hotspan.core.aftermath import Aftermath
from kit.waiting import until

READY_S: Final = 300.0
_ENDS_S: Final = 60.0


class Child:
    """A process group; leaving the context ends it.

    port:        that it serves, for `wait`. log: gets what it says; None: nobody does.
    aftermath:   ends it if this process is killed. environment: beside this process's own.
    pass_fds:    descriptors that it inherits. is_read: `line` reads what it says. is_told: it listens to `tell`.
    """

    def __init__(
        self,
        command: Sequence[str],
        port: int = 0,
        log: Path | None = None,
        aftermath: Aftermath | None = None,
        environment: Mapping[str, str] | None = None,
        *,
        pass_fds: Sequence[int] = (),
        is_read: bool = False,
        is_told: bool = False,
    ) -> None:
        self.port = port
        self._log = log
        with (log or Path(os.devnull)).open("ab") as output:
            self._process = subprocess.Popen(
                command,
                env={**os.environ, **(environment or {})},
                stdin=subprocess.PIPE if is_told else subprocess.DEVNULL,
                stdout=subprocess.PIPE if is_read else output,
                stderr=None if is_read else output,
                start_new_session=True,
                pass_fds=pass_fds,
            )
        if aftermath is not None:
            aftermath.end(self._process.pid, is_group=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.end(signal.SIGTERM)
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                pipe.close()

    @property
    def pid(self) -> int:
        return self._process.pid

    def wait(self, page: str = "", within_s: float = READY_S) -> Self:
        """Until the port is open, and `page` answers 200 if there is one. Raises: SystemExit if that does not come."""
        try:
            until(lambda: self._process.poll() is not None or self._answers(page), within_s=within_s)
        except AssertionError as error:
            raise SystemExit(self._not_ready()) from error
        if self._process.poll() is not None:
            raise SystemExit(self._not_ready())
        return self

    def tell(self, line: str | None) -> None:
        """Write a line to its stdin; None: there are no more. Raises: BrokenPipeError if it has ended."""
        assert self._process.stdin is not None
        if line is None:
            self._process.stdin.close()
        else:
            self._process.stdin.write(f"{line}\n".encode())
            self._process.stdin.flush()

    def line(self, within_s: float = READY_S) -> str:
        """The next line that it says; empty if it ended, or is killed for saying nothing for so long."""
        assert self._process.stdout is not None
        overdue = threading.Timer(within_s, self.end, (signal.SIGKILL,))
        overdue.start()
        try:
            return self._process.stdout.readline().decode()
        finally:
            overdue.cancel()

    def end(self, how: signal.Signals) -> None:
        """SIGTERM goes to the process and is waited for; SIGKILL goes to its group."""
        if self._process.poll() is None:
            if how is signal.SIGTERM:
                self._process.terminate()
                try:
                    self._process.wait(_ENDS_S)
                except subprocess.TimeoutExpired:
                    how = signal.SIGKILL
            if how is signal.SIGKILL:
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()

    def _not_ready(self) -> str:
        said = f"\nIts log is {self._log}" if self._log is not None else ""
        return f"not ready: {' '.join(map(str, self._process.args))}{said}"  # type: ignore[arg-type]

    def _answers(self, page: str) -> bool:
        try:
            if not page:
                socket.create_connection(("127.0.0.1", self.port), timeout=2).close()
                return True
            with urllib.request.urlopen(f"http://127.0.0.1:{self.port}{page}", timeout=2) as response:
                return bool(response.status == 200)
        except (urllib.error.URLError, OSError):
            return False
