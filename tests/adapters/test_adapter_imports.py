"""What runs inside a foreign engine must not bring torch or transformers along."""

import subprocess
import sys


def test_the_engine_side_leaves_torch_and_transformers_alone():
    code = """import sys
import adaspec.adapters.sglang, adaspec.adapters.tables, adaspec.adapters.windows, adaspec.state
print(sorted({'torch', 'transformers', 'vllm', 'sglang', 'fsspec'} & set(sys.modules)))"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.strip() == "[]"
