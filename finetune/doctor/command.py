"""`finetune doctor`: reports hardware, software and what would stop a run, for a bug report."""

from __future__ import annotations

import sys

from finetune.config import Config
from finetune.doctor import checks, inspect, report
from finetune.runtime.command import DONE, FAILED, run_command
from finetune.runtime.files import write_json

PURPOSE = (
    "Report hardware, software and what would stop a run; paste the output into a bug report. Exit code 0: a run can"
    " start, 1: something would stop it, 2: bad input."
)


def main(argv: list[str] | None = None) -> int:
    """Report on this machine. Returns 0 when a run could start, 1 when something would stop it, 2 for bad input."""
    return run_command("doctor", argv, run, PURPOSE)


def run(config: Config) -> int:
    """Examine, judge, print. Under a launcher only one process per machine does; the others return at once."""
    launcher = inspect.launcher()
    if launcher.get("local_rank"):
        return DONE
    found = inspect.examine(config, launcher)
    verdicts = checks.judge(config, found)
    verdict = "stop" if any(one["state"] == "stop" for one in verdicts) else "ready"
    found = report.without_secrets({"verdict": verdict, "checks": verdicts, **found})
    sys.stdout.write(report.plain_text(found))
    if config.json:
        write_json(config.json, found)
    return FAILED if verdict == "stop" else DONE
