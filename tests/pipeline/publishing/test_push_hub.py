"""Publishing to a Hub over its real protocol: one commit, in private until it is whole, and read back."""

import hashlib
import json
import time
from itertools import pairwise

import pytest
from scalegate.pipeline.publishing.hub.rate_limit import seconds_to_wait
from scalegate.tests.pipeline.publishing.fake_hub import INITIAL_FILES, Refuse, Request
from scalegate.tests.pipeline.publishing.passed_artifact import SHARDS, make_artifact

REPO = "org/model"


def release_files(artifact):
    names = {path.relative_to(artifact).as_posix() for path in artifact.rglob("*") if path.is_file()}
    return sorted(names | {"README.md"})


def push(pipeline, hub, artifact, *options, token="hf_writer", to=REPO):
    return pipeline("push", artifact, "--to", to, *options, **hub.environment(token))


def test_a_release_is_one_commit_and_public_when_it_is_done(hub, pipeline, artifact):
    result = push(pipeline, hub, artifact)
    assert result.returncode == 0, result.stderr
    repo = hub.repos[REPO]
    assert [commit.title for commit in repo.history()][1:] == ["initial commit"]
    assert hub.visible_files(REPO) == sorted([*release_files(artifact), *INITIAL_FILES])
    files = repo.history()[0].files
    for shard in SHARDS:
        assert files[shard].content == (artifact / shard).read_bytes()
        assert hub.uploads[files[shard].sha256] == 1
    assert "It is public" in result.stdout


def test_the_repository_is_private_until_every_byte_was_read_back(hub, pipeline, artifact):
    private_at = {}

    def watch(request: Request) -> None:
        if REPO in hub.repos:
            private_at.setdefault(request.step, []).append(hub.repos[REPO].private)

    hub.before = watch
    assert push(pipeline, hub, artifact).returncode == 0
    assert all(all(states) for states in private_at.values())
    assert private_at["POST commit"] == [True]
    assert len(private_at["GET resolve"]) >= len(release_files(artifact))
    assert hub.requests[-1][0] == "PUT" and hub.requests[-1][1].endswith("/settings")


def test_the_same_bytes_again_are_a_no_op_that_says_so(hub, pipeline, artifact):
    push(pipeline, hub, artifact)
    before = len(hub.requests)
    result = push(pipeline, hub, artifact)
    assert result.returncode == 0
    assert "nothing was sent" in result.stdout
    assert {method for method, _ in hub.requests[before:]} == {"GET"}
    assert len(hub.repos[REPO].history()) == 2


def test_a_dry_run_lists_every_operation_and_sends_nothing_that_writes(hub, pipeline, artifact):
    result = push(pipeline, hub, artifact, "--dry-run", "--json")
    assert result.returncode == 0, result.stderr
    operations = json.loads(result.stdout)["operations"]
    added = {o["subject"]: o for o in operations if o["action"] == "add"}
    assert sorted(added) == release_files(artifact)
    for shard in SHARDS:
        content = (artifact / shard).read_bytes()
        assert added[shard]["sha256"] == hashlib.sha256(content).hexdigest()
        assert added[shard]["size"] == len(content)
    assert [o["action"] for o in operations if o["action"] != "add"] == [
        "create",
        "commit",
        "verify",
        "publish",
    ]
    assert hub.requests and hub.written() == []
    assert hub.repos == {}
    assert not list(artifact.glob(".scalegate*"))


def test_a_dry_run_in_words_names_sizes_and_digests(hub, pipeline, artifact):
    result = push(pipeline, hub, artifact, "--dry-run")
    shard = (artifact / SHARDS[0]).read_bytes()
    line = next(line for line in result.stdout.splitlines() if SHARDS[0] in line)
    assert f"{len(shard):,}" in line and hashlib.sha256(shard).hexdigest() in line


def test_a_dry_run_without_a_token_or_a_network_shows_everything_and_asks_nobody(hub, pipeline, artifact):
    without_token = push(pipeline, hub, artifact, "--dry-run", "--json", token=None)
    unreachable = pipeline(
        "push", artifact, "--to", REPO, "--dry-run", HF_ENDPOINT="http://127.0.0.1:9", HF_TOKEN="hf_writer"
    )
    assert (without_token.returncode, unreachable.returncode) == (0, 0), unreachable.stderr
    assert hub.requests == []
    shown = json.loads(without_token.stdout)
    added = [o["subject"] for o in shown["operations"] if o["action"] == "add"]
    assert sorted(added) == release_files(artifact)
    assert shown["gate"].startswith("pass on ") and "at least 1.02 of the baseline" in shown["gate"]
    assert shown["card"].startswith("---\nbase_model: maker/base\n")
    assert "not looked at: there is no Hub access token" in shown["notes"][0]
    assert shown["card"] in unreachable.stdout and shown["gate"] in unreachable.stdout
    assert "not looked at: no connection to http://127.0.0.1:9" in unreachable.stdout
    unusable = push(pipeline, hub, artifact, "--dry-run", token=None, to="no/such/name")
    assert unusable.returncode == 2 and "is not a Hub repository id" in unusable.stderr


