"""Runs cases: makes the inputs, checks every candidate against fp64, times the right ones together."""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any

import torch

from ..weights import AssistantWeights
from . import run_generate, run_ops, run_steps
from .case import Candidate, Case, Result, Unsupported
from .checks import Verdict
from .inputs import Inputs, config_of
from .rows import OURS
from .setting import Setting
from .timing import Timed, Times, captured, eager, measure


class BrokenDevice(RuntimeError):
    """A candidate left the device unusable for the rest of the process."""


MOST_WHY = 300  # characters of an error in the record
LEAST_CALLS = 16  # of an op, in the graph that is timed


def run_case(case: Case, setting: Setting, copy_bandwidth: float) -> list[Result]:
    """One result for every candidate; a time only where its result is right."""
    with torch.no_grad():
        try:
            problem, found = prepare(case, setting)
        except Unsupported as why:
            return [Result(case, OURS, status="unsupported", why=str(why))]
        except RuntimeError as error:  # sizes for which there is not enough memory, for one
            _check_device(setting.device, OURS, case, error)
            return [Result(case, OURS, status="error", why=_words(error))]
        base = Result(case, "", bytes=problem.bytes, flops=problem.flops,
                      floor_us=problem.bytes / copy_bandwidth * 1e6 if problem.bytes else None,
                      rotation_bytes=problem.bytes * len(problem.sets))
        results = measure_candidates(problem, found, base, setting)
    del problem, found
    gc.collect()
    if setting.device.type == "cuda":
        torch.cuda.empty_cache()
    return results


def prepare(case: Case, setting: Setting) -> tuple[Any, list[Candidate]]:
    """The case's inputs with their check, and who runs it."""
    problem: Any
    if case.level == "op":
        problem = run_ops.OpProblem(case, setting.device, setting.cache_bytes)
        return problem, run_ops.candidates(case, problem, setting)
    if case.level == "generate":
        problem = run_generate.GenerateProblem(case, setting.device)
        return problem, run_generate.candidates(case, problem, setting)
    weights = _weights(case.model, case.torch_dtype, setting.device)
    problem = run_steps.StepProblem(case, setting.device, weights)
    return problem, run_steps.candidates(case, problem, setting)


@lru_cache(maxsize=1)
def _weights(model: str, dtype: torch.dtype, device: torch.device) -> AssistantWeights:
    """Of the last model that was asked for: a dense head and its embedding take gigabytes and seconds.

    A centroid head's rows are in centroid order, for us and for the peers, as whoever serves the model has them.
    """
    config = config_of(model)
    embed = Inputs(device, dtype).table(config.vocab, config.backbone)
    return AssistantWeights.synthetic(config, dtype=dtype, device=device, embed_weight=embed).reordered()


def measure_candidates(
    problem: Any, found: Sequence[Candidate], base: Result, setting: Setting
) -> list[Result]:
    """Check each candidate, then time those that are right, interleaved."""
    results: list[Result] = []
    timed: list[Timed] = []
    right: list[int] = []
    for candidate in found[:1] if setting.only_ours else found:  # ours is the first
        result = replace(base, candidate=candidate.name, implementation=candidate.implementation)
        try:
            one, verdict = check(problem, candidate, setting)
        except Unsupported as why:
            results.append(replace(result, status="unsupported", why=str(why)))
            continue
        except Exception as error:  # a peer's failure is a row of the table, not the end of the run
            _check_device(setting.device, candidate.name, base.case, error)
            results.append(replace(result, status="error", why=_words(error)))
            continue
        if verdict.why:
            results.append(replace(result, status="wrong", why=verdict.why))
            continue
        result = replace(result, error=verdict.error, allowed=verdict.allowed)
        if not verdict.ok:
            results.append(replace(result, status="wrong", why="deviates too far from fp64"))
            continue
        right.append(len(results))
        timed.append(one)
        results.append(replace(result, nodes=one.nodes, extra=_extra(problem, candidate)))
    for place, times in zip(right, _measure(timed, setting)):
        results[place] = _with_times(results[place], times)
    return results


def check(problem: Any, candidate: Candidate, setting: Setting) -> tuple[Timed, Verdict]:
    """What is to be timed, and how far its results are from fp64: of the first set and of the last."""
    functions: list[Callable[[], Any]] = [candidate.bind(one) for one in problem.sets]
    graph = setting.device.type == "cuda" and problem.case.mode == "graph" and candidate.capturable
    if graph:
        # A graph's own launch takes about 2 us: many calls of an op share one, as the kernels of a round do.
        cycles = -(-LEAST_CALLS // len(functions)) if problem.case.level == "op" else 1
        timed, raw = captured(functions * cycles)
        timed.run()
        torch.cuda.synchronize()
    else:
        raw = [function() for function in (functions[0], *functions[1:][-1:])]
        timed = eager(functions)
    verdict = problem.check(0, candidate.results(raw[0]))
    if len(functions) > 1:
        verdict = verdict.worse(problem.check(len(functions) - 1, candidate.results(raw[-1])))
    return timed, verdict


def _measure(timed: Sequence[Timed], setting: Setting) -> list[Times]:
    """Graphs are interleaved with graphs and calls with calls, in the order of `timed`."""
    found: dict[int, Times] = {}
    for graph in (True, False):
        places = [i for i, one in enumerate(timed) if one.queued == graph]
        if places:
            group = [timed[i] for i in places]
            found |= zip(places, measure(group, setting.device, setting.samples, setting.seconds))
    return [found[i] for i in range(len(timed))]


def _with_times(result: Result, times: Times) -> Result:
    """In microseconds of one op, step, round or token."""
    units = {"step": result.case.num_steps, "generate": run_generate.NEW_TOKENS}.get(result.case.level, 1)
    nodes = None if result.nodes is None else result.nodes // units
    return replace(result, us=times.us / units, p10=times.p10 / units, p90=times.p90 / units, samples=times.samples,
                   nodes=nodes)


def _extra(problem: Any, candidate: Candidate) -> dict[str, float]:
    if problem.case.level != "generate" or candidate.name != "mtp":
        return {}
    return {"tokens_per_round": run_generate.tokens_per_round(problem.case, problem.inputs)}


def _check_device(device: torch.device, candidate: str, case: Case, error: Exception) -> None:
    """After some errors CUDA answers nothing more in this process: then say whose fault it was, and end."""
    if device.type == "cuda":
        try:
            torch.cuda.synchronize()
        except RuntimeError:
            raise BrokenDevice(f"{candidate} broke the device on {case}: {_words(error)}") from error


def _words(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"[:MOST_WHY]
