"""Selectors in a real engine: what they choose, and that all of it is the prefill."""

from pathlib import Path

import pytest
import torch

from hotspan.engine.blend import admission, probe
from hotspan.engine.blend.probe import Probe
from hotspan.engine.blend.runs import Run, as_positions

from .engine import WINDOW, Library, ask, blended_and_exact, blending, of

pytestmark = [pytest.mark.engine, pytest.mark.slow]

ROUNDING = 2e-5


def test_selectors_in_an_engine(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a share of 1 the KV is that of a prefill; with 0 it is what was loaded; `deviation` chooses the tokens whose
    keys of the check layer are farthest between these two; up to that layer all is exact, and little behind it; answers
    say how many were chosen; slices make no difference."""
    with blending(tiny_model) as engine:
        library = Library(engine, 1000, 3)
        library.learn()
        prompt = library.prompt(2, 1, 0)
        plan, chosen = admission.plan_spans, list[list[Run]]()
        monkeypatch.setattr(admission, "plan_spans", lambda *given, **named: plan(*given[:4], 0.0, **named))
        selected = Probe.selected

        def noted(self: Probe) -> list[Run]:
            chosen.append(selected(self))
            return chosen[-1]

        monkeypatch.setattr(Probe, "selected", noted)

        def blended(mode: str, ratio: float) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
            return blended_and_exact(engine, prompt, blend={"mode": mode, "recompute_ratio": ratio})

        def distance(found: list[torch.Tensor], expected: list[torch.Tensor]) -> float:
            return max(float((one - other).abs().max()) for one, other in zip(found, expected, strict=True))

        loaded, exact = blended("deviation", 0.0)
        assert distance(loaded, exact) > 1.0 and not chosen  # nothing is looked at
        for mode in ("deviation", "query"):
            assert distance(*blended(mode, 1.0)) < ROUNDING
            assert sum(run.tokens for run in chosen[-1]) == 6 * WINDOW

        off = (loaded[2][:, 0] - exact[2][:, 0]).square().sum((1, 2))
        for mode in ("deviation", "query"):
            monkeypatch.setattr(probe, "WIDTH", 1)
            whole, _ = blended(mode, 0.1)
            picked = as_positions(chosen[-1])
            assert len(picked) == round(0.1 * 6 * WINDOW)
            if mode == "deviation":
                assert set(picked) == set(off.topk(len(picked)).indices.tolist())
            with monkeypatch.context() as patched:
                patched.setattr(admission, "_MIN_BUDGET", 7)
                patched.setattr(of(engine), "_step_tokens", 7)
                sliced, _ = blended(mode, 0.1)
            assert distance(sliced, whole) < 1e-3
            assert set(as_positions(chosen[-1])) == set(picked)
        monkeypatch.setattr(probe, "WIDTH", 16)
        for layer in (1, 2):
            how = {"mode": mode, "recompute_ratio": 0.01, "check_layer": layer}
            found, exact = blended_and_exact(engine, prompt, blend=how)
            off_by = [float((one - other).abs().max()) for one, other in zip(found, exact, strict=True)]
            assert max(off_by[: layer + 1]) < ROUNDING and min(off_by[layer + 1 :]) > 0.5
        answer = ask(engine, library.prompt(1, 0, 2), blend={"mode": "query", "recompute_ratio": 0.25})[0]
        assert answer.blend is not None and answer.blend["mode"] == "query"
        share = 0.25 * answer.blend["reused"]  # a window inside of a prefix that the tiers have is not reused
        assert answer.blend["reused"] >= 5 * WINDOW and share <= answer.blend["recomputed"] < share + 16
