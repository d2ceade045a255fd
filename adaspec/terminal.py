"""What a person sees: text as it arrives, a live line beneath it, progress, and the table at the end."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from rich.console import Console, Group
from rich.live import Live
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

if TYPE_CHECKING:
    from adaspec.compare import Comparison, PlanUse
    from adaspec.decoding.generate import Generation, Step
    from adaspec.decoding.store import Entry


@contextmanager
def progress(console: Console) -> Iterator[Callable[[str, float | None], None]]:
    """Yields a callback (what, share done or None) that keeps one line up to date; quiet when not on a terminal."""
    columns = (TextColumn("{task.description}"), BarColumn(bar_width=24), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("", total=None)
        last = ""

        def tell(what: str, share: float | None) -> None:
            nonlocal last
            if what != last and not console.is_terminal:
                console.print(Text(f"{what} ...", style="dim"))
            last = what
            bar.update(task, description=what, total=None if share is None else 1.0, completed=share or 0.0)

        yield tell


class Stream:
    """Prints text as it arrives. On a terminal the unfinished line and a status line stay live beneath it."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._line = ""
        self._tokens = self._rows = 0
        self._seconds = 0.0
        self._plans: Counter[str] = Counter()
        self._live = Live(console=console, transient=True, refresh_per_second=12) if console.is_terminal else None

    def __enter__(self) -> Stream:
        if self._live:
            self._live.start()
        return self

    def __exit__(self, *error: object) -> None:
        if self._live:
            self._live.update(Text(""))
            self._live.stop()
            self._write(self._line)
        if self._plans:
            self._write("\n")

    def show(self, step: Step) -> None:
        """Shows what a round brought to row 0."""
        self._tokens += step.outcome.tokens
        self._rows += step.outcome.rows
        self._seconds += step.outcome.seconds
        self._plans[str(step.decision.plan)] += 1
        piece = step.pieces[0]
        if self._live is None:
            self._write(piece)
            return
        *done, self._line = (self._line + piece).split("\n")
        for line in done:
            self._console.print(Text(line))
        self._live.update(Group(Text(self._line), self._status(str(step.decision.plan))))

    def _write(self, text: str) -> None:
        self._console.print(Text(text), end="", soft_wrap=True)
        self._console.file.flush()

    def _status(self, plan: str) -> Text:
        rounds = sum(self._plans.values())
        shares = "  ".join(f"{name} {count / rounds:.0%}" for name, count in self._plans.most_common(4))
        rate = self._tokens / self._seconds if self._seconds else 0.0
        line = f"▸ {plan}   {rate:.1f} tokens/s   {self._tokens / max(self._rows, 1):.2f} tokens/round   {shares}"
        return Text(line, style="cyan", no_wrap=True, overflow="ellipsis")


def plan_table(uses: Iterable[PlanUse], title: str = "") -> Table:
    """Rounds, share, and tokens per second as forecast and as measured, a line per plan."""
    table = Table(title=title or None, title_justify="left", box=None, pad_edge=False)
    table.add_column("plan")
    for name in ("rounds", "share", "forecast", "measured"):
        table.add_column(name, justify="right")
    for use in uses:
        measured = "-" if use.measured is None else f"{use.measured:.1f}"
        table.add_row(str(use.plan), str(use.rounds), f"{use.share:.0%}", f"{use.forecast:.1f}", measured)
    return table


def summary(generation: Generation) -> Text:
    """One line on what a generation took."""
    return Text(
        f"{generation.tokens} tokens at {generation.tokens_per_second:.1f} tokens/s "
        f"({generation.decode_seconds:.1f} s decoding, {generation.prefill_seconds:.1f} s reading the prompt), "
        f"{len(generation.steps)} rounds, {generation.mean_accepted_length:.2f} tokens a round"
    )


def comparison_line(generation: Generation, plain: Generation) -> Text:
    """One line against plain decoding in the same process."""
    ratio = generation.tokens_per_second / plain.tokens_per_second if plain.tokens_per_second else 0.0
    return Text(
        f"{generation.tokens_per_second:.1f} tokens/s against {plain.tokens_per_second:.1f} plain: {ratio:.2f}x",
        style="bold",
    )


def comparison_table(generation: Generation, comparison: Comparison) -> Table:
    """The controller, plain decoding and the best fixed plan of the sweep."""
    table = Table(box=None, pad_edge=False)
    table.add_column("method")
    table.add_column("tokens/s", justify="right")
    table.add_column("x plain", justify="right")
    plain = comparison.plain.tokens_per_second
    for name, rate in (
        ("adaspec", generation.tokens_per_second),
        ("plain decoding", plain),
        (f"best fixed: {comparison.best_plan}", comparison.best.tokens_per_second),
    ):
        table.add_row(name, f"{rate:.1f}", f"{rate / plain:.2f}" if plain else "-")
    return table


def model_lines(entry: Entry) -> Text:
    """A model of the store: what it is on one line, where it lies on the next."""
    where = str(entry.path) if entry.path else "not fetched yet"
    return Text(f"{entry.name}  ({entry.size / 1e6:.0f} MB, licence {entry.licence}, from {entry.origin})\n  {where}")
