"""Trains the example pair: a small Gemma 4 target and two assistants, on the Python standard library's sources.

    python examples/train_pair.py                                   # eight minutes on one large GPU
    python examples/train_pair.py --smoke --out FOLDER               # a minute on a CPU, to see that it runs
    python examples/train_pair.py --prepare-only --data .data/stdlib # the tokenizer and token ids alone
    python examples/train_pair.py --evaluate-only                    # measure examples/pair again

Stages: tokenizer and data, target, the target's continuations, dense assistant, centroid assistant, evaluation.
"""

from __future__ import annotations

import argparse
import json
import platform
import shutil
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import transformers
from pair_training import assistant, centroids, data, evaluate, models, target
from pair_training.continuations import make_rows
from pair_training.loop import Stage


@dataclass(frozen=True)
class Sizes:
    """What differs between the real run and the smoke test. Shares are of the time budget, each up to a stage's end."""

    target_batch: int = 32
    target_length: int = 1024
    rows: int = 24576
    row_length: int = 512
    rows_batch: int = 8192
    assistant_batch: int = 32
    steps: int | None = None
    max_files: int | None = None
    prompts_per_module: int = 4
    new_tokens: int = 128
    held_out_rows: int | None = None
    ends: tuple[float, float, float] = (0.32, 0.73, 0.95)


SMOKE = Sizes(2, 128, 8, 128, 4, 2, steps=3, max_files=60, prompts_per_module=1, new_tokens=32, held_out_rows=1)


def main() -> None:
    args = _arguments()
    torch.manual_seed(args.seed)
    begin = time.monotonic()
    device = torch.device(args.device)
    sizes = SMOKE if args.smoke else Sizes()
    with tempfile.TemporaryDirectory() as scratch:
        text = _text(args, sizes, Path(scratch))
        if args.prepare_only:
            return
        if args.evaluate_only:
            about = json.loads((args.out / "pair.json").read_text(encoding="utf-8"))
        else:
            steps = _train(args, sizes, text, device, begin)
            shutil.copy(text.tokenizer_file, args.out / "tokenizer.json")
            about = _about(args, text, steps, device, time.monotonic() - begin)
        about["metrics"] = _evaluate(args, sizes, text, device)
    (args.out / "pair.json").write_text(json.dumps(about, indent=1) + "\n", encoding="utf-8")


def _train(args: argparse.Namespace, sizes: Sizes, text: data.Data, device: torch.device, begin: float) -> dict:
    """Run the stages, save the three models below args.out; returns the steps of each stage."""
    compile_ = device.type == "cuda" and not args.no_compile
    generator = torch.Generator(device=device).manual_seed(args.seed)
    tokens = torch.from_numpy(text.tokens.astype(np.int64)).to(device)
    deadlines = [begin + 60 * args.minutes * end for end in sizes.ends]

    def stage(name: str, lr: float, index: int, weight_decay: float = 0.1) -> Stage:
        return Stage(name, lr, None if sizes.steps else deadlines[index], sizes.steps, weight_decay=weight_decay)

    big = models.new_target().to(device)
    steps = {"target": target.train_target(
        big, tokens, text.held_out, stage("target", 3e-3, 0, weight_decay=0.3), batch=sizes.target_batch,
        length=sizes.target_length, max_rows=sizes.held_out_rows, generator=generator, compile_=compile_,
    )}
    models.save(big, args.out / "target")

    start = time.monotonic()
    rows = make_rows(big, tokens, sizes.rows, sizes.row_length, sizes.rows_batch, generator)
    print(f"continuations: {tuple(rows.shape)} in {time.monotonic() - start:.1f} s", flush=True)

    options = {"batch": sizes.assistant_batch, "generator": generator, "compile_": compile_}
    dense = models.new_assistant(big.config.hidden_size, centroid=False).to(device)
    loss = assistant.dense_head_loss(dense, compile_)
    steps["dense"] = assistant.train_assistant(dense, big, rows, loss, stage("dense", 2e-3, 1), **options)
    models.save(dense, args.out / "assistant-dense")

    start = time.monotonic()
    sparse = centroids.centroid_from_dense(dense, args.seed)
    print(f"clusters: {time.monotonic() - start:.1f} s", flush=True)
    loss = centroids.centroid_head_loss(sparse, compile_)
    steps["centroid"] = assistant.train_assistant(sparse, big, rows, loss, stage("centroid", 1e-3, 2), **options)
    models.save(sparse, args.out / "assistant-centroid")
    return steps


def _evaluate(args: argparse.Namespace, sizes: Sizes, text: data.Data, device: torch.device) -> dict:
    """Measure what was saved, in fp32."""
    big = models.load_target(args.out / "target", device)
    heads = {name: models.load_assistant(args.out / f"assistant-{name}", device) for name in ("centroid", "dense")}
    loss, count = target.held_out_loss(big, text.held_out, device, max_rows=sizes.held_out_rows)
    held_out_tokens = sum(ids.size for ids in text.held_out.values())
    bytes_a_token = sum(text.held_out_bytes.values()) / held_out_tokens
    prompts = evaluate.held_out_prompts(text.held_out, 200, sizes.prompts_per_module).to(device)
    metrics = {
        "device": device.type,
        "dtype": "float32",
        "held_out_loss": loss,
        "held_out_bits_per_byte": loss / np.log(2) / bytes_a_token,
        "held_out_tokens": count,
        **evaluate.evaluate(big, heads, prompts, sizes.new_tokens),
    }
    print(json.dumps(metrics, indent=1), flush=True)
    return metrics


def _text(args: argparse.Namespace, sizes: Sizes, scratch: Path) -> data.Data:
    if args.evaluate_only:
        return data.held_out_only(args.out / "tokenizer.json", args.stdlib)
    if args.data and (args.data / "about.json").is_file():
        return data.load(args.data)
    start = time.monotonic()
    text = data.prepare(args.data or scratch, args.stdlib, sizes.max_files)
    print(f"data: {text.about} in {time.monotonic() - start:.1f} s", flush=True)
    return text


def _about(args: argparse.Namespace, text: data.Data, steps: dict, device: torch.device, seconds: float) -> dict:
    return {
        "held_out": list(data.HELD_OUT),
        "vocab_size": data.VOCAB_SIZE,
        "sliding_window": models.WINDOW,
        "specials": {"pad": data.PAD, "eos": data.EOS, "bos": data.BOS},
        "text": text.about,
        "training": {
            "command": "python examples/train_pair.py" + (" --smoke" if args.smoke else f" --minutes {args.minutes:g}"),
            "seed": args.seed,
            "steps": steps,
            "seconds": round(seconds, 1),
            "device": torch.cuda.get_device_name() if device.type == "cuda" else "CPU",
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "python": platform.python_version(),
        },
    }


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "pair")
    parser.add_argument("--stdlib", type=Path, help="a standard library's folder; the running interpreter's by default")
    parser.add_argument("--data", type=Path, help="prepared data: read if it is there, else written and kept")
    parser.add_argument("--prepare-only", action="store_true")
    parser.add_argument("--evaluate-only", action="store_true", help="measure the pair in --out, renew its metrics")
    parser.add_argument("--minutes", type=float, default=8.0, help="time budget of the training stages")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--no-compile", action="store_true")
    parser.add_argument("--smoke", action="store_true", help="a few tiny steps of every stage")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    if args.prepare_only and not args.data:
        parser.error("--prepare-only needs --data")
    return args


if __name__ == "__main__":
    main()
