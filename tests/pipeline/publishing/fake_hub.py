"""A Hugging Face Hub in a thread, speaking the real protocol over HTTP to the real `huggingface_hub` client.

It keeps repositories with visibility, branches, commits and LFS objects in memory, counts what is uploaded,
and breaks on request. Not for Xet storage: clients set HF_HUB_DISABLE_XET=1.
"""

import base64
import hashlib
import json
import re
import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

INITIAL_FILES = {".gitattributes": b"*.safetensors filter=lfs diff=lfs merge=lfs -text\n"}
LFS_SUFFIXES = (".safetensors", ".png", ".bin")
DATE = "2026-01-01T00:00:00.000Z"


@dataclass
class StoredFile:
    """A file of a commit: the digest its index promises, and the content its storage gives back."""

    content: bytes
    size: int
    git_oid: str
    sha256: str | None = None


@dataclass
class Commit:
    oid: str
    parent: str | None
    title: str
    files: dict[str, StoredFile]


@dataclass
class Repo:
    private: bool
    owner: str
    branches: dict[str, str] = field(default_factory=dict)
    commits: dict[str, Commit] = field(default_factory=dict)
    lfs: dict[str, bytes] = field(default_factory=dict)
    pull_requests: list[str] = field(default_factory=list)

    def history(self, revision: str = "main") -> list[Commit]:
        """Newest first."""
        oid = self.branches.get(revision, revision)
        commits = []
        while oid is not None and oid in self.commits:
            commits.append(self.commits[oid])
            oid = self.commits[oid].parent
        return commits


@dataclass
class Request:
    """What a fault sees: `step` is `PUT lfs`, `POST commit`, `POST create` and the like."""

    method: str
    path: str
    step: str
    handler: "Handler"


class Drop(Exception):
    """Raised by a fault: close the connection with no answer."""


class Refuse(Exception):
    """Raised by a fault: answer with this status."""

    def __init__(self, status: int, message: str = "", headers: dict[str, str] | None = None):
        self.status, self.message, self.headers = status, message, headers or {}


class FakeHub:
    """`with FakeHub() as hub:` serves at `hub.url`. `hf_writer` may write to `org`, `hf_reader` only read."""

    def __init__(self) -> None:
        self.repos: dict[str, Repo] = {}
        self.tokens = {"hf_writer": "org", "hf_reader": "someone"}
        self.uploads: Counter[str] = Counter()
        """Completed uploads by sha256."""
        self.bytes_received = 0
        self.requests: list[tuple[str, str]] = []
        self.before: Callable[[Request], None] = lambda request: None
        """Called before a request is handled; may raise Drop or Refuse."""
        self.after: Callable[[Request], None] = lambda request: None
        """Called after a request took effect and before it is answered; may raise Drop."""
        self.half_way: Callable[[Request], None] = lambda request: None
        """Called when half of an upload's body has arrived; may raise Drop."""
        self.lock = threading.RLock()

    def __enter__(self) -> "FakeHub":
        hub = self

        class BoundHandler(Handler):
            pass

        BoundHandler.hub = hub
        self.server = ThreadingHTTPServer(("127.0.0.1", 0), BoundHandler)
        self.server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}"
        threading.Thread(
            target=self.server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True
        ).start()
        return self

    def __exit__(self, *exception: object) -> None:
        self.server.shutdown()
        self.server.server_close()

    def environment(self, token: str | None = "hf_writer") -> dict[str, str]:
        """What a client process needs in its environment before it imports `huggingface_hub`."""
        environment = {"HF_ENDPOINT": self.url, "HF_HUB_DISABLE_XET": "1", "HF_HUB_DISABLE_TELEMETRY": "1"}
        if token is not None:
            environment["HF_TOKEN"] = token
        return environment

    def add_repo(self, repo_id: str, files: dict[str, bytes] | None = None, private: bool = False) -> Repo:
        """A repository with its first commit, and a second one where `files` are given."""
        repo = self.repos[repo_id] = Repo(private, repo_id.split("/")[0])
        self.commit(repo, "main", "initial commit", {n: stored(n, c) for n, c in INITIAL_FILES.items()})
        if files:
            self.commit(
                repo, "main", "add files", {name: stored(name, content) for name, content in files.items()}
            )
        return repo

    def commit(
        self,
        repo: Repo,
        branch: str,
        title: str,
        changed: dict[str, StoredFile],
        deleted: tuple[str, ...] = (),
    ) -> Commit:
        parent = repo.branches.get(branch)
        files = dict(repo.commits[parent].files) if parent else {}
        files |= changed
        for path in deleted:
            del files[path]
        tree = json.dumps([parent, title, sorted((path, file.git_oid) for path, file in files.items())])
        oid = hashlib.sha1(tree.encode()).hexdigest()
        commit = repo.commits[oid] = Commit(oid, parent, title, files)
        repo.branches[branch] = oid
        return commit

    def visible_files(self, repo_id: str, revision: str = "main") -> list[str]:
        """What a stranger sees; nothing of a private repository."""
        repo = self.repos.get(repo_id)
        if repo is None or repo.private or revision not in repo.branches:
            return []
        return sorted(repo.commits[repo.branches[revision]].files)

    def written(self) -> list[tuple[str, str]]:
        """The requests that change something; the question whether a card is valid is none."""
        return [
            (method, path)
            for method, path in self.requests
            if method not in ("GET", "HEAD") and not path.endswith("/validate-yaml")
        ]


