"""The table of metrics: every TensorBoard tag of a run, its unit, what it means and its names in other trainers' runs.

Writers, dashboards, docs and `review` read this table; nothing else spells a tag. Imports the standard library alone,
because the TensorBoard plugin reads it inside the user's TensorBoard.

A tag never contains a parenthesis: TensorBoard's custom-scalars tab names a line `TAG (RUN)`, takes the run from what
follows the first "(", and would leave the chart empty. Units are in brackets instead. Group names begin with a number
because TensorBoard sorts them by name and unfolds the first two; in the first group the losses sort first, so that
they are seen at once. After the group a tag has at most 32 characters, which is what a card of TensorBoard shows.
"""

from __future__ import annotations

from dataclasses import dataclass

SHOWN_RANKS = 16  # charts of single ranks stop here; ranks.jsonl has them all
PHASES = ("data_wait", "forward", "backward", "communication", "optimizer", "other")


@dataclass(frozen=True, kw_only=True)
class Metric:
    """One row of the table."""

    name: str  # in code, in JSON and in rules
    tag: str  # "{n}" stands for the number of the rank, whose GPU has the same number
    meaning: str  # one or two sentences
    written: str = "record"  # "step", "record" (every logging.logging_steps), "evaluation" or "once"
    also: tuple[str, ...] = ()  # the same quantity in runs of TRL and Unsloth
    logged: str = ""  # its key in TRL's logs, which trackers show as train/KEY or eval/KEY; "" if TRL has none

    @property
    def unit(self) -> str:
        """What the tag has in brackets; "" for a count or a norm."""
        return self.tag.partition("[")[2].removesuffix("]")

    @property
    def key(self) -> str:
        """Its key in what the trainer logs, as callbacks see it; of evaluations it begins with "eval_"."""
        return self.logged or self.name

    @property
    def per_rank(self) -> bool:
        """Whether there is one tag for each rank."""
        return "{n}" in self.tag

    def of(self, n: int) -> str:
        """The tag of rank `n`."""
        return self.tag.replace("{n}", str(n))


