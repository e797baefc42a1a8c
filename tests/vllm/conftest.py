"""The tiny model that the real engines serve."""

import subprocess
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.vllm.servers import VLLM_VENV


class Weights(NamedTuple):
    """Directories of the model and of an adapter for it."""

    model: Path
    adapter: Path


def make_weights(room: Path, venv: Path) -> Weights:
    """Write a Llama of 336k random weights with a tokenizer and a chat template of its own.  venv: of an engine."""
    made = Weights(room / "model", room / "adapter")
    script = Path(__file__).with_name("make_model.py")
    command = [str(venv / "bin/python"), str(script), str(made.model), "--lora", str(made.adapter)]
    subprocess.run(command, check=True, timeout=120)
    return made


@pytest.fixture(scope="session")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Weights:
    """The tiny model and an adapter for it."""
    return make_weights(tmp_path_factory.mktemp("weights"), VLLM_VENV)
