"""The versions of constraints.txt and constraints-gpu.txt that decide what a run computes; wheels lack those."""

CPU = {
    "torch": "2.13.0",
    "transformers": "5.17.0",
    "trl": "1.15.0",
    "peft": "0.21.2",
    "accelerate": "1.15.0",
    "datasets": "4.8.5",
    "unsloth": "2026.10.9",
    "unsloth_zoo": "2026.10.9",
    "bitsandbytes": "0.50.2",
}

GPU = {
    "torch": "2.14.1",
    "transformers": "5.17.0",
    "trl": "1.15.0",
    "peft": "0.21.2",
    "accelerate": "1.15.0",
    "datasets": "4.8.5",
    "unsloth": "2026.10.9",
    "unsloth_zoo": "2026.10.9",
    "bitsandbytes": "0.50.2",
}
