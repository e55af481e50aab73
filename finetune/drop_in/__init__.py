"""`from finetune import SFTTrainer`: TRL's trainer, by its own constructor, on this project's engine.

Importing this package selects the device and imports the backend, like the first lines of a run from a configuration.
So it comes first in a script, before unsloth, trl and transformers; later still works, and says what it cost.
"""

from finetune.drop_in.start import STACK as STACK

from finetune.drop_in.trainer import SFTTrainer as SFTTrainer  # isort: skip  # after the backend
from finetune.drop_in.former import DataCollatorForCompletionOnlyLM as DataCollatorForCompletionOnlyLM  # isort: skip
from finetune.drop_in.former import SFTConfig as SFTConfig  # isort: skip
from finetune.drop_in.former import TrainingArguments as TrainingArguments  # isort: skip
from finetune.drop_in.former import setup_chat_format as setup_chat_format  # isort: skip
