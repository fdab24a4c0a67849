"""Location of a checkpoint: a directory of this machine, or in a bucket (gs://).

A bucket is read through TensorStore, with Google's default credentials if there are any: those of
``gcloud auth application-default login``, of GOOGLE_APPLICATION_CREDENTIALS or of the virtual
machine. Public buckets need none.
"""

import dataclasses
import functools
from pathlib import Path
from typing import Any

from spec_t5x.errors import InputError, one_line
from spec_t5x.machine.paths import expanded

_SCHEME = "gs://"

# The command that a private bucket requires.
LOG_IN = "gcloud auth application-default login"


@dataclasses.dataclass(frozen=True)
class GcsPath:
    """A file or directory in a bucket, with the few methods of ``Path`` that reading needs.

    The methods that read raise ``InputError`` if the bucket cannot be reached or access is denied.
    """

    bucket: str
    # Path in the bucket, without a slash at either end; "" is the bucket itself.
    key: str

    def __str__(self) -> str:
        return f"{_SCHEME}{self.bucket}/{self.key}".rstrip("/")

    def __truediv__(self, name: str) -> "GcsPath":
        return GcsPath(self.bucket, f"{self.key}/{name}".strip("/"))

    @property
    def name(self) -> str:
        """Last component of the key."""
        return self.key.rpartition("/")[2]

    @property
    def parent(self) -> "GcsPath":
        """Directory that contains this path."""
        return GcsPath(self.bucket, self.key.rpartition("/")[0])

    def is_file(self) -> bool:
        """Tells whether an object with exactly this key exists and may be read."""
        # Read, not listed: the rights to read and to list objects are separate, and a bucket that
        # may not be listed looks empty. All files that are checked this way are small.
        try:
            return self._read() is not None
        except InputError as error:
            # Without the right to list, access to an absent object is also denied.
            if isinstance(error.__cause__, PermissionError):
                return False
            raise

    def iterdir(self) -> list["GcsPath"]:
        """Lists the files and directories in this directory, sorted by name."""
        import tensorstore as ts

        prefix = f"{self.key}/" if self.key else ""
        # "0" follows "/" in ASCII, so that the range contains exactly the keys with the prefix.
        keys = ts.KvStore.KeyRange(prefix, f"{self.key}0" if self.key else "")
        found = [key.decode() for key in self._ask(lambda store: store.list(keys))]
        names = {key.removeprefix(prefix).partition("/")[0] for key in found}
        return [self / name for name in sorted(names - {""})]

    def read_bytes(self) -> bytes:
        """Returns the object's content; raises ``FileNotFoundError`` if there is no object."""
        content = self._read()
        if content is None:
            raise FileNotFoundError(str(self))
        return content

    def read_text(self, encoding: str = "utf-8") -> str:
        """Returns the object's content as text; raises as ``read_bytes`` does."""
        return self.read_bytes().decode(encoding)

    def _read(self) -> bytes | None:
        result = self._ask(lambda store: store.read(self.key))
        return result.value if result.state == "value" else None

    def _ask(self, question):
        try:
            return question(_bucket(self.bucket)).result()
        except (ValueError, OSError) as error:
            denied = str(error).startswith(("PERMISSION_DENIED", "UNAUTHENTICATED"))
            raise InputError(
                f"cannot read {self} ({one_line(error)}): check the name, the network and the "
                f"credentials ({LOG_IN})"
            ) from (PermissionError(str(error)) if denied else error)


Location = Path | GcsPath


def locate(name: str | Path | GcsPath) -> Location:
    """Returns the location of a path or ``gs://`` address, which need not exist."""
    if isinstance(name, GcsPath):
        return name
    if not (text := str(name)):
        raise InputError("a directory or model is named '': give a name, or . for this folder")
    if text.startswith(_SCHEME):
        bucket, _, key = text.removeprefix(_SCHEME).partition("/")
        if not bucket:
            raise InputError(f"{text!r} names no bucket: give {_SCHEME}BUCKET/DIRECTORY")
        return GcsPath(bucket, key.strip("/"))
    if "://" in text:
        raise InputError(f"{text!r}: give a directory, {_SCHEME}BUCKET/DIRECTORY or OWNER/NAME")
    return expanded(text)


def kvstore_spec(location: Location) -> dict[str, Any]:
    """Returns TensorStore's specification of the key-value store that a directory is."""
    if isinstance(location, GcsPath):
        key = f"{location.key}/" if location.key else ""
        return {"driver": "gcs", "bucket": location.bucket, "path": key}
    return {"driver": "file", "path": f"{location.resolve()}/"}


@functools.lru_cache(maxsize=8)
def _bucket(name: str):
    import tensorstore as ts

    return ts.KvStore.open({"driver": "gcs", "bucket": name}).result()
