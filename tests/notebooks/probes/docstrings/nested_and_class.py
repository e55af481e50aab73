# expect: converted
# has: class PromptBuilder
# cause: docstrings in a class with a static method and in an inner function
# %%
class PromptBuilder:
    """Builds prompts.

    One for all rows.
    """
    HEADER = "### Task"

    @staticmethod
    def build(row):
        """Return a prompt.

        With a header.
        """
        def clean(s):
            """Strip.

            Twice.
            """
            return s.strip().strip("\n")
        return {"text": PromptBuilder.HEADER + "\n" + clean(row["body"])}
from datasets import load_dataset
ds = load_dataset("acme/tasks", split="train").map(PromptBuilder.build)
from trl import SFTConfig, SFTTrainer
from peft import LoraConfig
trainer = SFTTrainer("HuggingFaceTB/SmolLM2-135M", train_dataset=ds, peft_config=LoraConfig(), args=SFTConfig(output_dir="o", dataset_text_field="text"))
trainer.train()
