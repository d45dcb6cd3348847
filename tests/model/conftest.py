from pathlib import Path

import pytest
from whalez.model.presets import make_checkpoint


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The `tiny` checkpoint, f32, seed 0."""
    folder = tmp_path_factory.mktemp("tiny") / "model"
    make_checkpoint(folder, "kimi-linear", "tiny", 0, dtype="f32")
    return folder
