"""`finetune dashboard [FOLDER]`: TensorBoard on all runs below a folder, with the link to the review."""

from __future__ import annotations

import argparse
import base64
import contextlib
import hashlib
import io
import json
import logging
import threading
import urllib.parse
from collections.abc import Callable
from pathlib import Path
from typing import Any

from finetune.errors import RunError, UserError
from finetune.runtime.command import DONE, print_line, run_with_options
from finetune.runtime.files import write_json
from finetune.runtime.options import Options
from finetune.runtime.tags import tag

PURPOSE = (
    "Start TensorBoard on all runs below FOLDER (default: outputs), and print the link to the review. Ctrl-C ends it."
)
FOLDER = "outputs"
LOOPBACK = "localhost"
PINNED = ("loss", "eval_loss", "tokens_per_gpu", "step_seconds")  # what a user asks first: is it learning, is it fast

# TensorBoard smooths its charts and leaves outliers out of their axes, so the end of a curve is not the value that was
# written. What its address says comes before what the browser stored, and the part behind "#" stays from tab to tab.
# Outliers are a setting of the browser alone: it is set once, and what the user chooses later stays.
_SCRIPT = """
if (!localStorage.getItem("finetune")) {
  let settings = {};
  try { settings = JSON.parse(localStorage.getItem("_tb_global_settings")) ?? {}; } catch {}
  localStorage.setItem("_tb_global_settings", JSON.stringify({...settings, ignoreOutliers: false}));
  localStorage.setItem("_ignoreYOutliers", "false");
  localStorage.setItem("finetune", "outliers are shown");
}
const tab = location.hash || "#finetune";
location.replace(location.pathname + %s + tab + (tab.includes("_smoothingWeight") ? "" : "&_smoothingWeight=0"));
"""
_PAGE = """<!doctype html>
<html lang="en">
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; script-src 'sha256-{digest}'">
<title>TensorBoard</title>
<noscript>TensorBoard needs JavaScript.</noscript>
<script>{script}</script>
</html>
"""


def main(argv: list[str] | None = None) -> int:
    """Serve until interrupted. Returns 130 then, 2 for no runs or bad input, 1 if the port is in use."""
    return run_with_options(own_options().format_help(), argv, _run)


def own_options() -> Options:
    """The options of this command."""
    options = Options("dashboard", PURPOSE, configuration=False, usage="[FOLDER] [options]")
    options.add_argument("folder", nargs="?", type=Path, default=Path(FOLDER), metavar="FOLDER", help=argparse.SUPPRESS)
    options.add("--host", str, "HOST", f"address to listen on (default: {LOOPBACK}, this machine only)", LOOPBACK)
    options.add("--port", _port, "PORT", "port to listen on (default: the first free one from 6006)")
    return options


def _run(argv: list[str]) -> int:
    from finetune.review.board.discover import find_runs

    options, _ = own_options().split(argv)
    if not options.folder.is_dir():
        raise UserError(f"no such folder: {options.folder}. Give the folder that holds the runs.")
    runs = find_runs(options.folder)
    if not runs:
        raise UserError(f"no run below this folder: {options.folder}. Give the output_dir of a run, or a folder above.")
    address = start(options.folder, options.host, options.port)
    found = {"folder": str(options.folder), "runs": len(runs), **links(address)}
    print_line(
        f"TensorBoard on {len(runs)} {'run' if len(runs) == 1 else 'runs'} below {options.folder}. Ctrl-C ends it."
    )
    print_line(f"  review: {found['review']}")
    print_line(f"  charts: {found['charts']}")
    if options.json:
        write_json(options.json, found)
    threading.Event().wait()  # for Ctrl-C
    return DONE


def links(address: str) -> dict[str, str]:
    """Addresses of the Review tab and of the time series.

    Args:
        address: of TensorBoard, such as http://localhost:6006/.
    """
    return {"review": f"{address}#finetune", "charts": f"{address}#timeseries"}


def start_page() -> str:
    """What TensorBoard's plain address shows first: it goes on at once to the tab that was asked for (Review if none
    was), without smoothing, with outliers and with the first charts pinned."""
    cards = [{"plugin": "scalars", "tag": tag(name)} for name in PINNED]
    pinned = urllib.parse.quote(json.dumps(cards, separators=(",", ":")), safe="")  # "+" would not become a space again
    script = _SCRIPT % json.dumps(f"?smoothing=0&pinnedCards={pinned}")
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    return _PAGE.format(digest=digest, script=script)


def beginning(app: Callable[..., Any]) -> Callable[..., Any]:
    """TensorBoard's WSGI application with the start page before its own."""

    def serve(environ: dict[str, Any], start_response: Callable[..., Any]) -> Any:
        if environ.get("PATH_INFO") not in ("", "/") or environ.get("QUERY_STRING"):
            return app(environ, start_response)
        start_response("200 OK", [("Content-Type", "text/html; charset=utf-8"), ("Cache-Control", "no-cache")])
        return [start_page().encode()]

    return serve


def start(folder: Path, host: str, port: int | None) -> str:
    """Start TensorBoard in a thread of this process. Returns its address, which ends with a slash.

    Raises:
        RunError: the port is in use, or the host is not an address of this machine.
    """
    from tensorboard import default, program

    from finetune.review.board.plugin import ReviewPlugin

    # Tabs have the order of the plugins, and the last ones do not fit a window of 1280 pixels. The first plugin is
    # TensorBoard itself. Ours is missing if it runs from a source folder that is not installed.
    core, *others = (plugin for plugin in default.get_plugins() if plugin is not ReviewPlugin)
    server = program.TensorBoard(plugins=[core, ReviewPlugin, *others], server_class=_server)
    chosen = {} if port is None else {"port": port}
    server.configure(argv=("tensorboard",), logdir=str(folder), host=host, **chosen)
    logging.getLogger("tensorboard").setLevel(logging.ERROR)
    try:
        with contextlib.redirect_stderr(io.StringIO()):  # notes on how TensorBoard reads files
            return server.launch()
    except program.TensorBoardPortInUseError:
        raise RunError(f"port in use: {port}. Give another with --port, or leave --port out.") from None
    except (program.TensorBoardServerException, OSError) as error:  # a host that has another name, a port below 1024
        raise RunError(f"TensorBoard cannot listen on host {host}: {error}. Check --host and --port.") from None


def _server(app: Callable[..., Any], flags: Any) -> Any:
    from tensorboard import program

    return program.create_port_scanning_werkzeug_server(beginning(app), flags)


def _port(text: str) -> int:
    """A port number; 0 takes any that is free."""
    if not text.isdecimal() or int(text) > 65535:
        raise argparse.ArgumentTypeError(f"expected a port from 0 to 65535, got {text!r}")
    return int(text)


if __name__ == "__main__":
    raise SystemExit(main())
