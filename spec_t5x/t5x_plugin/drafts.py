"""Drafts of a T5X launch and the places of their parameters.

A draft's parameters are in the T5X model's tree, under ``draft``: like the target's, they are
arguments of the compiled program. Those of a ``ModelDraft`` are partitioned by their logical axes
and restored from a T5X checkpoint. A ``NamedDraft`` is any draft of the package, read from disk in
any format; each device holds all of its parameters.
"""

import contextvars
import dataclasses
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import seqio
from flax.linen.partitioning import AxisMetadata
from flax.traverse_util import flatten_dict, unflatten_dict

from spec_t5x import registry
from spec_t5x.checkpoints.make_draft import TRANSFORMER, kind_of, make_draft
from spec_t5x.checkpoints.storage.stored_model import LoadedModel
from spec_t5x.checkpoints.storage.vocabularies import make_vocabulary
from spec_t5x.data.vocabulary import ByteVocabulary, Vocabulary
from spec_t5x.drafts.kinds import DraftOptions
from spec_t5x.drafts.transformer import TransformerDraft
from spec_t5x.errors import InputError
from spec_t5x.interfaces import Draft, Target
from spec_t5x.machine.operations import KERNELS
from spec_t5x.models import decoder_only
from spec_t5x.models.decoder_only import DecoderOnlyConfig, DecoderOnlyModel, DecoderOnlyTransformer
from spec_t5x.models.seq2seq import T5Model
from spec_t5x.models.sizes import size
from spec_t5x.models.t5 import T5Config, Transformer
from spec_t5x.types import PyTree


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelDraft:
    """A smaller model of the target's kind, restored from its own checkpoint.

    Its sizes come from ``size``, a name of ``models.sizes``, or from ``config``.
    """

    size: str | None = None
    config: T5Config | DecoderOnlyConfig | None = None
    # The type that the draft computes in, if ``size`` gives the sizes.
    dtype: str = "bfloat16"

    # A beam search can draft with the model.
    searches = True

    def __post_init__(self):
        if (self.size is None) == (self.config is None):
            raise InputError(
                f"ModelDraft has size {self.size!r} and config {self.config!r}: give one of them "
                "(a gin file that sets config comes after speculate.gin)"
            )
        if self.size is not None:
            config = dataclasses.replace(size(self.size), dtype=self.dtype)
            object.__setattr__(self, "config", config)
            object.__setattr__(self, "size", None)
        if not isinstance(self.config, T5Config | DecoderOnlyConfig):
            raise InputError(
                f"ModelDraft is of {self.config!r}: give the size of a T5, or a config made by "
                "t5.T5Config() or decoder_only.DecoderOnlyConfig()"
            )

    def __str__(self) -> str:
        return f"model {self.config.emb_dim} wide with {self.config.num_heads} heads"

    def variables(self, rng: jax.Array, target: Target, vocabulary: seqio.Vocabulary) -> PyTree:
        """Returns initial ``params`` and ``params_axes``; the target's leaves may be shapes."""
        if self.config.vocab_size != target.vocab_size:
            raise InputError(
                f"the draft embeds {self.config.vocab_size} ids and the target "
                f"{target.vocab_size}: set DRAFT_SIZE (or the sizes of draft_of_sizes.gin) to a "
                "draft of the target's vocabulary, padded to the target's size"
            )
        if isinstance(self.config, DecoderOnlyConfig):
            return decoder_only.init_variables(DecoderOnlyTransformer(self.config), rng)
        tokens = jnp.ones((1, 1), jnp.int32)
        return Transformer(self.config).init(rng, tokens, tokens, tokens, enable_dropout=False)

    def make(self, target: Target, params: PyTree, vocabulary: seqio.Vocabulary) -> Draft:
        """Returns the draft with these ``params``, which T5X restored."""
        if isinstance(target, DecoderOnlyModel) != isinstance(self.config, DecoderOnlyConfig):
            raise InputError(
                f"the draft is a {type(self.config).__name__} and the target a "
                f"{type(target).__name__}: give a draft of the target's kind"
            )
        if isinstance(target, DecoderOnlyModel):
            module = DecoderOnlyTransformer(self.config)
            return TransformerDraft(target.replace(weights=params, module=module))
        return TransformerDraft(T5Model(weights=params, module=Transformer(self.config)))


