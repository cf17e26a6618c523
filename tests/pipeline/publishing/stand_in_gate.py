"""A gate for tests of releases that answers at once; every other stage is real."""

from dataclasses import replace

from scalegate.pipeline.records.artifact import Artifact
from scalegate.pipeline.validation.options import asked_bounds, asked_workload
from scalegate.pipeline.validation.servers import effective_options, sized_options
from scalegate.serving_check.evidence.emulation import EmulatedProducts
from scalegate.serving_check.gate.record import judged_again
from scalegate.serving_check.settings import WorkloadSettings
from scalegate.tests.pipeline.publishing.passed_artifact import give_verdict, passing_verdict
from scalegate.tests.serving_check.gate_samples import sample_evidence


class StandInGate:
    """Answers at once, as its `status` says."""

    status = "pass"
    runs = 0
    emulated: tuple[EmulatedProducts, ...] = ()
    stored_as: str | None = None
    """The form that the baseline's weights lie in, below 16 bits."""

    def __call__(self, folder, **asked):
        self.runs += 1
        manifest = Artifact.read(folder)
        load = asked_workload(asked, asked["input_len"], WorkloadSettings.seed)
        environment = passing_verdict(manifest).environment
        recorded = effective_options(sized_options(asked, load))
        measured = {"emulated": self.emulated}
        lacking = {"fail": {"compiled": ({}, {"a kernel": 1})}, "inconclusive": {"baseline_canary": ()}}
        verdict = passing_verdict(
            manifest,
            evidence=sample_evidence(
                dict.fromkeys(load.ms, 1.0), load=load, **measured, **lacking.get(self.status, {})
            ),
            environment=replace(environment, engine_options=recorded),
            workload=load,
            bounds=asked_bounds(manifest.recipe, asked),
            report={},
        )
        baseline = replace(verdict.baseline, weights_sha256=manifest.source_sha256, stored_as=self.stored_as)
        verdict = replace(verdict, baseline=baseline)
        verdict = judged_again(verdict)
        assert verdict.status == self.status
        give_verdict(folder, manifest, verdict)
        return verdict
