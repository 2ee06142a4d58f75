"""LMI's schema to the engine's and back: each parameter, and what an answer is made of."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hotspan.http.errors import HttpError
from hotspan.server.lmi.request import NEUTRAL
from hotspan.server.lmi.schema import Generation, Rows, embeddings_body, pieces


def body(stream: bool = False, **parameters: Any) -> Any:
    return Generation.parse({"inputs": "Say", "parameters": parameters, "stream": stream}).body


def refused(payload: Any) -> HttpError:
    with pytest.raises(HttpError) as error:
        Generation.parse({"inputs": "Say"} | payload)
    assert error.value.status == 400
    return error.value


def test_defaults() -> None:
    """A bare text asks for 30 tokens and for nothing that costs."""
    assert Generation.parse({"inputs": "Say"}).body == {"prompt": "Say", "max_tokens": 30}


@pytest.mark.parametrize(
    ("name", "value", "asked"),
    [
        ("max_new_tokens", 7, {"max_tokens": 7}),
        ("truncate", 100, {"truncate_prompt_tokens": 100}),
        ("top_n_tokens", 0, {"n": 1}),
        ("ignore_eos_token", True, {"ignore_eos": True}),
        ("stop_sequences", ["\n"], {"stop": ["\n"]}),
        ("do_sample", False, {"temperature": 0.0}),
        ("do_sample", True, {}),
        ("seed", 3, {"seed": 3}),
        ("temperature", 0.5, {"temperature": 0.5}),
        ("temperature", None, {}),
        ("return_full_text", True, {}),
        ("details", True, {"logprobs": 1, "return_token_ids": True}),
        ("kv_transfer_params", {"ttl": "1h"}, {"kv_transfer_params": {"ttl": "1h"}}),
    ],
)
def test_parameters(name: str, value: Any, asked: Any) -> None:
    """Each of LMI's parameters is the engine's by its true name; null counts as not given."""
    assert body(**{name: value}) == {"prompt": "Say", "max_tokens": 30} | asked


def test_what_changes_nothing_counts_as_not_given() -> None:
    """Clients that always send the whole list are served: other servers' parameters at their defaults, null for any."""
    known = body(**NEUTRAL)
    assert known == body(grammar=None, adapter_id=None, whatever=None) == {"prompt": "Say", "max_tokens": 30}


def test_sequences_have_details() -> None:
    """Several sequences are answered in the details, so these are asked for."""
    assert body(top_n_tokens=2) == {"prompt": "Say", "max_tokens": 30, "n": 2, "logprobs": 1, "return_token_ids": True}


def test_prefill_needs_details() -> None:
    """The prompt's tokens are part of the details, and cost nothing where none are asked."""
    assert body(decoder_input_details=True, details=True)["echo"] is True
    assert "echo" not in body(decoder_input_details=True)


def test_a_stream_asks_for_tokens() -> None:
    """A stream tells tokens, so it asks the engine for their ids and log probabilities."""
    asked = {"prompt": "Say", "max_tokens": 30, "stream": True, "logprobs": 1, "return_token_ids": True}
    assert body(stream=True) == asked


def test_the_client_may_ask_for_more_logprobs() -> None:
    """A client's own number of log probabilities is kept."""
    assert body(details=True, logprobs=5)["logprobs"] == 5


