"""Three ranks in three processes, each loading its part of models through vLLM's own loaders with the plugin on.

argv: a folder, then models' folders. What `model` on a rank holds is written to folder/model/rank.safetensors, as it
was loaded: kernels that this machine has not are stand-ins, so nothing is repacked for them.
"""

import multiprocessing
import os
import sys
from pathlib import Path
from unittest import mock

import torch
from one_rank import any_kernel
from safetensors.torch import save_file
from vllm.config import set_current_vllm_config
from vllm.distributed import init_distributed_environment, initialize_model_parallel
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.model_loader import base_loader, get_model

RANKS = 3


def one(rank: int, out: Path, folders: list[Path]) -> None:
    with mock.patch.object(torch.accelerator, "empty_cache"):  # as vLLM's own CPU worker does
        load_all(rank, out, folders)


def load_all(rank: int, out: Path, folders: list[Path]) -> None:
    started = False
    for folder in folders:
        serve = EngineArgs(
            model=str(folder), tensor_parallel_size=RANKS, dtype="float16", enforce_eager=True, skip_tokenizer_init=True
        ).create_engine_config()
        repacking = mock.patch.object(base_loader, "process_weights_after_loading")
        with set_current_vllm_config(serve), any_kernel(), repacking:
            if not started:
                init_distributed_environment(RANKS, rank, f"file://{out}/group", rank, "gloo")
                initialize_model_parallel(RANKS)
                started = True
            model = get_model(vllm_config=serve)
        held = {name: p.detach().contiguous().clone() for name, p in model.named_parameters() if p.numel()}
        save_file(held, out / folder.name / f"{rank}.safetensors")


def main() -> None:
    out, *folders = (Path(given) for given in sys.argv[1:])
    for folder in folders:
        (out / folder.name).mkdir(parents=True)
    shared = os.environ["VLLM_DIST_IDENT"] = f"three_ranks_{os.getpid()}"  # names the ranks' shared memory
    start = multiprocessing.get_context("fork")  # one import of vLLM
    ranks = [start.Process(target=one, args=(rank, out, folders)) for rank in range(RANKS)]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join()
    for left in Path("/dev/shm").glob(f"{shared}-*"):  # vLLM leaves it there
        left.unlink()
    sys.exit(max(abs(process.exitcode or 0) for process in ranks))


if __name__ == "__main__":
    main()
