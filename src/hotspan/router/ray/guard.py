"""Runs a command until its standard input ends: `python -m hotspan.router.ray.guard SECONDS COMMAND ...`.

The replica's actor holds the other end. However the actor dies, the server does not outlive it.
"""

import contextlib
import ctypes
import os
import signal
import subprocess
import sys

from hotspan.core.threads import start

_PR_SET_PDEATHSIG = 1


def main() -> int:
    """The command's exit status. It gets SIGTERM when nobody holds our input any more, and SIGKILL SECONDS later."""
    seconds, *command = sys.argv[1:]
    process = subprocess.Popen(command, stdin=subprocess.DEVNULL, start_new_session=True, preexec_fn=_end_with_us)
    signal.signal(signal.SIGTERM, lambda *_: process.terminate())

    def watch() -> None:
        while os.read(0, 4096):
            pass
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(float(seconds))
        _kill(process.pid)

    start("guard", watch)
    status = process.wait()
    _kill(process.pid)
    return status


def _end_with_us() -> None:
    """Should this process be killed itself, the command gets SIGTERM."""
    with contextlib.suppress(OSError, AttributeError):  # Linux has it
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


def _kill(group: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(group, signal.SIGKILL)


if __name__ == "__main__":
    sys.exit(main())
