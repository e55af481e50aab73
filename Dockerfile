# Image for NVIDIA GPUs (driver 580 or newer, for CUDA 13). Build it on any machine; no GPU is needed for that.
#
#   docker build -t finetune .
#   docker run --rm --gpus all --ipc=host -v "$PWD":/work -v finetune-cache:/cache finetune \
#       torchrun --standalone --nproc_per_node 8 -m finetune.train --config my.yaml
#
# Without a command it lists the commands of finetune. To stop a run with a checkpoint: docker stop -t 120.
FROM nvidia/cuda:13.0.1-runtime-ubuntu24.04

# The compiler and Python's headers are for Triton, which compiles kernels at run time. Their versions are Ubuntu's.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends build-essential git make python3 python3-dev python3-venv \
    && rm -rf /var/lib/apt/lists/*

WORKDIR /opt/finetune
COPY . .
# GPU=1: there is no GPU to be found while an image is built.
RUN make install GPU=1 && .venv/bin/pip cache purge

# The user of id 1000 that Ubuntu's image has. Mount folders that it may write, or give --user.
RUN mkdir /cache /work && chown 1000:1000 /cache /work
USER 1000
ENV PATH=/opt/finetune/.venv/bin:$PATH \
    HF_HOME=/cache/huggingface \
    FINETUNE_CACHE=/cache/finetune \
    TORCH_ELASTIC_SHUTDOWN_TIMEOUT=110
WORKDIR /work
CMD ["finetune", "--help"]
