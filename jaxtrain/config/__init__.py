"""The config: its keys, its file, its command line, and the machine that it is for. The names here are for config files."""

from jaxtrain.config.schema import ConfigError, Model, Problem, RunConfig, default_config, parse_arg

__all__ = ["ConfigError", "Model", "Problem", "RunConfig", "default_config", "parse_arg"]
