from __future__ import annotations

from pathlib import Path

import pytest

from whalez.model.presets import make_checkpoint


@pytest.fixture(scope="session")
def tiny_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny")
    make_checkpoint(folder, "kimi-linear", "tiny", 0, "f32")
    return folder
