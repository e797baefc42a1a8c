import contextlib
import re
from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from shoal.kernel import ConfigError
from shoal.routing.config import RouterConfig, effective, load
from shoal.scheduling import registry
from shoal.scheduling.cache_scorers import ContextLengthAware
from shoal.scheduling.expected_wait import ExpectedWaitScorer
from shoal.scheduling.pickers import MaxScorePicker, RandomPicker

ROOT = Path(__file__).parents[2]
SAMPLES = sorted(path for path in (ROOT / "examples/config").glob("*.yaml") if path.name != "endpoints.yaml")
NOT_YET = sorted((ROOT / "examples/config/not-yet").glob("*.yaml"))
LLM_D = "apiVersion: llm-d.ai/v1alpha1\nkind: EndpointPickerConfig\n"
POOL = "apiVersion: shoal.dev/v1alpha1\nkind: Pool\n"


def parts(config: RouterConfig) -> list[str]:
    return [named.name for named in config.policy.profile.plugins()]


def failure(text: str) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        load(text, "pool.yaml")
    return caught.value


# ------------------------------------------------------------------ what loads


@pytest.mark.parametrize("path", SAMPLES, ids=lambda path: path.name)
def test_every_sample_loads(path: Path) -> None:
    assert all(": has no effect: " in warning for warning in load(path.read_text(), path.name).warnings)


@pytest.mark.parametrize("path", NOT_YET, ids=lambda path: path.name)
def test_a_sample_beyond_this_version_fails_naming_the_part_and_the_page(path: Path) -> None:
    error = failure(path.read_text())
    assert error.message.endswith("see docs/config.md#not-yet")
    assert error.line > 1
    assert any(name in error.message for name in (*registry.NOT_YET, "token-producer"))


def test_no_configuration_means_our_default_profile() -> None:
    config = load("", "default")
    assert parts(config) == ["expected-wait-scorer", "max-score-picker"]
    assert isinstance(config.policy.profile.scorers[0].plugin, ExpectedWaitScorer)
    assert config.policy.fallbacks == 2
    assert effective(load((ROOT / "examples/config/default.yaml").read_text(), "")) != ""


def test_the_older_api_version_is_read_too() -> None:
    text = LLM_D.replace("llm-d.ai", "inference.networking.x-k8s.io") + "plugins:\n- type: queue-scorer\n"
    assert parts(load(text, "")) == ["queue-scorer", "max-score-picker"]


def test_without_profiles_all_plugins_form_one_in_file_order() -> None:
    text = (
        LLM_D
        + "plugins:\n"
        + "".join(f"- type: {name}\n" for name in ("queue-scorer", "prefill-filter", "random-picker", "decode-filter"))
    )
    profile = load(text, "").policy.profile
    assert profile.name == "default"
    assert [named.name for named in profile.filters] == ["prefill-filter", "decode-filter"]
    assert [named.name for named in profile.scorers] == ["queue-scorer"]
    assert isinstance(profile.picker.plugin, RandomPicker)


def test_a_profile_without_a_picker_takes_a_configured_one_or_the_best_score() -> None:
    profile = "schedulingProfiles:\n- name: p\n  plugins:\n  - pluginRef: queue-scorer\n"
    configured = load(LLM_D + "plugins:\n- type: random-picker\n- type: queue-scorer\n" + profile, "")
    assert isinstance(configured.policy.profile.picker.plugin, RandomPicker)
    added = load(LLM_D + "plugins:\n- type: queue-scorer\n" + profile, "")
    assert isinstance(added.policy.profile.picker.plugin, MaxScorePicker)
    assert "single-profile-handler" in [plugin.name for plugin in added.plugins]


def test_one_plugin_may_take_two_slots() -> None:
    text = LLM_D + "plugins:\n- type: context-length-aware\n  parameters: {enableFiltering: true}\n"
    profile = load(text, "").policy.profile
    assert isinstance(profile.filters[0].plugin, ContextLengthAware)
    assert profile.filters[0].plugin is profile.scorers[0].plugin


