"""Command `python -m loadtest.lab.gpu`: what can be known of this machine's GPUs, as a Markdown table.

It takes a CUDA context on each GPU for a moment, about half a GiB, and changes nothing.
"""

import argparse

from loadtest.lab.gpu.facts import report
from sidecar.gpus.nvml import NVML

if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m loadtest.lab.gpu", description=__doc__)
    parser.parse_args()
    print(report(NVML()))
