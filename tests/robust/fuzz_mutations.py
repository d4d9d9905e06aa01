"""What can be wrong with a model directory. A mutation changes a model in memory and says in words what it did."""

from __future__ import annotations

import copy
from collections.abc import Callable
from random import Random
from typing import Any

from fuzz_model import BITS, CONFIG, INDEX, RAW, Model, Shard

INTEGERS = [
    *(0, 1, 2, 3, 5, 7, 16, 64, 100, 255, 4096, 65537, -1, -2),
    *(2**24, 2**31 - 1, 2**31, 2**32, 2**53, 2**63 - 1, 2**63, 2**64, 10**30, -(2**31), -(2**63), -(2**64)),
]
FLOATS = [0.0, 0.5, 1.0, 3.0, -1.5, 1e-320, 1e17, 1e308, -1e308]
WORDS = [
    *("x", "3", "null", "bfloat16", "float32", "BF16", "model", "full_attention", "sliding_attention"),
    *("linear_attention", "yarn", "gptq", "awq", "fp8", "compressed-tensors", "modelopt", "mxfp4", "int4", "Linear"),
    *("group", "channel", "block", "tensor", "tensor_group", "../x", "/etc/passwd"),
]
STRINGS = ["", *WORDS, "a" * 5000, "\x00", "\x1b[2J", "line\nbreak", "é", "\u2028", "re:.*", "re:(", ".*"]
PATTERNS = [
    *(
        "re:.*mlp.*",
        "re:(",
        r"re:(\w+\.?)+$x",
        "re:(.*)*x",
        "re:" + ".*" * 12 + "x",
        "re:a{99999999999}",
        "re:(?P<a>.)(?P<a>.)",
    ),
    *("re:" + "(" * 3000, "re:" + "(" * 300 + ")" * 300, "*" * 500, "*a" * 100, "[z-a]", "[!", "-:.*", "+:(", "re:\\"),
]
NAMES = [
    *("__metadata__", "", "\x00", "a" * 300, "é", "..", "line\nbreak", "lm_head.weight", "model.norm.weight"),
    *("model.embed_tokens.weight", "model.layers.0.self_attn.q_proj.weight", "model.layers.99.self_attn.q_proj.weight"),
    *("model.layers.-1.self_attn.q_proj.weight", "model.layers.0.self_attn.rotary_emb.inv_freq"),
    *("model.layers.00.mlp.up_proj.weight", "model.layers.0.mlp.experts.9.up_proj.weight"),
]
PATHS = [
    *(
        "../outside/{file}",
        "../../outside/{file}",
        "{outside}/{file}",
        "/etc/passwd",
        "/dev/zero",
        "/proc/self/environ",
    ),
    *("", ".", "..", "sub/{file}", "./{file}", "sub/../{file}", "..\\{file}", "{file}/", "%2e%2e/{file}", "a\x00b"),
    *("model.bin", "config.json", "x" * 300, "é.safetensors", "line\nbreak.safetensors", "missing.safetensors"),
]
FILES = [
    *(
        "model.safetensors",
        "model-00001-of-00001.safetensors",
        "model-00001-of-99999.safetensors",
        "model-x.safetensors",
    ),
    *("model-0-of-0.safetensors", f"model-{'9' * 40}-of-{'9' * 40}.safetensors", "model-00004-of-00003.safetensors"),
    *("adapter.safetensors", "model.bin", "model\n.safetensors", f"model-{chr(0x661)}-of-{chr(0x662)}.safetensors"),
    *(CONFIG, INDEX, "hf_quant_config.json", "quantize_config.json", "quant_config.json", "tokenizer_config.json"),
]
KEYS = [
    *("head_dim", "num_key_value_heads", "num_global_key_value_heads", "global_head_dim", "layer_types"),
    *("text_config", "language_config", "rope_scaling", "rope_parameters", "tie_word_embeddings", "sliding_window"),
    *("dtype", "torch_dtype", "num_experts", "num_local_experts", "n_routed_experts", "q_lora_rank"),
    *("mlp_only_layers", "attention_bias", "mtp_num_hidden_layers", "num_nextn_predict_layers", "quantization_config"),
    *("shared_expert_intermediate_size", "attn_output_gate", "first_k_dense_replace", "num_kv_shared_layers"),
    *("use_sliding_window", "architectures", "vision_config", "decoder_sparse_step", "full_attention_interval"),
    *("attention_k_eq_v", "linear_num_value_heads", "per_layer_config", "enable_moe_block", "use_double_wide_mlp"),
    *("dflash_config", "n_shared_experts", "hidden_size_per_layer_input", "num_mtp_layers", "num_experts_per_tok"),
]
"""Keys that some family looks for."""

