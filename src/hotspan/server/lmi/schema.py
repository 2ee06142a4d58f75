"""LMI's schema and the engine's OpenAI schema, one from the other. Pure.

{"inputs", "parameters"} --> Generation.body --> engine --> completion         --> generation.answer()
                                                        --> chunks of a stream --> Rows.of()
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from hotspan.http.errors import HttpError
from hotspan.server.lmi.request import engine_parameters, flag

DEFAULT_MAX_NEW_TOKENS = 30

_COUNTED = ("cached_tokens", "blend_reused_tokens", "blend_recomputed_tokens")

Json = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Generation:
    """One LMI request. A list of texts is a batch, which is answered with a list.

    body:           what the engine's completions are asked.
    has_details:    the answer has details, in a stream its last row.
    has_full_text:  the text that is answered begins with the one that was sent.
    has_prefill:    the details have the tokens of the prompt.
    stop_token_ids: the client's own; all others that the engine stops at are the model's.
    """

    body: Json
    inputs: str | list[str]
    is_stream: bool = False
    has_details: bool = False
    has_full_text: bool = False
    has_prefill: bool = False
    seed: int | None = None
    stop_token_ids: frozenset[int] = frozenset()

    @classmethod
    def parse(cls, payload: Mapping[str, Any]) -> "Generation":
        """What a request in LMI's schema asks for. Raises: HttpError 400 that names the parameter."""
        inputs: Any = payload.get("inputs")
        _check_texts(inputs)
        given = engine_parameters(payload)
        is_stream = flag(payload, "stream")
        if is_stream and isinstance(inputs, list):
            raise HttpError(
                400, "a list of texts can't be streamed: leave stream out, or send one text", param="stream"
            )
        has_details, has_full_text = flag(given, "details"), flag(given, "echo")
        has_prefill = _wants_prefill(given)
        if has_prefill and is_stream:
            raise HttpError(
                400, "decoder_input_details can't be streamed: leave stream out", param="decoder_input_details"
            )
        if not flag({"do_sample": True} | given, "do_sample"):
            given["temperature"] = 0.0
        if not given.get("n", 1):
            given["n"] = 1  # top_n_tokens: 0
        has_details = has_details or (given.get("n", 1) != 1 and not is_stream)
        body = {"max_tokens": DEFAULT_MAX_NEW_TOKENS, **given, "prompt": inputs}
        for name in ("details", "do_sample", "echo", "prompt_logprobs"):
            body.pop(name, None)
        if has_details or is_stream:
            body = {"logprobs": 1, **body, "return_token_ids": True}
        if has_details and has_prefill:
            body["echo"] = True
        if is_stream:
            body["stream"] = True
        if is_stream and has_details:
            body["stream_options"] = {"include_usage": True, "continuous_usage_stats": True}
        stops = given.get("stop_token_ids", ())
        stop_token_ids = frozenset(stops) if isinstance(stops, list) and _are_numbers(stops) else frozenset()
        return cls(
            body,
            inputs,
            is_stream=is_stream,
            has_details=has_details,
            has_full_text=has_full_text,
            has_prefill=has_details and has_prefill,
            seed=given.get("seed"),
            stop_token_ids=stop_token_ids,
        )

    def answer(self, completion: Json) -> Any:
        """The answer in LMI's schema, of the engine's completion; one for each text of a list."""
        choices = sorted(completion["choices"], key=lambda choice: int(choice["index"]))
        if isinstance(self.inputs, str):
            return self._answer(self.inputs, choices, _counts(completion))
        each = len(choices) // len(self.inputs)
        # The engine's usage adds up all texts of a list: what it counts is known of a text that is alone in one.
        counts = _counts(completion) if len(self.inputs) == 1 else {}
        return [self._answer(text, choices[each * at : each * (at + 1)], counts) for at, text in enumerate(self.inputs)]

    def text(self, inputs: str, generated: str) -> str:
        """The text that is answered."""
        return inputs + generated if self.has_full_text else generated

    def finish_reason(self, choice: Json) -> str | None:
        """The finish reason in LMI's terms."""
        reason, stop = choice.get("finish_reason"), choice.get("stop_reason")
        if reason != "stop":
            return None if reason is None else str(reason)
        if isinstance(stop, str) or stop in self.stop_token_ids:
            return "stop_sequence"
        return "eos_token"

    def _answer(self, inputs: str, choices: Sequence[Json], counts: Json) -> Json:
        """The answer to one text, with what was counted for it."""
        first, *others = choices
        answer: Json = {"generated_text": self.text(inputs, first["text"])}
        if self.has_details:
            answer["details"] = self._details(first) | counts
            if others:
                answer["details"]["best_of_sequences"] = [
                    {"generated_text": self.text(inputs, choice["text"]), **self._details(choice)} for choice in others
                ]
        return answer

    def _details(self, choice: Json) -> Json:
        ids = choice["token_ids"]
        tokens = _tokens([*(choice["prompt_token_ids"] if self.has_prefill else ()), *ids], choice["logprobs"])
        prefill = len(tokens) - len(ids)
        return {
            "finish_reason": self.finish_reason(choice),
            "generated_tokens": len(ids),
            "seed": self.seed,
            "prefill": tokens[:prefill],
            "tokens": tokens[prefill:],
        }


