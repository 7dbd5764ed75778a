# An image for Ascend 910B (Atlas A2). It has not been built: no NPU was available. In the folder of setup.py, with the
# CANN that fits the host's driver, and a MindSpore that fits this CANN (docs/ascend.md has the table):
#
#   docker build -f scripts/containers/ascend.Dockerfile -t mindnlp-dp-ascend \
#     --build-arg CANN=8.5.0-910b-ubuntu22.04-py3.11 --build-arg MINDSPORE=2.8.0 .
#
# A container needs the NPUs and the host's driver; with Ascend Docker Runtime these are the arguments:
#
#   docker run --rm --runtime ascend -e ASCEND_VISIBLE_DEVICES=0-7 --shm-size 16g mindnlp-dp-ascend mindnlp-dp doctor
#
# CANN's images are on https://quay.io/repository/ascend/cann.
ARG CANN=8.5.0-910b-ubuntu22.04-py3.11
FROM quay.io/ascend/cann:${CANN}
ARG MINDSPORE=2.8.0
WORKDIR /opt/mindnlp-dp
COPY setup.py pyproject.toml README.md LICENSE ./
COPY mindnlp_dp mindnlp_dp
# The first line is what CANN's Python packages need.
RUN pip install --no-cache-dir sympy protobuf attrs cloudpickle decorator ml-dtypes psutil scipy tornado jinja2 \
    && pip install --no-cache-dir "mindspore==$MINDSPORE" "mindnlp==0.4.1" ".[quickstart,report]"
COPY scripts scripts
COPY configs configs
ENV DEVICE_TARGET=Ascend
# MindSpore finds CANN only by the variables of this file, whose folder has another name before CANN 8.5.0.
RUN printf '%s\n' '#!/bin/bash' 'for folder in /usr/local/Ascend/cann /usr/local/Ascend/ascend-toolkit; do' \
      '  [ ! -f "$folder/set_env.sh" ] || { source "$folder/set_env.sh"; break; }' 'done' 'exec "$@"' \
      > /usr/local/bin/with-cann && chmod +x /usr/local/bin/with-cann
# The pods of scripts/kubernetes/ run as this user; files of the host's driver belong to it there, as HwHiAiUser.
RUN { getent passwd 1000 || useradd --uid 1000 --create-home trainer; } && chown 1000 /opt/mindnlp-dp
ENTRYPOINT ["with-cann"]
CMD ["mindnlp-dp", "doctor"]
