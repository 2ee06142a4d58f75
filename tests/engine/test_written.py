"""Writes into a model's tensors that no call tells of."""

from collections.abc import Callable

import pytest
import torch
from torch import nn

from hotspan.engine.weights import WeightsWatch
from hotspan.engine.written import WrittenModel
from hotspan.testing.clock import SimulatedClock


def made(dtype: torch.dtype = torch.bfloat16) -> nn.Module:
    return nn.Sequential(nn.Linear(64, 96), nn.LayerNorm(96), nn.Linear(96, 8)).to(dtype)


def in_place(model: nn.Module) -> None:
    """Of one element: torch counts it."""
    with torch.no_grad():
        next(model.parameters())[3, 5] += 1


def by_data(model: nn.Module) -> None:
    for weights in model.parameters():
        weights.data.copy_(torch.randn(weights.shape))


def by_numpy(model: nn.Module) -> None:
    for weights in model.parameters():
        weights.detach().view(torch.uint8).numpy()[...] += 1


def other_data(model: nn.Module) -> None:
    weights = next(model.parameters())
    weights.data = weights.data.clone()


def other_parameter(model: nn.Module) -> None:
    model[0].weight = nn.Parameter(torch.zeros(96, 64))  # type: ignore[index, union-attr]


def other_module(model: nn.Module) -> None:
    model[2] = nn.Linear(96, 8)  # type: ignore[index, operator]


def by_optimizer(model: nn.Module) -> None:
    for weights in model.parameters():
        weights.grad = torch.ones_like(weights)
    torch.optim.SGD(model.parameters(), lr=0.1).step()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    "write", [in_place, by_data, by_numpy, other_data, other_parameter, other_module, by_optimizer]
)
def test_each_way_to_write_is_seen_once(write: Callable[[nn.Module], None], dtype: torch.dtype) -> None:
    """And nothing before or after it."""
    model = made(dtype)
    written = WrittenModel(model)
    model(torch.ones(2, 64, dtype=dtype))
    assert not written.changed()
    write(model)
    assert written.changed()
    assert not written.changed()


def test_a_look_lists_no_modules(monkeypatch: pytest.MonkeyPatch) -> None:
    """It happens in every step: a model's parts are listed again only when one of them is another."""
    model = made()
    written, weights = WrittenModel(model), next(model.parameters())
    monkeypatch.setattr(nn.Module, "named_modules", None)
    monkeypatch.setattr(nn.Module, "named_parameters", None)
    with torch.no_grad():
        weights[3, 5] += 1
    assert written.changed() and not written.changed()


def test_what_is_not_seen() -> None:
    """As docs/design/assumptions.md says: a few elements, written past torch's counts."""
    model = made()
    written = WrittenModel(model)
    next(model.parameters()).data[3, 5] += 1
    assert not written.changed()


class Cache:
    """What the watch tells a cache. names: None while there is none."""

    def __init__(self) -> None:
        self.names: list[bytes | None] = []
        self.named_requests = 0

    def end_namespace(self, nobody: bytes | None, *, forget: bool) -> None:
        self.names.append(None)

    def begin_namespace(self, namespace: bytes, *, source: str) -> None:
        self.names.append(namespace)

    def load_adapter(self, lora: object, *, anew: bool) -> None:
        return

    def unload_adapter(self, adapter_id: int) -> None:
        return

    def reset_outputs(self) -> None:
        return


class Worker:
    def __init__(self, model: nn.Module) -> None:
        self.worker = self
        self._model = model

    def get_model(self) -> nn.Module:
        return self._model


class Executor:
    """One of this process, whose calls may write into the model."""

    def __init__(self, model: nn.Module) -> None:
        self.driver_worker = Worker(model)

    def collective_rpc(self, method: object, timeout: object, args: object, kwargs: object) -> None:
        if method == "reload_weights":
            by_data(self.driver_worker.get_model())


def watched(model: nn.Module) -> tuple[WeightsWatch, Cache, Executor]:
    cache, executor = Cache(), Executor(model)
    watch = WeightsWatch(cache, None, lambda function: None, SimulatedClock())
    watch.is_in_program = True
    watch.bind(executor)
    return watch, cache, executor


def test_a_write_ends_the_namespace_and_a_call_is_no_write() -> None:
    """Each begins a name of its own, once; a model that can't be looked at has none any more."""
    model = made()
    watch, cache, executor = watched(model)
    watch.look()
    assert cache.names == []
    by_data(model)
    watch.look()
    watch.look()
    assert len(cache.names) == 2 and cache.names[0] is None and cache.names[1] is not None
    executor.collective_rpc("reload_weights")  # type: ignore[call-arg]
    watch.look()
    assert len(cache.names) == 4 and watch.state.changes == 2 and watch.state.last == "reload_weights"
    model.modules = None  # type: ignore[assignment, method-assign]
    other_module(model)
    watch.look()
    assert cache.names[-1] is None and watch.state.source is None


def test_an_engine_in_a_process_of_its_own_costs_nothing() -> None:
    """No program has its model: nothing is looked at."""
    model = made()
    cache = Cache()
    watch = WeightsWatch(cache, None, lambda function: None, SimulatedClock())
    watch.bind(Executor(model))
    by_data(model)
    watch.look()
    assert cache.names == []