@dataclass(slots=True)
class _Told:
    """The streamed part of one sequence."""

    texts: list[str] = field(default_factory=list)
    tokens: int = 0


class Rows:
    """A stream in LMI's schema: one row for every token, the last one with the whole text."""

    def __init__(self, generation: Generation) -> None:
        self._generation = generation
        self._told: dict[int, _Told] = {}
        self._input_length = 0

    def of(self, chunk: Json) -> list[Json]:
        """The rows of one chunk of the engine's. Their texts add up to the generated text."""
        return [row for choice in chunk["choices"] for row in self._of_choice(choice, chunk)]

    def _of_choice(self, choice: Json, chunk: Json) -> list[Json]:
        told = self._told.setdefault(choice["index"], _Told())
        self._input_length = self._input_length or len(choice.get("prompt_token_ids") or ())
        ids, text = choice.get("token_ids") or [], choice.get("text", "")
        tokens = _tokens(ids, choice.get("logprobs"))
        told.texts.append(text)
        told.tokens += len(ids)
        if not tokens and (text or choice.get("finish_reason") is not None):
            tokens = [_token(None, text, None)]  # what was held back, or the bare end
        for token, piece in zip(tokens, pieces([token["text"] for token in tokens], text), strict=True):
            token["text"] = piece
        rows = [{"index": choice["index"], "token": token, "generated_text": None, "details": None} for token in tokens]
        if choice.get("finish_reason") is not None:
            rows[-1]["generated_text"] = self._generation.text(str(self._generation.inputs), "".join(told.texts))
            if self._generation.has_details:
                rows[-1]["details"] = self._details(choice, told) | _counts(chunk)
        return rows

    def _details(self, choice: Json, told: _Told) -> Json:
        return {
            "finish_reason": self._generation.finish_reason(choice),
            "seed": self._generation.seed,
            "generated_tokens": told.tokens,
            "input_length": self._input_length,
        }


def pieces(tokens: Sequence[str], text: str) -> list[str]:
    """`text` cut into one piece for each token: its own text where that comes next, the rest to the last.

    A tokenizer may tell a token without the space before it, or say nothing of half a character.
    """
    cut, at = [], 0
    for token in tokens[:-1]:
        found = text.find(token, at)
        end = found + len(token) if found >= 0 and not text[at:found].strip() else at
        cut.append(text[at:end])
        at = end
    return [*cut, text[at:]] if tokens else []


def _check_texts(inputs: object) -> list[Any]:
    """The texts of a request. Raises: HttpError 400."""
    texts = inputs if isinstance(inputs, list) else [inputs]
    if not texts or not all(isinstance(text, str) and text for text in texts):
        raise HttpError(400, f"inputs is {inputs!r:.80}: give a text or a list of texts, not empty", param="inputs")
    return texts


def embeddings_body(payload: Mapping[str, Any]) -> Json:
    """The body for the engine's /v1/embeddings. Raises: HttpError 400."""
    inputs = payload.get("inputs")
    texts = _check_texts(inputs)
    parameters = payload.get("parameters") or {}
    known = {"dimensions": "dimensions", "truncate": "truncate_prompt_tokens", "normalize": "use_activation"}
    unknown = parameters.keys() - known.keys() if isinstance(parameters, dict) else {"parameters"}
    if unknown:
        name = min(unknown)
        raise HttpError(400, f"embeddings have no parameter {name!r:.80}: they take {', '.join(known)}", param=name)
    given = {known[name]: value for name, value in parameters.items() if value is not None}
    return {"input": texts, **given}


def embeddings_answer(inputs: object, answered: Json) -> list[Any]:
    """One vector for a text, a list of vectors for a list."""
    vectors = [row["embedding"] for row in sorted(answered["data"], key=lambda row: int(row["index"]))]
    return vectors if isinstance(inputs, list) else list(vectors[0])


def _counts(answered: Json) -> Json:
    """Counts of cached tokens, and of drafted and blended ones where there are any; of all sequences together."""
    usage = answered.get("usage") or {}
    details = {**(usage.get("completion_tokens_details") or {}), **(usage.get("prompt_tokens_details") or {})}
    return {name: count for name, count in details.items() if name.endswith("_prediction_tokens") or name in _COUNTED}


def _wants_prefill(given: Json) -> bool:
    """Whether `decoder_input_details` is true, or the engine's own `prompt_logprobs` is a number."""
    asked = given.get("prompt_logprobs", False)
    return True if isinstance(asked, int) and not isinstance(asked, bool) else flag(given, "prompt_logprobs")


def _are_numbers(values: list[Any]) -> bool:
    return all(isinstance(value, int) for value in values)


def _tokens(ids: Sequence[int], logprobs: Mapping[str, Any] | None) -> list[Json]:
    told = logprobs or {"tokens": [""] * len(ids), "token_logprobs": [None] * len(ids)}
    return [
        _token(number, text, logprob)
        for number, text, logprob in zip(ids, told["tokens"], told["token_logprobs"], strict=True)
    ]


def _token(number: int | None, text: str, logprob: float | None) -> Json:
    """`log_prob` is the name of LMI's rolling batch, `logprob` that of its async handler, the default since v17."""
    return {"id": number, "text": text, "log_prob": logprob, "logprob": logprob}
