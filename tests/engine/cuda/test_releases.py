"""Releases of vLLM whose sources were run over the simulated runtime: all that hotspan takes; others are refused."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.v1.kv_cache_interface import FullAttentionSpec, MambaSpec

from hotspan.core.errors import ConfigError, EngineError
from hotspan.engine import connector, contract, cuda

from ..vllm_range import RELEASES


def test_only_releases_that_are_taken_are_listed() -> None:
    """What may run on GPUs is within what hotspan takes and can read the sources of."""
    assert {contract.release(each) for each in RELEASES} >= contract.SEARCHED


def test_a_release_that_was_not_searched_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU an engine of another release does not start, with what to install."""
    monkeypatch.setattr(cuda, "ENGINE", (0, 34))
    with pytest.raises(EngineError, match=r"has not passed .* install one of 0\.27, .*0\.33"):
        cuda.cuda_worker(None, None, 1, 0)  # type: ignore[arg-type]


def test_recurrent_states_are_refused_where_the_search_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    """With vLLM 0.26, in which a request's blocks may lack a state, no tiers serve such a model; others they do."""
    full = FullAttentionSpec(block_size=16, num_kv_heads=1, head_size=8, dtype=torch.bfloat16)
    state = MambaSpec(block_size=16, shapes=((8,),), dtypes=(torch.float32,), mamba_cache_mode="align")
    both: Any = SimpleNamespace(kv_cache_groups=[SimpleNamespace(kv_cache_spec=spec) for spec in (full, state)])
    one: Any = SimpleNamespace(kv_cache_groups=both.kv_cache_groups[:1])
    connector._check_groups(both)
    monkeypatch.setattr(connector, "ENGINE", (0, 26))
    connector._check_groups(one)
    with pytest.raises(ConfigError, match=r"recurrent states.*0\.27 or later"):
        connector._check_groups(both)
