"""From configured plugins and profiles to the policy of the scheduler, by llm-d's rules.

Owns the making of plugins by name, the references between them, and what a profile gets when the file leaves
something out.
"""

import difflib
import math
import re
from collections.abc import Iterable, Mapping
from typing import Any, TypeVar

import msgspec

from shoal.kernel.marks import Duration
from shoal.routing.documents import Reader
from shoal.routing.pickerfile import PluginSpec, ProfileSpec, WeightedRef
from shoal.scheduling import Filter, Named, Picker, Policy, Profile, Registry, Scorer
from shoal.scheduling.expected_wait import ExpectedWaitScorer
from shoal.scheduling.handlers import SingleProfileHandler
from shoal.scheduling.pickers import MaxScorePicker
from shoal.scheduling.plugin import Admitter, Answering, Connected, Deprecated, Ignored, Listening, Ref
from shoal.scheduling.producers import PredictedLatencyProducer
from shoal.scheduling.schema import Parameter, fields, parameters

T = TypeVar("T")
DEFAULT_PROFILE = "default"
_HEADER = re.compile(r"[a-z0-9][a-z0-9._-]*")
# What frames an answer, and the names under which a picker tells the gateway other things.
_RESERVED = frozenset(
    (
        *("connection", "content-encoding", "content-length", "content-type", "date", "server", "transfer-encoding"),
        *("id", "picker", "refused"),
    )
)


class ConfiguredPlugin(msgspec.Struct, frozen=True, kw_only=True):
    """A plugin under its name.  parameters: each by its key in a file, defaults included."""

    name: str
    type: str
    parameters: dict[str, Any]
    plugin: Any

    def as_document(self) -> dict[str, Any]:
        """Return the entry of a file that makes the same plugin, without parameters that it is better without."""
        document: dict[str, Any] = {"type": self.type}
        if self.name != self.type:
            document["name"] = self.name
        values = stated(parameters(type(self.plugin)), self.parameters)
        return document | ({"parameters": values} if values else {})


