"""Whatever a client writes, reading it costs a bounded number of steps and leaves a bounded number of bytes behind."""

import random
import re
import unicodedata
from functools import _lru_cache_wrapper
from importlib import import_module
from itertools import pairwise
from pathlib import Path
from pkgutil import walk_packages
from types import SimpleNamespace
from typing import Any

import orjson
import pytest
from tokenizers import AddedToken, Tokenizer, normalizers

import hotspan.http
import hotspan.router
from hotspan.http.errors import HttpError
from hotspan.http.json_size import MAX_CONTAINERS, MAX_FIELDS, MAX_VALUES, SLICE_BYTES, JsonLimit, check_json
from hotspan.http.upstream import Upstream
from hotspan.router import text, tokens
from hotspan.router.prompt import MAX_MESSAGES, MAX_NODES, MAX_TEXT
from hotspan.router.template import ChatTemplate
from hotspan.router.text import MAX_READ, Prompts
from hotspan.router.tokens import MAX_MARKS, MAX_NOT_ASCII, AddedTokens, normal_form
from hotspan.router.types import Owner
from tests.operations import counted, in_one_go

from .test_tokens import byte_level

LARGEST = MAX_READ
CHATML = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}"
    "{% for call in message.tool_calls or [] %}{{ call.function | tojson }}{% endfor %}<|im_end|>\n{% endfor %}"
)
CALL = '{"id":"1","type":"function","function":{"name":"f","arguments":"{}"}}'
MAX_SLICE_STEPS = 200
"""The same between two pauses."""

MAX_STEPS = 1_500_000
"""Lines of Python and calls of C for one body: less than a second."""


