"""`oddrank synth`: a checkpoint with a published model's geometry and random values."""

from __future__ import annotations

import click
import msgspec

from oddrank.words import counted


@click.command("synth", short_help="Write a checkpoint with a published model's geometry and random values")
@click.argument("family")
@click.argument("out", type=click.Path())
@click.option("--format", "format_", default="bf16", show_default=True, metavar="F",
              help="bf16, fp8-block, nvfp4-mixed (ModelOpt), mxfp4, mxfp8, int8, int4-ct, awq, gptq, auto-round, ...: "
                   "an unknown one is answered with those of the family.")
@click.option("--size", metavar="NAME", help="A published size (27B, 35B-A3B, ...) or tiny; the largest by default.")
@click.option("--layers", type=click.IntRange(min=1), help="Layers, at most.  [default: 4; all with --headers-only]")
@click.option("--experts", type=click.IntRange(min=1), help="Experts a layer, at most.  [default: 8; all likewise]")
@click.option("--vocab", type=click.IntRange(min=8), help="Vocabulary, at most.  [default: 1024; all likewise]")
@click.option("--full-vocab", is_flag=True, help="The whole vocabulary.")
@click.option("--vision", is_flag=True, help="Inside a vision-language model, with its tower.")
@click.option(
    "--shards",
    type=click.IntRange(min=1),
    metavar="N",
    help="Numbered weight files; otherwise as the format's releases have them.",
)
@click.option("--headers-only", is_flag=True, help="Sparse files: whole headers, the weights a hole.")
@click.option("--seed", type=click.IntRange(min=0), default=0, show_default=True)
@click.option("--json", "as_json", is_flag=True, help="Print what was written as JSON.")
def command(
    family: str,
    out: str,
    format_: str,
    size: str | None,
    layers: int | None,
    experts: int | None,
    vocab: int | None,
    full_vocab: bool,
    vision: bool,
    shards: int | None,
    headers_only: bool,
    seed: int,
    as_json: bool,
) -> None:
    """Write a checkpoint of FAMILY (qwen3_5, llama, deepseek_v3, ...; a wrong name lists all) to the directory OUT.

    Every layer has the published sizes and tensor names; there are fewer layers, experts and tokens, unless options
    say otherwise. The values are random, seeded, and scaled so that the model runs; its tokenizer has a token a byte.
    """
    from oddrank.checkpoint import Checkpoint
    from oddrank.errors import OddrankError
    from oddrank.report import amount
    from oddrank.synth import describe_release, write_checkpoint, write_headers

    if full_vocab and vocab is not None:
        raise OddrankError("--full-vocab and --vocab contradict each other; give one.")
    cut = not headers_only
    release = describe_release(
        family,
        format_,
        size=size,
        layers=4 if layers is None and cut else layers,
        experts=8 if experts is None and cut else experts,
        vocab=1024 if vocab is None and cut and not full_vocab else vocab,
        vision=vision,
        seed=seed,
    )
    path = (write_headers if headers_only else write_checkpoint)(release, out, shards=shards)
    made = Checkpoint.open(path)
    size_of = sum(t.end - t.start for t in made.tensors.values())
    if as_json:
        report = {
            "path": str(path),
            "family": family,
            "format": format_,
            "tensors": len(made.tensors),
            "files": len(made.files),
            "bytes": size_of,
            "headers_only": headers_only,
        }
        click.echo(msgspec.json.encode(report))
        return
    tensors, files = counted(len(made.tensors), "tensor"), counted(len(made.files), "file")
    click.echo(f"{path}: {tensors} in {files}, {amount(size_of)}")
