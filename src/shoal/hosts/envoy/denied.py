"""Paths of engines that are for operators and not for clients: the public port answers them with 404.

Owns the list and how it is matched.  Engines see a path decoded and may serve it below a prefix, so an encoded
letter and a prefix must not get around the list.
"""

from shoal.hosts.envoy.filters import EXT_PROC, GUARD
from shoal.hosts.envoy.settings import EnvoySettings, FailureMode
from shoal.hosts.envoy.typed import Document, typed

_COMMON = (
    # vLLM serves its metrics on every path that begins so.
    "metrics.*",
    *("server_info", "get_server_info", "load", "get_load", "v1/loads", "abort_requests?"),
    *("(start|stop)_profile", "(v1/)?(un)?load_lora_adapter(_from_tensors)?", "collective_rpc"),
    *("[a-z_]*update_weights?(_[a-z]+)*", "[a-z]+(_[a-z]+)?_weight_update", "weights?_(info|checker)"),
    *("[a-z]+_weight_transfer_engine", "[a-z]+_weights_[a-z_]*group[a-z_]*", "send_weights_to_remote_instance"),
)
_VLLM = (
    *("sleep", "wake_up", "is_sleeping", "pause", "resume", "is_paused", "reset_(prefix|mm|encoder)_cache"),
    *("release_kv_cache_memory", "kv_event_sources", "get_world_size", "(is_scaling|scale)_elastic_ep"),
    *("fault_tolerance/[a-z]+",),
)
_SGLANG = (
    *("flush_cache", "(release|resume)_memory_occupation", "(pause|continue)_generation", "slow_down", "freeze_gc"),
    *(
        "get_(weights|parameter)_by_name|get_weight_version",
        "(set|get)_internal_state",
        "configure_logging",
        "set_trace_level",
    ),
    *("(start|stop|dump)_expert_distribution_record", "pd_role_switch", "[a-z_]*hicache[a-z_-]*", "dumper/[a-z]+"),
    "get_weight_version",
)
_TENSORRT = ("perf_metrics", "kv_cache_events", "steady_clock_offset", "cluster_info", "(release|resume)_memory")
_SHOAL = ("faults", "requests")
_SLASH = "(/|%2[fF])"
# No client encodes a letter, a digit or `_`, and engines take it for the character itself.
_ENCODED = ".*%([46][1-9a-fA-F]|[57][0-9aA]|5[fF]|3[0-9]).*"


def _pattern() -> str:
    names = "|".join(name.replace("/", _SLASH) for name in (*_COMMON, *_VLLM, *_SGLANG, *_TENSORRT, *_SHOAL))
    return f"(/.*)?{_SLASH}({names}){_SLASH}?|{_ENCODED}"


DENIED = _pattern()
"""A path, without its query, that matches this whole is not public."""


def denied_routes(settings: EnvoySettings) -> list[Document]:
    """Return the route that answers operators' paths, none when all paths are public."""
    if settings.are_all_paths_public:
        return []
    # Without the picker and the guard: there is nothing to place.
    off = [EXT_PROC, *([GUARD] if settings.failure_mode is FailureMode.CLOSED else [])]
    return [
        {
            "name": "denied",
            "match": {"safe_regex": {"regex": DENIED}},
            "direct_response": {"status": 404},
            "typed_per_filter_config": {name: typed("config.route.v3.FilterConfig", disabled=True) for name in off},
        }
    ]
