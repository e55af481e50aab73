"""The configuration: typed sections, YAML plus dotted overrides, all mistakes reported at once."""

from finetune.config.batch import (
    Batch,
    data_ranks,
    fixed_batch_arguments,
    resolve_batch,
    with_fixed_batch,
)
from finetune.config.help import help_text
from finetune.config.load import dump_yaml, load
from finetune.config.schema import (
    Config,
    ConfigError,
    DataConfig,
    LoggingConfig,
    LoraConfig,
    ModelConfig,
    TrainingConfig,
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
    "data_ranks",
    "dump_yaml",
    "with_fixed_batch",
    "fixed_batch_arguments",
    "help_text",
    "load",
    "resolve_batch",
]
