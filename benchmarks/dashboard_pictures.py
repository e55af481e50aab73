"""Take the pictures of docs/dashboard.md from real runs.

    python -m benchmarks.dashboard_pictures RUN [RUN ...] --out docs/pictures

Starts `finetune dashboard` on copies of what the runs recorded, opens each page in headless Chromium and waits for its
charts. Needs Debian's chromium and the extra `dev`.
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

# Page -> what follows the address, and a selector that appears when it is drawn.
PAGES = {
    "time-series": ("?smoothing=0#timeseries", "card-view line-chart"),
    "custom-scalars": ("#custom_scalars&_smoothingWeight=0", "tf-custom-scalar-multi-line-chart-card svg path[d*='L']"),
    "text": ("#text", "tf-markdown-view table"),
    "hparams": ("#hparams", "tf-hparams-main"),
    "images": ("#images", "tf-image-loader img"),
    "review": ("#finetune", "iframe"),
}
SIZE = {"width": 1280, "height": 860}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("runs", type=Path, nargs="+", metavar="RUN", help="output folder of a run")
    parser.add_argument("--out", type=Path, required=True, help="folder for the pictures")
    parser.add_argument("--pages", nargs="+", choices=PAGES, default=list(PAGES))
    given = parser.parse_args()
    given.out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) / "outputs"
        folder.mkdir()
        for run in given.runs:
            copy = folder / run.resolve().name
            shutil.copytree(run / "runs", copy / "runs")
            shutil.copy(run / "run.json", copy)
        command = [sys.executable, "-m", "finetune", "dashboard", str(folder), "--port", "0"]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert process.stdout is not None
        try:
            lines = (re.search(r"(http://\S+?)/?#finetune", line) for line in process.stdout)
            take(next(found.group(1) for found in lines if found), given.out, given.pages)
        finally:
            process.kill()


def take(address: str, out: Path, pages: list[str]) -> None:
    """One picture per page."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path="/usr/bin/chromium", args=["--no-sandbox"])
        for name in pages:
            end, drawn = PAGES[name]
            page = browser.new_page(viewport=SIZE)  # type: ignore[arg-type]
            page.goto(f"{address}/{end}")
            page.locator(drawn).first.wait_for(state="attached")
            if name == "review":
                page.frame_locator("iframe").locator("[data-panel=verdict]").first.wait_for()
            page.wait_for_timeout(2000)  # charts move into place
            page.screenshot(path=out / f"{name}.png")
            page.close()
        browser.close()
    shrink(out)


def shrink(folder: Path) -> None:
    """Pictures of few colors: a palette keeps them under 100 kB each."""
    from PIL import Image

    for file in folder.glob("*.png"):
        with Image.open(file) as picture:
            small = picture.convert("RGB").quantize(256)
        small.save(file, optimize=True)


if __name__ == "__main__":
    main()
