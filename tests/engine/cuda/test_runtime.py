"""The simulated CUDA runtime itself: what it allows, what it forbids, and what it notices."""

import subprocess
import sys
from collections.abc import Iterator

import numpy as np
import pytest
import torch

from kit.cuda.clocks import Actor, Races
from kit.cuda.install import DeviceTensor, installed
from kit.cuda.machine import CudaError, Device, HostRange, Machine
from kit.cuda.streams import Event, Pieces, Stream

SIZE = 4096


@pytest.fixture
def machine() -> Iterator[Machine]:
    made = Machine(1, pace=0.0)
    made.devices[0].allocate(4 * SIZE)
    made.devices[0].blocks = [(0, SIZE, 4)]
    with installed(made):
        yield made


def host(device: Device) -> "np.ndarray[tuple[int], np.dtype[np.uint8]]":
    """Host memory of four slots that the device's rank has mapped, and registered."""
    memory = np.zeros(4 * SIZE, np.uint8)
    device.ranges.append(HostRange(memory.ctypes.data, memory.nbytes, SIZE, SIZE))
    assert device.driver.cudaHostRegister(memory.ctypes.data, memory.nbytes) == 0
    return memory


def test_host_code_cannot_read_device_memory(machine: Machine) -> None:
    """numpy, arithmetic and item access on a device's tensor are errors; its shape and address are not."""
    device = machine.devices[0]
    tensor = torch.frombuffer(device._maps[1], dtype=torch.int8).as_subclass(DeviceTensor).view((4, SIZE))
    assert tensor.shape == (4, SIZE) and tensor.is_cuda and tensor.data_ptr() == device.address
    for use in (lambda: tensor.numpy(), lambda: tensor + 1, lambda: tensor[0], lambda: tensor.tolist()):
        with pytest.raises(RuntimeError, match="the device's"):
            use()


def test_a_read_around_the_tensor_ends_the_process() -> None:
    """Memory of a device is not readable at its address: host code that dereferences it is killed by SIGSEGV."""
    code = """if True:
        import ctypes
        from kit.cuda.machine import Machine
        device = Machine(1).devices[0]
        device.allocate(4096)
        ctypes.string_at(device.address, 1)
    """
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, timeout=300)
    assert ended.returncode == -11


def test_a_source_may_be_read_from_the_call_on(machine: Machine) -> None:
    """With reads ahead a load may copy what was there when it was submitted; without, what its stream finds."""
    device = machine.devices[0]
    memory, machine.eager = host(device), 100.0
    seen = {}
    for reads_ahead in (True, False):
        memory[:] = 1
        stream = Stream(device)
        pieces = Pieces.of((memory.ctypes.data, device.address, SIZE))
        device.copy(stream, pieces, reads_ahead=reads_ahead, is_kernel=False, what="a load")
        memory[:] = 2
        stream.synchronize()
        seen[reads_ahead] = int(device.memory[0])
    assert seen == {True: 1, False: 2}
    assert machine.early == 1


def test_events_and_streams_order_what_waits_for_them(machine: Machine) -> None:
    """A stream that waits for another's event, or for the other, goes on only when that has come so far."""
    device, order = machine.devices[0], []
    first, second, third = Stream(device), Stream(device), Stream(device)
    from kit.cuda.streams import Kernel

    first.submit(Kernel(lambda: order.append(1)))
    event = Event(device)
    event.record(first)
    second.wait_event(event)
    second.submit(Kernel(lambda: order.append(2)))
    third.wait_stream(second)
    third.submit(Kernel(lambda: order.append(3)))
    assert not event.query()
    third.synchronize()
    assert order == [1, 2, 3] and event.query()


def test_an_error_is_sticky(machine: Machine) -> None:
    """From the failing operation on every call raises, waits too, and nothing that was queued is done."""
    device, done = machine.devices[0], []
    event = Event(device)
    from kit.cuda.streams import Kernel

    device.compute.submit(Kernel(lambda: done.append(1)))
    event.record(device.compute)
    machine.fails_at = machine.operations + 1
    for _ in range(2):
        for call in (event.query, event.synchronize, device.compute.synchronize):
            with pytest.raises(CudaError):
                call()
    assert not done and not machine.turn()


def test_a_kernel_needs_registered_memory(machine: Machine) -> None:
    """A kernel that reads host memory which is not registered is an illegal access; a batched copy of it is slow."""
    device = machine.devices[0]
    memory = host(device)
    assert device.driver.cudaHostUnregister(memory.ctypes.data) == 0
    pieces = Pieces.of((memory.ctypes.data, device.address, SIZE))
    device.copy(device.compute, pieces, reads_ahead=False, is_kernel=False, what="a load")
    device.copy(device.compute, pieces, reads_ahead=False, is_kernel=True, what="a load")
    assert device.error is not None


def test_memory_let_go_while_it_is_copied_is_noticed(machine: Machine) -> None:
    """Unregistering a range that a copy in flight reads or writes is noted as a wrong use of the driver."""
    device = machine.devices[0]
    memory = host(device)
    pieces = Pieces.of((memory.ctypes.data, device.address, SIZE))
    device.copy(Stream(device), pieces, reads_ahead=False, is_kernel=False, what="a load")
    device.driver.cudaHostUnregister(memory.ctypes.data)
    assert machine.wrong_uses == ["memory is unregistered before 1 copies of it are done"]


def test_accesses_that_nothing_orders_are_a_race() -> None:
    """Two accesses, one of them a write, are a race unless the second has seen the first, whoever told it."""
    races, writer, reader = Races(), Actor("writer"), Actor("reader")
    races.write(["slot"], writer.clock, writer.act(), "a store")
    races.read(["slot"], reader.clock, reader.act(), "a load")
    assert races.found == ["a load beside a store at slot"]
    reader.learn(writer.clock)
    races.read(["slot"], reader.clock, reader.act(), "a load")
    races.write(["slot"], writer.clock, writer.act(), "a store")
    writer.learn(reader.clock)
    races.write(["slot"], writer.clock, writer.act(), "a store")
    assert dict(races.counts) == {"a load beside a store": 1, "a store beside a load": 1}
