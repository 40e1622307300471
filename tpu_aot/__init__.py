"""The program that a TPU runs, traced, exported, run on CPUs and compiled by libtpu, on a machine without a TPU."""
