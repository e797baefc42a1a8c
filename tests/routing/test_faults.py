"""All that is wrong with a configuration is said at once, and nothing that is only a consequence."""

from pathlib import Path

import pytest

from shoal.kernel import ConfigError
from shoal.routing.config import load
from shoal.routing.faults import faults

FOLDER = Path(__file__).parents[2] / "examples/config"
SAMPLES = sorted(path for path in FOLDER.glob("*.yaml") if path.name != "endpoints.yaml")
BAD = """\
apiVersion: llm-d.ai/v1alpha1
kind: EndpointPickerConfig
plugins:
- type: queue-scorr
- type: prefix-cache-scorer
  parameters:
    foo: 1
- name: nameless
- type: kv-cache-utilization-scorer
  weigth: 3
schedulingProfiles:
- name: default
  plugins:
  - pluginRef: nope
  - pluginRef: queue-scorr
  - pluginRef: prefix-cache-scorer
    weight: heavy
  - pluginRef: nameless
featureGates: [bogus, flowControl=maybe]
---
apiVersion: shoal.dev/v1alpha1
kind: Pool
listen: {prt: 8080, port: 70000}
usage: nothing
limits:
  max_body_bytes: -1
  request_timeout_s: soon
backends:
- {url: ftp://10.0.0.1}
- {name: x}
---
apiVersion: v1
kind: Pod
"""


def test_every_error_is_named_with_its_own_line_and_path() -> None:
    assert [(error.line, error.path) for error in faults(BAD, "pool.yaml")] == [
        (4, "plugins[0].type"),
        (7, "plugins[1].parameters.foo"),
        (8, "plugins[2]"),
        (10, "plugins[3].weigth"),
        (14, "schedulingProfiles[0].plugins[0].pluginRef"),
        (17, "schedulingProfiles[0].plugins[2].weight"),
        (19, "featureGates[0]"),
        (19, "featureGates[1]"),
        (23, "listen.prt"),
        (23, "listen.port"),
        (24, "usage"),
        (26, "limits.max_body_bytes"),
        (27, "limits.request_timeout_s"),
        (29, "backends[0].url"),
        (30, "backends[1]"),
        (33, "kind"),
    ]


@pytest.mark.parametrize("path", SAMPLES, ids=lambda path: path.name)
def test_a_good_file_has_none(path: Path) -> None:
    assert faults(path.read_text(), path.name) == []


@pytest.mark.parametrize("text", ["a: [", "- a", "kind: Pool", "x: &a [*a]", "kind: Pool\nkind: Pool"])
def test_the_only_error_of_a_file_is_the_one_that_ends_a_start(text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load(text, "pool.yaml")
    assert [str(error) for error in faults(text, "pool.yaml")] == [str(caught.value)]


def test_an_error_that_cannot_be_cut_out_ends_the_search() -> None:
    text = "apiVersion: shoal.dev/v1alpha1\nkind: Pool\naliases: {a.b: [1]}\nusage: nothing\n"
    assert [error.path for error in faults(text, "pool.yaml")] == ["aliases.a.b"]