def test_private_leaves_the_new_repository_private(hub, pipeline, artifact):
    assert push(pipeline, hub, artifact, "--private").returncode == 0
    assert hub.repos[REPO].private
    assert push(pipeline, hub, artifact).returncode == 0
    assert hub.repos[REPO].private, "a later push does not publish what was left private"


def test_an_existing_repository_keeps_its_visibility(hub, pipeline, artifact):
    hub.add_repo("org/hidden", private=True)
    hub.add_repo("org/shown", private=False)
    hidden, shown = (push(pipeline, hub, artifact, to=f"org/{name}") for name in ("hidden", "shown"))
    assert hidden.returncode == shown.returncode == 0
    assert hub.repos["org/hidden"].private and "stays so" in hidden.stdout
    assert not hub.repos["org/shown"].private
    refused = push(pipeline, hub, artifact, "--private", to="org/shown")
    assert refused.returncode == 2 and "is public" in refused.stderr


def test_create_pr_opens_one_pull_request_and_leaves_main_alone(hub, pipeline, artifact):
    hub.add_repo(REPO, {"notes.txt": b"ours"})
    for token in ("hf_writer", "hf_writer"):
        result = push(pipeline, hub, artifact, "--create-pr", token=token)
        assert result.returncode == 0, result.stderr
        assert "/discussions/1" in result.stdout
    assert len(hub.repos[REPO].pull_requests) == 1
    assert hub.visible_files(REPO) == sorted(["notes.txt", *INITIAL_FILES])
    proposed = hub.repos[REPO].history("refs/pr/1")
    assert set(release_files(artifact)) < set(proposed[0].files)
    assert len(proposed) == 3, "one commit on top of main's two"


def test_create_pr_needs_no_right_to_write(hub, pipeline, artifact):
    hub.add_repo(REPO)
    assert push(pipeline, hub, artifact, "--create-pr", token="hf_reader").returncode == 0
    refused = push(pipeline, hub, artifact, token="hf_reader")
    assert refused.returncode == 2 and "may not write" in refused.stderr


def test_a_new_branch_holds_the_release_and_not_what_main_holds(hub, pipeline, artifact):
    hub.add_repo(REPO, {"model.safetensors": b"the unquantized weights"})
    result = push(pipeline, hub, artifact, "--revision", "int4")
    assert result.returncode == 0, result.stderr
    assert hub.visible_files(REPO, "int4") == sorted([*release_files(artifact), *INITIAL_FILES])
    assert hub.visible_files(REPO) == sorted(["model.safetensors", *INITIAL_FILES])


@pytest.mark.parametrize("name", ["pytorch_model.bin", SHARDS[0]])
def test_weights_of_another_model_are_neither_kept_nor_replaced(hub, pipeline, artifact, name):
    hub.add_repo(REPO, {name: b"another model"})
    result = push(pipeline, hub, artifact)
    assert result.returncode == 2
    assert name in result.stderr and "--revision" in result.stderr
    assert hub.written() == []


def test_a_new_release_removes_what_the_earlier_one_left_over(hub, pipeline, artifact, tmp_path):
    push(pipeline, hub, artifact)
    second = make_artifact(tmp_path / "second", seed=1, shards=SHARDS[:2])
    result = push(pipeline, hub, second)
    assert result.returncode == 0, result.stderr
    assert hub.visible_files(REPO) == sorted([*release_files(second), *INITIAL_FILES])
    assert len(hub.repos[REPO].history()) == 3


@pytest.mark.parametrize("corruption", ["bytes", "digest", "missing"])
def test_reading_back_catches_a_store_that_lost_or_changed_a_file(hub, pipeline, artifact, corruption):
    def corrupt(request: Request) -> None:
        if request.step != "POST commit":
            return
        files = hub.repos[REPO].history()[0].files
        if corruption == "bytes":
            # The index still promises the right digest: only reading the bytes can tell.
            files[SHARDS[1]].content = b"\0" * files[SHARDS[1]].size
        elif corruption == "digest":
            files[SHARDS[1]].sha256 = "0" * 64
        else:
            del files[SHARDS[1]]

    hub.after = corrupt
    result = push(pipeline, hub, artifact)
    assert result.returncode == 2
    assert SHARDS[1] in result.stderr and "does not give back what was sent" in result.stderr
    assert SHARDS[0] not in result.stderr
    assert hub.repos[REPO].private


