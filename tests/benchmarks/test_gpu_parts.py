"""The parts that carry vLLM to a machine without a network: cut, joined, thinned, and refused when damaged."""

import base64
import csv
import hashlib
import io
import json
import zipfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.gpu.models import SHAPES, cut_to, make_model
from benchmarks.gpu.pack import PINS, pins
from benchmarks.gpu.parts import MANIFEST, PartsError, cut, join
from benchmarks.gpu.record import Deadline, OutOfTime, Result
from benchmarks.gpu.thin import NOTE, WheelError, thin
from benchmarks.gpu.workloads import chat_sizes, fitting_sessions
from hotspan.bench.kv_size import kv_bytes_per_token
from hotspan.core.errors import ConfigError

GIB = 1 << 30


def noise(seed: str, size: int) -> bytes:
    """Bytes that no compression makes smaller."""
    return b"".join(hashlib.sha256(f"{seed}/{n}".encode()).digest() for n in range(size // 32 + 1))[:size]


def written(directory: Path, files: dict[str, bytes]) -> list[Path]:
    directory.mkdir()
    for name, data in files.items():
        (directory / name).write_bytes(data)
    return sorted(directory.iterdir())


@given(
    sizes=st.lists(st.integers(0, 5000), min_size=1, max_size=5),
    part_bytes=st.integers(50, 4000),
)
def test_what_is_joined_is_what_was_cut(
    sizes: list[int], part_bytes: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Any files come back byte for byte, and no part is larger than asked."""
    base = tmp_path_factory.mktemp("parts")
    files = {f"file-{n}": noise(str(n), size) for n, size in enumerate(sizes)}
    manifest = cut(written(base / "files", files), base / "parts", part_bytes, {"for": "a test"})
    assert all((base / "parts" / part.name).stat().st_size == part.size <= part_bytes for part in manifest.parts)
    assert join(base / "parts", base / "back") == manifest
    assert {path.name: path.read_bytes() for path in (base / "back").iterdir()} == files


def test_the_same_files_give_the_same_parts(tmp_path: Path) -> None:
    """Packing twice gives equal parts and an equal manifest, in whatever order the files are named."""
    files = written(tmp_path / "files", {"a": noise("a", 3000), "b": bytes(9000), "c": noise("c", 10)})
    first = cut(files, tmp_path / "first", 1000, {"n": 1})
    assert cut(files[::-1], tmp_path / "second", 1000, {"n": 1}) == first
    for name in (MANIFEST, *(part.name for part in first.parts)):
        assert (tmp_path / "first" / name).read_bytes() == (tmp_path / "second" / name).read_bytes()


@pytest.fixture
def parts(tmp_path: Path) -> Path:
    """Parts of two files."""
    files = written(tmp_path / "files", {"a": noise("a", 3000), "b": noise("b", 2000)})
    cut(files, tmp_path / "parts", 1000, {})
    return tmp_path / "parts"


@pytest.mark.parametrize("where", [0, 17, 999])
def test_a_damaged_part_is_refused_by_name(parts: Path, tmp_path: Path, where: int) -> None:
    """One flipped bit anywhere in a part is found before anything is put together."""
    data = bytearray((parts / "part-01").read_bytes())
    data[where] ^= 1
    (parts / "part-01").write_bytes(data)
    with pytest.raises(PartsError, match="part-01 is damaged"):
        join(parts, tmp_path / "back")
    assert not (tmp_path / "back").exists()


def test_a_missing_and_a_short_part_are_both_named(parts: Path, tmp_path: Path) -> None:
    """All that has to be carried again is named at once."""
    (parts / "part-00").unlink()
    (parts / "part-02").write_bytes((parts / "part-02").read_bytes()[:-1])
    with pytest.raises(PartsError, match="part-00 is missing, part-02 is damaged"):
        join(parts, tmp_path / "back")


def test_a_manifest_can_not_write_outside_the_directory(parts: Path, tmp_path: Path) -> None:
    """A file's name with a path in it is refused."""
    content = json.loads((parts / MANIFEST).read_text())
    content["files"][0]["name"] = "../a"
    (parts / MANIFEST).write_text(json.dumps(content))
    with pytest.raises(PartsError, match="outside"):
        join(parts, tmp_path / "in" / "back")
    assert not (tmp_path / "in" / "a").exists()


def test_a_manifest_that_lies_about_a_file_is_refused(parts: Path, tmp_path: Path) -> None:
    """Parts that are whole but hold another file than the manifest names give nothing to install."""
    content = json.loads((parts / MANIFEST).read_text())
    content["files"][1]["sha256"] = "0" * 64
    (parts / MANIFEST).write_text(json.dumps(content))
    with pytest.raises(PartsError, match="b is not what was packed"):
        join(parts, tmp_path / "back")


@pytest.mark.parametrize("part_bytes", [0, 60_000_000])
def test_parts_that_would_not_travel_are_not_cut(tmp_path: Path, part_bytes: int) -> None:
    """60 MB is too much for a part."""
    with pytest.raises(PartsError, match="travels"):
        cut([], tmp_path / "parts", part_bytes, {})


# -- wheels ----------------------------------------------------------------------------------------------------------


def digest(data: bytes) -> str:
    return "sha256=" + base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()


def make_wheel(path: Path, files: dict[str, bytes], *, lies_about: str = "") -> Path:
    """A small wheel, with a RECORD that is true but for one file."""
    info = "thing-1.0.dist-info"
    rows = [f"{name},{digest(b'else' if name == lies_about else data)},{len(data)}" for name, data in files.items()]
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as wheel:
        for name, data in files.items():
            wheel.writestr(name, data)
        wheel.writestr(f"{info}/RECORD", "\n".join([*rows, f"{info}/RECORD,,", ""]))
    return path


FILES = {
    "thing/__init__.py": b"value = 1\n",
    "thing/large.so": b"x" * 1000,
    "thing/extra/deep/header.h": b"y" * 100,
    "thing-1.0.dist-info/METADATA": b"Metadata-Version: 2.1\nName: thing\nVersion: 1.0\n",
}


def test_a_thinned_wheel_has_a_true_record(tmp_path: Path) -> None:
    """What stays is byte for byte the same, RECORD names exactly what is there, and says what was left out."""
    wheel = make_wheel(tmp_path / "thing-1.0-py3-none-any.whl", FILES)
    patterns = ("thing/*.so", "thing/extra/*")
    thinned = thin(wheel, tmp_path / "thin", patterns)
    with zipfile.ZipFile(thinned.path) as found:
        content = {name: found.read(name) for name in found.namelist()}
    record = content.pop("thing-1.0.dist-info/RECORD")
    rows = {row[0]: row[1:] for row in csv.reader(io.StringIO(record.decode()))}
    assert rows.pop("thing-1.0.dist-info/RECORD") == ["", ""]
    assert rows == {name: [digest(data), str(len(data))] for name, data in content.items()}
    assert content.pop(f"thing-1.0.dist-info/{NOTE}").decode().split() == list(patterns)
    assert content == {name: FILES[name] for name in ("thing/__init__.py", "thing-1.0.dist-info/METADATA")}
    assert thinned.left_out == {"thing/*.so": 1000, "thing/extra/*": 100}


def test_thinning_twice_gives_the_same_bytes(tmp_path: Path) -> None:
    """Dates and order of the wheel that came in are not in the one that goes out."""
    one = make_wheel(tmp_path / "thing-1.0-py3-none-any.whl", FILES)
    (tmp_path / "other").mkdir()
    two = make_wheel(tmp_path / "other" / one.name, dict(reversed(FILES.items())))
    outs = [thin(wheel, tmp_path / f"thin-{n}", ("thing/*.so",)).path for n, wheel in enumerate((one, two))]
    assert outs[0].read_bytes() == outs[1].read_bytes()


def test_a_wheel_that_is_not_what_its_record_says_is_refused(tmp_path: Path) -> None:
    """A false RECORD does not become a true one by thinning."""
    wheel = make_wheel(tmp_path / "thing-1.0-py3-none-any.whl", FILES, lies_about="thing/__init__.py")
    with pytest.raises(WheelError, match="not what RECORD says"):
        thin(wheel, tmp_path / "thin", ())


def test_a_pattern_that_matches_nothing_is_an_error(tmp_path: Path) -> None:
    """A wheel of another version, whose large files are called otherwise, is not carried whole by mistake."""
    wheel = make_wheel(tmp_path / "thing-1.0-py3-none-any.whl", FILES)
    with pytest.raises(WheelError, match="another version"):
        thin(wheel, tmp_path / "thin", ("thing/other.so",))


def test_every_pin_is_exact_and_named_once() -> None:
    """requirements.txt pins each wheel to one version: the same pins give the same parts."""
    names = [pin.partition("==")[0] for pin in pins(PINS)]
    assert len(names) == len(set(names)) > 50
    assert all(pin.count("==") == 1 and pin.partition("==")[2] for pin in pins(PINS))


# -- what is measured with them --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "billions", "kv_bytes"),
    [("qwen2.5-7b", 7.62, 57_344), ("llama-3.1-8b", 8.03, 131_072), ("qwen2.5-72b-cut", 72.7, 327_680)],
)
def test_the_shapes_are_the_true_ones(name: str, billions: float, kv_bytes: int) -> None:
    """Parameters and KV bytes a token are those that the models' makers give."""
    assert SHAPES[name].weight_bytes / 2e9 == pytest.approx(billions, rel=0.005)
    assert SHAPES[name].kv_bytes_per_token == kv_bytes


def test_the_cut_model_fits_with_its_pool() -> None:
    """As many layers as fit into 80 GiB, and not one more; a model that fits whole is not cut."""
    pool = 100_000
    cut_shape = cut_to("qwen2.5-72b-cut", 80 * GIB, pool)
    a_layer = cut_shape.layer_bytes + pool * cut_shape.kv_bytes_per_token // cut_shape.layers
    used = cut_shape.weight_bytes + pool * cut_shape.kv_bytes_per_token
    assert 0.9 * 80 * GIB - 6 * GIB - a_layer < used <= 0.9 * 80 * GIB - 6 * GIB
    assert cut_to("qwen2.5-7b", 80 * GIB, pool) == SHAPES["qwen2.5-7b"]


@given(free_gib=st.floats(20, 400), name=st.sampled_from(("qwen2.5-7b", "llama-3.1-8b", "qwen2.5-72b-cut")))
def test_the_sessions_of_the_chat_fit(free_gib: float, name: str) -> None:
    """RAM tier and daemon leave a tenth of /dev/shm free, and no more sessions than 40 would; or it is refused."""
    kv_bytes = SHAPES[name].kv_bytes_per_token

    def needed(sessions: int) -> float:
        sizes = chat_sizes(sessions)
        return float(sizes.ram_gib(kv_bytes)) + float(sizes.l2_gib(kv_bytes))

    try:
        sessions = fitting_sessions(kv_bytes, free_gib)
    except ConfigError:
        assert needed(12) > 0.9 * free_gib
        return
    assert needed(sessions) <= 0.9 * free_gib
    assert sessions == 40 or needed(sessions + 1) > 0.9 * free_gib


def test_a_made_model_has_a_text_for_every_token(tmp_path: Path) -> None:
    """Whatever a random model says is text, so that a time to first token can be seen; and KV is sized as its shape."""
    from tokenizers import Tokenizer

    directory = make_model(tmp_path / "model", SHAPES["tiny"])
    tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
    assert tokenizer.get_vocab_size() == SHAPES["tiny"].vocabulary
    silent = [n for n in range(SHAPES["tiny"].vocabulary) if not tokenizer.decode([n], skip_special_tokens=False)]
    assert silent == []
    assert kv_bytes_per_token(directory) == SHAPES["tiny"].kv_bytes_per_token


def test_what_was_measured_survives_what_comes_next(tmp_path: Path) -> None:
    """The file holds every step's figures as soon as they are put, and why others are not there."""
    result = Result(tmp_path / "out" / "part.json", {"part": "x"})
    result.put("first", {"gb_s": 1.0})
    assert json.loads(result.path.read_text())["measured"] == {"first": {"gb_s": 1.0}}
    result.leave_out("second", "no time")
    result.close("cut short")
    found = json.loads(result.path.read_text())
    assert (found["state"], found["not_measured"], found["part"]) == ("cut short", {"second": "no time"}, "x")


def test_a_part_is_told_when_its_time_is_over() -> None:
    """What needs longer than is left is not begun, and what goes on too long is interrupted."""
    with pytest.raises(OutOfTime, match="60 s are needed"):
        Deadline(100).check(60)
    deadline = Deadline(46.5)  # 45 of them are for cleaning up
    with pytest.raises(OutOfTime), deadline.held():
        while True:
            pass


def test_a_flipped_bit_in_what_comes_back_is_seen() -> None:
    """Digests are those of the engine's own blocks: equal bytes in another block pass, with one bit flipped not."""
    import torch

    from benchmarks.gpu.watch import Watch

    pages = torch.arange(6 * 8, dtype=torch.int8).reshape(6, 8)
    caches = SimpleNamespace(
        tensors=[SimpleNamespace(tensor=pages)],
        group_data_refs=[[SimpleNamespace(tensor_idx=0, page_size_bytes=8)]],
    )
    done: list[Any] = []
    worker: Any = SimpleNamespace(
        submit_store=lambda job, blocks, slots: True,
        submit_load=lambda job, slots, blocks: True,
        get_finished=lambda: [done.pop()] if done else [],
    )
    watch = Watch(digests=True)
    watch.attach(SimpleNamespace(blocks_per_chunk=2), caches, worker)  # type: ignore[arg-type]
    watch.names[0] = b"chunk"

    def blocks(*ids: int) -> Any:
        return SimpleNamespace(block_ids=torch.tensor(ids), group_sizes=[len(ids)], block_indices=[0])

    slots = SimpleNamespace(block_ids=torch.tensor([0]))

    def load(job: int) -> None:
        worker.submit_load(job, slots, blocks(4, 5))
        done.append(SimpleNamespace(job_id=job))
        worker.get_finished()

    worker.submit_store(1, blocks(1, 2), slots)
    pages[4:6] = pages[1:3]
    load(2)
    assert (watch.compared, watch.wrong, watch.unknown) == (2, 0, 0)
    pages[5, 7] ^= 1
    load(3)
    assert (watch.compared, watch.wrong, watch.unknown) == (4, 1, 0)
