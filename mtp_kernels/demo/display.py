"""How the demo shows itself: the text as it comes, a progress bar, and a table at the end."""

from __future__ import annotations

from types import TracebackType
from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from ..generation import GenerationChunk, GenerationStatistics
from .pair import Pair

ACCEPTED = "bold green"
MARKS = "⟦", "⟧"  # around accepted tokens where there is no colour


class LiveText:
    """The text as it comes, and a progress bar; accepted tokens are green (in brackets where there is no colour)."""

    def __init__(self, console: Console, pair: Pair, max_new_tokens: int) -> None:
        self._console = console
        self._progress = Progress(
            TextColumn("tokens"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[rate]}"),
            TimeElapsedColumn(), console=console,
        )
        self._task = self._progress.add_task("decode", total=max_new_tokens, rate="")
        self._marked = Marked(pair, colour=console.color_system is not None)
        shown = Group(self._marked.text, self._progress)
        self._live = Live(shown, console=console, refresh_per_second=12, vertical_overflow="visible")
        self._tokens = 0
        self._drafted: list[int] = []  # tokens of each round that drafted

    def add(self, chunk: GenerationChunk) -> None:
        """Show what a round gave."""
        self._marked.add(chunk.token_ids[: chunk.num_accepted], accepted=True)
        self._marked.add(chunk.token_ids[chunk.num_accepted :], accepted=False)
        self._tokens += len(chunk.token_ids)
        if chunk.num_drafted:
            self._drafted.append(len(chunk.token_ids))
        drafted = self._drafted
        rate = f"{sum(drafted) / len(drafted):.2f} tokens a round" if drafted else ""
        self._progress.update(self._task, advance=len(chunk.token_ids), rate=rate)

    def __enter__(self) -> LiveText:
        self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._progress.update(self._task, total=self._tokens)
        self._marked.close()
        self._live.stop()
        if not self._console.is_terminal:
            self._console.print()  # Live ends its last line only on a terminal


class Marked:
    """Text that grows token by token; a token's bytes show as soon as they form whole characters."""

    def __init__(self, pair: Pair, colour: bool) -> None:
        self.text = Text()
        self._pair = pair
        self._colour = colour
        self._ids: list[int] = []
        self._shown = ""
        self._open = False

    def add(self, ids: list[int], accepted: bool) -> None:
        for token in ids:
            self._ids.append(token)
            whole = self._pair.decode(self._ids).rstrip("\N{REPLACEMENT CHARACTER}")
            fresh = whole[len(self._shown) :]
            if fresh:
                self._append(fresh, accepted)
                self._shown = whole

    def close(self) -> None:
        self._append("", False)

    def _append(self, fresh: str, accepted: bool) -> None:
        if self._colour:
            self.text.append(fresh, ACCEPTED if accepted else None)
            return
        if accepted != self._open:
            self.text.append(MARKS[0] if accepted else MARKS[1])
            self._open = accepted
        self.text.append(fresh)


def summary_table(summary: GenerationStatistics, extra: dict[str, str]) -> Table:
    """The figures of a run, one a row."""
    table = Table(title="drafting", show_header=False)
    if not summary.rounds:
        table.add_row("tokens a round", "no round drafted")
        return table
    table.add_row("tokens a round", f"{summary.tokens_per_round:.2f} ({summary.tokens} in {summary.rounds} rounds)")
    for depth, share in enumerate(summary.accepted_per_position, start=1):
        table.add_row(f"accepted at position {depth}", f"{share:.0%} of rounds")
    table.add_row("time in draft", _seconds(summary.draft_seconds, summary.rounds))
    table.add_row("time in verify", _seconds(summary.verify_seconds, summary.rounds))
    table.add_row("time in commit", _seconds(summary.commit_seconds, summary.rounds))
    table.add_row("time in prefill", f"{summary.prefill_seconds:.2f} s")
    for name, value in extra.items():
        table.add_row(name, value)
    return table


def _seconds(total: float, rounds: int) -> str:
    return f"{total:.2f} s ({1e3 * total / rounds:.1f} ms a round)"


def show_prompt(console: Console, prompt: str, lines: int = 6) -> None:
    """The last lines of the prompt, dimmed."""
    tail: Any = Text("\n".join(prompt.splitlines()[-lines:]), "dim")
    console.print(Text("... end of the prompt:", "dim italic"))
    console.print(tail, end="")
