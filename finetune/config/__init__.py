"""The configuration: typed sections, YAML plus dotted overrides, every mistake reported at once."""

from finetune.config.load import dump_yaml, help_text, load
from finetune.config.schema import (
    Batch,
    Config,
    ConfigError,
    DataConfig,
    LoggingConfig,
    LoraConfig,
    ModelConfig,
    TrainingConfig,
    resolve_batch,
    scaled_learning_rate,
)

__all__ = [
    "Batch",
    "Config",
    "ConfigError",
    "DataConfig",
    "LoggingConfig",
    "LoraConfig",
    "ModelConfig",
    "TrainingConfig",
    "dump_yaml",
    "help_text",
    "load",
    "resolve_batch",
    "scaled_learning_rate",
]
