"""Makes tests/goldens/*.npz: logits that other people's implementations compute from our seeded checkpoints.

Needs an environment of its own, since whalez does not depend on any of this:

    python -m venv golden && golden/bin/pip install . torch transformers==5.24.0 mlx mlx-cpu mlx-lm==0.32.2
    golden/bin/python tools/make_goldens.py

fla-core must be absent: with it, transformers picks GPU kernels. On Linux mlx computes on the CPU through mlx-cpu.

A file holds `tokens` (the prompt), `positions` and `logits` (f32, those rows only, to keep the files small),
`tensors` (digest of the checkpoint's values: a golden only speaks about those) and `source`. Only commit changed files
if you understand what changed them.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

from whalez.model.checkpoint import read_tensors, tensors_digest
from whalez.model.config import KimiLinearConfig
from whalez.model.naive import naive_forward
from whalez.model.presets import make_checkpoint

GOLDENS = Path(__file__).parent.parent / "tests" / "goldens"
SEED = 0
PROMPT_TOKENS = 150

# An f32 implementation must not be able to choose another expert, and should agree on the best token.
ROUTING_MARGIN_MIN = 5e-4
TOKEN_MARGIN_MIN = 2e-3


def choose_prompt(config: KimiLinearConfig, tensors: dict[str, Any]) -> np.ndarray:
    """The first seeded prompt whose expert choices and best tokens are all clear."""
    for seed in range(1000):
        tokens = np.random.default_rng(seed).integers(0, config.vocab_size, PROMPT_TOKENS)
        result = naive_forward(config, tensors, tokens)
        best = np.sort(result.logits, -1)
        token_margin = (best[:, -1] - best[:, -2]).min()
        if min(margins.min() for margins in result.margins) > ROUTING_MARGIN_MIN and token_margin > TOKEN_MARGIN_MIN:
            return tokens
    raise SystemExit("no prompt with clear margins among 1000 seeds")


def run_transformers(directory: Path, tokens: np.ndarray) -> np.ndarray:
    import torch
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(1)
    model, info = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32, output_loading_info=True)
    if any(info.values()):
        raise SystemExit(f"transformers did not take every tensor: {info}")
    with torch.no_grad():
        return model(torch.tensor(tokens)[None]).logits[0].numpy()


def run_mlx(directory: Path, tokens: np.ndarray) -> np.ndarray:
    import mlx.core as mx
    from mlx_lm.utils import load_model

    mx.set_default_device(mx.cpu)
    model, _ = load_model(directory)
    return np.array(model(mx.array(tokens)[None])[0].astype(mx.float32))


# Preset, implementation, the package whose version is noted, how many rows are kept.
TASKS: list[tuple[str, Callable[[Path, np.ndarray], np.ndarray], str, int]] = [
    ("tiny", run_transformers, "transformers", PROMPT_TOKENS),
    ("tiny", run_mlx, "mlx-lm", 20),
    ("kernel", run_transformers, "transformers", 20),
]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=sorted({package for _, _, package, _ in TASKS}))
    only = parser.parse_args().only
    for preset, run, package, rows_count in TASKS:
        if only in (None, package):
            make_golden(preset, run, package, rows_count)


def make_golden(preset: str, run: Callable[[Path, np.ndarray], np.ndarray], package: str, rows_count: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        directory = Path(folder)
        make_checkpoint(directory, "kimi-linear", preset, SEED, "f32")
        config, tensors = KimiLinearConfig.from_dir(directory), read_tensors(directory)
        tokens = choose_prompt(config, tensors)
        logits = run(directory, tokens)
    positions = np.linspace(0, PROMPT_TOKENS - 1, rows_count).astype(np.int32)
    path = GOLDENS / f"{preset}-{package}.npz"
    np.savez_compressed(
        path,
        tokens=tokens.astype(np.int32),
        positions=positions,
        logits=logits[positions].astype(np.float32),
        tensors=np.array(tensors_digest(tensors)),
        source=np.array(f"{package} {version(package)}"),
    )
    print(f"{path}: {rows_count} rows, {path.stat().st_size} bytes")


if __name__ == "__main__":
    main()
