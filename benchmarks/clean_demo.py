"""How long `make demo` takes from a clone, with an empty home and without caches, the install included.

usage: python -m benchmarks.clean_demo [--output FILE]
"""

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from benchmarks.harness import arguments
from hotspan.bench.machine import write_results

ROOT = Path(__file__).resolve().parents[1]
KEPT = ("PATH", "LANG", "PIP_", "HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY", "http_proxy", "https_proxy", "no_proxy")
"""What a container has, too: where to find Python and packages."""


def main() -> int:
    options = arguments(__doc__)
    variables = {name: value for name, value in os.environ.items() if name.startswith(KEPT)}
    if (mirrors := Path.home() / ".config" / "pip" / "pip.conf").is_file():
        variables.setdefault("PIP_CONFIG_FILE", str(mirrors))
    with tempfile.TemporaryDirectory() as scratch:
        home, clone, log = (Path(scratch) / name for name in ("home", "hotspan", "log"))
        home.mkdir()
        began_s = time.monotonic()
        subprocess.run(["git", "clone", "-q", str(ROOT), str(clone)], check=True)
        with log.open("wb") as output:
            environment = variables | {"HOME": str(home), "PIP_NO_CACHE_DIR": "1"}
            python = f"PYTHON={Path(sys.base_prefix) / 'bin' / 'python3'}"
            status = subprocess.run(
                ["make", "demo", python], cwd=clone, env=environment, stdout=output, stderr=subprocess.STDOUT
            ).returncode
        minutes = (time.monotonic() - began_s) / 60
        print("\n".join(log.read_text(errors="replace").splitlines()[-25:]))
    print(f"make demo: status {status}, {minutes:.1f} minutes from the clone")
    if options.output is not None and not status:
        write_results(
            options.output, "clean-demo", command="python -m benchmarks.clean_demo", minutes=round(minutes, 2)
        )
    return status


if __name__ == "__main__":
    sys.exit(main())
