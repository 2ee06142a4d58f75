"""Warming: texts are computed once by a running server, each with a request for one token."""

import asyncio
import json
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from http import HTTPStatus
from pathlib import Path
from typing import Any

from hotspan.core.documents import read_text
from hotspan.core.errors import ConfigError, RefusedError
from hotspan.core.metrics_page import CAPACITY, TOKEN_BYTES, samples

DOCUMENT, QUESTION = "{document}", "{question}"
_LOOK_S = 0.5
_ATTEMPTS = 5
_WAITS = (HTTPStatus.TOO_MANY_REQUESTS, HTTPStatus.SERVICE_UNAVAILABLE)
_LOADS = ("vllm:num_requests_running", "vllm:num_requests_waiting", "hotspan_router_in_flight_requests")

Json = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Warmup:
    """One text to compute.

    name: for messages. body: the prompt of its request. head: text before the document, which does not carry the tags.
    """

    name: str
    body: Json
    directives: Json
    head: str = ""


@dataclass(slots=True)
class Warmed:
    """What came of it. tokens: of prompts; cached: those of them that were cached before. failed: names, and why."""

    texts: int = 0
    tokens: int = 0
    cached: int = 0
    failed: list[str] = field(default_factory=list)

    def fail(self, name: str, why: str) -> None:
        """A text was not warmed."""
        self.failed.append(f"{name}: {why}")


@dataclass(frozen=True, slots=True)
class Server:
    """How the server is asked. Both raise ConfigError; a refusal has the answer as `body`.

    post: path, body -> answer. metrics: the page; None if `post` itself waits until the server is idle.
    """

    post: Callable[[str, Json], Awaitable[Any]]
    metrics: Callable[[], str] | None = None


def warmups(paths: Iterable[Path], template: str | None, tags: Sequence[str]) -> list[Warmup]:
    """The texts of files and directories.

    A .jsonl file has an object per line: `text` (a document), `prompt` or `messages`, and `tags` and `session` of its
    own. Any other file is one document, which is also tagged with its name, in a directory with its path there.

    template: of a prompt of /v1/completions, with {document}; what comes from {question} on is left out.
    Raises:   ConfigError for what can't be read, and for another template.
    """
    around(template)
    found: list[Warmup] = []
    for path in paths:
        if path.suffix == ".jsonl" and not path.is_dir():
            found += _lines(path, template, tags)
            continue
        files = sorted(each for each in path.rglob("*") if each.is_file()) if path.is_dir() else [path]
        for each in files:
            name = each.relative_to(path).as_posix() if path.is_dir() else path.name
            found.append(_document(read_text(each), name, template, {"tags": sorted({*tags, name})}))
    if not found:
        raise ConfigError("there is nothing to warm: give files or directories with documents")
    return found


def warmup(row: Json, name: str, template: str | None, tags: Sequence[str]) -> Warmup:
    """The text of an object with one of `text`, `prompt` and `messages`, and perhaps `tags` and `session`.

    Raises: ValueError.
    """
    directives: Json = {"tags": sorted({*tags, *map(str, row.get("tags", ()))})}
    directives |= {"session": row["session"]} if "session" in row else {}
    kinds = [kind for kind in ("text", "prompt", "messages") if kind in row]
    if len(kinds) != 1:
        raise ValueError("give one of text, prompt and messages")
    if kinds == ["text"]:
        return _document(str(row["text"]), name, template, directives)
    return Warmup(name, {kinds[0]: row[kinds[0]]}, directives)