def test_weights_and_names_are_taken() -> None:
    config = load((ROOT / "examples/config/llm-d-default.yaml").read_text(), "")
    assert [(named.name, named.weight) for named in config.policy.profile.scorers] == [
        ("queue-scorer", 2.0),
        ("kv-cache-utilization-scorer", 2.0),
        ("prefix-cache-scorer", 3.0),
    ]


def test_producers_set_the_parameters_of_the_rooms() -> None:
    config = load((ROOT / "examples/config/estimated-prefix.yaml").read_text(), "")
    assert config.prefix.max_prefix_tokens_to_match == 16_384
    assert config.prefix.block_size_tokens == 16
    assert config.inflight.output_ratio == 1.5
    layered = load((ROOT / "examples/config/data-layer.yaml").read_text(), "")
    assert layered.inflight.add_estimated_output_tokens
    assert layered.discovery is not None
    assert layered.discovery.path == "endpoints.yaml"


def test_plugins_say_which_headers_they_read() -> None:
    config = load((ROOT / "examples/config/sessions.yaml").read_text(), "")
    assert config.request_headers == ("cookie:sid", "x-session-id")


def test_pool_settings_are_taken_with_their_units() -> None:
    config = load(POOL + "limits:\n  max_body_bytes: 32Mi\nretries: {fallbacks: 0}\naliases: {a: b}\n", "")
    assert config.pool.limits.max_body_bytes == 32 * 1024 * 1024
    assert config.pool.limits.max_connections == 50_000
    assert config.policy.fallbacks == 0
    assert config.pool.aliases == {"a": "b"}
    assert "limits.max_body_bytes" in config.stated
    assert "listen.port" not in config.stated


def test_rewrites_prefer_the_exact_name_the_older_object_and_the_first_rule() -> None:
    def rewrite(name: str, created: str, rules: str) -> str:
        return (
            f"---\napiVersion: llm-d.ai/v1alpha2\nkind: InferenceModelRewrite\n"
            f"metadata: {{name: {name}, creationTimestamp: {created!r}}}\nspec: {{rules: {rules}}}\n"
        )

    exact = "[{matches: [{model: {value: m}}], targets: [{modelRewrite: %s}]}, {targets: [{modelRewrite: any-%s}]}]"
    text = rewrite("new", "2026-02-01T00:00:00Z", exact % ("new", "new"))
    text += rewrite("old", "2026-01-01T00:00:00Z", exact % ("old", "old"))
    rewrites = load(text, "").rewrites
    assert [target.model for target in rewrites["m"]] == ["old"]
    assert [target.model for target in rewrites[""]] == ["any-old"]


def test_objectives_name_priorities() -> None:
    text = "apiVersion: llm-d.ai/v1alpha2\nkind: InferenceObjective\nmetadata: {name: batch}\nspec: {priority: -1}\n"
    assert load(text, "").objectives == {"batch": -1}


def test_flow_control_is_checked_and_without_effect_while_its_gate_is_off() -> None:
    flow = (
        "flowControl:\n  maxBytes: 8Gi\n  defaultRequestTTL: 1m30s\n  priorityBands: [{priority: 1, maxRequests: 1k}]\n"
    )
    load(LLM_D + "featureGates: [flowControl=false]\n" + flow, "")
    assert failure(LLM_D + flow.replace("1m30s", "soon")).path == "flowControl.defaultRequestTTL"
    assert failure(LLM_D + flow.replace("1k", "some")).path == "flowControl.priorityBands[0].maxRequests"


# ------------------------------------------------------------------ what only warns


