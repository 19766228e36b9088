"""SGLang's tree functions as candidates for tree_expand and tree_build (written for SGLang 0.5.23).

Their modules import the whole engine, so single functions are taken out of the files: select_top_k_tokens,
organize_draft_results and build_tree_kernel_efficient run unchanged. The CUDA kernel of the last is compiled from the
wheel's source, as SGLang itself does at run time, with apache-tvm-ffi and nvcc.
"""

from __future__ import annotations
import __future__

import ast
import logging
import math
from collections.abc import Callable, Sequence
from enum import IntEnum
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..case import Call, Unsupported

SPEC_UTILS, EAGLE_UTILS = "sglang/srt/speculative/spec_utils.py", "sglang/srt/speculative/eagle_utils.py"
COMMON = "sglang/srt/utils/common.py"
JIT = "sglang/kernels/jit"
HEADERS = ("bits.h", "source_location.h", "tensor.h", "utils.cuh", "utils.h", "speculative/eagle.cuh",
           "speculative/ngram.cuh")  # fmt: skip
CUDA = (f"{JIT}/csrc/speculative/tree.cuh", *(f"{JIT}/include/sgl_kernel/{name}" for name in HEADERS))
CFLAGS = ("-std=c++20", "-O3", "--expt-relaxed-constexpr")  # SGLang's own
FILES = {"tree_expand": (COMMON, SPEC_UTILS), "tree_build": (EAGLE_UTILS, *CUDA)}

Bind = Callable[[Call], Callable[[], Any]]
Results = Callable[[Any], tuple[Tensor | None, ...]]


class TreeMaskMode(IntEnum):  # SGLang's numbers
    FULL_MASK = 0
    QLEN_ONLY = 1
    QLEN_ONLY_BITPACKING = 2


def functions(root: Path, file: str, names: Sequence[str], namespace: dict[str, Any]) -> dict[str, Any]:
    """Define the functions `names` of a file, with their decorators, in `namespace`, which has what they use."""
    path = root / file
    tree = ast.parse(path.read_text(encoding="utf-8"))
    tree.body = [node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name in names]
    if missing := set(names) - {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}:
        raise Unsupported(f"{file} of this version has no {', '.join(sorted(missing))}")
    namespace.setdefault("__name__", file.removesuffix(".py").replace("/", "."))
    # Annotations name classes of the engine; nobody evaluates them.
    exec(compile(tree, str(path), "exec", flags=__future__.annotations.compiler_flag, dont_inherit=True), namespace)
    return namespace


def tree_expand(root: Path) -> tuple[Bind, Results]:
    """SGLang multiplies probabilities where the op adds their logarithms, and gathers states by row at once.

    It is given a state of one number a row, the row's own, which makes that gather as cheap as it can be.
    """
    namespace = {"torch": torch, "_is_npu": False, "_is_xpu": False}
    functions(root, COMMON, ["fast_topk"], namespace)
    names = ["_select_top_k_tokens_first", "_select_top_k_tokens_later", "select_top_k_tokens"]
    select = functions(root, SPEC_UTILS, names, namespace)["select_top_k_tokens"]

    def bind(call: Call) -> Callable[[], Any]:
        logprobs, token_ids, offset = call.args[:3]
        scores = call.kwargs.get("scores")
        (batch, rows, topk), device = logprobs.shape, logprobs.device
        if rows not in (1, topk) or (scores is None and rows != 1):
            raise Unsupported("SGLang expands one row in the first step, topk rows later")
        step = 0 if scores is None else (offset - topk) // (topk * topk) + 1
        if scores is not None and (rows != topk or offset != topk + (step - 1) * topk * topk):
            raise Unsupported(f"cand_offset {offset} is not that of a step of SGLang's")
        probs, ids = logprobs.exp().view(-1, topk), token_ids.long().view(-1, topk)
        probs_so_far = None if scores is None else scores.exp()
        state = torch.arange(rows, device=device).repeat(batch).unsqueeze(1)

        def run() -> Any:
            return (*select(step, probs, ids, state, probs_so_far, topk), topk, offset)

        run()  # a later step is under torch.compile
        return run

    def results(raw: Any) -> tuple[Tensor | None, ...]:
        ids, state, probs, (cand_probs, _, frontier), topk, offset = raw
        first = frontier.size(1) > topk  # the first step's list begins with the root, and counts from 0
        next_frontier = frontier[:, -topk:] + (offset if first else 0)
        return ids.view(-1, topk), state.view(-1, topk), probs.log(), next_frontier, cand_probs.flatten(1).log(), None

    return bind, results


