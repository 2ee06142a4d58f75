"""Texts that people wrote, in pieces of an exact number of tokens: Debian's manuals, out of its packages.

The packages are downloaded and unpacked, not installed. Needs apt-get and dpkg-deb; `apt-get update` must have run.
"""

import gzip
import json
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from hashlib import sha256
from html import unescape
from pathlib import Path
from typing import Final, Protocol

from hotspan.bench.tokenizer import TOKENIZER_FILE
from hotspan.core.errors import ConfigError
from hotspan.router.tokens import read_tokenizer

PACKAGES: Final = {
    "debian-reference-en": "usr/share/debian-reference/debian-reference.en.txt.gz",
    "developers-reference": "usr/share/developers-reference/developers-reference.txt.gz",
    "debian-handbook": "usr/share/doc/debian-handbook/html/en-US/*.html",
}
"""Each with its files of text. The next one is fetched only where those before it have too few tokens (35 MB)."""

_COMMAND_S: Final = 300


class Tokenizer(Protocol):
    """What `pieces` asks of a tokenizer."""

    def encode(self, text: str) -> Sequence[int]: ...

    def decode(self, ids: Sequence[int]) -> str: ...


def documents(directory: Path, model: Path, count: int, tokens: int) -> list[str]:
    """`count` different texts of exactly `tokens` tokens of the model's tokenizer, kept in `directory`.

    Raises: ConfigError where the packages can't be had, or have too little text.
    """
    directory = directory.expanduser().absolute() / "texts"
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer = _Encoder(model)
    cut = directory / f"{tokenizer.name}-{tokens}.json"
    found: list[str] = json.loads(cut.read_text()) if cut.is_file() else []
    if len(found) >= count:
        return found[:count]
    found = []
    for name in PACKAGES:
        found += _of_package(directory, name, tokenizer, count - len(found), tokens)
        if len(found) == count:
            part = cut.with_suffix(".part")
            part.write_text(json.dumps(found))
            part.replace(cut)
            return found
    raise ConfigError(f"Debian's manuals have {len(found)} texts of {tokens} tokens, not {count}: ask for fewer")


def pieces(text: str, tokens: int, tokenizer: Tokenizer) -> Iterator[str]:
    """Parts of a text one after the other, without overlap, each of exactly `tokens` tokens by itself.

    Where a part that is cut out has another number of tokens than it had in the text, the next token begins one.
    """
    ids, at = tokenizer.encode(text), 0
    while at + tokens <= len(ids):
        piece = tokenizer.decode(ids[at : at + tokens])
        is_exact = len(tokenizer.encode(piece)) == tokens
        if is_exact:
            yield piece
        at += tokens if is_exact else 1


class _Encoder:
    """The model's tokenizer, without special tokens. name: of its contents."""

    def __init__(self, model: Path) -> None:
        self._tokenizer = read_tokenizer(model)
        self._tokenizer.no_truncation()
        self.name = sha256((model / TOKENIZER_FILE).read_bytes()).hexdigest()[:16]

    def encode(self, text: str) -> Sequence[int]:
        return self._tokenizer.encode(text, add_special_tokens=False).ids

    def decode(self, ids: Sequence[int]) -> str:
        return self._tokenizer.decode(ids)


def _of_package(directory: Path, name: str, tokenizer: Tokenizer, count: int, tokens: int) -> list[str]:
    text = _text(directory, name)
    return [piece for piece, _ in zip(pieces(text, tokens, tokenizer), range(count), strict=False)]


def _text(directory: Path, name: str) -> str:
    """All text of a package, kept in a file."""
    kept = directory / f"{name}.txt"
    if not kept.is_file():
        with tempfile.TemporaryDirectory() as work:
            _run("apt-get", "--quiet", "download", name, cwd=work, name=name)
            (package,) = Path(work).glob("*.deb")
            _run("dpkg-deb", "-x", str(package), "unpacked", cwd=work, name=name)
            texts = [_plain(path) for path in sorted((Path(work) / "unpacked").glob(PACKAGES[name]))]
            part = kept.with_suffix(".part")
            part.write_text("\n\n".join(texts))
            part.replace(kept)
    return kept.read_text()


def _run(*command: str, cwd: str, name: str) -> None:
    if shutil.which(command[0]) is None:
        raise ConfigError(f"no real texts: they come from Debian's package {name}, and there is no {command[0]} here")
    try:
        done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=_COMMAND_S)
    except subprocess.TimeoutExpired:
        raise ConfigError(f"no real texts: {' '.join(command)} took longer than {_COMMAND_S} s") from None
    if done.returncode:
        why = (done.stderr.strip().splitlines() or ["no message"])[-1]
        raise ConfigError(f"no real texts: {' '.join(command)}: {why} (run `apt-get update` first?)")


def _plain(path: Path) -> str:
    """The text of a file: of HTML without its tags; spaces and empty lines are not repeated."""
    if path.suffix == ".gz":
        with gzip.open(path, "rt", encoding="utf-8", errors="replace") as file:
            text = file.read()
    else:
        page = re.sub(r"(?s)<(script|style|head)\b.*?</\1>", "", path.read_text(encoding="utf-8", errors="replace"))
        text = unescape(re.sub(r"(?s)<[^>]*>", "", page))
    lines = (" ".join(line.split()) for line in text.splitlines())
    return re.sub(r"\n{3,}", "\n\n", "\n".join(lines)).strip()