METRICS = (
    Metric(
        name="loss",
        tag="1 learning/loss [nats]",
        written="step",
        meaning="Mean loss over the supervised tokens of the global batch. Falls quickly, then levels off.",
        also=("train/loss",),
    ),
    Metric(
        name="eval_loss",
        tag="1 learning/eval loss [nats]",
        written="evaluation",
        meaning="Mean loss over the supervised tokens of the held-out rows. Rises while the training loss falls when "
        "the model overfits.",
        also=("eval/loss",),
    ),
    Metric(
        name="eval_perplexity",
        tag="1 learning/perplexity, eval",
        written="evaluation",
        meaning="exp(eval loss): the number of equally likely tokens that the model hesitates between.",
    ),
    Metric(
        name="eval_token_accuracy",
        tag="1 learning/token accuracy, eval [0-1]",
        written="evaluation",
        meaning="Share of supervised held-out tokens to which the model gives the highest probability.",
        also=("eval/mean_token_accuracy",),
        logged="eval_mean_token_accuracy",
    ),
    Metric(
        name="eval_entropy",
        tag="1 learning/token entropy, eval [nats]",
        written="evaluation",
        meaning="Mean entropy of the model's distribution over the next token, at supervised held-out tokens.",
        also=("eval/entropy",),
    ),
    Metric(
        name="eval_exact_match",
        tag="1 learning/exact match, eval [0-1]",
        written="evaluation",
        meaning="Share of the answers to logging.generate_samples held-out prompts that equal their reference.",
    ),
    Metric(
        name="eval_metric",
        tag="1 learning/metric {name}",
        written="evaluation",
        meaning="A value of the function that logging.metric names, over the same answers.",
    ),
    Metric(
        name="eval_answers",
        tag="1 learning/answers scored",
        written="evaluation",
        meaning="Number of answers behind exact match and metric.",
    ),
    Metric(
        name="token_accuracy",
        tag="1 learning/token accuracy [0-1]",
        meaning="Share of supervised tokens to which the model gives the highest probability. Absent if the fused loss "
        "of this backend does not return it.",
        also=("train/mean_token_accuracy",),
        logged="mean_token_accuracy",
    ),
    Metric(
        name="entropy",
        tag="1 learning/token entropy [nats]",
        meaning="Mean entropy of the model's distribution over the next token. Absent if the fused loss of this "
        "backend does not return it.",
        also=("train/entropy",),
    ),
    Metric(
        name="load_balancing_loss",
        tag="1 learning/load balancing loss",
        meaning="Load-balancing loss of a mixture of experts without its coefficient, which is not part of the loss: "
        "mean over documents, weighted by tokens. Evenly used experts give the number of experts per token.",
        also=("train/aux_loss",),
        logged="aux_loss",
    ),
    Metric(
        name="gradient_norm",
        tag="2 health/gradient norm",
        written="step",
        meaning="L2 norm of the gradient before clipping. Spikes come with bad rows or a learning rate that is too "
        "high.",
        also=("train/grad_norm",),
        logged="grad_norm",
    ),
    Metric(
        name="clipped",
        tag="2 health/clipped [0-1]",
        meaning="Share of steps whose gradient norm exceeded training.max_grad_norm.",
    ),
    Metric(
        name="weights_unchanged",
        tag="2 health/weights unchanged [0-1]",
        meaning="Share of the trained weights with a gradient that an optimizer step left exactly as they were, in a "
        "sample. Near 0 in float32; high if updates round away. Stochastic rounding leaves most weights and moves the "
        "others further, which is right on average.",
    ),
    Metric(
        name="expert_load_max",
        tag="2 health/busiest expert [x even]",
        meaning="Load of a layer's busiest expert relative to an even split of the tokens, averaged over the layers of "
        "a mixture of experts. 1 is even; the maximum is the number of experts divided by the experts per token. "
        "Counted since the last record, padding excluded.",
    ),
    Metric(
        name="expert_load_max_worst",
        tag="2 health/busiest of a layer [x even]",
        meaning="The same for the layer where it is highest.",
    ),
    Metric(
        name="expert_load_min",
        tag="2 health/least busy expert [x even]",
        meaning="Load of a layer's least busy expert relative to an even split of the tokens, averaged over layers.",
    ),
    Metric(
        name="expert_load_min_worst",
        tag="2 health/least busy of a layer [x even]",
        meaning="The same for the layer where it is lowest.",
    ),
    Metric(
        name="experts_unused",
        tag="2 health/experts unused [0-1]",
        meaning="Share of the experts of all layers that no token was routed to since the last record. If most are "
        "unused, routing has collapsed; a few are in records of few tokens.",
    ),
    Metric(
        name="expert_load",
        tag="2 health/load of experts [x even]",
        meaning="Histogram of the load of all experts, relative to an even split of their layer's tokens.",
    ),
    Metric(
        name="learning_rate",
        tag="2 health/learning rate",
        written="step",
        meaning="Learning rate of the step.",
        also=("train/learning_rate",),
    ),
    Metric(
        name="supervised_tokens",
        tag="2 health/supervised tokens per step",
        meaning="Tokens of the global batch that the loss is computed on.",
    ),
    Metric(
        name="tokens_per_gpu",
        tag="3 speed/tokens per device [1/s]",
        meaning="Throughput per GPU, or per process on a CPU: tokens without padding, by the time of steps. Evaluation "
        "and saving are not counted.",
        also=("3 speed/tokens per GPU [1/s]",),
    ),
    Metric(name="tokens_total", tag="3 speed/tokens in total [1/s]", meaning="Throughput of all devices together."),
    Metric(
        name="rows_per_second",
        tag="3 speed/rows [1/s]",
        meaning="Rows of the data file per second, all devices together.",
        also=("train/train_samples_per_second",),
    ),
    Metric(
        name="mfu",
        tag="3 speed/MFU [0-1]",
        meaning="Model FLOPs utilization: the model's own floating-point operations divided by the peak rate of the "
        "GPUs. In a mixture of experts, only the experts that a token is routed to count.",
    ),
    Metric(
        name="step_seconds",
        tag="3 speed/step [s]",
        meaning="Time of an optimizer step, from the request for its rows to the end of the update: median of the "
        "record, mean over ranks.",
    ),
    Metric(
        name="padding",
        tag="3 speed/padding [0-1]",
        meaning="Share of the computed positions that hold no token of a document.",
    ),
    Metric(
        name="evaluation_and_saving",
        tag="3 speed/evaluation and saving [s]",
        meaning="Time since the last record that went into evaluations and checkpoints, not into steps.",
    ),
    Metric(
        name="tokens_seen",
        tag="3 speed/tokens seen",
        meaning="Tokens trained on so far, without padding.",
        also=("train/num_tokens", "train/num_input_tokens_seen"),
        logged="num_tokens",
    ),
    Metric(name="hours", tag="3 speed/time [h]", meaning="Hours since training began in this process."),
    Metric(
        name="data_wait",
        tag="4 step/data wait [s]",
        meaning="Time of a step in which the GPU waits for rows. The six phases add up to the step time.",
    ),
    Metric(
        name="forward", tag="4 step/forward [s]", meaning="Forward passes of a step, without exposed communication."
    ),
    Metric(
        name="backward", tag="4 step/backward [s]", meaning="Backward passes of a step, without exposed communication."
    ),
    Metric(
        name="communication",
        tag="4 step/communication [s]",
        meaning="Exposed communication: gradients or shared rows travel and nothing is computed. Waiting for a slower "
        "rank is in it.",
    ),
    Metric(name="optimizer", tag="4 step/optimizer [s]", meaning="Gradient clipping and the update of the weights."),
    Metric(name="other", tag="4 step/other [s]", meaning="The rest of a step."),
    Metric(
        name="own_work_of_rank",
        tag="5 ranks/own work of rank {n} [s]",
        meaning="Step time of this rank without its exposed communication. The rank with the most holds the others up.",
    ),
    Metric(
        name="data_wait_of_rank",
        tag="5 ranks/data wait of rank {n} [s]",
        meaning="Time of a step in which this rank waits for rows.",
    ),
    Metric(name="own_work", tag="5 ranks/own work [s]", meaning="Own work of the median rank."),
    Metric(name="own_work_slowest", tag="5 ranks/own work, slowest [s]", meaning="Own work, slowest rank."),
    Metric(name="own_work_fastest", tag="5 ranks/own work, fastest [s]", meaning="Own work, fastest rank."),
    Metric(name="slowest_rank", tag="5 ranks/slowest rank", meaning="Number of the rank with the most work."),
    Metric(
        name="lost_to_slowest",
        tag="5 ranks/lost to the slowest [0-1]",
        meaning="Share of a step that the median rank waits for the slowest.",
    ),
    Metric(
        name="peak_of_rank",
        tag="6 memory/peak of rank {n} [GiB]",
        meaning="Most memory that tensors held since the last record; on a CPU, most memory of the process.",
    ),
    Metric(
        name="reserved_of_rank",
        tag="6 memory/reserved of rank {n} [GiB]",
        meaning="Most memory that torch's allocator held since the last record.",
    ),
    Metric(
        name="fullest", tag="6 memory/fullest GPU [0-1]", meaning="Reserved memory of the fullest GPU, by its capacity."
    ),
    Metric(
        name="allocator_retries",
        tag="6 memory/allocator retries",
        meaning="Times that torch's allocator had to free its cache and try again, on all ranks since the last record. "
        "Each one stalls the GPU.",
    ),
    Metric(
        name="gpu_utilization",
        tag="7 gpu/utilization of GPU {n} [0-1]",
        meaning="Share of the time in which any kernel ran on the GPU of rank n, by NVML.",
    ),
    Metric(name="gpu_clock", tag="7 gpu/SM clock of GPU {n} [MHz]", meaning="Clock of the multiprocessors."),
    Metric(name="gpu_power", tag="7 gpu/power of GPU {n} [W]", meaning="Power draw."),
    Metric(name="gpu_temperature", tag="7 gpu/temperature of GPU {n} [C]", meaning="Temperature."),
    Metric(
        name="gpu_throttled",
        tag="7 gpu/throttled, GPU {n} [0-1]",
        meaning="Share of the samples in which NVML reports that heat or the board lowers the clock. The power cap "
        "does not count: it governs any GPU under full load.",
    ),
    Metric(
        name="document_length",
        tag="8 data/document length [tokens]",
        written="once",
        meaning="Histogram of the training documents' lengths.",
    ),
    Metric(
        name="eval_document_loss",
        tag="8 data/eval loss per doc. [nats]",
        written="evaluation",
        meaning="Histogram of the loss of each held-out document. Absent if the loss of this backend has no value per "
        "token.",
    ),
    *(
        Metric(
            name=f"prediction_error_{name}",
            tag=f"9 prediction/error of {label} [1]",
            written="once",
            meaning=f"(predicted - measured) / measured {label} of the run; 0.1 is 10 % too high.",
        )
        for name, label in (
            ("step_seconds", "step time"),
            ("peak_memory_gib", "memory"),
            ("tokens_per_second_per_gpu", "tokens per device"),
        )
    ),
)
BY_NAME = {metric.name: metric for metric in METRICS}


def tag(name: str, n: int | None = None, label: str = "") -> str:
    """The tag of a metric.

    Args:
        name: `Metric.name`.
        n: rank, for a metric that each rank has.
        label: name of one of several values, for a metric of the user.

    Raises:
        KeyError: no such metric.
    """
    metric = BY_NAME[name]
    if label:
        return metric.tag.replace("{name}", label)
    return metric.tag if n is None else metric.of(n)
