"""Records how many drafted tokens the example pair's target accepts, from every position of its own continuations.

    python examples/record_acceptance.py --prompts-per-module 4 --out examples/pair/accepted_lengths.json

A greedy round accepts the drafted tokens that the target's continuation has, and the next round's seed is a row of that
same continuation. So one chain of `steps` tokens, drafted from every position, replays every generation with chains
of up to that many steps: from position p, a round of d steps accepts min(d, accepted[p]) tokens and ends behind
them and the target's own. `mtp-kernels bench policy` replays them.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
from pathlib import Path
from typing import Any

import torch
import transformers
from evaluate_pair import held_out_prompts
from pair_training.continuations import generate
from pair_training.models import FULL, SLIDING, WINDOW, causal_masks, target_forward
from torch import Tensor

from mtp_kernels import KVView, draft
from mtp_kernels.demo.pair import HEADS, Pair, load_pair


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pair", type=Path, default=Path(__file__).parent / "pair")
    parser.add_argument("--prompt-tokens", type=int, default=200)
    parser.add_argument("--new-tokens", type=int, default=128)
    parser.add_argument("--prompts-per-module", type=int, default=2)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    torch.set_grad_enabled(False)
    record: dict[str, Any] = {
        "command": " ".join(["python examples/record_acceptance.py", *sys.argv[1:]]),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "steps": args.steps,
        "accepted": {},
    }
    for head in HEADS:
        pair = load_pair(args.pair, head)
        prompts = held_out_prompts(pair, args.prompt_tokens, args.prompts_per_module)
        rows = [accepted_lengths(pair, prompt, args.new_tokens, args.steps) for prompt in prompts]
        # A digit a position: the file stays small, and a line is a request.
        record["accepted"][head] = ["".join(map(str, row)) for row in rows]
    text = json.dumps(record, indent=1) + "\n"
    if args.out:
        args.out.write_text(text, encoding="utf-8")
    else:
        print(text, end="")


def accepted_lengths(pair: Pair, prompt: Tensor, new_tokens: int, steps: int) -> list[int]:
    """How much of a chain is accepted, for each of `new_tokens` seeds behind the prompt, up to the end token."""
    start, length = prompt.numel(), prompt.numel() + new_tokens + steps
    ids = generate(pair.model, prompt[None], length, start)
    hidden, kv = target_forward(pair.model, ids, causal_masks(length, ids.device))
    if not torch.equal(pair.model.lm_head(hidden[:, start - 1 : -1]).argmax(-1), ids[:, start:]):
        raise RuntimeError("one forward over the continuation chooses other tokens than it was made of")
    ended = (ids[0, start:] == pair.eos_id).nonzero()
    seeds = torch.arange(start, start + min(new_tokens, int(ended[0]) if ended.numel() else new_tokens))
    tree = draft(pair.weights, _views(kv, seeds), ids[0, seeds], hidden[0, seeds - 1], seeds, steps)
    ahead = ids[0, seeds[:, None] + torch.arange(1, steps + 1)]  # [seeds, steps], what a draft should be
    return (tree.draft_ids[:, 1:] == ahead).long().cumprod(1).sum(1).tolist()


def _views(kv: dict[str, tuple[Tensor, Tensor]], seeds: Tensor) -> dict[str, KVView]:
    """A request a seed position p: the same pages for all, of which the first p rows count."""
    table = torch.zeros(seeds.numel(), 1, dtype=torch.int32)
    windows = {FULL: -1, SLIDING: WINDOW}
    return {
        name: KVView.paged(k, v, table, seeds, window_left=windows[name], layout="HND") for name, (k, v) in kv.items()
    }


if __name__ == "__main__":
    main()
