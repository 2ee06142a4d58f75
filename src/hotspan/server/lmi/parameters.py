"""The parameters of LMI's schema: which there are, and what each is to the engine."""

from collections.abc import Iterable, Mapping
from typing import Any

from hotspan.core.errors import did_you_mean
from hotspan.http.errors import HttpError

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

_KNOWN = (*RENAMED, *OWN, *SAME, *RENAMED.values())
_FIELDS = ("inputs", "parameters", "stream", "adapters", "model", *TOP_LEVEL, *ROUTING)


def engine_parameters(payload: Mapping[str, Any]) -> dict[str, Any]:
    """All parameters of an LMI request under the engine's names, and the two of LMI's own; null counts as not given.

    Raises: HttpError 400 that names what is not known or given twice.
    """
    parameters = payload.get("parameters")
    if parameters is None:
        parameters = {}
    if not isinstance(parameters, dict):
        raise HttpError(400, f"parameters is {parameters!r:.80}: give an object", param="parameters")
    _refuse_unknown(payload, _FIELDS, "the request has no field")
    _refuse_unknown(parameters, _KNOWN, "there is no parameter")
    given = {name: payload[name] for name in TOP_LEVEL if payload.get(name) is not None}
    for name, value in parameters.items():
        if value is None:
            continue
        target = RENAMED.get(name, name)
        if target in given:
            raise HttpError(400, f"{name} is given twice, under two names or in two places: give it once", param=name)
        given[target] = value
    return given


def own_name(parameter: object) -> object:
    """LMI's name of what the engine calls `parameter`, also as a place in its body (body.stop.0), for its errors."""
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


def _refuse_unknown(given: Iterable[str], known: tuple[str, ...], what: str) -> None:
    for name in given:
        if name not in known:
            hint = did_you_mean(name, known, "leave it out (docs/http.md has the list)")
            raise HttpError(400, f"{what} {name!r:.80}: {hint}", param=name)
