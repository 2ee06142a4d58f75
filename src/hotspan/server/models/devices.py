"""GPUs for several models: of their own while there are enough, shared otherwise."""

from collections.abc import Mapping, Sequence

from hotspan.config.configuration import visible_gpus

VARIABLE = "CUDA_VISIBLE_DEVICES"


def visible_devices(surroundings: Mapping[str, str]) -> tuple[str, ...]:
    """The names of the GPUs that this process may use, as CUDA_VISIBLE_DEVICES has them."""
    visible = surroundings.get(VARIABLE)
    if visible is None:
        return tuple(str(number) for number in range(visible_gpus(surroundings)))
    return tuple(name for device in visible.split(",") if (name := device.strip()) not in ("", "-1"))


def split_devices(devices: Sequence[str], wanted: Sequence[int | None]) -> list[tuple[str, ...]] | None:
    """Each model's own devices; None if there are not enough for all, so that all see all of them.

    wanted: how many each was told to take; None for as many as can be, the same power of two for each of these.
    """
    greedy = wanted.count(None)
    left = len(devices) - sum(number or 0 for number in wanted)
    if left < greedy or not devices:
        return None
    most = 1 << ((left // greedy).bit_length() - 1) if greedy else 0
    split, at = [], 0
    for number in wanted:
        end = at + (most if number is None else number)
        split.append(tuple(devices[at:end]))
        at = end
    return split
