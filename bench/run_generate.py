"""The level generate: the trained example pair decodes a held-out prompt, with drafting and without."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..demo.pair import DemoError, Pair, load_pair, pair_directory
from ..demo.pair import _quiet_transformers as quiet_transformers
from ..generation import GenerationOutput, generate
from .case import Candidate, Case, Unsupported
from .checks import Verdict
from .served import served_by
from .setting import Setting

PROMPT_TOKENS, NEW_TOKENS, NODES = 200, 96, 16


@dataclass(frozen=True)
class GenerateInputs:
    pair: Pair
    prompt: Tensor


class GenerateProblem:
    """One held-out prompt; the right result is the target's own greedy continuation, token for token."""

    bytes = flops = 0  # the target's work is not this library's

    def __init__(self, case: Case, device: torch.device) -> None:
        self.case, self.device = case, device
        try:
            pair = load_pair(pair_directory(), "centroid", str(device), case.torch_dtype)
            prompt = pair.held_out_prompt(pair.held_out[0], PROMPT_TOKENS)
        except DemoError as error:
            raise Unsupported(str(error)) from error
        self.inputs = GenerateInputs(pair, prompt)
        self.sets = [self.inputs]
        self.expected = pair.greedy(prompt, NEW_TOKENS)

    def check(self, number: int, results: tuple[Any, ...]) -> Verdict:
        ids = results[0].tolist()
        if ids == self.expected:
            return Verdict()
        place = next((i for i, (a, b) in enumerate(zip(ids, self.expected)) if a != b), min(len(ids), NEW_TOKENS))
        return Verdict(why=f"token {place} differs from the target's own greedy decoding")


def candidates(case: Case, problem: GenerateProblem, setting: Setting) -> list[Candidate]:
    """Drafting with chains and trees, the target alone, and transformers' own assisted generation."""
    served = served_by(lambda: _generate(case.topk, problem.inputs, 3))  # the prefill and a round that drafts
    found = [Candidate("mtp", _drafting(case.topk), _ids, served, capturable=False)]
    if case.topk == 1:
        found.append(Candidate("target alone", _alone, _ids, capturable=False))
        if setting.peers.present("transformers"):
            found.append(Candidate("transformers", _assisted, _ids, capturable=False))
    return found


def tokens_per_round(case: Case, one: GenerateInputs) -> float:
    return _generate(case.topk, one, NEW_TOKENS).statistics.tokens_per_round


def _drafting(topk: int) -> Callable[[GenerateInputs], Callable[[], Any]]:
    def bind(one: GenerateInputs) -> Callable[[], Any]:
        return lambda: _generate(topk, one, NEW_TOKENS).token_ids[0]

    return bind


def _generate(topk: int, one: GenerateInputs, max_new_tokens: int) -> GenerationOutput:
    nodes = None if topk == 1 else NODES
    return generate(
        one.pair.model, one.pair.weights, one.prompt[None], max_new_tokens=max_new_tokens, topk=topk,
        num_draft_tokens=nodes,
    )


def _alone(one: GenerateInputs) -> Callable[[], Any]:
    return lambda: one.pair.greedy(one.prompt, NEW_TOKENS)


def _assisted(one: GenerateInputs) -> Callable[[], Any]:
    from transformers import Gemma4AssistantForCausalLM

    folder = pair_directory() / "assistant-centroid"
    model = one.pair.model
    with quiet_transformers():
        assistant: Any = Gemma4AssistantForCausalLM.from_pretrained(folder, dtype=model.dtype, local_files_only=True)
    assistant = assistant.to(model.device).eval()

    def run() -> list[int]:
        prompt = one.prompt[None]
        out = model.generate(
            prompt, attention_mask=torch.ones_like(prompt), assistant_model=assistant, max_new_tokens=NEW_TOKENS,
            do_sample=False, eos_token_id=None, pad_token_id=0,
        )
        return out[0, prompt.size(1) :].tolist()

    return run


def _ids(raw: list[int]) -> tuple[Tensor | None, ...]:
    return (torch.tensor(raw),)
