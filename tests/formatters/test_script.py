"""`model.py`: how it is loaded, what of it is called, and with what."""

import json
import os
import sys
import textwrap
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from hotspan.core.errors import ConfigError, FormatterError
from hotspan.formatters import Formatters, input_formatter, load_formatters
from tests.formatters.conftest import Write

Djl = Callable[[], dict[str, ModuleType]]

DJL = """
    from djl_python.input_parser import input_formatter
    from djl_python.output_formatter import output_formatter
"""
COUNTING = (
    DJL
    + """
    from pathlib import Path
    log = Path(__file__).with_name("log")
    log.write_text((log.read_text() if log.exists() else "") + "x")
    calls = []

    @input_formatter
    def first(payload):
        calls.append(payload["inputs"])
        return payload

    @output_formatter
    def second(answer):
        return {"calls": calls}
"""
)


def loaded(base: Path | None = None, is_secure: bool = False, tokenizer: Any = None, **adapters: Path) -> Formatters:
    return load_formatters(base, adapters, is_secure=is_secure, tokenizer=tokenizer)


def marking(text: str) -> str:
    return (
        DJL
        + f"""
    @input_formatter
    def f(payload):
        return {{"inputs": {text!r} + payload["inputs"]}}
"""
    )


@pytest.fixture
def djl_modules() -> Iterator[Djl]:
    """What is imported of djl_python, of which nothing is when the test begins."""

    def imported() -> dict[str, ModuleType]:
        return {name: module for name, module in sys.modules.items() if name.partition(".")[0] == "djl_python"}

    before = imported()
    for name in before:
        del sys.modules[name]
    yield imported
    for name in imported():
        del sys.modules[name]
    sys.modules.update(before)


async def test_executed_once(write: Write) -> None:
    """One execution per directory, however many phases and adapters use it; its functions share their globals."""
    formatters = loaded(write(model=COUNTING), a=write(), b=write("b", model=COUNTING))
    formatters.add("c", write("b"))
    await formatters.input("b", {"inputs": "of b"}, {})
    await formatters.input("c", {"inputs": "of c"}, {})
    assert await formatters.output("c", {}) == {"calls": ["of b", "of c"]}
    assert await formatters.output(None, {}) == {"calls": []}
    assert (write() / "log").read_text() == (write("b") / "log").read_text() == "x"


async def test_adapter_overrides_base_by_phase(write: Write) -> None:
    """An adapter's input formatter stands in the base's place, while answers still go through the base's."""
    base = marking("base ") + "    @output_formatter\n    def g(answer):\n        return 'out'\n"
    formatters = loaded(write(model=base), a=write("a", model=marking("a ")), plain=write("plain"))
    inputs = [(await formatters.input(name, {"inputs": "x"}, {}))["inputs"] for name in (None, "", "a", "plain", "new")]
    assert inputs == ["base x", "base x", "a x", "base x", "base x"]
    assert await formatters.output("a", {}) == "out"
    assert formatters.has_input("a") and formatters.has_output("a")
    formatters.remove("a")
    assert await formatters.input("a", {"inputs": "x"}, {}) == {"inputs": "base x"}


async def test_without_formatters() -> None:
    """Where there is none, payloads and answers are untouched."""
    formatters = loaded()
    payload, answer = {"inputs": "x"}, b"bytes"
    assert not formatters.has_input(None) and not formatters.has_output("a")
    assert await formatters.input("a", payload, {}) is payload
    assert await formatters.output(None, answer) is answer


async def test_names_that_look_alike(write: Write) -> None:
    """Adapters a-b, a.b and a_b have modules of their own."""
    formatters = load_formatters(
        None, {name: write(name, model=marking(name)) for name in ("a-b", "a.b", "a_b")}, is_secure=False
    )
    for name in ("a-b", "a.b", "a_b"):
        assert await formatters.input(name, {"inputs": ""}, {}) == {"inputs": name}


