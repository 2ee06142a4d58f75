"""A KMS that listens on a real port, and key stores on a real disk."""

import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import boto3
import pytest

from tests.keyring.rig import make_kek, make_store
from tests.relay import Relay


@dataclass(frozen=True)
class Kms:
    """A KMS with one key, behind a line that can be cut."""

    gate: Relay
    key: str
    other_key: str

    def reference(self, key: str | None = None) -> str:
        return f"aws-kms:{key or self.key}?region=eu-central-1&endpoint={self.gate.url}"


# In a process of its own: Flask leaves objects behind that fail when an engine's clean-up looks at them.
MOTO = """
from moto.moto_server.werkzeug_app import create_backend_app
from werkzeug.serving import make_server
server = make_server("127.0.0.1", 0, create_backend_app("kms"), threaded=True)
print(server.server_port, flush=True)
server.serve_forever()
"""


@pytest.fixture(scope="session")
def moto_address() -> Iterator[tuple[str, int]]:
    server = subprocess.Popen([sys.executable, "-c", MOTO], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    assert server.stdout is not None
    try:
        line = server.stdout.readline()
        assert line, "moto's server did not come up"
        yield "127.0.0.1", int(line)
    finally:
        server.terminate()
        server.wait(60)
        server.stdout.close()


@pytest.fixture
def kms(moto_address: tuple[str, int], monkeypatch: pytest.MonkeyPatch) -> Iterator[Kms]:
    for name, value in {
        "AWS_ACCESS_KEY_ID": "test",
        "AWS_SECRET_ACCESS_KEY": "test",
        "AWS_CONFIG_FILE": "/dev/null",
        "AWS_SHARED_CREDENTIALS_FILE": "/dev/null",
        "NO_PROXY": "127.0.0.1",
    }.items():
        monkeypatch.setenv(name, value)
    host, port = moto_address
    client = boto3.client("kms", region_name="eu-central-1", endpoint_url=f"http://{host}:{port}")
    keys = [client.create_key()["KeyMetadata"]["Arn"] for _ in range(2)]
    gate = Relay(port, "http")
    yield Kms(gate, *keys)
    gate.close()


@pytest.fixture
def kek(tmp_path: Path) -> str:
    return make_kek(tmp_path)


@pytest.fixture
def store(tmp_path: Path, kek: str) -> Path:
    return make_store(tmp_path, kek)
