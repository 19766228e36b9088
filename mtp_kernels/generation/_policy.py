"""What generate() asks of a speculation policy; `mtp_kernels.DraftPolicy` answers it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol


class RoundPolicy(Protocol):
    """Decides round by round how deep to draft. Request ids are the rows of generate()'s batch, 0 to batch - 1."""

    def choose(self, batch: int, request_ids: Sequence[int] | None = None) -> int:
        """num_steps of the next round, for `batch` unfinished requests of which these ids draft; 0 for no drafting."""
        ...

    def update(
        self,
        request_ids: Sequence[int],
        num_drafted: Sequence[int],
        num_accepted: Sequence[int],
        draft_seconds: float,
        verify_seconds: float,
    ) -> None:
        """What a round gave: for every unfinished request the depth drafted (0: none) and the tokens accepted."""
        ...

    def forget(self, request_id: int) -> None:
        """The request has ended."""
        ...
