"""`hotspan config`, and how `hotspan serve` takes its configuration."""

import errno
import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import hotspan.server.run
from hotspan.cli.checking import check_place
from hotspan.cli.flags import OWN_OPTIONS
from hotspan.cli.main import app
from hotspan.config.keys import BY_NAME
from hotspan.core.errors import ConfigError
from hotspan.core.types import GIB
from hotspan.server.options import ServeOptions

PREFIXES = ("OPTION_", "SERVING_", "SAGEMAKER_", "HOTSPAN_", "LMCACHE_", "HF_MODEL_")


@pytest.fixture(autouse=True)
def _no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    import os

    for name in list(os.environ):
        if name.startswith(PREFIXES):
            monkeypatch.delenv(name)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A directory with LMI's configuration and a model that is not loaded."""
    directory = tmp_path / "model"
    directory.mkdir()
    (directory / "config.json").write_text("{}")
    (directory / "serving.properties").write_text(
        "option.dtype=bf16\noption.max_rolling_batch_size=64\noption.lmcache_config_file=lmcache.yaml\n"
    )
    (directory / "lmcache.yaml").write_text("max_local_cpu_size: 7\nenable_p2p: true\n")
    return directory


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> list[ServeOptions]:
    """What `hotspan serve` would have been started with."""
    taken: list[ServeOptions] = []
    monkeypatch.setattr(hotspan.server.run, "run_server", lambda options, own: taken.append(options))
    return taken


def run(*words: str, variables: dict[str, str] | None = None) -> Any:
    return CliRunner().invoke(app, list(words), env=variables or {})


def test_explain(model: Path) -> None:
    """Each value is shown with where it comes from and what it overrode; notes and warnings are at the end."""
    done = run("config", "explain", str(model), "--ram-gib", "3", variables={"OPTION_DTYPE": "fp16"})
    assert done.exit_code == 0, done.output
    lines = done.output.splitlines()
    at = lines.index("dtype = bfloat16")
    assert lines[at + 1].endswith("serving.properties:1: option.dtype = bf16")
    assert lines[at + 2] == "    over float16 from environment: OPTION_DTYPE = fp16"
    at = lines.index("ram_gib = 3.0")
    assert lines[at + 1] == "    from --ram-gib" and "over 7.0 from" in lines[at + 2]
    assert "port = 8080  (default)" in lines and any(line.startswith("warning: ") for line in lines)


def test_explain_as_json(model: Path) -> None:
    """The same as JSON, with the source's name."""
    done = run("config", "explain", str(model), "--json", "--max-num-seqs", "5")
    answer = json.loads(done.stdout)
    rows = {row["key"]: row for row in answer["settings"]}
    assert rows["max_num_seqs"]["source"] == "command_line" and rows["max_num_seqs"]["value"] == "5"
    assert [over["source"] for over in rows["max_num_seqs"]["overrode"]] == ["serving_properties", "implied"]
    assert rows["ram_gib"]["value"] == 7.0 and rows["port"]["value"] == 8080
    assert any(note["is_warning"] for note in answer["notes"])


def test_check(model: Path) -> None:
    """A sound configuration says so; the engine's own parser is asked about what is the engine's."""
    done = run("config", "check", str(model))
    assert done.exit_code == 0 and "the configuration is sound" in done.output


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("option.max_modle_len=5", "option.max_modle_len = 5: neither hotspan nor vLLM has such a key: did you mean"),
        ("option.dtype=fp17", "serving.properties:4: option.dtype = fp17: an engine option is wrong"),
        ("option.enable_request_id_headers=false", "sound"),
        ("option.disk=/x", "--disk is given without --disk-gib"),
        ("option.kv_cache_dtype=fp9", "option.kv_cache_dtype = fp9"),
    ],
)
def test_the_engines_parser_is_asked(model: Path, line: str, expected: str) -> None:
    """What only the engine knows is checked by its own parser, and its answer is brought back to key and place."""
    path = model / "serving.properties"
    text = path.read_text().replace("option.dtype=bf16", "#") if "dtype=fp17" in line else path.read_text()
    path.write_text(text + line)
    done = run("config", "check", str(model))
    assert expected in done.output and done.exit_code == (0 if expected == "sound" else 2)


