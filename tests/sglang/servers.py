"""A real SGLang on CPU as a child process."""

import os
from pathlib import Path

from tests.scenarios.engines import free_port
from tests.vllm.servers import Server

HERE = Path(__file__).parent
SGLANG_VENV = Path(os.environ.get("SHOAL_SGLANG_VENV", HERE.parents[1] / ".venv-sglang"))


def sglang(model: Path, log: Path, *flags: str) -> Server:
    """Start an SGLang whose cache holds 128 pages of 32 tokens, and which tells what its cache holds."""
    port, events, replay = free_port(), free_port(), free_port()
    config = f'{{"publisher":"zmq","endpoint":"tcp://*:{events}","replay_endpoint":"tcp://*:{replay}","topic":"kv@sg"}}'
    command = [
        str(SGLANG_VENV / "bin/python"), "-m", "sglang.launch_server", "--model-path", str(model),
        "--served-model-name", "tiny", "--device", "cpu", "--host", "127.0.0.1", "--port", str(port),
        "--attention-backend", "torch_native", "--sampling-backend", "pytorch", "--disable-overlap-schedule",
        "--grammar-backend", "none", "--max-total-tokens", "4096", "--page-size", "32", "--skip-server-warmup",
        "--enable-metrics", "--enable-cache-report", "--kv-events-config", config, *flags,
    ]  # fmt: skip
    env = {"PYTHONPATH": str(HERE / "torchvision_stub"), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    return Server(command, env, port, log, "/model_info")
