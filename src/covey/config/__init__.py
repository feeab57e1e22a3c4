"""Configuration: one page of YAML, strict, checked before anything heavy is loaded."""

from covey.config.load import Loaded, load
from covey.config.schema import Config

__all__ = ["Config", "Loaded", "load"]
