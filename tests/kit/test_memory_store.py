"""The L2 in this process's memory, where tests look into it."""

from kit.simulated.memory_store import MemoryServer


def test_it_evicts_the_oldest() -> None:
    """The newest objects stay, each with its metadata; what is no object stays as well."""
    server = MemoryServer()
    server.data = {f"objects/e/tenant/{n:02x}": b"x" for n in range(5)}
    server.data |= {f"metadata/e/{n:02x}": b"y" for n in range(5)} | {"epochs/0": b"e"}
    server.evict(2)
    kept = {"objects/e/tenant/03", "objects/e/tenant/04", "metadata/e/03", "metadata/e/04", "epochs/0"}
    assert server.data.keys() == kept
    server.evict(9)
    assert server.data.keys() == kept
