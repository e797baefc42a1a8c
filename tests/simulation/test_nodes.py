"""Engines as nodes: what their metrics say follows what they do."""

import pytest

from shoal.engine import PROFILES, EngineConfig, Submitted
from shoal.simulation import NodeConfig
from shoal.simulation.loop import Loop
from shoal.simulation.nodes import Node


@pytest.mark.parametrize("is_aggregate", [False, True])
def test_an_engine_at_rest_says_the_same_until_it_has_worked(is_aggregate: bool) -> None:
    loop = Loop()
    config = NodeConfig(id="a", engine=EngineConfig(profile=PROFILES["h100-8b"]), is_aggregate=is_aggregate)
    node = Node(0, config, loop, lambda node, ended: None, lambda node, changes: None)
    fresh = node.signals()
    assert node.signals() is fresh
    for number in (1, 2):
        node.feed(Submitted(request_id=f"r{number}", prompt_tokens=640, output_tokens=20))
        busy = node.signals()
        assert (busy.running or 0) + (busy.waiting or 0) == 1
        assert busy.prefix_query_tokens == 640 * (number - 1)
        loop.run(lambda: False)
        rest = node.signals()
        assert (rest.running, rest.waiting, rest.kv_usage_ratio, rest.prefix_query_tokens) == (0, 0, 0, 640 * number)
        assert node.signals() is rest
    node.restart()
    assert node.signals() == fresh
