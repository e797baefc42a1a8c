"""Stands where SGLang imports torchvision, which cannot be loaded beside the CPU build of torch.

Every name of it exists and does nothing: a model of text asks for none.
"""

import importlib.abc
import importlib.machinery
import sys
import types
from typing import Any


class _AnyClass(type):
    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return name


class _Any(metaclass=_AnyClass):
    def __init__(self, *args: Any, **named: Any) -> None:
        pass

    def __getattr__(self, name: str) -> "_Any":
        return _Any()

    def __call__(self, *args: Any, **named: Any) -> "_Any":
        return _Any()


class _Module(types.ModuleType):
    __path__: list[str] = []  # noqa: RUF012

    def __getattr__(self, name: str) -> type:
        return __getattr__(name)


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, name: str, path: Any = None, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        if name.startswith("torchvision."):
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> _Module:
        return _Module(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        pass


sys.meta_path.insert(0, _Finder())
__version__ = "0.28.0"


def __getattr__(name: str) -> type:
    if name.startswith("__"):
        raise AttributeError(name)
    return type(name, (_Any,), {})
