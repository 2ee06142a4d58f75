"""What an engine in a test's process reads when torch and vLLM are imported: this comes before they are."""

from __future__ import annotations

import os


def prepare_environment() -> None:
    """One process, no network, nothing compiled, and one thread: two that wait for each other on a busy machine spin,
    and compute a tiny model slower (as tests/server/conftest.py for servers).
    """
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    os.environ["HF_HUB_OFFLINE"] = "1"
    os.environ["VLLM_NO_USAGE_STATS"] = "1"
    os.environ["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"
    os.environ["OMP_NUM_THREADS"] = "1"
    os.environ["TORCHDYNAMO_DISABLE"] = "1"