async def warm(
    texts: Iterable[Warmup],
    server: Server,
    common: Json,
    done: Warmed,
    *,
    sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    advance: Callable[[], None] = lambda: None,
) -> None:
    """Compute texts one after the other, each with a request for one token.

    What is cached already is found, and costs next to nothing: to resume is to run it again.

    common:  fields of every request.
    Mutates: `done`, after each text.
    """
    heads: dict[str, int] = {}
    for each in texts:
        try:
            if each.head and each.head not in heads:
                asked = {"prompt": each.head} | ({"model": common["model"]} if "model" in common else {})
                heads[each.head] = int((await server.post("/tokenize", asked))["count"])
            head = {"tags_from": heads[each.head]} if each.head and each.directives.get("tags") else {}
            body = common | each.body
            body["kv_transfer_params"] = common.get("kv_transfer_params", {}) | each.directives | head
            while server.metrics is not None and not is_idle(server.metrics()):
                await sleep(_LOOK_S)
            path = "/v1/chat/completions" if "messages" in body else "/v1/completions"
            usage = (await _patiently(partial(server.post, path, body), sleep))["usage"]
        except ConfigError as error:
            if not _is_about_text(error):
                raise
            done.fail(each.name, str(error))
        else:
            done.texts += 1
            done.tokens += usage["prompt_tokens"]
            done.cached += (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
        advance()


def is_idle(page: str) -> bool:
    """Whether a server's or a router's metrics show no request. Raises: ConfigError for another page."""
    loads = [sample.value for sample in samples(page, _LOADS)]
    if not loads:
        raise ConfigError("the server's metrics do not show whether it is idle: warm with --no-wait-for-idle")
    return not sum(loads)


@dataclass(frozen=True, slots=True)
class Room:
    """token_bytes: of one token's KV in a tier. capacity_bytes: of the largest tier. 0 where it is not known."""

    token_bytes: float = 0.0
    capacity_bytes: float = 0.0


def room_of(page: str) -> Room:
    """What a server's metrics show of its tiers."""
    return Room(*(_largest(page, name) for name in (TOKEN_BYTES, CAPACITY)))


async def _patiently(post: Callable[[], Awaitable[Any]], sleep: Callable[[float], Awaitable[None]]) -> Any:
    """An answer, also of a server that has no room at first."""
    for attempt in range(_ATTEMPTS):
        try:
            return await post()
        except ConfigError as error:
            if _code(error) not in _WAITS or attempt + 1 == _ATTEMPTS:
                raise
        await sleep(_LOOK_S * 2**attempt)
    raise AssertionError("the last attempt returns or raises")


def _code(error: ConfigError) -> int:
    """The status in a refusal; 0 if there is none."""
    body = error.body if isinstance(error, RefusedError) else None
    said = body.get("error") if isinstance(body, dict) else None
    code = said.get("code") if isinstance(said, dict) else None
    return code if isinstance(code, int) else 0


def _is_about_text(error: ConfigError) -> bool:
    """Whether another text may fare better: this one is too long, or wrong."""
    return _code(error) in (HTTPStatus.BAD_REQUEST, HTTPStatus.UNPROCESSABLE_ENTITY)


def around(template: str | None) -> tuple[str, str]:
    """What stands before a document in its prompt, and behind it, up to the question.

    Raises: ConfigError for a template of which no prompt could be computed before its question is known.
    """
    head, found, tail = (DOCUMENT if template is None else template).partition(DOCUMENT)
    if not found:
        raise ConfigError(f"the template has no {DOCUMENT}: write it where the document goes")
    if QUESTION in head:
        raise ConfigError(f"the template has {QUESTION} before {DOCUMENT}: what follows a question can't be warmed")
    return head, tail.partition(QUESTION)[0]


def _document(text: str, name: str, template: str | None, directives: Json) -> Warmup:
    head, tail = around(template)
    return Warmup(name, {"prompt": head + text + tail}, directives, head)


def _lines(path: Path, template: str | None, tags: Sequence[str]) -> Iterator[Warmup]:
    for number, line in enumerate(read_text(path).splitlines(), 1):
        if not line.strip():
            continue
        name = f"{path.name}:{number}"
        try:
            yield warmup(json.loads(line), name, template, tags)
        except (ValueError, AttributeError, TypeError) as error:
            raise ConfigError(f"{name}: this is no text to warm ({error})") from error


def _largest(page: str, name: str) -> float:
    """Of the samples of all engines."""
    return float(max((sample.value for sample in samples(page, (name,))), default=0.0))
