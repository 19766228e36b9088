"""README's Python blocks run as they stand; its table names every op; its figures are the committed records'."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from mtp_kernels.bench.readme import stale

from mtp_kernels.ops import OPS

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"```python\n(.*?)```", README, flags=re.DOTALL)


@pytest.mark.parametrize("number", range(len(BLOCKS)))
def test_block_runs(number: int) -> None:
    """A block without `import torch` goes on where the one before it ended."""
    first = number
    while "import torch" not in BLOCKS[first]:
        first -= 1
    names: dict[str, object] = {}
    for place in range(first, number + 1):
        exec(compile(BLOCKS[place], f"README block {place}", "exec"), names)


@pytest.mark.parametrize("file", ["README.md", "bench/results/h200/README.md", "bench/results/cpu/README.md"])
def test_tables_are_those_of_the_records(file: str) -> None:
    """`mtp-kernels bench readme FILE` makes them."""
    text = (ROOT / file).read_text(encoding="utf-8")
    assert "<!-- bench:" in text and stale(text, (ROOT / file).parent) == []


def test_there_is_an_example_of_every_op_family() -> None:
    for op in ("draft_attention", "pre_project", "centroid_topk", "sample_logits", "tree_build", "commit"):
        assert any(f"{op}(" in block for block in BLOCKS), op


def test_table_names_every_op() -> None:
    assert set(re.findall(r"^\| `(\w+)` \|", README, flags=re.MULTILINE)) == set(OPS)
