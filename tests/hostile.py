"""What a client may put into `kv_transfer_params`, at random."""

import math
import random
from typing import Any

NAMES = [
    *("hotspan", "tags", "tags_from", "session", "ttl", "no_store", "renew", "blend", "tenant", "load_tiers"),
    *("do_remote_prefill", "do_remote_decode", "remote_engine_id", "remote_block_ids", "kv_load_tiers", "", "\ud800"),
]
ODD: list[Any] = [
    *(None, True, False, 0, 1, -1, 1 << 64, -(1 << 70), 0.5, math.nan, math.inf, "", "x", "\ud800", "a" * 5000, "\0"),
    *([], {}, [[]], [{}], [None], ["a"] * 300, {"a": {"b": {}}}, "default", "15m", "1e999h"),
]


def hostile(rng: random.Random, depth: int = 0) -> Any:
    """Parameters as JSON can spell them; many have names that somebody reads."""
    kind = rng.random()
    if (depth == 0 and kind < 0.9) or (depth < 4 and kind < 0.25):
        return {rng.choice(NAMES): hostile(rng, depth + 1) for _ in range(rng.randint(0, 4))}
    if depth < 4 and kind < 0.35:
        return [hostile(rng, depth + 1) for _ in range(rng.randint(0, 3))]
    if kind < 0.45:
        return {"tenant": rng.choice(ODD), "tags": rng.choice(ODD), rng.choice(NAMES): rng.choice(ODD)}
    return rng.choice(ODD)
