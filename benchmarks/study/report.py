"""The measured tables next to the published ones: on a terminal, as Markdown, and as plots."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.markdown import Markdown

from benchmarks.study import published
from finetune.bench import timeline
from finetune.runtime.command import console, print_line
from finetune.runtime.files import write_json
from finetune.runtime.types import JsonObject
from finetune.text import counted


def show(found: Mapping[str, Any]) -> None:
    """Print the tables, and the timelines of the batches that the study shows."""
    text = markdown(found)
    print_line(Markdown(text) if console().is_terminal else text)
    for model, bars in timelines(found).items():
        console().print(f"{model}, batch {published.TIMELINES[model][0]}", highlight=False)
        timeline.show(bars)


def write(found: Mapping[str, Any], folder: Path) -> None:
    """Write study.json, study.md and, with matplotlib, study-throughput.png and a timeline per model."""
    write_json(folder / "study.json", found)
    (folder / "study.md").write_text(markdown(found), encoding="utf-8")
    print_line(f"wrote {folder / 'study.json'} and study.md")
    if found["models"] and plot(found, folder / "study-throughput.png"):  # a study of LoRA alone has none
        for model, bars in timelines(found).items():
            batch = published.TIMELINES[model][0]
            timeline.write(folder / f"study-timeline-{model}.png", f"{model}, global batch {batch}", bars)


def markdown(found: Mapping[str, Any]) -> str:
    """All tables, the published figures next to ours, contradictions and warnings."""
    protocol = found["protocol"]
    lines = [
        "# The study of one GPU against several, repeated",
        "",
        f"{found['topology']}; torch {found['versions']['torch']}; {found['date']}; float32, Adam, random samples "
        f"already on the device. {counted(protocol['runs'], 'run')} of {counted(protocol['steps'], 'step')}, "
        f"each after {protocol['warm_up']} warm-up steps, without outliers "
        "(modified Z-score above 3.5); ranks share the global batch, as in the study. "
        "+- is half the 95% confidence interval of the mean step over the runs.",
        "",
    ]
    if found["hardware"]["device"] == "cpu":
        lines += [
            f"**A CPU run.** The ranks are processes on {found['hardware']['cpu_cores']} cores that communicate with "
            "gloo. It shows how the benchmark works, but nothing about GPUs; with more ranks than idle cores, adding "
            "ranks cannot speed it up.",
            "",
        ]
    for model in found["models"]:
        widths = "-".join(map(str, model["widths"]))
        lines += [f"## {model['name']}: {widths}, {model['parameters']:,} parameters, dropout {model['dropout']}", ""]
        lines += [
            "The study states only hidden widths and parameters; with ten classes this input width matches them best.",
            "",
        ]
        for mode in found["modes"]:
            lines += [f"{mode['name']}:", "", *table(model["name"], mode["rows"]), ""]
        lines += [f"Published, {published.MACHINE}:", "", *published_table(model["name"]), ""]
    if found["lora"]:
        lines += ["## LoRA", "", *lora(found["lora"]), ""]
    lines += ["## Contradictions in the published figures", ""]
    lines += [f"- {sentence}" for sentence in published.contradictions()]
    warned = dict.fromkeys(
        warning for mode in found["modes"] for row in mode["rows"] for warning in row["conditions"]["warnings"]
    )
    if warned:
        lines += ["", "## Warnings", "", *(f"- {sentence}" for sentence in warned)]
    return "\n".join(lines) + "\n"


def table(model: str, rows: list[JsonObject]) -> list[str]:
    """Markdown table of one model in one mode."""
    lines = [
        "| batch | ranks | samples/s | step, ms | speed-up | efficiency | exposed / hidden communication, ms (share of "
        "the step) | memory, GiB | utilization | outliers |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for row in (row for row in rows if row["model"] == model):
        step, first = row["step_seconds"], row["ranks"][0]
        interval = f" +- {(step['ci95'][1] - step['ci95'][0]) / 2 * 1e3:.2f}" if step["ci95"] else ""
        exposed, hidden = first["seconds"]["exposed"], first["seconds"]["hidden"]
        sent = "-"
        if exposed:
            share = row["exposed_communication_fraction"]
            sent = f"{exposed['median'] * 1e3:.2f} / {hidden['median'] * 1e3:.2f} ({share:.0%})"
        used = "-" if first["utilization"] is None else f"{first['utilization']:.0%}"
        lines.append(
            f"| {row['batch']} | {row['world_size']} | {row['samples_per_second']:,.0f} | "
            f"{step['median'] * 1e3:.2f}{interval} | {row['speed_up']:.2f} | {row['efficiency']:.0%} | {sent} | "
            f"{max(one['memory_gib'] for one in row['ranks']):.2f} | {used} | {step['removed']} |"
        )
    return lines


def published_table(model: str) -> list[str]:
    """Markdown table of the published figures."""
    lines = ["| batch | 1 GPU, samples/s | 2 GPUs | speed-up | efficiency |", "|---|---|---|---|---|"]
    for row in published.TABLES[model]:
        lines.append(f"| {row.batch} | {row.one:,} | {row.two:,} | {row.speed_up:.2f} | {row.efficiency:.0%} |")
    return lines


def lora(found: Mapping[str, Any]) -> list[str]:
    """Markdown table of the LoRA runs, or why there are none."""
    if "left_out" in found:
        return [f"Left out: {found['left_out']}."]
    lines = [
        "| shape | mode | ranks | tokens/s per GPU | step, ms | efficiency | exposed communication | memory, GiB |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in found["rows"]:
        share = row["exposed_communication_fraction"]
        lines.append(
            f"| {row['shape']} | {row['mode']} | {row['world_size']} | {row['tokens_per_second_per_gpu']:,.0f} | "
            f"{row['step_seconds']['median'] * 1e3:.1f} | {row['efficiency']:.1%} | "
            f"{'-' if share is None else f'{share:.1%}'} | {row['memory_gib']:.1f} |"
        )
    return lines


def timelines(found: Mapping[str, Any]) -> dict[str, list[timeline.Bar]]:
    """Bars per model at the batch whose timeline the study shows: of every mode and rank, then the published ones."""
    bars: dict[str, list[timeline.Bar]] = {}
    for model in (model["name"] for model in found["models"]):
        batch, *stated = published.TIMELINES[model]
        bars[model] = []
        for mode in found["modes"]:
            for row in mode["rows"]:
                known = any(bar.label == "1 rank" for bar in bars[model])  # the same in every mode
                if (row["model"], row["batch"]) != (model, batch) or (row["world_size"] == 1 and known):
                    continue
                for number, one in enumerate(row["ranks"]):
                    several = f"{mode['name']}, rank {number} of {row['world_size']}"
                    bars[model].append(timeline.bar("1 rank" if row["world_size"] == 1 else several, one["seconds"]))
        for gpus, parts in enumerate(stated, 1):
            whole = {name: parts.get(name, 0.0) for name in timeline.COLORS}
            bars[model].append(timeline.Bar(label=f"published, {gpus} x GPU", parts=whole, hidden=0.0))
    return bars


def plot(found: Mapping[str, Any], path: Path) -> bool:
    """Samples/s by global batch: a panel per model, a line per mode and world size, published figures dashed."""
    figure = timeline.new_figure(6)
    if figure is None:
        return False
    panels = figure.subplots(1, len(found["models"]), squeeze=False)[0]
    for axes, model in zip(panels, found["models"], strict=True):
        for mode in found["modes"]:
            rows = [row for row in mode["rows"] if row["model"] == model["name"]]
            for world in sorted({row["world_size"] for row in rows}):
                line = [(row["batch"], row["samples_per_second"]) for row in rows if row["world_size"] == world]
                if world > 1 or mode is found["modes"][0]:
                    label = "1 rank" if world == 1 else f"{world} ranks, {mode['name']}"
                    axes.plot(*zip(*line, strict=True), marker="o", label=label)
        stated = published.TABLES[model["name"]]
        for gpus, values in ((1, [row.one for row in stated]), (2, [row.two for row in stated])):
            axes.plot(
                [row.batch for row in stated], values, linestyle="--", color="grey", marker=f"{gpus}", markersize=9,
                label=f"published, {gpus} x GPU",
            )  # fmt: skip
        axes.set_xscale("log", base=2)
        axes.set_xticks([row.batch for row in stated], [str(row.batch) for row in stated])
        axes.set_yscale("log")
        axes.set(title=model["name"], xlabel="global batch", ylabel="samples/s")
    handles, labels = panels[0].get_legend_handles_labels()  # the same lines in every panel
    figure.legend(handles, labels, loc="outside lower center", ncols=4, frameon=False, fontsize=8)
    timeline.save(figure, path)
    return True
