"""The sizes of an engine's chunks, and the rates that it has measured, as its stats have them."""

from typing import Any

from hotspan.engine.manager import HotspanManager


def sizes_and_rates(manager: HotspanManager) -> dict[str, Any]:
    """Tokens of a chunk, bytes of a token, and rates: none where nothing has to be chosen, as without lower tiers."""
    rates: dict[str, Any] = {}
    if manager.cache.cost is not None:
        report = manager.cache.cost.report()
        measured = {tier.value: found.bytes_per_s for tier, found in report.tiers.items() if found.bytes_per_s}
        rates = {"prefill_tokens_per_s": report.tokens_per_s, "tier_bytes_per_s": measured}
    return {"chunk_tokens": manager.chunk_tokens, "token_bytes": manager.token_bytes, "rates": rates}
