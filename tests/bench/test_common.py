"""The command beside a result names no folder of this machine."""

import pytest

from adaspec.bench.common import command


@pytest.mark.parametrize("before", ["", "draft=", "draft=int4:", "models.target="])
def test_a_path_is_told_by_its_name(tmp_path, before):
    file = tmp_path / "model.gguf"
    file.touch()
    assert command("x", ["--drafter", f"{before}{file}", "1:2"]) == f"x --drafter {before}model.gguf 1:2"
