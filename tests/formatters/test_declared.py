"""`formatter.yaml`: what its rules do, and what is said of a file that can't work."""

import copy
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from jinja2.exceptions import SecurityError

from hotspan.core.errors import ConfigError, FormatterError
from hotspan.formatters import Formatters, load_formatters
from hotspan.formatters.formatter import Context
from hotspan.formatters.rules import INPUT_VARIABLES, InputRules, Template, answer_text, with_text
from hotspan.testing.clock import SimulatedClock
from tests.formatters.conftest import Write

CONTEXT = Context("a", {"x-request-id": "r-1"}, None, 0.0)

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)
NAME = st.sampled_from(["temperature", "top_p", "stop"])
TEXT = st.text() | st.lists(st.text(), max_size=3)
MESSAGE = st.fixed_dictionaries(
    {"role": st.sampled_from(["system", "user", "assistant"])},
    optional={"content": TEXT | st.lists(st.fixed_dictionaries({"type": st.just("text"), "text": st.text()}) | JSON)},
)
PAYLOAD = st.fixed_dictionaries(
    {},
    optional={
        "inputs": TEXT,
        "prompt": TEXT,
        "messages": st.lists(MESSAGE, max_size=4) | JSON,
        "parameters": st.dictionaries(NAME, JSON),
        "temperature": JSON,
    },
)


def loaded(directory: Path, clock: SimulatedClock | None = None) -> Formatters:
    return load_formatters(directory, {}, is_secure=True, clock=clock)


@pytest.mark.parametrize(
    ("payload", "expected"),
    [
        ({"inputs": "x", "n": 1}, {"inputs": "<x>", "n": 1}),
        ({"inputs": ["x", "y"]}, {"inputs": ["<x>", "<y>"]}),
        ({"prompt": "x", "inputs": "y"}, {"prompt": "<x>", "inputs": "y"}),
        (
            {"messages": [{"role": "user", "content": "1"}, {"role": "user", "content": "2"}, {"role": "tool"}]},
            {"messages": [{"role": "user", "content": "1"}, {"role": "user", "content": "<2>"}, {"role": "tool"}]},
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url"}, {"text": "a"}, {"text": "b"}]}]},
            {"messages": [{"role": "user", "content": [{"type": "image_url"}, {"text": "<a>"}, {"text": "b"}]}]},
        ),
        ({"messages": [{"role": "system", "content": "s"}]}, {"messages": [{"role": "system", "content": "s"}]}),
        ({"requestType": "NEW_SESSION"}, {"requestType": "NEW_SESSION"}),
    ],
)
async def test_prefix_and_suffix(write: Write, payload: dict[str, Any], expected: dict[str, Any]) -> None:
    """They go around each text of prompt or inputs, or around the last user message, and nowhere else."""
    formatters = loaded(write(yaml="input: {prefix: '<', suffix: '>'}"))
    assert await formatters.input(None, payload, {}) == expected


@pytest.mark.parametrize("field", ["inputs", "prompt"])
async def test_text_that_is_none(write: Write, field: str) -> None:
    """Token ids get no prefix silently: the client is told."""
    with pytest.raises(FormatterError, match=f"refuses this request: {field} is neither a text") as refused:
        await loaded(write(yaml="input: {prefix: a}")).input(None, {field: [1, 2]}, {})
    assert (refused.value.status, refused.value.name) == (400, "base/formatter.yaml:input")


@given(PAYLOAD)
def test_text_is_all_that_changes(payload: dict[str, Any]) -> None:
    """Undoing the change to a payload's text gives the payload back, which itself was never touched."""
    before = copy.deepcopy(payload)
    changed = with_text(payload, lambda text: f"<{text}>")
    assert payload == before
    assert with_text(changed, lambda text: text[1:-1] if text[:1] + text[-1:] == "<>" else "lost") == before


