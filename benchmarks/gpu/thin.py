"""A wheel without what a dense model on Hopper does not need, and with a RECORD that is still true."""

import base64
import csv
import fnmatch
import hashlib
import io
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

VLLM_LEFT_OUT: Final = (
    # FlashAttention 2, for what is older than Hopper; 3 stays.
    "vllm/vllm_flash_attn/_vllm_fa2_C.abi3.so",
    # Mixtures of experts, MLA, FP4: no dense model in bfloat16 calls them, and vLLM takes their absence.
    "vllm/_moe_C_stable_libtorch.abi3.so",
    "vllm/_flashmla_C.abi3.so",
    "vllm/_flashmla_extension_C.abi3.so",
    "vllm/_qutlass_C.abi3.so",
    # DeepGEMM (FP8) and Blackwell's attention: kernels and the headers that they are compiled with at run time.
    "vllm/third_party/deep_gemm/*",
    "vllm/third_party/fmha_sm100/*",
    # The front end and the tool parser in Rust, used only when asked for.
    "vllm/vllm-rs",
    "vllm/_rust_tool_parser.abi3.so",
)
"""What is left out of vLLM 0.26.0's wheel, as patterns over its paths ("*" takes any depth)."""

NOTE: Final = "LEFT_OUT"
_DATE: Final = (1980, 1, 1, 0, 0, 0)


class WheelError(Exception):
    """A wheel is not what it says it is, or a pattern names nothing in it."""


@dataclass(frozen=True, slots=True)
class Thinned:
    """What thinning did: bytes of the wheel's files, uncompressed, kept and left out."""

    path: Path
    kept_bytes: int
    left_out: dict[str, int]


def thin(wheel: Path, into: Path, patterns: Sequence[str]) -> Thinned:
    """The wheel in `into`, under its name, without the files that match `patterns`; without patterns, all of it.

    Every file that stays is checked against RECORD; RECORD is written anew, and where patterns were given with one file
    more, LEFT_OUT, that names them. Files are stored uncompressed (the parts are compressed as a whole, which does
    better), in the order of their names and with a fixed date: the same wheel gives the same bytes.
    Raises: WheelError if RECORD and the files differ, or if a pattern matches nothing.
    """
    into.mkdir(parents=True, exist_ok=True)
    with zipfile.ZipFile(wheel) as source:
        names = sorted(info.filename for info in source.infolist() if not info.is_dir())
        record_name = _record_name(names, wheel)
        recorded = _recorded(source.read(record_name).decode())
        dropped = {p: fnmatch.filter(names, p) for p in patterns}
        for pattern, found in dropped.items():
            if not found:
                raise WheelError(f"{wheel.name} holds nothing like {pattern}: is it another version?")
        gone = {name for found in dropped.values() for name in found}
        rows, kept_bytes = [], 0
        with zipfile.ZipFile(into / wheel.name, "w", zipfile.ZIP_STORED) as target:
            for name in names:
                if name in gone or name == record_name:
                    continue
                data = source.read(name)
                if recorded.get(name) != _hash(data):
                    raise WheelError(f"{wheel.name}: {name} is not what RECORD says: download the wheel again")
                _put(target, source.getinfo(name).external_attr, name, data)
                rows.append((name, _hash(data), str(len(data))))
                kept_bytes += len(data)
            if patterns:
                note = f"{record_name.rpartition('/')[0]}/{NOTE}"
                text = "".join(f"{pattern}\n" for pattern in patterns).encode()
                _put(target, 0o100644 << 16, note, text)
                rows.append((note, _hash(text), str(len(text))))
            _put(target, 0o100644 << 16, record_name, _csv([*rows, (record_name, "", "")]))
        left_out = {p: sum(source.getinfo(name).file_size for name in found) for p, found in dropped.items()}
    return Thinned(into / wheel.name, kept_bytes, left_out)


def _record_name(names: Sequence[str], wheel: Path) -> str:
    found = [name for name in names if name.count("/") == 1 and name.endswith(".dist-info/RECORD")]
    if len(found) != 1:
        raise WheelError(f"{wheel.name} holds {len(found)} RECORD files: it is no wheel")
    return found[0]


def _recorded(text: str) -> dict[str, str]:
    """The hash that RECORD has of each file."""
    return {row[0]: row[1] for row in csv.reader(io.StringIO(text)) if row}


def _hash(data: bytes) -> str:
    """The digest as RECORD writes it (packaging.python.org, "Recording installed projects")."""
    return "sha256=" + base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()


def _csv(rows: Sequence[tuple[str, str, str]]) -> bytes:
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows(rows)
    return text.getvalue().encode()


def _put(target: zipfile.ZipFile, attributes: int, name: str, data: bytes) -> None:
    info = zipfile.ZipInfo(name, _DATE)
    info.external_attr = attributes
    target.writestr(info, data)
