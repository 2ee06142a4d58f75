"""An adapter's files: where they may come from, what they must be, and that nobody changes them afterwards."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hotspan.core.errors import ConfigError
from hotspan.http.errors import HttpError
from hotspan.server.adapters.check import AdapterLimits, Shape, check_adapter, model_shapes
from hotspan.server.adapters.snapshots import Snapshot, SnapshotStore
from hotspan.server.adapters.source import CONFIG, WEIGHTS, Sources

from .rig import MODULE, tensors, write_adapter

FITS = AdapterLimits(8, {MODULE: Shape(16, 16), "model.layers.0.mlp.up_proj": Shape(32, 16)})


def take(store: SnapshotStore, roots: list[Path], src: str) -> Snapshot:
    sources = Sources(roots)
    return store.take(sources, sources.directory(src), lambda copy: check_adapter(copy, FITS))


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / "root").mkdir()
    return tmp_path / "root"


@pytest.fixture
def store(tmp_path: Path) -> SnapshotStore:
    return SnapshotStore(tmp_path / "copies")


# -- sources -----------------------------------------------------------------------------------------------------------


def test_sources_within_a_root(tmp_path: Path, root: Path) -> None:
    """Relative to any root in order, absolute inside one, through links that stay inside."""
    other = tmp_path / "other"
    write_adapter(root / "a"), write_adapter(other / "b"), write_adapter(other / "a")
    (root / "link").symlink_to(root / "a")
    sources = Sources([root, other])
    assert sources.directory("a") == root / "a" and sources.directory("b") == other / "b"
    assert sources.directory(str(other / "a")) == other / "a" and sources.directory("link") == root / "a"
    assert sources.directory("./x/../a") == root / "a"


@pytest.mark.parametrize("src", ["../secret", "a/../../secret", "out", "out/x", "loop", "", "a\0b", "a\n", "a/none"])
def test_sources_outside(tmp_path: Path, root: Path, src: str) -> None:
    """`..`, links and what is no path lead nowhere."""
    write_adapter(tmp_path / "secret")
    write_adapter(root / "a")
    (root / "out").symlink_to(tmp_path / "secret")
    (root / "loop").symlink_to(root / "loop")
    with pytest.raises(HttpError) as caught:
        Sources([root]).directory(src)
    assert caught.value.status == 400


def test_what_is_outside_is_not_told(tmp_path: Path, root: Path) -> None:
    """The answer for a path outside is the same whether anything is there or not."""
    write_adapter(tmp_path / "there")
    said = []
    for name in ("there", "none"):
        with pytest.raises(HttpError) as caught:
            Sources([root]).directory(str(tmp_path / name))
        said.append(str(caught.value).replace(name, "X"))
    assert said[0] == said[1]


@given(parts=st.lists(st.sampled_from(["..", ".", "a", "out", "deep", "", "/"]), max_size=8))
@settings(max_examples=200, deadline=None)
def test_no_path_leaves_the_root(parts: list[str], tmp_path_factory: pytest.TempPathFactory) -> None:
    """Whatever is made of `..` and links, what is found lies under the root."""
    top = tmp_path_factory.getbasetemp() / "paths"
    if not top.exists():
        write_adapter(top / "root" / "a" / "deep")
        write_adapter(top / "outside")
        (top / "root" / "out").symlink_to("../outside")
    try:
        found = Sources([top / "root"]).directory("/".join(parts))
    except HttpError:
        return
    assert found.is_relative_to(top / "root")


@pytest.mark.parametrize("src", ["s3://bucket/adapter", "https://host/x", "hf://org/name"])
def test_addresses(root: Path, src: str) -> None:
    """An address is told apart from a path, with what to do instead."""
    with pytest.raises(HttpError, match="copy it to"):
        Sources([root]).directory(src)


@pytest.mark.parametrize("name", [CONFIG, WEIGHTS])
def test_files_that_are_links(tmp_path: Path, root: Path, store: SnapshotStore, name: str) -> None:
    """A file may be a link inside the root; one that leads out, or is no file, is refused and nothing is copied."""
    directory = write_adapter(root / "a")
    moved = root / "blob"
    (directory / name).rename(moved)
    (directory / name).symlink_to(moved)
    take(store, [root], "a").close()
    moved.rename(tmp_path / "outside")
    (directory / name).unlink()
    (directory / name).symlink_to(tmp_path / "outside")
    with pytest.raises(HttpError, match="leads out"):
        take(store, [root], "a")
    (directory / name).unlink()
    os.mkfifo(directory / name)
    with pytest.raises(HttpError, match="is no file"):
        take(store, [root], "a")
    assert list((tmp_path / "copies").iterdir()) == []


def test_missing_files(root: Path, store: SnapshotStore) -> None:
    """What is missing is named; a pickle in its place gets its remedy and is never read."""
    directory = write_adapter(root / "a")
    (directory / WEIGHTS).rename(directory / "adapter_model.bin")
    with pytest.raises(HttpError, match="safe_serialization"):
        take(store, [root], "a")
    (directory / "adapter_model.bin").unlink()
    with pytest.raises(HttpError, match=f"no readable {WEIGHTS}"):
        take(store, [root], "a")
    (directory / CONFIG).unlink()
    with pytest.raises(HttpError, match=f"no readable {CONFIG}"):
        take(store, [root], "a")


# -- snapshots ---------------------------------------------------------------------------------------------------------


def test_a_copy_never_changes(root: Path, store: SnapshotStore) -> None:
    """Files written in place, replaced or removed afterwards are the copy's no longer."""
    directory = write_adapter(root / "a")
    before = (directory / WEIGHTS).read_bytes()
    snapshot = take(store, [root], "a")
    with (directory / WEIGHTS).open("r+b") as file:
        file.truncate(10)
    assert (snapshot.path / WEIGHTS).read_bytes() == before
    (directory / CONFIG).unlink()
    assert json.loads((snapshot.path / CONFIG).read_bytes())["r"] == 4
    assert snapshot.path.stat().st_mode & 0o077 == 0 and (snapshot.path / WEIGHTS).stat().st_mode & 0o077 == 0


