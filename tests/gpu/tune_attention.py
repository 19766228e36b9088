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
import re
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

START = time.monotonic()

import torch  # noqa: E402
from mtp_kernels.bench.inputs import Inputs, take_pages  # noqa: E402
from mtp_kernels.triton_ops import draft_attention as attention  # noqa: E402

from mtp_kernels.reference.draft_attention import draft_attention as reference  # noqa: E402

PAGE, SMS, BANDWIDTH = 16, 132, 4.4e12
SHARED_SM, SHARED_BLOCK, REGISTERS, THREADS = 228 * 1024, 227 * 1024, 65536, 2048
PRESENT = attention.config
SPREAD = attention.spread
RUNS = (1, 2, 3, 4, 5, 6, 8, 11, 16, 32)  # parts a program


@dataclass(frozen=True)
class Shape:
    batch: int
    context: int


@dataclass(frozen=True)
class Family:
    """Sizes of a layer, and what is tried: (block_n, slabs, num_warps, stages, those of folds and runs where they are
    others) and (chunk_weight, max_chunks, fold)."""

    name: str
    head_dim: int
    heads: tuple[int, int]  # query, KV
    window: int  # 0: none
    rows: int
    shapes: tuple[Shape, ...]
    tries: tuple[tuple[tuple[int, ...], tuple[float, int, int]], ...]

    def present(self) -> Any:
        dtype = torch.bfloat16
        return PRESENT(self.head_dim, self.rows, *self.heads, dtype, dtype, 90)

    def configs(self) -> list[Any]:
        present = self.present()
        found = [present]
        for (block_n, slabs, warps, stages, *more), (weight, chunks, fold) in self.tries:
            c = replace(
                present, block_n=block_n, chunk_multiple=max(block_n, present.chunk_multiple), slabs=slabs,
                num_warps=warps, stages=stages, fold_stages=more[0] if more else stages,
                run_stages=more[0] if more else stages, chunk_weight=weight, max_chunks=chunks, fold=fold,
            )
            if c not in found:
                found.append(c)
        return found


def cross(*pairs: tuple[list[tuple[int, ...]], list[tuple[float, int, int]]]) -> tuple[Any, ...]:
    return tuple((tile, rule) for tiles, rules in pairs for tile in tiles for rule in rules)


A, B, C, E = (16, 4, 4, 5), (32, 4, 4, 3), (32, 8, 8, 3), (16, 4, 4, 7, 5)
FULL_ONE_HEAD = cross(([B], [(0.5, 128, 4), (0.5, 256, 8), (0.5, 256, 4), (1.0, 128, 4)]))
FULL_TWO_HEADS = cross(([B], [(0.5, 128, 4), (1.0, 128, 4), (1.0, 128, 8)]))
FULL_12B = cross(([E], [(1.0, 128, 4), (0.5, 128, 8), (2.0, 128, 4)]), ([A, B, C], [(1.0, 128, 4)]))
FULL_31B = cross(([E], [(2.0, 64, 4), (4.0, 64, 4), (1.0, 64, 4)]), ([B], [(2.0, 64, 4), (2.0, 64, 8)]))
SLIDING_31B = cross(([(32, 1, 4, 5)], [(2.0, 8, 4), (2.0, 16, 4), (2.0, 16, 8)]), ([(32, 1, 4, 3)], [(2.0, 8, 4)]))
SLIDING_26B = cross(([(32, 1, 4, 5, 3)], [(2.0, 16, 4), (2.0, 16, 2)]), ([(32, 1, 4, 3)], [(2.0, 16, 4)]))
SLIDING_E4B = cross(([(32, 1, 4, 3)], [(1.0, 128, 8)]), ([(32, 1, 4, 5)], [(1.0, 128, 4)]))
SMALL, MIDDLE, LONG = Shape(8, 1024), Shape(8, 8192), Shape(8, 65536)
ONE, MANY = Shape(1, 65536), Shape(64, 4096)
FAMILIES = (
    Family("E4B_full", 512, (4, 2), 0, 1, (SMALL, MIDDLE, ONE, MANY), FULL_TWO_HEADS),
    Family("E2B_full", 512, (4, 1), 0, 1, (SMALL, MIDDLE, LONG, ONE, MANY), FULL_ONE_HEAD),
    Family("12B_full", 512, (16, 1), 0, 1, (SMALL, MIDDLE, LONG, ONE, MANY), FULL_12B),
    Family("31B_full", 512, (32, 4), 0, 1, (SMALL, MIDDLE, ONE, MANY), FULL_31B),
    Family("31B_sliding", 256, (32, 16), 1024, 1, (MIDDLE, MANY), SLIDING_31B),
    Family("26B_sliding", 256, (16, 8), 1024, 1, (MIDDLE, MANY), SLIDING_26B),
    Family("26B_full", 512, (16, 2), 0, 1, (SMALL, MIDDLE, ONE, MANY), FULL_TWO_HEADS),
    Family("E4B_sliding", 256, (4, 2), 512, 1, (MIDDLE, MANY), SLIDING_E4B),
)


