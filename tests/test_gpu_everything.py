"""tests/gpu/everything.py: stages are run in order within their time, and said to have failed where they have; and
record.py, which writes down what tests said."""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import subprocess
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
        everything.Stage("good", 30, ("-c", write, "{out}", "{commit}", "{peers}")),
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
        filled = stage.filled(Path("folder"), "abc", ["--peer-wheel", "a.whl"])
        if "bench" in stage.arguments:
            peers = parser.parse_args(filled[3:]).peer_wheel
            assert bool(peers) == ("--no-peers" not in filled)
        else:
            assert (everything.ROOT / stage.arguments[0]).is_file()
    for path in everything.IGNORED:
        assert (everything.ROOT / path).is_file()


def test_a_record_has_the_names_of_failures_and_the_end_of_what_they_said(tmp_path: Path) -> None:
    tests, out = tmp_path / "test_some.py", tmp_path / "record.json"
    tests.write_text("""
import pytest

@pytest.fixture
def broken(): raise RuntimeError("never made")

def test_good(): pass
def test_wrong(): assert 1 == 2, "x" * 2000 + " is wrong"
def test_without(broken): pass
""")
    command = [sys.executable, str(PATH.parent / "record.py"), "--commit", "abc", "--out", str(out)]
    command += ["-p", "no:cacheprovider", str(tests)]
    own = {k: v for k, v in os.environ.items() if not k.startswith("PYTEST_")}  # not what the run around it was told
    done = subprocess.run(command, capture_output=True, text=True, env=own)
    record = json.loads(out.read_text(encoding="utf-8"))
    assert done.returncode == record["exit_code"] == 1, done.stdout + done.stderr
    assert [sum(c.get(o, 0) for c in record["outcomes"].values()) for o in ("passed", "failed")] == [1, 2]
    wrong, without = (next(m for name, m in record["failed"].items() if name.endswith(n)) for n in ("wrong", "without"))
    assert "x is wrong" in wrong and len(wrong) == 1500 and "RuntimeError: never made" in without
