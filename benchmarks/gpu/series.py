"""All parts of the measurement, one after the other: each in a process of its own, whatever became of the one before.

usage: python -m benchmarks.gpu.series --output DIR [--parts alone,identity,...] [--model MODEL] [--again] [--cpu]

`alone` comes first: it needs neither vLLM nor hotspan, and tells within two minutes whether the rest is worth its time.
A line of JSON tells what became of a part as soon as that is known. A part whose file says that it is complete is not
run again unless --again is given: a series that was cut off goes on where it was. Exit status 0 only if all are done.
"""

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from benchmarks.gpu.measure import MODELS, PARTS

ALONE: Final = "alone"
_ALONE_S: Final = 180.0
_GRACE_S: Final = 60.0
"""After a part's own limit: a part that does not end by itself is ended then."""


@dataclass(frozen=True, slots=True)
class Part:
    """command: that measures it, and writes `result` as it goes on. limit_s: after which it is ended."""

    command: Sequence[str]
    result: Path
    limit_s: float


def parts_of(options: argparse.Namespace) -> dict[str, Part]:
    """The parts that were asked for, in the order in which they say the most."""
    python, output = sys.executable, options.output
    found = {}
    for name in (ALONE, *PARTS):
        if name == ALONE:
            result = output / "alone.json"
            words = [python, "-m", "benchmarks.gpu.alone", "--output", str(result)]
            found[name] = Part(words, result, _ALONE_S)
            continue
        model = "tiny" if options.cpu else options.model
        words = [python, "-m", "benchmarks.gpu.measure", "--part", name, "--model", options.model]
        words += ["--output", str(output), "--commit", options.commit, "--limit-s", str(options.limit_s)]
        words += ["--cpu"] if options.cpu else []
        found[name] = Part(words, output / f"{name}-{model}-1.json", options.limit_s + _GRACE_S)
    return {name: part for name, part in found.items() if name in options.parts}


def run(parts: Mapping[str, Part], say: Callable[[dict[str, Any]], None], *, again: bool = False) -> bool:
    """Run each part that is not complete; whether all are done. A part that fails or hangs does not stop the next."""
    done = True
    for name, part in parts.items():
        if not again and is_complete(part.result):
            say({"part": name, "state": "complete", "was_there": True})
            continue
        began_s = time.monotonic()
        try:
            status = subprocess.run(part.command, timeout=part.limit_s, check=False).returncode
        except (subprocess.TimeoutExpired, OSError) as error:
            status, why = -1, f"{type(error).__name__}: {error}"
        else:
            why = f"exit status {status}"
        line: dict[str, Any] = {"part": name, "state": "complete" if not status else "failed"}
        say(line | ({"why": why} if status else {}) | {"seconds": round(time.monotonic() - began_s)})
        done = done and not status
    return done


def is_complete(result: Path) -> bool:
    """Whether a part's file is there and says that all of it was measured, or that all checks passed."""
    try:
        content = json.loads(result.read_text())
    except (OSError, ValueError):
        return False
    held = content.get("measured", {}).get("identity", {}).get("passed", True)
    return content.get("state") == "complete" and bool(held)


def main() -> int:
    options = _options()

    def say(line: dict[str, Any]) -> None:
        print(json.dumps(line), flush=True)

    return 0 if run(parts_of(options), say, again=options.again) else 1


def _options() -> Any:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True, help="directory of the result files")
    parser.add_argument("--parts", type=_names, default=(ALONE, *PARTS), help=f"of {', '.join((ALONE, *PARTS))}")
    parser.add_argument("--model", choices=MODELS, default="qwen2.5-7b")
    parser.add_argument("--commit", default="", help="of this tree, where it is no git checkout")
    parser.add_argument("--limit-s", type=float, default=570.0, help="of each part with an engine")
    parser.add_argument("--again", action="store_true", help="parts that are complete, too")
    parser.add_argument(
        "--cpu", action="store_true", help="a tiny model, to try the code; alone needs a GPU all the same"
    )
    return parser.parse_args()


def _names(text: str) -> tuple[str, ...]:
    names = tuple(text.split(","))
    if unknown := set(names) - {ALONE, *PARTS}:
        raise argparse.ArgumentTypeError(f"there is no part {min(unknown)!r}")
    return names


if __name__ == "__main__":
    sys.exit(main())
