"""vLLM's real engine core and scheduler with hotspan's real connector and tiers, and no model: see `core.py`."""
