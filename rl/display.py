"""What a person sees while a run goes on: a live table in a terminal, plain lines elsewhere."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from types import TracebackType

from rich.console import Console, Group
from rich.live import Live
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

PLAIN_EVERY = 1.0  # seconds between plain lines, at least
RECENT = 10  # steps in the live table


class Display:
    """`with Display(steps) as show`: notes, progress of the build, one row a step, tables at the end."""

    def __init__(self, steps: int, *, console: Console | None = None) -> None:
        self.steps = steps
        self.console = console or Console(highlight=False, soft_wrap=True)
        self.live = self.console.is_terminal
        self._rows: list[dict[str, str]] = []
        self._live: Live | None = None
        self._printed = 0.0
        self._began = time.monotonic()
        self._first_step: int | None = None

    def __enter__(self) -> Display:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None
    ) -> None:
        self.end_live()

    def note(self, text: str, style: str = "") -> None:
        self.console.print(Text(text, style=style))

    def lines(self, title: str, lines: Sequence[str]) -> None:
        self.note(title, "bold")
        for line in lines:
            self.note("  " + line)

    # ── building ──────────────────────────────────────────────────────────────────────────────────

    def progress(self) -> Builds:
        return Builds(self.console, self.live)

    # ── steps ─────────────────────────────────────────────────────────────────────────────────────

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        now = time.monotonic()
        if self._first_step is None:
            self._first_step, self._began = step, now
        left = (now - self._began) / max(1, step - self._first_step) * (self.steps - step)
        row = _cells(step, self.steps, metrics, left if step > self._first_step else None)
        if self.live:
            self._rows = [*self._rows, row][-RECENT:]
            if self._live is None:
                self._live = Live(console=self.console, refresh_per_second=4)
                self._live.start()
            self._live.update(Group(_steps_table(self._rows), _bar(step, self.steps)))
        elif now - self._printed >= PLAIN_EVERY or step in (self._first_step, self.steps):
            self._printed = now
            self.console.print(Text("  ".join(f"{name} {cell}" for name, cell in row.items() if cell)))

    def validation(self, found: Mapping[str, float]) -> None:
        named = {name.removeprefix("validation/"): value for name, value in found.items()}
        said = [f"{name} {named[name]:.3f}" for name in ("truth", "judge", "scalar") if name in named]
        self.note(
            f"validation of version {named['version']:.0f}: {', '.join(said)} "
            f"({named['prompts']:.0f} prompts, {named['seconds']:.1f} s)"
        )

    def end_live(self) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None

    def table(self, title: str, header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
        table = Table(title=title, title_justify="left", title_style="bold", show_edge=False)
        for i, name in enumerate(header):
            table.add_column(name, justify="left" if i == 0 else "right")
        for row in rows:
            table.add_row(*row)
        self.console.print(table)


class Builds:
    """Progress of several builds: bars in a terminal, a line at every quarter elsewhere."""

    def __init__(self, console: Console, live: bool) -> None:
        self.console, self.live = console, live
        self._bars = Progress(
            TextColumn("building {task.description}"), BarColumn(), TextColumn("{task.percentage:>3.0f} %"),
            TimeElapsedColumn(), TextColumn("{task.fields[note]}"), console=console,
        )  # fmt: skip
        self._tasks: dict[str, TaskID] = {}
        self._quarter: dict[str, int] = {}

    def __enter__(self) -> Builds:
        if self.live:
            self._bars.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self.live:
            self._bars.stop()

    def update(self, name: str, fraction: float, note: str = "") -> None:
        if self.live:
            if name not in self._tasks:
                self._tasks[name] = self._bars.add_task(name, total=1.0, note=note)
            self._bars.update(self._tasks[name], completed=fraction, note=note)
        elif int(4 * fraction) > self._quarter.get(name, -1):
            self._quarter[name] = int(4 * fraction)
            self.console.print(Text(f"building {name}: {100 * fraction:.0f} %  {note}".rstrip()))


def _cells(step: int, steps: int, m: Mapping[str, float], left: float | None) -> dict[str, str]:
    def show(name: str, form: str = "{:.2f}", scale: float = 1.0) -> str:
        return form.format(scale * m[name]) if name in m else ""

    idle = {k.removeprefix("idle/"): v for k, v in m.items() if k.startswith("idle/")}
    return {
        "step": f"{step}/{steps}",
        "reward": show("reward/mean", "{:.3f}"),
        "truth": show("truth/accuracy", "{:.3f}"),
        "distil": show("loss/distill", "{:.3f}"),
        "age": show("age/mean") and f"{m['age/mean']:.2f} (max {m['age/max']:.0f})",
        "parse fail": show("judge/parse_fail", "{:.1f}%", 100),
        "ess": show("policy/ess", "{:.3f}"),
        "tok/s": show("throughput/tokens_per_s", "{:,.0f}"),
        "idle": " ".join(f"{who} {100 * share:.0f}%" for who, share in idle.items()),
        "left": "" if left is None else f"{int(left) // 60}:{int(left) % 60:02d}",
    }


def _steps_table(rows: Sequence[Mapping[str, str]]) -> Table:
    shown = [name for name in rows[-1] if any(row[name] for row in rows)]
    table = Table(show_edge=False)
    for name in shown:
        table.add_column(name, justify="right", no_wrap=True)
    for row in rows:
        table.add_row(*(row[name] for name in shown))
    return table


def _bar(step: int, steps: int) -> Text:
    width = 60
    done = width * step // steps
    return Text("━" * done + "·" * (width - done) + f" {100 * step // steps} %")