def test_all_that_is_wrong_is_named_at_once(model: Path) -> None:
    """Values and names of hotspan's and of the engine's, ranges and paths; what goes together comes after these."""
    words = ("--ram-gib", "x", "--gpu-memory-utilization", "9", "--max-modle-len", "5", "--kv-cache-dtype", "fp9")
    lora = ("--enable-lora", "--lora-modules", "a=/nonexistent/lora")
    done = run("config", "check", str(model), *words, *lora, variables={"HOTSPAN_DISK": "/d", "HOTSPAN_RAMGIB": "1"})
    said = " ".join(done.output.split())
    expected = (
        *("6 things are wrong", "--ram-gib is 'x'", "HOTSPAN_RAMGIB: there is no such variable"),
        *(
            "--kv-cache-dtype",
            "--max-modle-len",
            "--gpu-memory-utilization is 9.0: give a value less than or equal to 1",
        ),
        "--lora-modules a=/nonexistent/lora: there is no such directory",
    )
    assert done.exit_code == 2 and all(each in said for each in expected), done.output
    assert "without --disk-gib" not in said
    done = run("config", "check", str(model), "--disk", "/d")
    assert done.exit_code == 2 and "--disk is given without --disk-gib" in done.output, done.output


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (("--chat-template", "/nosuch.jinja"), "--chat-template /nosuch.jinja: there is no such file"),
        (("--chat-template", "nosuch.jinja"), "the engine refuses these options: The supplied chat template string"),
        (("--enable-auto-tool-choice",), "the engine refuses these options: Error: --enable-auto-tool-choice requires"),
        (("--sse-keep-alive-interval", "-1"), "the engine refuses these options"),
        (("--speculative-config", "x"), "argument --speculative-config"),
        (("--compilation-config", "[1]"), "argument --compilation-config"),
        (("--lora-modules", '{"name": 1}'), "Invalid fields for --lora-modules"),
    ],
)
def test_what_the_engine_refuses_is_one_line(model: Path, words: tuple[str, ...], expected: str) -> None:
    """Whatever vLLM's parser and its check raise: no traceback, exit status 2, and the option."""
    done = run("config", "check", str(model), *words, variables={"COLUMNS": "500"})
    assert done.exit_code == 2 and expected in done.output, (done.output, done.exception)


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (("--max-model-len", "99999999"), "the model's config.json has 32768 positions"),
        (("--tokenizer", "/nosuch"), "--tokenizer /nosuch: there is no such file"),
        (("--generation-config", "/nosuch"), "--generation-config /nosuch: there is no such file"),
        (("--tool-parser-plugin", "/nosuch.py"), "--tool-parser-plugin /nosuch.py: there is no such file"),
        (("--hf-overrides", "[1]"), "--hf-overrides is '[1]': give a JSON object"),
        (("--hf-overrides", "{"), "--hf-overrides is '{': give a JSON object"),
        (("--speculative-config", "[1]"), "--speculative-config is [1]: give a JSON object"),
        (("--override-generation-config", "[]"), "--override-generation-config is []: give a JSON object"),
        (("--reasoning-parser", "nosuch"), "--reasoning-parser nosuch: give one of"),
        (("--reasoning-parser", "deepseek_r2"), "--reasoning-parser deepseek_r2: did you mean"),
        (("--enable-auto-tool-choice", "--tool-call-parser", "nosuch"), "--tool-call-parser nosuch: give one of"),
        (("--disk", "/etc/hostname", "--disk-gib", "1"), "--disk /etc/hostname: /etc/hostname is no directory"),
        (("--disk", "/etc/hostname/x", "--disk-gib", "1"), "/etc/hostname is no directory"),
        (("--disk", "/proc/x", "--disk-gib", "1"), "--disk /proc/x: /proc holds no data"),
        (("--l2", "file:///proc/x"), "--l2 /proc/x: /proc holds no data"),
    ],
)
def test_a_value_that_can_not_work_is_not_sound(model: Path, words: tuple[str, ...], expected: str) -> None:
    """Lengths, names and paths that vLLM, or the disk, would refuse when the model is loaded."""
    (model / "config.json").write_text('{"max_position_embeddings": 32768}')
    done = run("config", "check", str(model), *words, variables={"COLUMNS": "500"})
    assert done.exit_code == 2 and expected in done.output, (done.output, done.exception)


@pytest.mark.parametrize(
    ("config", "variables"),
    [
        ({"rope_scaling": {"factor": 8.0}}, {}),
        ({"rope_parameters": {"full_attention": {"rope_type": "linear", "factor": 8.0}}}, {}),
        ({"model_max_length": 1 << 20}, {}),
        ({}, {"VLLM_ALLOW_LONG_MAX_MODEL_LEN": "1"}),
    ],
)
def test_a_length_that_the_model_may_have_is_vllms_to_judge(
    model: Path, config: dict[str, Any], variables: dict[str, str]
) -> None:
    """Where positions are scaled, or vLLM is told to take any."""
    (model / "config.json").write_text(json.dumps({"max_position_embeddings": 32768} | config))
    done = run("config", "check", str(model), "--max-model-len", "65536", variables=variables)
    assert done.exit_code == 0, done.output