@pytest.mark.parametrize(
    ("payload", "param", "hint"),
    [
        ({"parameters": {"max_new_token": 5}}, "max_new_token", "did you mean max_new_tokens?"),
        ({"parameters": {"tempreature": 1}}, "tempreature", "did you mean temperature?"),
        ({"parameters": {"zzz": 1}}, "zzz", "leave it out"),
        ({"parameter": {}}, "parameter", "did you mean parameters?"),
        ({"parameters": []}, "parameters", "give an object"),
        ({"parameters": {"max_new_tokens": 1, "max_tokens": 1}}, "max_tokens", "given twice"),
        ({"parameters": {"user": "a"}, "user": "b"}, "user", "given twice"),
        ({"parameters": {"details": "yes"}}, "details", "true or false"),
        ({"parameters": {"return_full_text": 1}}, "return_full_text", "true or false"),
        ({"parameters": {"do_sample": "no"}}, "do_sample", "true or false"),
        ({"stream": "true"}, "stream", "true or false"),
        ({"inputs": ""}, "inputs", "a text or a list of texts"),
        ({"inputs": []}, "inputs", "a text or a list of texts"),
        ({"inputs": ["a", ""]}, "inputs", "a text or a list of texts"),
        ({"inputs": [1, 2]}, "inputs", "a text or a list of texts"),
        ({"inputs": ["a", "b"], "stream": True}, "stream", "leave stream out"),
        ({"parameters": {"best_of": 3}}, "best_of", "n gives several sequences"),
        ({"parameters": {"best_of": True}}, "best_of", "n gives several sequences"),
        ({"parameters": {"num_beams": 4}}, "num_beams", "use_beam_search"),
        ({"parameters": {"early_stopping": True}}, "early_stopping", "use_beam_search"),
        ({"parameters": {"typical_p": 0.9}}, "typical_p", "top_p"),
        ({"parameters": {"guided_json": {}}}, "guided_json", "structured_outputs"),
        ({"parameters": {"adapter_id": "a"}}, "adapter_id", "adapters"),
        ({"stream": True, "parameters": {"decoder_input_details": True}}, "decoder_input_details", "leave stream out"),
    ],
)
def test_refusals(payload: Any, param: str, hint: str) -> None:
    """What can't be is refused with the name of the parameter and what would do."""
    error = refused(payload)
    assert error.param == param and hint in str(error)


def choice(**said: Any) -> Any:
    return {"index": 0, "text": "ab", "finish_reason": "length", "stop_reason": None} | said


@pytest.mark.parametrize(
    ("said", "reason"),
    [
        ({"finish_reason": "length"}, "length"),
        ({"finish_reason": "stop"}, "eos_token"),
        ({"finish_reason": "stop", "stop_reason": "\n"}, "stop_sequence"),
        ({"finish_reason": "stop", "stop_reason": 9}, "stop_sequence"),
        ({"finish_reason": "stop", "stop_reason": 128009}, "eos_token"),
        ({"finish_reason": "abort"}, "abort"),
        ({"finish_reason": None}, None),
    ],
)
def test_finish_reasons(said: Any, reason: str | None) -> None:
    """LMI's three words; a token that stops is a stop sequence only if the client named it, else the model's end."""
    asked = Generation.parse({"inputs": "Say", "parameters": {"stop_token_ids": [9]}})
    assert asked.finish_reason(choice(**said)) == reason


def test_details_of_an_answer() -> None:
    """Tokens are counted as they are; those of the prompt stand apart; other sequences follow."""
    asked = Generation.parse(
        {"inputs": "Say", "parameters": {"details": True, "decoder_input_details": True, "n": 2, "seed": 4}}
    )
    said = choice(
        token_ids=[5, 6],
        prompt_token_ids=[1],
        logprobs={"tokens": ["<s>", "a", "b"], "token_logprobs": [None, -0.5, -0.25]},
    )
    tokens = [
        {"id": 5, "text": "a", "log_prob": -0.5, "logprob": -0.5},
        {"id": 6, "text": "b", "log_prob": -0.25, "logprob": -0.25},
    ]
    details = {
        "finish_reason": "length",
        "generated_tokens": 2,
        "seed": 4,
        "prefill": [{"id": 1, "text": "<s>", "log_prob": None, "logprob": None}],
        "tokens": tokens,
    }
    assert asked.answer({"choices": [said, said]}) == {
        "generated_text": "ab",
        "details": details | {"best_of_sequences": [{"generated_text": "ab"} | details]},
    }


