"""A small server of Google Cloud Storage's JSON API, in memory: what the clients under Orbax ask of it, and nothing else.

Objects are put, read in ranges, listed, copied and deleted, with preconditions on their generation. Requests are remembered,
and can be answered with an error.
"""

import base64
import contextlib
import hashlib
import http.server
import importlib.util
import itertools
import json
import re
import sys
import threading
from collections.abc import Callable, Iterator
from urllib.parse import parse_qs, unquote, urlsplit

import pytest

OBJECT = re.compile(r"(?:/download|/upload)?/storage/v1/b/(?P<bucket>[^/]+)(?:/o(?:/(?P<name>[^/]+))?)?$")
COPY = re.compile(r"/storage/v1/b/([^/]+)/o/([^/]+)/rewriteTo/b/([^/]+)/o/([^/]+)$")


class Server(http.server.ThreadingHTTPServer):
    """`objects`: bucket/name -> (generation, contents). `buckets`: those that exist. `url`: where it is."""

    daemon_threads = True

    def __init__(self, *buckets: str):
        super().__init__(("127.0.0.1", 0), Handler)
        self.buckets = set(buckets)
        self.objects: dict[str, tuple[int, bytes]] = {}
        self.uploads: dict[str, tuple[str, bytes]] = {}
        self.generation = itertools.count(1)
        self.lock = threading.RLock()
        self.asked: list[tuple[str, str]] = []  # method, path
        # The status of an error for a request, by its method (PUT for every kind of upload) and path or bucket/name; 0: none.
        self.fails: Callable[[str, str], int] = lambda method, path: 0
        self.url = f"http://127.0.0.1:{self.server_address[1]}"
        threading.Thread(target=self.serve_forever, daemon=True).start()

    def names(self, prefix: str = "") -> list[str]:
        """Of the objects, with their bucket."""
        with self.lock:
            return sorted(name for name in self.objects if name.startswith(prefix))

    def put(self, key: str, data: bytes) -> None:
        """As if somebody else had."""
        with self.lock:
            self.objects[key] = (next(self.generation), data)

    def remove(self, *keys: str) -> None:
        """As if somebody else had."""
        with self.lock:
            for key in keys:
                del self.objects[key]

    def handle_error(self, request: object, client_address: object) -> None:
        """A client that goes away, as one that is killed, is no news; anything else is."""
        if not isinstance(sys.exception(), ConnectionError):
            super().handle_error(request, client_address)


