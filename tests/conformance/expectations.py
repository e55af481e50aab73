"""What is expected of each of TRL's tests of its trainer, by the test's name."""

from __future__ import annotations

TRAINER_TESTS = "TestSFTTrainer"  # the class in TRL's file whose subject the trainer is

# Why the other classes of the file are left out.
NOT_THE_TRAINER = {
    "TestDFTLoss": "a loss function of TRL, called directly",
    "TestDataCollatorForLanguageModeling": "TRL's collator, called directly",
    "TestChunkedCrossEntropyLoss": "a loss kernel of TRL, called directly",
    "TestPatchChunkedCELMHead": "a loss kernel of TRL, called directly",
    "TestSFTTrainerSlow": "TRL's slow tests: data from the Hub and an accelerator",
}

# A drop-in replacement must pass these: none may be refused. `test_train_model_dtype` is not among them: in float16 at
# a learning rate of 0.1 its loss soon is not a number, and it asks only that the weights differ, as NaN does.
REQUIRED = """
test_init_with_training_arguments test_train_dataset_format test_train_model test_train_nll_loss
test_train_nll_loss_peft test_train_with_formatting_func
test_train_dense_with_peft_config_lora test_train_peft_model test_train_with_peft_config_and_gradient_checkpointing
test_train_with_peft_config_and_gradient_checkpointing_reentrant test_train_with_non_chatml_conversational_data
test_train_with_pretokenized_data test_train_padding_free test_train_packing test_eval_packing test_only_train_packing
test_train_with_chat_template_kwargs test_train_assistant_only test_train_completion_only
test_train_assistant_only_and_completion_only test_dataset_preparation_builds_labels_for_assistant_only_loss
test_dataset_preparation_builds_labels_for_completion_only test_dataset_preparation_respects_existing_labels
test_dataset_preparation_builds_labels_for_pretokenized_with_masks test_fully_masked_examples_dropped_after_truncation
test_dataset_truncated_to_max_length test_packing_carries_labels test_train_with_set_chat_template_from_model
test_train_with_set_chat_template_from_path test_train_toolcall_data test_train_toolcall_data_as_json
test_train_with_eval test_train_with_metric_for_best_model test_train_with_multiple_eval_dataset
test_train_with_gradient_checkpointing test_train_with_gradient_checkpointing_reentrant test_tag_added
test_tag_added_peft test_train_dataset_required
test_train[trl-internal-testing/tiny-Qwen2ForCausalLM-2.5]
test_evaluate_with_eval_dataset[dataset] test_evaluate_with_eval_dataset[dataset_dict]
test_evaluate_with_eval_dataset[dict_of_dataset]
""".split()

# Tests that cannot run on several ranks, whoever's trainer it is.
ONE_RANK = {
    "test_train_with_set_chat_template_from_path": "asks for checkpoint-9, the step count of one rank",
}

# Tests that `trl.SFTTrainer` itself fails on several ranks.
ONE_RANK_OF_TRL = {
    "test_train_with_peft_config_and_gradient_checkpointing_reentrant[True]": (
        "DDP refuses reentrant checkpointing while it looks for unused parameters, as Trainer asks of it with PEFT"
    ),
}

# Tests that pass with `trl.SFTTrainer` on a GPU alone.
NEEDS_GPU = {
    "test_peft_with_quantization": "on a CPU bitsandbytes casts every bias to float16; the test allows for a few",
}

# Vision-language models: no stand-in has the weights and the processor that `trl.SFTTrainer` itself would need.
NEEDS_WEIGHTS = "its stand-in is a configuration without weights: asked only of a trainer that refuses the rows"
TEXT_ONLY = ("test_train_vlm_text_only_data",)  # of text, which no trainer refuses before it loads the model


def required(name: str) -> bool:
    """Whether test `name`, with its parameters in brackets, must pass."""
    return name in REQUIRED or name.partition("[")[0] in REQUIRED
