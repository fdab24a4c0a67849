"""Set-up and checks of every test, and fixtures that many test modules share."""

import atexit
import contextlib
import os
import resource
import shutil
import signal
import tempfile
import types
from pathlib import Path

# Set before JAX is imported: the suite runs on the CPU, so that results are the same anywhere.
os.environ.setdefault("JAX_PLATFORMS", "cpu")
# Tests neither read nor write the user's cache of compiled programs.
os.environ["JAX_COMPILATION_CACHE_DIR"] = ""
# Tests never access the Hugging Face Hub, even if a path looks like a repository's name.
os.environ["HF_HUB_OFFLINE"] = "1"

import gin
import jax
import jaxtyping
import numpy as np
import psutil
import pytest
from flax.traverse_util import unflatten_dict
from jax._src import compiler, lru_cache
from jax.experimental.compilation_cache import compilation_cache

from spec_t5x.checkpoints.loading import load
from spec_t5x.data.vocabulary import SentencePieceVocabulary
from spec_t5x.labs.training.exports import save_model
from spec_t5x.labs.training.sentencepiece_training import train_sentencepiece
from spec_t5x.loops.pace import Costs
from spec_t5x.machine import progress
from spec_t5x.models.binding import bind, expected_shapes
from spec_t5x.models.t5 import T5Config
from spec_t5x.tuning import costs
from spec_t5x.types import EOS_ID, PAD_ID, PyTree
from tests import named_drafts, older_jax
from tests import quick_compilation as quick

# Only some tests need Hypothesis.
with contextlib.suppress(ImportError):
    import hypothesis

    # No outcome depends on how long an example takes.
    any_speed = {"deadline": None, "suppress_health_check": [hypothesis.HealthCheck.too_slow]}
    hypothesis.settings.register_profile("any speed", **any_speed)
    hypothesis.settings.load_profile("any speed")

if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    # A shell starts jobs in the background so, and programs then leave the signal ignored.
    signal.signal(signal.SIGINT, signal.default_int_handler)

REPOSITORY = Path(__file__).parents[1]
SHARED = REPOSITORY.parent / "shared"

# Texts that the tiny vocabularies are trained on.
ENGLISH = [
    "The cat sleeps under the old table.",
    "My sister reads a book in the garden.",
    "We are going to the station tomorrow.",
    "A green bird sings in front of the window.",
    "Nobody knows where the keys are.",
    "The children play football after school.",
    "It is raining and the street is wet.",
    "He drinks two cups of coffee every morning.",
    "The train to Hamburg leaves at nine o'clock.",
    "Our neighbours have bought a yellow car.",
    "She writes long letters to her friends.",
    "The bridge over the river is closed today.",
    "I would like some bread and cheese.",
    "The doctor works in a small hospital.",
    "They walked through the forest for hours.",
    "The shop opens early and closes late.",
    "Yesterday the lamp in the kitchen broke.",
    "Can you help me with this heavy box?",
    "The film begins when it gets dark.",
    "In winter the lake freezes over.",
]
GERMAN = [
    "Die Katze schläft unter dem alten Tisch.",
    "Meine Schwester liest ein Buch im Garten.",
    "Wir gehen morgen zum Bahnhof.",
    "Ein grüner Vogel singt vor dem Fenster.",
    "Niemand weiß, wo die Schlüssel sind.",
    "Die Kinder spielen nach der Schule Fußball.",
    "Es regnet und die Straße ist nass.",
    "Er trinkt jeden Morgen zwei Tassen Kaffee.",
    "Der Zug nach Hamburg fährt um neun Uhr ab.",
    "Unsere Nachbarn haben ein gelbes Auto gekauft.",
    "Sie schreibt ihren Freunden lange Briefe.",
    "Die Brücke über den Fluss ist heute gesperrt.",
    "Ich hätte gerne etwas Brot und Käse.",
    "Der Arzt arbeitet in einem kleinen Krankenhaus.",
    "Sie liefen stundenlang durch den Wald.",
    "Der Laden öffnet früh und schließt spät.",
    "Gestern ging die Lampe in der Küche kaputt.",
    "Kannst du mir mit dieser schweren Kiste helfen?",
    "Der Film beginnt, wenn es dunkel wird.",
    "Im Winter friert der See zu.",
]


