"""Checkpoints in a bucket: read from a server on this machine that speaks as Google's does."""

import http.server
import json
import shutil
import threading
import urllib.parse
from pathlib import Path

import jax
import numpy as np
import pytest

from spec_t5x.checkpoints.loading import find_directory, load
from spec_t5x.checkpoints.make_draft import make_draft
from spec_t5x.checkpoints.storage import locations
from spec_t5x.checkpoints.storage.locations import GcsPath, kvstore_spec, locate
from spec_t5x.errors import InputError
from spec_t5x.models.seq2seq import T5Model
from tests.checkpoints.faults import message_of, save_t5x


class Bucket(http.server.BaseHTTPRequestHandler):
    """Answers reads and lists of ``gs://bucket`` from ``directory``."""

    directory: Path
    # Connections are kept: there are many requests.
    protocol_version = "HTTP/1.1"
    # An answer goes out in one piece.
    wbufsize = -1

    def do_GET(self):
        address = urllib.parse.urlsplit(self.path)
        query = dict(urllib.parse.parse_qsl(address.query))
        prefix = "/storage/v1/b/bucket/o"
        if not address.path.startswith(prefix):
            self._answer(403, b"{}")
        elif address.path == prefix:
            names = (
                str(path.relative_to(self.directory))
                for path in self.directory.rglob("*")
                if path.is_file()
            )
            first, end = query.get("startOffset", ""), query.get("endOffset")
            items = [
                {"name": name, "size": "1"}
                for name in sorted(names)
                if first <= name and (end is None or name < end)
            ]
            self._answer(200, json.dumps({"items": items}).encode())
        else:
            name = urllib.parse.unquote(address.path.removeprefix(f"{prefix}/"))
            path = self.directory / name
            if path.is_file():
                self._answer_part(path.read_bytes(), self.headers.get("Range"))
            else:
                self._answer(404, b"{}")

    def _answer_part(self, content: bytes, bounds: str | None):
        if not bounds:
            self._answer(200, content)
            return
        first, last = bounds.removeprefix("bytes=").split("-")
        part = content[int(first) : int(last) + 1 if last else None]
        self._answer(206, part, f"bytes {first}-{int(first) + len(part) - 1}/{len(content)}")

    def _answer(self, status: int, content: bytes, content_range: str | None = None):
        self.send_response(status)
        if content_range:
            self.send_header("Content-Range", content_range)
        self.send_header("Content-Length", str(len(content)))
        self.send_header("x-goog-generation", "1")
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *_):
        pass


