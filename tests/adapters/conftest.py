"""The tiny models of the decoding tests; one torch thread, as there."""

import sys
from pathlib import Path

import torch

torch.set_num_threads(1)
sys.path.append(str(Path(__file__).parents[1] / "decoding"))
