"""The files in examples/policies in a real pool, each taken over from the one before by a reload."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from shoal.routing.config import load
from tests.hosts.supervisor.pool_rig import body, until
from tests.scenarios.pools import HEAD, ScenarioPool, pool

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]

FILES = {path.stem: path.read_text() for path in sorted((Path(__file__).parents[2] / "examples/policies").glob("*"))}


@pytest.fixture(scope="module")
def front(plane: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ScenarioPool]:
    """A pool of three engines."""
    with pool(plane, tmp_path_factory.mktemp("policies"), ["--engines", "3"], "aliases: {}\n") as running:
        yield running


@pytest.mark.parametrize("policy", FILES)
def test_a_policy_serves_live_and_explains_itself(front: ScenarioPool, policy: str) -> None:
    accepted = front.said().count("configuration accepted")
    front.config.write_text(f"{HEAD}---\n{FILES[policy]}")
    until(lambda: front.said().count("configuration accepted") > accepted, why=front.said)
    for turn in range(4):
        name = f"{policy}-{turn}"
        asked = body(f"Shared by all of them. {policy} " * 40 + str(turn), 4)
        assert front.post(asked, {"x-request-id": name, "x-session-id": f"s{turn % 2}"}).status_code == 200
    profile = load(FILES[policy], "").policy.profile
    found = front.explained(f"{policy}-3")
    assert set(found["weights"]) == {scorer.name for scorer in profile.scorers}
    assert found["served"] == found["chosen"][0]
    front.idle()