@pytest.fixture
def bucket(tmp_path, monkeypatch):
    """Provides the directory of ``gs://bucket``."""
    directory = tmp_path / "bucket"
    directory.mkdir()
    handler = type("Handler", (Bucket,), {"directory": directory})
    # Many connections come at once.
    kind = type("Server", (http.server.ThreadingHTTPServer,), {"request_queue_size": 128})
    server = kind(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    monkeypatch.setenv("TENSORSTORE_GCS_HTTP_URL", f"http://127.0.0.1:{server.server_port}")
    monkeypatch.setenv("GOOGLE_AUTH_TOKEN_FOR_TESTING", "token")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    locations._bucket.cache_clear()
    yield directory
    locations._bucket.cache_clear()
    server.shutdown()
    server.server_close()


@pytest.mark.parametrize("kind", ["legacy", "orbax"])
def test_a_checkpoint_in_a_bucket(bucket, t5x_data, kind):
    config = {"legacy": t5x_data.LEGACY, "orbax": t5x_data.ORBAX}[kind]
    shutil.copytree(getattr(t5x_data, kind).parent, bucket / "models" / kind)
    loaded = load(f"gs://bucket/models/{kind}/", vocabulary="bytes")
    assert str(loaded.directory) == f"gs://bucket/models/{kind}/checkpoint_7"
    assert loaded.config == config and loaded.metadata["step"] == 7
    jax.tree.map(np.testing.assert_array_equal, loaded.params, t5x_data.known_params(config))


def test_a_vocabulary_in_a_bucket_is_fetched_once(bucket, spiece, configs, random_params, disk):
    config = configs["1.1"]
    save_t5x(bucket / "model" / "checkpoint_0", random_params(config), config)
    (bucket / "sentencepiece.model").write_bytes(bytes(5000))
    disk.fill()
    full = message_of(load, "gs://bucket/model", vocabulary="gs://bucket/sentencepiece.model:0")
    disk.clear()
    assert "-sentencepiece.model (File too large): make room there" in full
    # Nothing of it is kept.
    shutil.copy(spiece, bucket / "sentencepiece.model")
    for _ in range(2):
        loaded = load("gs://bucket/model", vocabulary="gs://bucket/sentencepiece.model:0")
        assert loaded.vocabulary.vocab_size == 40
        # The second time it is there already.
        (bucket / "sentencepiece.model").unlink(missing_ok=True)
    # A file of the same name in another folder is not the fetched one.
    other = "gs://bucket/other/sentencepiece.model"
    message = message_of(load, "gs://bucket/model", vocabulary=f"{other}:0")
    assert f"no vocabulary at {other}" in message


def test_a_vocabulary_of_our_own_is_fetched_too(bucket, vocabulary, configs, random_params):
    save_t5x(bucket / "checkpoint_0", random_params(configs["1.0"]), configs["1.0"], vocabulary)
    loaded = load("gs://bucket/checkpoint_0")
    assert loaded.vocabulary.fingerprint() == vocabulary.fingerprint()


def test_a_draft_in_a_bucket(bucket, saved, configs, random_params):
    config = configs["1.1"]
    save_t5x(bucket / "draft" / "checkpoint_0", random_params(config), config)
    target = load(saved)
    model = T5Model.create(target.params, target.config)
    for name in ("gs://bucket/draft", "transformer:gs://bucket/draft"):
        assert make_draft(name, target, model).model.config == config


def test_what_a_bucket_lacks(bucket, saved, t5x_data):
    assert "holds no config.json and no T5X" in message_of(load, "gs://bucket/absent")
    shutil.copytree(saved, bucket / "ours")
    assert "copy it to this machine" in message_of(load, "gs://bucket/ours")
    shutil.copytree(t5x_data.legacy, bucket / "checkpoint_7")
    shutil.rmtree(bucket / "checkpoint_7" / "target.token_embedder.embedding")
    message = message_of(load, "gs://bucket/checkpoint_7", vocabulary="bytes")
    assert "1 of 34 arrays are missing (token_embedder/embedding)" in message
    (bucket / "checkpoint_7" / "checkpoint").unlink()
    (bucket / "checkpoint_7" / "_METADATA").write_text("{")
    message = message_of(load, "gs://bucket/checkpoint_7", vocabulary="bytes")
    assert "cannot read gs://bucket/checkpoint_7/_METADATA as JSON" in message
    # A bucket that is not ours.
    message = message_of(load, "gs://other/model")
    assert "no T5X checkpoint: check the name and the credentials (gcloud" in message
    with pytest.raises(InputError, match="cannot read gs://other/model.*gcloud"):
        locate("gs://other/model").read_bytes()
    assert "no directory" in message_of(find_directory, "gs://bucket/ours")


def test_paths_in_a_bucket(bucket):
    (bucket / "a" / "b").mkdir(parents=True)
    (bucket / "a" / "b" / "c").write_text("text")
    (bucket / "a" / "d").write_text("text")
    (bucket / "a0").write_text("text")
    place = locate("gs://bucket/a/")
    assert place == GcsPath("bucket", "a") and str(place / "b") == "gs://bucket/a/b"
    assert [path.name for path in place.iterdir()] == ["b", "d"]
    assert [path.name for path in locate("gs://bucket").iterdir()] == ["a", "a0"]
    assert (place / "d").is_file() and not (place / "b").is_file()
    assert (place / "d").read_text() == "text" and (place / "d").parent == place
    with pytest.raises(FileNotFoundError):
        (place / "b").read_bytes()
    assert locate(place) is place
    assert "'gs:///a' names no bucket: give gs://BUCKET/" in message_of(locate, "gs:///a")
    for address in ("s3://bucket/a", "https://huggingface.co/google/flan-t5-small"):
        expected = f"{address!r}: give a directory, gs://BUCKET/DIRECTORY or OWNER/NAME"
        assert message_of(locate, address) == expected
    assert kvstore_spec(place) == {"driver": "gcs", "bucket": "bucket", "path": "a/"}
    assert kvstore_spec(locate("gs://bucket"))["path"] == ""
    assert kvstore_spec(Path("/a/b")) == {"driver": "file", "path": "/a/b/"}