@dataclass
class Arguments:
    """The arguments of plan(), as a round gives them."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    visible: int
    bytes: int


def make_inputs(family: Family, shape: Shape, device: str, dtype: torch.dtype = torch.bfloat16) -> Arguments:
    (qo, kv), dim, batch = family.heads, family.head_dim, shape.batch
    visible = min(shape.context, family.window) if family.window else shape.context
    pairs = dim // 2 if family.window else dim // 8
    theta = 1e4 if family.window else 1e6
    kwargs: dict[str, Any] = {"window_left": family.window - 1 if family.window else -1}
    if device == "meta":
        pages = batch * -(-shape.context // PAGE)
        q = torch.empty(batch, family.rows, qo, dim, dtype=dtype, device=device)
        k, v = (torch.empty(pages, PAGE, kv, dim, dtype=dtype, device=device) for _ in range(2))
        table = torch.empty(batch, pages // batch, dtype=torch.int32, device=device)
        lengths = torch.empty(batch, dtype=torch.int32, device=device)
        norm = torch.empty(dim, dtype=dtype, device=device)
    else:
        made = Inputs(device, dtype)
        q = made.normal(batch, family.rows, qo, dim)
        # Small keys: at a deviation of 1 attention is nearly a choice of one.
        std = 1.5 * dim**-0.5
        k, v, table, lengths = made.paged_cache(batch, shape.context, kv, dim, PAGE, "NHD", dtype, k_std=std)
        norm = made.norm(dim)
    freq = theta ** (-torch.arange(pairs, device=device, dtype=torch.float32) * 2 / dim)
    positions = torch.full((batch,), shape.context - 1, dtype=torch.int64, device=device)
    kwargs |= {"q_norm_weight": norm, "rope_inv_freq": freq, "positions": positions, "capability": 90}
    size = 2 * q.numel() * q.element_size() + batch * visible * kv * dim * 2 * k.element_size()
    return Arguments((q, k, v, table, lengths, 1.0), kwargs, visible, size)


def plan(inputs: Arguments, c: Any, spread: tuple[int, int], early: bool = True) -> tuple[list[Any], torch.Tensor]:
    """The launches of a round: as fused.py has them, of so many chunks a part and parts a program."""
    attention.config, attention.spread = lambda *_: c, lambda *_: spread
    try:
        launches, output = attention.plan(*inputs.args, **inputs.kwargs)
    finally:
        attention.config, attention.spread = PRESENT, SPREAD
    return [one.with_early(early) for one in launches], output


def key_of(launch: Any) -> str:
    """What decides the binary: launches with one key share it, or nearly."""
    kinds = {n: "none" if v is None else "one" if isinstance(v, int) and v == 1 else "16" if isinstance(v, int)
             and v % 16 == 0 else type(v).__name__ for n, v in launch.args.items()}
    return repr((launch.kernel.fn.__name__, launch.constants, launch.num_warps, sorted(kinds.items())))


class NoGpu:
    """What Triton asks of its driver to compile: in a worker, which has no CUDA context."""

    def get_current_target(self) -> Any:
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


def compile_one(family: Family, shape: Shape, c: Any, spread: tuple[int, int], index: int) -> dict[str, Any]:
    """In a worker: warms Triton's cache on disk through the same path that a launch takes."""
    start = time.monotonic()
    try:
        import triton

        triton.runtime.driver.set_active(NoGpu())
        launch = plan(make_inputs(family, shape, "meta"), c, spread)[0][index]
        built = launch.kernel.warmup(
            grid=launch.grid, **launch.args, **launch.constants, num_warps=launch.num_warps,
            num_stages=launch.num_stages, launch_pdl=True,
        )
        found = {"shared": built.metadata.shared, "seconds": time.monotonic() - start, "error": ""}
        found["registers"], found["spills"] = resources(built.asm["ptx"])
        return found
    except Exception as error:
        return {"error": f"{type(error).__name__}: {str(error)[:300]}", "seconds": time.monotonic() - start}


