"""Fetching a checkpoint from the Hugging Face Hub; each way it can fail has its own message.

Uploading is in `push.py`. This file does not read the fetched files.
"""

from collections.abc import Sequence
from pathlib import Path

from huggingface_hub import HfApi, constants, errors, snapshot_download

from ...base.errors import UserError
from .hub_access import require_hub_access

IGNORED_FILES = ["*.bin", "*.pt", "*.pth", "*.gguf", "*.h5", "*.msgpack", "*.onnx", "onnx/*", "original/*"]
"""Patterns of files that are not downloaded: other formats of the same weights."""


def download_checkpoint(
    repo_id: str, revision: str | None, ignored: Sequence[str] = IGNORED_FILES
) -> tuple[Path, str]:
    """Download `repo_id`; return its local folder and its commit, from the cache if there is no network."""
    at = f" at revision {revision!r}" if revision else ""
    if not constants.is_offline_mode():
        require_hub_access()
    try:
        info = HfApi().model_info(repo_id, revision=revision)
        commit = str(info.sha)
        folder = snapshot_download(repo_id, revision=commit, ignore_patterns=list(ignored))
        return Path(folder), commit
    except errors.HFValidationError as error:
        raise UserError(
            f"{repo_id!r} is neither a folder nor a Hub id; give a folder that exists or ORG/NAME"
        ) from error
    except errors.GatedRepoError as error:
        raise UserError(
            f"{repo_id} is gated: accept its terms at https://huggingface.co/{repo_id}, "
            "then log in with `hf auth login` (or set HF_TOKEN)"
        ) from error
    except errors.RevisionNotFoundError as error:
        raise UserError(
            f"{repo_id} has no revision {revision!r}; give a branch, tag or commit that exists"
        ) from error
    except errors.RepositoryNotFoundError as error:
        raise UserError(
            f"{repo_id} is not on the Hub, or is private, and there is no such folder here; "
            "check the spelling, or log in with `hf auth login` if it is private"
        ) from error
    except (errors.OfflineModeIsEnabled, errors.LocalEntryNotFoundError) as error:
        return _from_cache(repo_id, revision, at, "the Hub cannot be reached (offline mode)", error)
    except errors.HfHubHTTPError as error:
        status = error.response.status_code
        if status in (401, 403):
            raise UserError(
                f"the Hub refused the access token while reading {repo_id} (HTTP {status}); "
                "renew it with `hf auth login`, or correct or unset HF_TOKEN"
            ) from error
        raise UserError(f"the Hub answered HTTP {status} for {repo_id}{at}; try again later") from error
    except (errors.HTTPError, ConnectionError) as error:  # httpx's own base class: no answer at all
        return _from_cache(repo_id, revision, at, "the Hub cannot be reached", error)
    except OSError as error:
        raise UserError(f"cannot store {repo_id} in the Hub cache: {error}") from error


def _from_cache(
    repo_id: str, revision: str | None, at: str, why: str, cause: BaseException
) -> tuple[Path, str]:
    try:
        folder = Path(snapshot_download(repo_id, revision=revision, local_files_only=True))
    except (errors.LocalEntryNotFoundError, OSError, ValueError):
        raise UserError(
            f"{why}, and {repo_id}{at} is not in the local cache; "
            "check the network (or HF_ENDPOINT), or give a folder"
        ) from cause
    return folder, folder.name
