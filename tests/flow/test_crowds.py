"""Laws of flow control over whole pools in virtual time; the figures that are promised are `bench.bars.flow`'s."""

from bench.crowds import Tenant, run, tokens_between
from shoal.simulation.cluster import Cluster

POOL = "apiVersion: shoal.dev/v1alpha1\nkind: Pool\nflow: {enabled: true, trust_headers: true}\n"
TWO_BANDS = POOL + "tenants: {chat: {priority: 10}, batch: {priority: -10}}\n"


def crowd(tenants: list[Tenant], duration_s: float, config: str) -> Cluster:
    return run(tenants, duration_s, config=config, engines=2, profile="tiny", step_tokens=512)


def shares(cluster: Cluster, begin_s: float, end_s: float) -> dict[str, float]:
    tokens = tokens_between(cluster.samples, begin_s, end_s)
    return {name: value / sum(tokens.values()) for name, value in tokens.items()}


def test_ten_times_the_requests_are_not_ten_times_the_tokens() -> None:
    tenants = [Tenant("loud", 70, 300, 50), Tenant("quiet", 25, 300, 50)]
    seen = shares(crowd(tenants, 20.0, POOL), 8.0, 20.0)
    assert abs(seen["quiet"] - 0.5) < 0.06


def test_weights_divide_the_tokens() -> None:
    config = POOL + "tenants: {gold: {weight: 3}, plain: {weight: 1}}\n"
    tenants = [Tenant("gold", 60, 300, 50), Tenant("plain", 60, 300, 50)]
    seen = shares(crowd(tenants, 20.0, config), 8.0, 20.0)
    assert abs(seen["gold"] - 0.75) < 0.06


def test_a_flood_of_the_high_band_leaves_the_low_one_its_share_and_no_more() -> None:
    tenants = [Tenant("chat", 90, 300, 50), Tenant("batch", 60, 300, 50)]
    seen = shares(crowd(tenants, 20.0, TWO_BANDS), 8.0, 20.0)
    assert 0.08 < seen["batch"] < 0.14


def test_strict_bands_leave_it_nothing() -> None:
    strict = TWO_BANDS.replace("enabled: true", "enabled: true, bands: strict")
    tenants = [Tenant("chat", 90, 300, 50), Tenant("batch", 60, 300, 50)]
    assert shares(crowd(tenants, 20.0, strict), 8.0, 20.0).get("batch", 0.0) < 0.02


def test_one_urgent_request_passes_two_hundred() -> None:
    tenants = [Tenant("batch", 0, 300, 50, burst=200), Tenant("chat", 0, 300, 50, begins_s=0.05, burst=1)]
    samples = crowd(tenants, 1.0, TWO_BANDS).samples
    (urgent,) = [each for each in samples if each.tenant == "chat"]
    services = sorted(each.duration_s - each.ttft_s for each in samples)
    assert len(samples) == 201
    assert urgent.ttft_s < services[len(services) // 2]
    assert all(not each.is_failed for each in samples)
