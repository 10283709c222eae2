# The image of the sidecar: one Python environment below /opt/stallwatch on top of a plain Python image.
#
#   docker build --build-arg PYTHON_IMAGE=python:3.13-slim-bookworm@sha256:... --tag stallwatch:0.1.0 .
#
# PYTHON_IMAGE is any image with python3 (3.11 or newer) and pip; a release names it by digest. Nothing else is fetched
# but the wheels of requirements/*.txt, each checked against its hash, none compiled: amd64 and arm64 alike. A package
# index of your own, or one behind a private authority, comes as build secrets that no layer keeps:
#
#   --secret id=pip.conf,src=pip.conf --secret id=ca.crt,src=ca.pem      (pip.conf says: cert = /run/secrets/ca.crt)

ARG PYTHON_IMAGE=python:3.13-slim-bookworm

FROM ${PYTHON_IMAGE} AS build
WORKDIR /src
ENV PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_CACHE_DIR=1 PIP_ROOT_USER_ACTION=ignore
COPY requirements/runtime.txt requirements/build.txt requirements/
RUN --mount=type=secret,id=pip.conf,target=/etc/pip.conf --mount=type=secret,id=ca.crt \
    python3 -m venv --without-pip /opt/stallwatch \
    && python3 -m venv --without-pip /opt/backend \
    && python3 -m pip --python /opt/stallwatch/bin/python install \
        --only-binary :all: --require-hashes --no-compile -r requirements/runtime.txt \
    && python3 -m pip --python /opt/backend/bin/python install \
        --only-binary :all: --require-hashes --no-compile -r requirements/build.txt
COPY pyproject.toml README.md LICENSE ./
COPY stallwatch stallwatch
COPY deploy/image/finish.py deploy/image/
RUN python3 -m pip --python /opt/backend/bin/python wheel --no-deps --no-index --no-build-isolation --wheel-dir /dist . \
    && python3 -m pip --python /opt/stallwatch/bin/python install --no-deps --no-index --no-compile /dist/*.whl \
    && /opt/stallwatch/bin/python deploy/image/finish.py /opt/stallwatch

FROM ${PYTHON_IMAGE}
ARG VERSION=0.1.0
ARG REVISION=unknown
ARG PYTHON_IMAGE
LABEL org.opencontainers.image.title="stallwatch" \
    org.opencontainers.image.description="Tells when readers of a vLLM server are being kept waiting, for how long, and why." \
    org.opencontainers.image.licenses="Apache-2.0" \
    org.opencontainers.image.version="${VERSION}" \
    org.opencontainers.image.revision="${REVISION}" \
    org.opencontainers.image.base.name="${PYTHON_IMAGE}"
COPY --from=build /opt/stallwatch /opt/stallwatch
# NVIDIA_VISIBLE_DEVICES is left to the manifest: some clusters refuse images that set it.
ENV PATH=/opt/stallwatch/bin:/usr/local/bin:/usr/bin:/bin \
    PYTHONDONTWRITEBYTECODE=1 \
    PYTHONUNBUFFERED=1 \
    NVIDIA_DRIVER_CAPABILITIES=utility
USER 65532:65532
EXPOSE 9709
STOPSIGNAL SIGTERM
# No HEALTHCHECK: it would start a Python process every few seconds beside the server. Kubernetes ignores it; the compose
# file has one of its own.
ENTRYPOINT ["/opt/stallwatch/bin/stallwatch"]
CMD ["run"]
