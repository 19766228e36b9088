"""Runs the tests of ops with their Triton kernels in Triton's interpreter, in a process of their own.

conftest.py has the interpreter quickened there (quick_interpreter.py), and leaves out cases whose values are in others.
"""

from __future__ import annotations

import os
import platform
import re
import subprocess
import sys
from pathlib import Path

TESTS = Path(__file__).parent
HEADS = ("centroid_logits", "centroid_topk", "lm_head_topk")  # in a file of their own


def check_interpreted(*names: str) -> None:
    """The files test_<name>*.py pass, and those of each name hold a test of the kernel."""
    files = [str(p) for name in names for p in sorted(TESTS.glob(f"test_{name}*.py"))]
    config = str(TESTS.parent / "pyproject.toml")
    options = ["-c", config, "-q", "-x", "-rfEp", "-p", "no:cacheprovider", "-k", "triton"]
    command = [sys.executable, "-m", "pytest", *options, *files]
    environment = {k: v for k, v in os.environ.items() if not k.startswith("PYTEST_")}
    environment |= {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}  # the interpreter is tested on the CPU alone
    if platform.machine() in ("x86_64", "AMD64"):
        # numpy's products stand for a tensor core's, whose rows do not depend on how many there are. Those of its BLAS
        # for processors with AVX2, but not AVX-512, do.
        environment["OPENBLAS_CORETYPE"] = "Nehalem"
    paths = filter(None, environment.get("PYTHONPATH", "").split(os.pathsep))
    environment["PYTHONPATH"] = os.pathsep.join(map(os.path.abspath, paths))
    # Not in the repository's folder: its mtp_kernels would come before the installed one.
    done = subprocess.run(command, cwd=TESTS, capture_output=True, text=True, env=environment, timeout=1800)
    failed = re.sub(r"^PASSED .*\n", "", done.stdout, flags=re.MULTILINE)
    assert done.returncode == 0, failed[-4000:] + done.stderr[-1000:]
    for name in names:
        assert re.search(rf"^PASSED \S*test_{name}\w*\.py::", done.stdout, re.MULTILINE), f"no test of {name}"
