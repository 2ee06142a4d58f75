"""The namespace covers what changes KV: every field of vLLM's configuration, and the bytes of the model's files."""

import dataclasses
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import vllm.config
from vllm.engine.arg_utils import EngineArgs
from vllm.platforms.interface import DeviceCapability

from benchmarks.speculators import write_config
from hotspan.core.errors import ConfigError
from hotspan.engine import fingerprint, identity
from hotspan.engine.fingerprint import AdapterDigests, FileDigests, model_digest
from hotspan.engine.identity import _section, namespace_fields, namespace_of
from hotspan.engine.kv_fields import KV
from hotspan.testing.clock import SimulatedClock

from .kv_rest import REST

CLASSES = {
    "": "VllmConfig",
    "model_config": "ModelConfig",
    "model_config.multimodal_config": "MultiModalConfig",
    "cache_config": "CacheConfig",
    "parallel_config": "ParallelConfig",
    "scheduler_config": "SchedulerConfig",
    "load_config": "LoadConfig",
    "attention_config": "AttentionConfig",
    "mamba_config": "MambaConfig",
    "kernel_config": "KernelConfig",
    "lora_config": "LoRAConfig",
    "speculative_config": "SpeculativeConfig",
    "diffusion_config": "DiffusionConfig",
    "compilation_config": "CompilationConfig",
}
"""The class of each section of the table."""


# -- fields ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("section", CLASSES)
def test_every_field_is_judged(section: str) -> None:
    """A field that vLLM adds to its configuration is in the namespace, or has a reason to stay out; never in both."""
    kind = getattr(vllm.config, CLASSES[section], None)
    if kind is None:
        pytest.skip("this release has no such section")
    rest = [name for names in REST.get(section, {}).values() for name in names.split()]
    judged = [*KV.get(section, "").split(), *rest]
    assert len(judged) == len(set(judged)), "a field stands twice"
    found = {field.name for field in dataclasses.fields(kind)}
    assert found - set(judged) == set(), (
        f"read what they do to KV and put them into kv_fields.py or kv_rest.py ({section})"
    )


def test_the_table_has_all_sections() -> None:
    """No section of the table is missed by the test above."""
    assert KV.keys() | REST.keys() == CLASSES.keys()


@pytest.fixture(scope="module")
def engine(tiny_model: Path) -> Any:
    """An engine's configuration."""
    arguments = EngineArgs(str(tiny_model), dtype="float32", max_model_len=4096, enforce_eager=True)
    arguments.prefix_caching_hash_algo = "sha256_cbor"
    return arguments.create_engine_config()


GROUPS: Any = SimpleNamespace(kv_cache_groups=[], kv_cache_layout="NHD")


def name(engine: Any, digests: FileDigests | None = None) -> bytes:
    return namespace_of(engine, GROUPS, 256, digests or FileDigests(), full=True)


def fields_in(section: str) -> Iterator[str]:
    known = {field.name for field in dataclasses.fields(getattr(vllm.config, CLASSES[section]))}
    yield from (field for field in KV[section].split() if field in known)


