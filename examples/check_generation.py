"""Checks whole generations and writes down what came of it; 1 if anything differs from the target alone.

    PYTHONPATH=.:tests python examples/check_generation.py --part greedy --part sampling --out FILE

greedy: generate() equals transformers' greedy decoding, token for token, on a prompt of every held-out module: chains
of 1 to 8 steps and trees, batches of 1, 3 and 8 unequal prompts, pages of 1, 16 and 61 rows, both heads, in fp32.
sampling: a chi-square test of 20,000 generations against the target's exact distribution, chain and tree, several
temperatures, with top-k and top-p, and again under two broken rules, which must fail it.
accelerate: assisted generation says the same with and without accelerate(), and how long each way takes, on --device
in each --dtype. In bfloat16 a text may leave the target's own where two of its tokens lie within rounding.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import transformers
from generation_cases import pad, plain_greedy, tiny_pair, trained_pair, unequal_prompts
from harness import forced
from mtp_kernels.bench.machine import describe
from sampling_cases import DEPTH, PROMPT, exact, p_values

from mtp_kernels import generate
from mtp_kernels.demo.pair import HEADS, Pair, load_pair, pair_directory
from mtp_kernels.generation import GenerationStatistics
from mtp_kernels.integrations.transformers import accelerate

BATCHES, PAGES, NEW_TOKENS = (1, 3, 8), (1, 16, 61), 12
CHAINS = [{"num_steps": steps} for steps in range(1, 9)]
TREES = [
    {"num_steps": steps, "topk": topk, "num_draft_tokens": nodes}
    for topk, steps, sizes in ((2, 6, (8, 16)), (4, 5, (8, 16, 32, 64)), (8, 4, (8, 16, 32, 64)))
    for nodes in sizes
]
DRAWS = 20_000
SAMPLED = {"chain": {"num_steps": 3}, "tree": {"num_steps": 2, "topk": 4, "num_draft_tokens": 8}}
SETTINGS: list[dict[str, Any]] = [
    {"temperature": 0.5},
    {"temperature": 1.0},
    {"temperature": 1.5},
    {"temperature": 1.2, "top_k": 6, "top_p": 0.7},
]
TIMED_PROMPT, TIMED_TOKENS, REPEATS = 200, 64, 5
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}

Text = list[int]


def main() -> int:
    parts: dict[str, Callable[[], dict[str, Any]]] = {"greedy": check_greedy, "sampling": check_sampling}
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--part", choices=[*parts, "accelerate"], action="append", help="only this; repeatable")
    parser.add_argument("--device", default="cpu", help="of the part accelerate; the others run on the CPU")
    parser.add_argument("--dtype", choices=DTYPES, action="append", help="of the part accelerate (default float32)")
    parser.add_argument("--repeats", type=int, default=REPEATS, help="timed runs of the part accelerate")
    parser.add_argument("--new-tokens", type=int, default=TIMED_TOKENS, help="a prompt, in the part accelerate")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    device = torch.device(args.device)
    parts["accelerate"] = partial(check_accelerate, device, args.dtype or ["float32"], args.repeats, args.new_tokens)
    torch.set_grad_enabled(False)
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    record: dict[str, Any] = {
        "command": " ".join(["PYTHONPATH=.:tests python examples/check_generation.py", *sys.argv[1:]]),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "threads": torch.get_num_threads(),
        "device": device.type,
        "device_name": describe(device)[0],
        "dtype": args.dtype or ["float32"],
    }
    for part in args.part or parts:
        record[part] = parts[part]()
        print(f"{part}: {json.dumps(record[part])}", flush=True)
    if args.out:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    return 0 if all(record[part]["ok"] for part in args.part or parts) else 1


def check_greedy() -> dict[str, Any]:
    """Every shape, batch size, page size and head; the prompts that differ are listed."""
    compared, differ, shapes = 0, [], []
    for shape in (*CHAINS, *TREES):
        sums = GenerationStatistics()
        for head in HEADS:
            pair, prompts, wanted = trained_pair(head), *greedy_cases(head)
            for batch in BATCHES:
                for page_size in PAGES:
                    for first in range(0, len(prompts), batch):
                        ids, mask = pad(prompts[first : first + batch], left=first % 2 == 0)
                        out = generate(pair.model, pair.weights, ids, mask, max_new_tokens=NEW_TOKENS,
                                       stop_ids=[pair.eos_id], page_size=page_size, **shape)
                        for i, ids in enumerate(out.token_ids, start=first):
                            compared += 1
                            if tuple(ids) != wanted[i]:
                                differ.append({**shape, "head": head, "batch": batch, "page_size": page_size, "row": i})
                        sums += out.statistics
        shapes.append({**shape, "tokens_per_round": round(sums.tokens_per_round, 3)})
        print(f"{shapes[-1]}: {len(differ)} of {compared} differ so far", flush=True)
    return {
        "ok": not differ, "compared": compared, "differ": differ, "batches": BATCHES, "page_sizes": PAGES,
        "new_tokens": NEW_TOKENS, "prompts": len(prompts), "shapes": shapes,
    }


def greedy_cases(head: str) -> tuple[list[torch.Tensor], tuple[tuple[int, ...], ...]]:
    return unequal_prompts(trained_pair(head)), plain_greedy(head, NEW_TOKENS)


def check_sampling() -> dict[str, Any]:
    """p-values of the first three tokens jointly and of the last two; none may be small but those of broken rules."""
    results = []
    for head in HEADS:
        for shape in SAMPLED:
            for setting in SETTINGS:
                tokens, accepted = draws(head, shape, DRAWS, **setting)
                found = p_values(tokens, exact(head, **setting))
                results.append({"head": head, "shape": shape, **setting, "accepted": accepted, "p_values": found})
                print(results[-1], flush=True)
    # A true null gives p < 1e-4 once in 10,000 tests, and there are 2 * len(results) here.
    ok = all(min(r["p_values"]) > 1e-4 for r in results)
    broken = {name: broken_rule(name) for name in ("keeps what was refused", "accepts too much")}
    return {"ok": ok and max(broken.values()) < 1e-9, "draws": DRAWS, "results": results, "broken_rules": broken}


def draws(head: str, shape: str, count: int, **setting: Any) -> tuple[torch.Tensor, float]:
    """[count, DEPTH] tokens of as many generations, and the share of rounds that accepted a draft token."""
    pair, size = tiny_pair(head), 2500
    sums, rows = GenerationStatistics(), []
    for start in range(0, count, size):
        out = generate(pair.target, pair.weights, torch.tensor(PROMPT).expand(size, -1), max_new_tokens=DEPTH,
                       seed=range(start, start + size), **SAMPLED[shape], **setting)
        rows.append(torch.tensor(out.token_ids))
        sums += out.statistics
    return torch.cat(rows), round(sums.accepted_per_position[0], 3)


def broken_rule(name: str) -> float:
    """The smaller p-value of 5,000 draws under a rule that is wrong."""
    rule = importlib.import_module("mtp_kernels.reference.verify_sample")
    real = rule._try_in_turn

    def broken(p: Any, tokens: Any, u: Any, can_try: Any) -> Any:
        if name == "accepts too much":
            return real(p, tokens, u * 0.7, can_try)
        return real(p, tokens, u, can_try)[0], p

    with forced("reference"), mock.patch.object(rule, "_try_in_turn", broken):
        tokens, _ = draws("dense", "tree", 5_000, temperature=1.0)
    return min(p_values(tokens, exact("dense", 1.0)))


def check_accelerate(device: torch.device, dtypes: list[str], repeats: int, new_tokens: int) -> dict[str, Any]:
    """Assisted generation with and without accelerate(), interleaved with the other ways to the same text."""
    results = []
    for dtype in dtypes:
        for head in HEADS:
            results.append(time_head(head, device, dtype, repeats, new_tokens))
            print(json.dumps(results[-1]), flush=True)
    return {"ok": all(r["ok"] for r in results), "results": results}


def time_head(head: str, device: torch.device, dtype: str, repeats: int, new_tokens: int) -> dict[str, Any]:
    """Milliseconds a token of each way, and whether each gives the target's own text."""
    pair = load_pair(pair_directory(), head, str(device), DTYPES[dtype])
    prompts = [pair.held_out_prompt(m, TIMED_PROMPT) for m in pair.held_out[:2]]
    report: dict[str, Any] = {}
    ways = ways_to_the_text(pair, head, prompts, new_tokens, report)
    wanted = ways["target alone (transformers)"]()
    texts = {name: way() for name, way in ways.items()}  # and warm
    same = all(text == wanted for text in texts.values())
    differ = [] if same else differences(pair, head, prompts, wanted, texts)
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(repeats):
        for name, way in ways.items():
            seconds[name].append(timed(way, device))
    tokens = len(prompts) * new_tokens
    right = same or (dtype != "float32" and all(d["apart"] <= d["allowed"] for d in differ))
    return {
        "ok": right and not report["fallbacks"], "head": head, "device": device.type, "dtype": dtype,
        "same_tokens": same, "differ": differ, "report": report, "prompts": len(prompts),
        "prompt_tokens": TIMED_PROMPT, "new_tokens": new_tokens, "repeats": repeats,
        "median_ms_per_token": {n: round(1e3 * statistics.median(s) / tokens, 3) for n, s in seconds.items()},
    }