@given(PAYLOAD, st.dictionaries(NAME, JSON))
def test_defaults_never_win(payload: dict[str, Any], defaults: dict[str, Any]) -> None:
    """What the client sent stays, what it did not send is as the defaults say, where its schema has parameters."""
    before = copy.deepcopy(payload)
    result = InputRules(defaults=defaults).apply(payload, CONTEXT)
    assert payload == before
    if not payload.keys() & {"inputs", "prompt", "messages"}:
        assert result == payload
        return
    is_lmi = "inputs" in payload
    given_values = payload.get("parameters", {}) if is_lmi else payload
    assert (result.get("parameters", {}) if is_lmi else result) == {**defaults, **given_values}


async def test_defaults_are_copied(write: Write) -> None:
    """A request that changes a default changes no other's."""
    formatters = loaded(write(yaml="input: {defaults: {stop: [a]}}"))
    first = await formatters.input(None, {"prompt": "x"}, {})
    first["stop"].append("b")
    assert (await formatters.input(None, {"prompt": "x"}, {}))["stop"] == ["a"]
    with pytest.raises(FormatterError, match="parameters is no object"):
        await formatters.input(None, {"inputs": "x", "parameters": [1]}, {})


async def test_input_template(write: Write) -> None:
    """A template has the text, the payload and the request; what it asks for in vain is the client's error."""
    yaml = "input: {template: '{{ payload.topic }}/{{ text }}/{{ request_id }}/{{ adapter }}', prefix: '> '}"
    formatters = loaded(write(yaml=yaml))
    formatters.add("a", write("a", yaml=yaml))
    payload = {"inputs": "x", "topic": "t"}
    assert await formatters.input("a", payload, {"X-Request-Id": "r"}) == payload | {"inputs": "> t/x/r/a"}
    with pytest.raises(FormatterError, match=r"asks for what is missing: .*topic") as refused:
        await formatters.input(None, {"inputs": "x"}, {})
    assert refused.value.status == 400


async def test_templates_reach_nothing(write: Write) -> None:
    """A template can neither change the payload nor get at Python behind it."""
    formatters = loaded(write(yaml="input: {template: \"{{ payload.update({'a': 1}) }}\"}"))
    with pytest.raises(FormatterError, match=r"SecurityError.*unsafe"):
        await formatters.input(None, {"inputs": "x"}, {})
    template = Template("{{ payload.__class__.__mro__ }}", INPUT_VARIABLES)
    with pytest.raises(SecurityError, match="unsafe"):
        template.render({"payload": {}})


async def test_schema_of_payloads(write: Write) -> None:
    """What does not fit is refused with the place and the reason, before defaults and templates add to it."""
    yaml = """
    input:
      defaults: {max_new_tokens: 500}
      schema:
        $defs: {few: {type: integer, maximum: 100}}
        required: [inputs]
        properties: {parameters: {properties: {max_new_tokens: {$ref: "#/$defs/few"}}}}
    """
    formatters = loaded(write(yaml=yaml))
    result = await formatters.input(None, {"inputs": "x"}, {})
    assert result == {"inputs": "x", "parameters": {"max_new_tokens": 500}}
    message = r"refuses this request: \$\.parameters\.max_new_tokens: 101 is greater than the maximum of 100"
    with pytest.raises(FormatterError, match=message) as refused:
        await formatters.input(None, {"inputs": "x", "parameters": {"max_new_tokens": 101}}, {})
    assert refused.value.status == 400
    with pytest.raises(FormatterError, match="'inputs' is a required property"):
        await formatters.input(None, {}, {})


