"""What the pages and examples tell people to write is what the code reads."""

import re
from pathlib import Path

import yaml

from shoal.hosts.fleet.backendsfile import parse_backends
from shoal.measures import Fold
from shoal.routing.config import load

ROOT = Path(__file__).parents[2]


def blocks(page: str) -> list[str]:
    return re.findall(r"^```yaml\n(.*?)^```", (ROOT / "docs" / page).read_text(), re.M | re.S)


def test_the_backends_file_of_the_page_is_read_in_both_forms(tmp_path: Path) -> None:
    (text,) = blocks("backends.md")
    (tmp_path / "gpu-2.key").write_text("sk-engine\n")
    (tmp_path / "our-ca.pem").write_text("")
    targets, problems = parse_backends(text.encode(), tmp_path / "backends.yaml")
    assert problems == []
    assert [target.name for target in targets] == ["", "gpu-2", "serving/decode-0"]
    assert targets[1].labels["tier"] == "chat"


def test_the_endpoints_beside_the_discovery_example_are_the_ones_it_names() -> None:
    folder = ROOT / "examples/config"
    discovery = load((folder / "data-layer.yaml").read_text(), "").discovery
    assert discovery is not None
    path = folder / discovery.path
    targets, problems = parse_backends(path.read_bytes(), path)
    assert problems == []
    assert [target.known_engine for target in targets] == ["vllm", "sglang"]


def test_the_settings_of_the_keys_page_load() -> None:
    (text,) = blocks("keys.md")
    assert load(text, "").pool.auth.keys_file == yaml.safe_load(text)["auth"]["keys_file"]


def test_the_metrics_of_the_operations_page_exist() -> None:
    page = (ROOT / "docs/operations.md").read_text()
    named = set(re.findall(r"`((?:shoal_|llm_d_)[a-z0-9_]+)", page))
    families = {
        f"{metric.name}_total" if type(metric).__name__ == "Counter" else metric.name
        for metric in vars(Fold()).values()
        if hasattr(metric, "family")
    }
    of_the_pool = {
        "shoal_ready",
        "shoal_envoy_live",
        "shoal_envoy_watched_total",
        "shoal_child_restarts_total",
        "shoal_config_reloads_total",
        "shoal_worker_up",
    }
    assert len(named) > 10
    assert named - families - of_the_pool == set()