@dataclasses.dataclass(frozen=True, kw_only=True)
class NamedDraft:
    """Any draft of ``checkpoints.make_draft``, by name: ``copy``, ``bigram:DIR``, …

    The host reads the draft at each use. Its parameters are all arrays of tables, heads or models
    that it does not share with the target. Each device holds all of them; give a large model as a
    ``ModelDraft``.
    """

    name: str
    # Whether the parameters are in the model's tree, where ``restoring`` puts them, or constants of
    # the programs, as in an ``InteractiveModel``, which restores no draft.
    in_tree: bool = False
    # False leaves the draft to XLA: JAX exports neither kernels nor layouts.
    kernels: bool = True

    def __post_init__(self):
        if not isinstance(self.name, str) or not self.name:
            raise InputError(f"DRAFT_NAME is {self.name!r}: give a name, such as 'copy'")

    def __str__(self) -> str:
        return repr(self.name)

    @property
    def searches(self) -> bool:
        """True if the draft is a transformer, which a beam search needs."""
        return kind_of(self.name) == TRANSFORMER

    def variables(self, rng: jax.Array, target: Target, vocabulary: seqio.Vocabulary) -> PyTree:
        """Returns ``params``, zeros, and ``params_axes``; {} if the tree has no parameters.

        Raises:
          InputError: there is no draft of that name, or it is of another target or vocabulary.
        """
        params = self.params(target, vocabulary)
        if not (params and self.in_tree):
            return {}
        axes = {
            (*path[:-1], f"{path[-1]}_axes"): AxisMetadata((None,) * np.ndim(leaf))
            for path, leaf in flatten_dict(params).items()
        }
        return {"params": jax.tree.map(jnp.zeros_like, params), "params_axes": unflatten_dict(axes)}

    def params(self, target: Target, vocabulary: seqio.Vocabulary) -> PyTree:
        """Returns the draft's parameters; if the target has arrays, checks that they fit these."""
        leaves, _ = jax.tree.flatten_with_path(self._read(target, vocabulary))
        shared = _ids(target)
        return unflatten_dict({_names(p): leaf for p, leaf in leaves if id(leaf) not in shared})

    def make(self, target: Target, params: PyTree | None, vocabulary: seqio.Vocabulary) -> Draft:
        """Returns the draft with the parameters of the model's tree in place of those on disk.

        Raises:
          InputError: as ``variables`` does, or the tree lacks parameters.
        """
        flat, shared = flatten_dict(params or {}), _ids(target)

        def leaf_of_tree(path, leaf):
            if _names(path) in flat:
                return flat[_names(path)]
            if self.in_tree and id(leaf) not in shared:
                raise InputError(
                    f"draft {self.name!r} has parameters and the model's tree has no "
                    f"{'/'.join(('draft', *_names(path)))}: set 'draft' in the tree to the result "
                    "of the model's read_draft"
                )
            return leaf

        return jax.tree.map_with_path(leaf_of_tree, self._read(target, vocabulary))

    def _read(self, target: Target, vocabulary: seqio.Vocabulary) -> Draft:
        """Reads the draft from disk, also in a trace; it shares leaves with the target."""
        if not isinstance(target, T5Model):
            kinds = registry.find_all("draft").items()
            fitting = [name for name, kind in kinds if not kind.needs_network]
            if kind_of(self.name) not in fitting:
                raise InputError(
                    f"draft {self.name!r} of a decoder-only target: give a ModelDraft or one of "
                    f"{', '.join(fitting)}"
                )
        config = target.module.config
        loaded = LoadedModel(
            params=target.params,
            config=config,
            vocabulary=as_vocabulary(vocabulary),
            # No packaged target, so that a draft that needs a directory must be given one.
            directory=Path("the T5X checkpoint"),
            metadata={},
        )
        context = contextvars.copy_context()
        context.run(KERNELS.set, self.kernels)
        with jax.ensure_compile_time_eval():
            options = DraftOptions(dtype=config.dtype)
            return context.run(make_draft, self.name, loaded, target, options)


# Drafts that a speculative T5X model takes.
DraftSource = ModelDraft | NamedDraft


def _ids(target: Target) -> set[int]:
    return set(map(id, jax.tree.leaves(target)))


def _names(path: tuple[Any, ...]) -> tuple[str, ...]:
    """Converts the path of a leaf in a draft to keys of nested dictionaries."""
    return tuple(jax.tree_util.keystr((key,), simple=True) for key in path)


def as_vocabulary(vocabulary: seqio.Vocabulary) -> Vocabulary:
    """Converts a seqio vocabulary, whose file may be in a bucket, to the package's.

    Raises:
      InputError: it is neither of SentencePiece nor of bytes, or its file is absent.
    """
    if isinstance(vocabulary, seqio.SentencePieceVocabulary):
        file = vocabulary.sentencepiece_model_file
        return make_vocabulary(f"{file}:{vocabulary.extra_ids}", None)
    if isinstance(vocabulary, seqio.ByteVocabulary):
        return ByteVocabulary(vocabulary.extra_ids)
    raise InputError(
        f"the vocabulary is a {type(vocabulary).__name__}: a draft by name needs SentencePiece "
        "or bytes"
    )
