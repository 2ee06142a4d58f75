"""HotspanConnector in a vLLM that hotspan did not start."""

from pathlib import Path

import pytest
from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

import hotspan
from hotspan.engine.connector import HotspanConnector
from hotspan.engine.plugin import register


def test_vllm_finds_the_connector_by_its_name() -> None:
    """After the plugin, once or twice, kv_connector alone names the connector; no module path is needed."""
    register()
    register()
    config = KVTransferConfig(kv_connector="HotspanConnector", kv_role="kv_both")
    assert KVConnectorFactory.get_connector_class(config) is HotspanConnector


@pytest.mark.engine
@pytest.mark.slow
def test_llm_reuses_a_text_after_its_own_cache_is_reset(tmp_path: Path) -> None:
    """LLM(model, **engine_options()) loads a text that the engine's own cache has dropped, with the same answer."""
    from vllm import LLM, SamplingParams

    from hotspan.demo.model import make_demo_model

    directory = tmp_path / "model"
    make_demo_model(directory, "tiny")
    engine = LLM(str(directory), enforce_eager=True, max_model_len=1024, **hotspan.engine_options(ram="256MiB"))
    prompt = "The archive of the town keeps every letter. " * 60
    greedy = SamplingParams(temperature=0.0, max_tokens=8)
    (first,) = engine.generate([prompt], greedy)
    engine.reset_prefix_cache()
    (second,) = engine.generate([prompt], greedy)
    assert second.num_cached_tokens
    assert second.outputs[0].token_ids == first.outputs[0].token_ids
