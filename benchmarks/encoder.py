"""What a repeated image costs after its KV is a hit: the vision encoder's share of the time to first token.

usage: python -m benchmarks.encoder [--rounds 3] [--output benchmarks/results/encoder.json]

A model of LLaVA's shape with random weights: an encoder as CLIP's ViT-B (12 layers of 768, 336 pixels, 576 tokens per
image) and a language model of 8 layers of 768. Each prompt has a text of about 600 tokens and one image:

- image first: the image stands before the text, in whole chunks, which RAM and disk keep.
- image last:  the image stands at the prompt's end, and its last tokens in the chunk that is never whole.

Each prompt is sent as new, again (the KV comes from RAM; vLLM's caches of processed and of encoded images have the
image), again with these two caches empty, and after a restart of the engine (the KV comes from disk). vLLM's own prefix
cache is empty each time. All of it is done four times: with encoder outputs not kept, kept (the default), kept and not
kept. Time to first token, preprocessing and encoder time are medians over all rounds, in milliseconds; encoder time and
calls are what vLLM's own `enable_mm_processor_stats` counts.

Goal: the encoder runs for no prompt that repeats an image, before and after a restart; where outputs are not kept, for
none whose image is part of a hit. Otherwise the exit status is 1.
"""

import asyncio
import base64
import io
import json
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.harness import arguments
from kit.environment import prepare_environment

prepare_environment()

import httpx  # noqa: E402
import numpy as np  # noqa: E402
from PIL import Image  # noqa: E402

from hotspan.bench.machine import write_results  # noqa: E402
from hotspan.bench.prose import prose  # noqa: E402
from hotspan.config.settings import CacheOptions  # noqa: E402
from hotspan.core.aftermath import Aftermath  # noqa: E402
from hotspan.engine.arguments import add_cache, parse_engine_arguments  # noqa: E402
from hotspan.engine.guard import RequestGuard  # noqa: E402
from hotspan.engine.launch import Engine, launch  # noqa: E402
from kit.families.vision import SIGHTS, Sight, make_sight  # noqa: E402

SIDE, TEXT_TOKENS, TAIL_TOKENS = 336, 600, 20
HIT_CASES = ("again", "again, vLLM's image caches empty", "after a restart")
PLACES = ("image first", "image last")
KEPT, NOT_KEPT = "outputs kept", "outputs not kept"


