"""Local server with the part of the Hugging Face Hub that downloads use, and its cache."""

import contextlib
import dataclasses
import hashlib
import http.server
import json
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import unquote, urlsplit

# HTTP status and ``X-Error-Code`` of the Hub's answer, by the name of an unreadable repository.
REFUSALS = {
    "owner/gated": (403, "GatedRepo"),
    "owner/private": (401, "RepoNotFound"),
    "owner/broken": (500, ""),
}


def commit_of(directory: Path) -> str:
    """Returns a commit id: a hash of the files' names and sizes."""
    names = sorted(f"{path.name} {path.stat().st_size}" for path in directory.iterdir())
    return hashlib.sha1("\0".join(names).encode()).hexdigest()


def add_to_cache(cache: Path, repository: str, directory: Path) -> Path:
    """Adds a directory to a huggingface_hub cache as ``main``; returns the snapshot's path."""
    folder = cache / f"models--{repository.replace('/', '--')}"
    commit = commit_of(directory)
    snapshot = folder / "snapshots" / commit
    for made in (snapshot, folder / "blobs", folder / "refs"):
        made.mkdir(parents=True, exist_ok=True)
    (folder / "refs" / "main").write_text(commit)
    for path in directory.iterdir():
        blob = folder / "blobs" / hashlib.sha256(path.read_bytes()).hexdigest()
        shutil.copyfile(path, blob)
        (snapshot / path.name).symlink_to(Path("../..", "blobs", blob.name))
    return snapshot


@dataclasses.dataclass
class Hub:
    """Hub of repositories, each a directory with the files of its ``main``."""

    address: str = ""
    repositories: dict[str, Path] = dataclasses.field(default_factory=dict)
    # Directories of earlier commits, by commit.
    earlier: dict[str, Path] = dataclasses.field(default_factory=dict)
    # Downloaded files, as ``OWNER/NAME/FILE``.
    sent: list[str] = dataclasses.field(default_factory=list)

    def answer(self, path: str) -> tuple[int, dict[str, str], bytes]:
        """Returns HTTP status, headers and content of the answer to a request for ``path``."""
        kind, *parts = [unquote(part) for part in urlsplit(path).path.strip("/").split("/")]
        if kind == "api":
            if parts[0] != "models":
                return 404, {}, b""
            _, owner, name, *what = parts
        else:
            owner, (name, *what) = kind, parts
        repository = f"{owner}/{name}"
        if repository in REFUSALS:
            status, code = REFUSALS[repository]
            return status, {"X-Error-Code": code}, b""
        if repository not in self.repositories:
            return 404, {"X-Error-Code": "RepoNotFound"}, b""
        directory = self.repositories[repository]
        return self._of(repository, directory, *what)

    def _of(self, repository, directory, what="revision", revision="main", *rest):
        directory = self.earlier.get(revision, directory)
        commit = commit_of(directory)
        if revision not in ("main", commit):
            return 404, {"X-Error-Code": "RevisionNotFound"}, b""
        files = sorted(path.name for path in directory.iterdir())
        if what == "revision":
            siblings = [{"rfilename": name} for name in files]
            return _json({"id": repository, "sha": commit, "siblings": siblings})
        if what == "tree":
            return _json([_entry(directory / name) for name in files])
        assert what == "resolve"
        path = directory / rest[0]
        if not path.is_file():
            return 404, {"X-Error-Code": "EntryNotFound"}, b""
        headers = {"X-Repo-Commit": commit, "ETag": f'"{_entry(path)["oid"]}"'}
        return 200, headers, path.read_bytes()


def _entry(path: Path) -> dict:
    digest = hashlib.sha1(path.read_bytes()).hexdigest()
    return {"type": "file", "path": path.name, "size": path.stat().st_size, "oid": digest}


def _json(values) -> tuple[int, dict[str, str], bytes]:
    return 200, {"Content-Type": "application/json"}, json.dumps(values).encode()


@contextlib.contextmanager
def serving() -> Iterator[Hub]:
    """Yields a Hub that serves at its ``address`` on this machine until the context ends."""
    hub = Hub()

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            status, headers, content = hub.answer(self.path)
            # Noted before it is sent: a client may read ``sent`` as soon as it has the content.
            if self.command == "GET" and "/resolve/" in self.path:
                owner, name, *_, file = self.path.strip("/").split("/")
                hub.sent.append(f"{owner}/{name}/{file}")
            self.send_response(status)
            for name, value in {**headers, "Content-Length": str(len(content))}.items():
                self.send_header(name, value)
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(content)

        def do_HEAD(self):
            self.do_GET()

        def log_message(self, *_):
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    hub.address = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, args=[0.02], daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