def test_digests(root: Path, store: SnapshotStore) -> None:
    """Equal where both files are equal, different where a byte of either is."""
    write_adapter(root / "a"), write_adapter(root / "same"), write_adapter(root / "weights", 1)
    write_adapter(root / "config", lora_alpha=9)
    names = ("a", "same", "weights", "config")
    digests = {name: take(store, [root], name).digest for name in names}
    assert digests["a"] == digests["same"] and len(set(digests.values())) == 3


def test_a_copy_goes_with_its_last_holder(root: Path, store: SnapshotStore) -> None:
    """Two hold one copy; the first to let go removes nothing."""
    write_adapter(root / "a")
    first, second = take(store, [root], "a"), take(store, [root], "a")
    assert first.path == second.path
    first.close()
    assert second.path.is_dir()
    second.close()
    assert not second.path.exists()


def test_a_refused_adapter_leaves_nothing(tmp_path: Path, root: Path, store: SnapshotStore) -> None:
    """A copy whose check fails is gone."""
    write_adapter(root / "a", r=64)
    with pytest.raises(HttpError, match="rank"):
        take(store, [root], "a")
    assert list((tmp_path / "copies").iterdir()) == []


def test_what_killed_servers_left_goes_and_what_others_hold_stays(tmp_path: Path, root: Path) -> None:
    """A second server sweeps what nobody holds; what a living process holds survives both its start and its end."""
    write_adapter(root / "a"), write_adapter(root / "b", 1)
    script = (
        "import sys; from pathlib import Path\n"
        "from hotspan.server.adapters.snapshots import SnapshotStore\n"
        "from hotspan.server.adapters.source import Sources\n"
        "root, copies = map(Path, sys.argv[1:])\n"
        "store, sources = SnapshotStore(copies), Sources([root])\n"
        "held = [store.take(sources, sources.directory(name), lambda copy: None) for name in 'ab']\n"
        "print(held[0].path, held[1].path, flush=True)\n"
        "sys.stdin.read()\n"
    )
    copies = tmp_path / "copies"
    other = subprocess.Popen(
        [sys.executable, "-c", script, str(root), str(copies)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert other.stdin and other.stdout
    paths = [Path(path) for path in other.stdout.readline().split()]
    store = SnapshotStore(copies)
    snapshot = take(store, [root], "a")
    assert snapshot.path == paths[0]
    snapshot.close()
    assert all((path / WEIGHTS).is_file() for path in paths)
    other.kill()
    other.wait()
    assert all(path.is_dir() for path in paths)
    SnapshotStore(copies)
    assert not any(path.exists() for path in paths)


def test_what_is_somebody_elses_stays(tmp_path: Path) -> None:
    """A directory for copies that holds other things as well keeps them; what begins or is a copy is swept."""
    copies = tmp_path / "copies"
    copies.mkdir(mode=0o700)
    for name in ("photos", "parts", "a" * 63, "part-x1_2", "b" * 64):
        (copies / name).mkdir()
        (copies / name / "file").touch()
    SnapshotStore(copies)
    assert sorted(path.name for path in copies.iterdir()) == ["a" * 63, "parts", "photos"]


def test_a_directory_of_others_is_refused(tmp_path: Path) -> None:
    """Copies lie where nobody else can look or write."""
    for path, mode in ((tmp_path / "open", 0o755), (tmp_path / "private", 0o700)):
        path.mkdir()
        path.chmod(mode)
    SnapshotStore(tmp_path / "private")
    (tmp_path / "link").symlink_to(tmp_path / "private")
    for name in ("open", "link"):
        with pytest.raises(ConfigError, match=r"chmod 700.*--adapter-copies"):
            SnapshotStore(tmp_path / name)
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError):
        SnapshotStore(tmp_path / "file" / "x")


# -- checks ------------------------------------------------------------------------------------------------------------


def check(path: Path, limits: AdapterLimits = FITS, **given: Any) -> None:
    check_adapter(write_adapter(path, **given), limits)


def test_what_fits_passes(tmp_path: Path) -> None:
    """A plain adapter, one with rank-stabilised scaling and a rank pattern, and one that can't be compared."""
    check(tmp_path)
    check(tmp_path, use_rslora=True, rank_pattern={"q_proj": 8}, target_modules="all-linear")
    check(tmp_path, AdapterLimits(8))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"r": 9}, "--max-lora-rank 9"),
        ({"rank_pattern": {"q_proj": 12}}, "--max-lora-rank 12"),
        ({"r": 0}, "rank 0"),
        ({"r": "8"}, "rank '8'"),
        ({"r": True}, "rank True"),
        ({"r": None}, "rank None"),
        ({"rank_pattern": [4]}, "rank"),
        ({"lora_alpha": "16"}, "lora_alpha"),
        ({"lora_alpha": None}, "lora_alpha"),
        ({"target_modules": None}, "target_modules"),
        ({"target_modules": {}}, "target_modules"),
        ({"peft_type": "IA3"}, "IA3"),
        ({"bias": "all"}, "bias"),
        ({"use_dora": True}, "use_dora"),
    ],
)
def test_configurations_that_do_not_fit(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    """Each is refused before anything is loaded, and the message says which."""
    with pytest.raises(HttpError, match=message) as caught:
        check(tmp_path, **changes)
    assert caught.value.status == 400


@pytest.mark.parametrize("text", ["", "{", "[]", "null", "\ufeff{}", '{"r": 1' + " " * (1 << 20) + "}"])
def test_configurations_that_are_none(tmp_path: Path, text: str) -> None:
    """What is no JSON object is refused."""
    write_adapter(tmp_path)
    (tmp_path / CONFIG).write_text(text)
    with pytest.raises(HttpError, match=CONFIG):
        check_adapter(tmp_path, FITS)


@pytest.mark.parametrize("cut", [0, 7, 8, 40, -1])
def test_damaged_weights(tmp_path: Path, cut: int) -> None:
    """A file that ends too early, wherever, is refused."""
    write_adapter(tmp_path)
    data = (tmp_path / WEIGHTS).read_bytes()
    (tmp_path / WEIGHTS).write_bytes(data[:cut])
    with pytest.raises(HttpError, match="damaged"):
        check_adapter(tmp_path, FITS)


def test_weights_of_another_model(tmp_path: Path) -> None:
    """Other sizes, other modules, half a module, halves of two ranks, and no LoRA at all."""
    with pytest.raises(HttpError, match=r"8 -> 16 and the model's is 16 -> 16"):
        check(tmp_path, weights=tensors(inputs=8))
    renamed = {name.replace("model.layers", "lm.layers"): value for name, value in tensors().items()}
    with pytest.raises(HttpError, match="none of the adapter's modules"):
        check(tmp_path, weights=renamed)
    whole = tensors()
    with pytest.raises(HttpError, match="only half"):
        check(tmp_path, weights=dict(list(whole.items())[:1]))
    b = next(name for name in whole if "lora_B" in name)
    with pytest.raises(HttpError, match="ranks 4 and 2"):
        check(tmp_path, weights=whole | {b: np.zeros((16, 2), np.float32)})
    with pytest.raises(HttpError, match="no LoRA weights"):
        check(tmp_path, weights={"a.weight": np.zeros((2, 2), np.float32)})


def test_shapes_of_a_model(tmp_path: Path) -> None:
    """They come from the weights' headers; of a model whose parts the engine renames, and of none, none do."""
    from hotspan.demo.model import make_demo_model

    model = make_demo_model(tmp_path / "model", "tiny").path
    shapes = model_shapes(model)
    assert shapes["model.layers.3.mlp.down_proj"] == Shape(256, 704)
    assert shapes["model.layers.0.self_attn.k_proj"] == Shape(128, 256)
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"vision_config": {}}))
    assert model_shapes(model) == {} == model_shapes(tmp_path / "none")


