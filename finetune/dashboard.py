"""`finetune dashboard [FOLDER]`: TensorBoard on all runs below a folder, with the link to the review."""

from __future__ import annotations

import argparse
import contextlib
import io
import logging
import threading
from pathlib import Path

from finetune.errors import RunError, UserError
from finetune.runtime.command import DONE, print_line, run_with_options
from finetune.runtime.files import write_json
from finetune.runtime.options import Options
from finetune.text import counted

PURPOSE = (
    "Start TensorBoard on all runs below FOLDER (default: outputs), and print the link to the review. Ctrl-C ends it."
)
FOLDER = "outputs"
LOOPBACK = "localhost"


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
    from finetune.review.run import newest_first

    options, _ = own_options().split(argv)
    if not options.folder.is_dir():
        raise UserError(f"no such folder: {options.folder}. Give the folder that holds the runs.")
    runs = newest_first(options.folder)
    if not runs:
        raise UserError(f"no run below this folder: {options.folder}. Give the output_dir of a run, or a folder above.")
    address = start(options.folder, options.host, options.port)
    found = {"folder": str(options.folder), "runs": len(runs), **links(address)}
    print_line(f"TensorBoard on {counted(len(runs), 'run')} below {options.folder}. Ctrl-C ends it.")
    print_line(f"  review: {found['review']}")
    print_line(f"  charts: {found['charts']}")
    if options.json:
        write_json(options.json, found)
    threading.Event().wait()  # for Ctrl-C
    return DONE


def links(address: str) -> dict[str, str]:
    """Addresses of the Review tab and of the time series, whose curves are not smoothed.

    Args:
        address: of TensorBoard, such as http://localhost:6006/.
    """
    return {"review": f"{address}#finetune", "charts": f"{address}?smoothing=0#timeseries"}


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
    server = program.TensorBoard(plugins=[core, ReviewPlugin, *others])
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


def _port(text: str) -> int:
    """A port number; 0 takes any that is free."""
    if not text.isdecimal() or int(text) > 65535:
        raise argparse.ArgumentTypeError(f"expected a port from 0 to 65535, got {text!r}")
    return int(text)


if __name__ == "__main__":
    raise SystemExit(main())
