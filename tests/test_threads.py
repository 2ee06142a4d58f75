"""What the tests' own processes compute with."""

import torch


def test_tests_compute_with_one_thread() -> None:
    """Whichever test module imports torch first, it has one thread: tests/conftest.py has prepared the environment."""
    assert torch.get_num_threads() == 1
