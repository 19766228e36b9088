"""accelerate(): the same call, the same tokens and drafts, on the transformers that is installed; undone, it is gone.

`make test-transformers-5.17` runs this file, and generate()'s, on the oldest version that is supported.
"""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")

from generation_cases import tiny_pair, trained_pair
from parity_helpers import make_pair, random_kv, random_seeds
from torch import Tensor

from mtp_kernels import ArgumentError
from mtp_kernels.demo.pair import HEADS, Pair, pair_directory
from mtp_kernels.integrations.transformers import Acceleration, accelerate

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.filterwarnings("error::RuntimeWarning"),  # a fallback that a test does not expect
]


@pytest.fixture(params=HEADS)
def head(request: pytest.FixtureRequest) -> str:
    return request.param


def load_assistant(head: str, dtype: torch.dtype = torch.float32) -> Any:
    from transformers import Gemma4AssistantForCausalLM

    folder = pair_directory() / f"assistant-{head}"
    return Gemma4AssistantForCausalLM.from_pretrained(folder, dtype=dtype, local_files_only=True).eval()


def assisted(pair: Pair, assistant: Any, prompt: Tensor, mask: Tensor | None = None, **options: Any) -> list[int]:
    out = pair.model.generate(
        prompt[None], attention_mask=(torch.ones_like(prompt) if mask is None else mask)[None],
        assistant_model=assistant, **{"max_new_tokens": 24, "do_sample": False, "pad_token_id": 0, **options},
    )
    return out[0, prompt.numel() :].tolist()


def test_generates_the_same_tokens(head: str) -> None:
    """Prompts around the window of 64, on held-out text; every draft step is served by the ops."""
    pair, assistant = trained_pair(head), load_assistant(head)
    for module, length in zip(pair.held_out, (1, 63, 65, 150)):
        prompt = pair.held_out_prompt(module, length)
        plain = assisted(pair, assistant, prompt)
        with accelerate(assistant) as handle:
            assert assisted(pair, assistant, prompt) == plain == pair.greedy(prompt, 24, [pair.eos_id])
        report = handle.report()
        assert report["accelerated"] > 10 and report["fallbacks"] == {}


def test_samples_the_same_tokens(head: str) -> None:
    pair, assistant = trained_pair(head), load_assistant(head)
    prompt = pair.held_out_prompt(pair.held_out[0], 90)
    texts = []
    for fast in (False, True):
        handle = accelerate(assistant) if fast else None
        torch.manual_seed(3)
        texts.append(assisted(pair, assistant, prompt, do_sample=True, temperature=0.8))
        if handle is not None:
            handle.undo()
    assert texts[0] == texts[1]