async def test_metadata(write: Write) -> None:
    """Metadata is added beside what an answer has of it; variables are filled in at any depth, $$ is a dollar."""
    yaml = "output: {metadata: {id: $request_id, at: {when: [$time]}, who: $adapter, price: $$5, n: 1}}"
    clock = SimulatedClock()
    clock.advance(1.5)
    formatters = loaded(write(yaml=yaml), clock)
    answer = {"generated_text": "t", "metadata": {"own": 1}}
    result = await formatters.output("a", answer, {"X-Amzn-SageMaker-Inference-Id": "r"})
    assert isinstance(result, dict)
    assert result["metadata"].pop("at") == {"when": ["2023-11-14T22:13:21.500+00:00"]}
    assert result == {"generated_text": "t", "metadata": {"own": 1, "id": "r", "who": "a", "price": "$5", "n": 1}}
    assert answer == {"generated_text": "t", "metadata": {"own": 1}}
    answered = await formatters.output(None, {"id": "cmpl-7"})
    assert isinstance(answered, dict) and answered["metadata"]["id"] == "cmpl-7"
    assert answered["metadata"]["who"] is None


async def test_rename(write: Write) -> None:
    """Fields change their names, swaps included; an answer that would lose a field is an error."""
    formatters = loaded(write(yaml="output: {rename: {a: b, b: a, metadata: info, gone: x}, metadata: {m: 1}}"))
    assert await formatters.output(None, {"a": 1, "b": 2, "c": 3}) == {"b": 1, "a": 2, "c": 3, "info": {"m": 1}}
    with pytest.raises(FormatterError, match="a name that another has") as failed:
        await formatters.output(None, {"a": 1, "info": 2})
    assert failed.value.status == 500


@pytest.mark.parametrize(
    ("template", "answer", "expected"),
    [
        ("A: {{ text }}", {"generated_text": "t"}, "A: t"),
        ('{"answer": {{ text | tojson }}}', {"choices": [{"text": 'say "x"'}]}, {"answer": 'say "x"', "metadata": {}}),
        ("{}", {}, {"metadata": {}}),
        ("{{ output.index }}", {"index": 3}, "3"),
        ("[{{ text }}]", "chunk", "[chunk]"),
    ],
)
async def test_output_template(write: Write, template: str, answer: Any, expected: Any) -> None:
    """A template gives the whole answer: an object if it rendered one, which further rules apply to, a text if not."""
    more = "" if isinstance(expected, str) else "metadata: {x: $adapter}\n"
    formatters = loaded(write(yaml=f"output:\n  template: {json.dumps(template)}\n  {more}"))
    result = await formatters.output(None, answer)
    if isinstance(result, dict):
        assert result["metadata"] == {"x": None}
        result = result | {"metadata": {}}
    assert result == expected


@pytest.mark.parametrize("answer", ["text", b"bytes"])
async def test_answers_that_are_no_objects(write: Write, answer: str | bytes) -> None:
    """Metadata can't be added to a text: an error that says so, not a silent loss."""
    with pytest.raises(FormatterError, match="need an object, and the answer is a text"):
        await loaded(write(yaml="output: {metadata: {a: 1}}")).output(None, answer)


async def test_schema_of_answers(write: Write) -> None:
    """An answer that does not fit what was promised is the server's error, and is not sent."""
    formatters = loaded(write(yaml="output: {rename: {generated_text: a}, schema: {required: [a]}}"))
    assert await formatters.output(None, {"generated_text": "t"}) == {"a": "t"}
    with pytest.raises(FormatterError, match="'a' is a required property") as failed:
        await formatters.output(None, {})
    assert failed.value.status == 500


@pytest.mark.parametrize(
    ("answer", "text"),
    [
        ({"token": {"text": "last"}, "generated_text": "all at last"}, "last"),
        ({"choices": [{"delta": {"content": "d"}}]}, "d"),
        ({"choices": [{"message": {"content": "m"}}]}, "m"),
        ({"choices": [{"message": {"content": None}}]}, ""),
        ({"choices": []}, ""),
        (b"", ""),
    ],
)
def test_text_of_answers(answer: Any, text: str) -> None:
    """The text is found in each schema's answers and chunks."""
    assert answer_text(answer) == text