def test_each_field_of_the_table_changes_the_namespace(engine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another value of any field that changes KV is another namespace; the same configuration is the same one."""
    before = name(engine)
    assert name(engine) == before
    for section in KV:
        part = _section(engine, section)
        if part is None:  # of adapters, drafts, media: the section itself is made up
            part = SimpleNamespace(**dict.fromkeys(fields_in(section)), model=None)
            owner, _, last = section.rpartition(".")
            monkeypatch.setattr(_section(engine, owner), last, part)
        with_section = name(engine)
        for field in fields_in(section):
            with monkeypatch.context() as patched:
                patched.setitem(vars(part), field, "another")
                assert name(engine) != with_section, f"{section}.{field}"


def test_gpus_of_another_compute_capability_have_another_namespace(
    engine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An H100 finds nothing of an A100's, and what another H100 stored; what has no capability goes by its type."""

    def named(device: str, *capability: int) -> bytes:
        found = DeviceCapability(*capability) if capability else None
        gpu = SimpleNamespace(is_cpu=lambda: False, device_type=device, get_device_capability=lambda: found)
        monkeypatch.setattr(identity, "current_platform", gpu)
        return name(engine)

    names = [named("cuda", 8, 0), named("cuda", 9, 0), named("cuda", 10, 0), named("cuda", 8, 6), named("xpu")]
    assert len(set(names)) == len(names)
    assert named("cuda", 9, 0) == names[1] and named("xpu") == names[-1]


def test_the_length_that_longrope_chooses_by_is_in(engine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two engines of one model whose limits differ may have other rotations."""
    before = name(engine)
    monkeypatch.setattr(engine.model_config, "max_model_len", 2048)
    assert name(engine) != before


def test_what_has_no_lasting_name_is_refused(engine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Options whose value is some object are refused in a sentence."""
    monkeypatch.setattr(engine, "additional_config", {"x": object()})
    with pytest.raises(ConfigError, match="no lasting name"):
        name(engine)


@pytest.mark.parametrize(
    ("variable", "value"),
    [
        ("VLLM_MARLIN_INPUT_DTYPE", "int8"),  # quantizes activations
        ("VLLM_CPU_INT4_W4A8", "1"),
        ("VLLM_SSM_CONV_STATE_LAYOUT", "DS"),  # orders the bytes of a state
        ("VLLM_PP_LAYER_PARTITION", "3,5"),
        ("VLLM_MOE_ROUTING_SIMULATION_STRATEGY", "uniform_random"),
    ],
)
def test_variables_that_change_kv_are_in(
    engine: Any, monkeypatch: pytest.MonkeyPatch, variable: str, value: str
) -> None:
    """vLLM takes some of what decides KV from the environment; where nothing is set, nothing is in the namespace."""
    before = name(engine)
    monkeypatch.setenv(variable, value)
    assert name(engine) != before


@pytest.mark.parametrize("variable", ["VLLM_CPU_OMP_THREADS_BIND", "VLLM_DP_RANK", "VLLM_HOST_IP", "VLLM_SERVICE_HOST"])
def test_variables_of_one_replica_stay_out(engine: Any, monkeypatch: pytest.MonkeyPatch, variable: str) -> None:
    """Replicas that differ by place and number only find what others have stored."""
    before = name(engine)
    monkeypatch.setenv(variable, "1")
    assert name(engine) == before


@pytest.mark.parametrize("load_format", ["tensorizer", "modelexpress", "ipc_cache", "somebodys_plugin"])
def test_weights_from_elsewhere_have_a_name_of_this_life(
    engine: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, load_format: str
) -> None:
    """Weights that no digest covers may be others at the next start: nothing of before is found then."""
    monkeypatch.setattr(engine.load_config, "load_format", load_format)
    assert name(engine) != name(engine) and "weights_have_no_digest" in caplog.text


def test_weights_at_a_url_have_a_name_of_this_life(engine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM streams the weights of gs:// and az:// models from there, and leaves only their configuration here."""
    monkeypatch.setitem(vars(engine.model_config), "model_weights", "gs://bucket/model")
    assert name(engine) != name(engine)


def test_scales_of_an_encoder_count_by_their_bytes(
    engine: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A file of scales that is overwritten is another one."""
    scales = tmp_path / "scales.json"
    part = SimpleNamespace(**dict.fromkeys(fields_in("model_config.multimodal_config")))
    part.mm_encoder_fp8_scale_path = str(scales)
    monkeypatch.setattr(engine.model_config, "multimodal_config", part)
    scales.write_text("1")
    before = name(engine)
    scales.write_text("2")
    assert name(engine) != before


def test_a_draft_model_counts_by_its_bytes(tiny_model: Path, tmp_path: Path) -> None:
    """The KV of a draft model's layers is stored with the target's: other weights are another namespace, the same
    weights in another directory are not. Drafts that come from tokens alone change nothing."""

    def named(**speculation: Any) -> bytes:
        arguments = EngineArgs(str(tmp_path / "target"), dtype="float32", max_model_len=512, enforce_eager=True)
        arguments.prefix_caching_hash_algo = "sha256_cbor"
        if speculation:
            arguments.speculative_config = {"num_speculative_tokens": 3} | speculation
        return name(arguments.create_engine_config())

    for directory in ("target", "a", "b"):
        (tmp_path / directory).mkdir()
        write_config(tmp_path / directory, num_hidden_layers=1)
        shutil.copy(tiny_model / "model.safetensors", tmp_path / directory)
    for name_of_file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(tiny_model / name_of_file, tmp_path / "target")
    first, second = (named(method="eagle", model=str(tmp_path / directory)) for directory in ("a", "b"))
    assert first == second
    weights = tmp_path / "b" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"x")
    assert named(method="eagle", model=str(tmp_path / "b")) != first
    assert named(method="ngram", prompt_lookup_max=3) == named() != first


def test_values_have_one_spelling(engine: Any) -> None:
    """No address, and nothing that depends on the order of a set, is in the namespace."""
    for field, value in namespace_fields(engine, GROUPS, 256, FileDigests(), full=True).items():
        assert " at 0x" not in str(value), field


# -- files -------------------------------------------------------------------------------------------------------------

SIZE = 3 << 20


@pytest.fixture
def model(tmp_path: Path) -> Path:
    path = tmp_path / "model"
    path.mkdir()
    (path / "config.json").write_text("{}")
    (path / "tokenizer.json").write_text("{}")
    header = (16).to_bytes(8, "little") + b"{}".ljust(16)
    (path / "model.safetensors").write_bytes(header + os.urandom(SIZE - len(header)))
    return path


def edit(path: Path, at: int) -> None:
    """Change one byte in place, under the old time of modification."""
    times = path.stat()
    with path.open("r+b") as file:
        file.seek(at)
        (byte,) = file.read(1)
        file.seek(at)
        file.write(bytes([byte ^ 1]))
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))


@pytest.mark.parametrize("at", [0, 9, 70_000, SIZE // 2 + 12_345, SIZE - 1])
def test_an_edit_anywhere_is_another_model(model: Path, at: int) -> None:
    """One changed byte of the weights, between what a sample would read, too."""
    before = model_digest(model)
    edit(model / "model.safetensors", at)
    assert model_digest(model) != before
    edit(model / "model.safetensors", at)
    assert model_digest(model) == before


@pytest.mark.parametrize("file", ["preprocessor_config.json", "processor_config.json", "model.safetensors.index.json"])
def test_what_prepares_media_is_part_of_the_model(model: Path, file: str) -> None:
    """How images become numbers decides KV; the tokenizer's files, templates and sampling defaults do not."""
    before = model_digest(model)
    for other in ("tokenizer.json", "generation_config.json", "README.md", "chat_template.jinja"):
        (model / other).write_text("changed")
    assert model_digest(model) == before
    (model / file).write_text("{}")
    first = model_digest(model)
    (model / file).write_text('{"size": 1}')
    assert len({before, first, model_digest(model)}) == 3


def test_code_counts_where_it_runs(model: Path) -> None:
    """A model's own code is part of it with trust_remote_code, and nothing without."""
    before = [model_digest(model, with_code=trusted) for trusted in (False, True)]
    (model / "modeling_x.py").write_text("pass")
    after = [model_digest(model, with_code=trusted) for trusted in (False, True)]
    assert (after[0] == before[0], after[1] == before[1]) == (True, False)


def test_a_copy_elsewhere_is_the_same_model(model: Path, tmp_path: Path) -> None:
    """Names of directories, times and inodes are no part of the digest: replicas share what they store."""
    copy = tmp_path / "elsewhere"
    model.rename(copy)
    (copy / "model.safetensors").write_bytes((copy / "model.safetensors").read_bytes())
    twin = tmp_path / "twin"
    twin.mkdir()
    for file in copy.iterdir():
        (twin / file.name).write_bytes(file.read_bytes())
    assert model_digest(copy) == model_digest(twin)


class Reads(FileDigests):
    """Counts files that are read."""

    count = 0

    def _read(self, path: Path, size: int) -> bytes:
        self.count += 1
        return super()._read(path, size)


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory for digests of files from 1 MiB on."""
    monkeypatch.setattr(fingerprint, "_REMEMBERED_BYTES", 1 << 20)
    return tmp_path / "digests"


def settled() -> SimulatedClock:
    """A clock that shows a time long after the files were written."""
    return SimulatedClock(unix_s=4e9)


def test_weights_are_read_once(model: Path, cache: Path) -> None:
    """A later start finds the digest, until anything about the file changes: content, times or inode."""
    weights = model / "model.safetensors"

    def start() -> tuple[bytes, int]:
        digests = Reads(cache, clock=settled())
        return digests.of(weights), digests.count

    first, reads = start()
    assert (reads, start()) == (1, (first, 0))
    edit(weights, SIZE // 3)
    changed, reads = start()
    assert changed != first and reads == 1
    weights.write_bytes(weights.read_bytes())
    assert start() == (changed, 1)
    moved = model / "moved"
    moved.write_bytes(weights.read_bytes())
    os.utime(moved, ns=(weights.stat().st_atime_ns, weights.stat().st_mtime_ns))
    moved.replace(weights)
    assert start() == (changed, 1) and start() == (changed, 0)


def test_a_file_that_just_changed_is_not_remembered(model: Path, cache: Path) -> None:
    """Another write within the resolution of the file system's clock would leave the times as they are."""
    weights = model / "model.safetensors"
    now = SimulatedClock(unix_s=weights.stat().st_ctime + 1)
    for _ in range(2):
        digests = Reads(cache, clock=now)
        digests.of(weights)
        assert digests.count == 1


def test_a_record_that_others_could_write_is_not_believed(model: Path, cache: Path) -> None:
    """Only a directory of this user's alone is read, and what is damaged there is as good as absent."""
    weights = model / "model.safetensors"
    want = Reads(cache, clock=settled()).of(weights)
    cache.chmod(0o755)
    digests = Reads(cache, clock=settled())
    assert digests.of(weights) == want and digests.count == 1
    cache.chmod(0o700)
    (entry,) = cache.iterdir()
    whole = entry.read_bytes()
    for damaged in (b"", b"[]", b"{}", whole[:-9], whole.replace(want.hex().encode(), b"zz"), b'{"sha256": 1}'):
        entry.write_bytes(damaged)
        digests = Reads(cache, clock=settled())
        assert digests.of(weights) == want and digests.count == 1


def test_a_file_that_changes_while_it_is_read_is_refused(model: Path) -> None:
    """Nobody can say which of both the engine has."""

    class Changing(FileDigests):
        def _read(self, path: Path, size: int) -> bytes:
            edit(path, 5)
            return super()._read(path, size)

    with pytest.raises(ConfigError, match="changes while it is read"):
        Changing().of(model / "model.safetensors")


# -- adapters ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def adapter(tmp_path: Path) -> Path:
    path = tmp_path / "adapter"
    path.mkdir()
    (path / "adapter_config.json").write_text("{}")
    (path / "adapter_model.safetensors").write_bytes(os.urandom(1000))
    return path


def test_an_adapter_that_is_overwritten_is_known_no_more(adapter: Path) -> None:
    """The engine computes with what it loaded, or has loaded the new files since: neither digest is sure."""
    digests = AdapterDigests()
    digests.load(1, str(adapter))
    first = digests.of(1, str(adapter))
    assert first is not None and digests.of(1, str(adapter)) == first
    edit(adapter / "adapter_model.safetensors", 500)
    assert digests.of(1, str(adapter)) is None
    edit(adapter / "adapter_model.safetensors", 500)
    assert digests.of(1, str(adapter)) is None, "the engine may have loaded what was there in between"


def test_an_adapter_that_is_overwritten_before_its_first_request(adapter: Path) -> None:
    """The digest is of what was there when the engine loaded it, and not of what the first request finds."""
    digests = AdapterDigests()
    digests.load(1, str(adapter))
    edit(adapter / "adapter_model.safetensors", 0)
    assert digests.of(1, str(adapter)) is None


def test_an_adapter_that_is_loaded_anew_has_its_new_name(adapter: Path) -> None:
    """Under another id, or loaded again under its own, it goes by what its files hold now."""
    digests = AdapterDigests()
    digests.load(1, str(adapter))
    first = digests.of(1, str(adapter))
    edit(adapter / "adapter_model.safetensors", 0)
    second = digests.of(2, str(adapter))
    digests.load(1, str(adapter))
    assert digests.of(1, str(adapter)) == second != first


def test_an_adapter_without_files_is_not_cached(tmp_path: Path) -> None:
    """What can't be read has no digest, and gets one when it can."""
    digests = AdapterDigests()
    assert digests.of(1, str(tmp_path / "none")) is None
