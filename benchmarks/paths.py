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
from pathlib import Path

from benchmarks.harness import arguments
from hotspan.bench.machine import write_results

TESTS = ("tests/docs/test_paths.py", "tests/docs/test_paths_of_platforms.py")


def main() -> int:
    options = arguments(__doc__)
    with tempfile.TemporaryDirectory() as scratch:
        seconds = Path(scratch) / "seconds"
        command = (sys.executable, "-m", "pytest", "-q", "-m", "slow", *TESTS)
        status = subprocess.run(command, env=os.environ | {"PATHS_OUTPUT": str(seconds)}).returncode
        rows = [json.loads(line) for line in seconds.read_text().splitlines()]
    paths = {row["path"].removeprefix("test_").replace("_", " "): round(row["seconds"] / 60, 2) for row in rows}
    for path, minutes in paths.items():
        print(f"{path}: {minutes:.1f} minutes")
    if options.output is not None and not status:
        write_results(options.output, "paths", command="python -m benchmarks.paths", minutes=paths)
    return status


if __name__ == "__main__":
    sys.exit(main())
