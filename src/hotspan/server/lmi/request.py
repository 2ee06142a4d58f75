"""What a request asks for: schema, adapter, session, and the parameters of LMI's schema by the engine's names."""

from collections.abc import Iterable, Mapping
from enum import Enum
from typing import Any

from hotspan.core.errors import did_you_mean
from hotspan.http.errors import HttpError
from hotspan.http.head import ADAPTER_HEADER
from hotspan.server.lmi.sessions import CLOSE, NEW

LMI_NAMES = ("lmi", "model")
"""LMI's names of any base model; the engine does not know it by these."""


class Schema(Enum):
    """The schema of an invocation's body. The value is the engine's route."""

    EMBEDDING = "/v1/embeddings"
    COMPLETION = "/v1/completions"
    LMI = "lmi"
    CHAT = "/v1/chat/completions"
    ENGINE = "/invocations"


_BY_KEY = {"prompt": Schema.COMPLETION, "inputs": Schema.LMI, "messages": Schema.CHAT}
_ENGINES_OWN = ("input", "query", "queries", "text_1", "data_1", "documents")
"""Keys of pooling, scoring and ranking, which the engine's own /invocations tells apart."""


def chosen_schema(payload: Mapping[str, Any], *, is_embedding: bool) -> Schema:
    """The schema of a body, by the first key that is in it. Raises: HttpError 400."""
    if is_embedding and "inputs" in payload:
        return Schema.EMBEDDING
    for key, schema in _BY_KEY.items():
        if key in payload:
            return schema
    if any(key in payload for key in _ENGINES_OWN):
        return Schema.ENGINE
    raise HttpError(
        400, f"the request has none of {', '.join(_BY_KEY)}, requestType: one of them says what it asks for"
    )


def take_adapter(payload: dict[str, Any], headers: Mapping[str, str], base_names: tuple[str, ...]) -> str | None:
    """The adapter that a request names, by header, then `adapters`, then `model`; None for the base model.

    Mutates: `payload`, which no longer has `adapters`.
    Raises:  HttpError 400.
    """
    given = payload.pop("adapters", None)
    model = payload.get("model")
    if isinstance(model, str) and model in base_names:
        model = None
    if headers.get(ADAPTER_HEADER):
        name: object = headers[ADAPTER_HEADER]
    elif given is not None:
        name = given[0] if isinstance(given, list) and len(given) == 1 else given
    else:
        name = model
    if name is not None and not isinstance(name, str):
        param = "model" if given is None else "adapters"
        raise HttpError(400, f"{param} is {name!r:.80}: give the name of one adapter", param=param)
    return name or None


def session_request(payload: Mapping[str, Any]) -> str | None:
    """The type of a session request, NEW or one of CLOSE; None for any other payload. Raises: HttpError 400."""
    if "requestType" not in payload or any(key in payload for key in _BY_KEY):
        return None
    asked = payload["requestType"]
    if asked not in (NEW, *CLOSE):
        raise HttpError(400, f"requestType is {asked!r:.80}: give {NEW} or {CLOSE[0]}", param="requestType")
    return str(asked)


# -- LMI's parameters --------------------------------------------------------------------------------------------------

RENAMED = {
    "max_new_tokens": "max_tokens",
    "truncate": "truncate_prompt_tokens",
    "top_n_tokens": "n",
    "ignore_eos_token": "ignore_eos",
    "stop_sequences": "stop",
    "return_full_text": "echo",
    "decoder_input_details": "prompt_logprobs",
}
"""LMI's name to the engine's; either is taken, not both."""

OWN = ("details", "do_sample")

SAME = (
    *("temperature", "top_p", "top_k", "min_p", "seed", "logprobs", "logit_bias", "bad_words", "allowed_token_ids"),
    *("frequency_penalty", "presence_penalty", "repetition_penalty", "length_penalty", "repetition_detection"),
    *("use_beam_search", "min_tokens", "stop_token_ids", "include_stop_str_in_output", "thinking_token_budget"),
    *("skip_special_tokens", "spaces_between_special_tokens", "add_special_tokens", "truncation_side"),
    *("response_format", "structured_outputs", "logprob_token_ids", "suffix", "user", "watermarking"),
    *("priority", "session_id", "cache_salt", "kv_transfer_params", "vllm_xargs", "stream_interval"),
)
"""Parameters that the engine's completions take by the same name."""

