"""What holds for a whole run of the benchmark: device, peers, and how long to measure."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from .peers import MakeAttention, Peers

ATTENTION_PEERS = ("flashinfer", "vllm", "sglang")


@dataclass(frozen=True)
class Setting:
    device: torch.device
    cache_bytes: int  # of the last level before memory: inputs rotate over twice as much
    peers: Peers
    compile_ops: bool = True  # torch.compile as a peer of single ops
    compile_steps: bool = True  # and of the step
    samples: int = 30
    seconds: float = 1.0  # of samples a case, once there are three
    only_ours: bool = False  # no peer is timed

    def attention_makers(self) -> dict[str, MakeAttention]:
        """Every attention kernel of every peer that is here, by the name of its candidate."""
        found: dict[str, MakeAttention] = {}
        for name in ATTENTION_PEERS:
            found |= self.peers.attention_variants(name)
        return found
