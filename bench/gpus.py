"""What datasheets say of the GPUs that `--predict` knows."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Gpu:
    """One GPU; `names` are what its driver calls it."""

    bandwidth: float  # bytes/s, of the memory, from the datasheet
    l2_bytes: int
    sm_count: int
    names: tuple[str, ...]


MB = 1 << 20
GPUS = {
    # NVIDIA H200 datasheet: 4.8 TB/s; the die is the H100's. L2 as the driver reports it (60 MB).
    "h200": Gpu(4.8e12, 60 * MB, 132, ("NVIDIA H200", "NVIDIA H200 NVL")),
    # NVIDIA H100 datasheet, SXM5: 3.35 TB/s, 132 SMs; Hopper architecture whitepaper: 50 MB of L2.
    "h100": Gpu(3.35e12, 50 * MB, 132, ("NVIDIA H100 80GB HBM3",)),
    # NVIDIA H100 PCIe product brief: 2.0 TB/s, 114 SMs, 50 MB of L2.
    "h100-pcie": Gpu(2.0e12, 50 * MB, 114, ("NVIDIA H100 PCIe",)),
    # NVIDIA HGX B200 datasheet: 8 TB/s; 148 SMs and 126 MB of L2 as CUDA reports them (Chips and Cheese, "B200").
    "b200": Gpu(8.0e12, 126 * MB, 148, ("NVIDIA B200",)),
    # NVIDIA A100 datasheet, 80 GB SXM4: 2039 GB/s; Ampere architecture whitepaper: 108 SMs, 40 MB of L2.
    "a100-80gb-sxm": Gpu(2.039e12, 40 * MB, 108, ("NVIDIA A100-SXM4-80GB",)),
    # NVIDIA L40S datasheet: 864 GB/s; 142 SMs; L2 48 MB in public GPU databases (the full AD102 has 96 MB).
    "l40s": Gpu(0.864e12, 48 * MB, 142, ("NVIDIA L40S",)),
    # NVIDIA RTX Blackwell architecture whitepaper: RTX 5090, 1792 GB/s, 170 SMs, 96 MB of L2.
    "rtx-5090": Gpu(1.792e12, 96 * MB, 170, ("NVIDIA GeForce RTX 5090",)),
    # NVIDIA Ada architecture whitepaper: RTX 4090, 1008 GB/s, 128 SMs, 72 MB of L2.
    "rtx-4090": Gpu(1.008e12, 72 * MB, 128, ("NVIDIA GeForce RTX 4090",)),
}


def gpu_of(device_name: str) -> str | None:
    """The key of GPUS for a driver's name. Only exact names: "NVIDIA H100 NVL" is not "NVIDIA H100 80GB HBM3"."""
    return next((key for key, gpu in GPUS.items() if device_name in gpu.names), None)