def tree_build(root: Path) -> tuple[Bind, Results]:
    """organize_draft_results and build_tree_kernel_efficient, with a mask over the draft only, as the op's is.

    SGLang's default writes every row's part over the committed keys too, which takes longer.
    """
    def no_check(*args: Any) -> None:
        return None

    def build(*args: Any) -> None:
        build_kernel(root, args[0].device)(*args[:-1], int(args[-1]))

    namespace: dict[str, Any] = {
        "torch": torch, "math": math, "TreeMaskMode": TreeMaskMode, "maybe_detect_oob": no_check,
        "build_tree_kernel_efficient_func": build, "logger": logging.getLogger(__name__),
    }  # fmt: skip
    functions(root, EAGLE_UTILS, ["organize_draft_results", "build_tree_kernel_efficient"], namespace)
    organize, build_tree = namespace["organize_draft_results"], namespace["build_tree_kernel_efficient"]

    def bind(call: Call) -> Callable[[], Any]:
        root_ids, cand_scores, cand_ids, cand_parent, root_positions, num_nodes = call.args
        topk, num_steps = tree_shape(cand_parent)
        parents = cand_parent[:, ::topk].long().contiguous()  # one parent for each group of topk candidates
        bonus, ids, lengths = root_ids.long(), cand_ids.long(), root_positions.long()

        def run() -> Any:
            # The last of a list of parents is dropped: nothing grows from the last step.
            parent_list, selected, tokens = organize([cand_scores], [ids], [parents, parents], num_nodes)
            mode = TreeMaskMode.QLEN_ONLY
            tree = build_tree(bonus, parent_list, selected, tokens, lengths, 0, topk, num_steps, num_nodes, mode)
            return selected, *tree

        run()  # compiles
        return run

    def results(raw: Any) -> tuple[Tensor | None, ...]:
        selected, mask, positions, index, next_token, next_sibling, tokens = raw
        batch, num_nodes = index.shape
        nodes = (batch, num_nodes)
        mask = mask.view(batch, num_nodes, num_nodes)
        return tokens.view(nodes), positions.view(nodes), None, selected, mask, index, next_token, next_sibling

    return bind, results


def tree_shape(cand_parent: Tensor) -> tuple[int, int]:
    """(topk, num_steps) of candidates as tree_expand makes them: topk from the root, then topk^2 a step."""
    topk = int((cand_parent[:1] == -1).sum())
    total = cand_parent.size(1)
    if topk == 0 or (total - topk) % (topk * topk):
        raise Unsupported(f"{total} candidates, {topk} of them from the root, are no tree of SGLang's")
    return topk, 1 + (total - topk) // (topk * topk)


@cache
def build_kernel(root: Path, device: torch.device) -> Callable[..., None]:
    """The wheel's tree.cuh, compiled: the function that SGLang's build_tree_kernel_efficient calls on CUDA."""
    if device.type != "cuda":
        raise Unsupported("SGLang builds trees with a CUDA kernel")
    try:
        import tvm_ffi.cpp
    except ImportError as error:
        raise Unsupported("SGLang compiles its tree kernel with apache-tvm-ffi, which is not installed") from error
    major, minor = torch.cuda.get_device_capability(device)
    name = "build_tree_kernel_efficient"
    try:
        module = tvm_ffi.cpp.load_inline(
            "sglang_tree",
            cuda_sources=f"#include <speculative/tree.cuh>\nTVM_FFI_DLL_EXPORT_TYPED_FUNC({name}, (sglang::{name}));\n",
            extra_cuda_cflags=[*CFLAGS, f"-DSGL_CUDA_ARCH={major * 100 + minor * 10}"],
            extra_include_paths=[str(root / JIT / "csrc"), str(root / JIT / "include")],
        )
    except (OSError, RuntimeError) as error:
        raise Unsupported(f"SGLang's tree kernel does not compile here: {str(error)[-300:]}") from error
    return getattr(module, name)
