"""The shapes: one line each."""

from dataclasses import dataclass
from typing import Literal

Start = Literal["vllm", "hotspan", "LLM", "forked LLM"]
"""Who starts the engine: one's own `vllm serve`, `hotspan serve`, `LLM()`, and `LLM()` in a child of `os.fork()`."""


@dataclass(frozen=True, slots=True)
class Shape:
    """One shape of engine.

    options:  of vLLM, besides the model's.
    nodes:    hosts, each with a /dev/shm of its own.
    replicas: engines behind one server; a text is then asked often enough to reach each of them.
    has_disk: whether a disk is given.
    refused:  what the start says where it is refused; None if the shape is served.
    fails:    what vLLM's CPU engine says where it can't compute this shape, with or without hotspan.
    """

    start: Start
    name: str
    options: str = ""
    nodes: int = 1
    replicas: int = 1
    has_disk: bool = True
    refused: str | None = None
    fails: str | None = None

    def __str__(self) -> str:
        return f"{self.start}, {self.name}" + ("" if self.has_disk else ", RAM alone")


TP2, PP2, DP2 = "--tensor-parallel-size 2", "--pipeline-parallel-size 2", "--data-parallel-size 2"
RAY = "--distributed-executor-backend ray"
REPLICAS_OVER_HOSTS = "has replicas on further hosts"
NO_PP = "in sync_and_gather_intermediate_tensors"
"""The second stage gets no tensors of the first: an assertion of vLLM 0.32's."""

NO_RAY = "current platform cpu does not support ray"

DISK_OVER_HOSTS = r"a disk tier \(--disk\) can't be had by an engine over several hosts"

SHAPES = (
    Shape("vllm", "one rank"),
    Shape("hotspan", "one rank"),
    Shape("vllm", "TP 2", TP2),
    Shape("hotspan", "TP 2", TP2),
    Shape("vllm", "PP 2", PP2, fails=NO_PP),
    Shape("hotspan", "PP 2", PP2, fails=NO_PP),
    Shape("vllm", "DP 2", DP2, replicas=2),
    Shape("hotspan", "DP 2", DP2, replicas=2),
    Shape("vllm", "TP 2 over two nodes", TP2, nodes=2, refused=DISK_OVER_HOSTS),
    Shape("hotspan", "TP 2 over two nodes", TP2, nodes=2, refused=DISK_OVER_HOSTS),
    Shape("vllm", "TP 2 over two nodes", TP2, nodes=2, has_disk=False),
    Shape("hotspan", "TP 2 over two nodes", TP2, nodes=2, has_disk=False),
    Shape("vllm", "PP 2 over two nodes", PP2, nodes=2, has_disk=False, fails=NO_PP),
    Shape("vllm", "DP 2 over two nodes", DP2, nodes=2, replicas=2),
    Shape("hotspan", "DP 2 over two nodes", DP2, nodes=2, replicas=2, refused=REPLICAS_OVER_HOSTS),
    Shape("vllm", "TP 2, Ray", f"{TP2} {RAY}", fails=NO_RAY),
    Shape("hotspan", "TP 2, Ray", f"{TP2} {RAY}", fails=NO_RAY),
    Shape("LLM", "one rank"),
    Shape("LLM", "TP 2", TP2),
    Shape("forked LLM", "one rank"),
)
