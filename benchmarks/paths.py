"""Minutes until the first hit on the paths of users: the commands of their pages, with a tiny model.

usage: python -m benchmarks.paths [--output FILE]

The tests of tests/docs run them. The packages are installed before, except on a contributor's path, which begins with a
clone and ends with a green test.
"""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from xml.etree import ElementTree

from benchmarks.harness import arguments
from hotspan.bench.machine import write_results

TESTS = ("tests/docs/test_paths.py", "tests/docs/test_paths_of_platforms.py")


def main() -> int:
    options = arguments(__doc__)
    with tempfile.TemporaryDirectory() as scratch:
        seconds = Path(scratch) / "seconds"
        report = Path(scratch) / "report.xml"
        command = (sys.executable, "-m", "pytest", "-q", "-m", "slow", f"--junitxml={report}", *TESTS)
        status = subprocess.run(command, env=os.environ | {"PATHS_OUTPUT": str(seconds)}).returncode
        rows = [json.loads(line) for line in seconds.read_text().splitlines()]
        passed = set(_passed(report))
    paths = {row["path"].removeprefix("test_").replace("_", " "): round(row["seconds"] / 60, 2) for row in rows}
    for path, minutes in paths.items():
        print(f"{path}: {minutes:.1f} minutes")
    # The status also counts files that a test left; these don't change how long its path took.
    if options.output is not None and {row["path"] for row in rows} == passed:
        write_results(options.output, "paths", command="python -m benchmarks.paths", minutes=paths)
    return status


def _passed(report: Path) -> Iterator[str]:
    """The names of the tests that passed. Raises: SystemExit if one did not."""
    for case in ElementTree.parse(report).iter("testcase"):
        if len(case):
            raise SystemExit(f"{case.get('name')} did not pass: no times are written")
        yield case.get("name", "")


if __name__ == "__main__":
    sys.exit(main())
