"""Compiles a planned Triton launch without a GPU: shared memory, registers and spills on any architecture."""

from __future__ import annotations

import io
import re
import subprocess
import tempfile
from contextlib import redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import triton
from torch import Tensor
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

ARCHITECTURES = [80, 90, 100, 120]
SHARED_LIMIT = {80: 163 * 1024, 90: 227 * 1024, 100: 227 * 1024, 120: 99 * 1024}  # bytes a block, CUDA's guide, 16.2
TYPES = {
    torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16", torch.float8_e4m3fn: "fp8e4nv",
    torch.int32: "i32", torch.int64: "i64", torch.bool: "i1", torch.int16: "i16", torch.uint8: "u8",
    torch.float64: "fp64",
}
_logs: dict[str, str] = {}  # of ptxas, by the hash of what was compiled


@dataclass(frozen=True)
class Compiled:
    """What the compiler says of one launch."""

    ptx: str
    ttgir: str
    shared: int  # bytes a block
    registers: int  # a thread
    spill_stores: int  # bytes
    serialized: bool  # Hopper's matrix instructions wait for each other


def compile_launch(launch: Any, arch: int) -> Compiled:
    """Compile a `Launch` for sm_<arch>, with the alignment that PyTorch's own tensors have."""
    signature, constants, attrs = {}, dict(launch.constants), {}
    for i, name in enumerate(launch.kernel.arg_names):
        value = launch.args.get(name)
        if name in launch.constants:
            signature[name] = "constexpr"
        elif value is None:
            assert name in launch.args, f"{name} has no value"
            signature[name], constants[name] = "constexpr", None
        elif isinstance(value, Tensor):
            signature[name] = "*" + TYPES[value.dtype]
            if (value.storage_offset() * value.element_size()) % 16 == 0:
                attrs[(i,)] = [["tt.divisibility", 16]]
        else:
            signature[name] = "fp32" if isinstance(value, float) else ("i32" if -(2**31) <= value < 2**31 else "i64")
            if isinstance(value, int) and value % 16 == 0 and not _unspecialised(launch.kernel, name):
                attrs[(i,)] = [["tt.divisibility", 16]]
    source = ASTSource(launch.kernel, signature, constants, attrs)
    options = {"num_warps": launch.num_warps, "num_stages": launch.num_stages}
    if launch.early:
        options["launch_pdl"] = True
    if launch.registers:
        options["maxnreg"] = launch.registers
    with knobs.nvidia.scope(), redirect_stdout(io.StringIO()) as log:
        knobs.nvidia.dump_ptxas_log = True  # nothing where Triton has it in its cache
        built = triton.compile(source, target=GPUTarget("cuda", arch, 32), options=options)
    text = _logs.get(built.hash) or log.getvalue() or assemble(built.asm["ptx"], arch)
    _logs[built.hash] = text
    registers, spills = resources(text)
    serialized = "wgmma.mma_async instructions are serialized" in text
    return Compiled(built.asm["ptx"], built.asm["ttgir"], built.metadata.shared, registers, spills, serialized)


def _unspecialised(kernel: Any, name: str) -> bool:
    return any(p.name == name and p.do_not_specialize for p in kernel.params)


def resources(text: str) -> tuple[int, int]:
    """Registers and bytes of spill stores, as `ptxas -v` says."""
    registers = int(re.search(r"Used (\d+) registers", text)[1])  # type: ignore[index]
    return registers, sum(int(n) for n in re.findall(r"(\d+) bytes spill stores", text))


def assemble(ptx: str, arch: int) -> str:
    """What `ptxas -v` of Triton's package says of this PTX."""
    folder = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
    target = re.search(r"\.target (sm_\w+)", ptx)[1]  # type: ignore[index]
    tool = folder / ("ptxas-blackwell" if arch >= 100 else "ptxas")
    with tempfile.TemporaryDirectory() as where:
        source = Path(where) / "kernel.ptx"
        source.write_text(ptx)
        command = [str(tool), "-v", f"-arch={target}", str(source), "-o", str(Path(where) / "kernel.cubin")]
        return subprocess.run(command, capture_output=True, text=True, check=True).stderr