# -- what could stop the engine ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["rank_pattern", "alpha_pattern"])
@pytest.mark.parametrize("pattern", ["([a-z]+)+!", "(a|a)(a|a)", "a?a?a?aaa", ".*.*.*x", "a{1,9}{1,9}", "a" * 300])
def test_patterns_that_take_for_ever(tmp_path: Path, name: str, pattern: str) -> None:
    """The engine matches an adapter's patterns by itself: those whose time is not bounded are refused."""
    with pytest.raises(HttpError, match="for ever"):
        check(tmp_path, **{name: {pattern: 4}})


@pytest.mark.parametrize(
    "pattern", ["q_proj", r"^model\.layers\.\d+\.self_attn.q_proj$", "layers.[0-9].mlp", ".*k_proj"]
)
def test_patterns_that_peft_writes(tmp_path: Path, pattern: str) -> None:
    """Names of modules, anchored or with one repetition, are taken."""
    check(tmp_path, rank_pattern={pattern: 4}, alpha_pattern={pattern: 8})


def test_many_patterns(tmp_path: Path) -> None:
    """Patterns are counted with the modules that each is matched against."""
    check(tmp_path, rank_pattern={f"layers.{n}.q_proj": 4 for n in range(1000)})
    with pytest.raises(HttpError, match="too many patterns"):
        check(tmp_path, rank_pattern={f"layers.{n}.*.q_proj": 4 for n in range(8001)})


