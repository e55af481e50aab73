"""Fine-tuning LLMs with Unsloth and TRL on one GPU or many.

`from finetune import SFTTrainer` is TRL's trainer on this project's engine.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from finetune.drop_in import DataCollatorForCompletionOnlyLM as DataCollatorForCompletionOnlyLM
    from finetune.drop_in import SFTConfig as SFTConfig
    from finetune.drop_in import SFTTrainer as SFTTrainer
    from finetune.drop_in import TrainingArguments as TrainingArguments
    from finetune.drop_in import setup_chat_format as setup_chat_format

__version__ = "0.2.0"


def __getattr__(name: str) -> Any:
    # Only these start the backend, which commands do after their checks. TRL has removed the last two.
    if name in ("SFTConfig", "SFTTrainer", "TrainingArguments", "DataCollatorForCompletionOnlyLM", "setup_chat_format"):
        from finetune import drop_in

        return getattr(drop_in, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