def stated(known: Iterable[Parameter], given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values that a file is better with, in plain types: none that is outdated and at its default."""
    values: dict[str, Any] = {}
    for parameter in known:
        value = given[parameter.key]
        is_outdated = any(isinstance(mark, Deprecated | Ignored) for mark in parameter.marks)
        if value is None or (is_outdated and value == parameter.default):
            continue
        if isinstance(value, msgspec.Struct):
            inner = fields(type(value))
            values[parameter.key] = stated(inner, {each.key: getattr(value, each.name) for each in inner})
            continue
        plain = msgspec.to_builtins(value, enc_hook=dict)
        if any(isinstance(mark, Duration) for mark in parameter.marks):
            plain = f"{value:g}s"
        values[parameter.key] = float(plain) if parameter.type is float and not isinstance(plain, str) else plain
    return values


class Plugins:
    """The plugins of one file, by name, in file order."""

    def __init__(self, registry: Registry, reader: Reader) -> None:
        self._registry = registry
        self._reader = reader
        self._by_name: dict[str, ConfiguredPlugin] = {}
        self._paths: dict[str, str] = {}

    @property
    def configured(self) -> tuple[ConfiguredPlugin, ...]:
        """All of them, in order."""
        return tuple(self._by_name.values())

    def add(self, spec: PluginSpec, path: str) -> None:
        """Make the plugin of `spec`, which stands at `path`."""
        cls = self._registry.find(spec.type)
        if cls is None:
            raise self._reader.error(f"{path}.type", self._registry.complaint(spec.type))
        if better := self._registry.replacement(spec.type):
            self._reader.warn(f"{path}.type", f"{spec.type} is deprecated: use {better}")
        name = spec.name or spec.type
        if name in self._by_name:
            raise self._reader.error(f"{path}.{'name' if spec.name else 'type'}", f"a plugin is already named {name}")
        plugin, values = self._reader.plugin(spec.parameters, cls, f"{path}.parameters")  # type: ignore[arg-type]
        self._by_name[name] = ConfiguredPlugin(name=name, type=cls.type, parameters=values, plugin=plugin)
        self._paths[name] = path

    def add_default(self, cls: type[Any]) -> ConfiguredPlugin:
        """Add a plugin that the file leaves out, with its defaults, and return it."""
        plugin, values = self._reader.plugin(None, cls, "")
        name = cls.type if cls.type not in self._by_name else f"{cls.type}-default"
        added = self._by_name[name] = ConfiguredPlugin(name=name, type=cls.type, parameters=values, plugin=plugin)
        return added

    def get(self, name: str, path: str) -> ConfiguredPlugin:
        """Return the plugin that the reference at `path` names."""
        found = self._by_name.get(name)
        if found is None:
            near = difflib.get_close_matches(name, self._by_name, n=2)
            hint = f", did you mean {' or '.join(near)}?" if near else ": it must stand under plugins"
            raise self._reader.error(path, f"no plugin is named {name!r}{hint}")
        return found

    def find(self, name: str) -> ConfiguredPlugin | None:
        """Return the plugin of that name, None when there is none."""
        return self._by_name.get(name)

    def known(self, type_name: str) -> type[Any] | None:
        """Return the class of a type that a file may name."""
        return self._registry.find(type_name)

    def only(self, cls: type[T]) -> T | None:
        """Return the first plugin of `cls`, None without one."""
        return next((each.plugin for each in self._by_name.values() if isinstance(each.plugin, cls)), None)

    def predicted(self) -> PredictedLatencyProducer | None:
        """Return the producer of predictions; one is added where a plugin reads them."""
        found = self.only(PredictedLatencyProducer)
        if found is None and any(reads_predictions(each.plugin) for each in self.configured):
            found = self.add_default(PredictedLatencyProducer).plugin
        return found

    def connect(self) -> None:
        """Check the references between plugins, and tell those that want to know."""
        instances = {name: each.plugin for name, each in self._by_name.items()}
        for each in self.configured:
            for parameter in parameters(type(each.plugin)):
                for mark in parameter.marks:
                    if isinstance(mark, Ref):
                        self._check(each, parameter.key, mark)
            if isinstance(each.plugin, Connected):
                each.plugin.connect(instances)

    def _check(self, plugin: ConfiguredPlugin, key: str, mark: Ref) -> None:
        name = plugin.parameters[key]
        if not name or (name in mark.types and name not in self._by_name):
            return
        path = f"{self._paths[plugin.name]}.parameters.{key}"
        if (found := self.get(name, path)).type not in mark.types:
            wanted = " or ".join(mark.types)
            raise self._reader.error(path, f"must name a plugin of type {wanted}, {name} is a {found.type}")

    def request_headers(self) -> tuple[str, ...]:
        """Return the request headers that the plugins read, sorted."""
        listening = [each.plugin for each in self._by_name.values() if isinstance(each.plugin, Listening)]
        return tuple(sorted({header for plugin in listening for header in plugin.request_headers()}))

    def response_headers(self) -> tuple[str, ...]:
        """Return the response headers that the plugins may give, sorted, after checking that they can be given."""
        found: set[str] = set()
        for name, each in self._by_name.items():
            path = self._paths.get(name, "plugins")
            if not isinstance(each.plugin, Answering):
                if hasattr(each.plugin, "response_headers"):
                    raise self._reader.error(path, f"{each.type} gives response headers without response_header_names")
                continue
            for header in each.plugin.response_header_names():
                if not _HEADER.fullmatch(header) or header in _RESERVED or header.startswith("x-shoal-"):
                    raise self._reader.error(path, f"the response header {header[:80]!r} cannot be given by a plugin")
                found.add(header)
        return tuple(sorted(found))


def build_policy(specs: tuple[ProfileSpec, ...], plugins: Plugins, reader: Reader, fallbacks: int) -> Policy:
    """Return the policy of the profiles in `specs`; without any, one of all configured plugins in file order."""
    names = [spec.name for spec in specs]
    for at, name in enumerate(names):
        if name in names[:at]:
            raise reader.error(f"schedulingProfiles[{at}].name", f"a profile is already named {name}")
    handlers = [each for each in plugins.configured if isinstance(each.plugin, SingleProfileHandler)]
    if len(handlers) > 1:
        raise reader.error("plugins", f"one profile handler is allowed, got {' and '.join(h.name for h in handlers)}")
    if len(specs) > 1:
        raise reader.error(
            "schedulingProfiles[1]",
            "several profiles need a profile handler that is not in this version of Shoal: see docs/config.md#not-yet",
        )
    if not specs:
        specs = (_default_profile(plugins),)
    if not handlers:
        plugins.add_default(SingleProfileHandler)
    profile = _profile(specs[0], plugins, reader)
    admitters = [Named(each.name, each.plugin) for each in plugins.configured if isinstance(each.plugin, Admitter)]
    return Policy(profile, fallbacks, tuple(admitters), _stand_in(profile))


def reads_predictions(plugin: object) -> bool:
    """Whether a plugin decides by predicted latency."""
    return bool(getattr(plugin, "reads_predictions", False))


def _stand_in(profile: Profile) -> Profile | None:
    """Return what decides while predictions cannot be trusted: Shoal's default behind the same other filters."""
    if not any(reads_predictions(named.plugin) for named in profile.plugins()):
        return None
    return Profile(
        f"{profile.name}: predictions not trusted",
        tuple(named for named in profile.filters if not reads_predictions(named.plugin)),
        (Named(ExpectedWaitScorer.type, ExpectedWaitScorer()),),
        Named(MaxScorePicker.type, MaxScorePicker()),
    )


def _default_profile(plugins: Plugins) -> ProfileSpec:
    """Return the profile of all configured plugins, or Shoal's own when none of them takes part in a profile."""
    parts = [each for each in plugins.configured if isinstance(each.plugin, Filter | Scorer | Picker)]
    if not parts:
        parts = [plugins.add_default(ExpectedWaitScorer)]
    return ProfileSpec(name=DEFAULT_PROFILE, plugins=tuple(WeightedRef(plugin_ref=each.name) for each in parts))


def _profile(spec: ProfileSpec, plugins: Plugins, reader: Reader) -> Profile:
    filters: list[Named[Filter]] = []
    scorers: list[Named[Scorer]] = []
    pickers: list[Named[Picker]] = []
    for at, reference in enumerate(spec.plugins):
        path = f"schedulingProfiles[0].plugins[{at}]"
        plugin = plugins.get(reference.plugin_ref, f"{path}.pluginRef").plugin
        weight = 1.0 if reference.weight is None else reference.weight
        if weight < 0 or math.isinf(weight):
            raise reader.error(f"{path}.weight", f"must be 0 or more, got {weight:g}")
        if isinstance(plugin, Filter):
            filters.append(Named(reference.plugin_ref, plugin))
        if isinstance(plugin, Scorer):
            scorers.append(Named(reference.plugin_ref, plugin, weight))
        elif reference.weight is not None:
            reader.warn(f"{path}.weight", f"has no effect: {reference.plugin_ref} is no scorer")
        if isinstance(plugin, Picker):
            pickers.append(Named(reference.plugin_ref, plugin))
        if not isinstance(plugin, Filter | Scorer | Picker | SingleProfileHandler):
            reader.warn(f"{path}.pluginRef", f"has no effect: {reference.plugin_ref} takes no part in a profile")
        if len(pickers) > 1:
            raise reader.error(f"{path}.pluginRef", f"a profile has one picker, {pickers[0].name} is one already")
    if not pickers:
        found = next((each for each in plugins.configured if isinstance(each.plugin, Picker)), None)
        picker = found or plugins.add_default(MaxScorePicker)
        pickers.append(Named(picker.name, picker.plugin))
    return Profile(spec.name, tuple(filters), tuple(scorers), pickers[0])
