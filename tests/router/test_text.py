"""Text: requests that share a prompt's beginning share its keys, whatever the schema; nothing in a body is an error."""

import random
from pathlib import Path
from typing import Any

import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, normalizers

from hotspan.core.errors import ConfigError
from hotspan.core.namespace import engine_salt
from hotspan.router.blocks import Blocks
from hotspan.router.event_messages import Stored
from hotspan.router.template import ChatTemplate
from hotspan.router.text import Prompts, Roots, piece_keys
from hotspan.router.types import PIECE_BYTES, Medium, Owner
from hotspan.testing.clock import SimulatedClock
from tests.operations import in_one_go, operations
from tests.router.test_tokens import made

CHATML = (
    "{{ bos_token }}{% if tools %}{{ tools | tojson }}\n{% endif %}{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
LISTS = (
    "{% for message in messages %}[{{ message.role }}]{% if message.content is string %}{{ message.content }}"
    "{% else %}{% for part in message.content %}{% if part.type == 'text' %}{{ part.text }}{% else %}<image>{% endif %}"
    "{% endfor %}{% endif %}{% endfor %}"
)
CHAT, LONG = "/v1/chat/completions", "word " * 400
SYSTEM, USER = {"role": "system", "content": LONG}, {"role": "user", "content": "And what is that? " * 40}


def prompts(source: str | None = CHATML, **options: Any) -> Prompts:
    """Of a model with this template, and text as it is."""
    template = None if source is None else ChatTemplate(source, {"bos_token": "<s>"}, clock=SimulatedClock())
    return Prompts(template=template, **options)


def keys(body: dict[str, Any], path: str = CHAT, source: str | None = CHATML, **headers: str) -> list[int]:
    """Of a request's pieces."""
    found = prompts(source, names=("m",)).ask(
        path, {name.replace("_", "-"): each for name, each in headers.items()}, body
    )
    return list(found.keys)


def keys_of(text: str) -> list[int]:
    """Of a text as it is."""
    return piece_keys(text.encode(), Roots().of_request("", ""))


def shared(one: list[int], other: list[int]) -> int:
    """How many keys are the same from the root on."""
    same = [first == second for first, second in zip(one, other, strict=False)]
    return same.index(False) if False in same else len(same)


@given(text=st.binary(max_size=4 * PIECE_BYTES), cut=st.integers(0, 4 * PIECE_BYTES), root=st.integers(0, 2**64 - 1))
def test_keys_are_of_whole_pieces_and_of_all_before_them(text: bytes, cut: int, root: int) -> None:
    """Texts that share n whole pieces share n keys, and not one more."""
    first = piece_keys(text, root)
    assert len(first) == len(text) // PIECE_BYTES and all(0 <= key < 2**64 for key in first)
    changed = text[:cut] + bytes([text[cut] ^ 1]) + text[cut + 1 :] if cut < len(text) else text
    expected = len(first) if changed == text else min(cut // PIECE_BYTES, len(first))
    second = piece_keys(changed, root)
    assert shared(first, second) == expected and not set(first[expected:]) & set(second[expected:])
    assert not set(first) & set(piece_keys(text, root ^ 1))


def test_a_chat_is_its_rendered_text() -> None:
    """The template's text is what is cut, with its BOS, roles and the beginning of the answer."""
    rendered = f"<s><|im_start|>system\n{LONG}<|im_end|>\n<|im_start|>user\n{USER['content']}<|im_end|>\n"
    rendered += "<|im_start|>assistant\n"
    assert keys({"messages": [SYSTEM, USER]}) == keys_of(rendered)
    assert keys({"messages": [SYSTEM, USER], "add_generation_prompt": False}) == keys_of(rendered[:-22])
    following = keys({"messages": [SYSTEM, USER, {"role": "assistant", "content": "It is. " * 100}]})
    assert shared(following, keys_of(rendered)) == len(rendered) // PIECE_BYTES


def test_all_schemas_of_one_prompt_have_its_keys() -> None:
    """Chat, responses, messages and invocations lead to one text; so do completions and LMI's inputs."""
    chat = keys({"messages": [SYSTEM, USER]})
    asked = {"instructions": LONG, "input": USER["content"]}
    items = {
        "instructions": LONG,
        "input": [{"role": "user", "content": [{"type": "input_text", "text": USER["content"]}]}],
    }
    assert keys(asked, "/v1/responses") == keys(items, "/v1/responses") == chat != []
    blocks = [{"type": "text", "text": USER["content"]}]
    anthropic = {"system": LONG, "messages": [{"role": "user", "content": blocks}]}
    assert keys(anthropic, "/v1/messages") == chat == keys({"messages": [SYSTEM, USER]}, "/invocations")
    assert keys({"prompt": LONG}, "/v1/completions") == keys({"inputs": LONG}, "/invocations") == keys_of(LONG) != []
    assert keys({"prompt": [LONG]}, "/v1/completions") == keys({"inputs": LONG}, "/predictions") == keys_of(LONG)
    assert keys({"previous_response_id": "r1", "input": LONG}, "/v1/responses") == []


def test_adapters_and_salts_have_keys_of_their_own() -> None:
    """Adapter by header in any case, by `adapters` or by model; the model's own names are none; salts part too."""
    body = {"prompt": LONG, "model": "m"}
    plain, path = keys(body, "/v1/completions"), "/v1/completions"
    tuned = keys({**body, "model": "sql"}, path)
    assert keys({**body, "adapters": ["sql"]}, path) == tuned
    assert keys(body, path, x_amzn_sagemaker_adapter_identifier="sql") == tuned
    assert keys(body, path, X_Amzn_SageMaker_Adapter_Identifier="sql") == tuned
    assert not set(tuned) & set(plain) and not set(keys({**body, "cache_salt": "s"}, path)) & set(plain)
    assert prompts().ask(path, {}, {**body, "model": "anything"}).keys == plain  # names are not known


ACME = Owner("acme", b"of acme")


def test_an_engines_own_names_lead_to_the_same_roots() -> None:
    """A replica's salt of the default tenant is none, others are computed, and adapters have the digest seen last."""
    roots = Roots()
    assert roots.of_engine("", engine_salt("default", "")) == roots.of_request("", "")
    assert roots.of_engine("", engine_salt("default", "s")) == roots.of_request("", "s")
    assert roots.of_engine("", engine_salt("acme", "")) == roots.of_request("", "", ACME) != roots.of_request("", "")
    assert roots.of_request("", "", Owner("", b"of a key")) != roots.of_request("", "")
    old, new = roots.of_engine("sql@0123456789ab", ""), roots.of_engine("sql@ba9876543210", "")
    assert roots.of_request("sql", "") == new != old


@pytest.mark.parametrize("source", [CHATML, LISTS])
def test_the_text_ends_at_the_first_image(source: str) -> None:
    """Nothing from an image on is compared; what is before it is."""
    parts = [
        {"type": "text", "text": LONG},
        {"type": "image_url", "image_url": {"url": "u"}},
        {"type": "text", "text": LONG},
    ]
    seen = keys({"messages": [SYSTEM, {"role": "user", "content": parts}, USER]}, source=source)
    head = (
        f"<s><|im_start|>system\n{LONG}<|im_end|>\n<|im_start|>user\n"
        if source is CHATML
        else f"[system]{LONG}[user]{LONG}"
    )
    assert seen == keys_of(head) != []
    other = [*parts[:1], {"type": "text", "text": "no image"}]
    assert keys({"messages": [SYSTEM, {"role": "user", "content": other}]}, source=source)[: len(seen)] == seen


def test_an_answer_that_is_gone_on_with_is_not_closed() -> None:
    """continue_final_message: the text ends where the last message ends."""
    last = {"role": "assistant", "content": LONG}
    body = {"messages": [USER, last], "continue_final_message": True, "add_generation_prompt": False}
    text = f"<s><|im_start|>user\n{USER['content']}<|im_end|>\n<|im_start|>assistant\n{LONG}"
    assert keys(body) == keys_of(text)


def test_templates_have_what_they_expect() -> None:
    """Dates, tools unescaped and in the engine's order, parsed arguments, loop controls, marks of answers, refusals."""
    source = (
        "{{ strftime_now('%Y') }}{{ tools | tojson }}{% for m in messages %}"
        "{% if m.role == 'tool' %}{% continue %}{% endif %}{% generation %}{{ m.content }}{% endgeneration %}"
        "{{ (m.tool_calls or [{}])[0].get('function', {}).get('arguments') }}"
        "{% if m.role == 'bad' %}{{ raise_exception('no') }}{% endif %}{% endfor %}{{ thinking }}"
    )
    template = ChatTemplate(source, {}, clock=SimulatedClock())
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
    tools = [{"function": {"parameters": {"x": "<\u00e9>"}, "name": "f"}, "type": "function"}]
    messages: list[dict[str, Any]] = [
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "gone"},
    ]
    text = template.render(messages, {"tools": tools, "chat_template_kwargs": {"thinking": "on"}})
    tool = '[{"type": "function", "function": {"name": "f", "description": null, "parameters": {"x": "<\u00e9>"}}}]'
    assert text == f"2023{tool}{{'a': 1}}on"
    assert template.render([{"role": "bad", "content": "x"}], {}) is None
    with pytest.raises(ConfigError, match="compile"):
        ChatTemplate("{% if %}", {})


def test_a_template_can_not_reach_out() -> None:
    """Templates come with models: they run in a sandbox."""
    template = ChatTemplate("{{ ''.__class__.__mro__[1].__subclasses__() }}{{ messages[0].content }}", {})
    assert template.render([{"role": "user", "content": "x"}], {}) is None


json = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5) | st.just(LONG),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["role", "content", "text", "type"]), inner)
    ),
    max_leaves=8,
)
FIELDS = [
    "messages",
    "prompt",
    "inputs",
    "input",
    "system",
    "tools",
    "documents",
    "model",
    "adapters",
    "cache_salt",
    "session_id",
]
FIELDS += [
    "chat_template_kwargs",
    "max_tokens",
    "parameters",
    "add_special_tokens",
    "continue_final_message",
    "instructions",
]
PATHS = [CHAT, "/v1/completions", "/v1/responses", "/v1/messages", "/invocations", "/predictions", "/odd"]


