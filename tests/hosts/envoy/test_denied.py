"""Which paths the public port keeps from clients."""

import re
from typing import Any

import pytest

from shoal.hosts.envoy import FailureMode
from shoal.hosts.envoy.denied import DENIED
from shoal.hosts.envoy.routes import route_configuration
from tests.hosts.envoy.envoy_rig import Rig, rig
from tests.hosts.envoy.test_configuration import settings

OPERATORS = [
    "/metrics",
    "/metrics/",
    "/metrics/x",
    "/metricsx",
    "/reset_prefix_cache",
    "/sleep",
    "/wake_up",
    "/is_sleeping",
    "/collective_rpc",
    "/load",
    "/pause",
    "/v1/load_lora_adapter",
    "/v1/unload_lora_adapter",
    "/load_lora_adapter",
    "/flush_cache",
    "/resume",
    "/update_weights",
    "/server_info",
    "/update_weights_from_disk",
    "/update_weights_from_tensor",
    "/update_weight_version",
    "/start_weight_update",
    "/weight_info",
    "/start_draft_weight_update",
    "/init_weight_transfer_engine",
    "/init_weights_update_group",
    "/weights_checker",
    "/abort_request",
    "/release_memory_occupation",
    "/faults",
    "/requests",
    "/perf_metrics",
    "/prefix/metrics",
    "/v1%2Fload_lora_adapter",
    "/%6detrics",
    "/sl%65ep",
    "/reset%5fprefix_cache",
    "/v1/lo%61d_lora_adapter",
    "/fault_tolerance/apply",
    "/start_profile",
    "/end_weight_update",
    "/destroy_weights_update_group",
    "/clear_hicache_storage_backend",
]
CLIENTS = [
    "/v1/chat/completions",
    "/v1/completions",
    "/v1/responses",
    "/v1/responses/resp_1",
    "/v1/responses/resp_1/cancel",
    "/v1/messages",
    "/v1/messages/count_tokens",
    "/v1/embeddings",
    "/v1/models",
    "/v1/models/meta-llama%2FLlama-3",
    "/tokenize",
    "/detokenize",
    "/score",
    "/v1/rerank",
    "/pooling",
    "/inference/v1/generate",
    "/generate",
    "/v1/audio/transcriptions",
    "/v1/audio/speech",
    "/health",
    "/ping",
    "/version",
    "/invocations",
    "/classify",
    "/v1/realtime",
    "/something/else",
    "/",
    "/v1/files/a%20b",
    "/openai/v1/chat/completions",
    "/get_model_info",
    "/model_info",
]


@pytest.mark.parametrize("path", OPERATORS)
def test_paths_of_operators_are_not_public_however_they_are_written(path: str) -> None:
    assert re.fullmatch(DENIED, path)


@pytest.mark.parametrize("path", CLIENTS)
def test_paths_of_clients_are_public(path: str) -> None:
    assert not re.fullmatch(DENIED, path)


def test_the_deny_list_stands_before_every_other_route_and_can_be_switched_off() -> None:
    def names(**more: Any) -> list[str]:
        (host,) = route_configuration(settings(**more))["virtual_hosts"]
        return [route["name"] for route in host["routes"]]

    assert names()[:2] == ["denied", "upgrade"]
    assert "denied" not in names(are_all_paths_public=True)


@pytest.mark.e2e
async def test_an_operators_path_is_404_with_the_reason_and_reaches_neither_picker_nor_engine(live: Rig) -> None:
    for path in ("/metrics", "/reset_prefix_cache?reset_external=1", "/v1/load_lora_adapter"):
        answer = await live.send(path, live.engines[0].address)
        assert (answer.status, answer.error["code"], answer.error["type"]) == (
            404,
            "path_not_public",
            "invalid_request_error",
        )
        assert "public_paths: all" in answer.error["message"]
    encoded = await live.raw_answer(b"GET /%6detrics HTTP/1.1\r\nhost: x\r\n\r\n")
    assert (encoded.status, encoded.error["code"]) == (404, "path_not_public")
    socket = {"connection": "upgrade", "upgrade": "websocket"}
    assert (await live.send("/sleep", live.engines[0].address, headers=socket)).status == 404
    assert sum(engine.hits for engine in live.engines) == 0
    assert not any(picker.seen for picker in live.pickers)
    assert (await live.send("/v1/embeddings", live.engines[0].address)).status == 200


@pytest.mark.e2e
async def test_closed_mode_says_404_too_and_all_paths_pass_when_configured() -> None:
    async with rig(engines=1, pickers=1, failure_mode=FailureMode.CLOSED) as closed:
        assert (await closed.send("/metrics", closed.engines[0].address)).status == 404
    async with rig(engines=1, pickers=1, are_all_paths_public=True) as everything:
        assert (await everything.send("/metrics", everything.engines[0].address)).status == 200
