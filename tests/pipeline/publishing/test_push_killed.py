"""A push that is killed or cut off, and run again: nothing partial is ever seen, nothing is sent twice."""

import pytest
from scalegate.tests.exhaustive import exhaustive_but
from scalegate.tests.pipeline.publishing.fake_hub import INITIAL_FILES, Drop, Request
from scalegate.tests.pipeline.publishing.passed_artifact import make_artifact

REPO = "org/model"
ONE_RELEASE = 2
"""Commits of a repository that was created and released once."""


def release_files(artifact):
    names = {path.relative_to(artifact).as_posix() for path in artifact.rglob("*") if path.is_file()}
    return sorted(names - {".scalegate-push.json"} | {"README.md"} | set(INITIAL_FILES))


class KillAt:
    """Kills the client with SIGKILL when the `count`th request of a step arrives."""

    def __init__(self, step: str, count: int = 1):
        self.step, self.left, self.process = step, count, None

    def __call__(self, request: Request) -> None:
        if request.step != self.step or self.process is None:
            return
        self.left -= 1
        if self.left == 0:
            self.process.kill()
            self.process.wait()
            raise Drop


def push_until_killed(hub, pipeline, artifact, moment, step, count):
    kill = KillAt(step, count)
    setattr(hub, moment, kill)
    kill.process = pipeline.start("push", artifact, "--to", REPO, **hub.environment())
    kill.process.communicate(timeout=120)
    assert kill.left == 0, "the push ended before it was killed"
    assert kill.process.returncode == -9
    setattr(hub, moment, lambda request: None)


@pytest.mark.parametrize(
    ("moment", "step", "count"),
    exhaustive_but(
        [
            ("after", "POST create", 1),
            ("half_way", "PUT lfs", 1),
            ("half_way", "PUT lfs", 3),
            ("after", "PUT lfs", 2),
            ("before", "POST commit", 1),
            ("after", "POST commit", 1),
            ("before", "GET resolve", 4),
            ("before", "PUT settings", 1),
            ("after", "PUT settings", 1),
        ],
        ("after", "POST create", 1),
        ("half_way", "PUT lfs", 3),
        ("after", "POST commit", 1),
        ("before", "PUT settings", 1),
    ),
)
def test_killed_and_run_again(hub, pipeline, artifact, moment, step, count):
    push_until_killed(hub, pipeline, artifact, moment, step, count)
    went_public = (moment, step) == ("after", "PUT settings")
    assert hub.visible_files(REPO) == (release_files(artifact) if went_public else [])
    assert len(hub.repos[REPO].history()) <= ONE_RELEASE

    result = pipeline("push", artifact, "--to", REPO, **hub.environment())
    assert result.returncode == 0, result.stderr
    assert hub.visible_files(REPO) == release_files(artifact)
    assert len(hub.repos[REPO].history()) == ONE_RELEASE
    assert set(hub.uploads.values()) == {1}, "an upload that was complete was sent again"
    files = hub.repos[REPO].history()[0].files.values()
    assert hub.bytes_received == sum(file.size for file in files if file.sha256)
    assert not (artifact / ".scalegate-push.json").exists()


def test_the_earlier_release_stays_whole_until_the_new_one_is(hub, pipeline, artifact, tmp_path):
    assert pipeline("push", artifact, "--to", REPO, **hub.environment()).returncode == 0
    before = hub.repos[REPO].history()[0]
    second = make_artifact(tmp_path / "second", seed=1)
    push_until_killed(hub, pipeline, second, "half_way", "PUT lfs", 2)
    assert hub.repos[REPO].history()[0] is before
    assert not hub.repos[REPO].private
    assert pipeline("push", second, "--to", REPO, **hub.environment()).returncode == 0
    assert len(hub.repos[REPO].history()) == ONE_RELEASE + 1
    assert set(hub.uploads.values()) == {1}


def test_a_connection_cut_in_an_upload_is_taken_up_again_by_itself(hub, pipeline, artifact):
    cuts = []

    def cut_once(request: Request) -> None:
        if not cuts:
            cuts.append(request.path)
            raise Drop

    hub.half_way = cut_once
    result = pipeline("push", artifact, "--to", REPO, **hub.environment())
    assert result.returncode == 0, result.stderr
    assert cuts and set(hub.uploads.values()) == {1}


def test_a_commit_whose_answer_was_lost_is_not_made_twice(hub, pipeline, artifact):
    def lose_the_answer(request: Request) -> None:
        if request.step == "POST commit":
            raise Drop

    hub.after = lose_the_answer
    cut = pipeline("push", artifact, "--to", REPO, **hub.environment())
    assert cut.returncode == 2
    assert "no connection" in cut.stderr and "run the same command again" in cut.stderr
    assert hub.visible_files(REPO) == []
    hub.after = lambda request: None
    assert pipeline("push", artifact, "--to", REPO, **hub.environment()).returncode == 0
    assert len(hub.repos[REPO].history()) == ONE_RELEASE
    assert hub.visible_files(REPO) == release_files(artifact)


def test_a_repository_that_could_not_be_created_is_not_ours_to_publish_later(hub, pipeline, artifact):
    refused = pipeline("push", artifact, "--to", REPO, **hub.environment("hf_reader"))
    assert refused.returncode == 2
    hub.add_repo(REPO, private=True)
    assert pipeline("push", artifact, "--to", REPO, **hub.environment()).returncode == 0
    assert hub.repos[REPO].private
