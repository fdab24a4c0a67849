"""Opening of T5X checkpoints, in T5X's legacy or Orbax format, without T5X.

T5X keeps a model's configuration in gin files, apart from the checkpoint. Here it is inferred from
the shapes of the parameters, except for the largest relative distance, 128, and the activation of
the feed-forward layers: that of ``config.gin``, which T5X writes beside its checkpoints, or if it
is not there ReLU (if there is ``wi``, as in 1.0) or gated GELU (``wi_0`` and ``wi_1``, as in 1.1).
"""

import ast
import dataclasses
import re
from collections.abc import Mapping

from spec_t5x.checkpoints.huggingface.weight_files import unread
from spec_t5x.checkpoints.native import model_files
from spec_t5x.checkpoints.storage.files import CONFIG_NAME, SIDECAR_NAME, describing, read_if_there
from spec_t5x.checkpoints.storage.locations import LOG_IN, GcsPath, Location
from spec_t5x.checkpoints.storage.stored_model import StoredModel
from spec_t5x.checkpoints.storage.tensorstore_arrays import COPY_AGAIN, open_tensors
from spec_t5x.checkpoints.t5x.index import find_t5x, read_index
from spec_t5x.checkpoints.t5x.scanned import ours
from spec_t5x.errors import InputError, as_input_error
from spec_t5x.models.t5 import T5Config

_ACTIVATIONS = r"(?:[\w.]*T5Config\.)?mlp_activations"
_LAYER = re.compile(r"(encoder|decoder)/layers_(\d{1,9})/")


def open_model(location: Location, values: None = None) -> StoredModel:
    """Opens a checkpoint that T5X or ``writing`` wrote; its weights are read later.

    ``location`` is the directory of a checkpoint (``…/checkpoint_1000000``), or of several, whose
    latest is opened. ``values`` are None: T5X writes no config.json.
    """
    found = find_t5x(location)
    if found is None:
        remedy = "give a spec_t5x, Hugging Face or T5X checkpoint"
        if isinstance(location, GcsPath):
            remedy = f"check the name and the credentials ({LOG_IN})"
        elif reason := unread(location):
            raise InputError(f"{location} {reason}")
        raise InputError(f"{location} holds no {CONFIG_NAME} and no T5X checkpoint: {remedy}")
    entries, step = read_index(found)
    directory = found.parent if found.name == "state" else found
    tensors = ours(open_tensors(entries, str(directory)), str(directory))
    # ``writing`` adds a sidecar with the configuration and, if known, the vocabulary.
    path = directory / SIDECAR_NAME
    sidecar, vocabulary = read_if_there(path), None
    if sidecar.get("vocabulary") is not None:
        vocabulary = model_files.read_vocabulary(directory, sidecar)
    if sidecar:
        config = model_files.read_config(sidecar, path)
    else:
        shapes = {path: tensor.shape for path, tensor in tensors.items()}
        config = infer_config(shapes, str(directory))
        # Resolved: the directory above "." is its parent.
        place = directory if isinstance(directory, GcsPath) else directory.resolve()
        settings = place.parent / "config.gin"
        what = f"cannot read {settings}"
        with as_input_error(what, "make it readable, in UTF-8", OSError, ValueError):
            text = settings.read_text("utf-8") if settings.is_file() else ""
        if bound := _bound(_ACTIVATIONS, text):
            what = f"{settings} binds mlp_activations to {' '.join(bound.split())}"
            with as_input_error(what, "bind a tuple of names", ValueError, SyntaxError):
                config = dataclasses.replace(config, mlp_activations=ast.literal_eval(bound))
    metadata = model_files.extra_entries(sidecar)
    if step is not None:
        with describing(found, "step"):
            metadata["step"] = int(open_tensors({"step": step}, str(found))["step"].read(()))
    return StoredModel(
        tensors=tensors,
        config=config,
        vocabulary=vocabulary,
        directory=directory,
        metadata=metadata,
    )


def _bound(name: str, text: str) -> str | None:
    """Returns what the text of a gin file binds to a name (a pattern), through its macros."""
    # A tuple may go on in the next lines.
    found = re.search(rf"(?m)^[ \t]*{name}[ \t]*=[\s\\]*([(\[][^)\]]*[)\]]|.+)", text)
    macro = found and re.match(r"%([\w.]+)", found[1])
    # Without this line, so that a macro of itself has an end.
    value = macro and _bound(re.escape(macro[1]), text.replace(found[0], ""))
    return value or found and found[1]


def infer_config(shapes: Mapping[str, tuple[int, ...]], source: str) -> T5Config:
    """Infers a T5's configuration from its parameters' shapes; messages begin with ``source``."""
    if shapes and not any(path.startswith("encoder/") for path in shapes):
        raise InputError(
            f"{source} has no encoder: give an encoder-decoder of t5x/examples/t5 (T5, Flan, mT5, "
            "umT5, ByT5)"
        )

    def matrix(path: str) -> tuple[int, int]:
        shape = shapes.get(path)
        if shape is None or len(shape) != 2:
            found = "is not there" if shape is None else f"is {list(shape)}, not a matrix"
            what = f"{source}: {path}, which determines the configuration,"
            raise InputError(f"{what} {found}: {COPY_AGAIN}")
        return shape

    per_layer = "encoder/relpos_bias/rel_embedding" not in shapes
    bias = f"encoder/{'layers_0/' if per_layer else ''}relpos_bias/rel_embedding"
    vocab_size, emb_dim = matrix("token_embedder/embedding")
    num_heads, num_buckets = matrix(bias)
    _, joined = matrix("encoder/layers_0/attention/query/kernel")
    mlp_dim, _ = matrix("encoder/layers_0/mlp/wo/kernel")
    if joined % num_heads:
        raise InputError(
            f"{source}: attention of width {joined} does not divide into the {num_heads} heads "
            f"of {bias}: give a T5 of t5x/examples/t5"
        )
    # A gap in the numbers is reported later, by the check of all parameters.
    numbers = {"encoder": [0], "decoder": [0]}
    for match in filter(None, map(_LAYER.match, shapes)):
        numbers[match[1]].append(int(match[2]))
    is_gated = "encoder/layers_0/mlp/wi_0/kernel" in shapes
    return T5Config(
        vocab_size=vocab_size,
        emb_dim=emb_dim,
        num_heads=num_heads,
        head_dim=joined // num_heads,
        mlp_dim=mlp_dim,
        num_encoder_layers=max(numbers["encoder"]) + 1,
        num_decoder_layers=max(numbers["decoder"]) + 1,
        mlp_activations=("gelu", "linear") if is_gated else ("relu",),
        logits_via_embedding="decoder/logits_dense/kernel" not in shapes,
        relpos_num_buckets=num_buckets,
        relpos_per_layer=per_layer,
    )