def test_old_names_work_with_a_warning() -> None:
    text = LLM_D + "plugins:\n- type: by-label-selector\n  parameters: {matchLabels: {a: b}}\n- type: tokenizer\n"
    config = load(text, "pool.yaml")
    assert [plugin.type for plugin in config.plugins[:2]] == ["label-selector-filter", "token-producer"]
    assert "pool.yaml:4: plugins[0].type: by-label-selector is deprecated: use label-selector-filter" in config.warnings
    assert len(config.warnings) == 2


def test_a_parameter_of_two_types_takes_both_and_nothing_else() -> None:
    text = (
        LLM_D + "plugins:\n- type: precise-prefix-cache-producer\n  parameters:\n    indexerConfig:\n"
        "      kvBlockIndexConfig: {metricsLoggingInterval: 60000000000}\n- type: random-picker\n"
    )
    for interval in ("60000000000", "1m0s"):
        (warning,) = load(text.replace("60000000000", interval), "").warnings
        assert "metricsLoggingInterval: has no effect" in warning
    assert "must be a string, got a list" in str(failure(text.replace("60000000000", "[1]")))


def test_parameters_without_effect_warn() -> None:
    text = LLM_D + "plugins:\n- type: active-request-scorer\n  parameters:\n    requestTimeout: 2m\n"
    (warning,) = load(text, "pool.yaml").warnings
    assert warning.startswith("pool.yaml:6: plugins[0].parameters.requestTimeout: has no effect")


WITHOUT_EFFECT = {
    "approx-prefix-cache-producer": {
        "autoTune": "false",
        "blockSizeTokens": "16",
        "blockSize": "64",
        "lruCapacityPerServer": "31250",
        "maxPrefixBlocksToMatch": "256",
    },
    "inflight-load-producer": {"outputRatio": "2", "maxEstimatedOutputTokens": "100"},
    "metrics-data-source": {"scheme": "http", "path": "/stats", "port": "9400", "caCertPath": "x", "interval": "1s"},
    "models-data-source": {"scheme": "https", "path": "/models", "caCertPath": "x", "insecureSkipVerify": "true"},
    "core-metrics-extractor": {"engineLabelKey": "engine", "defaultEngine": "sglang"},
    "session-affinity-scorer": {"profileName": "decode"},
}


@pytest.mark.parametrize(
    ("plugin", "key", "value"), [(plugin, *each) for plugin, given in WITHOUT_EFFECT.items() for each in given.items()]
)
def test_a_field_of_llm_d_that_shoal_does_not_use_warns_with_its_line(plugin: str, key: str, value: str) -> None:
    text = LLM_D + f"plugins:\n- type: {plugin}\n  parameters:\n    {key}: {value}\n"
    (warning,) = load(text, "pool.yaml").warnings
    assert warning.startswith(f"pool.yaml:6: plugins[0].parameters.{key}: has no effect: ")


@pytest.mark.parametrize(
    "given",
    [
        "{type: file-discovery, parameters: {path: x, watchFile: true}}",
        "{type: approx-prefix-cache-producer, parameters: {autoTune: true, maxPrefixTokensToMatch: 4096}}",
        "{type: metrics-data-source, parameters: {path: /metrics}}",
        "{type: core-metrics-extractor, parameters: {defaultEngine: vllm}}",
    ],
)
def test_a_field_that_asks_for_what_shoal_does_anyhow_does_not_warn(given: str) -> None:
    assert load(LLM_D + f"plugins:\n- {given}\n", "pool.yaml").warnings == ()


def test_priorities_and_queues_warn_while_flow_control_is_off() -> None:
    objective = "apiVersion: llm-d.ai/v1alpha2\nkind: InferenceObjective\nmetadata: {name: a}\n"
    assert any("kind: has no effect" in line for line in load(objective, "pool.yaml").warnings)
    for field in (
        "flowControl: {maxBytes: 1Gi}",
        "saturationDetector: {}",
        "featureGates: [haPopulateNonLeaderDatastore]",
    ):
        (warning,) = load(LLM_D + field + "\n", "pool.yaml").warnings
        assert "pool.yaml:3: " in warning
        assert ": has no effect: " in warning


