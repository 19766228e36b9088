"""Where a record was measured: device, driver, clocks, versions, and what the memory gives in the same run."""

from __future__ import annotations

import os
import platform
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from .timing import Timed, captured, measure

COPY_BYTES = {"cuda": 2 << 30, "cpu": 256 << 20}
CPU_CACHE = 32 << 20  # where the system does not say
SAMPLES = 15
NODES = 100
CLOCKS = ("clocks.sm", "clocks.mem", "clocks.max.sm", "clocks.max.mem", "power.limit", "driver_version")


def describe(device: torch.device) -> tuple[str, dict[str, Any]]:
    """The device's name, and what else decides times."""
    about: dict[str, Any] = {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cpu": cpu_name(),
        "threads": torch.get_num_threads(),
        "cache_bytes": cache_bytes(device),
    }
    if device.type == "cpu":
        return about["cpu"], about
    properties = torch.cuda.get_device_properties(device)
    about |= {
        "cuda": torch.version.cuda,
        "triton": version_of("triton"),
        "sms": properties.multi_processor_count,
        "memory_bytes": properties.total_memory,
        "capability": f"{properties.major}.{properties.minor}",
        **nvidia_smi(CLOCKS),
    }
    return properties.name, about


def cache_bytes(device: torch.device) -> int:
    """Of the last level before memory."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).L2_cache_size)
    sizes = [0]
    for path in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size"):
        text = path.read_text().strip()
        units = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
        sizes.append(int(text[:-1]) * units[text[-1]] if text[-1:] in units else int(text))
    return max(sizes) or CPU_CACHE


def cpu_name() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def version_of(package: str) -> str | None:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version(package)
    except PackageNotFoundError:
        return None


def nvidia_smi(fields: tuple[str, ...]) -> dict[str, str]:
    """What nvidia-smi says; nothing where it cannot be asked."""
    command = ["nvidia-smi", f"--query-gpu={','.join(fields)}", "--format=csv,noheader", "--id=0"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return {}
    return dict(zip(fields, (v.strip() for v in done.stdout.strip().split(","))))


def commit() -> str:
    """Of the repository this runs from, with a + where files differ from it; what MTP_COMMIT says comes first."""
    if os.environ.get("MTP_COMMIT"):
        return os.environ["MTP_COMMIT"]
    folder = Path(__file__).resolve().parent
    try:
        root = Path(_git(folder, "rev-parse", "--show-toplevel").strip())
        if not (root / "bench" / Path(__file__).name).is_file():  # somebody else's, with an environment inside
            return "unknown"
        head = _git(folder, "rev-parse", "HEAD").strip()
        return head + ("+" if _git(folder, "status", "--porcelain", "--untracked-files=no").strip() else "")
    except (OSError, subprocess.SubprocessError):
        return "unknown"


def _git(folder: Path, *arguments: str) -> str:
    command = ["git", *arguments]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=20, check=True).stdout


def bandwidths(device: torch.device) -> tuple[float, float]:
    """(copy, read) in bytes/s; a copy counts what it reads and what it writes. Reading is the faster of two ways."""
    size = COPY_BYTES[device.type]
    source = torch.zeros(size // 4, dtype=torch.float32, device=device)
    target = torch.empty_like(source)
    copy = best(lambda: target.copy_(source), device)
    parts = source.view(-1, 1 << 16)
    read = min(best(lambda: source.sum(), device), best(lambda: torch.amax(parts, 1), device))
    return 2 * size / copy * 1e6, size / read * 1e6


def flops_per_second(device: torch.device) -> float:
    """Of a large matrix product: bf16 on a GPU, fp32 on a CPU."""
    size, dtype = (8192, torch.bfloat16) if device.type == "cuda" else (1024, torch.float32)
    a, b = torch.randn(2, size, size, device=device).to(dtype).unbind()
    return 2 * size**3 / best(lambda: a @ b, device) * 1e6


def node_us(device: torch.device) -> float | None:
    """One small kernel in a CUDA graph that waits for the one before it; None on a CPU."""
    if device.type != "cuda":
        return None
    x = torch.zeros(1024, device=device)
    timed, _ = captured([lambda: x.add_(1)] * NODES)
    return measure([timed], device, SAMPLES, 5.0)[0].us


def best(function: Callable[[], Any], device: torch.device) -> float:
    """Median microseconds of one call of a function that is a single kernel."""
    return measure([Timed(function, 1, queued=True)], device, SAMPLES, 5.0)[0].us
