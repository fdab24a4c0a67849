"""Packaging of spec_t5x. Bounds are those that scripts/matrix.sh was run within."""

import shutil
from pathlib import Path

from setuptools import find_packages, setup
from setuptools.command.build_py import build_py

HERE = Path(__file__).parent


class BuildWithGinFiles(build_py):
    """Puts ``gin_configs``, which lies beside the package, inside an installed one."""

    def run(self):
        package = Path(self.build_lib, "spec_t5x").resolve()
        # --build-lib . builds where the sources are.
        is_apart = not self.editable_mode and package != HERE.resolve() / "spec_t5x"
        if is_apart:
            # pip builds in the clone, where the last build's files would be in the wheel, too.
            shutil.rmtree(package, ignore_errors=True)
        super().run()
        if is_apart:
            ignored = shutil.ignore_patterns("__pycache__")
            shutil.copytree(HERE / "gin_configs", package / "gin_configs", ignore=ignored)


setup(
    name="spec_t5x",
    version="0.2.0",
    description="Lossless speculative decoding for encoder-decoder T5 in JAX",
    long_description=(HERE / "README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    python_requires=">=3.11",
    packages=find_packages(include=["spec_t5x", "spec_t5x.*"]),
    # The default pair: Orbax directories, whose files have no common ending.
    package_data={
        "spec_t5x": [
            "pretrained/**/*",
            "contrib/*/README.md",
            "contrib/cpu/*.cc",
            "labs/reproduction/*.json",
            "labs/reproduction/*.jinja",
        ]
    },
    install_requires=[
        "jax>=0.7.2,<0.13",
        "flax>=0.11.2,<0.13",
        "tensorstore>=0.1.77,<0.2",
        "gin-config>=0.5,<0.6",
        "numpy>=2.0,<3",
        "sentencepiece>=0.2.1,<0.3",
        "safetensors>=0.6.1,<1",
        "ml_dtypes>=0.5,<1",
        "jaxtyping>=0.3.3,<0.4",
        # JAX too wants it, to bound its compilation cache.
        "filelock>=3.16,<5",
        "rich>=13.9,<16",
        # Earlier ones want a huggingface_hub before 1.0.
        "tokenizers>=0.22.1,<1",
        # Checkpoints by their names on the Hugging Face Hub.
        "huggingface_hub>=1.27,<3",
        # Tables of results, and the machine that they are from.
        "tabulate>=0.9,<1",
        "psutil>=5.9.5,<8",
        # Requirements, as doctor compares them with what is installed.
        "packaging>=23",
        # What TAB offers in a shell that asks spec-t5x.
        "argcomplete>=3.5,<4",
    ],
    # What one part needs (spec_t5x/machine/extras.py), then the machines and the developers'.
    extras_require={
        # Tasks by their names, with TensorFlow.
        "tasks": [
            "seqio>=0.0.20,<0.1",
            # Earlier ones want a protobuf before 6, which tensorflow-metadata 1.21 cannot take.
            "tensorflow>=2.20,<3",
            # TFDS imports it when it prepares a data set, and asks for it on old Pythons only.
            "importlib_resources>=6,<8",
        ],
        # BLEU and ROUGE.
        "eval": ["sacrebleu>=2.5,<3", "rouge-score>=0.1.2,<0.2"],
        "train": [
            "spec_t5x[eval]",
            "optax>=0.2.6,<0.3",
            "orbax-checkpoint>=0.11.30,<0.13",
            # TensorBoard's curves: clu requires neither, and TensorFlow 2.21 no TensorBoard.
            "clu>=0.0.12,<0.1",
            "tensorboard>=2.19,<3",
            "tensorflow>=2.18,<3",
        ],
        # The figures and the page of ``spec-t5x reproduce``.
        "plots": ["matplotlib>=3.9,<4", "jinja2>=3.1,<4"],
        # Reading pytorch_model.bin, and the implementation that tests compare with.
        "hf": ["torch>=2.6", "transformers>=5.1,<6"],
        # JAX for these machines, in the version that is installed or the newest. The set-ups
        # pin it (scripts/constraints.txt).
        "tpu": ["jax[tpu]"],
        "gpu": ["jax[cuda12]"],
        # What T5X and the tasks of ``t5`` import. Both come without their own requirements, which
        # are from git and break, or bring PyTorch (scripts/setup_env.sh).
        "t5x": [
            "spec_t5x[tasks,train]",
            "absl-py",
            "babel>=2.17,<3",
            "cached-property==2.0.1",
            "chex>=0.1.90,<0.2",
            "editdistance>=0.8,<1",
            "fiddle==0.3.1",
            "grain==0.2.18",
            "nltk>=3.9,<4",
            "pandas>=2.2,<4",
            "scikit-learn>=1.6,<2",
        ],
        # Compiling for a TPU without one (spec-t5x compile-tpu).
        "tpu-compile": ["libtpu>=0.0.42,<0.1; platform_system == 'Linux'"],
        # The page of ``spec-t5x demo``.
        "demo": ["gradio>=6.24,<7"],
        # Running the notebooks where Colab does not.
        "notebooks": [
            "spec_t5x[eval,plots]",
            "ipykernel>=6,<8",
            "ipywidgets>=7.7,<9",
            "nbclient>=0.10,<1",
        ],
        # The site of the documentation (scripts/docs.sh).
        "docs": [
            # For signatures.
            "black>=24",
            "mkdocs>=1.6,<2",
            "mkdocs-material>=9.6,<10",
            "mkdocstrings[python]>=1,<2",
        ],
        "test": [
            "spec_t5x[demo,docs,notebooks,tasks,tpu-compile,train]",
            "beartype>=0.22,<1",
            "build>=1.2,<2",
            "ctranslate2>=4.6,<5",
            "hypothesis>=6.130,<7",
            # The plug-in of earlier ones begins after conftest.py has imported the package.
            "jaxtyping>=0.3.6,<0.4",
            "pytest>=8.4,<10",
            "pytest-xdist>=3.6,<4",
            "scipy>=1.14,<2",
            "selenium>=4.30,<5",
            "setuptools>=75",
            # One version: the tests compare with it token for token.
            "torch==2.13.0",
            "transformers>=5.1,<6",
            "wheel",
        ],
    },
    cmdclass={"build_py": BuildWithGinFiles},
    entry_points={"console_scripts": ["spec-t5x = spec_t5x.cli.main:main"]},
)
