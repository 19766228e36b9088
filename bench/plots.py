"""A record as pictures: how far each op is from the floor, and latency against batch and context."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from .record import Record
from .roofline import OURS_COLOUR, log_ticks, roofline
from .rows import (
    OURS,
    Row,
    candidates_of,
    common_settings,
    has_time,
    rows_of,
    settings_text,
    time_of,
    unusual_settings,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

DPI = 150
# Okabe and Ito's palette, which colour-blind people tell apart; a candidate has its colour and marker in every picture.
STYLES = {
    OURS: (OURS_COLOUR, "o"),
    "pytorch": ("#7F7F7F", "s"),
    "torch.compile": ("#E69F00", "^"),
    "transformers": ("#000000", "v"),
    "flashinfer": ("#009E73", "D"),
    "vllm": ("#0072B2", "P"),
    "sglang": ("#CC79A7", "X"),
}
SPARE_STYLES = (("#56B4E9", "<"), ("#B8A800", ">"), ("#8C4B00", "h"), ("#4B2E83", "p"))


def draw(record: Record, folder: Path) -> list[Path]:
    """Write each picture that the record has times for, as PNG and SVG, and return the paths."""
    import matplotlib

    folder.mkdir(parents=True, exist_ok=True)
    drawn = [row for row in rows_of(record) if row.case.level in ("op", "step", "round")]
    rows = [row for row in drawn if any(has_time(result) for result in row.results.values())]
    figures = {
        "roofline": roofline(record, rows),
        "latency_batch": _latency(record, rows, "batch"),
        "latency_context": _latency(record, [row for row in rows if row.case.batch == 1], "context"),
    }
    paths = []
    for name, figure in figures.items():
        if figure is None:
            continue
        png, svg = folder / f"{name}.png", folder / f"{name}.svg"
        figure.savefig(png, dpi=DPI)
        figure.set_layout_engine("none")  # keep what the first one laid out: that takes most of the time
        # No date and ids from a fixed salt: one record always gives one SVG.
        with matplotlib.rc_context({"svg.hashsalt": name}):
            figure.savefig(svg, metadata={"Date": None})
        paths += [png, svg]
    return paths


def _latency(record: Record, rows: list[Row], axis: str) -> Figure | None:
    """One row of panels for each thing measured, one column for each model, one line for each candidate."""
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D

    things = {thing: _one_setting(found) for thing, found in _by_thing(rows).items()}
    models = list(dict.fromkeys(row.case.model for found in things.values() for row in found))
    if not models:
        return None
    flat = len(models) == 1  # then one row of panels, not one column
    height, width = (1, len(things)) if flat else (len(things), len(models))
    figure = Figure(figsize=(1.6 + 2.9 * max(width, 2), 1.7 + 2.5 * height), layout="constrained")
    grid = figure.subplots(height, width, squeeze=False, sharey=False if flat else "row")
    strays = False
    for i, (thing, found) in enumerate(things.items()):
        for j, model in enumerate(models):
            axes = grid[0][i] if flat else grid[i][j]
            panel = [row for row in found if row.case.model == model]
            strays |= _panel(axes, panel, axis)
            axes.set_title(_title(thing, model, panel, axis, flat, first=i == 0), fontsize=9)
            if j == 0:
                unit = "us a call" if thing.startswith("attention") else "us a step"
                axes.set_ylabel(unit if flat else f"{thing}\n{unit}", fontsize=9)
            if flat or i == len(things) - 1:
                axes.set_xlabel("batch (requests)" if axis == "batch" else "context (keys a request)", fontsize=9)
    for axes in grid.flat:  # when all panels that share an axis have set its range
        log_ticks(axes.yaxis)
    shown = [row for found in things.values() for row in found]
    floor = Line2D([], [], color="black", linestyle="--", linewidth=1, label="floor: bytes / copy bandwidth")
    stray = Line2D([], [], linestyle="", marker="o", color="black", markerfacecolor="white", label="at another context")
    handles = [*(_handle(name, shown) for name in candidates_of(shown)), floor, *([stray] if strays else [])]
    figure.legend(handles=handles, loc="outside lower center", ncols=min(len(handles), 2 * max(width, 2)), fontsize=9)
    settings = settings_text(common_settings(row.case for row in shown), ("dtype", "kv_dtype", "mode"))
    title = "Latency against batch" if axis == "batch" else "Latency against context at batch 1"
    figure.suptitle(f"{title} (median, p10 to p90)\n{record.run.device_name}, {settings}")
    return figure


def _by_thing(rows: Iterable[Row]) -> dict[str, list[Row]]:
    """The rows of each line of panels: the steps, the rounds (a step of them), each kind of attention layer."""
    found: dict[str, list[Row]] = {}
    for row in sorted(rows, key=lambda row: ("step", "round", "op").index(row.case.level)):
        case = row.case
        if case.level in ("step", "round"):
            found.setdefault("step" if case.level == "step" else f"step of a {case.name} round", []).append(row)
        elif case.name == "draft_attention":
            found.setdefault(f"attention, {case.variant}".rstrip(", "), []).append(row)
    return found


def _one_setting(rows: list[Row]) -> list[Row]:
    """The rows of the most frequent settings and number of rows a request: lines must not mix them."""
    common = common_settings(row.case for row in rows)
    usual = [row for row in rows if not unusual_settings(row.case, common)] or rows[:1]
    counts = Counter(row.case.rows for row in usual)
    chosen = max(counts, key=lambda count: (counts[count], -count))
    return [row for row in usual if row.case.rows == chosen]


def _series(panel: Sequence[Row], axis: str) -> tuple[list[Row], list[Row]]:
    """The rows that a line may join, and for each other place on the axis one row that stands alone.

    Against batch a line needs one context: the one measured at most batches. A batch that was measured at other
    contexts only is shown at the longest of them, apart from the line.
    """
    if axis == "context":
        return sorted(panel, key=lambda row: row.case.context), []
    context = _line_context(panel)
    joined = {row.case.batch: row for row in panel if row.case.context == context}
    alone = {
        row.case.batch: row for row in sorted(panel, key=lambda row: row.case.context) if row.case.batch not in joined
    }
    return [joined[batch] for batch in sorted(joined)], [alone[batch] for batch in sorted(alone)]


def _line_context(panel: Sequence[Row]) -> int:
    counts = Counter(row.case.context for row in panel)
    return max(counts, key=lambda context: (counts[context], context))


def _title(thing: str, model: str, panel: Sequence[Row], axis: str, flat: bool, first: bool) -> str:
    name = f"{model}: {thing}" if flat else model
    if axis == "batch":
        return f"{name}, context {_short(_line_context(panel))}" if panel else name
    return name if flat or first else ""


def _panel(axes: Axes, panel: Sequence[Row], axis: str) -> bool:
    """Draw the lines; whether a batch had to be taken from another context."""
    from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

    if not panel:
        axes.text(0.5, 0.5, "not measured", ha="center", va="center", transform=axes.transAxes, color="gray")
        axes.set_xticks([])
        axes.set_yscale("log")
        return False
    joined, alone = _series(panel, axis)
    for name in reversed(candidates_of(panel)):  # ours last, on top
        _line(axes, joined, alone, name, axis)
    for rows, style in ((joined, "--"), (alone, "")):
        points = [(getattr(row.case, axis), row.floor_us * _share(row)) for row in rows if row.floor_us]
        if points:
            marker = "_" if len(points) == 1 or not style else ""
            axes.plot(*zip(*points), ls=style, color="black", linewidth=1, marker=marker, markersize=10, zorder=1)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    places = {getattr(row.case, axis): _short(getattr(row.case, axis)) for row in joined}
    places |= {row.case.batch: f"{row.case.batch}\n(context {_short(row.case.context)})" for row in alone}
    axes.set_xlim(min(places) / 1.6, max(places) * 1.6)
    axes.xaxis.set_major_locator(FixedLocator(sorted(places)))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: places.get(round(value), "")))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.tick_params(labelsize=8)
    axes.grid(True, which="major", color="#DDDDDD", linewidth=0.6)
    axes.set_axisbelow(True)
    return bool(alone)


def _line(axes: Axes, joined: Sequence[Row], alone: Sequence[Row], name: str, axis: str) -> None:
    colour, marker = style_of(name)
    for rows, line, fill in ((joined, "-", colour), (alone, "", "white")):
        found = [(row, row.results[name]) for row in rows if has_time(row.results.get(name))]
        if not found:
            continue
        places = [getattr(row.case, axis) for row, _ in found]
        times = [time_of(result) * _share(row) for row, result in found]
        axes.plot(
            places,
            times,
            linestyle=line,
            color=colour,
            marker=marker,
            markersize=6,
            markerfacecolor=fill,
            linewidth=1.4,
            zorder=4 if name == OURS else 3,
        )
        for place, (row, result) in zip(places, found):
            if result.p10 is not None and result.p90 is not None:
                ends = [result.p10 * _share(row), result.p90 * _share(row)]
                axes.plot([place, place], ends, color=colour, linewidth=0.9, zorder=2)


def _share(row: Row) -> float:
    """A round is shown as one of its steps."""
    return 1 / row.case.num_steps if row.case.level == "round" else 1.0


def _handle(name: str, rows: Iterable[Row]) -> object:
    """The legend's entry; ours says what served it."""
    from matplotlib.lines import Line2D

    colour, marker = style_of(name)
    ours = [row.ours for row in rows if row.ours is not None and has_time(row.ours)]
    served = sorted({result.implementation for result in ours if result.implementation})
    label = f"ours ({', '.join(served)})" if name == OURS and served else "ours" if name == OURS else name
    return Line2D([], [], color=colour, marker=marker, markersize=6, linewidth=1.4, label=label)


def style_of(name: str) -> tuple[str, str]:
    """Colour and marker; a name outside STYLES keeps one of the spare ones, by its letters."""
    return STYLES.get(name) or SPARE_STYLES[sum(name.encode()) % len(SPARE_STYLES)]


def _short(number: int) -> str:
    return f"{number // 1024}K" if number >= 1024 and number % 1024 == 0 else str(number)
