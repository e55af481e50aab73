#!/bin/bash
# One run on one or several machines of a Slurm cluster, with all GPUs of each:
#
#   sbatch examples/cluster/slurm.sh my.yaml
#   sbatch --gpus-per-node 4 --cpus-per-task 16 examples/cluster/slurm.sh my.yaml
#   sbatch --nodes 2 examples/cluster/slurm.sh my.yaml --training.learning_rate 1e-4
#
# Model, data and output_dir must have the same paths on all machines, and output_dir must be on a disk that they share,
# which is checked at the start (docs/two-machines.md). If a machine is lost, Slurm ends the others and requeues the job.
# Two minutes before the time is over, Slurm sends SIGTERM and the run saves a checkpoint. A job that is requeued
# (`scontrol requeue`, a failed machine, preemption) resumes from the newest complete checkpoint.
#SBATCH --job-name=finetune
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=32
#SBATCH --time=24:00:00
#SBATCH --signal=TERM@120
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=finetune-%j.log
set -euo pipefail

if [[ $# -lt 1 ]]; then
  echo "error: no configuration was given. Submit with: sbatch $0 my.yaml" >&2
  exit 2
fi
config=$1
shift

# The environment of `make install`. For an image, remove this line and use `srun --container-image=...` (Pyxis) below.
source "${FINETUNE_VENV:-$SLURM_SUBMIT_DIR/.venv}/bin/activate"

export TORCH_ELASTIC_SHUTDOWN_TIMEOUT=110 # seconds for a checkpoint at the end
mapfile -t hosts < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
port=$((20000 + SLURM_JOB_ID % 20000)) # jobs that share a machine do not meet

exec srun --kill-on-bad-exit=1 torchrun \
  --nnodes "$SLURM_JOB_NUM_NODES" \
  --nproc_per_node "$SLURM_GPUS_ON_NODE" \
  --rdzv_backend c10d \
  --rdzv_endpoint "${hosts[0]}:$port" \
  --rdzv_id "$SLURM_JOB_ID" \
  -m finetune.train --config "$config" --training.resume_from_checkpoint true "$@"
