"""Buckets in emulators of object stores: moto for s3://, gcp-storage-emulator for gs://. Each runs in its own process.

`python tests/buckets.py gs|s3` starts an emulator, prints its port, and serves until it is killed. A test can set faults. If a
request matches a fault, the server returns the fault's error and does not pass the request on to the emulator. If the fault
names a process, the server kills that process first.
"""

import contextlib
import functools
import http.server
import importlib.util
import io
import json
import logging
import os
import re
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from typing import Any
from urllib.parse import unquote

import pytest

NEEDS = {"gs": ("gcsfs", "gcp_storage_emulator"), "s3": ("s3fs", "moto", "flask", "flask_cors")}
FAULTS = "/-/faults"  # the path to which tests send the faults


class Bucket:
    """A bucket for one test. Its methods read and write objects by name, and set the faults of its server."""

    def __init__(self, scheme: str, name: str, server: str):
        self.scheme, self.name, self.server = scheme, name, server
        self.url = f"{scheme}://{name}"

    @property
    def client(self) -> Any:
        from jaxtrain.checkpoint.storage import open_client

        return open_client(self.scheme)

    def names(self, prefix: str = "") -> list[str]:
        found = [path.removeprefix(f"{self.name}/") for path in self.client.find(f"{self.name}/")]
        return sorted(name for name in found if name.startswith(prefix))

    def get(self, name: str) -> bytes:
        return self.client.cat_file(f"{self.name}/{name}")

    def put(self, name: str, data: bytes) -> None:
        self.client.pipe_file(f"{self.name}/{name}", data)

    def remove(self, *names: str) -> None:
        self.client.rm([f"{self.name}/{name}" for name in names])

    def size(self, name: str) -> int:
        return self.client.info(f"{self.name}/{name}")["size"]

    def fail(self, kinds: str, pattern: str = "", status: int = 403, skip: int = 0, kill: int = 0) -> None:
        """Answer requests of these kinds (list, read, write, copy, delete) with an error, after the first `skip`.

        Args:
            kinds: any of list, read, write, copy, delete.
            pattern: a regular expression, searched in the request's target and in the first 1,000 bytes of its body.
            status: the HTTP status of the error.
            skip: the number of matching requests that succeed first.
            kill: the id of a process to kill before the error is returned; 0 for none.
        """
        fault = {"kinds": kinds.split(), "pattern": pattern, "status": status, "skip": skip, "kill": kill}
        self._set([fault])

    def heal(self) -> None:
        self._set([])

    def _set(self, faults: list[dict[str, Any]]) -> None:
        with urllib.request.urlopen(urllib.request.Request(self.server + FAULTS, json.dumps(faults).encode())) as answer:
            assert answer.status == 200


@pytest.fixture(scope="session", params=["gs", "s3"])
def server(request: pytest.FixtureRequest) -> Iterator[tuple[str, str]]:
    """Start an emulator and yield (scheme, address). Set the clients' environment variables to this emulator meanwhile."""
    scheme = request.param
    if missing := [name for name in NEEDS[scheme] if importlib.util.find_spec(name) is None]:
        pytest.skip(f"needs the `dev` extra: {', '.join(missing)}")
    process = subprocess.Popen([sys.executable, __file__, scheme], stdout=subprocess.PIPE, text=True)
    assert process.stdout
    address = f"http://127.0.0.1:{int(process.stdout.readline())}"
    environment = {
        # Clients then use no credentials, and do not query the bucket's type over gRPC, which the emulators do not support.
        "gs": {
            "NO_GCE_CHECK": "true",
            "GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT": "false",
            "FSSPEC_GCS": '{"token": "anon"}',
            "STORAGE_EMULATOR_HOST": address,
            "TENSORSTORE_GCS_HTTP_URL": address,
        },
        "s3": {
            "AWS_ENDPOINT_URL": address,
            "AWS_ACCESS_KEY_ID": "any",
            "AWS_SECRET_ACCESS_KEY": "any",
            "AWS_REGION": "us-east-1",
            "AWS_EC2_METADATA_DISABLED": "true",
        },
    }[scheme]
    with pytest.MonkeyPatch.context() as patch:
        for name, value in environment.items():
            patch.setenv(name, value)
        if scheme == "gs":
            from fsspec.config import conf

            patch.setitem(conf, "gcs", {"token": "anon"})  # fsspec reads FSSPEC_GCS only when it is imported
        yield scheme, address
    process.kill()
    process.wait()


