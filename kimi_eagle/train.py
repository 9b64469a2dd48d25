"""Train an EAGLE-3 head from stored hidden states: `python -m kimi_eagle.train CONFIG.json`, or `train(TrainConfig)`.

CONFIG.json holds the fields of TrainConfig. `nproc` above one starts as many processes (torch's elastic launcher; gloo on
the CPU, NCCL on GPUs), each with its share of the rows; gradients are summed, so the steps are those of one large batch.
A run that was killed continues from its newest state when it is started again with the same settings.
"""

import ctypes
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

from kimi_eagle.errors import BadInput, KimiEagleError, StageFailed
from kimi_eagle.training.settings import TrainConfig, TrainResult

__all__ = ["TrainConfig", "TrainResult", "train"]

PR_SET_PDEATHSIG = 1  # from linux/prctl.h


def train(config: TrainConfig) -> TrainResult:
    """Train (or resume, or return at once what is finished already) and return the selected head and its figures.

    Raises BadInput for settings, stores or maps that do not fit, MissingCapability for a missing device, StageFailed where
    a process of a run with several ends in error.
    """
    if config.nproc > 1:
        return _launch(config)
    from kimi_eagle.training.loop import Trainer

    return Trainer(config).run()


def _launch(config: TrainConfig) -> TrainResult:
    folder = Path(config.folder)
    folder.mkdir(parents=True, exist_ok=True)
    settings = folder / "settings.json"
    settings.write_text(config.model_dump_json(indent=1))
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={config.nproc}"]
    command += ["-m", "kimi_eagle.train", str(settings)]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, preexec_fn=_end_with_parent
    )
    last = []
    try:
        for line in process.stdout:  # text mode splits at the progress bar's carriage returns too
            last = [*last[-4:], line.strip()]
            print(line.rstrip(), end="\r" if "step/s" in line else "\n", file=sys.stderr)
    except BaseException:  # the reader was interrupted: the processes must not go on alone
        process.terminate()
        raise
    code = process.wait()
    if code:
        raise StageFailed(f"training: one of {config.nproc} processes ended with code {code}: {' | '.join(last)}")
    return TrainResult.model_validate_json((folder / "result.json").read_text())


def _end_with_parent() -> None:
    """Ask Linux to end this process with its parent, so that a killed kernel leaves no training behind."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)


def _worker(config: TrainConfig) -> TrainResult:
    import torch

    from kimi_eagle.training.device import device_of
    from kimi_eagle.training.loop import Trainer

    device = device_of(config.device)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    torch.distributed.init_process_group("nccl" if device.type == "cuda" else "gloo")
    try:
        rank, world = torch.distributed.get_rank(), torch.distributed.get_world_size()
        return Trainer(config, rank, world).run()
    finally:
        torch.distributed.destroy_process_group()


def main(arguments: list[str]) -> int:
    """Command-line entry; returns the exit code."""
    if len(arguments) != 1:
        print("usage: python -m kimi_eagle.train CONFIG.json", file=sys.stderr)
        return BadInput.exit_code
    try:
        try:
            values = json.loads(Path(arguments[0]).read_text())
        except (OSError, ValueError) as error:
            raise BadInput(f"training settings {arguments[0]}: cannot be read ({error}).") from None
        config = TrainConfig.of(**values)
        launched = "TORCHELASTIC_RUN_ID" in os.environ
        result = _worker(config) if launched else train(config)
        if os.environ.get("RANK", "0") == "0":
            Path(config.folder, "result.json").write_text(result.model_dump_json(indent=1))
            if not launched:
                print(
                    f"head with simulated acceptance length {result.acceptance_length:.3f} after {result.steps} steps"
                )
    except KimiEagleError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
