"""Metadata and extras of vrgd_tf."""

import pathlib
import re

from setuptools import setup

HERE = pathlib.Path(__file__).parent
VERSION = re.search(r'__version__ = "(.+)"', (HERE / "vrgd_tf/__init__.py").read_text()).group(1)

TENSORFLOW = ["tensorflow>=2.19,<2.22"]
# libtpu crashes with any jax but its own. There are wheels of it for Linux alone.
TPU_AOT = [
    f"{requirement}; sys_platform == 'linux' and platform_machine == 'x86_64' and python_version >= '3.11'"
    for requirement in ("jax==0.10.2", "libtpu==0.0.52")
]
SCRIPTS = ["absl-py>=2.1,<3", "matplotlib>=3.9,<4", "rich>=13.7,<16", "scikit-learn>=1.5,<2"]

setup(
    name="vrgd_tf",
    version=VERSION,
    description="Keras optimizers that scale gradients by their signal-to-noise ratio across replicas (VRGD)",
    long_description=(HERE / "README.md").read_text(),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    packages=["vrgd_tf", "tpu_scripts"],
    python_requires=">=3.10",
    install_requires=["keras>=3.10,<3.16"],
    extras_require={
        "tensorflow": TENSORFLOW,
        # TPU wheels end with TensorFlow 2.20; libtpu comes with them.
        "tpu": ["tensorflow-tpu>=2.19,<2.21"],
        # To export, run and compile TPU programs without a TPU: tpu_aot, benchmarks/tpu_program.py, tests/tpu.
        "tpu-aot": [*TPU_AOT, "matplotlib>=3.9,<4"],
        "scripts": SCRIPTS,
        "test": [*SCRIPTS, "hypothesis>=6.100,<7", "pytest>=8,<10", "pytest-xdist>=3.6,<4", "ruff>=0.9,<1"],
    },
    classifiers=[
        "Framework :: Keras",
        "Intended Audience :: Science/Research",
        "License :: OSI Approved :: Apache Software License",
        "Programming Language :: Python :: 3",
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
    ],
)