def pytest_configure():
    """Sets XDG_CACHE_HOME and HF_HOME to a new directory that links the user's CPU kernels."""
    older_jax.leave_placeholders_unchecked()
    if "PYTEST_XDIST_WORKER" in os.environ:
        return
    users = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    kernels = users / "spec_t5x" / "kernels"
    # The package refuses a directory to which others can write, which the umask may allow.
    kernels.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    kernels.mkdir(mode=0o700, exist_ok=True)
    own = Path(tempfile.mkdtemp(prefix="spec_t5x-tests-"))
    atexit.register(shutil.rmtree, own, ignore_errors=True)
    (own / "spec_t5x").mkdir(mode=0o700)
    (own / "spec_t5x" / "kernels").symlink_to(kernels)
    os.environ.setdefault("MPLCONFIGDIR", str(users / "matplotlib"))
    os.environ["XDG_CACHE_HOME"] = str(own)
    os.environ["HF_HOME"] = str(own / "huggingface")


@pytest.fixture(autouse=True)
def strict_rank_promotion():
    """Makes implicit broadcasting to another rank an error in every test."""
    with jax.numpy_rank_promotion("raise"):
        yield


@pytest.fixture(autouse=True)
def nothing_bound():
    """Clears gin's bindings before and after every test."""
    gin.clear_config()
    yield
    gin.clear_config()


@pytest.fixture(autouse=True)
def known_costs(monkeypatch):
    """Fixes the costs that gamma "auto" uses, so that tests depend on neither clock nor cache."""

    def measure(target, draft, inputs, settings, loop):
        # At most 3 drafted tokens, because each width of a call is compiled.
        largest, whole = min(loop.gamma, 3), loop.verifier.tree(loop.gamma) is not None
        return Costs.by_formula(c=0.1, position=0.05, largest=largest, whole=whole), True

    monkeypatch.setattr(costs, "measure", measure)
    monkeypatch.setattr(costs, "remembered", lambda key, measure, store: measure()[0])
    # Suppresses messages that depend on elapsed time or on the machine's load.
    monkeypatch.setattr(progress, "A_MOMENT", 1e6)
    monkeypatch.setattr(psutil, "cpu_times", lambda: types.SimpleNamespace(user=0.0, system=0.0))


@pytest.fixture(scope="module", autouse=True)
def no_programs_left_behind():
    """Clears JAX's caches after each module: with thousands of compiled programs, a process
    runs out of memory maps and XLA crashes."""
    yield
    jax.clear_caches()


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """Returns the folder of real texts beside the repository; skips the test if it is absent."""
    if not (SHARED / "data").is_dir():
        pytest.skip(f"needs the real text of {SHARED.name}/data beside the repository")
    return SHARED / "data"


@pytest.fixture
def disk():
    """Yields a simulated disk: from ``fill()`` to ``clear()`` no file can exceed 4096 bytes."""

    class Disk:
        limits = resource.getrlimit(resource.RLIMIT_FSIZE)

        def fill(self):
            resource.setrlimit(resource.RLIMIT_FSIZE, (4096, self.limits[1]))

        def clear(self):
            resource.setrlimit(resource.RLIMIT_FSIZE, self.limits)

    disk = Disk()
    yield disk
    disk.clear()


def _without_checks():
    before = jaxtyping.config.jaxtyping_disable
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", before)


@pytest.fixture
def unchecked():
    """Disables jaxtyping's checks of shapes in one test, because users run without them."""
    yield from _without_checks()


@pytest.fixture(scope="module")
def unchecked_module():
    """Disables jaxtyping's checks in a module whose functions other tests check."""
    yield from _without_checks()


@pytest.fixture(scope="module")
def quick_compilation():
    """Compiles a module's programs without optimizations, because they run only briefly."""
    name = "jax_disable_most_optimizations"
    before = jax.config.values[name]
    jax.config.update(name, True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compiler, "get_compile_options", quick.get_compile_options)
        yield
    jax.config.update(name, before)


def _put_whole(cache: lru_cache.LRUCache, key: str, value: bytes) -> None:
    """Stores a program in one step, so that no process reads half of it."""
    directory = Path(cache.path)
    if not (directory / f"{key}-cache").exists():
        with tempfile.NamedTemporaryFile(dir=directory, delete=False) as file:
            file.write(value)
        os.replace(file.name, directory / f"{key}-cache")


