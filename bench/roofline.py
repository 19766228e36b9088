"""The picture of where each op stands: under the roofs of memory and arithmetic, and in multiples of its floor."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median
from typing import TYPE_CHECKING

from .case import LEVELS, Result
from .record import Record, Run
from .rows import REFERENCE, Row, bandwidth_text, case_name, has_time, over, ratio_text, time_of

if TYPE_CHECKING:
    from matplotlib.axis import Axis
    from matplotlib.figure import Figure, SubFigure

OURS_COLOUR, PEER_COLOUR = "#D55E00", "#8DA9C4"
# Eight colours that colour-blind people tell apart; with another marker for each further round through them.
COLOURS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#7F7F7F", "#000000")
MARKERS = ("o", "^", "s", "D")


def roofline(record: Record, rows: Sequence[Row]) -> Figure | None:
    """Left the classical roofline of ours; right time over floor of ours and of the best peer, which says more here:
    everything in drafting is bound by memory or by launches."""
    from matplotlib.figure import Figure

    bars = _ratios(rows)
    if not bars:
        return None
    figure = Figure(figsize=(15, max(6.0, 2.2 + 0.36 * len(bars))), layout="constrained")
    left, right = figure.subfigures(1, 2, wspace=0.03, squeeze=False)[0]
    _roofs(left, record.run, rows)
    _floors(right, bars, rows)
    figure.suptitle(f"{record.run.device_name}, commit {record.run.commit[:12]}")
    return figure


def log_ticks(axis: Axis) -> None:
    """Plain numbers on a logarithmic axis; 1, 2 and 5 of each decade where there are few decades."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    low, high = axis.get_view_interval()
    axis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0) if high / low < 300 else (1.0,)))
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axis.set_minor_formatter(NullFormatter())


def _roofs(figure: SubFigure, run: Run, rows: Sequence[Row]) -> None:
    from matplotlib.ticker import EngFormatter, NullFormatter

    axes = figure.subplots()
    points = _points(rows)
    intensities = [x for found in points.values() for x, _ in found] or [1.0]
    ridge = run.flops_per_second / run.copy_bandwidth
    xs = [min(*intensities, 0.5) / 2, max(*intensities, ridge) * 4]
    for name, bandwidth, style in (("copy", run.copy_bandwidth, "-"), ("read", run.read_bandwidth, "--")):
        corner = run.flops_per_second / bandwidth
        axes.plot(
            [xs[0], corner],
            [xs[0] * bandwidth, run.flops_per_second],
            color="black",
            linestyle=style,
            linewidth=1.2,
            label=f"{name}: {bandwidth_text(bandwidth)}",
        )
    axes.plot(
        [ridge, xs[1]],
        [run.flops_per_second] * 2,
        color="black",
        linestyle=":",
        linewidth=1.5,
        label=f"matrix product: {EngFormatter(places=0)(run.flops_per_second)}FLOP/s",
    )
    for number, (name, found) in enumerate(points.items()):
        colour, marker = COLOURS[number % len(COLOURS)], MARKERS[number // len(COLOURS) % len(MARKERS)]
        at_x, at_y = ([point[i] for point in found] for i in (0, 1))
        axes.scatter(at_x, at_y, s=14, color=colour, marker=marker, alpha=0.35, linewidths=0)
        axes.scatter(
            median(at_x),
            median(at_y),
            s=70,
            color=colour,
            marker=marker,
            edgecolors="black",
            linewidths=0.7,
            zorder=3,
            label=name,
        )
    axes.set(xscale="log", yscale="log", xlim=xs, xlabel="flops per byte that must move", ylabel="achieved FLOP/s")
    axes.set_title("Ours under the measured roofs (large marker: median of the cases)", fontsize=10)
    log_ticks(axes.xaxis)
    axes.yaxis.set_major_formatter(EngFormatter(sep=" "))
    axes.yaxis.set_minor_formatter(NullFormatter())
    axes.grid(True, which="major", color="#DDDDDD", linewidth=0.6)
    axes.set_axisbelow(True)
    figure.legend(loc="outside lower center", ncols=3, fontsize=8)


def _points(rows: Sequence[Row]) -> dict[str, list[tuple[float, float]]]:
    """Flops per byte and achieved FLOP/s of ours, for each op that computes."""
    points: dict[str, list[tuple[float, float]]] = {}
    for row in rows:
        ours = row.ours
        if ours is not None and has_time(ours) and ours.flops and ours.bytes:
            point = (ours.flops / ours.bytes, ours.flops / time_of(ours) * 1e6)
            points.setdefault(row.case.name, []).append(point)
    return points


Ratios = tuple[list[float], list[float]]  # time over floor in each case: ours, the best peer


def _ratios(rows: Sequence[Row]) -> dict[str, Ratios]:
    bars: dict[str, Ratios] = {}
    for row in sorted(rows, key=lambda row: LEVELS.index(row.case.level)):
        for result, which in ((row.ours, 0), (row.best_peer, 1)):
            ratio = _over_floor(row, result)
            if ratio is not None:
                bars.setdefault(case_name(row.case), ([], []))[which].append(ratio)
    return bars


def _over_floor(row: Row, result: Result | None) -> float | None:
    return over(time_of(result), row.floor_us) if result is not None and has_time(result) else None


def _floors(figure: SubFigure, bars: dict[str, Ratios], rows: Sequence[Row]) -> None:
    axes = figure.subplots()
    ours = [row.ours for row in rows if row.ours is not None and has_time(row.ours)]
    served = sorted({result.implementation for result in ours if result.implementation})
    labels = (f"ours ({', '.join(served) or REFERENCE})", "best peer of each case")
    largest = max(max(both[0] + both[1]) for both in bars.values())
    for which, colour in ((0, OURS_COLOUR), (1, PEER_COLOUR)):
        places = [place + (which - 0.5) * 0.38 for place, both in enumerate(bars.values()) if both[which]]
        found = [both[which] for both in bars.values() if both[which]]
        middles = [median(values) for values in found]
        axes.barh(places, [m - 1 for m in middles], height=0.36, left=1, color=colour, label=labels[which])
        for place, middle, values in zip(places, middles, found):
            axes.plot([min(values), max(values)], [place, place], color="black", linewidth=0.8)
            end = (max(1.0, *values), place)
            axes.annotate(ratio_text(middle), end, (4, 0), textcoords="offset points", va="center", fontsize=7)
    axes.axvline(1, color="black", linestyle="--", linewidth=1.2, label="floor: bytes / copy bandwidth")
    axes.set(xscale="log", xlabel="time over floor (1 = the floor)")
    axes.set_xlim(right=largest * 2.5)
    log_ticks(axes.xaxis)
    axes.set_yticks(range(len(bars)), list(bars), fontsize=8)
    axes.set_ylim(len(bars) - 0.4, -0.6)
    axes.set_title("Time over floor (bar: median of the cases; line: their range)", fontsize=10)
    axes.grid(True, axis="x", color="#DDDDDD", linewidth=0.6)
    axes.set_axisbelow(True)
    figure.legend(loc="outside lower center", ncols=3, fontsize=8)
