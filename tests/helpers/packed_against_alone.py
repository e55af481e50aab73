"""Compare packed documents with each document alone: logits and gradients of one model. Prints one JSON line per pack.

python -m tests.helpers.packed_against_alone MODEL_FOLDER BACKEND DOCUMENTS[,DOCUMENTS ...] [--section.key value ...]
"""

from __future__ import annotations

import json
import os
import sys


def main() -> int:
    """Relative differences (norm of the difference divided by norm) of logits, gradients and the summed loss."""
    os.environ["UNSLOTH_RETURN_LOGITS"] = "1"
    folder, backend, counts = sys.argv[1], sys.argv[2], [int(text) for text in sys.argv[3].split(",")]
    from finetune.config import load
    from finetune.runtime import bootstrap

    named = ["--model.model_name_or_path", folder, "--data.train_file", "none", "--model.backend", backend]
    config = load([*named, "--data.max_length", "256", "--data.packing", "--data.pack_length", "4096", *sys.argv[4:]])
    stack = bootstrap.start(backend)

    import numpy as np
    import torch

    from finetune.data.collate import collate
    from finetune.engine.kernels import by_document
    from finetune.engine.model import loading as models
    from finetune.engine.model import packing

    model = models.load(config, stack, row_length=config.data.row_length)
    tried = packing.prepare_for_packs(model, config, stack)
    assert tried.leak is None, tried.leak
    with torch.no_grad():  # an adapter starts at zero, so only one of its halves would get a gradient
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.copy_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1)) * 0.02)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]

    def make_documents(count: int) -> list:
        rng = np.random.default_rng(count)
        documents = []
        for length in rng.integers(2, 4000 // count if count > 16 else 250, size=count):
            ids = rng.integers(3, 300, size=length).astype(np.int32)
            labels = np.where(rng.random(length) < 0.7, ids, -100).astype(np.int32)
            labels[0] = -100
            labels[-1] = ids[-1]
            documents.append((ids, labels))
        return documents

    def measure(rows: list, pack_length: int | None):
        batch = collate(rows, pad_token_id=0, pack_length=pack_length)
        lengths = batch.pop("packed_seq_lengths", None)
        inputs = {name: tensor.to(stack.device) for name, tensor in batch.items()}
        if lengths is not None:
            inputs |= by_document.arguments_of_pack(model, backend)(lengths, stack.torch_device)
        model.train()
        on_gpu = torch.device(stack.device).type == "cuda"
        with torch.autocast("cuda", torch.bfloat16, enabled=on_gpu):  # as the trainer calls it
            loss = model(**inputs, num_items_in_batch=torch.tensor(1, device=stack.device)).loss
        loss.backward()
        with torch.no_grad(), torch.autocast("cuda", torch.bfloat16, enabled=on_gpu):
            inputs.pop("labels")
            logits = model(**inputs).logits[0].float()
        return loss.detach().double(), logits

    def gradient() -> torch.Tensor:
        found = torch.cat([parameter.grad.flatten().double() for parameter in trained])
        model.zero_grad()
        return found

    for count in counts:
        documents = make_documents(count)
        loss, rows = 0.0, []
        for document in documents:
            own, logits = measure([[document]], None)
            loss += own
            rows.append(logits[: len(document[0])])
        alone, alone_logits = gradient(), torch.cat(rows)
        packed_loss, logits = measure([documents], 4096)
        packed, logits = gradient(), logits[: len(alone_logits)]
        result = {
            "documents": count,
            "loss": abs(float((packed_loss - loss) / loss)),
            "logits": float((logits - alone_logits).norm() / alone_logits.norm()),
            "gradient": float((packed - alone).norm() / alone.norm()),
            "ratio": float(packed.norm() / alone.norm()),
            "proof": tried.proof,
            "patches": [verdict.name for verdict in stack.patches if verdict.applied],
        }
        sys.stdout.write(json.dumps(result) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
