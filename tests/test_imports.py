"""The core is installable without torch, so it must not import it."""

import subprocess
import sys


def test_the_core_leaves_torch_and_transformers_alone():
    code = """import sys, adaspec
assert all(getattr(adaspec, name) for name in adaspec.__all__)
print(sorted({'torch', 'transformers', 'hydra', 'wandb'} & set(sys.modules)))"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.strip() == "[]"
