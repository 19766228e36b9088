"""What a call costs on the host: a row for every op of a model and for draft(), written as JSON."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest
import torch
from mtp_kernels.bench import eager

from mtp_kernels.ops import OPS


def test_every_op_and_a_draft_step_have_a_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(eager, "CALLS", 2)
    monkeypatch.setattr(eager, "SAMPLES", 2)
    out = tmp_path / "there" / "eager.json"
    assert eager.main(["--device", "cpu", "--models", "tiny,tiny-dense", "--context", "20", "--out", str(out)]) == 0
    record = json.loads(out.read_text())
    assert {row["name"] for row in record["rows"]} == {*OPS, "draft() by the step"}
    assert all(row["host_us"] > 0 and row["served_by"] for row in record["rows"])
    assert record["command"].startswith("python -m mtp_kernels.bench.eager --device cpu --models tiny,tiny-dense")
    assert record["add_us"] > 0 and record["device_name"]


def test_the_time_is_that_of_one_call(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(eager, "SAMPLES", 3)
    us = eager.host_us(lambda: time.sleep(0.002), torch.device("cpu"), 5)
    assert 2000 <= us < 20000