@settings(max_examples=120, deadline=None)
@given(
    body=st.dictionaries(
        st.sampled_from(FIELDS), json | st.lists(st.fixed_dictionaries({"role": json, "content": json}))
    ),
    path=st.sampled_from(PATHS),
    source=st.sampled_from([CHATML, LISTS, None]),
    kind=st.sampled_from([None, "byte-level", "llama"]),
)
def test_no_body_is_an_error(body: dict[str, Any], path: str, source: str | None, kind: str | None) -> None:
    """Whatever is in a body, there is an Ask with at least one token, and with the same session each time, or none."""
    reading = prompts(source, table=made(kind)[1] if kind else None, names=())
    found = reading.ask(path, {}, body)
    assert found.tokens >= 1 and found.answer_tokens >= 0
    assert len(found.session) in (0, 16) and found.session == reading.ask(path, {}, body).session


def test_a_body_that_is_no_object_counts_by_its_size() -> None:
    """It has a session by its headers and is counted; an object whose path is not known is read by its fields."""
    reading, headers = prompts(names=()), {"x-session-id": "s"}
    for count, body in enumerate((b"", b"[1]", b"{broken", b"\xff" * 4000), 1):
        found = in_one_go(reading.read("/v1/completions", headers, body))
        assert (found.keys, found.tokens, reading.unread) == ((), len(body) // 4, count)
        assert found.session == reading.ask("", headers, {}).session != b""
    bodies: dict[str, dict[str, Any]] = {CHAT: {"messages": [USER]}, "/v1/completions": {"prompt": LONG}}
    for path, fields in (bodies | {"/invocations": {"inputs": LONG}, "/v1/responses": {"input": LONG}}).items():
        found = in_one_go(reading.read("", {}, orjson.dumps(fields)))
        assert found == reading.ask(path, {}, fields) and found.session


def test_of_several_prompts_the_first_is_compared_and_all_are_counted() -> None:
    """Texts, token ids or chats in one body: keys are those of the first, and its tokens those of all."""
    ids = list(range(1000))
    for path, name, first in (
        ("/v1/completions", "prompt", LONG),
        ("/v1/completions", "prompt", ids),
        ("/v1/chat/completions/batch", "messages", [SYSTEM, USER]),
    ):
        alone, batch = (prompts().ask(path, {}, {name: [first] * count}) for count in (1, 4))
        assert batch.keys == alone.keys and alone.keys
        assert 3.5 * alone.tokens < batch.tokens <= 4 * alone.tokens


def test_a_prompt_that_breaks_the_reader_is_logged_with_its_request(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The request goes on, by its size; the log names it."""
    monkeypatch.setattr(Prompts, "ask", lambda *_, **__: 1 // 0)
    reading = prompts()
    found = in_one_go(reading.read(CHAT, {}, b'{"messages": []}', request_id="r-17"))
    assert found.tokens == 4 and reading.unread == 1
    assert [record.getMessage() for record in caplog.records] == [f"prompt_unread request=r-17 path={CHAT}"]


def test_a_body_nested_without_end_is_no_error() -> None:
    """Depth is a client's to choose."""
    deep: Any = "x"
    for _ in range(5000):
        deep = [deep]
    for name in FIELDS:
        assert prompts().ask(CHAT, {}, {"messages": [USER], name: deep}).tokens >= 1
        assert prompts().ask("/v1/completions", {}, {name: deep}).tokens >= 1


def test_the_bytes_of_a_token_are_learnt() -> None:
    """Estimates follow what answers say; an expected answer is at most as long as is allowed."""
    learning = prompts()
    body = {"prompt": "x" * 6000, "max_tokens": 90}
    assert learning.ask("/v1/completions", {}, body).tokens == 1500
    for _ in range(500):
        learning.learn(6000, 2000, 120)
        learning.learn(6000, 60_000)  # images
    found = learning.ask("/v1/completions", {}, body)
    assert found.tokens == pytest.approx(2000, rel=0.01) and found.piece_tokens == pytest.approx(512 / 3, rel=0.01)
    assert found.answer_tokens == 90
    assert learning.ask("/v1/completions", {}, {"prompt": [1, 2, 3]}).tokens == 3


@pytest.mark.parametrize("kind", ["byte-level", "byte-level with NFC", "llama", "unigram, always"])
def test_what_was_computed_is_found_again(kind: str) -> None:
    """Blocks of a prompt's tokens, as the engine tells of them, hold the pieces that the next request asks for."""
    tokenizer, table = made(kind)
    asking = prompts(table=table)
    for path, body, text, is_whole in (
        ("/v1/completions", {"prompt": LONG}, LONG, True),
        (CHAT, {"messages": [SYSTEM]}, f"<s><|im_start|>system\n{LONG}<|im_end|>\n<|im_start|>assistant\n", False),
    ):
        ids = tokenizer.encode(text, add_special_tokens=is_whole).ids
        blocks = len(ids) // 16
        event = Stored(
            block_hashes=list(range(blocks)), token_ids=ids[: 16 * blocks], block_size=16, extra_keys=[None] * blocks
        )
        told = Blocks(table.join, asking.roots.of_engine).store(event)
        found = list(asking.ask(path, {}, body).keys)
        assert told is not None and told[0] is Medium.GPU
        assert len(told[1]) >= len(found) - 1 > 0 and told[1] == found[: len(told[1])]


def test_a_models_directory_is_read(tmp_path: Path) -> None:
    """Template and tokens as they lie in a model's directory, the template's own file first."""
    made("byte-level")[0].save(str(tmp_path / "tokenizer.json"))
    named = '[{"name": "default", "template": "{{ bos_token }}"}, {"name": "tool_use", "template": "tools"}]'
    (tmp_path / "tokenizer_config.json").write_text(f'{{"chat_template": {named}, "bos_token": {{"content": "<b>"}}}}')
    template = ChatTemplate.load(tmp_path)
    assert template is not None and template.render([USER], {}) == "<b>"
    assert template.render([USER], {"tools": [{}]}) == "tools"
    (tmp_path / "chat_template.jinja").write_text(CHATML)
    assert Prompts.load(tmp_path).ask(CHAT, {}, {"messages": [SYSTEM]}).keys
    with pytest.raises(ConfigError, match=r"tokenizer\.json"):
        Prompts.load(tmp_path / "none")


@pytest.mark.parametrize("needs_tokens", [False, True])
def test_a_model_that_can_not_be_followed_stops_no_router(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, *, needs_tokens: bool
) -> None:
    """A template that does not compile and a tokenizer that changes text are named, and prompts still have keys."""
    tokenizer = Tokenizer.from_str(made("byte-level")[0].to_str())  # other tests are given the same one
    tokenizer.normalizer = normalizers.Lowercase()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "chat_template.jinja").write_text("{% foreign_tag %}")
    asking = Prompts.load(tmp_path, needs_tokens=needs_tokens)
    said = [record.message.split()[0] for record in caplog.records]
    assert said == ["template_not_followed", "tokens_not_followed"]
    first, longer = (asking.ask(CHAT, {}, {"messages": messages}) for messages in ([SYSTEM], [SYSTEM, USER]))
    assert first.keys and list(longer.keys)[: len(first.keys) - 1] == list(first.keys)[:-1]
    assert asking.join([1, 2, 3]) is not None and not asking.failed


def test_a_long_prompt_costs_little() -> None:
    """220 KB take few operations for each piece, and twice the text not much more than twice as many."""
    text = random.Random(1).randbytes(220_000).hex()
    asking = prompts()

    def asked(length: int) -> int:
        body = {"messages": [{"role": "user", "content": text[:length]}]}
        asking.ask(CHAT, {}, body)  # a template is compiled once
        return operations(lambda: asking.ask(CHAT, {}, body))

    pieces = 220_000 // PIECE_BYTES
    assert asked(220_000) < 10 * pieces
    assert asked(440_000) < 2.1 * asked(220_000)


def test_empty_texts_of_a_list_are_left_out() -> None:
    """The engine joins the others; a template that takes lists gets all of them."""
    parts = [{"type": "text", "text": text} for text in ("", LONG, "", "end")]
    body = {"messages": [{"role": "user", "content": parts}]}
    assert keys(body) == keys({"messages": [{"role": "user", "content": f"{LONG}\nend"}]})


def test_calls_are_written_in_the_engines_order() -> None:
    """A template that writes a call as it is has its arguments first, whatever order the client sent."""
    source = "{% for message in messages %}{{ message.content }}{{ message.tool_calls | tojson }}{% endfor %}"
    call = {"type": "function", "function": {"name": "f", "arguments": '{"b": 1, "a": 2}'}, "id": "x"}
    text = ChatTemplate(source, {}).render([{"role": "assistant", "content": "", "tool_calls": [call]}], {})
    assert text == '[{"id": "x", "function": {"arguments": {"b": 1, "a": 2}, "name": "f"}, "type": "function"}]'


def test_a_short_prompt_of_long_characters_has_pieces() -> None:
    """Fewer characters than a piece has bytes may still fill one."""
    assert keys({"messages": [{"role": "user", "content": "\u6f22" * (PIECE_BYTES // 3)}]})
