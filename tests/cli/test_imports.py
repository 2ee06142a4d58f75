"""What every command imports before it runs."""

import subprocess
import sys

HEAVY = {
    "aiohttp",
    "boto3",
    "cryptography",
    "fastapi",
    "numpy",
    "plotly",
    "pydantic",
    "torch",
    "uvicorn",
    "vllm",
    "zmq",
}


def test_a_command_imports_only_what_it_needs() -> None:
    """`hotspan --help` and `hotspan daemon` do not wait for engines, clients and servers that they do not use."""
    code = "import sys, hotspan.cli.main; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert not HEAVY & set(done.stdout.split())
