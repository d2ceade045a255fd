"""The help of ``adaspec bench``: its groups and their choices, read from the tree."""

from __future__ import annotations

from adaspec.bench.config import groups, names, summary

HEAD = """usage: adaspec bench [-m] [GROUP=CHOICE ...] [KEY=VALUE ...] [resume=RUN]

Measures methods side by side in one process, interleaved question by question: plain decoding, the best fixed plan of
a sweep, Hugging Face's generate and its assisted generation, and policies of ours. Everything is one line of
configuration; conf/config.yaml is the table of contents, one small yaml per choice.

  adaspec bench experiment=smoke                            a first look, in under three minutes
  adaspec bench policy=optimistic workload.limit=4 repeats=1
  adaspec bench policies=[thompson,optimistic] methods=[plain,best_fixed,policy,target/lookup:4]
  adaspec bench workload=spec_bench workload.read.path=question.jsonl workload.per_kind=10
  adaspec bench models=qwen_coder models.target=T.gguf models.draft=D.gguf workload=humaneval workload.read.path=H.jsonl
  adaspec bench experiment=smoke sampling=t0.7 record=wandb
  adaspec bench -m policy=thompson,ucb seed=0,1 experiment=smoke     four runs, one table
  adaspec bench sweep=conf/sweep.yaml                       a W&B sweep definition, without a server
  adaspec bench resume=runs/DATE/TIME-bench                 goes on with a run that was interrupted
  adaspec bench --cfg job experiment=smoke                  shows the configuration and does nothing
"""


def usage() -> str:
    """The text of ``adaspec bench --help``."""
    parts = [HEAD]
    for group in groups("bench"):
        choices = names(group, "bench")
        width = max(map(len, choices))
        parts.append("\n".join([f"{group}=", *(f"  {name:<{width}}  {summary(group, name)}" for name in choices)]))
    return "\n\n".join(parts)