@pytest.fixture(scope="module")
def kept_programs():
    """Enables a compilation cache that modules and child processes share; yields its directory."""
    settings = {
        "jax_compilation_cache_dir": str(Path(os.environ["XDG_CACHE_HOME"]) / "programs"),
        "jax_persistent_cache_min_compile_time_secs": 0.0,
        "jax_persistent_cache_min_entry_size_bytes": -1,
    }
    before = {name: jax.config.values[name] for name in settings}
    for name, value in settings.items():
        jax.config.update(name, value)
    compilation_cache.reset_cache()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lru_cache.LRUCache, "put", _put_whole)
        yield settings["jax_compilation_cache_dir"]
    for name, value in before.items():
        jax.config.update(name, value)
    compilation_cache.reset_cache()


@pytest.fixture(scope="session")
def tiny_pair(tmp_path_factory) -> Path:
    """Returns a directory in which ``save_model`` wrote models: ``target``, ``draft``, ``other``.

    Each is a T5 1.1 with random weights, 128 logits, a vocabulary of 120 pieces and sources of at
    most 48 tokens. The draft agrees with the target on about half of the tokens; outputs depend on
    their source, and some reach EOS early. ``other`` has another vocabulary of the same size.
    """
    directory = tmp_path_factory.mktemp("tiny_pair")
    write_tiny_pair(directory)
    return directory


def write_tiny_pair(directory: Path, head_dim: int = 8) -> None:
    """Writes ``tiny_pair``, or one with other sizes of a head."""
    # SentencePiece 0.2.3 trained it on both lists of texts; other versions train others.
    ours = Path(__file__).parent / "tiny_pair.model"
    other = train_sentencepiece(GERMAN, directory / "vocabularies" / "other", 120)
    # With seed 71 the target ends some texts early, but few at the first token.
    for name, seed, spiece, sizes in (
        ("target", 71, ours, {"emb_dim": 32, "num_encoder_layers": 2, "num_decoder_layers": 2}),
        ("draft", 1, ours, {"emb_dim": 16, "num_encoder_layers": 1, "num_decoder_layers": 1}),
        ("other", 2, other, {"emb_dim": 16, "num_encoder_layers": 1, "num_decoder_layers": 1}),
    ):
        config = T5Config(
            vocab_size=128,
            num_heads=2,
            head_dim=head_dim,
            mlp_dim=48,
            mlp_activations=("gelu", "linear"),
            logits_via_embedding=False,
            **sizes,
        )
        save_model(
            directory / name,
            _babbling_params(config, seed),
            config,
            SentencePieceVocabulary(spiece),
            dtype="float32",
            extra={"max_source_length": 48},
        )


@pytest.fixture(scope="session")
def drafts_of_pair(tiny_pair) -> Path:
    """Returns ``tiny_pair``'s directory after ``tests.named_drafts`` wrote all drafts to it."""
    named_drafts.write(tiny_pair)
    return tiny_pair


@pytest.fixture(scope="session")
def target_of_drafts(drafts_of_pair):
    """Returns the target of ``drafts_of_pair`` as (loaded checkpoint, model, directory)."""
    loaded = load(drafts_of_pair / "target")
    return loaded, bind(loaded.params, loaded.config), drafts_of_pair


def _babbling_params(config: T5Config, seed: int) -> PyTree:
    """Returns random weights with which each token has one likely successor."""
    rng = np.random.default_rng(seed)
    shapes = sorted(expected_shapes(config).items())
    flat = {path: rng.normal(scale=0.17, size=shape).astype(np.float32) for path, shape in shapes}
    for path in flat:
        if path.endswith("scale"):
            flat[path] = 1.0 + flat[path]
    embedding = rng.normal(size=(config.vocab_size, config.emb_dim)).astype(np.float32)
    # A zero embedding: the first token depends only on the source.
    embedding[PAD_ID] = 0.0
    flat["token_embedder/embedding"] = 2.5 * embedding
    successors = np.random.default_rng(5).permutation(config.vocab_size)
    before_end = np.random.default_rng(6).choice(config.vocab_size, 3, replace=False)
    kernel = flat["decoder/logits_dense/kernel"]
    kernel[:, successors] += embedding.T / np.sqrt(config.emb_dim)
    kernel[:, EOS_ID] += embedding[before_end].sum(axis=0) / np.sqrt(config.emb_dim)
    # Larger margins between logits, so that rounding never changes an argmax.
    kernel *= 4.0
    return unflatten_dict(flat, sep="/")
