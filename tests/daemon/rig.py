"""A real daemon in a process of its own, which tests kill, freeze and start again."""

import contextlib
import http.client
import json
import os
import secrets
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any, ClassVar

from hotspan.l2.daemon import DaemonStore
from kit.waiting import PATIENCE_S

SHARED_MEMORY = Path("/dev/shm")


def patient_store(unix_socket: Path) -> DaemonStore:
    """A replica's store that gives up neither a call nor a copy because the machine stands still."""
    return DaemonStore(unix_socket, deadline_s=PATIENCE_S, lease_s=10 * PATIENCE_S)


class DaemonProcess:
    """`hotspan daemon` with little memory, on a free port that it keeps when it is started again."""

    PROGRAM: ClassVar[tuple[str, ...]] = ("-m", "hotspan")

    def __init__(self, size_gib: float = 1 / 16, options: tuple[str, ...] = ()) -> None:
        self.name = f"hotspan-test-{os.getpid()}-{secrets.token_hex(4)}"
        self.segment = SHARED_MEMORY / self.name
        self.kept = SHARED_MEMORY / f".{self.name}.hotspan"
        self.unix_socket = SHARED_MEMORY / f"{self.name}.sock"
        self.port = 0
        self._size_gib = size_gib
        self._options = options
        self._process: subprocess.Popen[str] | None = None

    def start(self) -> None:
        """Returns when it is ready."""
        self._process = subprocess.Popen(self.command(), stdout=subprocess.PIPE, text=True, start_new_session=True)
        line = self.hear()
        assert line.startswith("hotspan daemon is ready on http://"), line
        self.port = int(line.split("http://")[1].split()[0].rpartition(":")[2])

    def command(self) -> list[str]:
        """What starts it."""
        of = ["--size-gib", str(self._size_gib), "--shared-memory-name", self.name, "--port", str(self.port)]
        return [sys.executable, *self.PROGRAM, "daemon", *of, *self._options]

    def hear(self) -> str:
        """The next line that it says; empty if it ends, or says nothing for so long that it is killed."""
        assert self._process is not None and self._process.stdout is not None
        overdue = threading.Timer(PATIENCE_S, self._process.kill)
        overdue.start()
        line = self._process.stdout.readline()
        overdue.cancel()
        return line

    def send(self, number: signal.Signals) -> None:
        """Send a signal."""
        assert self._process is not None
        self._process.send_signal(number)

    def end(self, number: signal.Signals = signal.SIGTERM) -> int:
        """Send a signal and wait for its end; the exit status."""
        process, self._process = self._process, None
        assert process is not None and process.stdout is not None
        process.send_signal(number)
        status = process.wait(2 * PATIENCE_S)
        process.stdout.close()
        return status

    def stop(self) -> None:
        """Kill it."""
        self.end(signal.SIGKILL)

    def freeze(self) -> None:
        """Stop it in the middle of whatever it does."""
        assert self._process is not None
        self._process.send_signal(signal.SIGSTOP)

    def thaw(self) -> None:
        """Let it go on."""
        assert self._process is not None
        self._process.send_signal(signal.SIGCONT)

    def close(self) -> None:
        """End it if it runs, and leave nothing."""
        if self._process is not None:
            self.thaw()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.end()
        if self._process is not None:
            self.stop()
        self.segment.unlink(missing_ok=True)
        self.kept.unlink(missing_ok=True)
        self.unix_socket.unlink(missing_ok=True)

    def request(self, method: str, target: str, body: bytes | None = None) -> tuple[int, bytes]:
        """Status and body of one request on a connection of its own."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=PATIENCE_S)
        with contextlib.closing(connection):
            connection.request(method, target, body)
            response = connection.getresponse()
            return response.status, response.read()

    def stats(self) -> dict[str, Any]:
        """What /v1/stats says."""
        status, body = self.request("GET", "/v1/stats")
        assert status == 200
        return dict(json.loads(body))

    def idle(self) -> bool:
        """Whether nobody reads or writes anything."""
        stats = self.stats()
        return bool(stats["pinned_bytes"] == 0 and stats["leases"] == 0)


PATIENT = f"""
from hotspan.cli.main import main
from hotspan.daemon import disk, operations, server
disk.STALL_S = disk.MAX_WAIT_S = operations.MAX_LOAD_S = server._MAX_SAVE_S = server._MAX_NOTE_S = {PATIENCE_S}
main()
"""


class PatientDaemon(DaemonProcess):
    """A daemon with a disk that it does not take for hung, nor for late, because the machine stands still."""

    PROGRAM = ("-c", PATIENT)


HANGING = """
import os, signal, sys
from pathlib import Path
from hotspan.daemon.options import DaemonOptions
from hotspan.daemon.server import run_daemon
from kit.simulated.faults import SlowFiles
port, name, size_gib, disk, disk_gib, kinds = sys.argv[1:]
files = SlowFiles(kinds=kinds.split(","))
signal.signal(signal.SIGUSR1, lambda *_: (files.hang(), os.write(1, b"hangs\\n")))
signal.signal(signal.SIGUSR2, lambda *_: (files.release(), os.write(1, b"goes on\\n")))
of = {"port": int(port), "shared_memory_name": name, "disk": Path(disk), "disk_gib": float(disk_gib)}
run_daemon(DaemonOptions(size_gib=float(size_gib), **of), files=files)
"""


class HangingDaemon(DaemonProcess):
    """A daemon whose disk hangs between `hang` and `release`: the system calls of these kinds do not return."""

    def __init__(self, disk: Path, kinds: str = "preadv,pwritev,pwrite,sync") -> None:
        super().__init__(size_gib=1 / 64)
        self._disk = disk
        self._kinds = kinds

    def command(self) -> list[str]:
        """What starts it."""
        of = [str(self.port), self.name, str(self._size_gib), str(self._disk), "0.125", self._kinds]
        return [sys.executable, "-c", HANGING, *of]

    def hang(self) -> None:
        """From now on."""
        self.send(signal.SIGUSR1)
        assert self.hear() == "hangs\n"

    def release(self) -> None:
        """No more."""
        self.send(signal.SIGUSR2)
        assert self.hear() == "goes on\n"