BIG = [2**20, 2**22, 2**24, 2**31 - 1]
CUTS = [0, 1, 7, 8, 9, 16, 100]

Mutation = Callable[[Random, Model, list[Model]], str]


def odd(rng: Random, depth: int = 2) -> Any:
    """A value that is seldom right."""
    kind = rng.randrange(9 if depth else 7)
    if kind < 2:
        return rng.choice(INTEGERS)
    if kind == 7:
        return [odd(rng, depth - 1) for _ in range(rng.choice([0, 1, 2, 5]))]
    if kind == 8:
        keys = ["", "type", "rope_type", "full_attention", "weights", "num_bits", "group_size", "é", "0", "-1"]
        return {rng.choice(keys): odd(rng, depth - 1) for _ in range(rng.randrange(4))}
    return rng.choice([FLOATS, STRINGS, [None, True, False], list(RAW), [rng.randrange(300)]][kind - 2])


def nested(rng: Random) -> str:
    """A document that goes deep."""
    depth = rng.choice([63, 64, 65, 500, 990, 1010, 5000, 200_000])
    opening, closing = rng.choice([("[", "]"), ('{"a":', "}"), ('{"text_config":', "}")])
    return opening * depth + "1" + closing * (depth if rng.random() < 0.8 else depth - 1)


def places(value: Any) -> list[tuple[Any, Any]]:
    """Every (container, key) within a JSON value."""
    found: list[tuple[Any, Any]] = []
    left = [value]
    while left:
        holder = left.pop()
        for key in holder if isinstance(holder, dict) else range(len(holder)):
            found.append((holder, key))
            if isinstance(holder[key], (dict, list)):
                left.append(holder[key])
    return found


def some_place(rng: Random, value: Any) -> tuple[Any, Any] | None:
    found = places(value) if isinstance(value, (dict, list)) else []
    return rng.choice(found) if found else None


def document(rng: Random, model: Model) -> str:
    """A document's name: the config half of the time."""
    return CONFIG if rng.random() < 0.5 or not model.documents else rng.choice(list(model.documents))


# -- documents --------------------------------------------------------------------------------------------------


def value(rng: Random, model: Model, _: list[Model]) -> str:
    file = document(rng, model)
    place = some_place(rng, model.documents.get(file))
    if place is None:
        return "nothing"
    holder, key = place
    holder[key] = odd(rng)
    return f"{file} {key!r} = {holder[key]!r:.80}"