def test_a_place_that_may_not_be_searched_is_a_clear_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(path: Path, **_: object) -> bool:
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(Path, "exists", refused)
    with pytest.raises(ConfigError, match="--disk /private/x: /private/x: Permission denied"):
        check_place("--disk", Path("/private/x"))


def test_an_unreadable_file_or_a_missing_model_hides_nothing_else(model: Path) -> None:
    """Values, options of the engine, paths and addresses are all named, each once."""
    words = ("--port", "99999", "--foo", "1", "--chat-template", "/nosuch.jinja", "--ssl-certfile", "/none.pem")
    done = run("config", "check", str(model), "--tenants", "/nosuchf", *words, "--disk", "/proc/x", "--disk-gib", "1")
    said = " ".join(done.output.split())
    expected = (
        "/nosuchf",
        "--port 99999 is no port",
        "unknown option --foo",
        "/nosuch.jinja",
        "/none.pem",
        "--disk /proc/x",
    )
    assert done.exit_code == 2 and "6 things are wrong" in said and all(each in said for each in expected), said
    done = run("config", "check", "/nosuch/model", "--config", "/nosuch.yaml", "--port", "99999")
    said = " ".join(done.output.split())
    expected = ("no model directory /nosuch/model", "/nosuch.yaml", "--port 99999 is no port")
    assert done.exit_code == 2 and "3 things are wrong" in said and all(each in said for each in expected), said


def test_a_wrong_port_does_not_hide_an_open_address(model: Path) -> None:
    """The address is judged by the keys, and they are known."""
    done = run("config", "check", str(model), "--port", "99999", "--host", "nohost.invalid")
    assert (
        done.exit_code == 2 and "--port 99999 is no port" in done.output and "--host nohost.invalid" in done.output
    ), done.output


def test_approximate_answers_are_said(model: Path) -> None:
    """With --blend."""
    done = run("config", "check", str(model), "--blend", "query")
    assert done.exit_code == 0 and "approximate" in done.output and "Triton" not in done.output, done.output


SCRIPT = "import pathlib\npathlib.Path(__file__).with_name('executed').touch()\n"


@pytest.mark.parametrize(
    ("words", "variables", "files", "expected"),
    [
        (("--secure", "--trust-remote-code"), {}, {}, "--trust-remote-code is given, and secure mode"),
        (("--secure",), {}, {"pytorch_model.bin": ""}, "holds pytorch_model.bin"),
        (("--secure",), {}, {"model.py": SCRIPT}, "holds model.py"),
        (("--secure",), {"SAGEMAKER_SECURITY_CONTROLS": "DISALLOW_X"}, {}, "DISALLOW_X, which hotspan does not know"),
        (("--host", "0.0.0.0"), {}, {}, "--host 0.0.0.0 lets other machines in"),
        (("--host", "::"), {}, {}, "--host :: lets other machines in"),
        (("--host", "0.0.0.0", "--insecure"), {}, {}, "sound"),
        (("--host", "localhost"), {}, {}, "sound"),
        (("--port", "70000"), {}, {}, "--port 70000 is no port"),
        (("--port", "9000", "--admin-port", "9000"), {}, {}, "--admin-port 9000 is the clients' --port"),
        (("--api-key", "x"), {}, {}, "--api-key is vLLM's"),
        ((), {"VLLM_API_KEY": "x"}, {}, "VLLM_API_KEY is vLLM's"),
        ((), {"VLLM_ALLOW_RUNTIME_LORA_UPDATING": "true"}, {}, "VLLM_ALLOW_RUNTIME_LORA_UPDATING is vLLM's"),
        ((), {"VLLM_DISABLE_REQUEST_ID_RANDOMIZATION": "1"}, {}, "VLLM_DISABLE_REQUEST_ID_RANDOMIZATION is vLLM's"),
        ((), {"HOTSPAN_ADMIN_TOKEN": "short"}, {}, "the admin token of HOTSPAN_ADMIN_TOKEN is too short"),
        (("--ssl-certfile", "/none.pem"), {}, {}, "TLS can't be had"),
        (("--kek", "env:NONE", "--key-store", "/none"), {}, {}, "NONE"),
        (("--enable-lora", "--max-loras", "8", "--max-cpu-loras", "2"), {}, {}, "2 adapters are kept in memory"),
        ((), {}, {"model.py": SCRIPT + "def handle(inputs): ...\n"}, "model.py has a function handle"),
        ((), {}, {"model.py": SCRIPT + "def f(:\n"}, "model.py can't be loaded"),
        ((), {}, {"formatter.yaml": "input: {prefx: a}\n"}, "formatter.yaml"),
        ((), {}, {"model.py": SCRIPT + "def input_fn(data, kind): ...\n"}, "sound"),
    ],
)
def test_check_refuses_what_serve_refuses(
    model: Path, words: tuple[str, ...], variables: dict[str, str], files: dict[str, str], expected: str
) -> None:
    """What would stop a server on any machine before its engine is started stops the check; model.py is only read."""
    for name, text in files.items():
        (model / name).write_text(text)
    named = ("--formatters", str(model)) if {"model.py", "formatter.yaml"} & files.keys() else ()
    done = run("config", "check", str(model), *named, *words, variables=variables)
    assert expected in done.output and done.exit_code == (0 if expected == "sound" else 2), done.output
    assert not (model / "executed").exists()


