"""`hotspan cache warm`: which requests it sends, when, and what it says of them. The server is simulated."""

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from hotspan.cli.cache import WarmOptions
from hotspan.core.errors import ConfigError, RefusedError
from hotspan.http.errors import HttpError
from hotspan.http.warming import Room, Server, Warmed, is_idle, room_of, warm, warmups
from hotspan.server.warm_requests import WarmRequest

PAGE = 'vllm:num_requests_running{engine="0"} %d.0\nvllm:num_requests_waiting{engine="0"} 0.0\n'
TEMPLATE = "Read this.\n{document}\nQuestion: {question}\nAnswer:"


class FakeServer:
    """Caches whole prompts. busy: how many looks find a request running. refuses: answers before it does its work."""

    def __init__(self, *, busy: int = 0, refuses: tuple[int, ...] = (), longest: int = 1 << 20) -> None:
        self.busy, self.refuses, self.longest = busy, list(refuses), longest
        self.asked: list[tuple[str, dict[str, Any]]] = []
        self.cached: set[str] = set()
        self.slept: list[float] = []

    def metrics(self) -> str:
        self.busy -= 1
        return PAGE % (self.busy >= 0)

    async def post(self, path: str, body: dict[str, Any]) -> Any:
        if path == "/tokenize":
            return {"count": len(body["prompt"])}
        assert self.busy < 0, "sent while another request ran"
        if self.refuses:
            raise self.refusal(self.refuses.pop(0))
        prompt = str(body.get("prompt") or body["messages"])
        if len(prompt) > self.longest:
            raise self.refusal(400)
        self.asked.append((path, body))
        usage = {"prompt_tokens": len(prompt), "prompt_tokens_details": {"cached_tokens": 0}}
        if prompt in self.cached:
            usage["prompt_tokens_details"] = {"cached_tokens": len(prompt)}
        self.cached.add(prompt)
        return {"usage": usage}

    @staticmethod
    def refusal(status: int) -> RefusedError:
        return RefusedError("refused", {"error": {"code": status}})

    def warm(self, paths: list[Path], template: str | None = None, **options: Any) -> Any:
        texts = warmups(paths, template, options.pop("tags", ()))
        common = {"max_tokens": 1} | options.pop("common", {})
        done = Warmed()

        async def sleep(seconds: float) -> None:
            self.slept.append(seconds)

        asyncio.run(warm(texts, Server(self.post, self.metrics), common, done, sleep=sleep, **options))
        return done


@pytest.fixture
def documents(tmp_path: Path) -> Path:
    (tmp_path / "docs" / "part").mkdir(parents=True)
    (tmp_path / "docs" / "a.txt").write_text("first")
    (tmp_path / "docs" / "part" / "b.md").write_text("second")
    return tmp_path / "docs"


def test_a_directory_is_warmed_as_questions_will_ask_it(documents: Path) -> None:
    """The prompt up to the question, tagged with the file's path and what was given, from the document on."""
    server = FakeServer()
    done = server.warm([documents], TEMPLATE, tags=("all",), common={"kv_transfer_params": {"ttl": "1h"}})
    head = "Read this.\n"
    assert [body["prompt"] for _, body in server.asked] == [f"{head}{text}\nQuestion: " for text in ("first", "second")]
    directives = [body["kv_transfer_params"] for _, body in server.asked]
    assert directives == [
        {"ttl": "1h", "tags": ["a.txt", "all"], "tags_from": len(head)},
        {"ttl": "1h", "tags": ["all", "part/b.md"], "tags_from": len(head)},
    ]
    assert done.texts == 2 and done.cached == 0 and all(body["max_tokens"] == 1 for _, body in server.asked)


def test_to_resume_is_to_run_again(documents: Path) -> None:
    """After an interruption only what is missing is computed; a third run computes nothing."""
    server = FakeServer()
    server.warm([documents / "a.txt"])
    second = server.warm([documents])
    assert second.texts == 2 and second.tokens - second.cached == len("second")
    third = server.warm([documents])
    assert third.tokens == third.cached == len("firstsecond")