def sight() -> Sight:
    """LLaVA's shape with an encoder of CLIP ViT-B's size."""
    (tiny,) = [each for each in SIGHTS if each.name == "LLaVA"]
    text = {"hidden_size": 768, "intermediate_size": 2048, "num_hidden_layers": 8, "num_attention_heads": 12}
    text |= {"num_key_value_heads": 4, "head_dim": 64}
    vision = {"hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 12, "num_attention_heads": 12}
    fields = {
        **tiny.fields,
        "text_config": {**tiny.fields["text_config"], **text},
        "vision_config": {**tiny.fields["vision_config"], **vision, "image_size": SIDE},
        "image_seq_length": (SIDE // 14) ** 2,
    }
    size = {"size": {"shortest_edge": SIDE}, "crop_size": {"height": SIDE, "width": SIDE}}
    return replace(tiny, fields=fields, parts={"image_processor": (tiny.parts["image_processor"][0], size)})


class Client:
    """Sends prompts to one engine and reads what each cost."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._http = httpx.AsyncClient(transport=httpx.ASGITransport(app=engine.app), base_url="http://x", timeout=300)

    async def warm(self) -> None:
        """Two requests that are not measured, with an image that no measured one has."""
        for _ in range(2):
            await self.measure("image first", 10_000)

    async def forget_images(self) -> None:
        """Empty vLLM's caches of processed and of encoded images."""
        await self._engine.client.reset_mm_cache()
        await self._engine.client.reset_encoder_cache()

    async def measure(self, place: str, seed: int) -> dict[str, float]:
        """What the prompt of this seed costs, with vLLM's own prefix cache empty."""
        client: Any = self._engine.client
        await client.reset_prefix_cache()
        await self._counts()
        body = {"model": "base", "temperature": 0, "max_tokens": 1, "messages": [message(place, seed)]}
        begin = time.perf_counter()
        reply = await self._http.post("/v1/chat/completions", json=body)
        elapsed = time.perf_counter() - begin
        reply.raise_for_status()
        usage = reply.json()["usage"]
        await asyncio.sleep(0.5)  # stores end outside the next measurement
        return {
            "ttft_ms": elapsed * 1e3,
            **await self._counts(),
            "cached_tokens": (usage["prompt_tokens_details"] or {}).get("cached_tokens") or 0,
            "prompt_tokens": usage["prompt_tokens"],
        }

    async def _counts(self) -> dict[str, float]:
        """What vLLM has counted since the last call, which it forgets."""
        client: Any = self._engine.client
        prepared = client.renderer._mm_timing_registry.stat()
        encoded = [each for rank in await client.collective_rpc("get_encoder_timing_stats") for each in rank.values()]
        return {
            "preprocess_ms": sum(each["preprocessor_total_secs"] for each in prepared.values()) * 1e3,
            "encoder_ms": sum(each["encoder_forward_secs"] for each in encoded) * 1e3,
            "encoder_calls": sum(each["num_encoder_calls"] for each in encoded),
        }


def message(place: str, seed: int) -> dict[str, Any]:
    """A chat message of a text and an image, which this seed decides."""
    pixels = np.random.default_rng(seed).integers(0, 255, (SIDE, SIDE, 3), dtype=np.uint8)
    data = io.BytesIO()
    Image.fromarray(pixels).save(data, "png")
    url = f"data:image/png;base64,{base64.b64encode(data.getvalue()).decode()}"
    image = {"type": "image_url", "image_url": {"url": url}}
    text, tail = ({"type": "text", "text": prose(*size)} for size in ((seed, TEXT_TOKENS), (seed + 1, TAIL_TOKENS)))
    return {"role": "user", "content": [image, text] if place == "image first" else [text, image, tail]}


Found = defaultdict[str, list[dict[str, float]]]
"""What was measured of each case."""


async def run(shape: Sight, model: Path, disk: Path, rounds: int, found: Found, *, is_kept: bool) -> None:
    """Measure each case, with or without encoder outputs in the tiers."""
    options = (
        *("--dtype", "float32", "--block-size", "128", "--max-model-len", "4096", "--served-model-name", "base"),
        *("--kv-cache-memory-bytes", str(1 << 29), "--max-num-batched-tokens", "2048", "--enforce-eager"),
        *("--chat-template", shape.chat_template, "--chat-template-content-format", "openai"),
    )
    for is_restarted in (False, True):
        words = parse_engine_arguments(str(model), options)
        words.enable_mm_processor_stats = True  # vLLM hides this option from its users
        settings = CacheOptions(ram_gib=1.0, disk=disk, disk_gib=2.0).settings()
        add_cache(words, replace(settings, encoder_outputs=is_kept))
        with Aftermath() as aftermath:
            async with launch(words, RequestGuard(lambda: "acme"), aftermath) as engine:
                client = Client(engine)
                await client.warm()
                for place in PLACES:
                    for seed in range(1000 * PLACES.index(place), 1000 * PLACES.index(place) + 10 * rounds, 10):
                        await visit(client, place, seed, found, is_restarted=is_restarted)
                await asyncio.sleep(3.0)  # the disk has what was stored


async def visit(client: Client, place: str, seed: int, found: Found, *, is_restarted: bool) -> None:
    """All measurements of one prompt in this engine."""
    if is_restarted:
        found[f"{place}, {HIT_CASES[2]}"].append(await client.measure(place, seed))
        return
    found[f"{place}, new"].append(await client.measure(place, seed))
    found[f"{place}, {HIT_CASES[0]}"].append(await client.measure(place, seed))
    await client.forget_images()
    found[f"{place}, {HIT_CASES[1]}"].append(await client.measure(place, seed))


def medians(measured: list[dict[str, float]]) -> dict[str, float]:
    """Of each figure."""
    return {name: round(statistics.median(each[name] for each in measured), 1) for name in measured[0]}


def main() -> None:
    options = arguments(__doc__, rounds=3)
    with tempfile.TemporaryDirectory(prefix="hotspan-encoder-") as directory:
        shape = sight()
        model = make_sight(shape, Path(directory))
        found = {name: Found(list) for name in (NOT_KEPT, KEPT)}
        for number, name in enumerate((NOT_KEPT, KEPT, KEPT, NOT_KEPT)):
            disk = Path(directory) / f"kv-{number}"
            asyncio.run(run(shape, model, disk, options.rounds, found[name], is_kept=name == KEPT))
        figures = {name: {case: medians(each) for case, each in cases.items()} for name, cases in found.items()}
    again = [figures[KEPT][f"{place}, {case}"] for place in PLACES for case in HIT_CASES]
    again += [figures[NOT_KEPT][f"image first, {case}"] for case in HIT_CASES]
    is_met = all(each["encoder_calls"] == 0 for each in again)
    print(json.dumps({"is_met": is_met, "figures": figures}, indent=1))
    if options.output is not None:
        command = f"python -m benchmarks.encoder --rounds {options.rounds} --output {options.output}"
        settings = {"rounds": options.rounds, "image_tokens": (SIDE // 14) ** 2}
        write_results(options.output, "encoder", command=command, settings=settings, is_met=is_met, figures=figures)
    sys.exit(not is_met)


if __name__ == "__main__":
    main()
