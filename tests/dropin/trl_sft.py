"""Fine-tune with the command-line arguments of TRL: --model_name_or_path, --dataset_name, --use_peft and the rest."""

# ruff: noqa: I001
from datasets import load_dataset
from trl import ModelConfig, ScriptArguments, SFTConfig, TrlParser, get_peft_config
from trl import SFTTrainer


def main(script_args, training_args, model_args):
    training_args.model_init_kwargs = {
        "revision": model_args.model_revision,
        "attn_implementation": model_args.attn_implementation,
        "dtype": model_args.dtype,
    }
    dataset = load_dataset(script_args.dataset_name, name=script_args.dataset_config)
    evaluates = training_args.eval_strategy != "no"
    trainer = SFTTrainer(
        model=model_args.model_name_or_path,
        args=training_args,
        train_dataset=dataset[script_args.dataset_train_split],
        eval_dataset=dataset[script_args.dataset_test_split] if evaluates else None,
        peft_config=get_peft_config(model_args),
    )
    trainer.train()
    trainer.save_state()
    trainer.save_model(training_args.output_dir)


if __name__ == "__main__":
    main(*TrlParser((ScriptArguments, SFTConfig, ModelConfig)).parse_args_and_config())
