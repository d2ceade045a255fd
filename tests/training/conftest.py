"""One torch thread: the tensors are small, and the cores are often shared."""

import torch

torch.set_num_threads(1)
