"""Whether the Hub can be reached, known within seconds: the libraries try each file ten times."""

from __future__ import annotations

import os
import threading
import time

from finetune.errors import UserError
from finetune.runtime.bootstrap import http_library
from finetune.runtime.command import warn

HUB_SECONDS = 4.0  # to connect to the Hub; a connection takes a few round trips, and a second try for a lost packet


def use_cache_without_network() -> None:
    """If the Hub cannot be reached, behave as with HF_HUB_OFFLINE=1: the libraries would request each file several
    times before they use the cached one. Call it before they are imported."""
    from huggingface_hub import constants

    if why_unreachable(tries=1) is not None:
        warn(f"{constants.ENDPOINT} cannot be reached; using the files in the cache.")
        os.environ["HF_HUB_OFFLINE"] = "1"
        constants.HF_HUB_OFFLINE = True


def check_hub(given: str) -> None:
    """Check that the Hub can be reached: the libraries try ten times before they give up.

    Args:
        given: the key and its value.

    Raises:
        UserError: it cannot.
    """
    from huggingface_hub import constants

    if (why := why_unreachable()) is not None:
        raise UserError(
            f"{constants.ENDPOINT} cannot be reached ({why}), and {given}, which is neither a local folder nor in the "
            "cache. Check the network, HF_ENDPOINT and the proxy variables, then the spelling; or give a folder."
        )


def why_unreachable(tries: int = 2) -> str | None:
    """Why the Hub cannot be reached, known within HUB_SECONDS; None if it can. A slow answer is an answer.

    A thread asks, because nothing else bounds the time that looking up the host's name takes.
    """
    found: list[str | None] = []
    asking = threading.Thread(target=lambda: found.append(_try_to_connect(tries)), daemon=True)
    asking.start()
    asking.join(HUB_SECONDS)
    return found[0] if found else f"no connection within {HUB_SECONDS:.0f} s"


def _try_to_connect(tries: int) -> str | None:
    """The error of connecting to the Hub, 1 s apart; None once it is connected."""
    from huggingface_hub import constants
    from huggingface_hub.utils import get_session

    why, httpx = None, http_library()
    for left in reversed(range(tries)):
        try:
            get_session().head(constants.ENDPOINT, timeout=httpx.Timeout(HUB_SECONDS - 1, read=1.0))
            return None
        except (httpx.ConnectError, httpx.ConnectTimeout) as error:  # no route, no such host, refused, or dropped
            why = str(error) or "the connection timed out"
            time.sleep(1 if left else 0)
        except httpx.HTTPError:  # slow, or a response that only the real request can interpret
            return None
    return why


def hub_is_off() -> bool:
    from huggingface_hub import constants

    return constants.HF_HUB_OFFLINE
