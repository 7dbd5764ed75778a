# An image for CPU: for a laptop, and for scripts/kubernetes/. In the folder of setup.py:
#
#   docker build -f scripts/containers/cpu.Dockerfile -t mindnlp-dp .
#   docker run --rm --shm-size 4g mindnlp-dp mindnlp-dp doctor
#   docker run --rm --shm-size 4g mindnlp-dp \
#     mindnlp-dp run --nproc 2 scripts/finetune.py --config configs/quickstart_short_cpu.yaml
#
# The ranks of a host exchange gradients in /dev/shm, for which a container's default of 64 MB is too small.
FROM python:3.11-slim-bookworm
# MindSpore needs the first, OpenMPI's launcher the second.
RUN apt-get update \
    && apt-get install -y --no-install-recommends libgomp1 openssh-client \
    && rm -rf /var/lib/apt/lists/*
RUN useradd --uid 1000 --create-home trainer
USER trainer
WORKDIR /home/trainer/mindnlp-dp
ENV PATH=/home/trainer/.local/bin:$PATH DEVICE_TARGET=CPU
COPY --chown=trainer:trainer setup.py pyproject.toml README.md LICENSE ./
COPY --chown=trainer:trainer mindnlp_dp mindnlp_dp
# The version of MindSpore that all test suites run on.
RUN mindspore=$(python -c 'import runpy; print(runpy.run_path("mindnlp_dp/runtime/versions.py")["BEST_MINDSPORE"])') \
    && pip install --user --no-cache-dir ".[cpu,mpi,quickstart,report]" "mindspore==$mindspore"
COPY --chown=trainer:trainer scripts scripts
COPY --chown=trainer:trainer configs configs
CMD ["mindnlp-dp", "--help"]
