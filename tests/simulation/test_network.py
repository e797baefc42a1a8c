"""The network between pickers and engines: what its jitter is said to be is what requests meet."""

import numpy as np
import pytest

from shoal.kernel import ConfigError
from shoal.simulation import read_experiment
from shoal.simulation.network import MAX_QUANTILES, Network

HOT = "workload: {shape: hot}\n"


def delays(jitter_s: tuple[float, ...], count: int = 4_000, seed: int = 1) -> list[float]:
    network = Network(0.5, jitter_s, np.random.default_rng(seed))
    return [network.delay_s() for _ in range(count)]


def test_without_jitter_every_request_is_as_long_on_its_way() -> None:
    assert set(delays(())) == {0.5}


def test_delays_have_the_quantiles_that_were_given() -> None:
    drawn = delays((0.0, 0.01, 0.02, 0.03, 1.03))
    assert min(drawn) >= 0.5
    assert max(drawn) <= 1.53
    found = np.quantile(drawn, [0.25, 0.5, 0.75, 0.875]) - 0.5
    assert found.tolist() == pytest.approx([0.01, 0.02, 0.03, 0.53], abs=0.05)
    assert np.mean(np.array(drawn) <= 0.53) == pytest.approx(0.75, abs=0.03)


def test_the_same_seed_draws_the_same() -> None:
    assert delays((0.0, 1.0)) == delays((0.0, 1.0))
    assert delays((0.0, 1.0)) != delays((0.0, 1.0), seed=2)


@pytest.mark.parametrize(
    ("jitter_s", "what"),
    [("[0.1]", "1 quantiles"), (str([0.0] * (MAX_QUANTILES + 1)), "1001 quantiles"), ("[0.2, 0.1]", "ascend"),
     ("[-0.1, 0.1]", "`float` >= 0")],
)  # fmt: skip
def test_what_is_no_table_of_quantiles_is_refused(jitter_s: str, what: str) -> None:
    with pytest.raises(ConfigError, match=what):
        read_experiment(HOT + f"delays: {{jitter_s: {jitter_s}}}\n", "test")
