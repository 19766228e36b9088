"""The binaries that tune_attention.py needs, compiled in workers that have no GPU, and what each takes of an SM."""

from __future__ import annotations

import time
from typing import Any

from attention_tries import Family, Shape, make_inputs, plan, tries_of
from triton_compile import assemble, resources


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
        found["registers"], found["spills"] = resources(assemble(built.asm["ptx"], 90))
        return found
    except Exception as error:
        return {"error": f"{type(error).__name__}: {str(error)[:300]}", "seconds": time.monotonic() - start}


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
