"""Where to compute, and with how many CPU threads."""

from __future__ import annotations

import os
from collections.abc import Callable

import torch


def check_device(name: str) -> None:
    """Tells whether torch can compute on a device.

    Raises:
        ValueError: an unknown device, or one that is not there.
    """
    try:
        torch.zeros(1, device=name).item()
    except (RuntimeError, AssertionError) as error:
        raise ValueError(f"device {name!r} cannot be used: {str(error).splitlines()[0]}") from None


def check_threads(count: int) -> None:
    """Tells whether a number of CPU threads makes sense.

    Raises:
        ValueError: below 1, or more than four per core.
    """
    most = 4 * (os.cpu_count() or 1)
    if not 1 <= count <= most:
        raise ValueError(f"the number of threads lies in 1 .. {most} here, got {count}")


def use_threads(count: int) -> None:
    """Sets the number of CPU threads of torch.

    Raises:
        ValueError: below 1, or far more than there are cores.
    """
    check_threads(count)
    torch.set_num_threads(count)


def use_fastest(seconds: Callable[[], float]) -> int:
    """Tries 1, half of and all of torch's threads, keeps what makes ``seconds()`` smallest, and returns it.

    Measured, not assumed: where others use the machine too, all threads can be far slower than one.
    """
    most = torch.get_num_threads()
    timed = {}
    for count in sorted({1, max(most // 2, 1), most}):
        torch.set_num_threads(count)
        timed[count] = seconds()
    fastest = min(timed, key=timed.__getitem__)
    torch.set_num_threads(fastest)
    return fastest
