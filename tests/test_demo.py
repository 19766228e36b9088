"""The demo and the example pair: drafting changes no token, the command's forms and errors."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from harness import forced

pytest.importorskip("transformers")

from mtp_kernels.cli import main
from mtp_kernels.demo.pair import HEADS, Pair, load_pair, pair_directory
from mtp_kernels.demo.stats import summarize
from mtp_kernels.integrations.greedy import Round, decode_greedy, greedy_reference

SHAPES = {
    "chain": {"num_steps": 4},
    "chain cut": {"num_steps": 4, "num_draft_tokens": 3},
    "tree": {"num_steps": 4, "topk": 4, "num_draft_tokens": 16},
    "whole tree": {"num_steps": 2, "topk": 2},
}


@pytest.fixture(scope="module", params=HEADS)
def pair(request: pytest.FixtureRequest) -> Pair:
    return load_pair(pair_directory(), request.param)


def test_output_equals_greedy_on_every_held_out_module(pair: Pair) -> None:
    stop = torch.tensor([pair.eos_id])
    for module in pair.held_out:
        prompt = pair.held_out_prompt(module, 120)
        plain = greedy_reference(pair.model, prompt, 24, [pair.eos_id])
        for name in ("chain", "tree"):
            rounds = list(decode_greedy(pair.model, pair.weights, prompt, 24, stop_ids=stop, **SHAPES[name]))
            assert [t for r in rounds for t in r.token_ids] == plain, (module, name)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("length", [1, 2, 63, 64, 65])
def test_short_prompts_and_lengths_around_the_window(pair: Pair, shape: str, length: int) -> None:
    prompt = pair.held_out_prompt(pair.held_out[1], length)
    plain = greedy_reference(pair.model, prompt, 9)
    rounds = list(decode_greedy(pair.model, pair.weights, prompt, 9, **SHAPES[shape]))
    assert [t for r in rounds for t in r.token_ids] == plain


def test_drafting_pays(pair: Pair) -> None:
    """A drafter that never agrees makes 1 token a round; the trained one makes clearly more."""
    rounds = []
    for module in pair.held_out[:3]:
        rounds += decode_greedy(pair.model, pair.weights, pair.held_out_prompt(module, 200), 64)
    assert summarize(rounds, 4).tokens_per_round > 1.8


def test_a_stop_inside_a_round_ends_the_output(pair: Pair) -> None:
    prompt = pair.held_out_prompt(pair.held_out[0], 150)
    plain = greedy_reference(pair.model, prompt, 40)
    rounds = list(decode_greedy(pair.model, pair.weights, prompt, 40))
    inside = next(r.token_ids[0] for r in rounds if len(r.token_ids) > 2)
    stopped = list(decode_greedy(pair.model, pair.weights, prompt, 40, stop_ids=torch.tensor([inside])))
    assert [t for r in stopped for t in r.token_ids] == plain[: plain.index(inside) + 1]


def test_summarize_counts_depths() -> None:
    rounds = [
        Round([1], 0, 0, 0.0, 2.0),
        Round([1, 2, 3], 2, 4, 1.0, 3.0),
        Round([4], 0, 4, 1.0, 3.0),
    ]
    summary = summarize(rounds, 4)
    assert (summary.rounds, summary.tokens, summary.tokens_per_round) == (2, 4, 2.0)
    assert summary.accepted_per_position == [0.5, 0.5, 0.0, 0.0]
    assert (summary.prefill_seconds, summary.draft_seconds, summary.verify_seconds) == (2.0, 2.0, 6.0)


@pytest.mark.parametrize("options", [[], ["--topk", "4", "--steps", "3", "--head", "dense"]])
def test_json_prints_one_object(options: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["demo", "--json", "--max-new-tokens", "20", *options]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed["equals_greedy"] is True
    assert printed["tokens_per_round"] >= 1
    assert len(printed["accepted_per_position"]) == printed["steps"]
    assert printed["text"] and {"draft_seconds", "verify_seconds"} <= set(printed["times"])


def test_display_marks_accepted_tokens(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["demo", "--max-new-tokens", "30", "--no-check"]) == 0
    shown = capsys.readouterr().out
    assert "⟦" in shown and "⟧" in shown
    assert "tokens a round" in shown and "accepted at position 4" in shown and "time in verify" in shown


def test_prompt_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    prompt = tmp_path / "prompt.py"
    prompt.write_text("import os\n\n\ndef main(argv):\n    for name in argv:\n        ")
    assert main(["demo", "--json", "--max-new-tokens", "8", "--prompt-file", str(prompt)]) == 0
    assert json.loads(capsys.readouterr().out)["equals_greedy"] is True


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--prompt-file", "no/such/file"], "mtp-kernels demo: --prompt-file: "),
        (["--pair", "no/such/pair"], "is not a pair: target is missing"),
        (["--device", "nonsense"], "mtp-kernels demo: --device: expected cpu, cuda or cuda:N, got 'nonsense'"),
        (["--device", "meta"], "mtp-kernels demo: --device: expected cpu, cuda or cuda:N, got 'meta'"),
        (["--device", "cuda:99"], "mtp-kernels demo: --device: cuda:99: "),
        (["--steps", "0"], "mtp-kernels demo: --steps: expected at least 1, got 0"),
        (["--topk", "9999"], "mtp-kernels demo: --topk: expected at most 512 (the head's candidates), got 9999"),
        (["--nodes", "6"], "mtp-kernels demo: --nodes: expected 2 to 5 (root and candidates), got 6"),
        (["--nodes", "1"], "mtp-kernels demo: --nodes: expected 2 to 5 (root and candidates), got 1"),
        (["--max-new-tokens", "-3"], "--max-new-tokens: expected at least 1, got -3"),
    ],
)
def test_errors_are_one_line(options: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["demo", "--json", *options]) == 2
    captured = capsys.readouterr()
    assert message in captured.err and captured.err.count("\n") == 1 and not captured.out


def test_a_long_prompt_file_is_cut_to_its_end(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Whatever lies before the last tokens is not read: the same text as from the end alone."""
    texts = []
    for repeats in (600, 3000):
        (tmp_path / "long").write_text("x = 1\n" * repeats + "import os\n")
        assert main(["demo", "--json", "--max-new-tokens", "6", "--prompt-file", str(tmp_path / "long")]) == 0
        texts.append(json.loads(capsys.readouterr().out)["text"])
    assert texts[0] == texts[1]


def test_an_implementation_that_cannot_serve_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    with forced("triton"):
        assert main(["demo", "--json", "--max-new-tokens", "4"]) == 2
    assert "pre_project: MTP_FORCE_IMPL=triton: " in capsys.readouterr().err


def test_an_interrupt_is_no_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*args: object) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr("mtp_kernels.demo.run", interrupted)
    assert main(["demo"]) == 130


def test_nothing_drafted_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["demo", "--max-new-tokens", "1"]) == 0
    assert "no round drafted" in capsys.readouterr().out


def test_empty_prompt_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "empty").write_text("")
    assert main(["demo", "--json", "--prompt-file", str(tmp_path / "empty")]) == 2
    assert "is empty" in capsys.readouterr().err
