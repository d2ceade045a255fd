"""What a pass over k tokens costs in the linear layers of a small model, per precision, and whether rows are exact.

``python -m adaspec.bench.linear`` prints a table and, as its last line, one JSON object. Random weights in the shape of
SmolLM2-135M, all layers and the head; precisions take turns, so that a noisy neighbour disturbs all alike.
"""

from __future__ import annotations

import json
import statistics
import sys
import time

import torch
from torch import Tensor, nn

from adaspec.decoding.packed import PRECISIONS, pack

WIDTH, KV_WIDTH, INNER, VOCAB, LAYERS = 576, 192, 1536, 49152, 30
COUNTS = (1, 2, 3, 5, 9)
ROUNDS = 15


class Linears(nn.Module):
    """The linear layers of a Llama-shaped model, each fed with rows of its own width."""

    def __init__(self) -> None:
        super().__init__()
        layer = [(WIDTH, WIDTH), (WIDTH, KV_WIDTH), (WIDTH, KV_WIDTH), (WIDTH, WIDTH)]
        layer += [(WIDTH, INNER), (WIDTH, INNER), (INNER, WIDTH)]
        self.layers = nn.ModuleList(nn.Linear(*shape, bias=False) for shape in layer * LAYERS + [(WIDTH, VOCAB)])

    def forward(self, rows: Tensor) -> list[Tensor]:  # [k, INNER]
        return [layer(rows[:, : layer.in_features].contiguous()) for layer in self.layers]


def exact(module: nn.Module) -> bool:
    """Whether every row of every layer has the same bits alone and among others."""
    rows = torch.randn(9, INNER)
    alone = [torch.cat(parts) for parts in zip(*(module(row[None]) for row in rows))]
    return all(
        torch.equal(part, whole[:count])
        for count in COUNTS
        for part, whole in zip(module(rows[:count]), alone, strict=True)
    )


def seconds(modules: dict[str, nn.Module]) -> dict[str, dict[int, float]]:
    """Median seconds of a pass, by precision and number of rows."""
    times: dict[str, dict[int, list[float]]] = {name: {count: [] for count in COUNTS} for name in modules}
    for _ in range(ROUNDS):
        for count in COUNTS:
            rows = torch.randn(count, INNER)
            for name, module in modules.items():
                start = time.perf_counter()
                module(rows)
                times[name][count].append(time.perf_counter() - start)
    return {name: {count: statistics.median(row) for count, row in by.items()} for name, by in times.items()}


@torch.inference_mode()
def main() -> None:
    """Measures with 1 and with 2 threads."""
    modules = {name: pack(Linears(), name) for name in PRECISIONS}
    result: dict[str, dict[str, object]] = {}
    write = sys.stdout.write
    write(f"{'threads':8}{'precision':10}{'exact':>6}{'T(1) ms':>9}" + "".join(f"  x{k} " for k in COUNTS[1:]) + "\n")
    for threads in (1, 2):
        torch.set_num_threads(threads)
        for name, times in seconds(modules).items():
            ratios = {str(count): round(times[count] / times[1], 3) for count in COUNTS[1:]}
            row = {"ms": round(1e3 * times[1], 3), "ratio": ratios, "exact": exact(modules[name])}
            result[f"{name}/{threads}"] = row
            shown = "".join(f"{ratio:5.2f}" for ratio in ratios.values())
            write(f"{threads:<8}{name:10}{'yes' if row['exact'] else 'no':>6}{row['ms']:9.2f}{shown}\n")
    write(json.dumps(result) + "\n")


if __name__ == "__main__":
    main()
