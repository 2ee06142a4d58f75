"""The rules of `model` and `simulate` under hypothesis, which makes a failing run as short as it can."""

import random
from pathlib import Path
from tempfile import TemporaryDirectory

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, rule

from kit.places import in_memory
from proofs import fuzz
from proofs.drive import HOLDERS, TROUBLES, WEIGHTS, Drive
from proofs.engine import Broken

QUICK = settings(max_examples=60, stateful_step_count=60, deadline=None, suppress_health_check=list(HealthCheck))


class Rules(RuleBasedStateMachine):
    """Each step is one of the driver's, with randomness of its own."""

    is_troubled = False
    names = (*WEIGHTS, "arrive", "ask", "end_store", "turn", "turn")

    def __init__(self) -> None:
        super().__init__()
        self.place = in_memory()
        self.drive = Drive(self.place.__enter__(), random.Random(1), is_troubled=self.is_troubled)
        self.is_broken = False

    @rule(data=st.data(), seed=st.integers(0, 1 << 16))
    def step(self, data: st.DataObject, seed: int) -> None:
        """Any step; what always holds is looked at after it."""
        self.drive.rng.seed(seed)
        try:
            self.drive.do(data.draw(st.sampled_from(self.names)))
        except Broken:
            self.is_broken = True
            raise

    def teardown(self) -> None:
        """Nothing is left over."""
        try:
            if self.is_broken:
                self.drive.abandon()
            else:
                self.drive.end()
        finally:
            self.place.__exit__(None, None, None)


class TroubledRules(Rules):
    """The same, while disks fail, power goes, and servers hold texts."""

    is_troubled = True
    names = (*Rules.names, *TROUBLES, *HOLDERS)


TestModel = Rules.TestCase
TestModel.settings = QUICK
TestSimulate = TroubledRules.TestCase
TestSimulate.settings = QUICK


@settings(max_examples=150, deadline=None)
@given(kind=st.sampled_from(sorted(fuzz.KINDS)), seed=st.integers(0, 1 << 32))
def test_any_input_is_refused_or_right(kind: str, seed: int) -> None:
    """No input of any kind raises what it must not, or is taken for what it is not."""
    with TemporaryDirectory() as path:
        fuzz.KINDS[kind][1](fuzz.Bench(Path(path)), random.Random(seed))