def test_a_list_is_a_batch() -> None:
    """Each text has its own answer, in the order of the list, with its own sequences, whatever comes first."""
    texts = ["A ", "B "]
    asked = Generation.parse({"inputs": texts, "parameters": {"n": 2, "return_full_text": True}})
    assert asked.body["prompt"] == texts
    said = [
        choice(index=at, text=str(at), token_ids=[at], logprobs={"tokens": [str(at)], "token_logprobs": [-1.0]})
        for at in (3, 0, 2, 1)
    ]
    answers = asked.answer({"choices": said})
    assert [each["generated_text"] for each in answers] == ["A 0", "B 2"]
    assert [each["details"]["best_of_sequences"][0]["generated_text"] for each in answers] == ["A 1", "B 3"]
    plain = Generation.parse({"inputs": ["A"]}).answer({"choices": [choice()]})
    assert plain == [{"generated_text": "ab"}]


def test_full_text() -> None:
    """The text that was sent comes first if asked for."""
    asked = Generation.parse({"inputs": "Say ", "parameters": {"return_full_text": True}})
    assert asked.answer({"choices": [choice()]}) == {"generated_text": "Say ab"}


tokens = st.lists(st.text(max_size=4), min_size=1, max_size=6)


@given(tokens, st.text(max_size=12))
def test_pieces_add_up(texts: list[str], text: str) -> None:
    """Whatever tokens say of themselves, their pieces are one for each and add up to the text."""
    cut = pieces(texts, text)
    assert len(cut) == len(texts) and "".join(cut) == text


@given(tokens)
def test_pieces_of_honest_tokens(texts: list[str]) -> None:
    """Tokens whose texts add up keep their own."""
    assert pieces(texts, "".join(texts)) == texts


@pytest.mark.parametrize(
    ("texts", "text", "cut"),
    [
        (["Hello", "world"], "Hello world", ["Hello", " world"]),
        (["a", "b", "c"], "a b c", ["a", " b", " c"]),
        (["a", "�", "é"], "aé", ["a", "", "é"]),
        (["a", "b"], "", ["", ""]),
        (["x", "a", "!"], "a x!", ["", "a", " x!"]),
        (["a", "</s>"], "a", ["a", ""]),
    ],
)
def test_pieces_of_tokenizers(texts: list[str], text: str, cut: list[str]) -> None:
    """A space that a token leaves out is its own; half a character, the end and what is held back are nobody's."""
    assert pieces(texts, text) == cut


steps = st.lists(st.tuples(st.lists(st.text(max_size=3), max_size=4), st.text(max_size=6)), min_size=1, max_size=8)


@given(steps, st.booleans())
def test_rows_lose_nothing(given_steps: list[tuple[list[str], str]], details: bool) -> None:
    """However tokens and text are cut into chunks: a row a token, texts that add up, one last row with the whole."""
    asked = Generation.parse({"inputs": "Say", "stream": True, "parameters": {"details": details}})
    told, made, ids = Rows(asked), [], 0
    for number, (texts, text) in enumerate(given_steps):
        is_last = number == len(given_steps) - 1
        said = choice(
            text=text, token_ids=list(range(ids, ids + len(texts))), finish_reason="length" if is_last else None
        )
        said |= {"logprobs": {"tokens": texts, "token_logprobs": [-1.0] * len(texts)}}
        said |= {"prompt_token_ids": [1, 2, 3] if number == 0 else None}
        ids += len(texts)
        made += told.of({"choices": [said]})
    whole = "".join(text for _, text in given_steps)
    assert "".join(row["token"]["text"] for row in made) == whole
    assert [row["token"]["id"] for row in made if row["token"]["id"] is not None] == list(range(ids))
    assert [row["generated_text"] for row in made] == [None] * (len(made) - 1) + [whole]
    last = {"finish_reason": "length", "seed": None, "generated_tokens": ids, "input_length": 3}
    assert made[-1]["details"] == (last if details else None)


