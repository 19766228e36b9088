"""How often the pair's dense head picks another token in fp8, over the states that drafting held-out text meets.

    python examples/check_heads.py --device cuda --out FILE

From every position of each held-out module a chain is drafted in bf16, and each of its steps is a state. On every one
of them the head is asked four times: in fp32 (the bf16 weights widened), in bf16 and in fp8 by lm_head_topk, and by
PyTorch, which rounds logits to bf16 before it compares them. Of the first step it also says how often each pick is
the target's own choice.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
from dataclasses import replace
from itertools import combinations
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from mtp_kernels.bench.machine import describe
from torch import Tensor

from mtp_kernels import KVView, quantize_lm_head
from mtp_kernels.demo.pair import Pair, load_pair
from mtp_kernels.draft import hidden_step
from mtp_kernels.generation._target import Target

FIRST = 16  # position from which text is drafted
ops = torch.ops.mtp


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pair", type=Path, default=Path(__file__).parent / "pair")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--tokens", type=int, default=400, help="of each held-out module (default 400)")
    parser.add_argument("--steps", type=int, default=4, help="of each chain (default 4)")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    torch.set_grad_enabled(False)
    device = torch.device(args.device)
    record: dict[str, Any] = {
        "command": " ".join(["python examples/check_heads.py", *sys.argv[1:]]),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "device": device.type,
        "device_name": describe(device)[0],
        **check_heads(load_pair(args.pair, "dense", args.device, torch.bfloat16), args.tokens, args.steps),
    }
    text = json.dumps(record, indent=1) + "\n"
    print(text, end="")
    if args.out:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(text, encoding="utf-8")
    return 0


def check_heads(pair: Pair, tokens: int, steps: int) -> dict[str, Any]:
    """Shares of the states on which two heads pick differently, and of first steps that pick what the target does."""
    parts = [states(pair, module, tokens, steps) for module in pair.held_out]
    normed, first, chosen = (torch.cat(part) for part in zip(*parts))
    picks = picked(normed, pair.weights.lm_head)
    logits = normed.double() @ pair.weights.lm_head.double().t()
    best = logits.amax(-1)
    return {
        "vocab": pair.weights.lm_head.size(0),
        "hidden": pair.weights.hidden,
        "states": normed.size(0),
        "differs": {f"{a} and {b}": share(picks[a] != picks[b]) for a, b in combinations(picks, 2)},
        "largest_logit_given_up": {
            name: round((best - logits.gather(1, ids[:, None])[:, 0]).max().item(), 5) for name, ids in picks.items()
        },
        "first_steps": int(first.sum()),
        "is_the_targets_choice": {name: share((ids == chosen)[first]) for name, ids in picks.items()},
    }


def states(pair: Pair, module: str, tokens: int, steps: int) -> tuple[Tensor, Tensor, Tensor]:
    """normed [n, hidden], whether each is of a chain's first step, and what the target would say there (of those)."""
    ids = pair.held_out_prompt(module, tokens)
    hidden = pair.model.model(input_ids=ids[None], use_cache=False).last_hidden_state[0]  # [tokens, backbone]
    chosen = pair.model.lm_head(hidden).argmax(-1)
    positions = torch.arange(FIRST, ids.numel(), device=ids.device)
    kv = views(pair, ids, positions)
    token, state = ids[positions, None], hidden[positions - 1, None]
    found = []
    for _ in range(steps):
        normed, state = hidden_step(pair.weights, kv, token, state, positions)
        token = ops.lm_head_topk(normed, pair.weights.lm_head, 1)[1][..., 0]
        found.append(normed[:, 0])
    first = torch.arange(steps, device=ids.device).repeat_interleave(positions.numel()) == 0
    return torch.cat(found), first, chosen[positions].repeat(steps)


def views(pair: Pair, ids: Tensor, positions: Tensor) -> dict[str, KVView]:
    """A request a position p: the same pages for all, of which the first p rows count."""
    target = Target(pair.model)
    target.open_cache([ids.numel()], page_size=16)
    target.prefill([0], [ids])
    found = target.kv([0], [layer.layer_type for layer in pair.weights.layers])
    return {
        name: replace(view, block_table=view.block_table.expand(positions.numel(), -1).contiguous(), seq_lens=positions)
        for name, view in found.items()
    }


def picked(normed: Tensor, weight: Tensor) -> dict[str, Tensor]:
    """The best token of each state [n, hidden] by each head."""
    quantized, scale = quantize_lm_head(weight)
    return {
        "fp32": ops.lm_head_topk(normed.float(), weight.float(), 1)[1][:, 0],
        "bf16": ops.lm_head_topk(normed, weight, 1)[1][:, 0],
        "fp8": ops.lm_head_topk(normed, quantized, 1, weight_scale=scale)[1][:, 0],
        "PyTorch's bf16 logits": F.linear(normed, weight).argmax(-1),
    }


def share(where: Tensor) -> float:
    return round(where.double().mean().item(), 5)


if __name__ == "__main__":
    sys.exit(main())