def test_a_parent_that_moved_is_refused_and_said(hub, pipeline, artifact):
    hub.add_repo(REPO)

    def somebody_else_commits(request: Request) -> None:
        if request.step == "POST commit":
            hub.before = lambda request: None
            hub.commit(hub.repos[REPO], "main", "theirs", {})

    hub.before = somebody_else_commits
    result = push(pipeline, hub, artifact)
    assert result.returncode == 2
    assert "changed while this push was running" in result.stderr
    assert len(hub.repos[REPO].history()) == 2
    assert push(pipeline, hub, artifact).returncode == 0, "the next push goes onto the new commit"
    assert set(hub.uploads.values()) == {1}


def failing(step: str, refusal: Refuse):
    def fault(request: Request) -> None:
        if request.step == step:
            raise refusal

    return fault


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        (failing("POST create", Refuse(403, "no rights in this namespace")), "may not write to org/model"),
        (failing("POST create", Refuse(403, "private storage limit reached")), "hf repos create org/model"),
        (failing("POST commit", Refuse(429, "slow down", {"Retry-After": "9999"})), "try again in 9999 s"),
        (failing("POST commit", Refuse(500, "oops")), "the Hub is in trouble"),
    ],
)
def test_a_refusal_by_the_hub_is_one_clear_message(hub, pipeline, artifact, fault, words):
    hub.before = fault
    result = push(pipeline, hub, artifact)
    assert result.returncode == 2
    assert words in result.stderr
    assert "Traceback" not in result.stderr


def test_a_card_that_the_hub_refuses_is_named_before_anything_is_sent(hub, pipeline, artifact):
    hub.before = failing("POST validate_yaml", Refuse(400, '"license" must be one of apache-2.0, mit'))
    result = push(pipeline, hub, artifact)
    assert result.returncode == 2
    assert "refuses the front matter of README.md" in result.stderr and "must be one of" in result.stderr
    assert "org/model" not in hub.repos


@pytest.mark.parametrize("step", ["POST commit", "POST create", "PUT settings"])
def test_a_rate_limit_is_waited_out_as_its_header_says(hub, pipeline, artifact, step):
    """Twice refused for a second each, then let through."""
    asked = []

    def slow_down(request: Request) -> None:
        if request.step == step:
            asked.append(time.monotonic())
            if len(asked) < 3:
                raise Refuse(429, "slow down", {"Retry-After": "1"})

    hub.before = slow_down
    result = push(pipeline, hub, artifact)
    assert result.returncode == 0, result.stderr
    assert len(asked) == 3 and all(b - a >= 1 for a, b in pairwise(asked))
    assert result.stderr.count("trying again in 1 s") == 2
    assert len(hub.repos[REPO].history()) == 2, "one commit on top of the first"
    assert set(hub.uploads.values()) == {1}, "nothing was uploaded twice"


def test_a_rate_limit_without_end_is_tried_a_bounded_number_of_times(hub, pipeline, artifact):
    hub.before = failing("POST commit", Refuse(429, "slow down", {"Retry-After": "0"}))
    result = push(pipeline, hub, artifact)
    assert result.returncode == 2 and "rate limit" in result.stderr.splitlines()[-1]
    assert len([path for method, path in hub.requests if method == "POST" and "/commit/" in path]) == 5


@pytest.mark.parametrize(
    ("headers", "seconds"),
    [
        ({}, None),
        ({"retry-after": " 7 "}, 7),
        ({"Retry-After": "soon"}, None),
        ({"Retry-After": "Wed, 21 Oct 2015 07:28:00 GMT"}, 0),
        ({"Retry-After": "3", "RateLimit": '"api";r=0;t=55'}, 55),
        ({"Retry-After": "3", "RateLimit": '"api";r=9;t=55'}, 3),
    ],
)
def test_how_long_a_429_asks_to_wait(headers, seconds):
    assert seconds_to_wait(headers) == seconds


def test_a_bad_token_no_token_and_no_network_are_told_apart(hub, pipeline, artifact):
    bad = push(pipeline, hub, artifact, token="hf_expired")
    none = push(pipeline, hub, artifact, token=None)
    unreachable = pipeline(
        "push", artifact, "--to", REPO, HF_ENDPOINT="http://127.0.0.1:9", HF_TOKEN="hf_writer"
    )
    assert "refused the access token" in bad.stderr
    assert "no Hub access token" in none.stderr
    assert "no connection to http://127.0.0.1:9" in unreachable.stderr
    for result in (bad, none, unreachable):
        assert result.returncode == 2
        assert "Traceback" not in result.stderr