@given(JSON)
def test_text_of_anything(answer: Any) -> None:
    """Whatever an answer looks like, its text is a text."""
    assert isinstance(answer_text(answer), str)
    assert isinstance(answer_text({"choices": [answer], "token": answer, "generated_text": answer}), str)


@pytest.mark.parametrize(
    ("yaml", "message"),
    [
        ("", "is empty: write a section input or output"),
        ("- input", "has no names in the file: write input, output"),
        ("inputs: {}", "unknown 'inputs' in the file: did you mean input?"),
        ("input: text", "has no names in input: write schema"),
        ("input: {sufix: a}", "unknown 'sufix' in input: did you mean suffix?"),
        ("input: {prefix: 3}", "has input.prefix 3: write a text, in quotes"),
        ("input: {defaults: [a]}", r"has input.defaults \['a'\]: write names with values"),
        ("input: {prefix: a, prefix: b}", "line 1: 'prefix' stands here twice"),
        ("input:\n  prefix: [", "is no YAML: line 2"),
        ("input: {defaults: {since: 2026-01-01}}", "holds what JSON can't: .*date.*quotes"),
        ("input: {defaults: {t: .nan}}", "holds what JSON can't"),
        ("input: {defaults: &a {b: *a}}", "holds what JSON can't"),
        ("input: {prefix: !!python/name:os.system a}", "is no YAML: line 1"),
        ("input: {template: '{{ text'}", "wrong input.template: it is no template: line 1"),
        ("input: {template: '{{ txt }}'}", "wrong input.template: it asks for txt, and there is only adapter"),
        ("input: {schema: {type: strin}}", r"wrong input.schema: it is no JSON schema: \$.type"),
        ("input: {schema: {$ref: 'http://a/b'}}", "it refers to http://a/b, which is not in it"),
        ("output: {schema: {anyOf: [{$ref: '#/x'}]}}", "it refers to #/x, which is not in it"),
        ("output: {metadata: {a: [$request]}}", r"it names \$request: did you mean \$request_id\?"),
        ("output: {rename: {a: 1}}", "it has 1 as the new name of a: write a text"),
        ("output: {rename: {a: c, b: c}}", "it gives several fields the name c"),
        ("output: {prefix: a}", "unknown 'prefix' in output: it may be template"),
    ],
)
def test_files_that_cannot_work(write: Write, yaml: str, message: str) -> None:
    """Each is refused at the start, with the file, the key, and what to write."""
    directory = write(yaml=yaml)
    with pytest.raises(ConfigError, match=message) as refused:
        loaded(directory)
    assert str(refused.value).startswith(str(directory / "formatter.yaml"))


def test_files_that_cannot_be_read(write: Write) -> None:
    """A file in another encoding, a directory in its place, and the other spelling of its name are told."""
    directory = write(yaml="")
    (directory / "formatter.yaml").write_bytes(b"input: {prefix: '\xff'}")
    with pytest.raises(ConfigError, match="UTF-8"):
        loaded(directory)
    (directory / "formatter.yaml").unlink()
    (directory / "formatter.yaml").mkdir()
    with pytest.raises(ConfigError, match=r"can't be read \(Is a directory\)"):
        loaded(directory)
    (directory / "formatter.yaml").rmdir()
    (directory / "formatter.yml").touch()
    with pytest.raises(ConfigError, match=r"formatter\.yml is not read: name it formatter\.yaml"):
        loaded(directory)


async def test_sections_without_rules(write: Write) -> None:
    """An empty section is allowed and overrides the base's formatter with one that changes nothing."""
    formatters = loaded(write(yaml="input: {prefix: a}"))
    formatters.add("plain", write("plain", yaml="input:"))
    assert await formatters.input("plain", {"inputs": "x"}, {}) == {"inputs": "x"}
    assert await formatters.input(None, {"inputs": "x"}, {}) == {"inputs": "ax"}
