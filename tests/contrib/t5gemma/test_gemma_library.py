"""T5Gemma as the gemma library stores it, against the same weights in Hugging Face's format."""

import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest
from flax.traverse_util import unflatten_dict
from safetensors.numpy import load_file

from spec_t5x.checkpoints.loading import load
from spec_t5x.generation import GenerateOptions, Generator
from tests.checkpoints.faults import message_of
from tests.checkpoints.test_special_ids import NUM_IDS, TEXTS, save_tokenizer
from tests.contrib.t5gemma.test_huggingface import gemmas_tokenizer

pytest.importorskip("torch", reason="needs PyTorch")
pytest.importorskip("transformers", reason="needs transformers")
make_t5gemma = pytest.importorskip("tests.contrib.t5gemma.torch_t5gemma").make_t5gemma

pytestmark = pytest.mark.usefixtures("quick_compilation", "kept_programs")

NORMS = {
    "pre_self_attn_layernorm": "pre_attention_norm",
    "post_self_attn_layernorm": "post_attention_norm",
    "pre_cross_attn_layernorm": "pre_cross_attention_norm",
    "post_cross_attn_layernorm": "post_cross_attention_norm",
    "pre_feedforward_layernorm": "pre_ffw_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}
HEAD_DIM = 8


def theirs(weights, is_flipped):
    """Returns arrays by the library's paths; ``is_flipped`` as in its 9B, [2, mlp, embed]."""
    arrays = {}
    for stack in ("encoder", "decoder"):
        of_stack = f"model.{stack}"
        arrays[f"{stack}/embedder/input_embedding"] = weights[f"{of_stack}.embed_tokens.weight"]
        arrays[f"{stack}/final_norm/scale"] = weights[f"{of_stack}.norm.weight"]
        for i in range(2):
            layer = f"{of_stack}.layers.{i}"
            for ours, name in NORMS.items():
                if f"{layer}.{ours}.weight" in weights:
                    scale = weights[f"{layer}.{ours}.weight"]
                    arrays[f"{stack}/layer_{i}/{name}/scale"] = scale
            gates = [weights[f"{layer}.mlp.{name}_proj.weight"] for name in ("gate", "up")]
            gates = np.stack(gates if is_flipped else [gate.T for gate in gates])
            arrays[f"{stack}/layer_{i}/mlp/gating_einsum"] = gates
            arrays[f"{stack}/layer_{i}/mlp/linear"] = weights[f"{layer}.mlp.down_proj.weight"].T
            for module, name in (("self_attn", "attn"), ("cross_attn", "cross_attn")):
                if f"{layer}.{module}.q_proj.weight" in weights:
                    path = f"{stack}/layer_{i}/{name}"
                    arrays |= attention(weights, f"{layer}.{module}", path)
    return arrays


def attention(weights, module, path):
    def heads(name):
        matrix = weights[f"{module}.{name}_proj.weight"]
        return matrix.reshape(-1, HEAD_DIM, matrix.shape[1]).swapaxes(1, 2)

    out = weights[f"{module}.o_proj.weight"]
    return {
        f"{path}/q_einsum/w": heads("q"),
        f"{path}/kv_einsum/w": np.stack([heads("k"), heads("v")]),
        f"{path}/attn_vec_einsum/w": out.T.reshape(-1, HEAD_DIM, out.shape[0]),
    }


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    """Provides a T5Gemma in Hugging Face's format."""
    root = tmp_path_factory.mktemp("gemma")
    make_t5gemma("t5gemma", NUM_IDS, 2, 1).save_pretrained(root)
    save_tokenizer(root, gemmas_tokenizer())
    return root


def save(path, arrays):
    checkpointer = ocp.StandardCheckpointer()
    checkpointer.save(path, arrays)
    checkpointer.wait_until_finished()


@pytest.mark.parametrize("is_flat", [False, True])
def test_weights_are_those_of_the_other_format(directory, tmp_path, is_flat):
    arrays = theirs(load_file(directory / "model.safetensors"), is_flipped=is_flat)
    if is_flat:
        # The first keys joined to one.
        tree = {}
        for path, array in arrays.items():
            module, _, last = f"transformer/{path}".rpartition("/")
            tree.setdefault(module, {})[last] = array
    else:
        tree = unflatten_dict(arrays, sep="/")
    save(tmp_path / "flax", tree)
    found, expected = load(tmp_path / "flax", vocabulary=directory), load(directory)
    jax.tree.map(np.testing.assert_array_equal, found.params, expected.params)
    for name in ("num_heads", "num_kv_heads", "head_dim", "mlp_dim", "encoder_emb_dim"):
        assert getattr(found.config, name) == getattr(expected.config, name)
    assert found.config.attention_softcap == 50 and found.config.encoder_reach == (4095, 4095)
    generator = Generator.load(tmp_path / "flax", "early_exit:1", vocabulary=directory)
    options = GenerateOptions(gamma=2, max_decode_len=6)
    speculative, plain = (g.generate(TEXTS, options) for g in (generator, generator.plain()))
    assert [a[0].output_ids for a in speculative] == [a[0].output_ids for a in plain]


def test_missing_and_unknown_arrays_are_refused(directory, tmp_path):
    arrays = theirs(load_file(directory / "model.safetensors"), is_flipped=False)
    without = {path: array for path, array in arrays.items() if "layer_0/mlp" not in path}
    save(tmp_path / "a", unflatten_dict(without, sep="/"))
    assert "mlp/linear, which determines" in message_of(load, tmp_path / "a")
    more = arrays | {"decoder/layer_0/attn/_key_norm/scale": np.ones(HEAD_DIM, np.float32)}
    save(tmp_path / "b", unflatten_dict(more, sep="/"))
    assert "_key_norm" in message_of(load, tmp_path / "b", vocabulary=directory)