def test_lines_are_documents_prompts_or_chats(tmp_path: Path) -> None:
    """Each has its own tags and session; only documents go through the template."""
    rows = [{"text": "t", "tags": ["x"]}, {"prompt": "p", "session": "s"}, {"messages": [{"role": "user"}]}]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)) + "\n\n")
    server = FakeServer()
    server.warm([tmp_path / "rows.jsonl"], TEMPLATE)
    assert [path for path, _ in server.asked] == ["/v1/completions", "/v1/completions", "/v1/chat/completions"]
    assert [body["kv_transfer_params"] for _, body in server.asked] == [
        {"tags": ["x"], "tags_from": 11},
        {"tags": [], "session": "s"},
        {"tags": []},
    ]


def test_it_waits_until_the_server_is_idle(documents: Path) -> None:
    """Nothing is sent while another request runs (the fake server asserts that), and one text is sent at a time."""
    server = FakeServer(busy=3)
    assert server.warm([documents]).texts == 2 and len(server.slept) == 3


def test_a_server_without_room_is_asked_again(documents: Path) -> None:
    """429 and 503 pass; a server that stays so ends the run."""
    server = FakeServer(refuses=(429, 503))
    assert server.warm([documents]).texts == 2
    with pytest.raises(ConfigError):
        FakeServer(refuses=(503,) * 9).warm([documents])
    with pytest.raises(ConfigError):
        FakeServer(refuses=(401,)).warm([documents])


def test_a_text_that_is_refused_is_named(documents: Path) -> None:
    """The others are warmed."""
    done = FakeServer(longest=5).warm([documents])
    assert done.texts == 1 and done.failed == ["part/b.md: refused"]


@pytest.mark.parametrize("line", ["nonsense", "[]", "{}", '{"text": "a", "prompt": "b"}', '{"text": "a", "tags": 1}'])
def test_a_wrong_line_is_named(tmp_path: Path, line: str) -> None:
    """Before anything is sent."""
    (tmp_path / "rows.jsonl").write_text(line)
    with pytest.raises(ConfigError, match=r"rows\.jsonl:1: this is no text"):
        warmups([tmp_path / "rows.jsonl"], None, ())
    with pytest.raises(ConfigError, match="nothing to warm"):
        warmups([], None, ())


@pytest.mark.parametrize("template", ["Read {doc}, then {question}", "{question} Look at {document}", ""])
def test_a_template_of_which_nothing_could_be_warmed_is_refused(documents: Path, template: str) -> None:
    """Without the document, or with the question before it; in a warm-up over HTTP, too."""
    with pytest.raises(ConfigError, match="the template has"):
        warmups([documents], template, ())
    with pytest.raises(HttpError, match="the template has"):
        WarmRequest.model_validate({"texts": [{"text": "a"}], "template": template}).warmups()


def test_metrics_say_whether_it_is_idle_and_what_there_is_room_for() -> None:
    """A server's, or a router's; a page without either is refused."""
    assert is_idle(PAGE % 0) and not is_idle(PAGE % 1)
    assert not is_idle('hotspan_router_in_flight_requests{replica="a"} 1.0\n')
    with pytest.raises(ConfigError, match="--no-wait-for-idle"):
        is_idle("up 1\n")
    tiers = 'hotspan_cache_capacity_bytes{tier="ram"} 5\nhotspan_cache_capacity_bytes{tier="disk"} 7\n'
    tokens = "".join(f'hotspan_cache_token_bytes{{engine="{engine}"}} 3\n' for engine in range(2))
    assert room_of(tiers + tokens) == Room(3, 7) and room_of("up 1\n") == Room()


def test_options_become_fields_of_requests() -> None:
    """A time to live and a priority are sent where they were given."""
    assert WarmOptions().common() == {"max_tokens": 1, "temperature": 0}
    given = WarmOptions(ttl="2h", priority=9).common()
    assert given["priority"] == 9 and given["kv_transfer_params"] == {"ttl": "2h"}
