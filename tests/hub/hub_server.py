"""A model hub on the loopback: the paths of the hub's API that a download takes, and a second host that weights are
redirected to, as the real hub redirects to its storage. Counts what it is asked and what it sends."""

from __future__ import annotations

import hashlib
import json
import re
import threading
from collections.abc import Callable
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import unquote, urlsplit

CHUNK = 1 << 16


class Asked(NamedTuple):
    """One request. host: "hub" or "storage". file: of a repository, "" for the API."""

    host: str
    method: str
    path: str
    file: str
    range: str | None
    token: str | None


class Repo:
    """A repository: the directory its files lie in, and its revisions (every one has the same files).

    edition: part of the files' ETags.
    """

    def __init__(self, folder: Path, refs: dict[str, str] | None = None) -> None:
        self.folder = folder
        self.edition = 1
        self.refs = refs or {"main": hashlib.sha1(str(folder).encode()).hexdigest()}

    def commit(self, revision: str) -> str | None:
        return revision if revision in self.refs.values() else self.refs.get(revision)

    def files(self) -> list[str]:
        return sorted(str(p.relative_to(self.folder)) for p in self.folder.rglob("*") if p.is_file())


Fault = Callable[["_Handler", str], bool]
"""Called with the handler and the file's name before anything is answered; True where it has answered."""


class Hub:
    """Both hosts, in threads. Use it in a `with` block.

    repos: by `owner/name`. faults: by the name of a file, or "api"; `at` says which host they are on. asked: every
    request but those for the hub's registry of agents. sent: bytes of bodies. most: requests to the storage that
    were being answered at the same time.
    """

    def __init__(self, redirect: bool = True) -> None:
        self.redirect = redirect
        self.repos: dict[str, Repo] = {}
        self.faults: dict[tuple[str, str], Fault] = {}
        self.asked: list[Asked] = []
        self.sent = 0
        self.most = self.now = 0
        self.wait_for: threading.Barrier | None = None
        self.lock = threading.Lock()
        self.servers = {"hub": self._server("hub", "127.0.0.1"), "storage": self._server("storage", "localhost")}
        self.url = f"http://127.0.0.1:{self.servers['hub'].server_port}"
        self.storage = f"http://localhost:{self.servers['storage'].server_port}"

    def _server(self, host: str, name: str) -> ThreadingHTTPServer:
        class Handler(_Handler):
            hub, side = self, host

        class Server(ThreadingHTTPServer):
            request_queue_size = 128
            daemon_threads = True

            def handle_error(self, request: Any, client_address: Any) -> None:
                pass  # a client that stops reading is what is tested

        return Server((name, 0), Handler)

    def __enter__(self) -> Hub:
        self.threads = [threading.Thread(target=s.serve_forever, args=(0.02,)) for s in self.servers.values()]
        for thread in self.threads:
            thread.start()
        return self

    def __exit__(self, *_exc: object) -> None:
        for server in self.servers.values():
            server.shutdown()
            server.server_close()
        for thread in self.threads:
            thread.join()

    def of(self, file: str) -> list[Asked]:
        """Requests for a file, on both hosts."""
        return [a for a in self.asked if a.file == file]

    def forget(self) -> None:
        self.asked, self.sent, self.most = [], 0, 0


