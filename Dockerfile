# One file for CPU and CUDA.
#   docker build -t trainapp .
#   docker run --rm -v "$PWD/outputs:/workspace/outputs" trainapp model=resnet            add --gpus all for CUDA
# The package index's own torch for Linux runs on both. A CPU build of it makes the image gigabytes smaller:
#   docker build --build-arg PIP_EXTRA_INDEX_URL=<index of torch's CPU builds> -t trainapp .
# To own what a run writes: docker run --user "$(id -u):$(id -g)" ...

# Any Debian-based Python 3.11 to 3.14.
ARG BASE=python:3.11-slim
FROM ${BASE}

# train.compile=true compiles at run time.
RUN apt-get update -qq \
 && apt-get install -qqy --no-install-recommends g++ \
 && rm -rf /var/lib/apt/lists/*

# `trainapp` may only write to its home and to /workspace; HOME and USER also hold for another --user.
RUN useradd --create-home --uid 1000 trainapp \
 && chmod 777 /home/trainapp \
 && install -d -o trainapp -g trainapp /workspace \
 && install -d -o trainapp -g trainapp -m 777 /workspace/outputs
ENV HOME=/home/trainapp USER=trainapp

# The environment belongs to root. In variables, the pins also hold where pip builds packages.
ENV PATH=/opt/venv/bin:$PATH \
    PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_ROOT_USER_ACTION=ignore \
    PIP_CONSTRAINT=/src/constraints.lock PIP_BUILD_CONSTRAINT=/src/constraints.lock PIP_NO_REQUIRE_HASHES=1
WORKDIR /src
COPY constraints.lock pyproject.toml ./

# Where else pip may look, in its own variables; not kept in the image.
ARG PIP_EXTRA_INDEX_URL
ARG PIP_FIND_LINKS

# The dependencies come before the sources, so that a change of these installs nothing again.
RUN python -m venv /opt/venv \
 && sed -n '/^pip==/,/[^\\]$/p' constraints.lock > pip.txt \
 && env -u PIP_CONSTRAINT -u PIP_BUILD_CONSTRAINT -u PIP_NO_REQUIRE_HASHES pip install -q --no-deps --require-hashes -r pip.txt \
 && python -c "import tomllib; print(*tomllib.load(open('pyproject.toml', 'rb'))['project']['dependencies'], sep='\n')" > requirements.txt \
 && pip install -q -r requirements.txt

COPY README.md LICENSE ./
COPY conf conf
COPY src src
RUN pip install -q --no-deps .

USER trainapp
WORKDIR /workspace
VOLUME /workspace/outputs
ENTRYPOINT ["python", "-m", "trainapp"]
