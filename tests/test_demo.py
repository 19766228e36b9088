"""The demo: the command's forms and errors."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from harness import forced

pytest.importorskip("transformers")

from mtp_kernels.cli import main


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
    assert "verify_greedy: MTP_FORCE_IMPL=triton: " in capsys.readouterr().err


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
