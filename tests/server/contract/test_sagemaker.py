"""`boto3.client("sagemaker-runtime")` against a real server, with SageMaker's part between them played here."""

import json
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import boto3
import botocore.config
import pytest

from .rig import GREEDY, Container
from .sagemaker import platform

pytestmark = pytest.mark.engine

PROMPT = "The parties agree that"
BODY = json.dumps({"inputs": PROMPT, "parameters": GREEDY})


@pytest.fixture(scope="module")
def address(container: Container) -> Iterator[str]:
    with platform(container.server.url, container.artifacts) as url:
        yield url


def client(service: str, url: str) -> Any:
    return boto3.client(
        service,
        endpoint_url=url,
        region_name="eu-north-1",
        aws_access_key_id="none",
        aws_secret_access_key="none",
        config=botocore.config.Config(retries={"max_attempts": 1}, proxies={}),
    )


@pytest.fixture(scope="module")
def runtime(address: str) -> Any:
    return client("sagemaker-runtime", address)


def test_invoke_endpoint(container: Container, runtime: Any) -> None:
    """The answer, its content type and the custom attributes arrive as the client's own types have them."""
    reply = runtime.invoke_endpoint(
        EndpointName="e", ContentType="application/json", Body=BODY, CustomAttributes="trace=1", InferenceId="i-1"
    )
    assert json.load(reply["Body"]) == {"generated_text": container.generate(PROMPT)}
    assert reply["ContentType"] == "application/json" and reply["CustomAttributes"] == "trace=1"


def test_an_inference_component_is_an_adapter(container: Container, runtime: Any) -> None:
    """The component's name selects the adapter."""
    reply = runtime.invoke_endpoint(
        EndpointName="e", ContentType="application/json", Body=BODY, InferenceComponentName="poet"
    )
    said = json.load(reply["Body"])["generated_text"]
    assert said == container.generate(PROMPT, adapters="poet") != container.generate(PROMPT)


def test_the_life_of_an_adapters_component(container: Container, address: str, runtime: Any, tmp_path: Path) -> None:
    """The platform registers, invokes, lists, updates and unregisters an adapter, and shows no token at any time."""
    control, asked = client("sagemaker", address), {"InferenceComponentName": "component-7"}

    def specification(adapter: str) -> dict[str, Any]:
        archive = tmp_path / f"{adapter}.tar.gz"
        with tarfile.open(archive, "w:gz") as tar:
            for name in ("adapter_config.json", "adapter_model.safetensors"):
                tar.add(container.model / "adapters" / adapter / name, arcname=name)
        return {"BaseInferenceComponentName": "base", "Container": {"ArtifactUrl": f"s3://bucket{archive}"}}

    def said() -> str:
        reply = runtime.invoke_endpoint(EndpointName="e", ContentType="application/json", Body=BODY, **asked)
        return str(json.load(reply["Body"])["generated_text"])

    control.create_inference_component(EndpointName="e", Specification=specification("legal"), **asked)
    assert said() == container.generate(PROMPT, adapters="legal")
    listed = control.list_inference_components()["InferenceComponents"]
    assert "component-7" in [one["InferenceComponentName"] for one in listed]
    with pytest.raises(control.exceptions.ClientError, match="there is an adapter 'component-7' already"):
        control.create_inference_component(EndpointName="e", Specification=specification("legal"), **asked)
    control.update_inference_component(Specification=specification("poet"), **asked)
    assert said() == container.generate(PROMPT, adapters="poet")
    control.delete_inference_component(**asked)
    with pytest.raises(runtime.exceptions.ModelError) as refused:
        said()
    assert refused.value.response["OriginalStatusCode"] == 404
    assert "component-7" in refused.value.response["OriginalMessage"]


def test_sessions(runtime: Any) -> None:
    """NEW_SESSION gives an id with its end, which later calls name; CLOSE gives it back."""
    asked = {"EndpointName": "e", "ContentType": "application/json"}
    made = runtime.invoke_endpoint(**asked, SessionId="NEW_SESSION", Body='{"requestType": "NEW_SESSION"}')
    session, _, ends = made["NewSessionId"].partition("; ")
    assert ends.startswith("Expires=")
    assert runtime.invoke_endpoint(**asked, SessionId=session, Body=BODY)["ResponseMetadata"]["HTTPStatusCode"] == 200
    closed = runtime.invoke_endpoint(**asked, SessionId=session, Body='{"requestType": "CLOSE"}')
    assert closed["ClosedSessionId"] == session


def test_a_stream_of_rows(container: Container, runtime: Any) -> None:
    """The payload parts together are the rows of LMI's stream."""
    body = json.dumps(json.loads(BODY) | {"stream": True})
    reply = runtime.invoke_endpoint_with_response_stream(EndpointName="e", ContentType="application/json", Body=body)
    assert reply["ContentType"] == "application/jsonlines"
    parts = [event["PayloadPart"]["Bytes"] for event in reply["Body"]]
    told = [json.loads(line) for line in b"".join(parts).splitlines()]
    assert len(told) == 10 and told[-1]["generated_text"] == container.generate(PROMPT)


def test_a_stream_of_events(runtime: Any) -> None:
    """An OpenAI chat streams as server-sent events through the same call."""
    chat = {"messages": [{"role": "user", "content": PROMPT}], "max_tokens": 4, "stream": True}
    reply = runtime.invoke_endpoint_with_response_stream(
        EndpointName="e", ContentType="application/json", Body=json.dumps(chat)
    )
    content = b"".join(event["PayloadPart"]["Bytes"] for event in reply["Body"])
    assert content.startswith(b"data: {") and content.endswith(b"data: [DONE]\n\n")


@pytest.mark.parametrize(
    ("body", "component", "status", "said"),
    [("{", None, 400, "no JSON"), (BODY, "nobody", 404, "'nobody'"), ('{"inputs": 1}', None, 400, "inputs is 1")],
)
def test_what_the_container_refuses(runtime: Any, body: str, component: str | None, status: int, said: str) -> None:
    """ModelError has the true status and the body with the message; so have streams that never began."""
    asked: Any = {"EndpointName": "e", "ContentType": "application/json", "Body": body}
    if component is not None:
        asked["InferenceComponentName"] = component
    for call in (runtime.invoke_endpoint, runtime.invoke_endpoint_with_response_stream):
        with pytest.raises(runtime.exceptions.ModelError) as refused:
            call(**asked)
        response = refused.value.response
        assert response["OriginalStatusCode"] == status
        assert said in json.loads(response["OriginalMessage"])["error"]["message"]
