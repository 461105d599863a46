"""Nothing in a checkpoint is executed, even if its manifest matches."""

import io
import os
import pickle

import pytest
import runs
import torch
from states import METADATA, VALUES, vouch_for

from trainapp.checkpoint import shards
from trainapp.checkpoint.directory import damage
from trainapp.checkpoint.manifest import read_manifest, write_manifest
from trainapp.errors import UserError

MLP = runs.MODELS["mlp"]


class Payload:
    """A pickle that must never run: it makes a directory."""

    def __init__(self, marker):
        self.marker = marker

    def __reduce__(self):
        return os.mkdir, (str(self.marker),)


def plant(path, file, marker):
    """Put the payload into one of the checkpoint's two files that hold pickles."""
    if file == VALUES:
        torch.save({**torch.load(path / VALUES, weights_only=True), "extra": Payload(marker)}, path / VALUES)
    else:
        metadata = pickle.loads((path / METADATA).read_bytes())
        metadata.planner_data = Payload(marker)
        (path / METADATA).write_bytes(pickle.dumps(metadata))
    vouch_for(path, file)


@pytest.mark.parametrize("file", [VALUES, METADATA])
def test_a_planted_payload_does_not_run(tmp_path, file):
    run_dir, marker = tmp_path / "run", tmp_path / "payload-ran"
    runs.run_until(run_dir, 2, *MLP)
    path = runs.checkpoint(run_dir, 2)
    plant(path, file, marker)
    assert damage(path) is None
    message = {VALUES: "more than tensors and plain values", METADATA: "its metadata is not a checkpoint's"}[file]
    with pytest.raises(UserError, match=message) as caught:
        runs.run(run_dir, *MLP)
    assert str(path) in str(caught.value)
    assert not marker.exists()
    if file == VALUES:  # shows that the payload does run
        torch.load(path / VALUES, weights_only=False)
    else:
        pickle.loads((path / METADATA).read_bytes())
    assert marker.exists()


NAMES = ["Popen", "Metadata.__init__", "torch._strobelight.cli_function_profiler.subprocess.Popen", "os.system"]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("module", ["torch.distributed.checkpoint.metadata", "torch"])
def test_only_the_classes_of_metadata_by_their_exact_names(tmp_path, module, name):
    """A dotted name reaches anything that an allowed module imports: `metadata` + `torch....subprocess.Popen`."""
    path, marker = tmp_path / METADATA, tmp_path / "payload-ran"
    arguments = pickle.dumps((["touch", str(marker)],), protocol=4)[2:-1]
    path.write_bytes(b"\x80\x04" + b"c" + module.encode() + b"\n" + name.encode() + b"\n" + arguments + b"R.")
    with pytest.raises(UserError, match="its metadata is not a checkpoint's"):
        shards.sizes(tmp_path)
    assert not marker.exists()


def test_members_of_an_enum_are_named_by_getattr(tmp_path):
    """As Python 3.11.0 to 3.11.3 pickle them. Nothing else is reached that way."""

    def pickled(kind: str, member: str) -> bytes:
        return f"cbuiltins\ngetattr\n(ctorch.distributed.checkpoint.metadata\n{kind}\nV{member}\ntR.".encode()

    load = lambda text: shards._Unpickler(io.BytesIO(text)).load()  # noqa: E731
    assert load(pickled("_MEM_FORMAT_ENCODING", "TORCH_CHANNELS_LAST")).name == "TORCH_CHANNELS_LAST"
    with pytest.raises(pickle.UnpicklingError, match="it names"):
        load(pickled("Metadata", "__init__"))
    with pytest.raises(KeyError):
        load(pickled("_MEM_FORMAT_ENCODING", "__class__"))


@pytest.mark.parametrize("part", ["model", "task"])
def test_an_export_builds_nothing_that_only_the_checkpoint_allows(tmp_path, part):
    """Without settings of its own, `mode=export` builds what the checkpoint names: from the allowed packages alone."""
    run_dir = tmp_path / "run"
    runs.run_until(run_dir, 1, *MLP)
    path = runs.checkpoint(run_dir, 1)
    manifest = read_manifest(path)
    resume = ("mode=export", f"checkpointing.resume={run_dir}")
    runs.run(tmp_path / "sound", *resume)  # as it stands
    config = manifest["config"] | {"user_packages": ["os"]}
    changed = {
        "model": {"target": "os.system", "arguments": {"command": f"touch {tmp_path / 'payload-ran'}"}},
        "task": "os.abort",
    }
    write_manifest(path, manifest | {"config": config | {part: changed[part]}})
    with pytest.raises(UserError, match=r"os\.(system|abort): not among the packages that may be named here"):
        runs.run(tmp_path / "other", *resume)
    assert not (tmp_path / "payload-ran").exists()
