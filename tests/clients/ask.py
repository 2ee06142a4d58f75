"""Asks a server with unmodified clients, in the environment of tests/clients/requirements.txt: no hotspan, no pytest.

usage: python ask.py CLIENT URL MODEL

Prints a JSON object with what came of each call. A call that fails ends it with the client's own error.
"""

# mypy: ignore-errors

import json
import sys
from collections.abc import Callable
from typing import Any

RULES = "Answer in one word. " * 80
USER = [{"role": "user", "content": "What is the capital of France?"}]
CHAT = [{"role": "system", "content": RULES}, *USER]
TOOL = {
    "name": "weather",
    "description": "The weather of a city",
    "parameters": {"type": "object", "properties": {"warm": {"type": "boolean"}}, "required": ["warm"]},
}
KEY = "none"
SHORT: dict[str, Any] = {"max_tokens": 4, "temperature": 0}


def of_openai(url: str, model: str) -> dict[str, Any]:
    import openai

    client = openai.OpenAI(base_url=f"{url}/v1", api_key=KEY, max_retries=0)
    create = client.chat.completions.create
    hints: dict[str, Any] = {"prompt_cache_key": "k", "safety_identifier": "s", "user": "u"}
    create(model=model, messages=CHAT, **SHORT)
    again = create(model=model, messages=CHAT, prompt_cache_retention="24h", **hints, **SHORT)
    parts = list(create(model=model, messages=CHAT, stream=True, stream_options={"include_usage": True}, **SHORT))
    schema = {"name": "warm", "schema": TOOL["parameters"], "strict": True}
    shaped = create(
        model=model, messages=USER, response_format={"type": "json_schema", "json_schema": schema}, max_tokens=40
    )
    offered = create(model=model, messages=USER, tools=[{"type": "function", "function": TOOL}], **SHORT)
    explained = create(model=model, messages=CHAT, extra_body={"kv_transfer_params": {"explain": True}}, **SHORT)
    refused = ""
    try:
        create(model=model, messages=USER, extra_body={"prompt_cache_retention": "1h"}, **SHORT)
    except openai.BadRequestError as error:
        refused = str(error)
    return {
        "cached": again.usage.prompt_tokens_details.cached_tokens,
        "prompt": again.usage.prompt_tokens,
        "streamed": parts[-1].usage.prompt_tokens_details.cached_tokens,
        "shaped": json.loads(shaped.choices[0].message.content or ""),
        "offered": offered.usage.prompt_tokens,
        "bare": create(model=model, messages=USER, **SHORT).usage.prompt_tokens,
        "answers": len(create(model=model, messages=USER, n=2, max_tokens=4).choices),
        "logprobs": len(create(model=model, messages=USER, logprobs=True, **SHORT).choices[0].logprobs.content),
        "text": bool(client.completions.create(model=model, prompt="once", max_tokens=4).choices),
        "response": client.responses.create(model=model, input="once", max_output_tokens=8).object,
        "explained": explained.model_extra["kv_transfer_params"]["explain"],
        "id": explained.id,
        "refused": refused,
    }


def of_anthropic(url: str, model: str) -> dict[str, Any]:
    import anthropic

    client = anthropic.Anthropic(base_url=url, api_key=KEY, max_retries=0)
    control = {"type": "ephemeral", "ttl": "1h"}
    asked: dict[str, Any] = {
        "model": model,
        "max_tokens": 4,
        "system": [{"type": "text", "text": "For Claude. " + RULES, "cache_control": control}],
        "messages": [{"role": "user", "content": [{"type": "text", "text": "Paris?"}]}],
        "tools": [{"name": "weather", "description": "w", "input_schema": TOOL["parameters"]}],
        "tool_choice": {"type": "none"},
    }
    first, again = client.messages.create(**asked), client.messages.create(**asked)
    with client.messages.stream(**asked) as stream:
        streamed = stream.get_final_message()
    refused = ""
    try:
        wrong = [{"type": "text", "text": "a", "cache_control": {"type": "ephemeral", "ttl": "2h"}}]
        client.messages.create(**(asked | {"system": wrong}))
    except anthropic.BadRequestError as error:
        refused = str(error)
    usage = [each.usage.model_dump() for each in (first, again, streamed)]
    return {"usage": usage, "refused": refused, "type": again.type}