def ways_to_the_text(
    pair: Pair, head: str, prompts: list[torch.Tensor], new_tokens: int, report: dict[str, Any]
) -> dict[str, Callable[[], list[Text]]]:
    """Each gives the continuations of all prompts; `report` takes what accelerate() reports."""
    assistant: Any = transformers.Gemma4AssistantForCausalLM.from_pretrained(
        pair_directory() / f"assistant-{head}", dtype=pair.weights.dtype, local_files_only=True
    )
    assistant = assistant.to(pair.model.device).eval()

    def assisted() -> list[Text]:
        return [
            pair.model.generate(
                p[None], attention_mask=torch.ones_like(p)[None], assistant_model=assistant, do_sample=False,
                max_new_tokens=new_tokens, eos_token_id=None, pad_token_id=0,
            )[0, p.numel() :].tolist()
            for p in prompts
        ]

    def accelerated() -> list[Text]:
        with accelerate(assistant) as handle:
            out = assisted()
        report.update(handle.report())
        return out

    def ours(**shape: Any) -> list[Text]:
        return [
            generate(pair.model, pair.weights, p[None], max_new_tokens=new_tokens, **shape).token_ids[0]
            for p in prompts
        ]

    return {
        "target alone (transformers)": lambda: [pair.greedy(p, new_tokens) for p in prompts],
        "transformers assisted": assisted,
        "transformers assisted, accelerate()": accelerated,
        "generate(), chain of 4": lambda: ours(num_steps=4),
        "generate(), tree of 16": lambda: ours(num_steps=4, topk=4, num_draft_tokens=16),
    }