def test_every_call_gives_what_transformers_gives(head: str) -> None:
    """Logits of the whole vocabulary, state and output class, on the calls that generate() makes."""
    pair, assistant = trained_pair(head), load_assistant(head)
    handle, original = accelerate(assistant), type(assistant).forward
    compared = 0

    def both(**call: Any) -> Any:
        nonlocal compared
        mine, theirs = handle.forward(**call), original(assistant, **call)
        assert type(mine) is type(theirs) and mine.hidden_states is theirs.hidden_states is None
        torch.testing.assert_close(mine.logits, theirs.logits, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(mine.last_hidden_state, theirs.last_hidden_state, rtol=1e-4, atol=1e-4)
        assert torch.equal(mine.logits.argmax(-1), theirs.logits.argmax(-1))
        compared += 1
        return theirs

    assistant.forward = both
    for length in (40, 100):
        assisted(pair, assistant, pair.held_out_prompt(pair.held_out[1], length))
    assert compared > 40 and handle.report() == {"accelerated": compared, "fallbacks": {}}


@pytest.mark.parametrize("padding", [1, 20, 70])
def test_left_padding_is_served(padding: int) -> None:
    """Padding is in the attention mask; past the window it concerns the full layers only."""
    pair, assistant = trained_pair("centroid"), load_assistant("centroid")
    prompt = pair.held_out_prompt(pair.held_out[2], 80)
    padded = torch.cat([torch.full((padding,), 5), prompt])
    mask = torch.cat([torch.zeros(padding, dtype=torch.int64), torch.ones_like(prompt)])
    plain = assisted(pair, assistant, padded, mask)
    with accelerate(assistant) as handle:
        assert assisted(pair, assistant, padded, mask) == plain
    assert handle.report()["fallbacks"] == {} and handle.report()["accelerated"] > 20


class Call:
    """A tiny assistant and one call of its forward for a batch of three."""

    def __init__(self, *, unified: bool = False, dtype: torch.dtype = torch.float32) -> None:
        pair = make_pair("centroid", window=8, seed=3, unified=unified, dtype=dtype)
        self.assistant: Any = pair.assistant
        kv = random_kv((20, 20, 20), pair.weights.config, dtype=dtype)
        ids, state = random_seeds(pair.weights.config, 3)
        embedded = pair.embed(ids)
        self.arguments: dict[str, Any] = {
            "inputs_embeds": torch.cat([embedded, state.to(dtype)], dim=-1).unsqueeze(1),
            "position_ids": torch.tensor([[20], [23], [19]]),
            "shared_kv_states": {t: (kv.k[t], kv.v[t]) for t in kv.k},
            "attention_mask": None,
        }

    def __call__(self, **changes: Any) -> Any:
        with torch.no_grad():
            return self.assistant(**{**self.arguments, **changes})


def alike(mine: Any, theirs: Any, dtype: torch.dtype = torch.float32) -> None:
    tolerance = 1e-4 if dtype == torch.float32 else 5e-2
    torch.testing.assert_close(mine.logits, theirs.logits, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(mine.last_hidden_state, theirs.last_hidden_state, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("unified", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_batch_with_positions_of_its_own(unified: bool, dtype: torch.dtype) -> None:
    call = Call(unified=unified, dtype=dtype)
    theirs = call()
    padded = torch.ones(3, 21, dtype=torch.int64)
    padded[:, :4] = 0
    theirs_padded = call(attention_mask=padded)
    with accelerate(call.assistant) as handle:
        alike(call(), theirs, dtype)
        alike(call(attention_mask=padded), theirs_padded, dtype)
    assert handle.report() == {"accelerated": 2, "fallbacks": {}}
    assert type(theirs).__name__ == type(call()).__name__


def ragged() -> Tensor:
    mask = torch.ones(3, 20, dtype=torch.int64)
    mask[1, :3] = 0
    return mask


NOT_SERVED: list[tuple[str, dict[str, Any]]] = [
    ("an attention mask that is more than the same left padding for all requests", {"attention_mask": ragged()}),
    ("an attention mask shorter than the keys", {"attention_mask": torch.ones(3, 19)}),
    ("the argument output_hidden_states", {"output_hidden_states": True}),
    ("position_ids is not [batch, 1] beside the assistant", {"position_ids": torch.zeros(1, 2, dtype=torch.int64)}),
]


@pytest.mark.parametrize(("reason", "changes"), NOT_SERVED)
def test_what_is_not_served_is_transformers_and_said_once(reason: str, changes: dict[str, Any]) -> None:
    call = Call()
    with accelerate(call.assistant) as handle:
        with pytest.warns(RuntimeWarning, match="transformers' own forward drafts here: ") as seen:
            mine = outcome(call, changes)
        assert reason in str(seen[0].message)
        assert outcome(call, changes) == mine  # and no second warning
        assert handle.report() == {"accelerated": 0, "fallbacks": {reason: 2}}
    assert outcome(call, changes) == mine


def outcome(call: Call, changes: dict[str, Any]) -> object:
    """The logits, or the error that transformers raises."""
    try:
        return call(**changes).logits.tolist()
    except Exception as error:
        return type(error)


def test_gradients_training_and_autocast_are_left_to_transformers() -> None:
    call = Call()
    with accelerate(call.assistant) as handle, warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        call.assistant.requires_grad_(True)
        out = call.assistant(**call.arguments)
        assert out.logits.requires_grad
        call.assistant.requires_grad_(False)
        call.assistant.train()
        call()
        call.assistant.eval()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            call()
        hook = call.assistant.model.layers[0].register_forward_hook(lambda *args: None)
        fresh = {t: (k.clone(), v.clone()) for t, (k, v) in call.arguments["shared_kv_states"].items()}
        call(shared_kv_states=fresh)
        hook.remove()
        fresh = {t: (k.clone(), v.clone()) for t, (k, v) in fresh.items()}
        call(shared_kv_states=fresh)
    assert handle.report() == {
        "accelerated": 1,
        "fallbacks": {
            "gradients (call it under torch.no_grad())": 1,
            "training mode": 1,
            "autocast": 1,
            "hooks on a Gemma4TextDecoderLayer of the assistant": 1,
        },
    }


def test_weights_changed_later_are_noticed() -> None:
    """In place, as new tensors, and converted; at the first call of a round."""
    call = Call()
    with accelerate(call.assistant) as handle:
        call()
        layer = call.assistant.model.layers[0]
        changes = (
            lambda: layer.mlp.gate_proj.weight.mul_(1.5),
            lambda: setattr(layer.mlp.up_proj, "weight", torch.nn.Parameter(layer.mlp.up_proj.weight * 0.7, False)),
            lambda: layer.layer_scalar.fill_(0.5),
        )
        for change in changes:
            before = call()
            with torch.no_grad():
                change()
            fresh = {t: (k.clone(), v.clone()) for t, (k, v) in call.arguments["shared_kv_states"].items()}
            call.arguments["shared_kv_states"] = fresh
            mine = call()
            with torch.no_grad():
                theirs = type(call.assistant).forward(call.assistant, **call.arguments)
            alike(mine, theirs)
            assert not torch.allclose(mine.logits, before.logits)
        assert handle.report()["fallbacks"] == {}


def test_nothing_of_a_round_is_kept() -> None:
    """The KV of a generation that has ended is free."""
    import gc
    import weakref

    call = Call()
    with accelerate(call.assistant):
        call()
        watched = [weakref.ref(t) for pair in call.arguments["shared_kv_states"].values() for t in pair]
        call.arguments.clear()
        gc.collect()
        assert [w() for w in watched] == [None] * 4


def test_undo() -> None:
    assistant = load_assistant("dense")
    handle = accelerate(assistant)
    assert isinstance(handle, Acceleration) and assistant.forward == handle.forward
    with pytest.raises(ArgumentError, match="expected an assistant as transformers made it, got one already"):
        accelerate(assistant)
    handle.undo()
    handle.undo()
    assert "forward" not in assistant.__dict__
    wrapped = assistant.forward
    assistant.forward = wrapped  # as device hooks do
    with accelerate(assistant):
        assert assistant.forward is not wrapped
    assert assistant.forward is wrapped
    handle = accelerate(assistant)
    assistant.forward = wrapped
    with pytest.raises(RuntimeError, match="replaced again after accelerate"):
        handle.undo()


def test_errors_name_what_they_got() -> None:
    message = "accelerate: assistant: expected a Gemma4AssistantForCausalLM or Gemma4UnifiedAssistantForCausalLM, got "
    for wrong in (torch.nn.Linear(1, 1), tiny_pair().target, None):
        with pytest.raises(ArgumentError) as error:
            accelerate(wrong)
        assert str(error.value) == message + type(wrong).__name__
    assistant = load_assistant("dense")
    hook = assistant.model.norm.register_forward_pre_hook(lambda *args: None)
    with pytest.raises(ArgumentError, match="expected one that the ops serve, got hooks on a Gemma4RMSNorm of the"):
        accelerate(assistant)
    hook.remove()

    class Own(type(assistant)):  # type: ignore[misc]
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            return super().forward(*args, **kwargs)

    assistant.__class__ = Own
    with pytest.raises(ArgumentError) as error:
        accelerate(assistant)
    assert str(error.value) == (
        "accelerate: assistant: expected Gemma4AssistantForCausalLM.forward, got Own (a forward of the class's own)"
    )