class _Handler(BaseHTTPRequestHandler):
    hub: Hub
    side: str
    protocol_version = "HTTP/1.1"

    def log_message(self, *_args: object) -> None:
        pass

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        path = unquote(urlsplit(self.path).path)
        if path == "/api/agent-harnesses":
            return self.give(b"{}")
        found = re.fullmatch(
            r"/(?:api/models/)?([^/]+/[^/]+)/(revision|tree|resolve)/([^/]+(?:/pr/\d+)?)(?:/(.*))?", path
        )
        file = (found and found[4]) or ""
        self.note(path, file)
        fault = self.hub.faults.get((self.side, file or "api"))
        if fault is not None and fault(self, file):
            return None
        if self.side == "storage":
            return self.store(path)
        repo = self.hub.repos.get(found[1]) if found else None
        if found is None or repo is None:
            return self.refuse(401, "RepoNotFound", "Repository not found")
        commit = repo.commit(found[3])
        if commit is None:
            return self.refuse(404, "RevisionNotFound", f"Invalid rev id: {found[3]}")
        return {"revision": self.revision, "tree": self.tree, "resolve": self.resolve}[found[2]](repo, commit, file)

    def revision(self, repo: Repo, commit: str, _file: str) -> None:
        siblings = [{"rfilename": file} for file in repo.files()]
        self.give(json.dumps({"id": repo.folder.name, "sha": commit, "siblings": siblings}).encode())

    def tree(self, repo: Repo, _commit: str, _file: str) -> None:
        listed = []
        for file in repo.files():
            size = (repo.folder / file).stat().st_size
            entry: dict[str, Any] = {"type": "file", "path": file, "size": size, "oid": etag_of(repo, file)[:40]}
            if stored_apart(file):
                entry["lfs"] = {"oid": etag_of(repo, file), "size": size, "pointerSize": 135}
            listed.append(entry)
        self.give(json.dumps(listed).encode())

    def resolve(self, repo: Repo, commit: str, file: str) -> None:
        if not (repo.folder / file).is_file():
            return self.refuse(404, "EntryNotFound", "Entry not found")
        headers = {"X-Repo-Commit": commit}
        if self.hub.redirect and stored_apart(file):
            size = (repo.folder / file).stat().st_size
            headers |= {"X-Linked-Size": str(size), "X-Linked-Etag": f'"{etag_of(repo, file)}"'}
            location = (
                f"{self.hub.storage}/{self.path.split('/resolve/')[0].strip('/')}/resolve/{commit}/{file}?sig=key"
            )
            return self.give(b"", 302, {**headers, "Location": location})
        return self.content(repo, file, headers)

    def store(self, path: str) -> None:
        owner, name, _, _, file = path.strip("/").split("/", 4)
        with self.hub.lock:
            self.hub.now += 1
            self.hub.most = max(self.hub.most, self.hub.now)
        try:
            if self.hub.wait_for is not None:
                self.hub.wait_for.wait()
            self.content(self.hub.repos[f"{owner}/{name}"], file, {})
        finally:
            with self.hub.lock:
                self.hub.now -= 1

    def content(self, repo: Repo, file: str, headers: dict[str, str]) -> None:
        size = (repo.folder / file).stat().st_size
        start, end, status = 0, size, 200
        asked = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range") or "")
        if asked:
            start, end, status = int(asked[1]), min(int(asked[2]) + 1, size), 206
            if start >= size:
                return self.refuse(416, "", "", {"Content-Range": f"bytes */{size}"})
            headers = {**headers, "Content-Range": f"bytes {start}-{end - 1}/{size}"}
        self.head(status, {**headers, "ETag": f'"{etag_of(repo, file)}"', "Content-Length": str(end - start)})
        if self.command == "HEAD":
            return None
        with open(repo.folder / file, "rb") as data:
            data.seek(start)
            while start < end:
                part = data.read(min(CHUNK, end - start))
                self.send(part)
                start += len(part)

    def give(self, body: bytes, status: int = 200, headers: dict[str, str] | None = None) -> None:
        self.head(status, {"Content-Length": str(len(body)), **(headers or {})})
        if self.command != "HEAD":
            self.send(body)

    def refuse(self, status: int, code: str, said: str, headers: dict[str, str] | None = None) -> None:
        errors = {"X-Error-Code": code, "X-Error-Message": said} if code else {}
        self.give(json.dumps({"error": said}).encode(), status, {**errors, **(headers or {})})

    def head(self, status: int, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()

    def send(self, data: bytes) -> None:
        self.wfile.write(data)
        with self.hub.lock:
            self.hub.sent += len(data)

    def note(self, path: str, file: str) -> None:
        token = self.headers.get("Authorization")
        with self.hub.lock:
            self.hub.asked.append(Asked(self.side, self.command, path, file, self.headers.get("Range"), token))

    def hang(self, seconds: float) -> None:
        """Say nothing for a while, or until the client has gone."""
        self.connection.settimeout(seconds)
        with suppress(OSError):
            self.connection.recv(1)
        self.close_connection = True


def stored_apart(file: str) -> bool:
    """Does the hub keep such a file in its storage?"""
    return file.endswith((".safetensors", ".bin", ".pth"))


def etag_of(repo: Repo, file: str) -> str:
    return hashlib.sha256(f"{repo.edition} {repo.folder}/{file}".encode()).hexdigest()
