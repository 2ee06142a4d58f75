"""vLLM's own answers, of made-up outputs, through our schema: what the fake engine says is what the real one does."""

import json
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm")

from vllm.entrypoints.generate.base.protocol import RequestResponseMetadata
from vllm.entrypoints.openai.completion.protocol import CompletionRequest
from vllm.entrypoints.openai.completion.serving import OpenAIServingCompletion
from vllm.entrypoints.pooling.embed.protocol import EmbeddingCompletionRequest
from vllm.logprobs import Logprob
from vllm.outputs import CompletionOutput, RequestOutput

from hotspan.http.sse import events
from hotspan.server.lmi.request import RENAMED, SAME
from hotspan.server.lmi.schema import Generation, Rows

TEXTS = {1: "<s>", 17: "Say", 5: "Hello", 6: " wide", 7: " world", 2: "</s>"}
STEPS = (([5], "Hello", None), ([6, 7], " wide world", None), ([2], "", "stop"))


def told(ids: list[int]) -> list[dict[int, Logprob]]:
    return [{number: Logprob(-number / 10, 1, TEXTS[number]), 99: Logprob(-9.0, 2, "x")} for number in ids]


def output(ids: list[int], text: str, reason: str | None, *, is_first: bool = True) -> RequestOutput:
    made = CompletionOutput(0, text, ids, None, told(ids), finish_reason=reason, stop_reason=None)
    prompt: Any = [None, *told([17])]
    return RequestOutput("r", "Say", [1, 17] if is_first else None, prompt, [made], finished=reason is not None)


def serving() -> OpenAIServingCompletion:
    made = OpenAIServingCompletion.__new__(OpenAIServingCompletion)
    made.return_tokens_as_token_ids = made.enable_force_include_usage = False
    made.enable_prompt_tokens_details = made.enable_per_request_metrics = False
    made.system_fingerprint = None
    return made


TOKENIZER: Any = SimpleNamespace(decode=lambda number: TEXTS[number if isinstance(number, int) else number[0]])


def answer(**parameters: Any) -> Any:
    asked = Generation.parse({"inputs": "Say", "parameters": {"details": True, **parameters}})
    whole = output([5, 6, 7, 2], "Hello wide world", "stop")
    said = serving().request_output_to_completion_response(
        [whole], CompletionRequest(**asked.body), "r", 0, "m", TOKENIZER, RequestResponseMetadata(request_id="r")
    )
    return asked.answer(said.model_dump(mode="json"))


def test_details_of_a_real_completion() -> None:
    """Ids, texts and log probabilities of what was generated, and a count that is right."""
    details = answer()["details"]
    assert [token["id"] for token in details["tokens"]] == [5, 6, 7, 2]
    assert [token["text"] for token in details["tokens"]] == ["Hello", " wide", " world", "</s>"]
    assert details["tokens"][0]["log_prob"] == -0.5
    assert details["generated_tokens"] == 4 and details["finish_reason"] == "eos_token" and details["prefill"] == []


def test_prefill_of_a_real_completion() -> None:
    """The prompt's tokens from the first one on, which has no probability, and not in the text."""
    said = answer(decoder_input_details=True)
    assert said["generated_text"] == "Hello wide world"
    assert said["details"]["prefill"] == [
        {"id": 1, "text": "<s>", "log_prob": None, "logprob": None},
        {"id": 17, "text": "Say", "log_prob": -1.7, "logprob": -1.7},
    ]
    assert said["details"]["generated_tokens"] == len(said["details"]["tokens"]) == 4


async def test_rows_of_a_real_stream() -> None:
    """vLLM's events, several tokens in one of them, become a row a token."""
    asked = Generation.parse({"inputs": "Say", "stream": True, "parameters": {"details": True}})

    async def outputs() -> Any:
        for number, (ids, text, reason) in enumerate(STEPS):
            yield 0, output(ids, text, reason, is_first=number == 0)

    stream = serving().completion_stream_generator(
        CompletionRequest(**asked.body),
        [],
        outputs(),
        "r",
        0,
        "m",
        num_prompts=1,
        tokenizer=TOKENIZER,
        request_metadata=RequestResponseMetadata(request_id="r"),
    )
    rows = Rows(asked)
    made = [row async for chunk in events(part.encode() async for part in stream) for row in rows.of(chunk)]
    assert [row["token"]["text"] for row in made] == ["Hello", " wide", " world", ""]
    assert [row["token"]["id"] for row in made] == [5, 6, 7, 2]
    assert made[-1]["generated_text"] == "Hello wide world"
    assert made[-1]["details"] == {"finish_reason": "eos_token", "seed": None, "generated_tokens": 4, "input_length": 2}
    json.dumps(made)


def test_the_engine_knows_every_parameter() -> None:
    """Each name that is handed on is one of the engine's requests': it ignores what it does not know."""
    fields = CompletionRequest.model_fields.keys()
    assert not {*SAME, *RENAMED.values(), "return_token_ids", "stream", "logprobs"} - fields
    taken = EmbeddingCompletionRequest.model_fields.keys()
    assert not {"input", "dimensions", "truncate_prompt_tokens", "use_activation"} - taken
