"""What vLLM leaves open is closed, what secure mode forbids is refused, and a wrong certificate is found at once."""

import contextlib
import json
import threading
from collections.abc import Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hotspan.config.server_settings import ServerSettings
from hotspan.core.errors import ConfigError
from hotspan.http.options import check_tls
from hotspan.server.hardening import CODE, NO_MEDIA_DOMAIN, REDIRECTS, check_files, check_start, hardened
from hotspan.server.options import ServeOptions
from tests.certificates import make_certificate
from tests.server.conftest import environment_is_read

SECURE = ServerSettings(secure=True)


def options(*engine: str, model: str = "org/name", server: ServerSettings | None = None) -> ServeOptions:
    return ServeOptions(model, None, engine, server=server or ServerSettings())


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A model's directory that secure mode takes."""
    directory = tmp_path / "model"
    (directory / "adapters" / "a").mkdir(parents=True)
    for name in ("model.safetensors", "adapters/a/adapter_model.safetensors", "formatter.yaml"):
        (directory / name).write_bytes(b"")
    (directory / "tokenizer_config.json").write_text(json.dumps({"chat_template": "{{ messages }}"}))
    return directory


# -- media ---------------------------------------------------------------------------------------------------------


class Host:
    """A web server that counts what is fetched from it, and sends who asks for /away to `away`."""

    def __init__(self, away: str = "") -> None:
        self.fetched: list[str] = []
        host = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                host.fetched.append(self.path)
                self.send_response(302 if self.path == "/away" else 200)
                self.send_header("location", away)
                self.send_header("content-length", "4")
                self.end_headers()
                self.wfile.write(b"data")

            def log_message(self, *_: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


@pytest.fixture
def inside() -> Iterator[Host]:
    """What only the server reaches."""
    with contextlib.closing(Host()) as host:
        yield host


def fetch(url: str, domains: list[str]) -> bytes:
    """What vLLM's own fetcher makes of a URL in a request."""
    from vllm.multimodal.media import MediaConnector
    from vllm.multimodal.media.base import MediaIO

    class Bytes(MediaIO[bytes]):
        def load_bytes(self, data: bytes) -> bytes:
            return data

        def load_base64(self, media_type: str, data: str) -> bytes:
            return data.encode()

        def load_file(self, filepath: Path) -> bytes:
            return filepath.read_bytes()

    return MediaConnector(allowed_media_domains=domains).load_from_url(url, Bytes())


def parsed_domains(*engine: str) -> list[str]:
    """What the engine is told, by its own parser."""
    from hotspan.engine.arguments import parse_engine_arguments

    arguments = parse_engine_arguments("org/name", hardened(options(*engine), {}).engine)
    domains: list[str] = arguments.allowed_media_domains
    return domains


def test_media_is_fetched_from_nowhere(inside: Host) -> None:
    """Without domains, a URL in a request fetches nothing; data: URLs, which fetch nothing, work."""
    domains = parsed_domains()
    assert domains == [NO_MEDIA_DOMAIN]
    for url in (inside.url, inside.url.replace("127.0.0.1", "localhost"), "http:///", f"http://{NO_MEDIA_DOMAIN}/"):
        with pytest.raises(ValueError, match=r"allowed-media-domains|not a valid|Failed to parse"):
            fetch(url, domains)
    with pytest.raises(RuntimeError, match="allowed-local-media-path"):
        fetch("file:///etc/passwd", domains)
    assert fetch("data:text/plain;base64,aGk=", domains) == b"aGk=" and inside.fetched == []


def test_a_named_domain_is_fetched_from(inside: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    """Domains that the operator names stay as named; with redirects off, as here, they lead nowhere else."""
    domains = parsed_domains("--allowed-media-domains", "127.0.0.1", "images.example")
    assert domains == ["127.0.0.1", "images.example"]
    assert fetch(f"{inside.url}/picture", domains) == b"data" and inside.fetched == ["/picture"]
    with contextlib.closing(Host(f"{inside.url}/secret")) as allowed, environment_is_read():
        monkeypatch.setenv(REDIRECTS, "0")
        with contextlib.suppress(Exception):  # whatever it says: what counts is what was fetched
            fetch(f"{allowed.url}/away", domains)
        assert allowed.fetched == ["/away"] and inside.fetched == ["/picture"]


# -- secure mode: options ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", CODE)
def test_code_by_option(name: str) -> None:
    """Every option that names code is refused in secure mode, by its own name, and taken otherwise."""
    words = (f"--{name.replace('_', '-')}", "x")
    assert hardened(options(*words), {}).engine[:2] == words
    with pytest.raises(ConfigError, match=f"{words[0]} is given, and secure mode"):
        hardened(options(*words, server=SECURE), {})


@pytest.mark.parametrize(
    "words",
    [
        ("--trust-remote-code",),
        ("--trust_remote_code",),
        ("--structured-outputs-config", '{"reasoning_parser_plugin": "/x.py"}'),
        ("--structured-outputs-config.reasoning_parser_plugin", "/x.py"),
        ("--structured-outputs-config.reasoning-parser-plugin=/x.py",),
        ("--lora-modules", "a=/adapters/a"),
        ("--load-format", "pt"),
        ("--load-format=tensorizer",),
        ("--load-format", "hf"),
        ("--distributed-executor-backend", "somebody.Executor"),
    ],
)
def test_ways_around(words: tuple[str, ...]) -> None:
    """The same code by another spelling or inside of another option, and formats that read pickles."""
    with pytest.raises(ConfigError, match="secure mode"):
        hardened(options(*words, server=SECURE), {})


@given(st.lists(st.sampled_from(["--no-trust-remote-code", "--dtype=bf16", "--load-format=auto", "--seed=1"])))
def test_what_is_harmless_is_taken(words: list[str]) -> None:
    """Secure mode takes everything else as it is, and has weights read from safetensors only."""
    done = hardened(options(*words, "--served-model-name", "middleware-bot", server=SECURE), {})
    assert done.engine[: len(words)] == tuple(words)
    assert done.engine_values["load_format"] == "safetensors"


def test_a_safe_format_stays() -> None:
    """A format that reads safetensors, too, is not replaced; out of secure mode none is set."""
    assert hardened(options("--load-format", "mistral", server=SECURE), {}).engine_values["load_format"] == "mistral"
    assert "load_format" not in hardened(options(), {}).engine_values


def test_chat_templates_by_control() -> None:
    """Chat templates are refused only where the platform says so; a control that nobody knows stops the start."""
    words = options("--chat-template", "x.jinja", server=SECURE)
    hardened(words, {})
    with pytest.raises(ConfigError, match="--chat-template"):
        hardened(words, {"SAGEMAKER_SECURITY_CONTROLS": "DISALLOW_PICKLE_FILES, DISALLOW_CHAT_TEMPLATE"})
    with pytest.raises(ConfigError, match="DISALLOW_TELEPATHY, which hotspan does not know"):
        hardened(words, {"SAGEMAKER_SECURITY_CONTROLS": "DISALLOW_TELEPATHY"})


# -- secure mode: files --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name",
    [
        *("model.py", "requirements.txt", "pytorch_model.bin", "x.pt", "x.pth", "last.ckpt", "x.PKL"),
        *("adapters/a/model.py", "adapters/a/adapter_model.bin", "deep/er/optimizer.pt"),
    ],
)
def test_files_that_secure_mode_refuses(model: Path, name: str) -> None:
    """Code, requirements and pickles anywhere in the model's directory are named; without secure mode they may be."""
    secure = options(model=str(model), server=SECURE)
    check_files(secure, {})
    (model / name).parent.mkdir(parents=True, exist_ok=True)
    (model / name).write_bytes(b"")
    with pytest.raises(ConfigError, match=f"{model} holds {name}: take"):
        check_files(secure, {})
    check_files(options(model=str(model)), {})


def test_other_directories(model: Path, tmp_path: Path) -> None:
    """Adapters and formatters elsewhere, and what the platform calls untrusted, are looked at as well."""
    other = tmp_path / "other"
    other.mkdir()
    (other / "model.py").write_text("")
    secure = options(model=str(model), server=SECURE)
    for server in (replace(SECURE, adapters=other), replace(SECURE, formatters=other)):
        with pytest.raises(ConfigError, match=f"{other} holds model.py"):
            check_files(replace(secure, server=server), {})
    with pytest.raises(ConfigError, match=f"{other} holds model.py"):
        check_files(secure, {"SAGEMAKER_UNTRUSTED_CHANNELS": f"{model}, {other}"})
    with pytest.raises(ConfigError, match="is no directory"):
        check_files(secure, {"SAGEMAKER_UNTRUSTED_CHANNELS": str(tmp_path / "nowhere")})


def test_a_draft_model_is_held_to_secure_mode(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A draft model's directory is looked at like the model's, no class of a user drafts tokens, and the format in
    which the draft model is loaded is one of the model's."""

    def checked(server: ServerSettings, draft: str, **more: Any) -> None:
        words = f"--speculative-config={json.dumps({'model': draft, 'num_speculative_tokens': 2} | more)}"
        check_start(replace(options(words, server=server), model=str(model)), {})

    (model / "config.json").write_text("{}")
    head = tmp_path / "head"
    head.mkdir()
    (head / "config.json").write_text("{}")
    checked(SECURE, str(head))
    checked(ServerSettings(), "package.Proposer")
    with pytest.raises(ConfigError, match=r"--speculative-config is given, .* package\.Proposer can't draft"):
        checked(SECURE, "package.Proposer")
    (head / "pytorch_model.bin").write_bytes(b"")
    checked(ServerSettings(), str(head))
    with pytest.raises(ConfigError, match=f"{head} holds pytorch_model.bin"):
        checked(SECURE, str(head))
    head.rename(tmp_path / "my.head")  # with a method, the engine takes the name of a class for that of a directory
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=r"my\.head holds pytorch_model.bin"):
        checked(SECURE, "my.head", method="eagle")
    checked(SECURE, "org/head", draft_load_config={"load_format": "safetensors"})
    for load in ({"load_format": "pt"}, {"device": "cpu"}):
        checked(ServerSettings(), "org/head", draft_load_config=load)
        with pytest.raises(ConfigError, match=r"load_format of its draft_load_config is (pt|auto)"):
            checked(SECURE, "org/head", draft_load_config=load)


def test_chat_templates_in_files(model: Path) -> None:
    """Where the platform forbids chat templates, one in any of the files that may hold one is refused."""
    secure, forbids = (
        options(model=str(model), server=SECURE),
        {"SAGEMAKER_SECURITY_CONTROLS": "DISALLOW_CHAT_TEMPLATE"},
    )
    with pytest.raises(ConfigError, match=r"holds tokenizer_config\.json"):
        check_files(secure, forbids)
    (model / "tokenizer_config.json").write_text("{}")
    check_files(secure, forbids)
    for name in ("chat_template.jinja", "chat_template.json"):
        (model / name).write_text("{}")
        with pytest.raises(ConfigError, match=f"holds {name}"):
            check_files(secure, forbids)
        (model / name).unlink()
    (model / "tokenizer_config.json").write_text("no JSON")
    with pytest.raises(ConfigError, match=r"holds tokenizer_config\.json"):
        check_files(secure, forbids)


# -- TLS -----------------------------------------------------------------------------------------------------------


def test_certificates(tmp_path: Path) -> None:
    """A certificate that works passes; one that would fail after minutes of loading is an error now."""
    pair = make_certificate(tmp_path)
    certificate, key = str(pair.certificate), str(pair.key)
    check_tls({})
    check_tls({"ssl_certfile": certificate, "ssl_keyfile": key, "ssl_ca_certs": certificate, "ssl_cert_reqs": 2})
    (tmp_path / "locked").mkdir()
    locked = make_certificate(tmp_path / "locked", b"passphrase")
    for values in (
        {"ssl_keyfile": key},
        {"ssl_certfile": str(tmp_path / "missing.pem"), "ssl_keyfile": key},
        {"ssl_certfile": certificate},
        {"ssl_certfile": certificate, "ssl_keyfile": str(locked.key)},
        {"ssl_certfile": str(locked.certificate), "ssl_keyfile": str(locked.key)},
        {"ssl_certfile": certificate, "ssl_keyfile": key, "ssl_ciphers": "NONSENSE"},
        {"ssl_certfile": certificate, "ssl_keyfile": key, "ssl_cert_reqs": "some"},
        {"ssl_certfile": certificate, "ssl_keyfile": key, "enable_ssl_refresh": True},
    ):
        with pytest.raises(ConfigError, match=r"TLS|ssl"):
            check_tls(values)
