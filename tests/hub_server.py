"""A hub on 127.0.0.1, as much of it as the client asks for a model: its files, their sizes, and refusals."""

from __future__ import annotations

import hashlib
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

COMMIT = "0123456789abcdef0123456789abcdef01234567"
TOKEN = "hf_right"


class Hub:
    """models: "org/name" -> file -> bytes. gated, private: models that need the token. cut: files of which half comes.

    requests: (method, path) of everything that was asked.
    """

    def __init__(self) -> None:
        self.models: dict[str, dict[str, bytes]] = {}
        self.gated: set[str] = set()
        self.private: set[str] = set()
        self.cut: set[str] = set()
        self.requests: list[tuple[str, str]] = []
        self.url = ""

    def files_asked(self) -> set[str]:
        return {match[1] for _, path in self.requests if (match := re.search(r"/resolve/[^/]+/(.*)", path))}


class Handler(BaseHTTPRequestHandler):
    hub: Hub
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: Any) -> None:
        pass

    def answer(self, status: int, data: bytes = b"", **headers: str) -> None:
        self.send_response(status)
        for key, value in {"Content-Length": str(len(data)), **headers}.items():
            self.send_header(key.replace("_", "-"), value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(data)

    def refuse(self, status: int, code: str) -> None:
        self.answer(status, json.dumps({"error": code}).encode(), X_Error_Code=code, X_Error_Message=code)

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        hub, path = self.hub, self.path.split("?")[0]
        hub.requests.append((self.command, path))
        match = re.fullmatch(r"/api/models/([^/]+/[^/]+)(?:/(revision|tree)/(.+))?", path)
        file = re.fullmatch(r"/([^/]+/[^/]+)/resolve/([^/]+)/(.+)", path)
        name = match[1] if match else file[1] if file else ""
        right = self.headers.get("Authorization") == f"Bearer {TOKEN}"
        if name not in hub.models or (name in hub.private and not right):
            self.refuse(404 if right else 401, "RepoNotFound")
            return
        files = hub.models[name]
        revision = (match[3] if match else file[2] if file else None) or "main"
        if revision not in ("main", "v1", COMMIT):
            self.refuse(404, "RevisionNotFound")
        elif file and name in hub.gated and not right:
            self.refuse(403, "GatedRepo")
        elif file and file[3] not in files:
            self.refuse(404, "EntryNotFound")
        elif file:
            self.send_file(file[3], files[file[3]])
        elif match and match[2] == "tree":
            tree = [{"type": "file", "path": f, "size": len(d), "oid": tag(d)} for f, d in files.items()]
            self.answer(200, json.dumps(tree).encode(), Content_Type="application/json")
        else:
            siblings = [{"rfilename": f, "size": len(d), "blobId": tag(d)} for f, d in files.items()]
            info = {"_id": "0", "id": name, "modelId": name, "sha": COMMIT, "private": False, "siblings": siblings}
            info |= {"tags": [], "downloads": 0, "likes": 0, "gated": name in hub.gated and "auto"}
            self.answer(200, json.dumps(info).encode(), Content_Type="application/json")

    def send_file(self, name: str, data: bytes) -> None:
        headers = {"ETag": f'"{tag(data)}"', "X_Repo_Commit": COMMIT, "Accept_Ranges": "bytes"}
        begin = re.fullmatch(r"bytes=(\d+)-\d*", self.headers.get("Range", ""))
        status, rest = 200, data
        if begin and self.command == "GET":
            status, rest = 206, data[int(begin[1]) :]
            headers["Content_Range"] = f"bytes {begin[1]}-{len(data) - 1}/{len(data)}"
        if name in self.hub.cut and self.command == "GET":
            self.send_response(status)
            for key, value in {"Content-Length": str(len(rest)), **headers}.items():
                self.send_header(key.replace("_", "-"), value)
            self.end_headers()
            self.wfile.write(rest[: len(rest) // 2])
            self.wfile.flush()
            self.close_connection = True
            return
        self.answer(status, rest, **headers)


def tag(data: bytes) -> str:
    return hashlib.sha1(data).hexdigest()


@contextmanager
def running() -> Iterator[Hub]:
    hub = Hub()
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Own", (Handler,), {"hub": hub}))
    hub.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
