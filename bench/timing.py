"""Times of functions on the same inputs: interleaved, medians, by replays of a CUDA graph or by calls from Python."""

from __future__ import annotations

import ctypes
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

Function = Callable[[], Any]
PAUSE = 1_000_000  # clock cycles, about 0.5 ms: what is queued meanwhile follows without a gap
LONGEST_PAUSE = 64 * PAUSE


@dataclass(frozen=True)
class Times:
    """Microseconds of one call."""

    us: float  # median
    p10: float
    p90: float
    samples: int

    @classmethod
    def of(cls, values: Sequence[float]) -> Times:
        ordered = sorted(values)
        last = len(ordered) - 1
        return cls(statistics.median(ordered), ordered[round(0.1 * last)], ordered[round(0.9 * last)], len(ordered))


@dataclass
class Timed:
    """A function to time: what a sample runs, and the number of calls in it."""

    run: Function
    calls: int
    nodes: int | None = None  # kernels of one call, in a CUDA graph
    queued: bool = False  # runs on the device alone, so that events around it say how long it took
    keeps: Any = None  # what must live as long as a graph is replayed: workspaces, tables, plans


def eager(functions: Sequence[Function]) -> Timed:
    """The functions in turn, one a set of inputs."""

    def run() -> None:
        for function in functions:
            function()

    return Timed(run, len(functions))


def captured(functions: Sequence[Function]) -> tuple[Timed, list[Any]]:
    """A CUDA graph that runs the functions in turn, and what each returned while it was captured."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        functions[0]()
        functions[-1]()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph(keep_graph=True)
    with torch.cuda.graph(graph):
        results = [function() for function in functions]
    nodes = _count_nodes(graph)
    graph.instantiate()
    per_call = None if nodes is None else round(nodes / len(functions))
    return Timed(graph.replay, len(functions), per_call, queued=True, keeps=functions), results


def _count_nodes(graph: Any) -> int | None:
    """Nodes of a captured graph, by the CUDA runtime that torch has loaded; None where it cannot be asked."""
    count = ctypes.c_size_t()
    name = f"libcudart.so.{(torch.version.cuda or '').split('.')[0]}"
    try:
        failed = ctypes.CDLL(name).cudaGraphGetNodes(ctypes.c_void_p(graph.raw_cuda_graph()), None, ctypes.byref(count))
    except (OSError, AttributeError):
        return None
    return None if failed else count.value


def measure(timed: Sequence[Timed], device: torch.device, samples: int, seconds: float) -> list[Times]:
    """Median times of one call each. Every round takes one sample of each function, so that drift meets all alike.

    Ends after `samples` rounds, or after `seconds` once there are three.
    """
    for one in timed:
        one.run()
    values: list[list[float]] = [[] for _ in timed]
    start, pause = time.perf_counter(), PAUSE
    for number in range(samples):
        if device.type == "cuda" and timed[0].queued:
            spent, pause = _replays(timed, pause)
        else:
            spent = _calls(timed, device)
        for own, one, us in zip(values, timed, spent):
            own.append(us / one.calls)
        if number >= 2 and time.perf_counter() - start > seconds:
            break
    return [Times.of(v) for v in values]


def _calls(timed: Sequence[Timed], device: torch.device) -> list[float]:
    """Wall-clock microseconds from the first call to the end of the last one's work."""
    sync = torch.cuda.synchronize if device.type == "cuda" else _nothing
    spent = []
    for one in timed:
        sync()
        start = time.perf_counter()
        one.run()
        sync()
        spent.append((time.perf_counter() - start) * 1e6)
    return spent


def _replays(timed: Sequence[Timed], pause: int) -> tuple[list[float], int]:
    """Microseconds between events around each replay, all queued behind a pause so that no launch is waited for.

    A pause that ended before all was queued is doubled, up to LONGEST_PAUSE, and the round begins again; the other
    result is what it took.
    """
    while True:
        torch.cuda._sleep(pause)
        events = []
        for one in timed:
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            one.run()
            end.record()
            events.append((start, end))
        was_long_enough = not events[0][0].query()
        torch.cuda.synchronize()
        if was_long_enough or pause >= LONGEST_PAUSE:
            return [start.elapsed_time(end) * 1e3 for start, end in events], pause
        pause *= 2


def _nothing() -> None:
    pass
