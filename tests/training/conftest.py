"""One torch thread, as the tensors are small; and the tiny models of the decoding tests."""

import sys
from pathlib import Path

import torch

torch.set_num_threads(1)
sys.path.append(str(Path(__file__).parents[1] / "decoding"))