TOP_LEVEL = ("user", "priority", "session_id", "cache_salt", "kv_transfer_params")
"""What may stand beside `inputs` as well."""

ROUTING = ("prompt_cache_key",)
"""What a router in front reads, and nobody else."""

NEUTRAL: Mapping[str, object] = {
    "best_of": 1,
    "num_beams": 1,
    "num_beam_groups": 1,
    "num_return_sequences": 1,
    "typical_p": 1.0,
    "early_stopping": False,
    "watermark": False,
    "no_repeat_ngram_size": 0,
    "diversity_penalty": 0.0,
}
"""Parameters of other servers that this one does not have, with the value at which they change nothing. Clients that
always send the whole list send these."""

_INSTEAD = {
    **dict.fromkeys(("best_of", "num_return_sequences"), "n gives several sequences"),
    **dict.fromkeys(("num_beams", "num_beam_groups", "early_stopping"), "use_beam_search with n searches in beams"),
    **dict.fromkeys(
        ("guided_json", "guided_regex", "guided_choice", "guided_grammar", "grammar"), "use structured_outputs"
    ),
    **dict.fromkeys(("no_repeat_ngram_size", "diversity_penalty"), "use repetition_penalty or frequency_penalty"),
    "typical_p": "use top_p or min_p",
    "watermark": "this server marks nothing",
    "adapter_id": "use adapters",
}
"""What does what a parameter of another server is meant for."""

_KNOWN = (*RENAMED, *OWN, *SAME, *RENAMED.values())
_FIELDS = ("inputs", "parameters", "stream", "adapters", "model", *TOP_LEVEL, *ROUTING)


def engine_parameters(payload: Mapping[str, Any]) -> dict[str, Any]:
    """All parameters of an LMI request under the engine's names, and the two of LMI's own; null counts as not given.

    So does a parameter of another server at the value at which it changes nothing.
    Raises: HttpError 400 that names what is not known or given twice.
    """
    parameters = payload.get("parameters")
    if parameters is None:
        parameters = {}
    if not isinstance(parameters, dict):
        raise HttpError(400, f"parameters is {parameters!r:.80}: give an object", param="parameters")
    parameters = {name: value for name, value in parameters.items() if not _is_neutral(name, value)}
    _refuse_unknown(payload, _FIELDS, "the request has no field")
    _refuse_unknown(parameters, _KNOWN, "there is no parameter")
    given = {name: payload[name] for name in TOP_LEVEL if payload.get(name) is not None}
    for name, value in parameters.items():
        target = RENAMED.get(name, name)
        if target in given:
            raise HttpError(400, f"{name} is given twice, under two names or in two places: give it once", param=name)
        given[target] = value
    return given


def own_name(parameter: object) -> object:
    """LMI's name for the engine's `parameter`, also for a place in its body (body.stop.0). For error messages."""
    if not isinstance(parameter, str):
        return parameter
    head, dot, rest = parameter.removeprefix("body.").partition(".")
    return next((name for name, target in RENAMED.items() if target == head), head) + dot + rest


def flag(given: Mapping[str, Any], name: str) -> bool:
    """A parameter that is true or false. Raises: HttpError 400."""
    value = given.get(name, False)
    if not isinstance(value, bool):
        raise HttpError(400, f"{own_name(name)} is {value!r:.80}: give true or false", param=str(own_name(name)))
    return value


def _is_neutral(name: str, value: object) -> bool:
    same = NEUTRAL.get(name)
    return value is None or (same is not None and isinstance(value, bool) == isinstance(same, bool) and value == same)


def _refuse_unknown(given: Iterable[str], known: tuple[str, ...], what: str) -> None:
    for name in given:
        if name not in known:
            hint = _INSTEAD.get(name) or did_you_mean(name, known, "leave it out (docs/http.md has the list)")
            raise HttpError(400, f"{what} {name!r:.80}: {hint}", param=name)
