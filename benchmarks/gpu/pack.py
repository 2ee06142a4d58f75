"""Step 1, where PyPI can be reached: vLLM and what it lacks elsewhere, as parts under 60 MB with a manifest.

usage: python -m benchmarks.gpu.pack DIRECTORY [--wheels CACHE] [--part-mb 59]

Downloads vLLM 0.26.0's CUDA wheel (304 MB) and the wheels that requirements.txt pins, for Python 3.12 on x86-64 Linux;
leaves out of vLLM what a dense model on Hopper does not need (thin.py); cuts everything into parts. The same pins give
the same parts.
"""

import argparse
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from benchmarks.gpu.parts import Manifest, PartsError, cut
from benchmarks.gpu.thin import VLLM_LEFT_OUT, WheelError, thin

VLLM: Final = "0.26.0"
TORCH: Final = "2.11.0"
PYTHON: Final = "3.12"
PINS: Final = Path(__file__).with_name("requirements.txt")

# pip takes a platform to the letter: a wheel of an older manylinux is found only if that one is named too.
_MANYLINUX: Final = ("2014", "_2_5", "_2_12", "_2_17", "_2_24", "_2_26", "_2_27", "_2_28", "_2_31", "_2_34", "_2_35")


def pins(path: Path) -> list[str]:
    """The NAME==VERSION lines of a requirements file."""
    lines = [line.partition("#")[0].strip() for line in path.read_text().splitlines()]
    return [line for line in lines if line]


def download(what: Sequence[str], into: Path) -> list[Path]:
    """The wheels of `what` (NAME==VERSION) in `into`; what lies there already is not fetched again.

    Raises: subprocess.CalledProcessError, after pip's own message.
    """
    into.mkdir(parents=True, exist_ok=True)
    target = ("--python-version", PYTHON, "--implementation", "cp", "--abi", "cp312", "--abi", "abi3", "--abi", "none")
    platforms = [word for tag in _MANYLINUX for word in ("--platform", f"manylinux{tag}_x86_64")]
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:", *target]
    subprocess.run([*command, *platforms, "--dest", str(into), *what], check=True)
    return [_wheel_of(pin, into) for pin in what]


def _wheel_of(pin: str, directory: Path) -> Path:
    """The one wheel of NAME==VERSION in a directory."""
    name, _, version = pin.partition("==")
    wanted = f"{name.replace('-', '_').replace('.', '_').lower()}-{version}-"
    found = [
        path
        for path in sorted(directory.glob("*.whl"))
        if path.name.replace(".", "_").lower().startswith(wanted.replace(".", "_"))
    ]
    if len(found) != 1:
        raise WheelError(f"{directory} holds {len(found)} wheels of {pin}: empty it and pack again")
    return found[0]


def pack(directory: Path, wheels: Path, part_bytes: int) -> Manifest:
    """Download, thin and cut; prints what it did."""
    (engine,) = download([f"vllm=={VLLM}"], wheels)
    small = download(pins(PINS), wheels)
    with tempfile.TemporaryDirectory(dir=wheels) as scratch:
        thinned = thin(engine, Path(scratch), VLLM_LEFT_OUT)
        for pattern, size in thinned.left_out.items():
            print(f"left out {size / 1e6:7.1f} MB  {pattern}")
        small_bytes = sum(path.stat().st_size for path in small)
        print(f"vLLM {engine.stat().st_size / 1e6:.1f} MB, thinned to {thinned.kept_bytes / 1e6:.1f} MB of files")
        print(f"{len(small)} wheels besides, {small_bytes / 1e6:.1f} MB; compressing ...", flush=True)
        whole = [thin(path, Path(scratch), ()).path for path in small]  # stored anew, for the compression of all
        facts: dict[str, Any] = {"vllm": VLLM, "torch": TORCH, "python": PYTHON, "left_out": list(VLLM_LEFT_OUT)}
        return cut([thinned.path, *whole], directory, part_bytes, facts)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path, help="where the parts and the manifest go")
    parser.add_argument("--wheels", type=Path, help="keep the downloads here, and take them from here")
    parser.add_argument("--part-mb", type=float, default=59.0, help="size of a part, under 60")
    options = parser.parse_args()
    try:
        with tempfile.TemporaryDirectory() as scratch:
            wheels = options.wheels or Path(scratch)
            manifest = pack(options.directory, wheels, int(options.part_mb * 1e6))
    except (PartsError, WheelError, subprocess.CalledProcessError) as error:
        print(f"pack: {error}", file=sys.stderr)
        return 1
    for part in manifest.parts:
        print(f"{part.name}  {part.size / 1e6:.1f} MB  sha256 {part.sha256}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
