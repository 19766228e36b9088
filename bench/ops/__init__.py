"""One file an op, named as it: the inputs that a model gives it, the bytes it must move, and plain PyTorch for it.

Each has

- `variants(config)`: the uses of the op in a model, by name; () where the model has none,
- `make(case, config, inputs)`: the Call of one set of inputs,
- `moved(call)` and `flops(call)`: bytes that any implementation must move, and operations it must do,
- `pytorch(...)`: the op in PyTorch's own functions and the dtype of its inputs, as an engine writes it today: a peer,
  and the yardstick of the check (an implementation may err twice as much) unless there is a `naive(...)` for that; None
  where no engine has one that gives the same results,
- `CHECK`: how results are compared: "floats", "head" (ranked tokens), "candidates" (all of them) or "exact".
"""

from __future__ import annotations

import importlib
from types import ModuleType

from ...ops import OPS


def bench_of(op: str) -> ModuleType:
    """The benchmark file of an op."""
    if op not in OPS:
        raise ValueError(f"--ops: expected names of {', '.join(OPS)}, got {op!r}")
    return importlib.import_module(f".{op}", __name__)
