import subprocess
import sys
import time

import pytest

from hotspan.bench.cpu import ProcessTreeCpu

BURN = "import time\nend = time.process_time() + {seconds}\nwhile time.process_time() < end: pass\n"
PARENT = """
import subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", {burn!r}])
child.wait()
print("reaped", flush=True)
time.sleep(60)
"""


def test_a_child_that_has_ended_still_counts() -> None:
    """CPU time of a descendant is in the tree's sum while it runs and after it has ended."""
    burn = BURN.format(seconds=0.4)
    process = subprocess.Popen([sys.executable, "-c", PARENT.format(burn=burn)], stdout=subprocess.PIPE)
    try:
        cpu = ProcessTreeCpu(process.pid)
        assert process.stdout is not None and process.stdout.readline() == b"reaped\n"
        after = cpu.seconds()
        assert after is not None and after >= 0.4
        time.sleep(0.05)
        assert cpu.seconds() == pytest.approx(after, abs=0.05)
    finally:
        process.kill()
        process.communicate()


def test_a_tree_whose_root_has_ended_is_unknown() -> None:
    """Once the root has ended and was waited for there is no figure, rather than a wrong one."""
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    cpu = ProcessTreeCpu(process.pid)
    assert cpu.seconds() is not None
    process.communicate(b"\n")
    assert cpu.seconds() is None