def of_litellm(url: str, model: str) -> dict[str, Any]:
    import litellm

    options: dict[str, Any] = {"api_base": f"{url}/v1", "api_key": KEY, "num_retries": 0}
    litellm.completion(model=f"hosted_vllm/{model}", messages=CHAT, **options, **SHORT)
    again = litellm.completion(model=f"hosted_vllm/{model}", messages=CHAT, **options, **SHORT)
    parts = list(litellm.completion(model=f"hosted_vllm/{model}", messages=CHAT, stream=True, **options, **SHORT))
    return {"cached": again.usage.prompt_tokens_details.cached_tokens, "parts": len(parts)}


def of_langchain(url: str, model: str) -> dict[str, Any]:
    from langchain_openai import ChatOpenAI

    chat = ChatOpenAI(model=model, base_url=f"{url}/v1", api_key=KEY, max_retries=0, max_tokens=4, temperature=0)
    messages = [("system", RULES), ("user", "Rome?")]
    chat.invoke(messages)
    again = chat.invoke(messages)
    return {
        "cached": again.usage_metadata["input_token_details"]["cache_read"],
        "parts": len(list(chat.stream(messages))),
    }


def of_llama_index(url: str, model: str) -> dict[str, Any]:
    from llama_index.core.llms import ChatMessage
    from llama_index.llms.openai_like import OpenAILike

    llm = OpenAILike(
        model=model, api_base=f"{url}/v1", api_key=KEY, is_chat_model=True, max_tokens=4, max_retries=0, temperature=0
    )
    messages = [ChatMessage(role="system", content=RULES), ChatMessage(role="user", content="Oslo?")]
    llm.chat(messages)
    return {
        "cached": llm.chat(messages).raw.usage.prompt_tokens_details.cached_tokens,
        "parts": len(list(llm.stream_chat(messages))),
    }


def of_boto3(url: str, model: str) -> dict[str, Any]:
    import boto3

    client = boto3.client(
        "sagemaker-runtime",
        endpoint_url=url,
        region_name="us-east-1",
        aws_access_key_id="none",
        aws_secret_access_key="none",
    )
    body = json.dumps({"inputs": "once", "parameters": {"max_new_tokens": 4}})
    whole = client.invoke_endpoint(EndpointName=model, Body=body, ContentType="application/json")
    chat = json.dumps({"messages": USER, "max_tokens": 4})
    answered = client.invoke_endpoint(EndpointName=model, Body=chat, ContentType="application/json")
    return {
        "generated": "generated_text" in json.loads(whole["Body"].read()),
        "choices": len(json.loads(answered["Body"].read())["choices"]),
    }


def of_instructor(url: str, model: str) -> dict[str, Any]:
    import instructor
    import openai
    from pydantic import BaseModel

    class Weather(BaseModel):
        warm: bool

    plain = openai.OpenAI(base_url=f"{url}/v1", api_key=KEY, max_retries=0)
    client = instructor.from_openai(plain, mode=instructor.Mode.JSON_SCHEMA)
    found = client.chat.completions.create(
        model=model, messages=USER, response_model=Weather, max_tokens=60, max_retries=0
    )
    return {"warm": found.warm}


CLIENTS: dict[str, Callable[[str, str], dict[str, Any]]] = {
    "openai": of_openai,
    "anthropic": of_anthropic,
    "litellm": of_litellm,
    "langchain": of_langchain,
    "llama_index": of_llama_index,
    "boto3": of_boto3,
    "instructor": of_instructor,
}

if __name__ == "__main__":
    client, url, model = sys.argv[1:]
    print(json.dumps(CLIENTS[client](url, model)))
