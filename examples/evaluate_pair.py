"""Measures the example pair with the library: tokens a round of chain and tree, both heads, on held-out modules.

    python examples/evaluate_pair.py --out examples/pair/acceptance.json

Every generation is compared with transformers' own greedy generation; a single difference is an error.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
import time
from pathlib import Path

import torch
import transformers

from mtp_kernels import generate
from mtp_kernels.demo.pair import HEADS, Pair, load_pair
from mtp_kernels.generation import GenerationStatistics

SHAPES = {"chain": {"topk": 1}, "tree": {"topk": 4, "num_draft_tokens": 16}}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pair", type=Path, default=Path(__file__).parent / "pair")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--prompt-tokens", type=int, default=200)
    parser.add_argument("--new-tokens", type=int, default=128)
    parser.add_argument("--prompts-per-module", type=int, default=2)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    torch.set_grad_enabled(False)
    record = {
        "command": " ".join(["python examples/evaluate_pair.py", *sys.argv[1:]]),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "device": args.device,
        "dtype": "float32",
        "results": [],
    }
    for head in HEADS:
        pair = load_pair(args.pair, head, args.device)
        prompts = held_out_prompts(pair, args.prompt_tokens, args.prompts_per_module)
        plain = [pair.greedy(p, args.new_tokens, [pair.eos_id]) for p in prompts]
        for shape, options in SHAPES.items():
            result = measure(pair, prompts, plain, args, options)
            record["results"].append({"head": head, "shape": shape, **options, "steps": args.steps, **result})
            print(json.dumps(record["results"][-1]), flush=True)
    if args.out:
        args.out.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    return 0 if all(r["prompts_equal_to_greedy"] == r["prompts"] for r in record["results"]) else 1


def held_out_prompts(pair: Pair, length: int, per_module: int) -> list[torch.Tensor]:
    """`per_module` prompts of `length` tokens from each held-out module, one after the other from its start."""
    prompts = []
    for module in pair.held_out:
        for i in range(per_module):
            prompt = pair.held_out_prompt(module, length, start=i * 2 * length)
            if prompt.numel() == length:
                prompts.append(prompt)
    return prompts


def measure(pair: Pair, prompts: list[torch.Tensor], plain: list[list[int]], args: argparse.Namespace, options: dict
            ) -> dict:
    start = time.perf_counter()
    made = [
        generate(pair.model, pair.weights, prompt[None], max_new_tokens=args.new_tokens, num_steps=args.steps,
                 stop_ids=[pair.eos_id], **options)
        for prompt in prompts
    ]
    return {
        "prompts": len(prompts),
        "prompts_equal_to_greedy": sum(out.token_ids[0] == expected for out, expected in zip(made, plain)),
        "generated_tokens": sum(len(out.token_ids[0]) for out in made),
        **sum((out.statistics for out in made), GenerationStatistics()).as_dict(),
        "seconds": time.perf_counter() - start,
    }


if __name__ == "__main__":
    sys.exit(main())
