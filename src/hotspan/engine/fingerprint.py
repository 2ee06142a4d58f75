"""Digests of a model's and an adapter's files. Equal digests mean equal KV, so they read bytes and not names."""

import hashlib
import os
from pathlib import Path

_SAMPLES = 8
_SAMPLE_BYTES = 1 << 16
_WEIGHTS = (".safetensors", ".bin", ".pt", ".gguf")
_MOST_HEADER_BYTES = 1 << 26


def model_digest(model: Path, *, full: bool = False) -> bytes:
    """32 bytes over config.json, every weights file's name, size, safetensors header and eight 64 KiB samples.

    full:   over all bytes of all weights files instead (about 2 GB/s).
    Raises: FileNotFoundError if `model` is no directory with a config.json.
    """
    digest = hashlib.sha256(b"hotspan-model-1")
    names = ["config.json", *(p.name for p in sorted(model.iterdir()) if p.suffix in _WEIGHTS)]
    for name in names:
        path = model / name
        size = path.stat().st_size
        digest.update(f"{name}:{size}:".encode())
        with path.open("rb") as file:
            if full or name == "config.json":
                while part := file.read(1 << 22):
                    digest.update(part)
                continue
            if path.suffix == ".safetensors":
                length = int.from_bytes(file.read(8), "little")
                digest.update(file.read(min(length, _MOST_HEADER_BYTES)))
            for n in range(_SAMPLES):
                file.seek(max(0, size - _SAMPLE_BYTES) * n // (_SAMPLES - 1))
                digest.update(file.read(_SAMPLE_BYTES))
    return digest.digest()


class AdapterDigests:
    """Content digests of adapters' directories, remembered until a file's size, time or inode changes."""

    def __init__(self) -> None:
        self._known: dict[str, tuple[tuple[object, ...], bytes]] = {}

    def of(self, path: str) -> bytes | None:
        """32 bytes over all of the adapter's files, or None if it is no readable directory (then nothing is cached).

        Blocks: for one pass over the files at the first request that names them.
        """
        try:
            files = sorted(p for p in Path(path).rglob("*") if p.is_file())
            stats = [(str(p), p.stat()) for p in files]
            state = tuple((n, s.st_size, s.st_mtime_ns, s.st_ino) for n, s in stats)
            known = self._known.get(path)
            if known is not None and known[0] == state:
                return known[1]
            if not files:
                return None
            digest = hashlib.sha256(b"hotspan-adapter-1")
            for file in files:
                data = file.read_bytes()
                name = os.fsencode(file.relative_to(path))
                digest.update(len(name).to_bytes(8, "little") + name + len(data).to_bytes(8, "little") + data)
        except OSError:
            return None
        self._known[path] = (state, digest.digest())
        return digest.digest()