def test_an_objective_that_no_client_may_name_warns() -> None:
    objective = "apiVersion: llm-d.ai/v1alpha2\nkind: InferenceObjective\nmetadata: {name: a}\n"
    on = "---\n" + POOL + "flow: {enabled: true"
    (warning,) = load(objective + on + "}\n", "pool.yaml").warnings
    assert "no InferenceObjective raises a priority" in warning
    assert load(objective + on + ", trust_headers: true}\n", "pool.yaml").warnings == ()


def test_tenants_that_no_request_can_belong_to_warn() -> None:
    tenants = POOL + "tenants: {gold: {priority: 5}, '*': {requests_per_s: 9}}\n"
    for settings in ("", "flow: {enabled: true}\n"):
        (warning,) = load(tenants + settings, "pool.yaml").warnings
        assert "no request belongs to gold: " in warning
    for settings in ("flow: {trust_headers: true}\n", "auth: {keys_file: keys}\n"):
        assert load(tenants + settings, "pool.yaml").warnings == ()
    assert load(POOL + "tenants: {'*': {requests_per_s: 9}}\n", "pool.yaml").warnings == ()


def test_a_weight_on_a_filter_warns() -> None:
    text = LLM_D + (
        "plugins:\n- type: decode-filter\nschedulingProfiles:\n- name: p\n  plugins:\n"
        "  - {pluginRef: decode-filter, weight: 3}\n"
    )
    (warning,) = load(text, "pool.yaml").warnings
    assert "decode-filter is no scorer" in warning


# ------------------------------------------------------------------ what fails


