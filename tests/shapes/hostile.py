"""Hostile `kv_transfer_params` against one's own `vllm serve`: the engine lives, and no request is more than uncached.

    python -m tests.shapes.hostile 10000 [--seed N] [--seconds N] [--output FILE]

Bodies go to a real server over HTTP, several at a time. Each answer is that of the engine without such parameters, or a
4xx; between them, ordinary requests hit what ordinary requests stored.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import sys
import tempfile
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx

from hotspan.demo.model import make_demo_model
from kit.proof import Proof, print_proof, write_proof
from tests.hostile import hostile

from .engines import Engine, preloaded, running
from .table import Shape
from .test_shapes import WHOLE, text_of

CLAIM = "whatever a client says in kv_transfer_params, the engine lives, and the answer is that without them or a 4xx"
SHAPE = Shape("vllm", "one rank")
SHORT, AT_ONCE, BATCH = 24, 8, 200
SURROGATE = "\\ud800"
"""As JSON spells half a character: vLLM's server answers 500 to it, since it can't send it to its engine."""

LONG_PART = 0.05
"""Of the bodies: with a prompt of several chunks, that could be stored and found."""


class Wrong(Exception):
    """An answer that no request without parameters gets."""


class Client:
    """Asks over a few connections. statuses: of all answers."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._http = httpx.Client(base_url=f"http://127.0.0.1:{engine.port}", timeout=300)
        self._threads = ThreadPoolExecutor(AT_ONCE)
        self._texts: dict[int, str] = {}
        self.statuses: Counter[str] = Counter()

    def learn(self, prompts: list[list[int]]) -> None:
        """What the engine answers to these without parameters."""
        self._texts = {len(prompt): self._post(prompt, {})[1] for prompt in prompts}

    def attack(self, prompts: list[list[int]], bodies: list[Any]) -> None:
        """Ask with these parameters. Raises: Wrong."""
        asked = [(prompt, {"kv_transfer_params": body}) for prompt, body in zip(prompts, bodies, strict=True)]
        answers = self._threads.map(lambda each: self._post(*each), asked)
        for (prompt, more), (status, text) in zip(asked, answers, strict=True):
            is_no_utf8 = SURROGATE in json.dumps(more)
            self.statuses[f"answered_{status}" + ("_no_utf8" if is_no_utf8 else "")] += 1
            allowed = (200, 400, 422, 500) if is_no_utf8 else (200, 400, 422)
            if status not in allowed or (status == 200 and text != self._texts[len(prompt)]):
                raise Wrong(f"{status} {text!r} to {json.dumps(more)[:500]}")

    def is_well(self, seed: int) -> None:
        """An ordinary text is stored and found. Raises: Wrong."""
        cold, hit = (self._engine.ask(text_of(seed)) for _ in range(2))
        if hit.text != cold.text or hit.cached < WHOLE:
            raise Wrong(f"{hit} after {cold}")

    def _post(self, prompt: list[int], more: dict[str, Any]) -> tuple[int, str]:
        body = {"model": str(self._engine.model), "prompt": prompt, "max_tokens": 1, "temperature": 0} | more
        answer = self._http.post(
            "/v1/completions", content=json.dumps(body), headers={"content-type": "application/json"}
        )
        return answer.status_code, answer.json()["choices"][0]["text"] if answer.status_code == 200 else answer.text[
            :300
        ]


def run(client: Client, bodies: int, seed: int, seconds: float = math.inf) -> int:
    """Send so many, or those that were begun in time; how many. Raises: Wrong."""
    chance, sent, begun_s = random.Random(seed), 0, time.monotonic()
    prompts = [text_of(0)[:SHORT], text_of(0)]
    client.learn(prompts)
    while sent < bodies and time.monotonic() - begun_s < seconds:
        size = min(BATCH, bodies - sent)
        chosen = [prompts[chance.random() < LONG_PART] for _ in range(size)]
        client.attack(chosen, [hostile(chance) for _ in range(size)])
        client.is_well(1000 + sent)
        sent += size
        print(f"{sent} bodies, {time.monotonic() - begun_s:.0f} s: {dict(client.statuses)}", flush=True)
    return sent


def main() -> None:
    """From the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("bodies", type=int)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=math.inf, help="send no more after so many")
    parser.add_argument("--output", type=Path, help="write the result to this JSON file")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as place, preloaded() as source:
        model = make_demo_model(Path(place) / "model", "tiny").path
        (directory := Path(place) / "engine").mkdir()
        with running(SHAPE, model, directory, source=source) as engine:
            client = Client(engine)
            sent = run(client, given.bodies, given.seed, given.seconds)
    figures = {"bodies": sent, **client.statuses, "wrong_answers": 0, "engines_ended": 0}
    done = Proof("hostile", CLAIM, figures, passed=sent == given.bodies)
    print_proof(done, given.seed)
    if given.output is not None:
        write_proof(given.output, done, vars(given), "python -m tests.shapes.hostile " + " ".join(sys.argv[1:]))


if __name__ == "__main__":
    main()
