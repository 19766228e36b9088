"""tests/gpu/everything.py: stages are run in order within their time, and said to have failed where they have."""

from __future__ import annotations

import argparse
import importlib.util
import sys
from pathlib import Path
from typing import Any

import pytest
from mtp_kernels.bench.arguments import add_arguments

PATH = Path(__file__).parent / "gpu" / "everything.py"


@pytest.fixture(scope="module")
def everything() -> Any:
    spec = importlib.util.spec_from_file_location("everything", PATH)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["everything"] = module
    spec.loader.exec_module(module)
    return module


def test_what_comes_of_each_stage_is_said(everything: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write = "import sys, pathlib; pathlib.Path(sys.argv[1]).write_text(sys.argv[2])"
    stages = [
        everything.Stage("good", 30, ("-c", write, "{out}", "{commit}")),
        everything.Stage("bad", 30, ("-c", "print('why'); raise SystemExit(3)")),
        everything.Stage("slow", 0.5, ("-c", "import time; time.sleep(60)")),
        everything.Stage("late", 10**6, ("-c", "pass")),
    ]
    assert everything.main(["--commit", "abc", "--out", str(tmp_path), "--seconds", "60"], stages) == 1
    assert (tmp_path / "good.json").read_text() == "abc"
    assert (tmp_path / "bad.log").read_text() == "why\n"
    lines = {line.split()[0]: line for line in capsys.readouterr().out.splitlines() if line}
    assert lines["good"].endswith("ok") and lines["bad"].endswith("exit code 3: see bad.log")
    assert lines["slow"].endswith("cut short after 0 s") and "left out" in lines["late"]
    assert everything.main(["--commit", "abc", "--out", str(tmp_path), "--stage", "good"], stages) == 0


def test_the_stages_are_commands_that_exist(everything: Any) -> None:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    for stage in everything.STAGES:
        if "bench" in stage.arguments:
            parser.parse_args(stage.arguments[3:])
        else:
            assert (everything.ROOT / stage.arguments[0]).is_file()
    for path in everything.IGNORED:
        assert (everything.ROOT / path).is_file()
