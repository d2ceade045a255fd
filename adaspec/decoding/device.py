"""Where to compute, and with how many CPU threads."""

from __future__ import annotations

from collections.abc import Callable

import torch


def check_device(name: str) -> None:
    """Tells whether torch can compute on a device.

    Raises:
        ValueError: an unknown device, or one that is not there.
    """
    try:
        torch.empty(1, device=name)
    except (RuntimeError, AssertionError) as error:
        raise ValueError(f"device {name!r} cannot be used: {str(error).splitlines()[0]}") from None


def use_threads(count: int) -> None:
    """Sets the number of CPU threads of torch.

    Raises:
        ValueError: below 1.
    """
    if count < 1:
        raise ValueError(f"the number of threads is at least 1, got {count}")
    torch.set_num_threads(count)


def use_fastest(seconds: Callable[[], float]) -> int:
    """Tries 1, half of and all of torch's threads, keeps what makes ``seconds()`` smallest, and returns it.

    Measured, not assumed: where others use the machine too, all threads can be ten times slower than one.
    """
    most = torch.get_num_threads()
    timed = {}
    for count in sorted({1, max(most // 2, 1), most}):
        torch.set_num_threads(count)
        timed[count] = seconds()
    fastest = min(timed, key=timed.__getitem__)
    torch.set_num_threads(fastest)
    return fastest
