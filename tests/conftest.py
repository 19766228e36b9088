"""One process-wide set-up: few threads, full fp32."""

from __future__ import annotations

import torch

torch.set_num_threads(2)
