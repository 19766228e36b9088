"""Sweeps configurations of triton_ops/draft_attention.py on one GPU: which tiles, chunks and folds are fastest.

    python tests/gpu/tune_attention.py [--seconds 145] [--jobs 14] [--only E4B_full] [--out FOLDER]

A family is a layer's sizes: all its shapes (batches, contexts) share a configuration, since the chunks of a row follow
from its own keys alone; how many programs share them does not. Every candidate runs as in a round (q norm, RoPE, early
launches), 1 or more chunks ("c1") or folds ("f1") a program; "now" is what `spread` of the plan chooses. Times: a CUDA
graph of launches in a row on the same keys, attend alone ("attend", what a round on segments runs) and attend and merge
("both", what others run).
Each result is compared with fp64 before it is timed, and with its own bits afterwards. The 8 best and the present one
are timed again, in turn.
Without a GPU: compiles every candidate for sm_90 and says what it needs.
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import statistics
import sys
import time
import traceback
from itertools import pairwise
from pathlib import Path
from typing import Any

START = time.monotonic()
sys.path[:0] = [str(folder) for folder in Path(__file__).parents[:2]]  # which PYTHONSAFEPATH leaves out

import torch  # noqa: E402
from attention_binaries import key_of, start_compiling  # noqa: E402
from attention_tries import FAMILIES, PAGE, SMS, Arguments, Family, Shape, Try, make_inputs, plan, tries_of  # noqa: E402
from mtp_kernels.bench.inputs import take_pages  # noqa: E402

from mtp_kernels.reference.draft_attention import draft_attention as reference  # noqa: E402

BANDWIDTH = 4.4e12
SHARED_SM, SHARED_BLOCK, REGISTERS, THREADS = 228 * 1024, 227 * 1024, 65536, 2048


def note_occupancy(t: Try) -> None:
    """Programs an SM, and waves, from what the compiler says of attend."""
    shared, registers = t.about.get("shared"), t.about.get("registers")
    if shared is None or registers is None:
        return
    warps = t.c.num_warps
    by_registers = REGISTERS // (-(-registers // 8) * 8 * 32 * warps)
    t.about["an_sm"] = max(1, min(SHARED_SM // (shared + 1024), by_registers, THREADS // (32 * warps)))
    t.about["waves"] = round(t.programs / (t.about["an_sm"] * SMS), 2)


def exact_result(inputs: Arguments) -> torch.Tensor:
    """In fp64, a few requests at a time."""
    q, k, v, table, lengths, scale = inputs.args
    kwargs = {n: x for n, x in inputs.kwargs.items() if n != "capability"}
    step = max(1, 16384 // max(1, table.size(1) * PAGE))
    parts = []
    for start in range(0, q.size(0), step):
        some = slice(start, start + step)
        pages = table[some].long().flatten()
        own = torch.arange(pages.numel(), device=q.device, dtype=torch.int32).view(-1, table.size(1))
        caches = [take_pages(cache, pages).double() for cache in (k, v)]
        mine = {**kwargs, "positions": kwargs["positions"][some], "q_norm_weight": kwargs["q_norm_weight"].double()}
        parts.append(reference(q[some].double(), *caches, own, lengths[some], scale, **mine).double())
    return torch.cat(parts)


def run_all(t: Try) -> torch.Tensor:
    for launch in t.launches:
        launch.run()
    return t.output


def capture(launches: list[Any], nodes: int) -> Any:
    """Without torch.cuda.graph, which gives all cached memory back each time."""
    torch.cuda.synchronize()
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    with torch.cuda.stream(stream):
        graph.capture_begin()
        try:
            for _ in range(nodes):
                for launch in launches:
                    launch.run()
        finally:
            graph.capture_end()
    torch.cuda.synchronize()
    return graph


def sample(t: Try, which: int, times: int) -> None:
    """Microseconds of one pass: a graph's replay between events, the first left out."""
    graph = t.graphs[which]
    graph.replay()
    events = [torch.cuda.Event(enable_timing=True) for _ in range(times + 1)]
    events[0].record()
    for event in events[1:]:
        graph.replay()
        event.record()
    events[-1].synchronize()
    t.samples[which] += [a.elapsed_time(b) * 1000 / t.nodes for a, b in pairwise(events)]


def prepare(t: Try, inputs: Arguments, exact: torch.Tensor, allowed: float) -> float:
    """The error of the result; raises where it is wrong."""
    t.launches, t.output = plan(inputs, t.c, t.spread)
    got = run_all(t).double()
    torch.cuda.synchronize()
    error = (got - exact).abs().max().item()
    if not error <= allowed:
        raise ValueError(f"wrong: {error:.2e} from fp64, {allowed:.2e} allowed")
    return error