def test_rows_of_several_sequences() -> None:
    """Sequences that come interleaved keep their own texts and counts."""
    told = Rows(Generation.parse({"inputs": "Say", "stream": True, "parameters": {"n": 2, "details": True}}))
    ends = []
    for index, text, end in ((0, "a", None), (1, "x", None), (0, "b", "length"), (1, "y", "length")):
        said = choice(index=index, text=text, finish_reason=end, token_ids=[1], prompt_token_ids=[1])
        said |= {"logprobs": {"tokens": [text], "token_logprobs": [-1.0]}}
        ends += [row for row in told.of({"choices": [said]}) if row["details"]]
    assert [(row["index"], row["generated_text"], row["details"]["generated_tokens"]) for row in ends] == [
        (0, "ab", 2),
        (1, "xy", 2),
    ]


def test_counts_of_drafts() -> None:
    """Details have the counts of drafted tokens that the engine's usage has, in a stream those of the row's chunk; a
    stream without details asks for none."""
    counts = {"accepted_prediction_tokens": 3, "rejected_prediction_tokens": 1}
    usage = {"completion_tokens": 1, "completion_tokens_details": {"reasoning_tokens": 0, **counts}}
    said = choice(text="a", token_ids=[1]) | {"logprobs": {"tokens": ["a"], "token_logprobs": [-1.0]}}
    for is_stream in (False, True):
        asked = Generation.parse({"inputs": "Say", "stream": is_stream, "parameters": {"details": True}})
        answered = {"choices": [said], "usage": usage}
        details = Rows(asked).of(answered)[-1]["details"] if is_stream else asked.answer(answered)["details"]
        assert details.items() >= counts.items() and "reasoning_tokens" not in details
    assert body(stream=True, details=True)["stream_options"]["continuous_usage_stats"] is True
    assert "stream_options" not in body(stream=True)


def test_counts_of_blended_tokens() -> None:
    """Details of an answer have them as the engine's usage, and how many tokens were cached."""
    counts = {"blend_reused_tokens": 1536, "blend_recomputed_tokens": 48}
    usage = {"completion_tokens": 1, "prompt_tokens_details": {"cached_tokens": 128, **counts}}
    said = choice(text="a", token_ids=[1]) | {"logprobs": {"tokens": ["a"], "token_logprobs": [-1.0]}}
    asked = Generation.parse({"inputs": "Say", "parameters": {"details": True}})
    details = asked.answer({"choices": [said], "usage": usage})["details"]
    assert {name: details[name] for name in counts} == counts and details["cached_tokens"] == 128


def test_counts_of_a_list_of_texts() -> None:
    """A text that is alone in its list has the counts of its usage; of several, whose usage is a sum, none is told."""
    usage = {"completion_tokens": 1, "prompt_tokens_details": {"cached_tokens": 128}}
    said = [choice(index=at, text="a", token_ids=[1]) for at in range(2)]
    said = [each | {"logprobs": {"tokens": ["a"], "token_logprobs": [-1.0]}} for each in said]
    for texts, counts in ((["Say"], [128]), (["Say", "Tell"], [None, None])):
        asked = Generation.parse({"inputs": texts, "parameters": {"details": True}})
        answers = asked.answer({"choices": said[: len(texts)], "usage": usage})
        assert [each["details"].get("cached_tokens") for each in answers] == counts


@pytest.mark.parametrize("inputs", [None, "", [], ["a", ""], [1], {"a": 1}])
def test_embeddings_refuse(inputs: Any) -> None:
    """What is no text and no list of texts has no embedding."""
    with pytest.raises(HttpError, match="inputs"):
        embeddings_body({"inputs": inputs})


def test_embeddings_parameters() -> None:
    """Embeddings take their own parameters, and no others."""
    asked = embeddings_body({"inputs": "a", "parameters": {"normalize": False, "truncate": 5, "dimensions": None}})
    assert asked == {"input": ["a"], "use_activation": False, "truncate_prompt_tokens": 5}
    with pytest.raises(HttpError, match="no parameter 'max_new_tokens'"):
        embeddings_body({"inputs": "a", "parameters": {"max_new_tokens": 5}})
