"""Step 2, on the machine with the GPU and no network: the parts put together and installed, and what is still missing.

usage: python3 -m benchmarks.gpu.setup PARTS --venv DIRECTORY

Run it from the root of hotspan's tree with the Python that has torch 2.11. Checks the parts, makes a virtual
environment over that Python (nothing of it is changed), installs the wheels and this tree without their dependencies,
and imports what a server needs, each in a process of its own. Exit status 1, with a list, if something is missing.
Only Python's standard library and its pip are used.
"""

import argparse
import json
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import venv
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from benchmarks.gpu.parts import Manifest, PartsError, join

TREE: Final = Path(__file__).resolve().parents[2]

CHECKS: Final = {
    "torch sees a GPU": "import torch; torch.cuda.init(); print(torch.cuda.get_device_name(), torch.version.cuda)",
    "vLLM's kernels": "import torch, vllm._C_stable_libtorch; print('loaded')",
    "FlashAttention 3": "import torch, vllm.vllm_flash_attn._vllm_fa3_C; print('loaded')",
    "FlashAttention's interface": "from vllm.vllm_flash_attn import FA2_AVAILABLE, FA3_AVAILABLE; "
    "print('FA2', FA2_AVAILABLE, 'FA3', FA3_AVAILABLE)",
    "vLLM's engine": "import vllm; from vllm import LLM; from vllm.v1.engine.core import EngineCore; "
    "from vllm.v1.worker.gpu_model_runner import GPUModelRunner; print(vllm.__version__)",
    "vLLM's models": "from vllm.model_executor.models import qwen2, llama; print('Qwen2, Llama')",
    "vLLM's server": "import vllm.entrypoints.openai.api_server; print('imported')",
    "vLLM's offloading": "import vllm.v1.kv_offload.cpu.gpu_worker; import vllm.distributed.kv_transfer.kv_connector"
    ".v1.offloading_connector; print('imported')",
    "hotspan": "import hotspan.cli.main; from importlib.metadata import version; print(version('hotspan'))",
    "hotspan knows this vLLM": "from hotspan.engine.compat import check_engine, engine_version; check_engine(); "
    "print(engine_version())",
    "hotspan's connector": "import hotspan.engine.connector, hotspan.engine.spec; print('imported')",
    "hotspan's GPU worker": "import hotspan.engine.cuda; print('imported')",
    "hotspan's server": "import hotspan.engine.launch, hotspan.server.run; print('imported')",
}
"""What is tried at the end, by name; each prints one line, or fails with the import that is missing."""


def make_environment(directory: Path) -> Path:
    """The Python of a new virtual environment that also sees every package of this one.

    A virtual environment made inside another would see the system's packages only: a .pth file names this one's.
    """
    if directory.exists():
        shutil.rmtree(directory)
    venv.create(directory, system_site_packages=True, with_pip=False)
    python = directory / "bin" / "python"
    if sys.prefix != sys.base_prefix:
        here = dict.fromkeys((sysconfig.get_path("purelib"), sysconfig.get_path("platlib")))
        site = _output(python, "import sysconfig; print(sysconfig.get_path('purelib'))")
        (Path(site) / "outer_environment.pth").write_text("".join(f"{path}\n" for path in here))
    return python


def install(python: Path, wheels: Path, manifest: Manifest) -> None:
    """The wheels, and then this tree, into that environment. Raises: subprocess.CalledProcessError."""
    files = [str(wheels / entry.name) for entry in manifest.files]
    offline = ("--no-index", "--no-deps", "--quiet", "--disable-pip-version-check", "--no-cache-dir")
    _pip(python, (*offline, "--no-compile", "--force-reinstall", "--find-links", str(wheels), *files))
    # Built beside the tree, which may be read-only, and without asking what its build needs: setuptools is there.
    with tempfile.TemporaryDirectory() as scratch:
        tree = Path(scratch) / "hotspan"
        shutil.copytree(TREE / "src", tree / "src", ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
        for name in ("pyproject.toml", "README.md", "LICENSE"):
            shutil.copy2(TREE / name, tree / name)
        _pip(python, (*offline, "--no-build-isolation", "--force-reinstall", str(tree)))


def _pip(python: Path, words: Sequence[str]) -> None:
    subprocess.run([sys.executable, "-m", "pip", "--python", str(python), "install", *words], check=True)


def _output(python: Path, code: str) -> str:
    done = subprocess.run([python, "-c", code], capture_output=True, text=True, check=True)
    return done.stdout.strip()


def check(python: Path) -> dict[str, str]:
    """The checks that failed, by name, with the last line of what Python said; prints each one's outcome."""
    failed = {}
    for name, code in CHECKS.items():
        done = subprocess.run([python, "-c", code], capture_output=True, text=True, cwd=tempfile.gettempdir())
        said = (done.stdout if done.returncode == 0 else done.stderr).strip().splitlines() or [""]
        print(f"{'ok     ' if done.returncode == 0 else 'MISSING'} {name}: {said[-1]}", flush=True)
        if done.returncode:
            failed[name] = said[-1]
    return failed


def _refusal(manifest: Manifest) -> str | None:
    """Why the parts can't be used with this Python, or None."""
    have = ".".join(map(str, sys.version_info[:2]))
    if manifest.facts["python"] != have:
        return f"the parts are for Python {manifest.facts['python']}, and this is {have}: run it with that one"
    done = subprocess.run(
        [sys.executable, "-c", "from importlib.metadata import version; print(version('torch'))"],
        capture_output=True,
        text=True,
    )
    found = done.stdout.strip().partition("+")[0]
    if found != manifest.facts["torch"]:
        return (
            f"vLLM {manifest.facts['vllm']} is built for torch {manifest.facts['torch']}, and {sys.executable} has "
            f"{found or 'none'}: run it with the Python that has it"
        )
    return None


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", type=Path, help="the directory with the parts and manifest.json")
    parser.add_argument("--venv", type=Path, required=True, help="the virtual environment to make; an old one goes")
    parser.add_argument(
        "--check-only", action="store_true", help="install nothing, check the environment that is there"
    )
    options = parser.parse_args()
    python = options.venv.absolute() / "bin" / "python"
    try:
        if not options.check_only:
            manifest = Manifest.load(options.parts)
            refusal = _refusal(manifest)
            if refusal:
                print(f"setup: {refusal}", file=sys.stderr)
                return 1
            with tempfile.TemporaryDirectory() as scratch:
                join(options.parts, Path(scratch))
                python = make_environment(options.venv.absolute())
                install(python, Path(scratch), manifest)
        failed = check(python)
    except (PartsError, subprocess.CalledProcessError) as error:
        print(f"setup: {error}", file=sys.stderr)
        return 1
    print(json.dumps({"python": str(python), "missing": failed}, indent=1))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