def tune(family: Family, shape: Shape, jobs: dict[str, Any], deadline: float) -> dict[str, Any]:
    inputs = make_inputs(family, shape, "cuda")
    exact = exact_result(inputs)
    largest = exact.abs().max().item()
    tried: list[Try] = []
    twins: list[tuple[Try, Try]] = []  # a try, and the one that has its times
    measured: dict[tuple[Any, ...], Try] = {}
    floor = inputs.bytes / BANDWIDTH * 1e6
    candidates = tries_of(family, shape, inputs)
    candidates.sort(key=lambda t: t.way != "now")  # the present one first: what it errs by is the measure
    allowed = 0.02 * largest
    seen = 0
    for t in candidates:
        if time.monotonic() > deadline:
            print(f"  out of time after {seen} of {len(candidates)}")
            break
        seen += 1
        if t.same() in measured:
            twins.append((t, measured[t.same()]))
            continue
        try:
            why = ready(t, family, shape, jobs, deadline)
            if why:
                raise RuntimeError(why)
            error = prepare(t, inputs, exact, allowed)
            if t.way == "now":
                allowed = 2 * error + 1e-6 * max(1.0, largest)
            bits = t.output.clone()
            t.nodes = max(6, min(40, int(1000 / (1.3 * floor + 3))))
            t.graphs = [capture(t.launches[:1], t.nodes), capture(t.launches, t.nodes)]
            for which in (0, 1):
                sample(t, which, 4)
            torch.cuda.synchronize()
            if not torch.equal(t.output, bits):
                raise ValueError("the replays gave other bits")
            tried.append(t)
            measured[t.same()] = t
        except Exception as error:
            print(f"  {t.label()}: {type(error).__name__}: {str(error)[:200]}", flush=True)
            if "CUDA error" in str(error) or "illegal" in str(error):
                raise
    tried.sort(key=lambda t: t.times[1])
    best = tried[:8] + [t for t in tried[8:] if t.way == "now"]
    for t in best:
        t.samples = [[], []]
    for _ in range(4):
        for t in best:
            for which in (0, 1):
                sample(t, which, 4)
    best.sort(key=lambda t: t.times[1])
    title = f"{family.name} batch {shape.batch}, {shape.context} keys, {family.rows} rows"
    print(f"\n{title}: floor {floor:.1f} us ({inputs.bytes / 1e6:.1f} MB); {len(tried)} right of {seen} tried, "
          f"{len(twins)} as others")
    print(f"  {'configuration':<40}{'keys':>6}{'parts':>6}{'progs':>6}{'an SM':>6}{'waves':>6}{'regs':>5}{'KB':>5}"
          f"{'attend':>8}{'both':>8}{'share':>7}")  # fmt: skip
    for t in best:
        a = t.about
        print(f"  {t.label():<40}{t.keys:>6}{t.parts:>6}{t.programs:>6}{a.get('an_sm', 0):>6}{a.get('waves', 0):>6}"
              f"{a.get('registers', 0):>5}{a.get('shared', 0) // 1024:>5}{t.times[0]:>8.2f}{t.times[1]:>8.2f}"
              f"{floor / t.times[0]:>7.0%}", flush=True)  # fmt: skip
    every = [t.as_json() for t in tried] + [as_twin(*pair) for pair in twins]
    return {"family": family.name, "batch": shape.batch, "context": shape.context, "rows": family.rows,
            "floor_us": floor, "best": [t.as_json() for t in best], "all": every}


def as_twin(t: Try, measured: Try) -> dict[str, Any]:
    times = {"attend_us": measured.times[0], "both_us": measured.times[1], "measured_as": measured.label()}
    return {**t.as_json(), **measured.about, **times}


def ready(t: Try, family: Family, shape: Shape, jobs: dict[str, Any], deadline: float) -> str:
    """Waits for the workers' binaries; why the candidate cannot run, or ""."""
    t.launches, _ = plan(make_inputs(family, shape, "meta"), t.c, t.spread)
    for launch in t.launches:
        try:
            found = jobs[key_of(launch)].get(timeout=max(1.0, min(60.0, deadline - time.monotonic())))
        except multiprocessing.TimeoutError:
            return "not compiled in time"
        if found["error"]:
            return "compiler: " + found["error"]
        if launch is t.launches[0]:
            t.about |= {n: found[n] for n in ("shared", "registers", "spills") if n in found}
        if found["shared"] > SHARED_BLOCK:
            return f"{found['shared']} bytes of shared memory"
    if t.about.get("spills", 0) > 256:
        return f"spills {t.about['spills']} bytes"
    note_occupancy(t)
    return ""


