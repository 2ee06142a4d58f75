"""Under which names a directory or a store was written, kept beside what it holds: a start that finds nothing says why.

Chunks are found under the namespace that they were stored under (core/namespace.py). Here each part of a namespace is a
short text: the part itself where it is short and no secret, else a digest.

    DIR/names    {"names": [{"namespace": HEX, "parts": {NAME: TEXT, ...}}, ...]}, the newest first

It decides nothing: what is missing or can't be understood counts as nothing written, and nothing fails by it.
"""

import hashlib
import json
import logging
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from hotspan.core.errors import MALFORMED
from hotspan.core.private import write_whole
from hotspan.tiers.directory import NAMES_FILE

logger = logging.getLogger(__name__)

MAX_BYTES = 1 << 16
"""Of all that is kept."""

_MAX_NAMES = 8
_MAX_PARTS = 512
_MAX_TOLD = 8
_SHOWN = re.compile(r'[\w .,:;+="-]{1,48}')
_SECRET = ("environment.", "hash")
_PART = re.compile(r"[\w.]{1,100}")
_WORDS = {
    "device": "the device",
    "engine": "the versions",
    "hash": "PYTHONHASHSEED",
    "hf_config": "the model's configuration",
    "kv_groups": "the layers' kinds",
    "kv_layout": "the KV layout",
    "model": "the model's files",
}


@dataclass(frozen=True, slots=True)
class Name:
    """A namespace, and the parts that it is made of, each as a short text."""

    namespace: str
    parts: Mapping[str, str]


def name_of(namespace: bytes, fields: Mapping[str, str | int | bytes]) -> Name:
    """What is kept of a namespace and the fields that it is the digest of."""
    return Name(namespace.hex(), {name: _text(name, value) for name, value in fields.items()})


def parse_names(data: bytes | None) -> list[Name]:
    """The names that are kept, the newest first; none of what can't be understood."""
    if data is None or len(data) > MAX_BYTES:
        return []
    try:
        said = json.loads(data)["names"][:_MAX_NAMES]
        return [Name(str(one["namespace"]), _parts(one["parts"])) for one in said]
    except MALFORMED:
        return []


def pack_names(own: Name, known: Sequence[Name]) -> bytes:
    """What is to be kept once somebody writes under `own`: it comes first, and the oldest go for it."""
    names = [own, *(name for name in known if name.namespace != own.namespace)][:_MAX_NAMES]
    while len(data := _packed(names)) > MAX_BYTES and len(names) > 1:
        del names[-1]
    return data if len(data) <= MAX_BYTES else _packed([Name(own.namespace, {})])


def difference(own: Name, known: Sequence[Name]) -> str | None:
    """In what `own` differs from the name that is most like it, in words; None if it was written under, or none was."""
    if not known or any(name.namespace == own.namespace for name in known):
        return None
    differing = min((_differing(own, name) for name in known), key=len)
    told = ", ".join(differing[:_MAX_TOLD])
    more = len(differing) - _MAX_TOLD
    return told + (f" and {more} more" if more > 0 else "") if told else "what is not kept of it"


def note_directory(directory: Path, own: Name) -> None:
    """Say in the log if a disk tier's directory was written under other names alone, and add this one's.

    Blocks: for a file of at most 64 KiB. Never raises for I/O.
    """
    path = directory / NAMES_FILE
    try:
        with path.open("rb") as file:
            data = file.read(MAX_BYTES + 1)
    except OSError:
        data = None
    known = parse_names(data)
    if (told := difference(own, known)) is not None:
        logger.warning(
            "disk_written_under_other_names path=%s: nothing that it holds is found now; what differs: %s",
            directory,
            told,
        )
    if (packed := pack_names(own, known)) != data:
        try:
            write_whole(path, packed)
        except OSError as error:
            logger.warning("disk_names_not_written path=%s error=%s", directory, str(error))


def _text(name: str, value: str | int | bytes) -> str:
    """A part as it is, if it may be read by whoever reads the store; else 16 digits of its digest."""
    if not isinstance(value, bytes):
        if not name.startswith(_SECRET) and _SHOWN.fullmatch(str(value)):
            return str(value)
        value = str(value).encode(errors="surrogatepass")
    return f"sha256:{hashlib.sha256(name.encode() + b'=' + value).hexdigest()[:16]}"


def _parts(said: Mapping[str, object]) -> dict[str, str]:
    """Of a store, whose writers may state anything: what may stand in a log."""
    parts = {str(name): str(text) for name, text in list(dict(said).items())[:_MAX_PARTS]}
    return {name: text if _SHOWN.fullmatch(text) else "?" for name, text in parts.items() if _PART.fullmatch(name)}


def _packed(names: Sequence[Name]) -> bytes:
    said = [{"namespace": name.namespace, "parts": dict(name.parts)} for name in names]
    return json.dumps({"names": said}, sort_keys=True, separators=(",", ":")).encode()


def _differing(own: Name, other: Name) -> list[str]:
    """The parts that differ, those with a word of their own first."""
    names = sorted(own.parts.keys() | other.parts.keys(), key=lambda name: (name not in _WORDS, name))
    return [
        _said(name, own.parts.get(name), other.parts.get(name))
        for name in names
        if own.parts.get(name) != other.parts.get(name)
    ]


def _said(name: str, now: str | None, then: str | None) -> str:
    word = _WORDS.get(name, name)
    if now is None or then is None:
        return f"{word} (set {'now' if then is None else 'then'} only)"
    is_digest = "sha256:" in (now[:7], then[:7]) or then == "?"
    return word if is_digest else f"{word} ({then} then, {now} now)"
