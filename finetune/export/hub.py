"""Uploads an export to a repository on the Hub. The token is the one of `hf auth login` or HF_TOKEN: it is read by
huggingface_hub alone, and neither written nor printed."""

from __future__ import annotations

import re
from pathlib import Path

from finetune.errors import RunError, UserError
from finetune.runtime.types import JsonObject

_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


def check_name(repo: str | None) -> str:
    """The repository's name, if it is USER/NAME.

    Raises:
        UserError: it is not.
    """
    from huggingface_hub.utils import HFValidationError, validate_repo_id

    if repo is None:
        raise UserError("--to hub needs the name of a repository: give --repo USER/NAME.")
    try:
        validate_repo_id(repo)
        valid = _NAME.fullmatch(repo) is not None
    except HFValidationError:
        valid = False
    if not valid:
        raise UserError(f"--repo must be USER/NAME or ORGANIZATION/NAME: got {repo!r}.")
    return repo


def check_token() -> None:
    """Check that there is a token, before anything is exported.

    Raises:
        UserError: there is none, or HF_HUB_OFFLINE is set.
    """
    from huggingface_hub import constants, get_token

    if constants.HF_HUB_OFFLINE:
        raise UserError("HF_HUB_OFFLINE is set, so nothing can be uploaded. Unset it, or leave out --upload.")
    if get_token() is None:
        raise UserError("There is no token for the Hub. Run `hf auth login`, or set HF_TOKEN.")


def files(folder: Path) -> list[JsonObject]:
    """{name, bytes} of each file that would be uploaded."""
    paths = sorted(path for path in folder.rglob("*") if path.is_file() and path.name != "export.json")
    return [{"name": path.relative_to(folder).as_posix(), "bytes": path.stat().st_size} for path in paths]


def upload(folder: Path, repo: str, *, private: bool) -> str:
    """Create the repository if it does not exist, and upload the folder's files in one commit. Returns its address.

    Raises:
        RunError: the Hub refused or could not be reached.
    """
    import httpx
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError

    api = HfApi()
    try:
        api.create_repo(repo, private=private, exist_ok=True)
        done = api.upload_folder(
            repo_id=repo, folder_path=folder, ignore_patterns=["export.json"], commit_message="Upload model"
        )
    except HfHubHTTPError as error:
        status = error.response.status_code if error.response is not None else None
        if status in (401, 403):
            raise RunError(
                f"The Hub refused to write to {repo}: the token is wrong or may not write there (status {status}). Use "
                f"a token with write access. The export is in {folder}."
            ) from None
        raise _unreachable(error, folder) from None
    except (httpx.HTTPError, OSError) as error:
        raise _unreachable(error, folder) from None
    return str(done.commit_url)


def _unreachable(error: Exception, folder: Path) -> RunError:
    from huggingface_hub import constants

    lines = str(error).strip().splitlines() or [type(error).__name__]
    return RunError(
        f"{constants.ENDPOINT} returned an unexpected response ({lines[0][:200]}). Try again later. The export is in "
        f"{folder}."
    )
