"""A KMS that listens on a real port, and key stores on a real disk."""

import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import boto3
import pytest

from tests.keyring.rig import Gate, make_kek, make_store


@dataclass(frozen=True)
class Kms:
    """A KMS with one key, behind a line that can be cut."""

    gate: Gate
    key: str
    other_key: str

    def reference(self, key: str | None = None) -> str:
        return f"aws-kms:{key or self.key}?region=eu-central-1&endpoint={self.gate.url}"


@pytest.fixture(scope="session")
def moto_address() -> Iterator[tuple[str, int]]:
    # In a process of its own: Flask leaves objects behind that fail when an engine's clean-up looks at them.
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = probe.getsockname()
    command = [sys.executable, "-m", "moto.server", "-H", address[0], "-p", str(address[1])]
    server = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + 60
        while not answers(address):
            assert server.poll() is None and time.monotonic() < deadline, "moto's server did not come up"
            time.sleep(0.05)
        yield address
    finally:
        server.terminate()
        server.wait(10)


def answers(address: tuple[str, int]) -> bool:
    """Whether somebody listens there."""
    with socket.socket() as probe:
        return probe.connect_ex(address) == 0


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
    gate = Gate(moto_address)
    yield Kms(gate, *keys)
    gate.close()


@pytest.fixture
def kek(tmp_path: Path) -> str:
    return make_kek(tmp_path)


@pytest.fixture
def store(tmp_path: Path, kek: str) -> Path:
    return make_store(tmp_path, kek)