@pytest.mark.parametrize(
    ("text", "line", "path", "says"),
    [
        (LLM_D + "plugins:\n- type: queue-scorr\n", 4, "plugins[0].type", "did you mean queue-scorer"),
        (LLM_D + "plugins:\n- type: dcgm-extractor\n", 4, "plugins[0].type", "dcgm-extractor of llm-d is not in this"),
        (LLM_D + "plugins:\n- name: x\n", 4, "plugins[0]", "type is missing"),
        (LLM_D + "plugin: []\n", 3, "plugin", "did you mean plugins"),
        (LLM_D + "plugins: {}\n", 3, "plugins", "must be a list, got a mapping"),
        (
            LLM_D + "plugins:\n- type: load-aware-scorer\n  parameters:\n    treshold: 4\n",
            6,
            "plugins[0].parameters.treshold",
            "did you mean threshold",
        ),
        (
            LLM_D + "plugins:\n- type: load-aware-scorer\n  parameters:\n\n    threshold: '4'\n",
            7,
            "plugins[0].parameters.threshold",
            "must be a whole number, got the string '4'",
        ),
        (
            LLM_D + "plugins:\n- type: load-aware-scorer\n  parameters: {threshold: true}\n",
            5,
            "plugins[0].parameters.threshold",
            "must be a whole number, got the boolean 'true'",
        ),
        (
            LLM_D + "plugins:\n- type: max-score-picker\n  parameters:\n    maxNumOfEndpoints: 0\n",
            6,
            "plugins[0].parameters.maxNumOfEndpoints",
            "must be at least 1",
        ),
        (
            LLM_D + "plugins:\n- type: utilization-filter\n  parameters:\n    conditions:\n    - metric: gpu\n",
            7,
            "plugins[0].parameters.conditions[0].metric",
            "must be one of active-requests",
        ),
        (
            LLM_D
            + "plugins:\n- type: utilization-filter\n  parameters:\n    conditions:\n    - metric: waiting-queue\n",
            7,
            "plugins[0].parameters.conditions[0]",
            "maxValue is missing",
        ),
        (
            LLM_D + "plugins:\n- type: prefix-cache-scorer\n  parameters: {prefixMatchInfoProducerName: kv}\n",
            5,
            "plugins[0].parameters.prefixMatchInfoProducerName",
            "no plugin is named 'kv'",
        ),
        (
            LLM_D + "plugins:\n- type: queue-scorer\n- type: prefix-cache-scorer\n"
            "  parameters: {prefixMatchInfoProducerName: queue-scorer}\n",
            6,
            "plugins[1].parameters.prefixMatchInfoProducerName",
            "must name a plugin of type approx-prefix-cache-producer",
        ),
        (LLM_D + "plugins:\n- type: queue-scorer\n  type: x\n", 5, "plugins[0].type", "duplicate key, first in line 4"),
        (LLM_D + "plugins:\n- type: queue-scorer\n- type: queue-scorer\n", 5, "plugins[1].type", "already named"),
        (LLM_D + "featureGates: [warp]\n", 3, "featureGates[0]", "unknown gate warp"),
        (LLM_D + "featureGates:\n- flowControl=maybe\n", 4, "featureGates[0]", "must be flowControl"),
        (
            LLM_D + "schedulingProfiles:\n- name: p\n  plugins:\n  - pluginRef: queue-scorer\n",
            6,
            "schedulingProfiles[0].plugins[0].pluginRef",
            "no plugin is named 'queue-scorer'",
        ),
        (
            LLM_D + "schedulingProfiles:\n- name: p\n- name: q\n",
            5,
            "schedulingProfiles[1]",
            "several profiles need a profile handler",
        ),
        (
            LLM_D + "plugins:\n- type: queue-scorer\nschedulingProfiles:\n- name: p\n  plugins:\n"
            "  - {pluginRef: queue-scorer, weight: -1}\n",
            8,
            "schedulingProfiles[0].plugins[0].weight",
            "must be 0 or more",
        ),
        (
            LLM_D + "plugins:\n- type: random-picker\n- type: max-score-picker\n",
            0,
            "schedulingProfiles[0].plugins[1].pluginRef",
            "a profile has one picker, random-picker is one already",
        ),
        (
            LLM_D + "dataLayer:\n  peerDiscovery: {pluginRef: x}\n",
            4,
            "dataLayer.peerDiscovery",
            "docs/sharing.md",
        ),
        (LLM_D + "---\n" + LLM_D, 5, "kind", "stands twice"),
        ("kind: Deployment\napiVersion: apps/v1\n", 1, "kind", "must be one of EndpointPickerConfig"),
        ("kind: Pool\napiVersion: v1\n", 2, "apiVersion", "of Pool must be shoal.dev/v1alpha1"),
        ("- a\n", 1, "", "a document must be a mapping"),
        ("\n\na: [\n", 0, "", "is not YAML"),
        ("a: &x [*x]\n", 0, "", ""),
        (LLM_D + "<<: {a: 1}\n", 3, "", "merge keys"),
        (POOL + "listen: {port: 70000}\n", 3, "listen.port", "must be 0 to 65535"),
        (POOL + "limits:\n  max_body_bytes: lots\n", 4, "limits.max_body_bytes", "such as 64Mi"),
        (POOL + "backends:\n- url: ftp://x\n", 4, "backends[0].url", "must begin with http://"),
        (POOL + "usage: sometimes\n", 3, "usage", "must be one of observe, inject"),
        (POOL + "tls: {cert: a.pem}\n", 3, "tls", "key is missing"),
    ],
)
def test_an_error_says_where_and_what(text: str, line: int, path: str, says: str) -> None:
    error = failure(text)
    assert says in error.message
    assert error.source == "pool.yaml"
    if line:
        assert (error.line, error.path) == (line, path)


@given(st.text(max_size=200))
def test_any_text_loads_or_fails_as_a_config_error(text: str) -> None:
    with contextlib.suppress(ConfigError):
        load(text, "x")


# ------------------------------------------------------------------ the effective configuration