def compare(results: list[dict[str, Any]]) -> None:
    """Of each family, the configurations over all its shapes: times over the present one's, the better way of each."""
    for name in dict.fromkeys(r["family"] for r in results):
        own = [r for r in results if r["family"] == name]
        ratios: dict[str, dict[str, float]] = {}
        for r in own:
            retimed = {label_of(t): t for t in r["best"]}
            every = [retimed.get(label_of(t), t) for t in r["all"]]
            now = next((t["both_us"] for t in every if t["way"] == "now"), None)
            if now is None:
                continue
            for t in every:
                at = ratios.setdefault(label_of(t)[0], {})
                shape = f"{r['batch']}x{r['context']}"
                at[shape] = min(at.get(shape, math.inf), t["both_us"] / now)
        rows = [(statistics.geometric_mean(at.values()), label, at) for label, at in ratios.items()
                if len(at) == len(own)]
        print(f"\n{name}, over all shapes: attend and merge, over the present configuration's time")
        for mean, label, at in sorted(rows)[:8]:
            print(f"  {label:<36}{mean:>6.3f}  " + "  ".join(f"{s} {x:.3f}" for s, x in at.items()), flush=True)


def label_of(t: dict[str, Any]) -> tuple[str, str]:
    names = (("n", "block_n"), ("s", "slabs"), ("w", "num_warps"), ("st", "stages"), ("cw", "chunk_weight"),
             ("mc", "max_chunks"), ("f", "fold"))
    return " ".join(f"{short}{t[name]:g}" for short, name in names), t["way"]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=145)
    parser.add_argument("--jobs", type=int, default=14)
    parser.add_argument("--only", action="append", choices=[f.name for f in FAMILIES])
    parser.add_argument("--out", type=Path, help="folder for the record (default: none is written)")
    args = parser.parse_args()
    deadline = START + args.seconds
    families = [f for f in FAMILIES if not args.only or f.name in args.only]
    # Before anything asks for the GPU: a fork that inherits a CUDA context is of no use.
    with multiprocessing.get_context("fork").Pool(args.jobs) as pool:
        jobs = start_compiling(pool, families)
        print(f"{time.monotonic() - START:.0f} s: {len(jobs)} binaries wanted", flush=True)
        if not torch.cuda.is_available():
            return without_gpu(families, jobs)
        print(torch.cuda.get_device_name(), torch.__version__, flush=True)
        results: list[dict[str, Any]] = []
        order = [(f, s) for f in families for s in f.shapes]
        for family, shape in order:
            if deadline - time.monotonic() < 3:
                print(f"left out: {family.name} {shape}")
                continue
            try:
                results.append(tune(family, shape, jobs, deadline))
            except Exception as error:
                traceback.print_exc()
                if "CUDA error" in str(error):
                    break  # the context is lost
            torch.cuda.empty_cache()
            if args.out is not None:
                args.out.mkdir(parents=True, exist_ok=True)
                (args.out / "tune_attention.json").write_text(json.dumps(results, indent=1))
            print(f"  {time.monotonic() - START:.0f} s", flush=True)
        compare(results)
        pool.terminate()
    return 0


def without_gpu(families: list[Family], jobs: dict[str, Any]) -> int:
    bad = 0
    for family in families:
        for shape in family.shapes:
            inputs = make_inputs(family, shape, "meta")
            print(f"\n{family.name} {shape}: floor {inputs.bytes / BANDWIDTH * 1e6:.1f} us")
            for t in tries_of(family, shape, inputs):
                why = ready(t, family, shape, jobs, time.monotonic() + 60)
                bad += bool(why)
                a = t.about
                print(f"  {t.label():<40}keys {t.keys:>5} parts {t.parts:>4} programs {t.programs:>5} an SM "
                      f"{a.get('an_sm', 0)} waves {a.get('waves', 0):>5} regs {a.get('registers', 0):>4} spills "
                      f"{a.get('spills', 0):>4} KB {a.get('shared', 0) // 1024:>4} {why}", flush=True)
    print("slowest compilations", sorted((round(j.get()["seconds"], 1) for j in jobs.values()), reverse=True)[:10])
    print(f"{bad} cannot run; {time.monotonic() - START:.0f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
