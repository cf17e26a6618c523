"""Signs the verdict of an artifact, once the artifact's records hold together: `pipeline sign`."""

from pathlib import Path

from ...base.errors import UserError
from ..publishing.examination import examine
from ..records.artifact import VERDICT_NAME, Artifact
from ..records.signature import Signature, check_signature, sign_file


def sign(artifact: str | Path, key: str | Path) -> Signature:
    """Sign the verdict in the folder `artifact` with the SSH key in the file `key`.

    Raise UserError if there is no verdict, or it does not match the files in the folder.
    """
    folder = Path(artifact).expanduser()
    found = examine(folder, Artifact.read(folder))
    for finding in found.findings:
        if finding.holds == "no" and finding.name != "signature":
            raise UserError(finding.said)
    if found.verdict is None:
        raise UserError(f"{folder} has no verdict to sign; run `pipeline validate {folder}`")
    sign_file(folder / VERDICT_NAME, Path(key))
    return check_signature(folder / VERDICT_NAME)
