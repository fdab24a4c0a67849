"""The experiment with IgLM, on a folder of the package's layout with random weights."""

import json

import jax.numpy as jnp
import numpy as np
import pytest

from spec_t5x.errors import InputError
from spec_t5x.experiments import iglm
from spec_t5x.models.binding import bind

pytestmark = pytest.mark.usefixtures("quick_compilation")

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

LETTERS = "ACDEFGHIKLMNPQRSTVWY"
TAGS = [f"[{species.upper()}]" for species in iglm.SPECIES] + ["[HEAVY]", "[LIGHT]"]
PIECES = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *LETTERS, *TAGS]


@pytest.fixture(scope="module")
def package(tmp_path_factory):
    path = tmp_path_factory.mktemp("site") / "iglm"
    for seed, name in enumerate((iglm.TARGET, iglm.DRAFT)):
        folder = path / "trained_models" / name
        folder.mkdir(parents=True)
        config = transformers.GPT2Config(
            vocab_size=len(PIECES), n_embd=16, n_layer=1, n_head=2, n_positions=160
        )
        torch.manual_seed(seed)
        model = transformers.GPT2LMHeadModel(config)
        torch.save(model.state_dict(), folder / "pytorch_model.bin")
        # As IgLM's: GPT-2's special ids, which a vocabulary of 33 does not have.
        values = config.to_dict() | {"bos_token_id": 50256, "eos_token_id": 50256}
        (folder / "config.json").write_text(json.dumps(values))
    (path / "trained_models" / "vocab.txt").write_text("\n".join(PIECES))
    return path


def test_logits_are_those_of_transformers_after_the_chains_tag(package):
    folder = iglm.find_models(package)
    loaded = iglm.load_iglm(folder, iglm.TARGET, "light")
    theirs = [PIECES.index(piece) for piece in ("[LIGHT]", "[MOUSE]", *"DIVLTQ")]
    ours = [0, *loaded.vocabulary.encode("[MOUSE]DIVLTQ")]
    assert loaded.vocabulary.to_theirs(ours) == theirs
    model = bind(loaded.params, loaded.config)
    logits, _ = model.score(model.prefill(jnp.ones((1, 1), jnp.int32), 8), jnp.asarray([ours]))
    config = transformers.GPT2Config(**json.loads((folder / "IgLM" / "config.json").read_text()))
    other = transformers.GPT2LMHeadModel(config).eval()
    other.load_state_dict(torch.load(folder / "IgLM" / "pytorch_model.bin"))
    with torch.no_grad():
        expected = other(torch.as_tensor([theirs])).logits.numpy()
    order = loaded.vocabulary.to_theirs(range(1, loaded.vocabulary.vocab_size))
    np.testing.assert_allclose(logits[:, :, 1:], expected[:, :, order], atol=2e-4, rtol=0)


def test_sequences_and_figures_are_printed(package, capsys):
    arguments = ["--package", str(package), "--num_sequences", "2", "--repeats", "1"]
    assert iglm.main([*arguments, "--gamma", "2", "--prompt", "EVQ"]) == 0
    output = capsys.readouterr().out
    sequences, brace, figures = output.partition("{")
    assert len(sequences.splitlines()) == 2
    assert 0 < json.loads(brace + figures)["alpha"] <= 1


def test_mistakes_are_one_line(package, tmp_path, capsys):
    assert iglm.main(["--package", str(tmp_path)]) == 2
    assert "give the folder of the package iglm" in capsys.readouterr().err
    with pytest.raises(InputError, match="the prompt has 'B': give the letters of amino acids"):
        iglm.run(iglm.find_models(package), iglm.IglmOptions(prompt="EB"))
    with pytest.raises(InputError, match="species is 'cat': choose one of camel, "):
        iglm.IglmOptions(species="cat")


def test_a_package_that_is_not_installed_is_said_so(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(InputError, match="pip install --no-deps iglm"):
        iglm.find_models()