def number(rng: Random, model: Model, _: list[Model]) -> str:
    """A number of the config becomes another that might be one."""
    numbers = [p for p in places(model.documents.get(CONFIG) or {}) if type(p[0][p[1]]) in (int, float)]
    if not numbers:
        return "nothing"
    holder, key = rng.choice(numbers)
    was = holder[key]
    holder[key] = rng.choice([was + 1, was - 1, was * 2, was // 2, was * 3, -was, 0, rng.choice(INTEGERS), was + 0.5])
    return f"config {key!r} {was} -> {holder[key]}"


def removed(rng: Random, model: Model, _: list[Model]) -> str:
    file = document(rng, model)
    place = some_place(rng, model.documents.get(file))
    if place is None:
        return "nothing"
    del place[0][place[1]]
    return f"{file} without {place[1]!r}"


def swapped(rng: Random, model: Model, _: list[Model]) -> str:
    first, second = (some_place(rng, model.documents.get(CONFIG)) for _ in range(2))
    if first is None or second is None:
        return "nothing"
    (a, i), (b, j) = first, second
    a[i], b[j] = copy.deepcopy(b[j]), copy.deepcopy(a[i])
    return f"config {i!r} and {j!r} swapped"


def of_another(rng: Random, model: Model, every: list[Model]) -> str:
    """A key of another model's config, or its whole config."""
    other = rng.choice(every)
    theirs, ours = other.documents[CONFIG], model.documents.get(CONFIG)
    key = rng.choice(["model_type", "quantization_config", "text_config", *theirs])
    if not isinstance(ours, dict) or rng.random() < 0.1:
        model.documents[CONFIG] = copy.deepcopy(theirs)
        return f"config of {other.name}"
    if key in theirs:
        ours[key] = copy.deepcopy(theirs[key])
    return f"config {key!r} of {other.name}"


def quantization(rng: Random, model: Model, every: list[Model]) -> str:
    """What is said of how it is quantized, changed; where nothing is, something is."""
    config = model.documents.get(CONFIG)
    if not isinstance(config, dict):
        return "nothing"
    if not isinstance(config.get("quantization_config"), dict) or rng.random() < 0.2:
        others = [m for m in every if "quantization_config" in m.documents[CONFIG]]
        other = rng.choice(others)
        found = copy.deepcopy(other.documents[CONFIG]["quantization_config"])
        where = rng.choice(["quantization_config", "text", *(f for f in FILES if "quant" in f)])
        if where.endswith(".json"):
            model.documents[where] = found
        elif where == "text" and isinstance(config.get("text_config"), dict):
            config["text_config"]["quantization_config"] = found
        else:
            config["quantization_config"] = found
        said = f"{where} of {other.name}"
    else:
        found, said = config["quantization_config"], "quantization_config"
    place = some_place(rng, found)
    if place is not None and rng.random() < 0.8:
        holder, key = place
        holder[key] = odd(rng)
        said += f" {key!r} = {holder[key]!r:.80}"
    return said


def added(rng: Random, model: Model, _: list[Model]) -> str:
    """A key that the config did not have and some code looks for."""
    config = model.documents.get(CONFIG)
    if not isinstance(config, dict):
        return "nothing"
    inner = config.get("text_config")
    holder = inner if isinstance(inner, dict) and rng.random() < 0.7 else config
    key = rng.choice(KEYS)
    holder[key] = odd(rng)
    return f"config {key!r} = {holder[key]!r:.80}"


def not_an_object(rng: Random, model: Model, _: list[Model]) -> str:
    file = document(rng, model)
    model.documents[file] = odd(rng)
    return f"{file} is {model.documents[file]!r:.80}"


def deep(rng: Random, model: Model, _: list[Model]) -> str:
    file = rng.choice(model.names())
    text = nested(rng)
    place = some_place(rng, model.documents.get(file))
    if file in model.shards:
        raw = text.encode()
        model.whole[file] = len(raw).to_bytes(8, "little") + raw
    elif place is not None and rng.random() < 0.5:
        value_: Any = 1
        for _ in range(rng.choice([20, 62, 64, 70, 300])):
            value_ = rng.choice([[value_], {"text_config": value_}])
        place[0][place[1]] = value_
        return f"{file} deep at {place[1]!r}"
    else:
        model.whole[file] = text.encode()
    return f"{file} nested deeply ({len(text)} characters)"


def twice(rng: Random, model: Model, _: list[Model]) -> str:
    """A key of a JSON document used twice."""
    file = rng.choice(list(model.documents))
    key = rng.choice([*model.documents[file]] or ["x"]) if isinstance(model.documents[file], dict) else "x"
    model.edits.append((file, 0.0, 1, f'{{"{key}": {rng.choice(["1", "null", "{}", "[]"])},'.encode()))
    return f"{file} has {key!r} twice"


def pattern(rng: Random, model: Model, _: list[Model]) -> str:
    """A pattern of module names where such are looked for."""
    config, said = model.documents.get(CONFIG), rng.choice(PATTERNS)
    if not isinstance(config, dict):
        return "nothing"
    scheme = {"num_bits": rng.choice([4, 8]), "type": "int", "strategy": "channel"}
    config["quantization_config"] = rng.choice([
        {"quant_method": "gptq", "bits": 4, "group_size": 32, "dynamic": {said.removeprefix("re:"): {}}},
        {"quant_method": "compressed-tensors", "ignore": [said], "config_groups": {"a": {"weights": scheme}}},
        {"quant_method": "compressed-tensors", "config_groups": {"a": {"targets": [said], "weights": scheme}}},
        {"quant_method": "modelopt", "quant_algo": "FP8", "exclude_modules": [said]},
        {"quant_method": "modelopt", "quantized_layers": {said: {"quant_algo": "FP8"}}},
        {"quant_method": "quark", "exclude": [said]}, {"quant_method": "fp8", "modules_to_not_convert": [said]},
        {"quant_method": "auto-round", "bits": 4, "extra_config": {said: {"bits": 8}}},
    ])  # fmt: skip
    return f"quantization_config {config['quantization_config']!r:.120}"


# -- the index --------------------------------------------------------------------------------------------------


def indexed(model: Model, folder: str = "") -> None:
    """An index that is right, of files in `folder`."""
    placed = {n: folder + f for f, s in model.shards.items() for n, _ in s.entries}
    model.documents[INDEX] = {"weight_map": placed}


def index_path(rng: Random, model: Model, _: list[Model]) -> str:
    file = rng.choice(list(model.shards) or ["x"])
    if INDEX not in model.documents:
        indexed(model)
    index = model.documents[INDEX]
    placed = index.get("weight_map") if isinstance(index, dict) else None
    if not isinstance(placed, dict) or not placed:
        return "nothing"
    path = rng.choice(PATHS).replace("{file}", file)
    names = [rng.choice(list(placed))] if rng.random() < 0.5 else [n for n, f in placed.items() if f == file]
    placed.update(dict.fromkeys(names, path))
    return f"index gives {len(names)} tensors the file {path!r:.80}"


def index_names(rng: Random, model: Model, _: list[Model]) -> str:
    index = model.documents.get(INDEX)
    placed = index.get("weight_map") if isinstance(index, dict) else None
    if not isinstance(placed, dict) or not placed:
        return "nothing"
    name = rng.choice(list(placed))
    kind = rng.randrange(4)
    if kind == 0:
        del placed[name]
    elif kind == 1:
        placed[rng.choice(NAMES)] = placed.pop(name)
    elif kind == 2:
        placed[name] = rng.choice(list(model.shards) or ["x"])
    else:
        placed[name] = odd(rng)
    return f"index {['drops', 'renames', 'moves', 'maltreats'][kind]} {name!r}"


# -- headers ----------------------------------------------------------------------------------------------------


def shard_of(rng: Random, model: Model) -> tuple[str, Shard] | None:
    filled = [(file, shard) for file, shard in model.shards.items() if shard.entries]
    return rng.choice(filled) if filled else None


def sound(shard: Shard) -> bool:
    """Can its offsets be computed?"""
    return all(
        isinstance(e, dict) and e.get("dtype") in BITS and isinstance(e.get("shape"), list)
        and all(type(n) is int and n >= 0 for n in e["shape"])
        for _, e in shard.entries
    )  # fmt: skip


def sound_entry(rng: Random, model: Model) -> tuple[Shard, str, dict[str, Any]] | None:
    """A tensor, by name and fields, of a shard whose offsets can be computed."""
    found = shard_of(rng, model)
    if found is None or not sound(found[1]):
        return None
    name, fields = rng.choice(found[1].entries)
    return found[1], name, fields


def lay(shard: Shard) -> None:
    if sound(shard):
        shard.lay()


def entry(rng: Random, model: Model, _: list[Model]) -> str:
    """One field of one entry."""
    found = shard_of(rng, model)
    if found is None:
        return "nothing"
    name, fields = rng.choice(found[1].entries)
    if not isinstance(fields, dict) or not fields:
        return "nothing"
    key = rng.choice([*fields, "extra"])
    kind = rng.randrange(4)
    if kind == 0:
        fields.pop(key, None)
    elif kind == 1 or not isinstance(fields.get(key), list):
        fields[key] = odd(rng)
    elif kind == 2 and fields[key]:
        fields[key][rng.randrange(len(fields[key]))] = odd(rng, 0)
    else:
        fields[key] = fields[key] + [rng.choice(INTEGERS)] * rng.choice([1, 1, 2, 31, 40])
    return f"{name!r} {key} = {fields.get(key)!r:.80}"


def dtype(rng: Random, model: Model, _: list[Model]) -> str:
    """Another dtype, with offsets that agree half of the time."""
    found = sound_entry(rng, model)
    if found is None:
        return "nothing"
    shard, name, fields = found
    fields["dtype"] = rng.choice([*BITS, "F4", "Q4_0", "bfloat16", "F6_E2M3", "C64", "bf16"])
    if rng.random() < 0.7:
        lay(shard)
    return f"{name!r} is {fields['dtype']}"


def shape(rng: Random, model: Model, _: list[Model]) -> str:
    """Another shape, with offsets that agree."""
    found = sound_entry(rng, model)
    if found is None:
        return "nothing"
    shard, name, fields = found
    shape_ = fields["shape"]
    kind = rng.randrange(6)
    if kind == 0 or not shape_:
        shape_.append(rng.choice([1, 2, 0]))
    elif kind == 1:
        shape_.reverse()
    elif kind == 2:
        shape_.pop()
    else:
        place = rng.randrange(len(shape_))
        n = shape_[place]
        shape_[place] = rng.choice([n + 1, max(n - 1, 0), 2 * n, n // 2, 3 * n, 0, 1, 2**20, 2**31, 2**40])
    lay(shard)
    return f"{name!r} is {shape_}"


def resized(rng: Random, model: Model, _: list[Model]) -> str:
    """One number of the config and every dimension that equals it: a consistent model of another size, perhaps."""
    config = model.documents.get(CONFIG)
    sizes = [p for p in places(config or {}) if type(p[0][p[1]]) is int and p[0][p[1]] > 1]
    if not sizes or not all(map(sound, model.shards.values())):
        return "nothing"
    holder, key = rng.choice(sizes)
    was = holder[key]
    now = rng.choice([was + 1, was - 1, 2 * was, 3 * was, was // 2, was + 8, was + 64, 1, 0, 2**14, *BIG])
    holder[key] = now
    for shard in model.shards.values():
        for _, fields in shard.entries:
            fields["shape"] = [now if n == was else n for n in fields["shape"]]
        shard.lay()
    return f"config {key!r} and dimensions {was} -> {now}"


def tensor(rng: Random, model: Model, _: list[Model]) -> str:
    """A tensor dropped, renamed, there twice, or under another's name. The index follows half of the time."""
    found = shard_of(rng, model)
    if found is None or not sound(found[1]):
        return "nothing"
    file, shard = found
    place = rng.randrange(len(shard.entries))
    name, fields = shard.entries[place]
    kind = rng.choice(["dropped", "renamed", "repeated", "in another file", "exchanged", "suffixed"])
    if kind == "dropped":
        del shard.entries[place]
    elif kind == "renamed":
        shard.entries[place] = (rng.choice(NAMES), fields)
    elif kind == "suffixed":
        suffix = rng.choice(
            ["_scale", "_scale_inv", ".weight", "_packed", "s", "_zero_point", "_shape", "_g_idx", "\n"]
        )
        shard.entries[place] = (name + suffix, fields)
    elif kind == "repeated":
        shard.entries.append((name, copy.deepcopy(fields)))
    elif kind == "in another file":
        other = rng.choice(list(model.shards.values()))
        other.entries.append((name, copy.deepcopy(fields)))
        if rng.random() < 0.5:
            shard.entries.pop(place)
        lay(other)
    else:
        other_place = rng.randrange(len(shard.entries))
        other_name, other_fields = shard.entries[other_place]
        shard.entries[place], shard.entries[other_place] = (name, other_fields), (other_name, fields)
    lay(shard)
    index = model.documents.get(INDEX)
    if rng.random() < 0.5 and isinstance(index, dict):
        indexed(model)
    return f"{name!r} of {file} {kind}"


def layer_dropped(rng: Random, model: Model, _: list[Model]) -> str:
    """Every tensor whose name has one part of some tensor's name."""
    found = shard_of(rng, model)
    if found is None or not all(map(sound, model.shards.values())):
        return "nothing"
    part = rng.choice(rng.choice(found[1].entries)[0].split(".") or [""])
    to = rng.choice([None, "x", "0", "1", "2", "7", part + "s", ""])
    for shard in model.shards.values():
        if to is None:
            shard.entries = [(n, e) for n, e in shard.entries if part not in n.split(".")]
        else:
            shard.entries = [(".".join(to if p == part else p for p in n.split(".")), e) for n, e in shard.entries]
        shard.lay()
    if isinstance(model.documents.get(INDEX), dict):
        indexed(model)
    return f"{part!r} in names -> {to!r}"


def length(rng: Random, model: Model, _: list[Model]) -> str:
    found = shard_of(rng, model)
    if found is None:
        return "nothing"
    file, shard = found
    true = len(shard.header())
    lies = [0, 1, 2, true - 1, true + 1, true + shard.data, true + shard.data + 1]
    shard.length = rng.choice([*lies, 10**8, 10**8 + 1, 2**31, 2**32 + true, 2**63, 2**64 - 1])
    return f"{file} says its header has {shard.length} bytes, not {true}"


def metadata(rng: Random, model: Model, _: list[Model]) -> str:
    found = shard_of(rng, model)
    if found is None:
        return "nothing"
    found[1].metadata = rng.choice([odd(rng), {"format": odd(rng)}, {"x" * 1000: "y" * 100_000}, {'a\\"b': "\\"}])
    return f"{found[0]} __metadata__ = {found[1].metadata!r:.80}"


# -- bytes and files --------------------------------------------------------------------------------------------


def bytes_(rng: Random, model: Model, _: list[Model]) -> str:
    """Bytes anywhere in a file replaced, removed or put in."""
    file = rng.choice(model.names())
    where = rng.choice([rng.random(), rng.random(), 0.0, 1.0])
    strange = [b"\xff", b"\x00", b"\xc3\x28", b"\xed\xa0\x80", b"\xef\xbb\xbf", rng.randbytes(1), rng.randbytes(8)]
    instead = rng.choice([*strange, b"", b'"', b"{", b"}", b"\\", b",", b" ", b"9"])
    count = rng.choice([0, 1, 1, 2, 50])
    model.edits.append((file, where, count, instead))
    return f"{file} at {where:.4f}: {count} bytes -> {instead!r}"


def cut(rng: Random, model: Model, _: list[Model]) -> str:
    file = rng.choice(model.names())
    model.sizes[file] = rng.choice([*CUTS, rng.randrange(6000), 10**9])
    return f"{file} cut or stretched to {model.sizes[file]} bytes"


def whole(rng: Random, model: Model, _: list[Model]) -> str:
    file = rng.choice(model.names())
    known = [b"\x80\x02}", b"GGUF\x03\x00\x00\x00", b"version https://git-lfs.github.com/spec/v1\n"]
    empty = [b"", b"{}", b"[]", b"null", b" ", b"\x00" * 8, b"\x02" + b"\x00" * 7 + b"{}"]
    model.whole[file] = rng.choice([*known, *empty, rng.randbytes(40)])
    return f"{file} is {model.whole[file][:40]!r}"


def link(rng: Random, model: Model, _: list[Model]) -> str:
    """A file becomes a link: out of the directory, to itself, to nothing, to a directory, to another file."""
    file = rng.choice(model.names())
    other = rng.choice(model.names())
    out = ["{outside}/" + file, "{outside}/" + file, "{outside}", "../../../outside/" + file]
    system = ["/dev/zero", "/etc/passwd", "/proc/self/mem"]
    to = rng.choice([*out, *system, file, "nowhere", ".", other, "./" + other, "../model/" + other])
    model.links[file] = to
    return f"{file} is a link to {to}"


def linked_folder(_: Random, model: Model, __: list[Model]) -> str:
    """The index looks for the weights in a folder that is a link out of the directory."""
    model.links["sub"] = "{outside}"
    indexed(model, "sub/")
    model.shards = {}
    return "index names files in a folder that is a link"


def pipe(rng: Random, model: Model, _: list[Model]) -> str:
    model.pipes.append(rng.choice(model.names()))
    return f"{model.pipes[-1]} is a named pipe"


def renamed(rng: Random, model: Model, _: list[Model]) -> str:
    """A weight file or document under another name, there twice, or gone."""
    files: dict[str, Any] = rng.choice([model.shards, model.shards, model.documents])
    if not files:
        return "nothing"
    file = rng.choice(list(files))
    name = rng.choice(FILES)
    kept = rng.random() < 0.3
    held = files[file] if kept else files.pop(file)
    if rng.random() < 0.7:
        files[name] = copy.deepcopy(held)
        return f"{file} {'also' if kept else 'renamed'} {name!r}"
    return f"{file} gone"


def without_index(rng: Random, model: Model, _: list[Model]) -> str:
    model.documents.pop(INDEX, None)
    return "no index"


MUTATIONS: list[tuple[int, Mutation]] = [
    *((16, resized), (8, value), (8, number), (8, quantization), (6, added), (6, entry), (6, tensor), (5, shape)),
    *((4, of_another), (4, layer_dropped), (4, bytes_), (4, dtype), (3, removed), (3, index_path), (3, index_names)),
    *((3, link), (3, pattern), (2, swapped), (2, deep), (2, length), (2, metadata), (2, cut), (2, renamed)),
    *((2, without_index), (1, not_an_object), (1, twice), (1, whole), (1, linked_folder), (1, pipe)),
]
"""Weight and mutation."""


def mutate(rng: Random, model: Model, every: list[Model]) -> list[str]:
    """One to five mutations of `model`, in words."""
    weights, functions = zip(*MUTATIONS, strict=True)
    said: list[str] = []
    for mutation in rng.choices(functions, weights, k=rng.choice([1, 1, 1, 1, 1, 2, 2, 3, 3, 5])):
        try:
            said.append(f"{mutation.__name__}: {mutation(rng, model, every)}")
        except (AttributeError, IndexError, KeyError, TypeError, ValueError):
            if not said:
                raise
            said.append(f"{mutation.__name__}: not after that")
    return said