def filled(before: str, item: str, after: str, most: int = 1 << 62) -> bytes:
    """A body that is as large as what is read may be, of one item again and again, or `most` times."""
    times = min((LARGEST - len(before) - len(after)) // (len(item.encode()) + 1), most)
    return (before + ",".join([item] * times) + after).encode()


BODIES = {
    "empty messages": lambda: filled('{"messages":[', "{}", "]}"),
    "a million empty messages": lambda: filled('{"messages":[', '{"role":"user","content":""}', "]}", 1_000_000),
    "as many messages as are parsed": lambda: filled('{"messages":[', "{}", "]}", MAX_VALUES // 2 - 9),
    "131,000 messages": lambda: filled('{"messages":[', '{"role":"user"}', "]}", 131_000),
    "as many objects as are parsed": lambda: filled('{"messages":[{}],"x":[', "{}", "]}", MAX_NODES - 4),
    "one object more than is parsed": lambda: filled('{"messages":[{}],"x":[', "{}", "]}", MAX_NODES - 3),
    "fields": lambda: filled('{"messages":[{}],"x":{', '"abcdefgh":1', "}}", MAX_VALUES - 9),
    "as many messages as are read": lambda: filled('{"messages":[', '{"role":"user","content":"x"}', "]}", 4096),
    "500,000 tool calls": lambda: filled('{"messages":[{"role":"assistant","tool_calls":[', CALL, "]}]}", 500_000),
    "as many tool calls as are parsed": lambda: filled(
        '{"messages":[{"role":"assistant","tool_calls":[', CALL, "]}]}", MAX_VALUES // 6
    ),
    "as many tool calls as are read": lambda: filled(
        '{"messages":[{"role":"assistant","tool_calls":[', CALL, "]}]}", MAX_NODES // 12
    ),
    "arguments of empty lists": lambda: filled(
        '{"messages":[{"role":"assistant","tool_calls":[{"function":{"name":"f","arguments":"[', "[]", ']"}}]}]}'
    ),
    "parts": lambda: filled('{"messages":[{"role":"user","content":[', '{"type":"text","text":"x"}', "]}]}"),
    "images": lambda: filled('{"messages":[{"role":"user","content":[', '{"type":"image_url"}', "]}]}", 300_000),
    "chats": lambda: filled('{"messages":[', '[{"role":"user","content":"x"}]', "]}", 300_000),
    "tools": lambda: filled('{"messages":[{"role":"user","content":"x"}],"tools":[', "{}", "]}", 500_000),
    "documents": lambda: filled('{"messages":[{"role":"user","content":"x"}],"documents":[', "{}", "]}", 500_000),
    "settings": lambda: filled(
        '{"messages":[{"role":"user","content":"x"}],"chat_template_kwargs":{"x":[', "[]", "]}}", 500_000
    ),
    "items of a response": lambda: filled('{"input":[', '{"role":"user","content":"x"}', "]}", 300_000),
    "system parts": lambda: filled('{"system":[', '{"text":"x"}', '],"messages":[{}]}', 300_000),
    "prompts": lambda: filled('{"prompt":[', '"x"', "]}"),
    "tokens": lambda: filled('{"prompt":[', "1", "]}"),
    "as many tokens as are parsed": lambda: filled('{"prompt":[', "1", "]}", MAX_VALUES - 9),
    "one long message": lambda: filled('{"messages":[{"role":"user","content":"', "x" * 999, '"}]}'),
    "one long role": lambda: filled('{"messages":[{"content":"x","role":"', "x" * 999, '"}]}'),
    "long messages": lambda: filled(
        '{"messages":[', '{"role":"system","content":"' + "x" * 16_000 + '"}', "]}", MAX_MESSAGES
    ),
    "a long text": lambda: filled('{"prompt":"', "x" * 999, '"}'),
    "separators": lambda: filled('{"prompt":"', "##", '"}'),
    "added tokens": lambda: filled('{"prompt":"', "<|im_start|>", '"}', 300_000),
    "beginnings of added tokens": lambda: filled('{"prompt":"', "<|im_<|", '"}'),
    "spaces": lambda: filled('{"prompt":"', " " * 9999, '"}'),
    "marks": lambda: filled('{"prompt":"', "a" + "\u0315" * 32_000 + "\u0316" * 32_000, '"}'),
    "characters that grow": lambda: filled('{"prompt":"', "\ufdfa" * 99, '"}'),
    "nested": lambda: b'{"messages":' + b"[" * 1_000_000,
    "not JSON": lambda: b"{" + b'"' * (LARGEST - 1),
    "a long salt": lambda: filled('{"prompt":"' + "x" * 600 + '","cache_salt":"', "x" * 999, '"}'),
    "a long session": lambda: filled('{"prompt":"' + "x" * 600 + '","session_id":"', "x" * 999, '"}'),
    "a long model": lambda: filled('{"prompt":"' + "x" * 600 + '","model":"', "x" * 999, '"}'),
}
NO_PROMPTS = ("images", "settings", "a long salt", "a long session", "a long model", "one long role")
"""Bodies whose prompts are short."""

PATHS = {"items of a response": "/v1/responses", "system parts": "/v1/messages"}


@pytest.fixture(scope="module")
def reader() -> Prompts:
    """Reads prompts with everything that is there: a template, tokens, NFC, added tokens that take white space."""
    tokenizer = byte_level(form=normalizers.NFC())
    names = ["<|im_start|>", "<|im_end|>", *(f"<|reserved_{n}|>" for n in range(1000))]
    tokenizer.add_special_tokens([AddedToken(name, lstrip=True, rstrip=True, special=True) for name in names])
    made = Prompts(
        template=ChatTemplate(CHATML, {}),
        table=tokens.TokenTable(tokenizer),
        separators=["##"],
        owner_of=lambda headers: Owner("acme", b"mark"),
    )
    made.roots.is_salted = True
    return made


@pytest.mark.parametrize("name", BODIES)
def test_each_parser_has_a_bound(reader: Prompts, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """For the worst bodies of the largest size that is read the calls of functions are bounded; the text that is
    normalised, and each run of marks in it, too; and the length of what is not read counts for the queue.

    What a body holds is counted once, at most 64 KiB between two pauses. What holds more than 32,768 objects and
    lists, or 131,072 fields, is not parsed.
    """
    body = Watched(BODIES[name]())
    assert len(body) <= LARGEST
    sorted_marks = [0]

    def normalize(form: Any, part: str) -> str:
        runs = re.findall("[\u0300-\u036f]+", part)
        sorted_marks[0] += len(part) + sum(len(run) ** 2 for run in runs)
        return unicodedata.normalize(form, part)

    tokens._runs()
    monkeypatch.setattr(tokens, "unicodedata", SimpleNamespace(normalize=normalize))
    parsed = list[bytes]()

    def loads(given: bytes) -> Any:
        parsed.append(given)
        return orjson.loads(bytes(given))

    monkeypatch.setattr(text, "orjson", SimpleNamespace(**{**vars(orjson), "loads": loads}))
    path = PATHS.get(name, "/v1/completions" if b'"prompt"' in body[:12] else "/v1/chat/completions")
    with counted() as steps:
        slices, unread = [0], reader.unread

        def pause() -> None:
            slices.append(steps.count)

        ask = in_one_go(reader.read(path, {}, body), pause)
        slices.append(steps.count)
    between = [after - before for before, after in pairwise(slices)]
    assert max(between[:-1], default=0) < MAX_SLICE_STEPS and between[-1] < MAX_STEPS
    assert all(size <= SLICE_BYTES + 1 for size in body.looked_at)
    for each in parsed:
        check_json(each, JsonLimit(containers=MAX_NODES, fields=4 * MAX_NODES))
        assert len(slices) > len(body) // SLICE_BYTES
    assert len(parsed) <= 1 and reader.unread == unread + (not parsed or name in ("nested", "not JSON"))
    assert sorted_marks[0] <= MAX_NOT_ASCII * (MAX_MARKS + 1)
    assert len(ask.keys) <= 4 * MAX_TEXT // 512 + 1 and len(ask.sections) <= 20_000
    assert ask.tokens >= min(len(body), MAX_TEXT) // 32 or len(body) < 1 << 20 or name in NO_PROMPTS


class Watched(bytes):
    """A body that notes how much of it is looked at, or copied, in one go."""

    looked_at: list[int]

    def __new__(cls, content: bytes) -> "Watched":
        made = super().__new__(cls, content)
        made.looked_at = []
        return made

    def count(self, what: Any, begin: Any = 0, end: Any = None, /) -> int:
        self.looked_at.append(min(len(self), len(self) if end is None else end) - begin)
        return super().count(what, begin, end)

    def __getitem__(self, where: Any) -> Any:
        found = super().__getitem__(where)
        self.looked_at.append(len(found) if isinstance(found, bytes) else 1)
        return found


def test_normal_forms_are_those_of_unicode() -> None:
    """Text without long runs of marks is normalised as a whole; one with a long run up to before it."""
    rng = random.Random(1)
    characters = ["a", " ", "\u0301", "\u0316", "\u00e9", "\u6f22", "\ufb01", "\u1100", "\u1161", "\u11a8", "\u0f73"]
    characters += ["\U0001d15e", "\u304b", "\u3099", "\uff76", "\uff9e"]
    for form in ("NFC", "NFKC"):
        for _ in range(3000):
            words = "".join(rng.choices(characters, k=rng.randint(0, 20)))
            assert normal_form(words, form) == unicodedata.normalize(form, words)
            assert normal_form(f"x{words}.b" + "\u0315" * 20 + "\uff9e\u0316" * 7 + "c", form) == (
                unicodedata.normalize(form, f"x{words}.")
            )
        assert len(normal_form("\u6f22" * (MAX_NOT_ASCII + 5), form)) == MAX_NOT_ASCII


def test_added_tokens_are_found_as_by_the_tokenizer() -> None:
    """The longest at each place, with the white space that it takes, as the tokenizers library splits a text; and no
    part of the pattern repeats, so that it is linear."""
    rng = random.Random(2)
    contents = ["<a>", "<a><b>", "<", "<abc", "b>"]
    for _ in range(300):
        given = [
            AddedToken(content, lstrip=rng.random() < 0.5, rstrip=rng.random() < 0.5, special=True, normalized=False)
            for content in rng.sample(contents, rng.randint(1, 5))
        ]
        tokenizer = byte_level_once()
        tokenizer.add_special_tokens(given)
        finder = AddedTokens(tokens.AddedToken(each.content, each.lstrip, each.rstrip) for each in given)
        assert not re.search(r"[*+{]", re.sub(r"\\\\.", "", finder._pattern.pattern))
        words = "".join(rng.choices(["<", "a", ">", "b", "c", " ", "x"], k=20))
        ours = [token for _, token in finder.stretches(words) if token]
        known = {tokenizer.token_to_id(each.content) for each in given}
        theirs = [number for number in tokenizer.encode(words).ids if number in known]
        assert ours == [tokenizer.id_to_token(number) for number in theirs], (words, given)


def byte_level_once() -> Tokenizer:
    """A tokenizer without added tokens."""
    return Tokenizer.from_str(_PLAIN)


_PLAIN = byte_level().to_str()


@pytest.mark.parametrize(
    ("body", "is_taken"),
    [
        (b'{"prompt":"' + b"{[,\\\\" * 1_000_000 + b'"}', True),
        (b'{"prompt":"' + b'\\"{[' * 1_000_000 + b'"}', True),
        (b'{"prompt":[' + b"1," * (MAX_VALUES - 9) + b"1]}", True),
        (b"--boundary\r\n" + b"[{" * MAX_CONTAINERS, True),
        (b'{"prompt":[' + b"1," * MAX_VALUES + b"1]}", False),
        (b'{"messages":[' + b'{"content":""},' * MAX_CONTAINERS + b"{}]}", False),
        (b'{"logit_bias":{' + b'"1":1,' * (MAX_FIELDS - 3) + b'"1":1}}', True),
        (b'{"logit_bias":{' + b'"1":1,' * MAX_FIELDS + b'"1":1}}', False),
        (b"\xef\xbb\xbf[" + b"{}," * MAX_CONTAINERS + b"{}]", False),
        (b" " * 2 * SLICE_BYTES + b"[" + b"{}," * MAX_CONTAINERS + b"{}]", False),
        (b" \n[" + b'"\\\\",{},' * MAX_CONTAINERS + b"{}]", False),
        (b"{" + b'"' * 10_000_000 + b"{" * MAX_CONTAINERS, False),
    ],
)
def test_a_server_takes_bodies_of_so_many_values(body: bytes, is_taken: bool) -> None:
    """Values, objects and lists are counted outside of strings before a body is parsed; what is too much is a 413."""
    if is_taken:
        check_json(body)
        return
    with pytest.raises(HttpError) as refused:
        check_json(body)
    assert refused.value.status == 413


def test_of_a_large_body_its_size_counts_alone() -> None:
    """What is larger than all text that is compared is not parsed."""
    reader = Prompts()
    assert in_one_go(reader.read("/v1/completions", {}, b'{"prompt":"' + b"a" * (MAX_READ - 20) + b'"}')).keys
    ask = in_one_go(reader.read("/v1/completions", {}, b'{"prompt":"' + b"a" * MAX_READ + b'"}'))
    assert not ask.keys and ask.tokens == (MAX_READ + 13) // 4 and reader.unread == 1


# -- what stays behind ----------------------------------------------------------------------------------------------

CACHES = {
    "hotspan.http.dashboard.dashboard": "one page",
    "hotspan.router.session._seed": "names of replicas and groups",
    "hotspan.router.text._tenant_salt": "names of tenants",
    "hotspan.router.tokens._runs": "one pattern",
}
"""Caches of functions, and why what clients write is no key of theirs."""


def test_no_cache_of_a_function_has_what_clients_write() -> None:
    """Each `functools` cache of the router and of what serves HTTP is listed above with its keys."""
    found = set()
    for package in (hotspan.http, hotspan.router):
        for module in walk_packages(package.__path__, f"{package.__name__}."):
            if ".ray" in module.name:
                source = Path(module.module_finder.find_spec(module.name).origin)  # type: ignore[union-attr,call-arg,arg-type]
                assert "lru_cache" not in source.read_text() and "@cache" not in source.read_text()
                continue
            names = vars(import_module(module.name))
            found |= {
                f"{each.__module__}.{name}"
                for name, each in names.items()
                if isinstance(each, _lru_cache_wrapper) and "hotspan" in each.__module__
            }
    assert {name.replace("hotspan.core.namespace.", "hotspan.router.text.") for name in found} == set(CACHES)


async def test_what_clients_make_up_is_not_kept() -> None:
    """Salts, targets, models and sessions of 60,000 characters leave no more behind than their digests."""
    reader = Prompts(owner_of=lambda headers: Owner("acme", b"mark"))
    reader.roots.is_salted = True
    async with Upstream(connect_timeout_s=1.0) as upstream:
        upstream._url("http://r:1", "/v1/completions")
        for number in range(200):
            long = f"{number}" + "x" * 60_000
            reader.ask("/v1/completions", {}, {"prompt": "p" * 600, "cache_salt": long, "model": long})
            upstream._url("http://r:1", f"/v1/models?{long}")
            upstream._url("http://r:1", f"/{long}")
        assert list(upstream._urls) == [("http://r:1", "/v1/completions")]
    assert text._tenant_salt.cache_info().currsize <= 1