def stored(path: str, content: bytes) -> StoredFile:
    is_lfs = path.endswith(LFS_SUFFIXES)
    sha256 = hashlib.sha256(content).hexdigest() if is_lfs else None
    pointer = (
        f"version https://git-lfs.github.com/spec/v1\noid sha256:{sha256}\nsize {len(content)}\n".encode()
    )
    return StoredFile(content, len(content), git_oid(pointer if is_lfs else content), sha256)


def git_oid(content: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True  # headers and body leave in two writes; do not wait 40 ms between them
    hub: FakeHub

    ROUTES = (
        ("POST", r"/api/repos/create", "create"),
        ("POST", r"/api/validate-yaml", "validate_yaml"),
        ("GET", r"/api/models/(?P<repo>[^/]+/[^/]+)", "info"),
        ("GET", r"/api/models/(?P<repo>[^/]+/[^/]+)/revision/(?P<rev>[^/]+)", "info"),
        ("GET", r"/api/models/(?P<repo>[^/]+/[^/]+)/tree/(?P<rev>[^/]+)", "tree"),
        ("GET", r"/api/models/(?P<repo>[^/]+/[^/]+)/commits/(?P<rev>[^/]+)", "commits"),
        ("GET", r"/api/models/(?P<repo>[^/]+/[^/]+)/discussions", "discussions"),
        ("POST", r"/api/models/(?P<repo>[^/]+/[^/]+)/preupload/(?P<rev>[^/]+)", "preupload"),
        ("POST", r"/api/models/(?P<repo>[^/]+/[^/]+)/commit/(?P<rev>[^/]+)", "commit"),
        ("POST", r"/api/models/(?P<repo>[^/]+/[^/]+)/branch/(?P<rev>[^/]+)", "branch"),
        ("PUT", r"/api/models/(?P<repo>[^/]+/[^/]+)/settings", "settings"),
        ("POST", r"/(?P<repo>[^/]+/[^/]+)\.git/info/lfs/objects/batch", "lfs_batch"),
        ("POST", r"/(?P<repo>[^/]+/[^/]+)\.git/info/lfs/verify", "lfs_verify"),
        ("PUT", r"/lfs/(?P<repo>[^/]+/[^/]+)/(?P<oid>[0-9a-f]{64})", "lfs"),
        ("(GET|HEAD)", r"/(?P<repo>[^/]+/[^/]+)/resolve/(?P<rev>[^/]+)/(?P<file>.+)", "resolve"),
    )
    WRITES = ("create", "preupload", "commit", "branch", "settings", "lfs_batch", "lfs_verify")

    def do_GET(self) -> None:
        self._dispatch()

    do_HEAD = do_POST = do_PUT = do_GET

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def _dispatch(self) -> None:
        url = urlsplit(self.path)
        self.query = parse_qs(url.query)
        self.hub.requests.append((self.command, self.path))
        route = self._route(url.path)
        if route is None:
            return self._answer_refusal(Refuse(404, f"no route {self.command} {self.path}"))
        match, step = route
        self.groups = {name: unquote(value) for name, value in match.groupdict().items()}
        request = Request(self.command, self.path, f"{self.command} {step}", self)
        try:
            self.hub.before(request)
            self.body = self._read_body(request)
            with self.hub.lock:
                self._authorize(step)
                status, value, headers = getattr(self, step)()
            self.hub.after(request)
        except Refuse as refusal:
            self._answer_refusal(refusal)
        except Drop:
            self.close_connection = True
            self.connection.close()
        else:
            self._answer(status, value, headers)

    def _route(self, path: str) -> tuple[re.Match[str], str] | None:
        for method, pattern, step in self.ROUTES:
            match = re.fullmatch(pattern, path)
            if match and re.fullmatch(method, self.command):
                return match, step
        return None

    def _read_body(self, request: Request) -> bytes:
        if self.headers.get("Transfer-Encoding") == "chunked":
            return self._read_chunked()
        length = int(self.headers.get("Content-Length") or 0)
        first = self.rfile.read(length // 2)
        if request.step == "PUT lfs":
            self.hub.half_way(request)
        body = first + self.rfile.read(length - length // 2)
        if len(body) < length:
            raise Drop
        return body

    def _read_chunked(self) -> bytes:
        body = b""
        while size := int(self.rfile.readline(), 16):
            body += self.rfile.read(size)
            self.rfile.readline()
        self.rfile.readline()
        return body

    @property
    def user(self) -> str | None:
        header = self.headers.get("Authorization")
        if header is None:
            return None
        user = self.hub.tokens.get(header.removeprefix("Bearer "))
        if user is None:
            raise Refuse(401, "Invalid credentials in Authorization header")
        return user

    def _authorize(self, step: str) -> None:
        if step in ("lfs", "validate_yaml"):  # a signed URL; a pure function
            return
        user = self.user
        if step == "create":
            return
        repo = self.hub.repos.get(self.groups["repo"])
        if repo is None or (repo.private and user != repo.owner):
            raise Refuse(404 if user else 401, "Repository not found", {"X-Error-Code": "RepoNotFound"})
        self.repo = repo
        # Anybody may propose; only the owner may write.
        proposing = "create_pr" in self.query or step in ("lfs_batch", "lfs_verify")
        if step in self.WRITES and user != repo.owner and not (user and proposing):
            raise Refuse(403, "you do not have the rights to write here")

    def _resolve_revision(self) -> Commit:
        revision = self.groups.get("rev", "main")
        commits = self.repo.history(revision)
        if not commits:
            raise Refuse(404, "Invalid rev id", {"X-Error-Code": "RevisionNotFound"})
        return commits[0]

    def create(self) -> tuple:
        body = json.loads(self.body)
        repo_id = f"{body.get('organization') or self.user}/{body['name']}"
        if repo_id.split("/")[0] != self.user:
            raise Refuse(403, "you do not have the rights to create a model there")
        if repo_id in self.hub.repos:
            raise Refuse(409, "You already created this model repo")
        private = body.get("private") or body.get("visibility") == "private"
        self.hub.add_repo(repo_id, private=bool(private))
        return 200, {"url": f"{self.hub.url}/{repo_id}", "name": repo_id}, {}

    def validate_yaml(self) -> tuple:
        content = json.loads(self.body)["content"]
        if not content.startswith("---\n"):
            return 200, {"errors": [], "warnings": [{"message": "empty or missing yaml metadata"}]}, {}
        return 200, {"errors": [], "warnings": []}, {}

    def info(self) -> tuple:
        commit = self._resolve_revision()
        siblings = [{"rfilename": path} for path in sorted(commit.files)]
        repo_id = self.groups["repo"]
        value = {"id": repo_id, "modelId": repo_id, "sha": commit.oid, "private": self.repo.private}
        return 200, value | {"tags": [], "downloads": 0, "likes": 0, "siblings": siblings}, {}

    def tree(self) -> tuple:
        entries = []
        for path, file in sorted(self._resolve_revision().files.items()):
            entry = {"type": "file", "path": path, "size": file.size, "oid": file.git_oid}
            if file.sha256:
                entry["lfs"] = {"oid": file.sha256, "size": file.size, "pointerSize": 130}
            entries.append(entry)
        return 200, entries, {}

    def commits(self) -> tuple:
        commits = self.repo.history(self.groups["rev"])
        return (
            200,
            [{"id": c.oid, "title": c.title, "message": "", "date": DATE, "authors": []} for c in commits],
            {},
        )

    def discussions(self) -> tuple:
        repo = {"name": self.groups["repo"], "type": "model"}
        discussions = [
            {"num": number, "title": title, "status": "open", "isPullRequest": True, "createdAt": DATE}
            | {"author": {"name": "org"}, "repo": repo}
            for number, title in enumerate(self.repo.pull_requests, start=1)
        ]
        return 200, {"count": len(discussions), "start": 0, "discussions": discussions}, {}

    def preupload(self) -> tuple:
        commit = self._resolve_revision()
        files = []
        for file in json.loads(self.body)["files"]:
            mode = "lfs" if file["path"].endswith(LFS_SUFFIXES) else "regular"
            known = commit.files.get(file["path"])
            oid = (known.sha256 or known.git_oid) if known else None
            files.append({"path": file["path"], "uploadMode": mode, "shouldIgnore": False, "oid": oid})
        return 200, {"files": files}, {}

    def lfs_batch(self) -> tuple:
        objects = []
        repo_id = self.groups["repo"]
        for item in json.loads(self.body)["objects"]:
            if item["oid"] not in self.repo.lfs:
                verify = {"href": f"{self.hub.url}/{repo_id}.git/info/lfs/verify"}
                upload = {"href": f"{self.hub.url}/lfs/{repo_id}/{item['oid']}"}
                item = item | {"actions": {"upload": upload, "verify": verify}}
            objects.append(item)
        return 200, {"transfer": "basic", "objects": objects}, {}

    def lfs(self) -> tuple:
        oid = self.groups["oid"]
        if hashlib.sha256(self.body).hexdigest() != oid:
            raise Refuse(400, "the content does not match its oid")
        self.hub.repos[self.groups["repo"]].lfs[oid] = self.body
        self.hub.uploads[oid] += 1
        self.hub.bytes_received += len(self.body)
        return 200, b"", {}

    def lfs_verify(self) -> tuple:
        body = json.loads(self.body)
        if len(self.repo.lfs.get(body["oid"], b"")) != body["size"]:
            raise Refuse(404, "the object is not stored")
        return 200, {}, {}

    def commit(self) -> tuple:
        lines = [json.loads(line) for line in self.body.splitlines()]
        header = lines[0]["value"]
        head = self._resolve_revision()
        if header.get("parentCommit", head.oid) != head.oid:
            raise Refuse(412, "A commit has happened since. Please refresh and try again.")
        changed, deleted = {}, []
        for line in lines[1:]:
            value = line["value"]
            if line["key"] == "file":
                changed[value["path"]] = stored(value["path"], base64.b64decode(value["content"]))
            elif line["key"] == "lfsFile":
                if value["oid"] not in self.repo.lfs:
                    raise Refuse(400, f"{value['path']} was not uploaded")
                changed[value["path"]] = stored(value["path"], self.repo.lfs[value["oid"]])
            else:
                deleted.append(value["path"])
        branch, answer = self.groups["rev"], {}
        if "create_pr" in self.query:
            self.repo.pull_requests.append(header["summary"])
            number = len(self.repo.pull_requests)
            branch = f"refs/pr/{number}"
            self.repo.branches[branch] = head.oid
            answer["pullRequestUrl"] = f"{self.hub.url}/{self.groups['repo']}/discussions/{number}"
        commit = self.hub.commit(self.repo, branch, header["summary"], changed, tuple(deleted))
        url = f"{self.hub.url}/{self.groups['repo']}/commit/{commit.oid}"
        return 200, answer | {"success": True, "commitOid": commit.oid, "commitUrl": url}, {}

    def branch(self) -> tuple:
        start = json.loads(self.body).get("startingPoint", "main")
        if self.groups["rev"] in self.repo.branches:
            raise Refuse(409, "Reference already exists")
        self.repo.branches[self.groups["rev"]] = self.repo.history(start)[0].oid
        return 200, {}, {}

    def settings(self) -> tuple:
        body = json.loads(self.body)
        self.repo.private = bool(body.get("private") or body.get("visibility") == "private")
        return 200, {"private": self.repo.private}, {}

    def resolve(self) -> tuple:
        commit = self._resolve_revision()
        file = commit.files.get(self.groups["file"])
        if file is None:
            raise Refuse(404, "Entry not found", {"X-Error-Code": "EntryNotFound"})
        headers = {"X-Repo-Commit": commit.oid, "ETag": f'"{file.sha256 or file.git_oid}"'}
        headers["Accept-Ranges"] = "bytes"
        asked = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", ""))
        if asked is None:
            return 200, file.content, headers
        start, end = int(asked[1]), min(int(asked[2] or file.size), file.size - 1)
        headers["Content-Range"] = f"bytes {start}-{end}/{file.size}"
        return 206, file.content[start : end + 1], headers

    def _answer(self, status: int, value: Any, headers: dict[str, str]) -> None:
        content = value if isinstance(value, bytes) else json.dumps(value).encode()
        self.send_response(status)
        for name, text in headers.items():
            self.send_header(name, text)
        if not isinstance(value, bytes):
            self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    def _answer_refusal(self, refusal: Refuse) -> None:
        self.close_connection = True
        headers = {"X-Error-Message": refusal.message, "Connection": "close", **refusal.headers}
        self._answer(refusal.status, {"error": refusal.message}, headers)
