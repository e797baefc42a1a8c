import re
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

from shoal.cli.docs import plugins_page
from shoal.kernel import Chance, ConfigError
from shoal.pool import Decision
from shoal.routing.catalog import FAMILIES, installed
from shoal.routing.config import load
from shoal.scheduling import Registry, Scheduler
from shoal.scheduling.registry import NOT_YET
from shoal.scheduling.schema import camel, parameters
from tests.scheduling.script import request, view

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs/howto-scorer.md"
ALL = [cls for family in FAMILIES.values() for cls in family]


def block(language: str) -> str:
    (found,) = re.findall(rf"```{language}\n(.*?)```", PAGE.read_text(), re.DOTALL)
    return str(found)


@pytest.fixture
def followed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What the page says, done: the module and the entry point of an installed package."""
    (tmp_path / "my_scorers.py").write_text(block("python"))
    project = tomllib.loads(block("toml"))["project"]
    info = tmp_path / f"{project['name'].replace('-', '_')}-{project['version']}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: {project['version']}\n")
    lines = [
        f"[{group}]\n" + "".join(f"{name} = {at}\n" for name, at in points.items())
        for group, points in project["entry-points"].items()
    ]
    (info / "entry_points.txt").write_text("".join(lines))
    monkeypatch.syspath_prepend(str(tmp_path))
    installed.cache_clear()
    yield
    installed.cache_clear()
    sys.modules.pop("my_scorers", None)


@pytest.mark.usefixtures("followed")
def test_a_scorer_of_ones_own_works_as_the_page_says() -> None:
    config = load(block("yaml"), "zone.yaml")
    assert config.request_headers == ("x-zone",)
    made = Scheduler(config.policy, Chance(1))
    labels = [{"topology.kubernetes.io/zone": zone} for zone in ("a", "b", "b")]
    seen = view(labels=labels, kv_usage=[0.1, 0.2, float("nan")], inflight_requests=[0, 0, 0])
    decision = made.schedule(request(headers={"x-zone": "b"}), seen, 0.0)
    assert isinstance(decision, Decision)
    assert [column.name for column in decision.scores] == ["expected-wait-scorer", "zone-scorer"]
    assert list(decision.scores[1].values) == pytest.approx([0.57, 0.94, 0.94])
    assert decision.chosen[0] in ("e1", "e2")


@pytest.mark.usefixtures("followed")
def test_its_parameters_are_checked_and_documented_like_ours() -> None:
    with pytest.raises(ConfigError, match=r"zone.yaml:7: plugins\[1\].parameters.distance: .*got 4"):
        load(block("yaml").replace("distance: 0.4", "distance: 4").replace("# zone.yaml\n", ""), "zone.yaml")
    page = plugins_page()
    assert "## From installed packages" in page
    assert "| `crowding` | number | `0.3` | what a full cache costs, 0 to 1 |" in page


def test_an_entry_point_must_bear_the_name_of_its_class(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "wrongly_named.py").write_text("class Scorer:\n    type = 'one'\n")
    info = tmp_path / "wrongly_named-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: wrongly-named\nVersion: 1\n")
    (info / "entry_points.txt").write_text("[shoal.plugins]\ntwo = wrongly_named:Scorer\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    installed.cache_clear()
    try:
        with pytest.raises(ConfigError, match="must have type = 'two'"):
            installed()
    finally:
        installed.cache_clear()


def test_two_plugins_cannot_share_a_type() -> None:
    class Other:
        type = "queue-scorer"

    with pytest.raises(ConfigError, match="two plugins have the type queue-scorer"):
        Registry([*ALL, Other])


def test_every_plugin_documents_itself_and_each_of_its_parameters() -> None:
    for cls in ALL:
        assert cls.__doc__, cls
        for parameter in parameters(cls):
            assert parameter.doc, f"{cls.type}.{parameter.key}"


def test_no_name_is_both_there_and_not_yet() -> None:
    assert not {cls.type for cls in ALL} & set(NOT_YET)
    assert list(NOT_YET) == sorted(set(NOT_YET))


def test_file_names_of_parameters_are_those_of_llm_d() -> None:
    assert camel("max_num_of_endpoints") == "maxNumOfEndpoints"
    keys = {parameter.key for cls in ALL for parameter in parameters(cls)}
    assert {
        "maxTTFTPenaltyMs",
        "lruCapacityPerServer",
        "inFlightLoadProducerName",
        "prefixMatchInfoProducerName",
        "encodedEndpointHeaderConfig",
        "queueThresholdTokens",
        "fallbackOnEmpty",
        "insecureSkipVerify",
        "caCertPath",
    } <= keys


def test_the_reference_page_is_current() -> None:
    assert (ROOT / "docs/plugins.md").read_text() == plugins_page()
