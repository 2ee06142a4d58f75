"""A model as SageMaker users bring it, served as the container serves it: no arguments, only files and variables."""

import contextlib
import json
import shutil
import string
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import httpx
import openai

from kit.demo_adapter import make_demo_adapter
from kit.ports import free_port
from tests.server.conftest import IN_CORE, Server, started

ADMIN_TOKEN = "the-token-of-who-runs-this"
ADAPTER = "X-Amzn-SageMaker-Adapter-Identifier"
ATTRIBUTES = "X-Amzn-SageMaker-Custom-Attributes"
SESSION = "X-Amzn-SageMaker-Session-Id"

GREEDY = {"max_new_tokens": 10, "do_sample": False}
PLACES = 120
SESSION_S = 600.0
MAX_BODY_MIB = 2
FEW_FILES = 1024
"""As in a shell of most systems, and not as in a test machine's."""

_PROPERTIES = string.Template("""\
engine=Python
option.entryPoint=djl_python.lmi_vllm.vllm_async_service
option.async_mode=true
option.rolling_batch=vllm
option.max_rolling_batch_size=32
option.max_rolling_batch_prefill_tokens=1024
option.dtype=fp32
option.max_model_len=2048
option.block_size=128
option.num_gpu_blocks_override=64
option.gpu_memory_utilization=0.2
option.enforce_eager=true
option.enable_prefix_caching=true
option.enable_lora=true
option.max_loras=2
option.max_cpu_loras=4
option.max_lora_rank=8
option.enable_auto_tool_choice=true
option.tool_call_parser=hermes
option.structured_outputs_config={"backend": "xgrammar", "disable_any_whitespace": true}
option.sessions_path=$scratch/sessions
option.sessions_expiration=600
option.lmcache_config_file=lmcache_config.yaml
option.kv_transfer_config={"kv_connector":"LMCacheConnectorV1", "kv_role":"kv_both"}
job_queue_size=120
""")

_LMCACHE = string.Template("""\
chunk_size: 256
local_cpu: True
max_local_cpu_size: 0.1
local_disk: "file://$scratch/kv/"
max_local_disk_size: 0.25
extra_config: {use_odirect: True}
""")

_MODEL_PY = """
from djl_python.input_parser import input_formatter
from djl_python.output_formatter import output_formatter

ATTRIBUTES = "x-amzn-sagemaker-custom-attributes"
print("model.py is executed", flush=True)


@input_formatter
def ask(decoded_payload: dict, tokenizer=None, **kwargs) -> dict:
    topic = decoded_payload.pop("topic", None)
    if topic == "":
        raise ValueError("topic is empty")
    if topic is not None:
        assert tokenizer.encode(topic)
        decoded_payload["inputs"] = f"About {topic}:"
    return decoded_payload


@output_formatter
def answer(output, properties=None):
    wanted = properties.get(ATTRIBUTES)
    if wanted == "sign":
        output["served_by"] = "model"
    is_last = output.get("generated_text") or any(one.get("finish_reason") for one in output.get("choices", []))
    if wanted == "break" and is_last:
        raise RuntimeError("no more paper")
    return output
"""

_ADAPTER_PY = """
from djl_python.output_formatter import output_formatter


@output_formatter
def answer(output):
    output["served_by"] = "legal"
    return output
"""

SAGEMAKER = {
    "SAGEMAKER_MAX_PAYLOAD_IN_MB": str(MAX_BODY_MIB),
    "SAGEMAKER_NUM_MODEL_WORKERS": "1",
    "OPTION_MAX_ROLLING_BATCH_SIZE": "4",  # serving.properties says 32, and beats it
    "SERVING_JOB_QUEUE_SIZE": "7",  # the same, with 120
    "HF_MODEL_TRUST_REMOTE_CODE": "false",
}
"""What stands in an endpoint's environment besides the model."""


def make_model_directory(directory: Path, weights: Path, scratch: Path) -> Path:
    """Weights, serving.properties, LMCache's file, model.py and three adapters, of which one can't be loaded."""
    shutil.copytree(weights, directory)
    (directory / "serving.properties").write_text(_PROPERTIES.substitute(scratch=scratch))
    (directory / "lmcache_config.yaml").write_text(_LMCACHE.substitute(scratch=scratch))
    (directory / "model.py").write_text(_MODEL_PY)
    for seed, name in enumerate(("legal", "poet"), 1):
        make_demo_adapter(directory / "adapters" / name, weights, seed)
    (directory / "adapters" / "legal" / "model.py").write_text(_ADAPTER_PY)
    (directory / "adapters" / "torn").mkdir()
    return directory


