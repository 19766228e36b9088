"""What the scripts of examples/ conclude; what they run has tests of its own."""

from __future__ import annotations

import importlib.util
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest
import torch

pytest.importorskip("transformers")

from generation_cases import trained_pair

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"
CPU = torch.device("cpu")


def script(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@torch.no_grad()
def test_a_text_may_leave_the_targets_at_a_near_tie_alone() -> None:
    """In fp32, whose error is some 1e-6: any other token than the target's is further away."""
    check = script("check_generation")
    pair = trained_pair("dense")
    prompts = [pair.held_out_prompt(module, 40) for module in pair.held_out[:2]]
    wanted = [pair.greedy(prompt, 6) for prompt in prompts]
    other = [wanted[0], [*wanted[1][:3], (wanted[1][3] + 1) % 4096, *wanted[1][4:]]]
    found = check.differences(pair, "dense", prompts, wanted, {"same": wanted, "another": other})
    assert [(one["way"], one["token"]) for one in found] == [("another", 3)]
    assert found[0]["apart"] > 0.01 > found[0]["allowed"]


@torch.no_grad()
def test_accelerate_is_timed_and_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    check = script("check_generation")
    monkeypatch.setattr(check, "TIMED_PROMPT", 20)
    result = check.time_head("centroid", CPU, "bfloat16", repeats=1, new_tokens=4)
    assert result["ok"] and result["report"]["accelerated"] > 0
    assert (result["device"], result["dtype"]) == ("cpu", "bfloat16")
    assert len(result["median_ms_per_token"]) == 5 and all(ms > 0 for ms in result["median_ms_per_token"].values())


@torch.no_grad()
def test_heads_are_compared_on_every_state() -> None:
    check = script("check_heads")
    pair = trained_pair("dense")
    embed = pair.model.model.embed_tokens.weight
    assert embed.dtype == torch.float32  # so that fp32 and "bf16" are the same here
    found = check.check_heads(replace(pair, held_out=pair.held_out[:2]), tokens=40, steps=2)
    assert found["states"] == 2 * 24 * 2 and found["first_steps"] == 2 * 24
    assert found["differs"]["fp32 and bf16"] == 0 and found["largest_logit_given_up"]["fp32"] < 1e-4
    assert 0 < found["differs"]["fp32 and fp8"] < 0.2
    assert found["is_the_targets_choice"]["fp32"] > 0.2