@pytest.mark.parametrize("changes", [{"rank_pattern": 4}, {"alpha_pattern": ["q_proj"]}])
def test_patterns_that_are_none(tmp_path: Path, changes: dict[str, Any]) -> None:
    """Patterns of another type are refused with what to give."""
    with pytest.raises(HttpError, match="give an object"):
        check(tmp_path, **changes)


def test_weights_that_are_larger_than_the_configuration_says(tmp_path: Path) -> None:
    """The rank of the tensors counts, too; and a module has a name of ordinary length."""
    with pytest.raises(HttpError, match="--max-lora-rank 9"):
        check(tmp_path, weights=tensors(rank=9))
    long = {name.replace("self_attn", "a" * 300): data for name, data in tensors().items()}
    with pytest.raises(HttpError, match="a module of"):
        check(tmp_path, weights=long)


def test_a_configuration_without_an_end_of_depth(tmp_path: Path) -> None:
    """Nesting that no parser follows is an error of the adapter's."""
    directory = write_adapter(tmp_path / "a")
    (directory / CONFIG).write_text("[" * 100_000)
    with pytest.raises(HttpError, match="is no JSON"):
        check_adapter(directory, FITS)


def test_no_adapter_fills_the_disk(tmp_path: Path, root: Path) -> None:
    """A file of any size is refused before a byte is copied; a sparse one costs its owner nothing."""
    directory = write_adapter(root / "a")
    os.truncate(directory / WEIGHTS, 1 << 42)
    with pytest.raises(HttpError, match="stay free") as caught:
        take(SnapshotStore(tmp_path / "copies"), [root], "a")
    assert caught.value.status == 507
    os.truncate(directory / WEIGHTS, 1 << 20)
    with pytest.raises(HttpError, match="may have") as caught:
        take(SnapshotStore(tmp_path / "copies", max_bytes=1 << 19), [root], "a")
    assert caught.value.status == 400 and list((tmp_path / "copies").iterdir()) == []