@dataclass
class Container:
    """A running server of the model in `model`.

    artifacts: where the platform leaves adapters. early: what it answered before it was loaded, path by path.
    """

    server: Server
    model: Path
    artifacts: Path
    early: dict[str, httpx.Response] = field(default_factory=dict)
    pings: list[tuple[int, str]] = field(default_factory=list)

    @cached_property
    def http(self) -> httpx.Client:
        """A client without a key."""
        return httpx.Client(base_url=self.server.url, timeout=60)

    @cached_property
    def admin(self) -> httpx.Client:
        """A client with the admin token."""
        return httpx.Client(base_url=self.server.url, timeout=60, headers={"authorization": f"Bearer {ADMIN_TOKEN}"})

    @cached_property
    def openai(self) -> openai.OpenAI:
        """OpenAI's own client."""
        return openai.OpenAI(base_url=f"{self.server.url}/v1", api_key="none", max_retries=0, timeout=60)

    def invoke(self, body: Any, path: str = "/invocations", **headers: str) -> httpx.Response:
        """The answer to one invocation; names of headers have underscores."""
        return self.http.post(path, json=body, headers={name.replace("_", "-"): text for name, text in headers.items()})

    def generate(self, inputs: str, *, headers: Mapping[str, str] | None = None, **body: Any) -> str:
        """What LMI's schema answers, ten greedy tokens."""
        given = {"inputs": inputs, "parameters": GREEDY} | body
        reply = self.http.post("/invocations", json=given, headers=headers)
        assert reply.status_code == 200, reply.text
        text = reply.json()["generated_text"]
        assert isinstance(text, str)
        return text

    def gauge(self, name: str) -> float:
        """The sum of a metric's values."""
        reply = self.admin.get("/metrics")
        lines = [line for line in reply.text.splitlines() if line.startswith((f"{name} ", f"{name}{{"))]
        assert lines, f"no {name}: {reply.status_code} {reply.text[:2000]}"
        return sum(float(line.split()[-1]) for line in lines)

    def wait_until_idle(self, seconds: float = 60) -> None:
        """Until the engine has no request; it counts at its steps, so it is asked for one more each time."""
        deadline = time.monotonic() + seconds
        while True:
            is_taken = self.invoke({"inputs": "Hello", "parameters": {"max_new_tokens": 1}}).status_code == 200
            left = self.gauge("vllm:num_requests_running") + self.gauge("vllm:num_requests_waiting")
            if is_taken and not left:
                return
            assert time.monotonic() < deadline, f"{left:g} requests run on"
            time.sleep(0.05)

    @contextlib.contextmanager
    def adapter(self, name: str, *, like: str, files: Mapping[str, str] | None = None) -> Iterator[Path]:
        """An adapter with the weights of another one and with files of its own, registered for the block."""
        directory, source = (self.model / "adapters" / each for each in (name, like))
        directory.mkdir()
        for file in ("adapter_config.json", "adapter_model.safetensors"):
            shutil.copyfile(source / file, directory / file)
        for file, text in (files or {}).items():
            (directory / file).write_text(text)
        try:
            made = self.admin.post("/adapters", json={"name": name, "src": name})
            assert made.status_code == 200, made.text
            yield directory
        finally:
            self.admin.delete(f"/adapters/{name}")
            shutil.rmtree(directory)

    def close(self) -> None:
        for name in ("http", "admin", "openai"):
            if name in self.__dict__:
                self.__dict__[name].close()


@contextlib.contextmanager
def container(scratch: Path, variables: Mapping[str, str], within: Sequence[str] = ()) -> Iterator[Container]:
    """`hotspan serve` without a word, in an environment of these variables; gone at the end whatever happens.

    within: a command that runs it.
    """
    port, log = free_port(), scratch / "log"
    own = {"HOTSPAN_ADMIN_TOKEN": ADMIN_TOKEN, "OPTION_DISTRIBUTED_EXECUTOR_BACKEND": IN_CORE}
    own |= {"SAGEMAKER_BIND_TO_PORT": str(port)} | dict(variables)
    command = [*within, sys.executable, "-m", "hotspan", "serve"]
    with started(log, *command, variables=own, max_files=FEW_FILES) as process:
        artifacts = Path(variables.get("HOTSPAN_CLIENT_ADAPTERS", scratch))
        running = Container(Server(process, port, log, "lmi"), Path(variables["HF_MODEL_ID"]), artifacts)
        try:
            _watch_start(running)
            yield running
        finally:
            running.close()


def _watch_start(running: Container, seconds: float = 400) -> None:
    """Ask /ping until the server is healthy, as SageMaker does; and meanwhile what a hasty client asks, once."""
    deadline = time.monotonic() + seconds
    while (200, "Healthy") not in running.pings:
        assert running.server.process.poll() is None, running.server.log.read_text()[-3000:]
        assert time.monotonic() < deadline, running.server.log.read_text()[-3000:]
        time.sleep(0.1)
        with contextlib.suppress(httpx.TransportError):
            reply = running.http.get("/ping", headers={"connection": "close"})
            said = (reply.status_code, json.loads(reply.content)["status"])
            if said not in running.pings:
                running.pings.append(said)
                running.early[said[1]] = reply
            if said[1] == "Loading" and "/invocations" not in running.early:
                running.early["/invocations"] = running.invoke({"inputs": "Hello"})


def rows(reply: httpx.Response) -> list[dict[str, Any]]:
    """The lines of a stream in LMI's schema."""
    return [json.loads(line) for line in reply.content.splitlines()]


def the_error(reply: httpx.Response, status: int) -> dict[str, Any]:
    """What an error says, once it has been seen to have the one shape and this status."""
    assert reply.status_code == status, reply.text
    assert reply.headers["content-type"].startswith("application/json")
    error = reply.json()["error"]
    assert error.keys() >= {"message", "type", "param", "code"} and error["message"], error
    assert error["code"] == status or isinstance(error["code"], str)
    assert isinstance(error, dict)
    return error