def resources(ptx: str) -> tuple[int, int]:
    import triton

    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "ptxas"
    with tempfile.TemporaryDirectory() as where:
        source = Path(where) / "kernel.ptx"
        source.write_text(ptx)
        command = [str(tool), "-v", "-arch=sm_90a", str(source), "-o", str(Path(where) / "kernel.cubin")]
        text = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    registers = int(re.search(r"Used (\d+) registers", text)[1])  # type: ignore[index]
    return registers, sum(int(n) for n in re.findall(r"(\d+) bytes spill stores", text))


@dataclass
class Try:
    """A configuration on a shape, in one of its ways."""

    c: Any
    spread: tuple[int, int]  # chunks a part, parts a program
    way: str
    keys: int  # a part
    parts: int
    programs: int  # with keys or, where the host's bound is above the chunks that there are, without
    about: dict[str, Any] = field(default_factory=dict)
    launches: list[Any] = field(default_factory=list)
    output: Any = None
    graphs: list[Any] = field(default_factory=list)
    samples: list[list[float]] = field(default_factory=lambda: [[], []])
    nodes: int = 20

    @property
    def times(self) -> list[float]:
        return [statistics.median(s) if s else math.inf for s in self.samples]

    def label(self) -> str:
        c = self.c
        tile = f"n{c.block_n} s{c.slabs} w{c.num_warps} st{c.stages}"
        return f"{tile:<15} cw{c.chunk_weight:g} mc{c.max_chunks} f{c.fold} {self.way:<3}"

    def same(self) -> tuple[Any, ...]:
        """Equal in tries that run the same launches on this shape, all of whose requests are as long."""
        c = self.c
        tile = (c.block_n, c.slabs, c.num_warps, c.stages, c.fold_stages, c.run_stages)
        return (*tile, c.fold, self.spread, self.keys, self.programs)

    def as_json(self) -> dict[str, Any]:
        names = ("block_n", "slabs", "num_warps", "stages", "chunk_weight", "max_chunks", "fold")
        return {**{n: getattr(self.c, n) for n in names}, "way": self.way, "keys": self.keys, "parts": self.parts,
                "programs": self.programs, "attend_us": self.times[0], "both_us": self.times[1], **self.about}


def tries_of(family: Family, shape: Shape, inputs: Arguments) -> list[Try]:
    found: list[Try] = []
    present = family.present()
    blocks = shape.batch * family.heads[1] * -(-family.rows // present.block_rows)
    for c in family.configs():
        chunks = attention.count_chunks(inputs.visible, c)
        keys = attention.most_keys_a_chunk(inputs.visible, c)
        folds = -(-chunks // c.fold)
        queries = min(family.rows, c.block_rows) * (family.heads[0] // family.heads[1])
        present_way = SPREAD(blocks, chunks, keys, queries, SMS, c) if c == present else None
        for each, parts in ((1, chunks), (c.fold, folds)):
            for run in RUNS:
                programs = blocks * -(-parts // run)
                now = (each, run) == present_way
                some = 100 <= programs <= (12 if run == 1 else 4.1) * SMS and run <= parts
                if now or (some and (parts > 1 or each > 1)):
                    way = "now" if now else f"{'c' if each == 1 else 'f'}{run}"
                    span = keys * each
                    found.append(Try(c, (each, run), way, span, -(-inputs.visible // span), programs))
    return found


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


def start_compiling(pool: Any, families: list[Family]) -> dict[str, Any]:
    """Every binary once, in the order in which they are needed."""
    jobs: dict[str, Any] = {}
    for family in families:
        for shape in family.shapes:
            inputs = make_inputs(family, shape, "meta")
            for t in tries_of(family, shape, inputs):
                for index, launch in enumerate(plan(inputs, t.c, t.spread)[0]):
                    key = key_of(launch)
                    if key not in jobs:
                        jobs[key] = pool.apply_async(compile_one, (family, shape, t.c, t.spread, index))
    return jobs


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