@pytest.mark.parametrize("path", [None, *SAMPLES], ids=lambda path: path.name if path else "default")
def test_the_effective_configuration_reads_back_to_itself(path: Path | None) -> None:
    shown = effective(load(path.read_text() if path else "", "x"))
    again = load(shown, "effective")
    assert all("kind: has no effect: an InferenceObjective" in warning for warning in again.warnings)
    assert effective(again) == shown


def test_the_effective_configuration_shows_every_default() -> None:
    picker, pool = yaml.safe_load_all(effective(load(LLM_D + "plugins:\n- type: load-aware-scorer\n", "x")))
    assert picker["plugins"][0] == {"type": "load-aware-scorer", "parameters": {"threshold": 128}}
    assert picker["schedulingProfiles"][0]["plugins"][0] == {"pluginRef": "load-aware-scorer", "weight": 1.0}
    assert pool["ejection"] == {"failures": 3, "base_s": 5.0, "max_s": 60.0}
    assert pool["limits"]["max_body_bytes"] == 64 * 1024 * 1024


# ------------------------------------------------------------------ the documentation


def test_the_page_explains_every_plugin_that_is_not_in_this_version() -> None:
    page = (ROOT / "docs/config.md").read_text()
    section = page[page.index("## Not yet") :]
    missing = [name for name in registry.NOT_YET if f"`{name}`" not in section and not name.startswith("multicluster-")]
    assert missing == []
    assert "`multicluster-*`" in section


def test_the_example_on_the_page_loads() -> None:
    page = (ROOT / "docs/config.md").read_text()
    (example,) = re.findall(r"```yaml\n(.*?)```", page, re.DOTALL)
    assert parts(load(example, "docs/config.md")) == [
        "decode-filter",
        "prefix-cache-scorer",
        "queue-scorer",
        "max-score-picker",
    ]


def test_models_of_a_backend_are_asked_from_it_and_no_setting() -> None:
    error = failure(POOL + "backends:\n- {url: 'http://10.0.0.1:8000', models: [a]}\n")
    assert error.path == "backends[0].models"


@pytest.mark.parametrize("header", ["id", "content-length", "x-shoal-request-id", "a%b", "a)b"])
def test_a_response_header_that_a_gateway_cannot_take_is_refused_with_its_line(header: str) -> None:
    error = failure(
        LLM_D
        + "plugins:\n- type: session-affinity-scorer\n"
        + f"  parameters: {{encodedEndpointHeaderConfig: {{header: '{header}'}}}}\n"
    )
    assert (error.line, error.message) == (4, f"the response header {header!r} cannot be given by a plugin")


@pytest.mark.parametrize("figure", [".inf", "-.inf", ".nan", "1e308", "1" + "0" * 400])
def test_a_figure_that_nobody_can_reckon_with_is_refused_wherever_it_stands(figure: str) -> None:
    plugin = LLM_D + f"plugins:\n- type: expected-wait-scorer\n  parameters: {{ownWeight: {figure}}}\n"
    assert failure(plugin).path == "plugins[0].parameters.ownWeight"
    assert failure(POOL + f"drain_timeout_s: {figure}\n").path == "drain_timeout_s"
    assert failure(POOL + f"limits: {{max_body_bytes: {figure}}}\n").path == "limits.max_body_bytes"


@pytest.mark.parametrize("size", ["9" * 400 + "Ki", "9" * 30, "8Ei", "2Ti"])
def test_an_index_larger_than_any_memory_is_refused(size: str) -> None:
    assert failure(POOL + f"index: {{budget_bytes: {size}}}\n").path.startswith("index")


@pytest.mark.parametrize("odd", ["!!bool maybe", "!!int ''", "!!timestamp x"])
def test_a_value_that_cannot_be_read_is_named(odd: str) -> None:
    assert failure(LLM_D + f"plugins:\n- type: {odd}\n").path == "plugins[0].type"
    assert failure(f"apiVersion: shoal.dev/v1alpha1\nkind: [{odd}]\n").path == "kind"
