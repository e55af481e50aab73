"""Code that a drop-in script contains if the notebook uses what TRL has removed: by the name that the notebook uses."""

_COLLATOR = '''

class DataCollatorForCompletionOnlyLM:
    """Loss on what follows `response_template`, as TRL's former collator of this name. With `instruction_template`,
    on what follows each response template up to the next instruction."""

    def __init__(self, response_template, instruction_template=None, *, tokenizer, mlm=False, ignore_index=-100):
        def tokens(template):
            return tokenizer.encode(template, add_special_tokens=False) if isinstance(template, str) else list(template)

        self.response = tokens(response_template)
        self.instruction = None if instruction_template is None else tokens(instruction_template)
        self.pad_token_id, self.ignore_index = tokenizer.pad_token_id, ignore_index

    def __call__(self, rows):
        ids = [list(row["input_ids"]) for row in rows]
        longest = max(map(len, ids))
        padded = [one + [self.pad_token_id] * (longest - len(one)) for one in ids]
        labels = [self._labels(one) + [self.ignore_index] * (longest - len(one)) for one in ids]
        masks = [[1] * len(one) + [0] * (longest - len(one)) for one in ids]
        named = {"input_ids": padded, "attention_mask": masks, "labels": labels}
        return {name: torch.tensor(values) for name, values in named.items()}

    def _labels(self, ids):
        responses = self._ends(ids, self.response)
        if not responses:
            return [self.ignore_index] * len(ids)
        spans = [(responses[-1], len(ids))]
        if self.instruction is not None:
            starts = [end - len(self.instruction) for end in self._ends(ids, self.instruction)]
            ends = [min([at for at in starts if at >= end], default=len(ids)) for end in responses]
            spans = list(zip(responses, ends, strict=True)) if starts else []
        kept = {number for start, end in spans for number in range(start, end)}
        padding = self.pad_token_id
        return [one if n in kept and one != padding else self.ignore_index for n, one in enumerate(ids)]

    @staticmethod
    def _ends(ids, part):
        size = len(part)
        return [at + size for at in range(len(ids) - size + 1) if ids[at : at + size] == part]
'''

_CHAT_FORMAT = '''

def setup_chat_format(model, tokenizer, format="chatml", resize_to_multiple_of=None):
    """The ChatML template with its two tokens, and embeddings for them, as TRL's former function of this name."""
    if format != "chatml":
        raise ValueError(f"unknown format: {format}. Only chatml is known.")
    if tokenizer.chat_template is not None:
        raise ValueError("the tokenizer has a chat template. Remove the call of setup_chat_format.")
    tokenizer.bos_token, tokenizer.eos_token, tokenizer.pad_token = "<|im_start|>", "<|im_end|>", "<|im_end|>"
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "<|im_end|>"]})
    tokenizer.chat_template = (
        "{% for message in messages %}{{'<|im_start|>' + message['role'] + '\\\\n' + message['content']"
        " + '<|im_end|>' + '\\\\n'}}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\\\n' }}{% endif %}"
    )
    model.resize_token_embeddings(len(tokenizer), pad_to_multiple_of=resize_to_multiple_of)
    for config in (model.config, model.generation_config):
        config.pad_token_id, config.bos_token_id = tokenizer.pad_token_id, tokenizer.bos_token_id
        config.eos_token_id = tokenizer.eos_token_id
    return model, tokenizer
'''

PARTS = {"DataCollatorForCompletionOnlyLM": _COLLATOR, "setup_chat_format": _CHAT_FORMAT}
