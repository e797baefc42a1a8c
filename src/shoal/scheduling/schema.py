"""The parameters of a plugin class, read from its constructor.

Owns the rule from Python signature to file schema: name, type, default, marks and documentation of each parameter.
Reading values from a file is `shoal.routing.documents`; writing the reference page is `shoal.cli.docs`.
"""

import inspect
from typing import Annotated, Any, NamedTuple, get_args, get_origin, get_type_hints

import msgspec

from shoal.kernel import ConfigError
from shoal.scheduling.plugin import Key

REQUIRED = inspect.Parameter.empty
"""The default of a parameter that a file must give."""


class Parameter(NamedTuple):
    """One parameter.

    name: in Python.  key: in a file.  type: what a file may give.  default: REQUIRED when there is none.
    doc: one line.  marks: Ref, Deprecated, Ignored and the like.
    """

    name: str
    key: str
    type: Any
    default: Any
    doc: str
    marks: tuple[Any, ...]

    @property
    def is_required(self) -> bool:
        """Whether a file must give it."""
        return self.default is REQUIRED


def camel(name: str) -> str:
    """Return the file's form of a Python name: `max_num_of_endpoints` is `maxNumOfEndpoints`."""
    head, *rest = name.split("_")
    return head + "".join(word[:1].upper() + word[1:] for word in rest)


def annotation(hint: Any) -> tuple[Any, str, tuple[Any, ...]]:
    """Split a type hint into the bare type, its one line of documentation and its marks."""
    if get_origin(hint) is not Annotated:
        return hint, "", ()
    bare, *extras = get_args(hint)
    doc = next((extra for extra in extras if isinstance(extra, str)), "")
    return bare, doc, tuple(extra for extra in extras if not isinstance(extra, str))


def parameters(cls: type[Any]) -> tuple[Parameter, ...]:
    """Return the parameters of a plugin class, in order.  Raises ConfigError for a constructor that is no schema."""
    is_struct = issubclass(cls, msgspec.Struct)
    if not is_struct and cls.__init__ is object.__init__:
        return ()
    hints = get_type_hints(cls if is_struct else cls.__init__, include_extras=True)
    found = []
    for name, given in inspect.signature(cls).parameters.items():
        if given.kind is not inspect.Parameter.KEYWORD_ONLY or name not in hints:
            raise ConfigError(f"plugin {cls.type}: parameter {name} of its constructor must be keyword-only and typed")
        bare, doc, marks = annotation(hints[name])
        key = next((mark.name for mark in marks if isinstance(mark, Key)), camel(name))
        found.append(Parameter(name, key, bare, given.default, doc, marks))
    return tuple(found)


def fields(cls: type[msgspec.Struct]) -> tuple[Parameter, ...]:
    """Return the fields of a struct inside a document, in order, under the names that a file gives them."""
    hints = get_type_hints(cls, include_extras=True)
    found = []
    for field in msgspec.structs.fields(cls):
        bare, doc, marks = annotation(hints[field.name])
        default: Any = REQUIRED if field.required else field.default
        if default is msgspec.NODEFAULT:
            default = field.default_factory()
        found.append(Parameter(field.name, field.encode_name, bare, default, doc, marks))
    return tuple(found)
