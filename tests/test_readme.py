"""README's Python blocks run as they stand; its table names every op."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from mtp_kernels.ops import OPS

README = (Path(__file__).parents[1] / "README.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"```python\n(.*?)```", README, flags=re.DOTALL)


@pytest.mark.parametrize("number", range(len(BLOCKS)))
def test_block_runs(number: int) -> None:
    exec(compile(BLOCKS[number], f"README block {number}", "exec"), {})


def test_there_is_an_example_of_every_op_family() -> None:
    for op in ("draft_attention", "pre_project", "centroid_topk", "sample_logits", "tree_build", "commit"):
        assert any(f"{op}(" in block for block in BLOCKS), op


def test_table_names_every_op() -> None:
    assert set(re.findall(r"^\| `(\w+)` \|", README, flags=re.MULTILINE)) == set(OPS)
