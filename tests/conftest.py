"""Fixed examples for property-based tests; this folder on the path, for helpers.py; a tiny saved model; a browser."""

import shutil

import pytest
from hypothesis import settings

settings.register_profile("fixed", derandomize=True, deadline=None)
settings.load_profile("fixed")


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    from saved_models import save_model

    return str(save_model(tmp_path_factory.mktemp("model")))


@pytest.fixture
def generate(model: str):
    from adaspec.cli import main

    return lambda *options: main(
        ["generate", "the quick brown", "--target", model, "--threads", "1", "--max-new-tokens", "24", *options]
    )


@pytest.fixture(scope="session")
def chromium() -> str:
    found = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if found is None:
        pytest.skip("there is no Chromium")
    return found
