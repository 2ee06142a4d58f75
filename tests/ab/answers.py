"""Answers without a server: what two sides say is drawn from a seed."""

from collections.abc import Sequence
from random import Random

from hotspan.ab.asking import Answer, Position
from hotspan.ab.compare import Asked
from hotspan.ab.items import Item
from hotspan.bench.records import RequestRecord


class Silent:
    """A watcher that shows nothing."""

    def begins(self, what: str, requests: int) -> None: ...

    def answered(self) -> None: ...

    def ends(self) -> None: ...

    def says(self, line: str) -> None: ...


def answer(text: str, *, error: str = "", ttft: float = 0.1, tokens: Sequence[Position] = ()) -> Answer:
    """An answer that took a second; one that failed, with an error."""
    record = RequestRecord("x", 0, not error, 0.0, ttft, 1.0, 10, 10, answer=text, finish_reason="stop", error=error)
    return Answer(record, tuple(tokens))


def item(name: str = "q", **given: object) -> Item:
    return Item(name, ({"role": "user", "content": f"say {name}"},), **given)  # type: ignore[arg-type]


def simulated(count: int, seed: int, *, drift: float = 0.0, noise: float = 0.0) -> list[Asked]:
    """Items of which B answers a share `drift` otherwise, each time alike; two answers differ at a share `noise`."""
    rng = Random(seed)
    flip = 1 - (1 - noise) ** 0.5
    unique = iter(range(10**9))

    usual = {text: answer(text) for text in ("same", "other")}

    def one(text: str) -> Answer:
        return answer(f"{text} {next(unique)}") if flip and rng.random() < flip else usual[text]

    question, found = item(), []
    for _ in range(count):
        b = "other" if drift and rng.random() < drift else "same"
        found.append(Asked(question, one("same"), one("same"), one(b), one(b)))
    return found
