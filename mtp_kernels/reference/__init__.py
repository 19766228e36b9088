"""The references: one plain PyTorch function an op, differentiable where the maths is, and exact in fp64."""

from __future__ import annotations
