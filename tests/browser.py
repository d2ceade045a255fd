"""A page in a headless Chromium: its document after a few seconds, what its console said, and a screenshot."""

from __future__ import annotations

import subprocess
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Look:
    """``dom``: the document, serialised; ``complaints``: lines of the console."""

    dom: str
    complaints: list[str]


def look(chromium: str, url: str, profile: Path, *, size: str = "1200,900", dark: bool = False) -> Look:
    """Opens ``url``; ``profile``: an empty folder for the browser; ``size``: of the window, "width,height"."""
    done = _browse(chromium, url, profile, size, dark, "--virtual-time-budget=4000", "--dump-dom")
    return Look(done.stdout, [line for line in done.stderr.splitlines() if "CONSOLE" in line])


def screenshot(chromium: str, url: str, profile: Path, out: Path, *, size: str, dark: bool = False) -> None:
    _browse(chromium, url, profile, size, dark, "--hide-scrollbars", f"--screenshot={out}")
    assert out.stat().st_size > 10_000


def _browse(
    chromium: str, url: str, profile: Path, size: str, dark: bool, *options: str
) -> subprocess.CompletedProcess[str]:
    command = [chromium, "--headless=new", "--no-sandbox", "--disable-gpu", "--enable-logging=stderr"]
    command += [f"--user-data-dir={profile}", f"--window-size={size}", *options]
    command += ["--force-dark-mode", "--blink-settings=preferredColorScheme=0"] if dark else []
    done = subprocess.run([*command, url], capture_output=True, text=True, timeout=180, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    return done