class Handler(http.server.BaseHTTPRequestHandler):
    """One request."""

    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True  # an answer is two writes, and the second would wait 40 ms for the first to be heard
    server: Server

    def log_message(self, format: str, *args: object) -> None:
        """Says nothing."""

    def do_GET(self) -> None:
        """A bucket, a list, an object, or what one says of itself."""
        self.answer()

    do_POST = do_PUT = do_DELETE = do_GET

    def answer(self) -> None:
        """Every request, under one lock."""
        body = self.body()
        url = urlsplit(self.path)
        query = {key: values[0] for key, values in parse_qs(url.query).items()}
        self.server.asked.append((self.command, url.path))
        if status := self.server.fails(self.command, unquote(url.path)):
            return self.error(status)
        with self.server.lock:
            if found := COPY.match(url.path):
                return self.copied(*(unquote(part) for part in found.groups()))
            found = OBJECT.match(url.path)
            if not found or unquote(found["bucket"]) not in self.server.buckets:
                return self.error(404)
            bucket, name = unquote(found["bucket"]), unquote(found["name"] or "")
            if url.path.startswith("/upload/"):
                return self.upload(bucket, query, body)
            if self.command == "DELETE":
                return self.deleted(f"{bucket}/{name}", query)
            if name:
                return self.read(f"{bucket}/{name}", query)
            return self.listed(bucket, query) if url.path.rstrip("/").endswith("/o") else self.json({"name": bucket})

    def body(self) -> bytes:
        """That of the request, sent in one piece or in chunks."""
        if self.headers.get("Transfer-Encoding", "").lower() != "chunked":
            return self.rfile.read(int(self.headers.get("Content-Length") or 0))
        out = b""
        while size := int(self.rfile.readline().split(b";")[0], 16):
            out += self.rfile.read(size)
            self.rfile.readline()
        self.rfile.readline()
        return out

    def listed(self, bucket: str, query: dict[str, str]) -> None:
        """Pages of names; what lies below `delimiter` becomes prefixes."""
        prefix, delimiter = query.get("prefix", ""), query.get("delimiter", "")
        start, end = query.get("startOffset", ""), query.get("endOffset", "")
        names = [key.removeprefix(f"{bucket}/") for key in self.server.names(f"{bucket}/")]
        names = [n for n in names if n.startswith(prefix) and n >= start and (not end or n < end)]
        names = [n for n in names if n > query.get("pageToken", "")]
        page = names[: int(query.get("maxResults", 1000))]
        inner = {n: n[len(prefix) :].partition(delimiter) if delimiter else (n, "", "") for n in page}
        answer: dict[str, object] = {"items": [self.about(f"{bucket}/{n}") for n in page if not inner[n][1]]}
        answer["prefixes"] = sorted({prefix + first + slash for first, slash, _ in inner.values() if slash})
        if len(page) < len(names):
            answer["nextPageToken"] = page[-1]
        self.json(answer)

    def read(self, key: str, query: dict[str, str]) -> None:
        """An object, or a range of it, or what it is."""
        if self.unmet(key, query):
            return None
        if key not in self.server.objects:
            return self.error(404)
        if query.get("alt") != "media":
            return self.json(self.about(key))
        generation, data = self.server.objects[key]
        status, extra = 200, {"x-goog-generation": str(generation)}
        if found := re.fullmatch(r"bytes=(\d*)-(\d*)", self.headers.get("Range", "")):
            first = int(found[1]) if found[1] else max(0, len(data) - int(found[2]))
            last = min(int(found[2]) if found[1] and found[2] else len(data), len(data) - 1)
            if first >= len(data):
                return self.error(416)
            extra["Content-Range"] = f"bytes {first}-{last}/{len(data)}"
            status, data = 206, data[first : last + 1]
        return self.send(status, data, "application/octet-stream", extra)

    def upload(self, bucket: str, query: dict[str, str], body: bytes) -> None:
        """In one request (media, multipart), or in pieces (resumable)."""
        how = query.get("uploadType")
        if how == "media":
            return self.stored(f"{bucket}/{query['name']}", body, query)
        if how == "multipart":
            boundary = re.search(r'boundary="?([^";]+)', self.headers["Content-Type"])
            assert boundary
            about, data = body.split(b"--" + boundary[1].encode())[1:3]
            name = json.loads(about.partition(b"\n\n")[2] or about.partition(b"\r\n\r\n")[2])["name"]
            return self.stored(f"{bucket}/{name}", data.partition(b"\n\n")[2][:-1], query)
        if "upload_id" not in query:
            self.server.uploads[upload := f"u{next(self.server.generation)}"] = (
                query.get("name") or json.loads(body)["name"],
                b"",
            )
            location = f"{self.server.url}/upload/storage/v1/b/{bucket}/o?uploadType=resumable&upload_id={upload}"
            return self.send(200, b"{}", "application/json", {"Location": location})
        name, before = self.server.uploads[query["upload_id"]]
        self.server.uploads[query["upload_id"]] = (name, before + body)
        if self.headers["Content-Range"].endswith("/*"):
            return self.send(308, b"", "application/json", {"Range": f"bytes=0-{len(before + body) - 1}"})
        return self.stored(f"{bucket}/{name}", before + body, query)

    def stored(self, key: str, data: bytes, query: dict[str, str]) -> None:
        """The object is there, whole."""
        if status := self.server.fails("PUT", key):
            return self.error(status)
        if not self.unmet(key, query):
            self.server.put(key, data)
            return self.json(self.about(key))
        return None

    def deleted(self, key: str, query: dict[str, str]) -> None:
        """It is gone."""
        if self.unmet(key, query):
            return None
        if key not in self.server.objects:
            return self.error(404)
        self.server.remove(key)
        return self.send(204, b"", "application/json", {})

    def copied(self, bucket: str, name: str, to_bucket: str, to_name: str) -> None:
        """Within the server."""
        if f"{bucket}/{name}" not in self.server.objects:
            return self.error(404)
        self.server.put(f"{to_bucket}/{to_name}", self.server.objects[f"{bucket}/{name}"][1])
        return self.json({"done": True, "resource": self.about(f"{to_bucket}/{to_name}")})

    def unmet(self, key: str, query: dict[str, str]) -> bool:
        """Whether a precondition fails; then it is answered."""
        now = self.server.objects.get(key, (0, b""))[0]
        if "ifGenerationMatch" in query and int(query["ifGenerationMatch"]) != now:
            self.error(412)
            return True
        if now and query.get("ifGenerationNotMatch") == str(now):
            self.send(304, b"", "application/json", {})
            return True
        return False

    def about(self, key: str) -> dict[str, object]:
        """An object's metadata."""
        generation, data = self.server.objects[key]
        bucket, _, name = key.partition("/")
        md5 = base64.b64encode(hashlib.md5(data).digest()).decode()
        when = "2026-01-01T00:00:00.000Z"
        facts = {"kind": "storage#object", "bucket": bucket, "name": name, "generation": str(generation), "md5Hash": md5}
        return {**facts, "metageneration": "1", "size": str(len(data)), "updated": when, "timeCreated": when}

    def json(self, answer: dict[str, object]) -> None:
        """Answers with it."""
        self.send(200, json.dumps(answer).encode(), "application/json", {})

    def error(self, status: int) -> None:
        """Answers with an error."""
        self.send(
            status, json.dumps({"error": {"code": status, "message": f"status {status}"}}).encode(), "application/json", {}
        )

    def send(self, status: int, body: bytes, kind: str, extra: dict[str, str]) -> None:
        """One answer."""
        self.send_response(status)
        for name, value in {"Content-Type": kind, "Content-Length": str(len(body)), **extra}.items():
            self.send_header(name, value)
        with contextlib.suppress(ConnectionError):  # of two requests for the same, a client gives one up
            self.end_headers()
            self.wfile.write(body)


# No credentials, and no question over gRPC of what kind a bucket is, which the server does not speak.
ENVIRONMENT = {"NO_GCE_CHECK": "true", "GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT": "false", "FSSPEC_GCS": '{"token": "anon"}'}


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    if importlib.util.find_spec("gcsfs") is None:  # which reads the environment when it is imported
        pytest.skip("needs the `gcs` extra")
    from fsspec.config import conf

    made = Server()
    environment = {**ENVIRONMENT, "STORAGE_EMULATOR_HOST": made.url, "TENSORSTORE_GCS_HTTP_URL": made.url}
    with pytest.MonkeyPatch.context() as patch:
        for name, value in environment.items():
            patch.setenv(name, value)
        patch.setitem(conf, "gcs", {"token": "anon"})
        yield made
    made.shutdown()


@pytest.fixture
def bucket(server: Server) -> Iterator[str]:
    """A bucket of the test's own."""
    name = f"bucket-{len(server.buckets)}"
    server.buckets.add(name)
    yield name
    server.fails = lambda method, path: 0