def test_explain_says_what_is_chosen() -> None:
    """Where the start chooses tiers, what is shown of them is no promise, and explain says so."""
    said = "are chosen at the start"
    assert said in run("config", "explain", "org/name").output
    assert said in run("config", "explain", "org/name", "--auto", "--l2", "redis://a").output
    assert said not in run("config", "explain", "org/name", "--ram-gib", "2").output
    assert said not in run("config", "explain", "org/name", "--no-cache").output


def test_serve_without_model(served: list[ServeOptions], tmp_path: Path) -> None:
    """MODEL may be named elsewhere: then what stands first may be an option of the engine."""
    own = tmp_path / "hotspan.yaml"
    own.write_text("model: org/name\nport: 9000\n")
    done = run("serve", "--config", str(own), "--max-model-len", "4096", "--ram-gib", "2")
    assert done.exit_code == 0, done.output
    [options] = served
    assert (options.model, options.server.port) == ("org/name", 9000) and options.engine == ("--max-model-len", "4096")
    assert options.cache is not None and options.cache.ram_bytes == 2 * GIB
    done = run("serve", "--max-model-len", "4096")
    assert done.exit_code == 2 and "no model is named" in done.output


def test_serve_with_configuration(served: list[ServeOptions], model: Path) -> None:
    """What LMI's files say reaches the server, and what may surprise is said."""
    done = run("serve", str(model), "--no-enable-prefix-caching")
    assert done.exit_code == 0 and "instead of asking each other" in done.output
    [options] = served
    assert options.cache is not None and options.cache.ram_bytes == 7 * GIB
    words = " ".join(options.engine)
    assert "--dtype bfloat16 --max-num-seqs 64" in words and words.endswith("--no-enable-prefix-caching")


def test_serve_with_words_alone(served: list[ServeOptions]) -> None:
    """Without any configuration, serve is started with exactly what its words say."""
    words = ("--dtype", "float32", "-tp", "2", "--max-num-seqs", "4")
    run("serve", "org/name", "--l2", "redis://a", "--l2-option", "timeout_s=1", "--l2-option", "prefix=b", *words)
    [options] = served
    assert options.engine == words and options.model == "org/name"
    server = options.server
    assert (server.host, server.port, server.insecure, server.admin_token_file) == (
        "127.0.0.1",
        8080,
        False,
        None,
    )
    assert options.cache is not None and options.cache.ram_bytes == 4 * GIB and options.cache.l2 is not None
    assert options.cache.l2.options == {"timeout_s": "1", "prefix": "b"}


def test_flags_are_the_same_everywhere() -> None:
    """What serve takes, explain and check take."""
    for command in (("serve",), ("config", "explain"), ("config", "check")):
        output = run(*command, "--help", variables={"COLUMNS": "200"}).output
        assert all(flag in output for flag in OWN_OPTIONS)


def test_keys() -> None:
    """The tables of keys and of an L2's options can be printed."""
    done = run("config", "keys")
    assert done.exit_code == 0 and "| `--port` | 8080 | integer |" in done.output
    assert "| `file:///` | `capacity_gib` |" in done.output


def test_the_default_of_ram_is_said_once() -> None:
    """Help, table and explain say what the RAM tier's default is from one declaration, and never a size alone."""
    said = BY_NAME["ram_gib"].shown
    assert said in " ".join(run("serve", "--help", variables={"COLUMNS": "300"}).output.split())
    assert f"| `--ram-gib` | {said} |" in run("config", "keys").output
    assert "ram_gib = chosen at the start" in run("config", "explain", "org/name").output
    assert "ram_gib = 4.0" in run("config", "explain", "org/name", "--l2", "redis://a").output


def test_version() -> None:
    """--version prints the version and does nothing else."""
    done = run("--version")
    assert done.exit_code == 0 and done.output == f"hotspan {hotspan.__version__}\n"
