"""What a part of the measurement writes, when it must be done, and on what it ran."""

import faulthandler
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from types import FrameType
from typing import Any, Final

from hotspan.bench.machine import machine_facts

TREE: Final = Path(__file__).resolve().parents[2]

_CLEAN_UP_S: Final = 45.0
_QUERY: Final = ("name", "driver_version", "memory.total", "memory.used", "pcie.link.gen.max", "pcie.link.width.max")


class OutOfTime(Exception):
    """The part's time is over; what was measured by then is in its file."""


class Deadline:
    """So many seconds for all, from now on."""

    def __init__(self, limit_s: float) -> None:
        self.limit_s = limit_s
        self._ends = time.monotonic() + limit_s

    @property
    def left_s(self) -> float:
        """Seconds to use; what cleaning up takes is not among them."""
        return self._ends - time.monotonic() - _CLEAN_UP_S

    def check(self, wanted_s: float = 0.0) -> None:
        """Raise OutOfTime if fewer seconds are left."""
        if self.left_s < wanted_s:
            raise OutOfTime(f"{self.left_s:.0f} s are left and {wanted_s:.0f} s are needed")

    @contextmanager
    def held(self) -> Iterator[None]:
        """Raise OutOfTime in the main thread when the time is over, and end the process if even that is not heard."""

        def over(number: int, frame: FrameType | None) -> None:
            raise OutOfTime(f"the part's {self.limit_s:.0f} s are over")

        before = signal.signal(signal.SIGALRM, over)
        signal.setitimer(signal.ITIMER_REAL, max(1.0, self.left_s))
        faulthandler.dump_traceback_later(self.limit_s, exit=True)
        try:
            yield
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, before)
            faulthandler.cancel_dump_traceback_later()


def say(what: str) -> None:
    """One line of progress, with the time of day."""
    print(f"{datetime.now(UTC):%H:%M:%S} {what}", flush=True)


@dataclass
class Result:
    """One part's file, written anew after every step, so that what was measured survives whatever comes next."""

    path: Path
    head: dict[str, Any]
    measured: dict[str, Any] = field(default_factory=dict)
    not_measured: dict[str, str] = field(default_factory=dict)
    state: str = "running"

    def put(self, name: str, figures: Any) -> None:
        """Figures under a name, on the disk when this returns."""
        self.measured[name] = figures
        self.save()

    def leave_out(self, name: str, why: str) -> None:
        """Say that something was not measured, and why."""
        say(f"not measured: {name}: {why}")
        self.not_measured[name] = why
        self.save()

    def close(self, state: str) -> None:
        self.state = state
        self.save()

    def save(self) -> None:
        content = self.head | {"state": self.state, "not_measured": self.not_measured, "measured": self.measured}
        self.path.parent.mkdir(parents=True, exist_ok=True)
        part = self.path.with_suffix(".part")
        part.write_text(json.dumps(content, indent=1) + "\n")
        part.replace(self.path)


def head(part: str, model: dict[str, Any], commit: str, command: str) -> dict[str, Any]:
    """What every result file begins with."""
    machine: dict[str, Any] = dict(machine_facts())
    if commit:
        machine["Commit"] = commit
    machine.setdefault("Commit", commit_of(TREE) or "unknown: pass --commit")
    return {
        "kind": "gpu",
        "part": part,
        "command": command,
        "started_at": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": machine | software() | {"Room": room()},
        "gpu": gpu_facts(),
        "model": model,
    }


def commit_of(tree: Path) -> str:
    """The commit of a checkout, "+" if files differ from it; "" where there is none."""
    try:
        commit = _said("git", "-C", str(tree), "rev-parse", "--short=12", "HEAD")
        return commit + ("+" if _said("git", "-C", str(tree), "status", "--porcelain") else "")
    except (OSError, subprocess.SubprocessError):
        return ""


def software() -> dict[str, str]:
    """Versions of what the figures depend on."""
    found = {}
    for name in ("torch", "triton", "transformers"):
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = "not installed"
    return found


def room() -> dict[str, float]:
    """Free GB in the places where KV is kept."""
    places = {"/dev/shm": "/dev/shm", "temporary": os.environ.get("TMPDIR", "/tmp")}
    return {name: round(shutil.disk_usage(path).free / 1e9, 1) for name, path in places.items()}


def gpu_facts() -> dict[str, str] | None:
    """The first GPU's name, driver, memory and link, as nvidia-smi says; None where there is none."""
    try:
        line = _said("nvidia-smi", f"--query-gpu={','.join(_QUERY)}", "--format=csv,noheader").splitlines()[0]
    except (OSError, subprocess.SubprocessError, IndexError):
        return None
    return dict(zip(_QUERY, (word.strip() for word in line.split(",")), strict=False))


def gpu_memory_mib() -> tuple[float, float] | None:
    """(used, total) of the first GPU in MiB, or None where there is none."""
    facts = gpu_facts()
    if facts is None:
        return None
    used, total = (float(facts[name].split()[0]) for name in ("memory.used", "memory.total"))
    return used, total


def is_direct(directory: Path) -> bool:
    """Whether the directory's file system takes O_DIRECT."""
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / "direct-io"
    try:
        os.close(os.open(path, os.O_CREAT | os.O_RDWR | os.O_DIRECT, 0o600))
    except OSError:
        return False
    finally:
        path.unlink(missing_ok=True)
    return True


def _said(*command: str) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=20).stdout.strip()


def command_line() -> str:
    """The command as it was given."""
    return " ".join(["python -m benchmarks.gpu.measure", *sys.argv[1:]])
