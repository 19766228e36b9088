"""How deep to draft, or whether at all: round by round, from what rounds have cost and yielded."""

from ._costs import CostModel
from ._policy import DraftPolicy

__all__ = ["CostModel", "DraftPolicy"]