@pytest.fixture
def bucket(server: tuple[str, str], request: pytest.FixtureRequest) -> Iterator[Bucket]:
    """Yield a new bucket, and remove its faults after the test."""
    scheme, address = server
    made = Bucket(scheme, re.sub("[^a-z0-9]+", "-", request.node.name)[:50].strip("-"), address)
    made.client.mkdir(made.name)
    yield made
    made.heal()


def kind_of(method: str, target: str, copies: bool) -> str:
    """Return the kind of an HTTP request: list, read, write, copy or delete."""
    path, _, query = target.partition("?")
    if copies or "/rewriteTo/" in path or "/copyTo/" in path:
        return "copy"
    if method == "PUT" or path.startswith("/upload/"):
        return "write"
    if method in ("GET", "HEAD"):
        return "list" if "list-type=" in query or path.endswith("/o") else "read"
    return "delete"


class Faults:
    """The faults that a test has set, and the responses to requests that match one of them."""

    def __init__(self):
        self.now: list[dict[str, Any]] = []

    def status(self, method: str, target: str, copies: bool, body: bytes) -> int:
        """Return the HTTP status with which to answer a request; 0 if no fault applies."""
        target = unquote(target)
        if target == FAULTS:
            self.now = json.loads(body)
            return 200
        kind, text = kind_of(method, target, copies), target + body[:1000].decode("latin-1")
        for fault in self.now:
            if kind in fault["kinds"] and re.search(fault["pattern"], text):
                fault["skip"] -= 1
                if fault["skip"] < 0:
                    if fault["kill"]:
                        os.kill(fault["kill"], signal.SIGKILL)
                    return fault["status"]
        return 0


def serve_s3(faults: Faults) -> Any:
    """Return a server that runs moto behind the faults."""
    from moto.server import DomainDispatcherApplication, create_backend_app
    from werkzeug.serving import make_server

    moto = DomainDispatcherApplication(create_backend_app)

    def answer(request: dict[str, Any], start: Any) -> Any:
        method, copies = request["REQUEST_METHOD"], "HTTP_X_AMZ_COPY_SOURCE" in request
        body = b""
        if length := int(request.get("CONTENT_LENGTH") or 0):
            body = request["wsgi.input"].read(length)
            request["wsgi.input"] = io.BytesIO(body)
        target = request["PATH_INFO"] + ("?" + request["QUERY_STRING"] if request["QUERY_STRING"] else "")
        if status := faults.status(method, target, copies, body):
            start(f"{status} {'OK' if status == 200 else 'Refused'}", [("Content-Length", "0")])
            return []
        return moto(request, start)

    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    return make_server("127.0.0.1", 0, answer, threaded=True)


def serve_gs(faults: Faults) -> Any:
    """Return a server that runs gcp-storage-emulator behind the faults.

    It adds the object generations that tensorstore needs and the emulator lacks.
    """
    from gcp_storage_emulator.exceptions import NotFound
    from gcp_storage_emulator.handlers import objects
    from gcp_storage_emulator.server import RequestHandler, Router
    from gcp_storage_emulator.storage import Storage

    handle, download, upload = Router.handle, objects.download, objects._media_upload

    def generation(storage: Any, bucket: str, name: str) -> str:
        try:
            return storage.get_file_obj(bucket, name)["generation"]
        except NotFound:
            return "0"

    def download_with_generation(request: Any, response: Any, storage: Any, *_: Any) -> None:
        response["x-goog-generation"] = generation(storage, request.params["bucket_name"], request.params["object_id"])
        download(request, response, storage)

    def upload_on_condition(request: Any, response: Any, storage: Any) -> None:
        now = generation(storage, request.params["bucket_name"], request.query["name"][0])
        if request.query.get("ifGenerationMatch", [now])[0] != now:
            response.status = 412
        else:
            upload(request, response, storage)

    objects.download, objects._media_upload = download_with_generation, upload_on_condition

    def answer(router: Any, method: str) -> None:
        request = router._request_handler
        body = b""
        if length := int(request.headers.get("Content-Length") or 0):
            body = request.rfile.read(length)
            request.rfile = io.BytesIO(body)
        if status := faults.status(method, request.path, False, body):
            request.send_response(status)
            request.send_header("Content-Length", "0")
            request.end_headers()
            return
        with contextlib.suppress(ConnectionError):  # the client may have been killed
            handle(router, method)

    Router.handle = answer
    return http.server.HTTPServer(("127.0.0.1", 0), functools.partial(RequestHandler, Storage(use_memory_fs=True)))


if __name__ == "__main__":
    made = {"gs": serve_gs, "s3": serve_s3}[sys.argv[1]](Faults())
    print(made.server_address[1], flush=True)
    made.serve_forever()