async def test_neighbours(write: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    """What model.py imports from its directory is its own, though others have modules of the same name."""
    monkeypatch.setitem(sys.modules, "wording", ModuleType("wording"))
    code = DJL + "    import wording\n    @input_formatter\n    def f(payload):\n        return {'x': wording.WORD}\n"
    a = write("a", model=code, wording="WORD = 'a'")
    b = write("b", model=code, wording="WORD = 'b'")
    before, path, finders = set(sys.modules), list(sys.path), list(sys.meta_path)
    formatters = loaded(a=a, b=b, shares_b=b)
    assert [await formatters.input(name, {}, {}) for name in ("a", "b")] == [{"x": "a"}, {"x": "b"}]
    assert (sys.path, sys.meta_path) == (path, finders)
    assert not hasattr(sys.modules["wording"], "WORD")
    for remaining, removed in ((2, "a"), (1, "b"), (1, "shares_b"), (0, "shares_b")):
        own = [name for name in sys.modules.keys() - before if name.startswith("hotspan_model_py_")]
        assert len(own) == remaining
        formatters.remove(removed)


async def test_neighbours_are_hidden_from_others(write: Write) -> None:
    """What other threads import while a model.py loads is what they would import otherwise."""
    code = (
        DJL
        + """
    import threading, wording
    seen = []
    def look():
        try:
            import wording_too
            seen.append("found")
        except ImportError:
            seen.append("hidden")
    thread = threading.Thread(target=look)
    thread.start()
    thread.join()
    look()
    @input_formatter
    def f(payload):
        return {"seen": seen}
"""
    )
    formatters = loaded(write(model=code, wording="", wording_too=""))
    assert await formatters.input(None, {}, {}) == {"seen": ["hidden", "found"]}


@pytest.mark.parametrize("is_imported", [False, True])
async def test_another_djl_python(
    write: Write, djl_modules: Djl, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, is_imported: bool
) -> None:
    """LMI's own djl_python, broken and first on the path, imported or not, is not in the way, and not touched."""
    theirs = tmp_path / "lmi" / "djl_python"
    theirs.mkdir(parents=True)
    (theirs / "__init__.py").write_text("")
    for module in ("input_parser", "output_formatter"):
        (theirs / f"{module}.py").write_text("raise ImportError('no torch here')")
    monkeypatch.syspath_prepend(str(theirs.parent))
    if is_imported:
        import_module("djl_python")
    before = djl_modules()
    formatters = loaded(write(model=marking("hello ")))
    assert await formatters.input(None, {"inputs": "x"}, {}) == {"inputs": "hello x"}
    assert djl_modules() == before
    assert import_module("djl_python").__file__ == str(theirs / "__init__.py")


async def test_marks_of_another_djl_python(write: Write) -> None:
    """The marks that LMI's own decorators leave are understood, wherever a file got them from."""
    code = """
        from functools import wraps
        def own(f):
            f.is_input_formatter = True
            return f
        def logged(f):
            @wraps(f)
            def g(*args, **kwargs):
                return f(*args, **kwargs)
            return g
        @logged
        @own
        def f(payload):
            return {"wrapped": payload}
    """
    assert await loaded(write(model=code)).input(None, {}, {}) == {"wrapped": {}}


def test_decorators_leave_functions_alone() -> None:
    """A decorated function is the same function, to be tested like any other; djl_python's decorators are hotspan's."""
    import djl_python.input_parser
    from djl_python.encode_decode import decode

    assert djl_python.input_parser.input_formatter is input_formatter
    assert input_formatter(decode) is decode
    assert decode({"a": 1}) == decode(b'{"a": 1}', "application/json") == {"a": 1}
    with pytest.raises(ValueError, match="send JSON"):
        decode(b"a,b", "text/csv")


async def test_lmi_documented_example(write: Write) -> None:
    """The imports and signature of LMI's documentation work, and so does a decorator that the file makes itself."""
    code = """
        from djl_python.input_parser import input_formatter
        from djl_python.encode_decode import decode

        def own(f):
            f.is_output_formatter = True
            return f

        @input_formatter
        def custom(decoded_payload: dict, tokenizer=None, **kwargs) -> dict:
            decoded_payload["inputs"] = decoded_payload.pop("inputPrompt") + tokenizer + kwargs["headers"]["x-a"]
            return decoded_payload

        @own
        def out(response_data: dict) -> dict:
            response_data["custom"] = 1
            return response_data
    """
    formatters = loaded(write(model=code), tokenizer="-tok-")
    assert await formatters.input(None, {"inputPrompt": "hi"}, {"X-A": "header"}) == {"inputs": "hi-tok-header"}
    assert await formatters.output(None, {"generated_text": "t"}) == {"generated_text": "t", "custom": 1}


@pytest.mark.parametrize("answer", ["answer.choices[0].text", "answer['choices'][0]['text']"])
async def test_answer_is_dict_and_object(write: Write, answer: str) -> None:
    """A formatter written for vLLM's objects and one written for dicts read and set the same fields."""
    code = (
        DJL
        + f"""
    @output_formatter
    def g(answer, **kwargs):
        if hasattr(answer, "model_dump"):
            answer.by = {answer}.upper()
        return answer
"""
    )
    formatters = loaded(write(model=code))
    result = await formatters.output(None, {"choices": [{"text": "t"}]})
    assert result == {"choices": [{"text": "t"}], "by": "T"} and type(result) is dict
    with pytest.raises(FormatterError, match=r"no choices|'choices'"):
        await formatters.output(None, {"id": "1"})


async def test_sagemaker_functions(write: Write) -> None:
    """input_fn gets the body and its type, output_fn the answer and what the client accepts."""
    code = """
        import json
        def input_fn(input_data, content_type):
            return {**json.loads(input_data), "type": content_type}
        def output_fn(prediction, accept):
            return json.dumps([prediction, accept])
        def predict_fn(data, model):
            raise AssertionError
    """
    formatters = loaded(write(model=code))
    assert await formatters.input(None, {"a": "é"}, {"Content-Type": "text/x"}) == {"a": "é", "type": "text/x"}
    assert await formatters.input(None, {}, {}) == {"type": "application/json"}
    assert json.loads(str(await formatters.output(None, {"b": 1}, {"ACCEPT": "a/b"}))) == [{"b": 1}, "a/b"]
    assert json.loads(str(await formatters.output(None, "chunk"))) == ["chunk", "application/json"]


async def test_keywords_as_accepted(write: Write) -> None:
    """A formatter gets what its signature names and nothing else; a callable object is as good as a function."""
    code = (
        DJL
        + """
    @input_formatter
    def f(headers, *, properties):
        return {"value": headers, "properties": dict(properties)}

    class G:
        def __call__(self, answer, tokenizer):
            return tokenizer
    g = output_formatter(G())
    same = g
"""
    )
    formatters = loaded(write(model=code), tokenizer="tok")
    assert await formatters.input(None, {"a": 1}, {"B": "c"}) == {"value": {"a": 1}, "properties": {"b": "c"}}
    assert await formatters.output(None, {}) == "tok"


async def test_update(write: Write) -> None:
    """An adapter that is added again has what its file says now, for all that share it; a bad one changes nothing."""
    formatters = loaded(a=write("a", model=marking("1")), b=write("a"))
    write("a", model=marking("2"))
    formatters.add("a", write("a"))
    assert [await formatters.input(name, {"inputs": ""}, {}) for name in ("a", "b")] == [{"inputs": "2"}] * 2
    write("a", model="1 / 0")
    with pytest.raises(ConfigError, match="ZeroDivisionError"):
        formatters.add("a", write("a"))
    assert await formatters.input("a", {"inputs": ""}, {}) == {"inputs": "2"}


async def test_update_within_a_second(write: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file of equal size and time stamp is read anew, with the module beside it: no cached bytecode is believed."""
    monkeypatch.setattr(sys, "dont_write_bytecode", False)
    for text in ("1", "2"):
        code = marking(text).replace("return {", "return {'beside': beside.X} | {")
        directory = write(model="import beside\n" + textwrap.dedent(code), beside=f"X = {text}")
        for file in directory.glob("*.py"):
            os.utime(file, (10**9, 10**9))
        formatters = loaded(directory)
        assert await formatters.input(None, {"inputs": ""}, {}) == {"beside": int(text), "inputs": text}
    assert not (directory / "__pycache__").exists()


@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("x = (", r"model\.py can't be loaded: it failed in line 1 with SyntaxError"),
        ("\nraise KeyError('k')", "in line 2 with KeyError: 'k'. Correct it"),
        ("import sys; sys.exit(3)", "SystemExit: 3"),
        ("import not_installed_xyz", "not_installed_xyz.*Install what it imports.*requirements.txt"),
        ("from djl_python.request_io import TextInput", "formatters take and return dicts"),
        ("from djl_python import Input", "formatters take and return dicts"),
        ("def handle(inputs): ...", "function handle, which would answer in the engine's place"),
        (DJL + "    @input_formatter\n    def f(x): ...\n    @input_formatter\n    def g(x): ...", "f and g: keep one"),
        (DJL + "    @output_formatter\n    def f(x): ...\n    def output_fn(x, y): ...", "f and output_fn: keep one"),
        (DJL + "    @input_formatter\n    def f(x, y): ...", "f that nobody can call: .*'y'"),
        (DJL + "    @input_formatter\n    def f(): ...", "nobody can call"),
        ("def input_fn(data): ...", "input_fn that nobody can call.*input_data and content_type"),
    ],
)
def test_files_that_cannot_be_used(write: Write, code: str, message: str) -> None:
    """The error names the file and what to do, and nothing of it stays behind."""
    directory = write(model=code)
    before = set(sys.modules)
    with pytest.raises(ConfigError, match=message) as refused:
        loaded(directory)
    assert str(directory / "model.py") in str(refused.value)
    assert not {name for name in set(sys.modules) - before if "model_py" in name or "djl" in name}


def test_nothing_to_call_is_said(write: Write, caplog: pytest.LogCaptureFixture) -> None:
    """A model.py without formatters, or with functions that hotspan never calls, is warned of."""
    loaded(write(model="x = 1"), a=write("a", model="def input_fn(x, y): ...\ndef predict_fn(x, y): ..."))
    assert "formatters=none never_called=" in caplog.text and "formatters=input never_called=predict_fn" in caplog.text


async def test_secure_mode(write: Write) -> None:
    """No code is executed, at the start or when an adapter comes; formatter.yaml works."""
    code = "from pathlib import Path\nPath(__file__).with_name('executed').touch()"
    declared = write("declared", yaml="input: {prefix: '> '}")
    scripted = write("scripted", model=code)
    with pytest.raises(ConfigError, match=r"model\.py is code, and secure mode"):
        loaded(scripted, is_secure=True)
    formatters = loaded(declared, is_secure=True)
    with pytest.raises(ConfigError, match="secure mode"):
        formatters.add("a", scripted)
    assert not (scripted / "executed").exists()
    assert await formatters.input(None, {"inputs": "x"}, {}) == {"inputs": "> x"}
    loaded(scripted)
    assert (scripted / "executed").exists()


@pytest.mark.parametrize("name", ["model.py", "formatter.yaml"])
def test_file_that_leads_elsewhere(write: Write, name: str) -> None:
    """A link out of the directory is refused and not followed; one within it is fine."""
    outside = write("outside", model="1 / 0", yaml="nonsense")
    inside = write("inside")
    (inside / name).symlink_to(outside / name)
    with pytest.raises(ConfigError, match="out of its directory"):
        loaded(a=inside)
    (inside / name).unlink()
    (inside / "real").write_text("" if name == "model.py" else "input: {prefix: a}")
    (inside / name).symlink_to("real")
    loaded(a=inside)


def test_both_files(write: Write) -> None:
    """model.py and formatter.yaml may share the phases between them, and may not both have one."""
    directory = write(model=marking("x"), yaml="output: {metadata: {a: 1}}")
    formatters = loaded(directory)
    assert formatters.has_input(None) and formatters.has_output(None)
    before = {name for name in sys.modules if "model_py" in name}
    with pytest.raises(ConfigError, match=r"two input formatters, in model\.py and in formatter\.yaml: keep one"):
        loaded(write(yaml="input: {prefix: a}"))
    assert {name for name in sys.modules if "model_py" in name} == before


def test_no_directory(tmp_path: Path) -> None:
    """A directory that is not there is an error, and so is a time limit that nothing can keep."""
    with pytest.raises(ConfigError, match="is no directory"):
        loaded(a=tmp_path / "nowhere")
    with pytest.raises(ConfigError, match="more than 0"):
        load_formatters(None, {}, is_secure=False, timeout_s=0)
