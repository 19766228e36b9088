"""`mtp-kernels bench policy`: DraftPolicy beside no drafting and every fixed depth, in simulated time."""

from __future__ import annotations

import argparse
import json
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

from ..policy import CostModel, DraftPolicy
from .simulate import COSTS, MAX_STEPS, Stream, regimes, run_fixed, run_policy

if TYPE_CHECKING:
    from rich.console import Console

LEAST_TOKENS = 6000  # of a run, so that a small batch too meets most of the record


@dataclass(frozen=True)
class Row:
    """One cost model, one acceptance, one batch size: tokens a second."""

    costs: str
    acceptance: str
    batch: int
    fixed: list[float]  # of every depth 0 to MAX_STEPS
    policy: float
    rounds: list[int]  # of the policy, at each depth

    @property
    def best_depth(self) -> int:
        return self.fixed.index(max(self.fixed))

    @property
    def of_best(self) -> float:
        return self.policy / max(self.fixed)

    @property
    def of_none(self) -> float:
        return self.policy / self.fixed[0]


def compare(
    costs: dict[str, CostModel], acceptance: dict[str, list[list[Stream]]], batches: Sequence[int], tokens: int,
    seed: int = 0,
) -> Iterator[Row]:
    """A row for each of their combinations, runs of `tokens` tokens a request; the policy starts anew in each."""
    for name, phases in acceptance.items():
        for batch in batches:
            total = max(tokens * batch, LEAST_TOKENS)
            fixed = [run_fixed(phases, batch, total, depth, seed) for depth in range(MAX_STEPS + 1)]
            for label, model in costs.items():
                rates = [
                    made / (rounds * (model.draft_seconds(batch, depth) + model.verify_seconds(batch * (depth + 1))))
                    for depth, (made, rounds) in enumerate(fixed)
                ]
                outcome = run_policy(DraftPolicy(MAX_STEPS), phases, model, batch, total, seed)
                yield Row(label, name, batch, rates, outcome.tokens_a_second, outcome.rounds)


def policy_command(args: argparse.Namespace, console: Console | None) -> int:
    """Runs everything, prints tables or JSON, writes `--out`; 1 where the policy misses what README promises."""
    acceptance = {name: phases for name, phases in regimes().items() if name in args.acceptance}
    rows = list(compare(COSTS, acceptance, args.batches, args.tokens, args.seed))
    record = {"command": shlex.join(["mtp-kernels", *args.words]), "rows": [asdict(row) for row in rows]}
    text = json.dumps(record)
    if args.policy_out:
        args.policy_out.parent.mkdir(parents=True, exist_ok=True)
        args.policy_out.write_text(text + "\n", encoding="utf-8")
    if console is None:
        print(text)
    else:
        show(console, rows)
    return 0 if all(row.of_best >= 0.97 and row.of_none >= 0.97 for row in rows) else 1


def show(console: Console, rows: Sequence[Row]) -> None:
    """A table for the recorded acceptance of each cost model, and one line for each of the other kinds."""
    from rich.table import Table

    for label in dict.fromkeys(row.costs for row in rows):
        table = Table(title=f"{label}: tokens a second beside the best fixed depth, acceptance of the example pair")
        for heading in ("batch", "none", *map(str, range(1, MAX_STEPS + 1)), "policy", "policy / none", "depths"):
            table.add_column(heading, justify="right")
        for row in rows:
            if row.costs == label and row.acceptance == "pair":
                cells = [f"{rate / max(row.fixed):.2f}" for rate in row.fixed]
                cells[row.best_depth] = f"[bold]{cells[row.best_depth]}[/bold]"
                table.add_row(str(row.batch), *cells, f"{row.of_best:.3f}", f"{row.of_none:.2f}", _most_used(row))
        console.print(table)
    table = Table(title="the policy at its worst, over all batch sizes")
    for heading in ("acceptance", "costs", "policy / best fixed", "at batch", "policy / none", "at batch"):
        table.add_column(heading, justify="right")
    for name, label in dict.fromkeys((row.acceptance, row.costs) for row in rows):
        some = [row for row in rows if (row.acceptance, row.costs) == (name, label)]
        best, none = min(some, key=lambda row: row.of_best), min(some, key=lambda row: row.of_none)
        table.add_row(name, label, f"{best.of_best:.3f}", str(best.batch), f"{none.of_none:.3f}", str(none.batch))
    console.print(table)


def _most_used(row: Row) -> str:
    """The depths of most rounds, for example 3-5."""
    used = [depth for depth, count in enumerate(row.rounds) if count >= 0.1 * sum(row.rounds)]
    return str(used[0]) if len(used) == 1 else f"{used[0]}-{used[-1]}"

