"""The Review tab of TensorBoard: what limits each run, in words and pictures.

TensorBoard loads plugins without a guard, so an error here would keep the user's TensorBoard from starting. This module
therefore imports the standard library and TensorBoard alone; the review is imported when the tab asks for it, and every
failure becomes a sentence in the tab.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tensorboard.backend import http_util
from tensorboard.plugins import base_plugin
from werkzeug import Request

from finetune.runtime.types import JsonObject

if TYPE_CHECKING:
    from finetune.review.run import Found

MOST_RUNS = 50  # the last ones to write; a review of each costs up to half a second when it has changed
LOOK_AGAIN_SECONDS = 60.0  # between two searches for a first run

log = logging.getLogger(__name__)


class ReviewPlugin(base_plugin.TBPlugin):
    """Serves the tab's script and the review of all runs below TensorBoard's log folder."""

    plugin_name = "finetune"

    def __init__(self, context: base_plugin.TBContext) -> None:
        self._folder = Path(context.logdir).expanduser() if context.logdir else None
        self._lock = threading.Lock()  # TensorBoard answers each request in a thread of its own
        self._active = False
        self._look_again = 0.0
        self._state: object = None
        self._renew_after = 0.0
        self._review: JsonObject = {}

    def get_plugin_apps(self) -> JsonObject:
        return {"/tab.js": self._serve_script, "/review": self._serve_review}

    def frontend_metadata(self) -> base_plugin.FrontendMetadata:
        return base_plugin.FrontendMetadata(es_module_path="/tab.js", tab_name="Review")

    def is_active(self) -> bool:
        """Whether there is a run to review. TensorBoard asks at every reload of its page."""
        if not self._active and time.monotonic() >= self._look_again:
            self._look_again = time.monotonic() + LOOK_AGAIN_SECONDS
            try:
                from finetune.review.run import find

                self._active = self._folder is not None and bool(find(self._folder))
            except Exception:
                log.exception("The Review tab could not search %s for runs", self._folder)
        return self._active

    def _serve_script(self, environ: Any, start_response: object) -> Iterable[bytes]:
        script = Path(__file__).with_name("tab.js").read_text(encoding="utf-8")
        return http_util.Respond(Request(environ), script, "text/javascript")(environ, start_response)

    def _serve_review(self, environ: Any, start_response: object) -> Iterable[bytes]:
        return http_util.Respond(Request(environ), self.review(), "application/json")(environ, start_response)

    def review(self) -> JsonObject:
        """What the tab shows: `finetune.review.page.content` of all runs, or {"error": a sentence}."""
        try:
            with self._lock:
                return self._current_review()
        except Exception as error:
            log.exception("The Review tab failed")
            return {"error": f"The review failed: {type(error).__name__}: {error}. TensorBoard's log has the details."}

    def _current_review(self) -> JsonObject:
        """The review of the files as they are, made anew if one has changed: but at most a tenth of the time."""
        from finetune.review.run import newest_first

        if self._folder is None:
            return {"error": "The Review tab needs TensorBoard's --logdir. Start TensorBoard with it."}
        found = newest_first(self._folder)
        state = [run.state for run in found]
        if state != self._state and time.monotonic() >= self._renew_after:
            began = time.monotonic()
            self._review = _review(found)
            self._state = state
            self._renew_after = time.monotonic() + 9 * (time.monotonic() - began)
        return self._review


def _review(found: list[Found]) -> JsonObject:
    """The review of the runs that wrote last. A run that cannot be reviewed does not hide the others."""
    from finetune.review.assemble import review
    from finetune.review.page import content

    shown = found[:MOST_RUNS]
    try:
        made = review([run.folder for run in shown]).to_dict()
    except Exception:
        log.exception("A run could not be reviewed; each is reviewed alone")
        made = {"runs": [_alone(run) for run in shown], "comparison": {}}
    for run, reviewed in zip(shown, made["runs"], strict=True):
        reviewed["tensorboard"] = run.name
    return content(made) | {"left_out": len(found) - len(shown)}


def _alone(run: Found) -> JsonObject:
    from finetune.review.assemble import review

    try:
        return review([run.folder]).to_dict()["runs"][0]
    except Exception as error:
        verdict = f"This run could not be reviewed: {type(error).__name__}: {error}"
        return {"run": run.folder.name, "verdict": verdict, "findings": [], "status": "unreadable"}
