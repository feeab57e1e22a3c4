"""Make a framework's source importable without ray, vLLM, flash-attn or deepspeed: `use("verl")`.

The folder of the source is `--source PATH` of the script, or the variable COVEY_VERL or COVEY_OPENRLHF.
"""

import importlib.abc
import importlib.machinery
import importlib.util
import os
import sys
from pathlib import Path
from types import ModuleType

os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")  # torch.compile would want a C++ compiler
ABSENT = ("ray", "vllm", "deepspeed", "torchdata", "hydra", "pylatexenc", "aiohttp", "uvicorn")
HEAVY = {
    "verl": (
        "verl.single_controller",
        "verl.checkpoint_engine",
        "verl.experimental",
        "verl.workers.engine",
        "verl.utils.checkpoint",
        "verl.utils.dataset",
    ),
    "openrlhf": ("openrlhf.trainer.ray", "openrlhf.utils.deepspeed", "flash_attn"),
}
"""Packages that drive workers, or that a framework imports without trying; nothing of them is used here."""


class _Names(type):
    """A class any attribute of which is again such a class."""

    def __getattr__(cls, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return _Names(name, (_Anything,), {})


class _Anything(metaclass=_Names):
    """What a missing module's names become: a class, a decorator or a function that does nothing."""

    def __new__(cls, *args, **kwargs):
        # As a decorator it leaves what it decorates.
        return args[0] if len(args) == 1 and callable(args[0]) and not kwargs else super().__new__(cls)

    def __init__(self, *args, **kwargs):
        pass

    def __call__(self, *args, **kwargs):
        return args[0] if len(args) == 1 and callable(args[0]) and not kwargs else self

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return _Anything()


class _Absent(ModuleType):
    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return _Names(name, (_Anything,), {})


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def __init__(self, names):
        self.names = names

    def find_spec(self, name, *_):
        # Both frameworks try flash-attn's cross entropy and have one of their own.
        if name.startswith("flash_attn.ops"):
            return None
        if any(name == own or name.startswith(own + ".") for own in self.names):
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec):
        return _Absent(spec.name)

    def exec_module(self, module):
        module.__path__ = []


def use(framework):
    """Put the source of "verl" or "openrlhf" on the path, with stand-ins for what is not installed."""
    given = sys.argv[sys.argv.index("--source") + 1] if "--source" in sys.argv else None
    source = given or os.environ.get(f"COVEY_{framework.upper()}")
    if source is None or not (Path(source) / framework).is_dir():
        raise SystemExit(f"{sys.argv[0]}: give the folder of {framework}'s source with --source PATH")
    sys.path.insert(0, str(Path(source)))
    missing = [name for name in ABSENT if importlib.util.find_spec(name) is None]
    sys.meta_path.insert(0, _Finder((*missing, *HEAVY[framework])))
    import transformers

    # verl 0.8 imports the name that transformers 5 has dropped, for image models alone.
    transformers.AutoModelForVision2Seq = transformers.AutoModelForImageTextToText
    if "ray" in missing:
        # Results are there at once: a reference is the value itself.
        ray = importlib.import_module("ray")
        ray.get = ray.put = lambda value: value
