"""Writes a verdict down: into the artifact and the report's folder, with its pages, plots and signature.

The verdict comes first and is bound to its report afterwards, because a failing report must not cost the
verdict.
"""

import hashlib
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path

from ...base.log import logger
from ...serving_check.evidence.verdict import Verdict
from ..records.artifact import SIGNATURE_NAME, VERDICT_NAME, Artifact
from ..records.file_digests import sha256_of
from ..records.sensitivity_table import shown
from ..records.signature import sign_file


@dataclass(frozen=True)
class Place:
    """A folder that a verdict and its report are written into."""

    name: str
    folder: Path
    report: Path
    manifest: Artifact | None = None
    """The artifact's manifest, which then gets the verdict's digest; None in other folders."""

    def write(self, verdict: Verdict) -> bool:
        """Write the verdict; return whether that succeeded. If writing fails, older files are removed: an
        earlier pass must not outlive a fail.
        """
        with _or_a_note(f"{self.name}'s verdict", self._remove) as written:
            (self.folder / SIGNATURE_NAME).unlink(missing_ok=True)
            verdict.write(self.folder / VERDICT_NAME)
            if self.manifest is not None:
                self.manifest.verdict_sha256 = sha256_of(self.folder / VERDICT_NAME)
                self.manifest.write(self.folder)
        return bool(written)

    def write_pages(self, pages: Mapping[str, bytes]) -> bool:
        """Write the pages; return whether that succeeded. The artifact's report is replaced as a whole."""
        if self.manifest is not None:
            shutil.rmtree(self.report, ignore_errors=True)
        from ..report.write import write_files

        with _or_a_note(f"{self.name}'s pages") as written:
            write_files(self.report, pages)
        return bool(written)

    def _remove(self) -> None:
        with suppress(OSError):
            (self.folder / VERDICT_NAME).unlink(missing_ok=True)


def write_down(verdict: Verdict, places: Sequence[Place], key: Path | None) -> Verdict:
    """Write the verdict at once, then again with the digests of its report, then the signature.

    Return the verdict with the digests of its report.
    """
    places = [place for place in places if place.write(verdict)]
    pages: dict[str, bytes] = {}
    if places:
        with _or_a_note("the report"):
            # Imported here: plots take a library that takes half a second.
            from ..report.write import render_report

            manifest = next((place.manifest for place in places if place.manifest is not None), None)
            pages = render_report(verdict, None if manifest is None else shown(manifest.quantization))
    bound = replace(verdict, report={n: hashlib.sha256(page).hexdigest() for n, page in pages.items()})
    for place in places:
        if pages and place.write_pages(pages):
            place.write(bound)
        if key is not None:
            with _or_a_note("the signature"):
                sign_file(place.folder / VERDICT_NAME, key)
    return bound


@contextmanager
def _or_a_note(what: str, clean: Callable[[], None] = lambda: None) -> Iterator[list[str]]:
    """Report a failure inside the `with` block and clean up after it: a full disk or a faulty plot must not
    cost a verdict that took hours. The list that is yielded holds `what` if everything went well.
    """
    done: list[str] = []
    try:
        yield done
        done.append(what)
    except Exception as error:
        clean()
        logger.warning(f"{what} could not be written ({error}); the verdict stands")