def timed(way: Callable[[], Any], device: torch.device) -> float:
    """Seconds, with all work of a GPU done."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    start = time.perf_counter()
    way()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - start


def differences(
    pair: Pair, head: str, prompts: list[torch.Tensor], wanted: list[Text], texts: dict[str, list[Text]]
) -> list[dict[str, Any]]:
    """Where each text first leaves the wanted one: how far apart the target's fp32 logits of the two tokens are there,
    and twice the largest error of its logits in the pair's own dtype."""
    exact = load_pair(pair_directory(), head, str(pair.model.device)).model
    found = []
    for name, made in texts.items():
        for prompt, one, two in zip(prompts, made, wanted):
            if one == two:
                continue
            place = next(i for i, (a, b) in enumerate(zip(one, two)) if a != b)
            ids = torch.cat([prompt, prompt.new_tensor(two[:place])])[None]
            logits, rounded = (m(input_ids=ids, use_cache=False).logits[0, -1].float() for m in (exact, pair.model))
            apart = (logits[one[place]] - logits[two[place]]).abs().item()
            allowed = 2 * (rounded - logits).abs().max().item()
            found.append({"way": name, "token": place, "apart": round(apart, 6), "allowed": round(allowed, 6)})
    return found


if __name__ == "__main__":
    sys.exit(main())
