"""One line for transformers' assisted generation: its Gemma 4 assistant runs on this library's ops, in place."""

from __future__ import annotations

import sys
import warnings
from collections import Counter
from collections.abc import Callable
from types import TracebackType
from typing import Any

import torch

from ..ops import ArgumentError
from ..ops._checks import require
from ..weights import CheckpointError
from ._assistant import AssistantStep, Fallback

CLASSES = ("Gemma4AssistantForCausalLM", "Gemma4UnifiedAssistantForCausalLM")


def accelerate(assistant: Any) -> Acceleration:
    """Let a transformers assistant draft with this library's ops, until `undo()`.

    After it, `target.generate(..., assistant_model=assistant)` is the same call with the same tokens: only the
    assistant's `forward` is replaced, on this one object, and what it returns keeps its meaning (logits of the whole
    vocabulary, the next state). The window, the positions and the attention mask mean what they mean to transformers.

    A call that the ops do not serve goes to the assistant's own forward: a mask that is not left padding, several
    query rows, gradients, training, autocast, torch.compile, extra outputs, hooks inside the assistant. The first such
    call for each reason warns, and `report()` counts them all. Weights that are changed later are noticed, at the
    beginning of a round.

    Args:
        assistant: a Gemma4AssistantForCausalLM or Gemma4UnifiedAssistantForCausalLM of transformers 5.17 to 5.24, in
            bf16, fp16 or fp32.

    Returns:
        Acceleration, a handle with `undo()` and `report()`; as a context manager it undoes at the end of the block.

    Raises:
        ArgumentError: something else than such an assistant, one whose class has a forward of its own, or one that is
            accelerated already.
        CheckpointError: a config, tensor or size that is not supported.

    >>> handle = accelerate(assistant)                                                         # doctest: +SKIP
    >>> ids = target.generate(**inputs, assistant_model=assistant, max_new_tokens=64)          # doctest: +SKIP
    >>> handle.report()                                                                        # doctest: +SKIP
    {'accelerated': 112, 'fallbacks': {}}
    >>> accelerate(torch.nn.Linear(2, 2))
    Traceback (most recent call last):
    mtp_kernels.ops._checks.ArgumentError: accelerate: assistant: expected a Gemma4AssistantForCausalLM or \
Gemma4UnifiedAssistantForCausalLM, got Linear
    """
    own: Any = type(assistant)
    base: Any = next((c for c in own.__mro__ if c.__name__ in CLASSES), None)
    require(base is not None, "accelerate", "assistant", "a " + " or ".join(CLASSES), own.__name__)
    why = "a forward of the class's own"
    require(own.forward is base.forward, "accelerate", "assistant", f"{base.__name__}.forward", own.__name__, why)
    already = isinstance(getattr(assistant.forward, "__self__", None), Acceleration)
    require(not already, "accelerate", "assistant", "an assistant as transformers made it", "one already accelerated")
    output_class = getattr(sys.modules[base.__module__], base.__name__.replace("ForCausalLM", "Output"))
    try:
        step = AssistantStep(assistant)
    except Fallback as why:
        raise ArgumentError(f"accelerate: assistant: expected one that the ops serve, got {why}") from None
    return Acceleration(assistant, step, output_class)


class Acceleration:
    """What `accelerate` did to an assistant: `undo()` takes it back, `report()` says which calls the ops served."""

    def __init__(self, assistant: Any, step: AssistantStep, output_class: Callable[..., Any]) -> None:
        self._assistant = assistant
        self._step = step
        self._output_class = output_class
        self._own: Any = assistant.__dict__.get("forward")  # of an instance that something else has wrapped before
        self._original: Callable[..., Any] = assistant.forward
        self._served = 0
        self._fallbacks: Counter[str] = Counter()
        self._done = False
        self._forward = self.forward  # one bound method, so that undo() knows its own
        assistant.forward = self._forward

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The assistant's forward: on the ops where they serve the call, by transformers' own code where not."""
        try:
            if args:
                raise Fallback("positional arguments")
            logits, state = self._step(**kwargs)
        except (ArgumentError, CheckpointError, Fallback) as why:
            return self._fall_back(str(why), *args, **kwargs)
        self._served += 1
        return self._output_class(last_hidden_state=state, logits=logits)

    def report(self) -> dict[str, Any]:
        """{"accelerated": calls that the ops served, "fallbacks": {reason: calls that transformers served}}."""
        return {"accelerated": self._served, "fallbacks": dict(self._fallbacks)}

    def undo(self) -> None:
        """Give the assistant its own forward back; a second call does nothing.

        Raises:
            RuntimeError: something else has replaced `forward` since; undo that first.
        """
        if self._done:
            return
        if self._assistant.__dict__.get("forward") is not self._forward:
            raise RuntimeError("accelerate: undo: the assistant's forward was replaced again after accelerate()")
        if self._own is None:
            del self._assistant.forward
        else:
            self._assistant.forward = self._own
        self._done = True

    def __enter__(self) -> Acceleration:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.undo()

    def _fall_back(self, reason: str, *args: Any, **kwargs: Any) -> Any:
        if reason not in self._fallbacks and not torch.compiler.is_compiling():
            warnings.warn(f"mtp_kernels: transformers' own forward drafts here: {reason}", RuntimeWarning, stacklevel=3)
        self._fallbacks[reason] += 1
        return self._original(*args, **kwargs)
